"""Suites of vaults for tests of `experiential bench stream`, and an agent that reads advice."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from experiential.evaluation.memories import Setup
from experiential.evaluation.suites import Suite, SuiteTask
from experiential.types import Trajectory

WORLDS = 8


def vault(name: str, **kwargs: Any) -> SuiteTask:
    """A task in which one try must hit the live lever of fourteen."""
    return SuiteTask(name, "experiential/Vault-v0", {"worlds": WORLDS, "tries": 1, **kwargs}, 2)


VAULTS = Suite("vaults", (vault("vault"),), "a test")
# An era is another live lever in the same vault, so what one learned is wrong in the other.
ERAS = Suite("eras", tuple(vault(f"era-{era}", era=era) for era in range(3)), "a test")


def reader(observation: str, info: Mapping[str, Any]) -> str:
    """Pull the first lever that the advice names as live, else the first there is."""
    advice = info.get("experience_prompt") or ""
    if os.environ.get("READER_FAILS_ON") and os.environ["READER_FAILS_ON"] in observation:
        raise RuntimeError("no answer")
    live = re.search(r"(\w+) was live|The (\w+) lever turns", advice)
    lever = next(filter(None, live.groups()), "") if live else ""
    known: list[str] = info["admissible"]
    return f"pull {lever}" if f"pull {lever}" in known else known[0]


class Newest:
    """Remember the last answer of each task: a memory of two methods."""

    def __init__(self, setup: Setup) -> None:
        self.last: dict[str, str] = {}

    def recall(self, task: str) -> str:
        """Return what the environment said last."""
        return self.last.get(task, "")

    def learn(self, trajectory: Trajectory) -> None:
        """Keep what the environment said last."""
        self.last[trajectory.task] = trajectory.turns[-1].feedback
