"""Many calls for one item each made into few calls for many, each caller with its own result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from experiential.sync import awaited

A = TypeVar("A")
R = TypeVar("R")


class Arrivals(Generic[A, R]):
    """Hands items to a coroutine in batches, in the order of their arrival: what comes while one batch is handled is the next.

    Lives on one event loop. A caller that is cancelled does not wait any more; its item is handled
    all the same.

    >>> async def five() -> tuple[list[str], list[list[str]]]:
    ...     batches: list[list[str]] = []
    ...     async def handle(letters: list[str]) -> list[str | Exception]:
    ...         batches.append(letters)
    ...         return [letter.upper() for letter in letters]
    ...     arrivals = Arrivals(handle)
    ...     return await asyncio.gather(*(arrivals(letter) for letter in "abcde")), batches
    >>> asyncio.run(five())
    (['A', 'B', 'C', 'D', 'E'], [['a', 'b', 'c', 'd', 'e']])

    Args:
        handle: gives for each item of a batch its result or its error; what it raises itself is the
            error of every item.
    """

    def __init__(self, handle: Callable[[list[A]], Awaitable[Sequence[R | Exception]]]) -> None:
        self._handle = handle
        self._waiting: list[tuple[A, asyncio.Future[R]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, item: A) -> R:
        """The result of one item."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = loop.create_task(self._handle_all())
        return await future

    async def _handle_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            outcomes = await self._outcomes([item for item, _ in batch])
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                _settle(future, outcome)
        self._task = None

    async def _outcomes(self, items: list[A]) -> Sequence[R | Exception]:
        outcomes = await awaited(self._handle(items))
        return [outcomes] * len(items) if isinstance(outcomes, Exception) else outcomes


def _settle(future: asyncio.Future[R], outcome: R | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
