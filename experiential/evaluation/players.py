"""Play a suite without a model: by random draws, the oracle, or a function of the user's."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import gymnasium as gym

from experiential.agents.actor import ActorAgent
from experiential.envs import oracle, random_agent
from experiential.envs.agents import Agent
from experiential.errors import BackendError, EnvError
from experiential.evaluation.play_log import PlayedTurn, Retrieved
from experiential.llm.metered import Meter, Metered, Spent
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


class RandomPlayer(Player):
    """Draw uniformly among the admissible actions; the draws follow from the episode's seed.

    Where an environment names none it says `FALLBACK`.
    """

    def __init__(self) -> None:
        super().__init__(lambda observation, info: self._rng.choice(_admissible(info)))
        self._rng = random.Random()

    def reset(self, *, seed: int | None = None) -> None:
        """Begin an episode."""
        self._rng = random.Random(seed)


def _admissible(info: Mapping[str, Any]) -> Sequence[str]:
    return info.get("admissible") or (FALLBACK,)


def seated() -> Player:
    """Return an agent that asks the one that `Watched` has seated."""
    return Player(lambda observation, info: info[AGENT](observation, info))


@dataclass
class Notes:
    """Collect what happens in an episode while it is played, also in one that fails."""

    seconds: float = 0.0
    """From the reset to the end of the last step until now."""
    turns: list[PlayedTurn] = field(default_factory=list[PlayedTurn])
    retrieved: list[Retrieved] = field(default_factory=list[Retrieved])
    end: str = ""
    """The last observation."""
    spent: Spent = Spent()
    error: Exception | None = None
    """What the agent raised."""


class Recorded:
    """Stand before an agent, and note what it reads, writes and takes.

    ``notes`` receives the `Notes` of each episode by the seed of its sampling.
    """

    def __init__(self, agent: ActorAgent | Player, notes: dict[int | None, Notes]) -> None:
        self._agent, self._notes = agent, notes
        self._meter, self._before = Meter(), Spent()
        self._now = Notes()
        if isinstance(agent, ActorAgent):
            agent.llm = Metered(agent.llm, self._meter)
        self.llm: Any = agent.llm

    @property
    def generations(self) -> list[Generation]:
        """Return the responses of the running episode."""
        return self._agent.generations

    def reset(self, *, seed: int | None = None) -> None:
        """Begin an episode."""
        self._now = self._notes[seed] = Notes()
        self._before = self._meter.spent()
        self._agent.reset(seed=seed)

    async def aact(self, observation: str, info: Mapping[str, Any] | None = None) -> str:
        """Return the agent's action."""
        now = self._now
        now.end = observation
        now.retrieved += retrieved(info or {}, len(now.turns))
        try:
            action = await self._agent.aact(observation, info)
        except Exception as error:
            now.error = error
            raise
        finally:
            now.spent = self._meter.spent() - self._before
        reply = self._agent.generations[-1].text if self._agent.generations else action
        now.turns.append(PlayedTurn(observation=observation, reply=reply, action=action))
        return action


def retrieved(info: Mapping[str, Any], turn: int) -> list[Retrieved]:
    """Return the entries that an info shows to the agent, by itself or as a refined answer."""
    found: list[dict[str, Any]] = info.get("experience") or []
    asked: dict[str, Any] = info.get("search_and_ask") or {}
    if not found and asked.get("hit"):
        found = [asked["hit"]]
    kept = ("id", "version", "text", "score")
    return [Retrieved(turn=turn, **{key: entry[key] for key in kept}) for entry in found]


class Watched(gym.Wrapper[str, str, str, str]):
    """Note times and rewards of episodes, and seat an agent that needs the environment itself.

    ``notes`` has those of each episode by the seed of its reset, which must be that of its sampling
    (see `Recorded`). ``seat`` builds the agent of an episode, which stands in info.
    """

    def __init__(
        self, env: gym.Env[str, str], notes: dict[int | None, Notes], seat: Seat | None = None
    ) -> None:
        super().__init__(env)
        self._notes, self._seat = notes, seat
        self._more: dict[str, Any] = {}
        self._now, self._begin = Notes(), 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self._now, self._begin = self._notes.setdefault(seed, Notes()), time.perf_counter()
        self._more = {} if self._seat is None else {AGENT: self._seat(self.env, seed or 0)}
        observation, info = self.env.reset(seed=seed, options=options)
        self._now.seconds = time.perf_counter() - self._begin
        return observation, {**info, **self._more}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act."""
        now = self._now
        observation, reward, terminated, truncated, info = self.env.step(action)
        now.seconds = time.perf_counter() - self._begin
        now.end = observation
        if now.turns:
            now.turns[-1] = now.turns[-1].model_copy(update={"reward": float(reward)})
        return observation, float(reward), terminated, truncated, {**info, **self._more}
