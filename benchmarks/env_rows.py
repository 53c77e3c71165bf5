"""List the rows of `python -m benchmarks.envs`: environment, preset and source of tasks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from experiential.envs.make import make
from experiential.envs.readiness import READINESS
from experiential.errors import ConfigError

_SWE_ACTIONS = (
    "<function=execute_bash><parameter=command>ls</parameter></function>",
    "<function=execute_bash><parameter=command>git status --short</parameter></function>",
    "<function=str_replace_editor><parameter=command>view</parameter><parameter=path>.</parameter></function>",
    "<function=submit></function>",
)


@dataclass(frozen=True)
class Row:
    """Describe one row.

    Attributes:
        name: what it is called.
        id: environment id.
        kwargs: arguments of ``gymnasium.make``.
        real: it plays real tasks, so the environment's variable must name some; otherwise the
            variable is hidden from it.
        episodes: of the random agent, on which steps, resets, observations and its success are
            measured.
        oracle: episodes of the oracle.
        all: episodes of the oracle when all is asked for, as many as there are worlds at most; None
            for every world.
        memory: episodes between the two looks at the memory, as many before the first; 0 measures
            none.
        actions: what the random agent draws from where ``info`` names no admissible action; empty
            draws from the action space.
    """

    name: str
    id: str
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    real: bool = False
    episodes: int = 100
    oracle: int = 100
    all: int | None = 500
    memory: int = 1000
    actions: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """Return the MiniHack id that is played; empty in other environments."""
        return (
            _LEVELS.get(str(self.kwargs.get("preset")), "")
            if self.id == "experiential/MiniHack-v0"
            else ""
        )

    def missing(self) -> list[str]:
        """Return the commands and steps without which the row cannot be measured."""
        entry = READINESS[self.id]
        lacks_data = self.real and not entry.has_data() and not entry.data_needed
        return entry.missing() + ([entry.data_step] if lacks_data else [])

    def hide_data(self) -> None:
        """Unset the environment's variable where the row is not about real tasks."""
        if not self.real and READINESS[self.id].variable:
            os.environ.pop(READINESS[self.id].variable, None)

    def make(self) -> gym.Env[str, str]:
        """Make the environment without Gymnasium's checker."""
        return make(self.id, **self.kwargs)


_LEVELS = {
    "room": "MiniHack-Room-Ultimate-5x5-v0",
    "maze": "MiniHack-MazeWalk-9x9-v0",
    "keyroom": "MiniHack-KeyRoom-Dark-S5-v0",
    "river": "MiniHack-River-Narrow-v0",
}
_PATIENT = {"turns": 40, "timeout": 600.0}  # a busy machine is no failure of a game
_ALFWORLD: dict[str, Any] = {
    "id": "experiential/ALFWorld-v0",
    "episodes": 20,
    "oracle": 20,
    "memory": 50,
}
_SWE: dict[str, Any] = {
    "id": "experiential/SWE-v0",
    "episodes": 3,
    "oracle": 4,
    "all": None,
    "memory": 0,
    "actions": _SWE_ACTIONS,
}

ROWS = {
    row.name: row
    for row in (
        Row("vault", "experiential/Vault-v0"),
        Row("frozenlake-erl", "experiential/FrozenLake-v0", {"preset": "erl"}),
        Row("frozenlake-4x4", "experiential/FrozenLake-v0", {"preset": "4x4"}),
        Row("frozenlake-8x8", "experiential/FrozenLake-v0", {"preset": "8x8"}),
        Row("frozenlake-dialects", "experiential/FrozenLake-v0", {"preset": "dialects"}),
        Row("sokoban-erl", "experiential/Sokoban-v0", {"preset": "erl"}),
        Row("sokoban-complementary", "experiential/Sokoban-v0", {"preset": "complementary"}),
        Row("sokoban-dialects", "experiential/Sokoban-v0", {"preset": "dialects"}),
        *(
            Row(
                f"minihack-{preset}",
                "experiential/MiniHack-v0",
                {"preset": preset},
                oracle=20,
                all=20 if preset == "river" else 100,
            )
            for preset in _LEVELS
        ),
        Row("babyai", "experiential/BabyAI-v0"),
        Row("alfworld-made", kwargs={"data": "made", **_PATIENT}, all=None, **_ALFWORLD),
        Row(
            "alfworld-valid-seen",
            kwargs={"split": "valid_seen", **_PATIENT},
            real=True,
            all=None,
            **_ALFWORLD,
        ),
        Row(
            "alfworld-train", kwargs={"split": "train", **_PATIENT}, real=True, all=200, **_ALFWORLD
        ),
        Row("webshop-invented", "experiential/WebShop-v0", all=None),
        Row("webshop-real", "experiential/WebShop-v0", {"split": "all"}, real=True, all=None),
        Row("hotpotqa-invented", "experiential/HotpotQA-v0", {"choices": True}, all=None),
        Row(
            "hotpotqa-real",
            "experiential/HotpotQA-v0",
            {"choices": True, "split": "all"},
            real=True,
            all=None,
        ),
        Row(
            "bfcl",
            "experiential/BFCL-v0",
            {"split": "all"},
            real=True,
            all=None,
            memory=100,
            actions=("[pwd()]", "[ls(a=True)]", "Done."),
        ),
        Row("swe-bundled", kwargs={"split": "all", "turns": 6}, **_SWE),
        Row("swe-tasks", kwargs={"split": "all", "turns": 6}, real=True, **_SWE),
    )
}
"""Rows by name."""


def chosen(names: list[str] | None) -> list[Row]:
    """Return the rows of these names; None stands for all.

    A name also stands for all rows whose names begin with it.

    Raises:
        ConfigError: there is no such row.
    """
    if names is None:
        return list(ROWS.values())
    found = {
        name: [row for row in ROWS.values() if row.name == name or row.name.startswith(f"{name}-")]
        for name in names
    }
    for name, rows in found.items():
        if not rows:
            raise ConfigError(
                f"Expected rows among {', '.join(ROWS)}, or the first word of some, got {name!r}"
            )
    wanted = {row.name for rows in found.values() for row in rows}
    return [row for row in ROWS.values() if row.name in wanted]
