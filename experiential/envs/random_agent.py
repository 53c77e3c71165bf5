"""Play by random draws: the floor of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from experiential.envs.oracle import Agent


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
