"""Demonstrations in dialects of FrozenLake: a note wins, and lessons say where words led."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from benchmarks.dialects import (
    SETTINGS,
    demonstrations,
    dialect_of,
    legend,
    meanings,
    moved,
    notes,
    walked,
    words_of,
    worth,
)
from benchmarks.earned_rules import dialect_lesson
from experiential.agents.operations import parse_operations
from experiential.agents.prompts import prompt_set
from experiential.bank.bank import ExperienceBank
from experiential.config import Experiment
from experiential.envs.dialect import dialects_of
from experiential.recipe import load_experiment
from experiential.rollout import make_env
from experiential.training.roles import prompt_set_name
from experiential.types import Add, Distillation, ParsedOperations, Trajectory, Turn, Update, Use
from experiential.wrappers import ExperienceWrapper

TASK = "Cross the ice in the dialect of Iron Mill."


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return load_experiment("complementary+small", [*SETTINGS, "model.name=smollm2"])


def lesson(known: str, **feedback: str) -> str:
    turns = (Turn(observation="", action=word, feedback=one) for word, one in feedback.items())
    return dialect_lesson(Trajectory(task=TASK, turns=tuple(turns)), known)


def test_a_lesson_adds_where_words_led_and_corrects_what_was_known() -> None:
    assert dialect_of(TASK) == "Iron Mill"
    assert lesson("", Up="No valid actions were recorded.") == ""
    found = lesson(
        "",
        Up="You are in a hole.\n\nYou moved left. The agent fell into the hole",
        Left="You cannot move up.",
    )
    assert words_of(found) == {"Up": "Left", "Left": "Up"}
    known = legend("Iron Mill", {"Up": "Down", "Right": "Right"})
    assert words_of(lesson(known, Up="You moved left.")) == {"Up": "Left", "Right": "Right"}
    assert lesson(known) == known


def test_who_knows_all_words_wins_and_who_knows_none_seldom_does(experiment: Experiment) -> None:
    with closing(make_env(experiment.env, {"split": "dev", "dialects": 40})) as env:
        lake = env.unwrapped
        won = {"all": 0, "none": 0}
        for world in range(40):
            known = meanings(lake.dialects[world])  # type: ignore[attr-defined]
            for name, told in (("all", known), ("none", {})):
                _, trajectory = walked(env, world, told, "", experiment, Random(world))
                won[name] += trajectory.success
                assert moved(trajectory).items() <= known.items()
        assert won["all"] == 40
        assert 4 <= won["none"] <= 24


def test_each_word_told_is_worth_something_and_three_are_worth_all() -> None:
    won = list(worth(80, dialects=20).values())
    assert won == sorted(won) and won[0] < 0.5 < won[2] < won[3] == won[4] == 1.0


def test_demonstrations_are_plays_that_were_won_and_lessons_that_are_right(
    experiment: Experiment,
) -> None:
    chats = list(demonstrations(experiment, 60, seed=3))
    assert chats == list(demonstrations(experiment, 60, seed=3))
    right = {one.name: meanings(one) for one in dialects_of("corpus", "ABCD", words_only=True)}
    kinds: set[str] = set()
    for chat in chats:
        system, asked, *_, said = chat["messages"]
        if system["content"].startswith("Play."):
            noted = "<experience>" in asked["content"]
            if noted:
                name = asked["content"].partition("dialect of ")[2].partition(":")[0]
                assert words_of(asked["content"]).items() <= right[name].items()
            kinds.add("noted" if noted else "plain")
            continue
        json.loads(said["content"])
        shown = int("Used:" in asked["content"])
        [operation] = parse_operations(said["content"], max_operations=1, shown=shown).operations
        kinds.add(operation.op)
        if isinstance(operation, Add | Update):
            name = asked["content"].partition("dialect of ")[2].partition(".")[0]
            before = words_of(asked["content"].partition("Play:")[0])
            assert before.items() < words_of(operation.text).items() <= right[name].items()
    assert kinds == {"noted", "plain", "add", "update", "return"}


def test_an_extractor_is_shown_plays_as_an_episode_records_them(
    experiment: Experiment, tmp_path: Path
) -> None:
    with (
        ExperienceBank(tmp_path, embedder="hashing") as bank,
        closing(make_env(experiment.env, {"split": "dev", "dialects": 3})) as env,
    ):
        recorded = ExperienceWrapper(env, bank)
        for world in range(3):
            seeds = Random(world)
            _, trajectory = walked(recorded, world, {}, "", experiment, seeds)
            assert recorded.last_trajectory is not None
            prompts = prompt_set(prompt_set_name(experiment.model))
            assert prompts.distill_messages(trajectory, [], 1) == prompts.distill_messages(
                recorded.last_trajectory, [], 1
            )


def test_the_words_of_notes_are_counted_by_what_their_plays_showed(tmp_path: Path) -> None:
    """Two plays: the first note has one of two words, the second takes one up and mends none."""
    dialect = dialects_of("dev", "ABCD", words_only=True)[0]
    true, task = meanings(dialect), f"Cross the ice in the dialect of {dialect.name}."
    wrong = {"Left": next(way for way in true.values() if way != true["Left"])}

    def play(*words: str, uses: tuple[Use, ...] = ()) -> Trajectory:
        turns = [
            Turn(observation="", action=word, feedback=f"You moved {true[word].lower()}.")
            for word in words
        ]
        return Trajectory(task=task, turns=tuple(turns), uses=uses, success=False)

    def written(operation: Add | Update) -> Distillation:
        return Distillation(parsed=ParsedOperations(operations=(operation,)))

    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        first = play("Up", "Left")
        bank.record(first)
        text = legend(dialect.name, {"Up": true["Up"], **wrong})
        (entry,) = bank.apply(written(Add(text=text)), trajectory=first, shown=[])
        use = Use(experience_id=entry.id, experience_version=entry.version)
        second = play("Left", "Down", "Right", uses=(use,))
        bank.record(second)
        text = legend(dialect.name, {"Up": true["Up"], **wrong, "Down": true["Down"]})
        bank.apply(written(Update(entry=1, text=text)), trajectory=second, shown=[entry])
    found = {kind: tuple(each.values()) for kind, each in notes([tmp_path]).items()}
    # notes; right and wrong words; new, of these taken up; shown to be wrong, of these corrected
    assert found == {"first": (1, 1, 1, 2, 1, 0, 0), "going on": (1, 2, 1, 2, 1, 1, 0)}
