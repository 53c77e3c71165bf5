"""What a run warns of before it trains; and that looking changes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from experiential.bank.bank import ExperienceBank
from experiential.config import Experiment
from experiential.recipe import load_experiment
from experiential.rollout import TaskSource, world_count
from experiential.training.metrics import read_events
from experiential.training.preflight import Look, find_warnings, look_at
from experiential.training.trainer import Trainer
from tests.test_trainer import experiment, policies, weights
from tests.wrapper_worlds import CorridorEnv


class OrderEnv(CorridorEnv):
    """A shop whose orders differ in their number alone; `keys` are put into every info."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(length=1)
        self.keys = keys

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        random.random(), np.random.random()  # as environments do that keep no generator
        observation, info = super().reset(seed=seed, options=options)
        task = f"Customer wants a refund for order {int(self.np_random.integers(9999))}"
        return observation, {**info, "task": task, **self.keys}


@pytest.fixture(autouse=True)
def orders() -> Iterator[None]:
    gym.register("tests/Orders-v0", entry_point=OrderEnv)
    yield
    del gym.registry["tests/Orders-v0"]


def shop(*overrides: str) -> Experiment:
    own = ("env.id=tests/Orders-v0", "env.train={}", "env.eval={}", "model.name=mine")
    return load_experiment("complementary", [*own, *overrides])


def warned(settings: Experiment, bank: ExperienceBank | None = None) -> list[str]:
    worlds = world_count(settings.env.id, settings.env.kwargs)
    look = look_at(settings, TaskSource(settings.env, worlds, 0).tasks(0, 8))
    return list(find_warnings(settings, look, listed=worlds is not None, bank=bank))


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[ExperienceBank]:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


@pytest.mark.parametrize("recipe", ["complementary", "complementary+frozen-lake", "frozen+sokoban"])
def test_the_bundled_games_give_no_warning(bank: ExperienceBank, recipe: str) -> None:
    assert warned(load_experiment(recipe), bank) == []


def test_the_tiny_model_is_said_to_know_the_bundled_games_alone() -> None:
    assert warned(shop()) == []
    (text,) = warned(shop("model.name=tiny"))
    assert "the model tiny was made for Vault" in text and "tests/Orders-v0" in text
    assert warned(shop("model.name=tiny", "model.server.url=http://x", "runtime=frozen",
                       "actor.train=false", "extractor.train=false")) == []  # fmt: skip


def test_a_floor_that_the_tasks_never_reach(bank: ExperienceBank) -> None:
    (text,) = warned(shop("bank.retrieval.floor=0.999"), bank)
    assert "of 8 tasks of the environment no two are more similar" in text
    assert "below bank.retrieval.floor=0.999" in text
    assert warned(shop("bank.retrieval.floor=0.3"), bank) == []
    same = shop("bank.retrieval.floor=0.999", "env.kwargs={task: Sell.}")
    assert warned(same, bank) == [], "one task, which comes again"


def test_entries_about_something_else(bank: ExperienceBank) -> None:
    bank.add("Pull the jade lever.", task="Open the vault of Amber Abbey.")
    (text,) = warned(shop("bank.retrieval.floor=0.3"), bank)
    assert "the 1 entries of bank.path=None are about something else" in text and "0.3" in text
    bank.add("Ask for the receipt.", task="Customer wants a refund for order 12")
    assert warned(shop("bank.retrieval.floor=0.3"), bank) == []


def test_an_episode_without_a_task(bank: ExperienceBank) -> None:
    (text,) = warned(shop("env.kwargs={task: ''}"), bank)
    assert "info has no 'task'" in text


def test_advice_that_is_never_shown(bank: ExperienceBank) -> None:
    lenient = "bank.retrieval.floor=0"
    (text,) = warned(shop(lenient, "env.kwargs={instance: shop}"), bank)
    assert "advice is never shown: every episode has info['instance']='shop'" in text
    (text,) = warned(shop(lenient, "actor.guided=none"), bank)
    assert "no training episode sees the bank: actor.guided=none" in text
    (text,) = warned(shop(lenient, "actor.warmup_steps=9", "run.steps=9"), bank)
    assert "actor.warmup_steps=9 of run.steps=9" in text


@pytest.mark.parametrize(
    "settings", ["model.prompts=brief", "model.prompts=full actor.options.system=Act."]
)
def test_an_instruction_that_no_prompt_holds(settings: str) -> None:
    told = "actor.options.instruction=Be kind."
    (text,) = warned(shop(told, *settings.split()))
    assert "actor.options.instruction is dropped" in text
    assert warned(shop(told, "model.prompts=full")) == []


def test_looking_leaves_the_random_states_alone() -> None:
    random.seed(3)
    np.random.seed(3)
    look_at(shop(), TaskSource(shop().env, None, 0).tasks(0, 3))
    drawn = random.random(), np.random.random()
    random.seed(3)
    np.random.seed(3)
    assert drawn == (random.random(), np.random.random())


def test_a_slow_environment_is_reset_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiential.training.preflight.LONGEST", -1.0)
    assert len(look_at(shop(), TaskSource(shop().env, None, 0).tasks(0, 8)).tasks) == 1


def test_an_environment_that_never_says_how_it_went_is_named() -> None:
    class Silent(OrderEnv):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            *answer, info = super().step(action)
            return (*answer, {k: v for k, v in info.items() if k != "success"})  # type: ignore[return-value]

    gym.register("tests/Silent-v0", entry_point=Silent)
    try:
        (text,) = warned(shop("env.id=tests/Silent-v0"))
    finally:
        del gym.registry["tests/Silent-v0"]
    assert "failed an episode of random play" in text and "env.text.success" in text


def test_nothing_seen_gives_no_warning_about_what_was_seen(bank: ExperienceBank) -> None:
    assert list(find_warnings(shop(), Look((), ()), listed=False, bank=bank)) == []


def test_a_run_records_its_warnings_and_is_the_same_without_the_look(tmp_path: Path) -> None:
    results: dict[str, Any] = {}
    for preflight in ("true", "false"):
        settings = experiment(
            "grpo", "env.id=tests/Orders-v0", "env.train={}", "env.eval={}", "run.drain=true",
            "run.steps=1", "eval.after=false", "eval.before=false",
            f"run.preflight={preflight}",
        )  # fmt: skip
        made = policies()
        random.seed(1)
        folder = tmp_path / preflight
        Trainer(settings, folder, runtimes=made, warnings=["Mind the step."]).run()
        events = read_events(folder / "metrics.jsonl")
        said = [event["text"] for event in events if event["event"] == "warning"]
        assert said[0] == "Mind the step." and len(said) == (2 if preflight == "true" else 1)
        rows = read_events(folder / "episodes.jsonl")[0]["rows"]
        results[preflight] = [row["reward"] for row in rows], weights(made[0]).tolist()
    assert results["true"] == results["false"]
