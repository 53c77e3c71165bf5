"""Suites: the environments of the papers as they set them, alone and mixed, for `python -m benchmarks run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from experiential.envs.readiness import READINESS
from experiential.errors import ConfigError

COMPLEMENTARY = "Complementary RL"
ERL = "Experiential RL"


@dataclass(frozen=True)
class SuiteTask:
    """One environment of a suite.

    Attributes:
        name: what it is called in results.
        id: environment id.
        kwargs: arguments of ``gymnasium.make`` beside the split.
        turns: after which an episode is truncated.
        failure: the reward that an episode counts which failed for a technical reason: the least
            that the environment gives.
        instruction: what an agent is told about the environment; the environments of text say the
            rest themselves.
    """

    name: str
    id: str
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    turns: int = 30
    failure: float = 0.0
    instruction: str = ""


@dataclass(frozen=True)
class Suite:
    """Tasks that are evaluated together; their mean counts each task alike.

    Attributes:
        name: what it is called.
        tasks: its environments.
        source: paper and section that set it so.
    """

    name: str
    tasks: tuple[SuiteTask, ...]
    source: str

    def check_ready(self) -> None:
        """Refuse a suite one of whose environments cannot be made.

        Raises:
            ConfigError: packages or data are missing; the message has the commands.
        """
        lacking = {task.id: READINESS[task.id].missing() for task in self.tasks}
        told = [f"{name}: run {' && '.join(steps)}" for name, steps in lacking.items() if steps]
        if told:
            raise ConfigError(
                f"Expected all environments of suite {self.name} to be ready, got some that are"
                f" not: {'; '.join(told)}"
            )


def _minihack(preset: str, turns: int = 30) -> SuiteTask:
    return SuiteTask(f"minihack-{preset}", "experiential/MiniHack-v0", {"preset": preset}, turns)


def _alfworld(turns: int) -> SuiteTask:
    return SuiteTask(
        "alfworld",
        "experiential/ALFWorld-v0",
        {"turns": turns, "failure": -1.0},
        turns,
        failure=-1.0,
    )


def _webshop(turns: int) -> SuiteTask:
    return SuiteTask("webshop", "experiential/WebShop-v0", {"turns": turns}, turns)


def _sokoban(preset: str, turns: int) -> SuiteTask:
    return SuiteTask(f"sokoban-{preset}", "experiential/Sokoban-v0", {"preset": preset}, turns)


_HOTPOTQA = SuiteTask("hotpotqa", "experiential/HotpotQA-v0", {"preset": "erl", "choices": True}, 5)
_FROZENLAKE = SuiteTask("frozenlake", "experiential/FrozenLake-v0", {"preset": "erl"}, 8)

SUITES = {
    suite.name: suite
    for suite in (
        Suite("room", (_minihack("room"),), f"{COMPLEMENTARY}, C.1 (Room-Ultimate-5x5) and C.2 (30 turns)"),
        Suite("alfworld", (_alfworld(40),), f"{COMPLEMENTARY}, C.1 (reward 1 and -1) and C.2 (40 turns)"),
        Suite("webshop", (_webshop(15),), f"{COMPLEMENTARY}, C.1 (1,000 products); the turns are the environment's own"),
        Suite("hotpotqa", (_HOTPOTQA,), f"{ERL}, B.3 (reward, 5 turns)"),
        Suite("sokoban", (_sokoban("erl", 8), _sokoban("complementary", 30)), f"{ERL}, B.2, and {COMPLEMENTARY}, C.1 (6 by 6, two boxes)"),
        Suite("frozenlake", (_FROZENLAKE,), f"{ERL}, B.1"),
        Suite("three-task", (_minihack("room"), _webshop(30), _alfworld(30)), f"{COMPLEMENTARY}, C.3 (3-Tasks) and C.2 (30 turns)"),
        Suite(
            "six-task",
            (_minihack("room"), _minihack("maze"), _minihack("keyroom"), _sokoban("complementary", 30), _webshop(30), _alfworld(30)),
            f"{COMPLEMENTARY}, C.3 (6-Tasks) and C.2 (30 turns)",
        ),
    )
}  # fmt: skip
"""Name to suite."""


def find_suite(name: str, tasks: Sequence[str] | None = None) -> Suite:
    """The suite of a name, with only some of its tasks where these are named.

    Raises:
        ConfigError: there is no such suite, or no such task in it.
    """
    if name not in SUITES:
        raise ConfigError(f"Expected a suite among {', '.join(SUITES)}, got {name!r}")
    suite = SUITES[name]
    known = {task.name: task for task in suite.tasks}
    for task in tasks or ():
        if task not in known:
            raise ConfigError(
                f"Expected tasks of suite {name} among {', '.join(known)}, got {task!r}"
            )
    return (
        suite
        if tasks is None
        else Suite(name, tuple(task for task in suite.tasks if task.name in tasks), suite.source)
    )
