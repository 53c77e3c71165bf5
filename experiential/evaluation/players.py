"""Play a suite without a model: by random draws, the oracle, or a function of the user's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import gymnasium as gym

from experiential.envs import oracle, random_agent
from experiential.envs.agents import Agent
from experiential.errors import BackendError, EnvError
from experiential.sync import attempted
from experiential.types import Generation

Act = Callable[[str, Mapping[str, Any]], Any]
"""An agent: returns the action, as text, for an observation and its info."""
Seat = Callable[[gym.Env[str, str], int], Agent]
"""Builds an agent that needs the environment itself, from it and the seed of the episode."""
AGENT = "agent"
"""Where `Watched` puts a seated agent into info. No trajectory keeps it."""
FALLBACK = "I do nothing."
"""Said by the random agent where no action is named as admissible: an action nowhere, so it only
uses up a turn.
"""
SEATS: dict[str, Seat] = {
    "random": lambda env, seed: random_agent(env, seed, (FALLBACK,)),
    "oracle": lambda env, seed: oracle(env),
}
"""Built-in agents by name; both are those of `experiential.envs`."""


class Player:
    """Act by a function, in the place of an ``ActorAgent``; nothing is generated.

    Whatever the function raises, or an answer other than text, fails the episode with that as its
    reason. The function is called in a thread.
    """

    llm = SimpleNamespace(version=0, tokenizer=None)

    def __init__(self, act: Act) -> None:
        self._act = act
        self.generations: list[Generation] = []

    def reset(self, *, seed: int | None = None) -> None:
        """Begin an episode."""

    async def aact(self, observation: str, info: Mapping[str, Any] | None = None) -> str:
        """Return the action for ``observation``.

        Raises:
            BackendError: the function raised, or returned something else than text.
        """
        action = await asyncio.to_thread(attempted, lambda: self._act(observation, info or {}))
        if isinstance(action, EnvError):  # the environment's failure, which a seated agent meets
            raise action
        if isinstance(action, Exception):
            raise BackendError(f"the agent raised {type(action).__name__}: {action}") from action
        if not isinstance(action, str):
            raise BackendError(f"expected text from the agent, got {type(action).__name__}")
        return action


class Watched(gym.Wrapper[str, str, str, str]):
    """Time episodes, and seat an agent that needs the environment itself.

    ``seconds`` receives the wall time of each episode, from its reset to its last step until now,
    by the seed of its reset. ``seat`` builds the agent of an episode, which stands in info.
    """

    def __init__(
        self, env: gym.Env[str, str], seconds: dict[int | None, float], seat: Seat | None = None
    ) -> None:
        super().__init__(env)
        self._seconds, self._seat = seconds, seat
        self._more: dict[str, Any] = {}
        self._seed: int | None = None
        self._begin = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self._seed, self._begin = seed, time.perf_counter()
        self._more = {} if self._seat is None else {AGENT: self._seat(self.env, seed or 0)}
        observation, info = self.env.reset(seed=seed, options=options)
        self._seconds[seed] = time.perf_counter() - self._begin
        return observation, {**info, **self._more}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._seconds[self._seed] = time.perf_counter() - self._begin
        return observation, float(reward), terminated, truncated, {**info, **self._more}
