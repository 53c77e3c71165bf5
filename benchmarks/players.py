"""Who plays a suite: random draws, the oracle, a function of the user's, or a language model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np

from experiential.errors import BackendError, ConfigError, EnvError
from experiential.sync import attempted
from experiential.types import Generation

Act = Callable[[str, Mapping[str, Any]], Any]
"""What an agent is: an action for an observation and its info, as text."""
ORACLE = "oracle"
"""Where info holds the environment's own ``oracle_action`` for the oracle; no trajectory keeps it.
"""
FALLBACK = "I do nothing."
"""What the random agent says where no action is named as admissible: no action anywhere, so it uses
up a turn.
"""


class Player:
    """A function that acts, in the place of an ``ActorAgent``; it generates nothing.

    What the function raises, or an answer that is no text, fails the episode with that as its
    reason.

    Args:
        act: the function; it is called in a thread.
    """

    llm = SimpleNamespace(version=0, tokenizer=None)

    def __init__(self, act: Act) -> None:
        self._act = act
        self.generations: list[Generation] = []

    def reset(self, *, seed: int | None = None) -> None:
        """Begin an episode."""

    async def aact(self, observation: str, info: Mapping[str, Any] | None = None) -> str:
        """The action for ``observation``.

        Raises:
            BackendError: the function raised, or gave no text.
        """
        action = await asyncio.to_thread(attempted, lambda: self._act(observation, info or {}))
        if isinstance(action, EnvError):
            raise action
        if isinstance(action, Exception):
            raise BackendError(f"the agent raised {type(action).__name__}: {action}") from action
        if not isinstance(action, str):
            raise BackendError(f"expected text from the agent, got {type(action).__name__}")
        return action


class RandomPlayer(Player):
    """Draws uniformly among the admissible actions, by the seed of the episode; says `FALLBACK` where none are named."""

    def __init__(self) -> None:
        super().__init__(self._draw)
        self._rng = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None) -> None:
        """Begin an episode."""
        self._rng = np.random.default_rng(seed)

    def _draw(self, observation: str, info: Mapping[str, Any]) -> str:
        known = info.get("admissible")
        return known[int(self._rng.integers(len(known)))] if known else FALLBACK


def oracle_player() -> Player:
    """Does what the environment itself thinks best; see `Watched`."""
    return Player(lambda observation, info: info[ORACLE]())


class Watched(gym.Wrapper[str, str, str, str]):
    """Notes how long episodes take, and gives the oracle its way to the environment.

    Args:
        env: an environment.
        seconds: where the wall time of an episode is put, from its reset to its last step until
            now, by the seed of its reset.
        oracle: put the environment's ``oracle_action`` into info.

    Raises:
        ConfigError: the oracle is asked for, and the environment has none.
    """

    def __init__(
        self, env: gym.Env[str, str], seconds: dict[int | None, float], *, oracle: bool = False
    ) -> None:
        super().__init__(env)
        action = getattr(env.unwrapped, "oracle_action", None)
        if oracle and action is None:
            raise ConfigError(
                f"Expected an environment with oracle_action(), got {type(env.unwrapped).__name__};"
                " choose another agent"
            )
        self._seconds, self._more = seconds, {ORACLE: action} if oracle else {}
        self._seed: int | None = None
        self._begin = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self._seed, self._begin = seed, time.perf_counter()
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, self._noted(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(reward), terminated, truncated, self._noted(info)

    def _noted(self, info: dict[str, Any]) -> dict[str, Any]:
        self._seconds[self._seed] = time.perf_counter() - self._begin
        return {**info, **self._more}


def load_function(name: str) -> Act:
    """A user's function by ``module:function``, from the working folder or what is installed.

    Raises:
        ConfigError: there is none of that name.
    """
    module, _, function = name.partition(":")
    found = attempted(lambda: getattr(import_module(module), function))
    if isinstance(found, Exception) or not callable(found):
        cause = (
            f"{type(found).__name__}: {found}"
            if isinstance(found, Exception)
            else f"a {type(found).__name__}"
        )
        raise ConfigError(
            "Expected an agent as module:function, callable with observation and info, got"
            f" {name!r}: {cause}"
        )
    return found
