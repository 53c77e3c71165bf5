"""A run in an environment that fails: what fails now and then is counted and shown, what always
fails ends the run with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import pytest
from rich.console import Console

from experiential.bank.bank import ExperienceBank
from experiential.cli.view import LiveView, PlainView, describe_evaluation
from experiential.errors import ExperientialError
from experiential.training.metrics import read_events
from experiential.training.trainer import Trainer
from tests.test_trainer import experiment, policies
from tests.wrapper_worlds import CorridorEnv

SOURCE = Path(__file__)
LINE = next(
    number
    for number, text in enumerate(SOURCE.read_text("utf-8").splitlines(), 1)
    if text.strip().startswith('raise OSError("the corridor')
)
SHOWN = SOURCE.relative_to(Path.cwd()) if SOURCE.is_relative_to(Path.cwd()) else SOURCE
REASON = f"env: OSError: the corridor fell in ({SHOWN}:{LINE})"


class CrackedEnv(CorridorEnv):
    """A corridor whose steps raise: every ``period``-th one of all its kind."""

    steps_of_all: ClassVar[Iterator[int]] = count(1)

    def __init__(self, period: int = 1, split: str = "train") -> None:
        super().__init__()
        self.period = period

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if next(self.steps_of_all) % self.period == 0:
            raise OSError("the corridor fell in\nand buried all")
        return super().step(action)


@pytest.fixture(autouse=True)
def cracked() -> Iterator[None]:
    gym.register("tests/Cracked-v0", entry_point=CrackedEnv)
    CrackedEnv.steps_of_all = count(1)
    yield
    del gym.registry["tests/Cracked-v0"]


def settings(period: int, *overrides: str, evaluated: bool = False) -> Any:
    return experiment(
        "complementary",
        "env.id=tests/Cracked-v0",
        "env.train={}",
        "env.eval={}",
        f"env.kwargs={{period: {period}}}",
        "run.drain=true",
        "actor.warmup_steps=0",
        f"eval.before={str(evaluated).lower()}",
        "eval.after=false",
        *overrides,
    )


def test_episodes_that_fail_are_counted_shown_and_kept_out_of_the_bank(tmp_path: Path) -> None:
    """Every 11th step fails: 8 episodes of 2 to 6 steps meet one such step or more, and never 8; 3
    of them meet 2 at most.
    """
    seen: list[dict[str, Any]] = []
    Trainer(settings(11, evaluated=True), tmp_path, observer=seen.append, runtimes=policies()).run()
    steps = [event for event in seen if event["event"] == "step"]
    assert len(steps) == 2
    rows = [
        [row["error"] for row in event["rows"]]
        for event in read_events(tmp_path / "episodes.jsonl")
    ]
    for event, errors in zip(steps, rows, strict=True):
        failed = [error for error in errors if error is not None]
        assert 0 < len(failed) < event["episodes"] == 8
        assert set(failed) == {f"{REASON}\nand buried all"}
        assert event["errors"] == len(failed) and event["failures"] == {REASON: len(failed)}
    evaluations = [event for event in seen if event["event"] == "eval"]
    assert evaluations and all(
        event["failures"] == {REASON: event["errors"]} for event in evaluations
    )
    assert any(
        f"{event['errors']} episodes failed" in describe_evaluation(event) for event in evaluations
    )
    played = sum(event["episodes"] - event["errors"] for event in steps)
    with ExperienceBank(tmp_path / "bank", read_only=True) as bank:
        recorded = [commit for commit in bank.commits() if commit.cause == "record"]
    assert len(recorded) == played


def test_a_run_without_failures_names_none(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    Trainer(settings(10**9), tmp_path, observer=seen.append, runtimes=policies()).run()
    steps = [event for event in seen if event["event"] == "step"]
    assert [event["errors"] for event in steps] == [0, 0]
    assert not any("failures" in event or "close_errors" in event for event in seen)


def test_an_environment_that_always_fails_ends_the_run_after_one_step_with_the_reason(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ExperientialError, match=f"8 of 8 episodes that it failed: {re.escape(REASON)}"
    ):
        Trainer(settings(1, "run.steps=50"), tmp_path, runtimes=policies()).run()
    events = read_events(tmp_path / "metrics.jsonl")
    assert [
        (event["event"], event.get("failures")) for event in events if event["event"] != "warning"
    ] == [("start", None), ("step", {REASON: 8})]
    assert events[1]["text"].startswith("the environment failed an episode of random play")


def test_an_environment_that_always_fails_ends_an_evaluation_with_the_reason(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ExperientialError, match=f"3 of 3 episodes that it failed: {re.escape(REASON)}"
    ):
        Trainer(settings(1, evaluated=True), tmp_path, runtimes=policies()).run()


def test_views_show_errors_only_when_there_are_any() -> None:
    def shown(view: type[PlainView] | type[LiveView], errors: int) -> str:
        console = Console(file=StringIO(), force_terminal=view is LiveView, width=100, record=True)
        with closing(view(console)) as opened:
            opened.handle({"event": "start", "step": 0, "steps": 2})
            opened.handle({"event": "step", "step": 1, "reward": 0.5, "errors": errors})
        return console.export_text()

    for view in (PlainView, LiveView):
        assert "errors 3" in shown(view, 3)
        assert "errors" not in shown(view, 0) and "reward 0.50" in shown(view, 0)
    evaluation = {
        "event": "eval",
        "step": 0,
        "arm": "free",
        "visits": [{"visit": 1, "successes": 1, "episodes": 2}],
        "errors": 0,
    }
    assert "failed" not in describe_evaluation(evaluation)
