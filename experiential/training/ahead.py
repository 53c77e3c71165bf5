"""Run rollouts ahead of training: play the next steps while the trainer learns from one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class RolloutsAhead(Generic[T]):
    """Play steps one after the other, at most ``ahead`` beyond the last one taken.

    So a step is played by weights that lack at most ``ahead`` updates; its samples carry the
    version and the log-probabilities of the weights that drew them.

    Args:
        play: plays one step.
        ahead: steps that may be played, or playing, beyond the one taken; 0 plays a step when it is
            asked for.
    """

    def __init__(self, play: Callable[[int], Awaitable[T]], ahead: int) -> None:
        self._play, self._ahead = play, ahead
        self._tasks: dict[int, asyncio.Task[T]] = {}
        self._turn = asyncio.Lock()

    async def take(self, step: int, until: int) -> T:
        """Return the result of ``step``; start later steps, up to ``until`` (exclusive)."""
        try:
            played = await self._started(step)
        finally:
            self._tasks.pop(step, None)
        for later in range(step + 1, min(step + 1 + self._ahead, until)):
            self._started(later)
        return played

    async def close(self) -> None:
        """Cancel the steps still being played."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _started(self, step: int) -> asyncio.Task[T]:
        if step not in self._tasks:
            self._tasks[step] = asyncio.create_task(self._in_turn(step))
        return self._tasks[step]

    async def _in_turn(self, step: int) -> T:
        async with self._turn:
            return await self._play(step)
