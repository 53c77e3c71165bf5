"""Recorded outcomes of Gymnasium's games agree with the state inside the games."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import outcomes

ROOT = Path(outcomes.__file__).parents[1]
OWN = [game for game in outcomes.GAMES if game.name.split()[0] not in ("GEM", "TextArena")]


@pytest.mark.parametrize("game", OWN, ids=lambda game: game.name)
def test_one_argument_labels_every_game_rightly_and_none_labels_no_game_wrongly(game: Any) -> None:
    said = outcomes.play(game, game.rule, 4, seed=7)
    assert said == {"won": said["won"], "right": 4, "wrong": 0, "unknown": 0} and said["won"]
    assert outcomes.play(game, None, 4, seed=7)["wrong"] == 0


def test_a_wrong_rule_is_seen() -> None:
    cart = next(game for game in OWN if game.name == "CartPole-v1")
    assert outcomes.play(cart, 1, 4, seed=7)["wrong"] == 2  # the rule of before: a positive return


def test_the_page_shows_the_committed_result() -> None:
    found = json.loads(outcomes.RESULT.read_text("utf-8"))
    page = (ROOT / "docs/envs/index.md").read_text("utf-8")
    assert {game.name for game in outcomes.GAMES} == set(found["games"])
    for name, row in found["games"].items():
        assert row["one"]["wrong"] == 0 and f"| {name} |" in page
        cells = [f"{row['none'][key]}" for key in ("right", "wrong", "unknown")]
        assert f"| {' | '.join(cells)} |" in page
