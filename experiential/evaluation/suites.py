"""Define suites: the environments of the papers as these set them, alone and mixed.

A suite is chosen by name: a built-in one, the entry point of group ``experiential.suites`` of an
installed package, or ``module:attribute``. The latter two stand for a `Suite` or for a callable
without arguments that returns one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from experiential.envs.readiness import readiness
from experiential.errors import ConfigError
from experiential.plugins import did_you_mean, resolve

COMPLEMENTARY = "Complementary RL"
ERL = "Experiential RL"
DATA_FOLDER = "EXPERIENTIAL_DATA"
"""Variable that names one folder with the real data of all environments."""
DATA_PLACES = {
    "ALFWORLD_DATA": "alfworld",
    "WEBSHOP_DATA": "webshop",
    "HOTPOTQA_DATA": "hotpotqa/*.json",
    "SWE_TASKS": "swe/*.jsonl",
}
"""Variable of an environment to its place below that folder; of a pattern the first file counts."""


@dataclass(frozen=True)
class SuiteTask:
    """Describe one environment of a suite."""

    name: str
    id: str
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of ``gymnasium.make`` beside the split."""
    turns: int = 30
    """Turns after which an episode is truncated."""
    failure: float = 0.0
    """Reward counted for a technical failure: the least that the environment gives."""


@dataclass(frozen=True)
class Suite:
    """Group tasks that are evaluated together; their mean counts each task alike."""

    name: str
    tasks: tuple[SuiteTask, ...]
    source: str
    """Paper and section that set it so."""

    def missing(self) -> dict[str, list[str]]:
        """Return the commands without which an environment cannot be made, by environment id."""
        needed = {task.id: readiness(task.id).missing() for task in self.tasks}
        return {name: steps for name, steps in needed.items() if steps}


_ROOM, _MAZE, _KEYROOM = (
    SuiteTask(f"minihack-{preset}", "experiential/MiniHack-v0", {"preset": preset}, turns=30)
    for preset in ("room", "maze", "keyroom")
)
_SOKOBAN_ERL, _SOKOBAN_COMPLEMENTARY = (
    SuiteTask(f"sokoban-{preset}", "experiential/Sokoban-v0", {"preset": preset}, turns)
    for preset, turns in (("erl", 8), ("complementary", 30))
)
_HOTPOTQA = SuiteTask("hotpotqa", "experiential/HotpotQA-v0", {"preset": "erl", "choices": True}, 5)
_FROZENLAKE = SuiteTask("frozenlake", "experiential/FrozenLake-v0", {"preset": "erl"}, 8)


_ALFWORLD, _ALFWORLD_MIXED = (  # the reward of Complementary RL: 1 for success, else -1
    SuiteTask(
        "alfworld", "experiential/ALFWorld-v0", {"turns": turns, "failure": -1.0}, turns, -1.0
    )
    for turns in (40, 30)
)
_WEBSHOP, _WEBSHOP_MIXED = (  # the reward of Complementary RL: 1 for success, else 0
    SuiteTask(
        "webshop", "experiential/WebShop-v0", {"preset": "complementary", "turns": turns}, turns
    )
    for turns in (15, 30)
)
_SUITES = (
    Suite("room", (_ROOM,), f"{COMPLEMENTARY}, C.1 (Room-Ultimate-5x5) and C.2 (30 turns)"),
    Suite("alfworld", (_ALFWORLD,), f"{COMPLEMENTARY}, C.1 (reward 1 and -1) and C.2 (40 turns)"),
    Suite(
        "webshop",
        (_WEBSHOP,),
        f"{COMPLEMENTARY}, C.1 (1,000 products, reward 1 or 0); turns: the environment's own",
    ),
    Suite("hotpotqa", (_HOTPOTQA,), f"{ERL}, B.3 (reward, 5 turns)"),
    Suite(
        "sokoban",
        (_SOKOBAN_ERL, _SOKOBAN_COMPLEMENTARY),
        f"{ERL}, B.2, and {COMPLEMENTARY}, C.1 (6 by 6, two boxes)",
    ),
    Suite("frozenlake", (_FROZENLAKE,), f"{ERL}, B.1"),
    Suite(
        "three-task",
        (_ROOM, _WEBSHOP_MIXED, _ALFWORLD_MIXED),
        f"{COMPLEMENTARY}, C.3 (3-Tasks) and C.2 (30 turns)",
    ),
    Suite(
        "six-task",
        (_ROOM, _MAZE, _KEYROOM, _SOKOBAN_COMPLEMENTARY, _WEBSHOP_MIXED, _ALFWORLD_MIXED),
        f"{COMPLEMENTARY}, C.3 (6-Tasks) and C.2 (30 turns)",
    ),
)
SUITES = {suite.name: suite for suite in _SUITES}
"""The built-in suites by name."""


def find_suite(name: str, tasks: Sequence[str] | None = None) -> Suite:
    """Return the suite of a name, with only some of its tasks where these are named."""
    found = cast("Any", resolve("suites", name, SUITES))
    suite = found() if callable(found) else found
    if not isinstance(suite, Suite):
        raise ConfigError(
            f"Expected {name} to be a Suite or a callable that returns one, got"
            f" {type(suite).__name__}"
        )
    if tasks is None:
        return suite
    known = {task.name: task for task in suite.tasks}
    for task in tasks:
        if task not in known:
            raise ConfigError(
                f"Expected tasks of suite {name} among {', '.join(known)}, got"
                f" {task!r}{did_you_mean(task, known)}"
            )
    return replace(suite, tasks=tuple(task for name, task in known.items() if name in tasks))


def find_data() -> None:
    """Set each environment's variable for real data from the folder that `DATA_FOLDER` names.

    A variable that is set already stays. Nothing happens without that folder.
    """
    folder = os.environ.get(DATA_FOLDER)
    for variable, place in DATA_PLACES.items() if folder else ():
        found = sorted(Path(folder or "").expanduser().glob(place))
        if found and not os.environ.get(variable):
            os.environ[variable] = str(found[0].resolve())
