"""Play episodes of an agent that needs no model, and sum them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import gymnasium as gym
import numpy as np

from experiential.envs import oracle
from experiential.envs.agents import Agent
from experiential.errors import ExperientialError
from experiential.evaluation.intervals import RATE, clustered_mean, wilson
from experiential.sync import attempted

_LISTED = 200
"""Failed episodes that are kept with their reasons."""


@dataclass(frozen=True)
class Outcome:
    """Hold the end of one episode.

    Attributes:
        world: index of the world that was played; None where the environment lists none.
        task_id: its name.
        reward: sum of rewards.
        success: ``info["success"]`` at the end.
        turns: steps.
        reason: why it is no success, in a few words; empty for a success.
    """

    world: int | None
    task_id: str
    reward: float
    success: bool
    turns: int
    reason: str = ""


def worlds_of(env: gym.Env[Any, Any]) -> int | None:
    """Return how many worlds an environment lists; None without a list."""
    listed = getattr(env.unwrapped, "worlds", None)
    return None if listed is None else len(cast("Sequence[int]", listed))


def spread(worlds: int | None, episodes: int | None) -> list[int | None]:
    """Return the worlds of so many episodes, evenly spread over all.

    None plays each world once; more episodes than worlds begin again.

    >>> spread(10, 5), spread(2, 5), spread(3, None), spread(None, 2)
    ([0, 2, 4, 6, 8], [0, 1, 0, 1, 0], [0, 1, 2], [None, None])
    """
    if worlds is None:
        return [None] * (episodes or 100)
    if episodes is None or episodes >= worlds:
        return [i % worlds for i in range(episodes or worlds)]
    return [i * worlds // episodes for i in range(episodes)]


def begin(env: gym.Env[str, str], seed: int, world: int | None) -> tuple[str, dict[str, Any]]:
    """Reset to a world."""
    return env.reset(seed=seed, options={} if world is None else {"world": world})


def play(env: gym.Env[str, str], agent: Agent, seed: int, world: int | None) -> Outcome:
    """Play one episode; whatever it raises is the reason of its failure."""
    outcome = attempted(lambda: _played(env, agent, seed, world))
    if isinstance(outcome, Outcome):
        return outcome
    said = (
        str(outcome)
        if isinstance(outcome, ExperientialError)
        else f"{type(outcome).__name__}: {outcome}"
    )
    return Outcome(world, "", 0.0, False, 0, said[:300])


def _played(env: gym.Env[str, str], agent: Agent, seed: int, world: int | None) -> Outcome:
    observation, info = begin(env, seed, world)
    total, turns, over, late = 0.0, 0, False, False
    while not (over or late):
        observation, reward, over, late, info = env.step(agent(observation, info))
        total, turns = total + float(reward), turns + 1
    success = bool(info.get("success"))
    reason = (
        ""
        if success
        else f"{'truncated' if late else 'ended'} after {turns} turns with reward {total:.4g}"
    )
    return Outcome(world, str(info.get("task_id", "")), total, success, turns, reason)


def play_oracle(env: gym.Env[str, str], worlds: Sequence[int | None]) -> list[Outcome]:
    """Play the oracle on each world, by its index as seed."""
    agent = oracle(env)
    return [play(env, agent, seed, world) for seed, world in enumerate(worlds)]


def summary(outcomes: Sequence[Outcome], *, reasons: bool = False) -> dict[str, Any]:
    """Sum outcomes up: success, mean reward and mean turns.

    Success has Wilson's interval, the reward a bootstrap over episodes, or Wilson's where all
    rewards, each in [0, 1], are the same. ``reasons`` adds failures.
    """
    failed = [outcome for outcome in outcomes if not outcome.success]
    found = {
        "episodes": len(outcomes),
        "worlds": len({outcome.world for outcome in outcomes}),
        "success": wilson(len(outcomes) - len(failed), len(outcomes)).model_dump(),
        "reward": (
            clustered_mean(
                np.array([[outcome.reward for outcome in outcomes]]), samples=2000, bounds=RATE
            ).model_dump()
        ),
        "turns": float(np.mean([outcome.turns for outcome in outcomes])),
        "failed": len(failed),
    }
    return found | (
        {"failures": [asdict(outcome) for outcome in failed[:_LISTED]]} if reasons else {}
    )
