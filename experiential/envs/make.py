"""An environment by its id, typed: Gymnasium's own ``make`` says neither what it takes nor what it gives."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym


def make(env_id: str, **arguments: Any) -> gym.Env[Any, Any]:
    """``gymnasium.make`` without its checker, which rejects text of free length.

    Raises:
        gymnasium.error.Error: there is no such id.
    """
    return cast("Any", gym).make(env_id, disable_env_checker=True, **arguments)
