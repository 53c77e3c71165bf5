"""Play by the known answer: the ceiling of a benchmark, and proof that an episode can be won."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import gymnasium as gym

Agent = Callable[[str, dict[str, Any]], str]


class HasOracle(Protocol):
    """Declare an environment that knows a best action in its present state."""

    def oracle_action(self) -> str:
        """Return a best action now."""
        ...


def oracle(env: gym.Env[Any, Any]) -> Agent:
    """Return an agent that asks the innermost environment for the best action.

    Raises:
        TypeError: the environment has no ``oracle_action``.
    """
    inner = env.unwrapped
    if not hasattr(inner, "oracle_action"):
        raise TypeError(f"Expected an environment with oracle_action(), got {type(inner).__name__}")
    known = cast(HasOracle, inner)
    return lambda observation, info: known.oracle_action()
