"""An environment whose next answer can be awaited on an event loop before the synchronous wrappers above ask for it."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import gymnasium as gym

Start = tuple[str, dict[str, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]


@runtime_checkable
class AwaitableEnv(Protocol):
    """An environment with coroutines beside ``reset`` and ``step``."""

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Coroutine form of ``reset``."""
        ...

    async def astep(self, action: str) -> Step:
        """Coroutine form of ``step``."""
        ...


class AwaitedEnv(gym.Wrapper[str, str, str, str]):
    """The innermost wrapper of a stack that an event loop plays: ``reset`` and ``step`` return at once what was awaited before.

    Gymnasium's wrappers are synchronous, so a wrapper that waits for a remote environment holds a thread while it waits. Here the loop
    first awaits ``await_reset`` or ``await_step``, with no thread, and then calls the stack with the same action.

    Caveat: the loop must know whether the stack will step the environment at all; ``SearchAndAskWrapper`` answers a call itself. What
    was not awaited before is asked for synchronously.

    No vector version exists: it is for one environment of a rollout.

    Change log: v0.1.0 added.

    Args:
        env: an environment; only an ``AwaitableEnv`` is awaited, any other is called as always.

    Raises:
        RuntimeError: another call comes than the one whose answer was awaited.
    """

    def __init__(self, env: gym.Env[str, str]) -> None:
        super().__init__(env)
        self._awaitable = env if isinstance(env, AwaitableEnv) else None
        self._start: Start | None = None
        self._step: tuple[str, Step] | None = None

    async def await_reset(self, *, seed: int | None, options: dict[str, Any] | None) -> None:
        """Fetch the answer of the next ``reset``; nothing happens where the environment cannot be awaited."""
        self._start = self._step = None
        if self._awaitable is not None:
            self._start = await self._awaitable.areset(seed=seed, options=options)

    async def await_step(self, action: str) -> None:
        """Fetch the answer of the next ``step``, which must have the same action."""
        self._step = None
        if self._awaitable is not None:
            self._step = action, await self._awaitable.astep(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Start an episode."""
        start, self._start = self._start, None
        return start if start is not None else self.env.reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        """Act."""
        awaited, self._step = self._step, None
        if awaited is None:
            observation, reward, terminated, truncated, info = self.env.step(action)
            return observation, float(reward), terminated, truncated, info
        if awaited[0] != action:
            raise RuntimeError(f"Expected the action {awaited[0]!r}, which was awaited and taken already, got {action!r}")
        return awaited[1]
