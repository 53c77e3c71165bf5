"""Await an environment's answers before the synchronous wrappers ask; wrap its failures."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from typing import Any, cast

import gymnasium as gym

from experiential.errors import ConfigError, EnvError, ExperientialError

Start = tuple[str, dict[str, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]


class AwaitedEnv(gym.Wrapper[str, str, str, str]):
    """Return awaited answers from ``reset`` and ``step`` at once.

    This is the innermost wrapper of a stack that an event loop plays. Gymnasium's wrappers are
    synchronous, so one that waits for a remote environment holds a thread meanwhile. Here the loop
    first awaits ``await_reset`` or ``await_step``, and then calls the stack with the same action.

    It also separates failures of the environment, which become ``EnvError``, from those of the
    wrappers above. An invalid answer (no text, a reward that is not finite) is such a failure.

    Caveat: the loop must know whether the stack will step the environment at all;
    ``SearchAndAskWrapper`` answers a call itself. An answer that was not awaited before is
    fetched synchronously, and a step with another action than was awaited is a RuntimeError.

    Args:
        env: an environment; only one with ``areset`` and ``astep`` is awaited.
        reward_range: least and largest reward of a step; None takes any finite one.
    """

    def __init__(
        self, env: gym.Env[str, str], reward_range: tuple[float, float] | None = None
    ) -> None:
        super().__init__(env)
        self._range = reward_range
        self._awaitable: Any = env if hasattr(env, "areset") and hasattr(env, "astep") else None
        self._start: Start | None = None
        self._step: tuple[str, Step] | None = None

    async def await_reset(self, *, seed: int | None, options: dict[str, Any] | None) -> None:
        """Fetch the answer of the next ``reset``; do nothing if the environment is synchronous."""
        self._start = self._step = None
        if self._awaitable is not None:
            with environment_errors():
                answer = await self._awaitable.areset(seed=seed, options=options)
                self._start = checked_start(answer)

    async def await_step(self, action: str) -> None:
        """Fetch the answer of the next ``step``, which must have the same action."""
        self._step = None
        if self._awaitable is not None:
            with environment_errors():
                self._step = action, checked_step(await self._awaitable.astep(action), self._range)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Start an episode."""
        start, self._start = self._start, None
        if start is not None:
            return start
        with environment_errors():
            return checked_start(self.env.reset(seed=seed, options=options))

    def step(self, action: str) -> Step:
        """Act."""
        answer, self._step = self._step, None
        if answer is None:
            with environment_errors():
                return checked_step(self.env.step(action), self._range)
        if answer[0] != action:
            raise RuntimeError(
                f"Expected the action {answer[0]!r}, which was awaited and taken already, got"
                f" {action!r}"
            )
        return answer[1]

    def close(self) -> None:
        """Close the environment."""
        with environment_errors():
            self.env.close()


@contextlib.contextmanager
def environment_errors() -> Generator[None]:
    """Raise a failure of the environment as the EnvError that ends its episode.

    Errors that this package raises on purpose pass as they are: they say more, and one of them (no
    worker is left) ends a run. A ``ConfigError`` is of this episode's world, and so a failure.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ExperientialError) and not isinstance(error, ConfigError):
            raise
        raise EnvError(f"{type(error).__name__}: {error}") from error


def checked_start(answer: Any) -> Start:
    """Return the answer of ``reset``; raise TypeError or ValueError if it is invalid."""
    observation, info = answer
    if not isinstance(observation, str):
        raise TypeError(
            f"Expected the environment to observe text, got {type(observation).__name__}; wrap it"
            " in TextObservation"
        )
    if not isinstance(info, dict):
        raise TypeError(f"Expected the environment's info to be a dict, got {type(info).__name__}")
    return observation, cast("dict[str, Any]", info)


def checked_step(answer: Any, reward_range: tuple[float, float] | None = None) -> Step:
    """Return the answer of ``step``; raise TypeError or ValueError if it is invalid."""
    observation, reward, terminated, truncated, info = answer
    reward = float(reward)
    if not math.isfinite(reward):
        raise ValueError(f"Expected step() to give a finite reward, got {reward}")
    if reward_range is not None and not reward_range[0] <= reward <= reward_range[1]:
        raise ValueError(
            f"Expected step() to give a reward in {list(reward_range)} (env.reward_range), got"
            f" {reward}"
        )
    observation, info = checked_start((observation, info))
    return observation, reward, bool(terminated), bool(truncated), info
