"""The card of a comparison: figures by hand, its page and its picture; cells that are kept and
found again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from experiential.cli.card import card_lines, card_table
from experiential.cli.evaluate import parse_arms, split_targets
from experiential.errors import ConfigError, MissingExtraError
from experiential.evaluation import picture
from experiential.evaluation.card import Card, make_card
from experiential.evaluation.cell import (
    Cell,
    cell_name,
    cell_of,
    cell_store,
    folder_digest,
    settings_digest,
)
from experiential.evaluation.page import write_page
from experiential.evaluation.picture import (
    draw_card,
    evaluation_curve,
    mean_curve,
    training_curve,
)
from experiential.evaluation.visits import Cost
from experiential.llm.metered import Spent
from experiential.recipe import load_experiment


def cell(
    arm: Any = "on",
    seed: int = 0,
    outcomes: tuple[str, ...] = ("01", "00"),
    recipe: str = "complementary",
    **told: Any,
) -> Cell:
    """Two worlds, two visits; costs of 10 prompt and 2 generated tokens for the actor, half of that
    for the extractor.
    """
    cost = Cost(
        seconds=3.0,
        actor=Spent(requests=4, prompt_tokens=10, generated_tokens=2, seconds=1.0),
        extractor=Spent(requests=2, prompt_tokens=5, generated_tokens=1, seconds=0.5),
    )
    facts = {
        "environment": "experiential/Vault-v0",
        "step": 3,
        "checkpoint": "c0",
        "version": "0.1.0",
        "cost": cost,
    }
    keys = {"settings": f"{recipe}-{seed}", "family": recipe, "run": f"{recipe}-{seed}"}
    return Cell(
        **(facts | keys | {"arm": arm, "seed": seed, "outcomes": outcomes, "recipe": recipe} | told)
    )


OUTCOMES = {
    "off": ("00", "10"),
    "on": ("01", "11"),
    "frozen": ("00", "11"),
    "shuffled": ("00", "00"),
    "placebo": ("00", "01"),
}
ALL_ARMS = [cell(arm, seed, outcomes) for seed in (0, 1) for arm, outcomes in OUTCOMES.items()]


def report(card: Card, arm: str) -> Any:
    return card.recipes[0].arm(arm)


class TestFigures:
    """Success, differences and cost."""

    def test_rates_differences_and_costs_by_hand(self) -> None:
        card = make_card(ALL_ARMS)
        on = report(card, "on")
        assert [(v.visit, v.successes, v.episodes) for v in on.visits] == [(1, 2, 4), (2, 4, 4)]
        assert (
            on.later.mean,
            report(card, "frozen").later.mean,
            report(card, "off").later.mean,
        ) == (1.0, 0.5, 0.0)
        found = {(d.first, d.second): d.interval.mean for d in card.recipes[0].differences}
        assert found == {
            ("on", "off"): 1.0,
            ("on", "shuffled"): 1.0,
            ("on", "placebo"): 0.5,
            ("on", "frozen"): 0.5,
            ("frozen", "off"): 0.5,
        }
        assert all((d.seeds, d.worlds) == (2, 2) for d in card.recipes[0].differences)
        cost = on.per_success  # 6 successes in 8 episodes, of two cells
        assert (cost.episodes, cost.seconds, cost.actor_tokens, cost.extractor_tokens) == (
            8 / 6,
            1.0,
            4.0,
            2.0,
        )
        assert (cost.actor_seconds, cost.extractor_seconds, on.actor.requests) == (2 / 6, 1 / 6, 8)
        assert report(card, "shuffled").per_success is None

    def test_seeds_are_paired_by_number_and_not_by_order(self) -> None:
        card = make_card(
            [
                cell("on", 1, ("01",)),
                cell("on", 0, ("00",)),
                cell("off", 0, ("00",)),
                cell("off", 1, ("01",)),
                cell("off", 2, ("01",)),
            ]
        )
        (difference,) = card.recipes[0].differences
        assert (difference.interval.mean, difference.seeds) == (0.0, 2)
        # one world, on which all agree: z²/(1 + z²)
        assert round(difference.interval.high, 4) == 0.7935 == -round(difference.interval.low, 4)

    def test_recipes_are_compared_each_as_it_is_used(self) -> None:
        grpo = [cell("off", seed, ("01", "00"), "grpo") for seed in (0, 1)]
        both = [
            cell(arm, seed, outcomes)
            for seed in (0, 1)
            for arm, outcomes in (("off", ("00", "00")), ("on", ("01", "01")))
        ]
        card = make_card([*grpo, *both])
        (found,) = card.comparisons
        assert (found.first, found.first_arm, found.second, found.second_arm) == (
            "complementary",
            "on",
            "grpo",
            "off",
        )
        assert (found.interval.mean, found.seeds, found.worlds) == (0.5, 2, 2)
        assert any(
            "grpo: on, frozen, shuffled, placebo not played, since it has no bank" in note
            for note in card.notes
        )

    def test_recipes_without_a_common_seed_are_compared_on_their_worlds(self) -> None:
        (found,) = make_card(
            [cell("on", 5, ("01", "01")), cell("off", 1, ("01", "00"), "grpo")]
        ).comparisons
        assert (found.first, found.interval.mean, found.seeds, found.worlds) == ("grpo", -0.5, 0, 2)

    def test_other_environments_and_other_settings_are_kept_apart(self) -> None:
        card = make_card(
            [
                cell(),
                cell(family="other", settings="x"),
                cell(family="lake", settings="y", environment="Lake-v0"),
            ]
        )
        assert [recipe.name for recipe in card.recipes] == [
            "complementary",
            "complementary (2)",
            "complementary (3)",
        ]
        assert len(card.comparisons) == 1 and any(
            "Lake-v0" in note and "not compared" in note for note in card.notes
        )

    def test_one_visit_is_its_own_later_visit(self) -> None:
        assert report(make_card([cell(outcomes=("1", "0"))]), "on").later.mean == 0.5

    def test_a_cell_given_twice_counts_once_and_none_are_refused(self) -> None:
        assert report(make_card([cell(), cell()]), "on").episodes == 4
        with pytest.raises(ValueError, match="at least one cell"):
            make_card([])

    def test_a_card_is_json_that_reads_back(self) -> None:
        card = make_card(ALL_ARMS, overrides=["eval.worlds=2"])
        assert Card.model_validate_json(card.model_dump_json()) == card
        assert card.versions["experiential-rl"] and card.versions["python"]


class TestCells:
    """A finished cell is found again, under the same checkpoint and settings only."""

    def test_what_is_kept_is_found(self, tmp_path: Path) -> None:
        store = cell_store(tmp_path / "cells")
        name = cell_name("c0", "complementary-0", "on")
        assert store.find(name) is None
        store.keep(name, cell())
        assert store.find(name) == cell()
        assert cell_store(tmp_path / "cells", overwrite=True).find(name) is None
        others = [
            cell_name("c1", "complementary-0", "on"),
            cell_name("c0", "other", "on"),
            cell_name("c0", "complementary-0", "off"),
        ]
        assert [store.find(other) for other in others] == [None] * 3

    def test_a_damaged_cell_is_named(self, tmp_path: Path) -> None:
        store = cell_store(tmp_path)
        path = store.keep("damaged", cell())
        path.write_text("{")
        with pytest.raises(ConfigError, match="--no-resume"):
            store.find("damaged")

    def test_the_cell_of_an_event(self) -> None:
        experiment = load_experiment("complementary", ["seed=4"])
        event = {
            "event": "eval",
            "arm": "on",
            "step": 7,
            "outcomes": [[0, 1], [1, 1]],
            "errors": 1,
            "entries": 3,
            "failures": {"env: x": 1},
        }
        made = cell_of(event, "run", experiment, "c9")
        assert (made.seed, made.step, made.outcomes, made.errors, made.entries) == (
            4,
            7,
            ("01", "11"),
            1,
            3,
        )
        assert np.array_equal(made.table(), [[0, 1], [1, 1]]) and np.array_equal(
            made.later(), [1.0, 1.0]
        )

    def test_digests_tell_settings_apart_but_not_the_arms(self) -> None:
        first, second, third = (
            load_experiment("complementary", [o])
            for o in ("seed=1", "seed=2", "eval.arms=[placebo]")
        )
        assert settings_digest(first) != settings_digest(second)
        assert (
            settings_digest(first, seed=False)
            == settings_digest(second, seed=False)
            == settings_digest(third, seed=False)
        )
        assert settings_digest(first) != settings_digest(
            load_experiment("complementary", ["seed=1", "eval.worlds=3"])
        )

    def test_the_digest_of_a_folder_is_that_of_its_contents(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "x").write_text("1")
        first = folder_digest(tmp_path)
        (tmp_path / "a" / "x").write_text("2")
        second = folder_digest(tmp_path)
        (tmp_path / "a" / "x").write_text("1")
        assert first == folder_digest(tmp_path) != second


EVENTS: list[dict[str, Any]] = [
    {"event": "eval", "step": 0, "arm": "on", "outcomes": [[1, 0], [1, 0]]},
    {"event": "step", "step": 1, "episodes": 64, "success_guided": 0.5, "success_free": None},
    {"event": "eval", "step": 1, "arm": "on", "outcomes": [[0, 1], [0, 0]]},
    {"event": "eval", "step": 1, "arm": "off", "outcomes": [[1, 1], [1, 1]]},
    {"event": "step", "step": 2, "episodes": 60, "success_guided": 0.75, "success_free": 0.25},
    {"event": "eval", "step": 2, "arm": "on", "outcomes": [[0, 1], [0, 1]]},
]


class TestCurves:
    """Learning curves from metrics."""

    def test_a_curve_counts_training_episodes_and_leaves_the_first_visit_out(self) -> None:
        found = [(p.step, p.episodes, p.success) for p in evaluation_curve(EVENTS, "on")]
        assert found == [(0, 0, 0.0), (1, 64, 0.5), (2, 124, 1.0)]
        assert [p.success for p in evaluation_curve(EVENTS, "off")] == [1.0]

    def test_episodes_that_filled_a_bank_beforehand_count(self) -> None:
        filled = [{"event": "prepared", "step": 0, "episodes": 16}, *EVENTS]
        assert [p.episodes for p in evaluation_curve(filled, "on")] == [16, 80, 140]

    def test_a_field_is_followed_where_it_is_known(self) -> None:
        assert training_curve(EVENTS, "success_free") == [(2, 0.25)]

    def test_runs_are_averaged_where_all_have_a_point(self) -> None:
        assert mean_curve([[(0, 0.0), (1, 1.0)], [(1, 0.5)], []]) == [(1, 0.75, 0.5, 1.0)]
        assert mean_curve([]) == []


class TestReport:
    """Table, page and picture."""

    def test_the_picture_is_a_png_inside_the_page(self, tmp_path: Path) -> None:
        card = make_card([*ALL_ARMS, *(cell("off", seed, recipe="grpo<b>") for seed in (0, 1))])
        drawn = draw_card(card, {"complementary": [EVENTS, EVENTS]}, tmp_path / "report.png")
        assert drawn.read_bytes().startswith(b"\x89PNG") and drawn.stat().st_size > 10_000
        page = write_page(card, tmp_path / "report.html", drawn).read_text()
        assert (
            page.count("data:image/png;base64,") == 1
            and "<b>" not in page
            and "grpo&lt;b&gt;" in page
        )
        assert "+100 [+7, +100]" in page and "on – placebo" in page

    def test_without_matplotlib_the_line_that_installs_it_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(picture, "find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match="bench"):
            draw_card(make_card([cell()]), {}, tmp_path / "report.png")
        assert (
            "experiential-rl[bench]"
            in write_page(make_card([cell()]), tmp_path / "report.html", None).read_text()
        )

    def test_the_table_fits_eighty_columns(self) -> None:
        console = Console(width=80, record=True)
        console.print(card_table(make_card(ALL_ARMS)))
        lines = console.export_text().splitlines()
        row = next(line for line in lines if line.strip().startswith("placebo"))
        assert row.split() == [
            "placebo",
            "0",
            "50",
            "[0,",
            "100]",
            "+50",
            "[0,",
            "100]",
            "4.0",
            "3.00",
            "12+6",
        ]

    def test_plain_lines_hold_every_arm_and_difference(self) -> None:
        lines = list(card_lines(make_card(ALL_ARMS)))
        assert [line.split("; ")[1] for line in lines[:5]] == [
            f"arm: {arm}" for arm in ("off", "on", "frozen", "shuffled", "placebo")
        ]
        assert "complementary: frozen minus off +50 [+0, +100] points" in lines


class TestTargets:
    """Runs, settings and arms of the command line."""

    def test_runs_and_settings_are_told_apart(self, tmp_path: Path) -> None:
        odd = tmp_path / "a=b"
        odd.mkdir()
        assert split_targets(["runs/x", "eval.worlds=3", str(odd), "runs/x"]) == (
            [Path("runs/x"), odd],
            ["eval.worlds=3"],
        )
        with pytest.raises(ConfigError, match="at least one run"):
            split_targets(["eval.worlds=3"])

    def test_arms(self) -> None:
        assert parse_arms("on, off,on") == ["on", "off"]
        for wrong in ("", "on,of"):
            with pytest.raises(ConfigError, match="Expected --arms among"):
                parse_arms(wrong)


def test_a_cell_is_small() -> None:
    assert len(json.dumps(cell().model_dump())) < 1000
