"""Demonstrations in ALFWorld's made households: notes help, and lessons say what was seen."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from benchmarks.earned_rules import home_lesson
from benchmarks.households import (
    SETTINGS,
    Resident,
    Stage,
    demonstrations,
    explored,
    listed,
    listing,
    sights,
)
from experiential.agents.operations import parse_operations
from experiential.config import Experiment
from experiential.recipe import load_experiment
from experiential.rollout import make_env
from experiential.types import Add, Trajectory, Turn, Update

HOUSE = "the house of Iron Mill"


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    for package in ("alfworld", "fast_downward"):
        pytest.importorskip(package, reason="needs pip install 'experiential-rl[alfworld]'")
    monkeypatch.setenv("EXPERIENTIAL_CACHE", str(tmp_path))
    return load_experiment("complementary+small", [*SETTINGS, "model.name=smollm2"])


def lesson(known: str, *feedback: str) -> str:
    turns = tuple(Turn(observation="", action="look", feedback=one) for one in feedback)
    return home_lesson(Trajectory(task=f"Do what is asked in {HOUSE}.", turns=turns), known)


def test_a_lesson_adds_what_was_seen_first_to_what_was_known() -> None:
    assert lesson("", "The safe 1 is closed.") == ""
    seen = "You open the safe 1. The safe 1 is open. In it, you see a cd 2, and a cd 1."
    moved = "You arrive at bed 1. On the bed 1, you see a cd 1."
    assert lesson("", seen, moved) == listing(HOUSE, {"cd": "safe 1"})
    known = listing(HOUSE, {"cd": "desk 1", "pen": "shelf 2"})
    assert lesson(known, seen) == listing(HOUSE, {"cd": "safe 1", "pen": "shelf 2"})
    assert lesson(known) == known


def test_who_reads_where_the_object_is_kept_wins_and_who_searches_may_not(
    experiment: Experiment,
) -> None:
    won = {"noted": 0, "searched": 0}
    with closing(make_env(experiment.env, experiment.env.train)) as env:
        for world in range(12):
            kept, said = explored(env, world, Random(world), 20)
            assert sights(said) == kept
            for name, known in (("noted", kept), ("searched", {})):
                observation, info = env.reset(seed=world, options={"world": world})
                resident, done = Resident(observation, known, Random(0)), False
                while not done:
                    observation, _, over, cut, info = env.step(resident.act(info))
                    done = over or cut
                won[name] += info["success"]
    assert won["searched"] < won["noted"]
    assert won["noted"] >= 5  # one look around is eight turns long and does not see it all


def test_demonstrations_are_plays_that_were_won_and_lessons_that_are_right(
    experiment: Experiment,
) -> None:
    chats = list(demonstrations(experiment, Stage(16, 0.5, listed=3), seed=3))
    assert chats == list(demonstrations(experiment, Stage(16, 0.5, listed=3), seed=3))
    lessons = 0
    for chat in chats:
        system, asked, *_, said = chat["messages"]
        if system["content"].startswith("Play."):
            assert said["content"].startswith("move ")
            continue
        lessons += 1
        json.loads(said["content"])
        shown = int("Used:" in asked["content"])
        [operation] = parse_operations(said["content"], max_operations=1, shown=shown).operations
        if isinstance(operation, Add | Update):
            seen = sights(asked["content"].partition("Play:")[2])
            assert seen.items() <= listed(operation.text).items()
    assert 3 <= lessons < len(chats)
