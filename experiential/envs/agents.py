"""Play without a model: by the known answer, a benchmark's ceiling, or at random, its floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

Agent = Callable[[str, dict[str, Any]], str]


def oracle(env: gym.Env[Any, Any]) -> Agent:
    """Return an agent that asks the innermost environment for a best action; TypeError without."""
    inner: Any = env.unwrapped
    if not hasattr(inner, "oracle_action"):
        raise TypeError(f"Expected an environment with oracle_action(), got {type(inner).__name__}")
    return lambda observation, info: inner.oracle_action()


def random_agent(env: gym.Env[Any, Any], seed: int = 0, actions: Sequence[str] = ()) -> Agent:
    """Return an agent that draws uniformly among ``info["admissible"]``.

    Where an environment names none it draws among ``actions``, and without those from the action
    space, which is text of any kind.

    >>> from experiential.envs.vault import VaultEnv
    >>> env = VaultEnv()
    >>> observation, info = env.reset(seed=0)
    >>> random_agent(env, seed=1)(observation, info) in info["admissible"]
    True
    """
    rng = np.random.default_rng(seed)
    env.action_space.seed(seed)

    def act(observation: str, info: dict[str, Any]) -> str:
        known = info.get("admissible") or actions
        return known[int(rng.integers(len(known)))] if known else env.action_space.sample()

    return act
