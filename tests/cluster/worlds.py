"""Small environments for the tests of env workers: one that sleeps, one that hangs, one that
raises.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, ClassVar

import gymnasium as gym

from experiential.envs.text_env import UnicodeText

SLEEPY = "tests.cluster.worlds:cluster-tests/Sleepy-v0"


class SleepyEnv(gym.Env[str, str]):
    """``length`` steps that sleep ``seconds`` each; reset options make one episode ``hang``,
    ``raise`` or ``die`` in a step.

    With ``meet`` no step ends before that many environments of this process were inside a step at
    once.
    """

    inside: ClassVar[int] = 0
    most: ClassVar[int] = 0
    crowd: ClassVar[threading.Condition] = threading.Condition()

    def __init__(self, seconds: float = 0.02, length: int = 5, meet: int = 0) -> None:
        self.seconds, self.length, self.meet = seconds, length, meet
        self.pid = os.getpid()
        self.observation_space, self.action_space = UnicodeText(100), UnicodeText(100)
        self.steps, self.fate = 0, ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.fate = 0, (options or {}).get("fate", "")
        return f"Bed {int(self.np_random.integers(1000))}.", self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._meet_fate()
        self._meet_others()
        time.sleep(self.seconds)
        self.steps += 1
        done = self.steps >= self.length
        return f"Night {self.steps}.", float(done), done, False, self._info() | {"success": done}

    def _meet_fate(self) -> None:
        if self.fate == "hang":
            threading.Event().wait()
        if self.fate == "raise":
            raise ValueError("the bed broke")
        if self.fate == "die":
            os._exit(3)

    def _meet_others(self) -> None:
        kind = type(self)
        with self.crowd:
            kind.inside += 1
            kind.most = max(kind.most, kind.inside)
            self.crowd.notify_all()
            met = self.crowd.wait_for(lambda: kind.most >= self.meet, timeout=60)
            kind.inside -= 1
        if not met:
            raise TimeoutError(f"met {kind.most} environments, not {self.meet}")

    def _info(self) -> dict[str, Any]:
        return {"task": "Sleep.", "pid": self.pid}


if SLEEPY.partition(":")[2] not in gym.registry:
    gym.register(SLEEPY.partition(":")[2], entry_point=SleepyEnv)
