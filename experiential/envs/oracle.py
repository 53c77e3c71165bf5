"""An agent that knows the answer: the ceiling of every benchmark, and the check that an episode can be won."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import gymnasium as gym

Agent = Callable[[str, dict[str, Any]], str]


class HasOracle(Protocol):
    """An environment that can tell a best action in its present state."""

    def oracle_action(self) -> str:
        """A best action now."""
        ...


def oracle(env: gym.Env[Any, Any]) -> Agent:
    """An agent ``(observation, info) -> action`` that asks ``env`` itself for the best action; wrappers are looked through.

    Raises:
        TypeError: the environment has no ``oracle_action``.
    """
    inner = env.unwrapped
    if not hasattr(inner, "oracle_action"):
        raise TypeError(f"Expected an environment with oracle_action(), got {type(inner).__name__}")
    known = cast(HasOracle, inner)
    return lambda observation, info: known.oracle_action()
