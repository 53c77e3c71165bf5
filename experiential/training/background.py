"""Work beside the trainer's steps: play later steps ahead, and keep the bank in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar

from experiential.bank.manager import ExperienceManager
from experiential.bank.protocol import Bank
from experiential.config import BankSettings
from experiential.training.metrics import Observer

T = TypeVar("T")


class RolloutsAhead(Generic[T]):
    """Play steps one after the other, at most ``ahead`` beyond the last one taken.

    So a step is played by weights that lack at most ``ahead`` updates; its samples carry the
    version and the log-probabilities of the weights that drew them. 0 plays a step when it is asked
    for.
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
        async def in_turn() -> T:
            async with self._turn:
                return await self._play(step)

        if step not in self._tasks:
            self._tasks[step] = asyncio.create_task(in_turn())
        return self._tasks[step]


class BankUpkeep:
    """Merge, deduplicate and prune the bank on the schedules of the settings."""

    def __init__(self, manager: ExperienceManager, settings: BankSettings, emit: Observer) -> None:
        self._manager, self._settings, self._emit = manager, settings, emit
        self._tasks: set[asyncio.Task[Any]] = set()

    def after_step(self, step: int) -> None:
        """Start the work due after ``step``, counted from 0; raise what failed since."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()  # a failed merge ends the run with its reason, not in silence
        settings, manager = self._settings, self._manager
        pruning = partial(prune, manager.bank, manager.settings.prune_below, step + 1, self._emit)
        for every, work in (
            (settings.merge_every, manager.amerge),
            (settings.dedupe_every, manager.adeduplicate),
            (settings.prune_every, pruning),
        ):
            if every and (step + 1) % every == 0:
                self._tasks.add(asyncio.create_task(work()))

    async def finish(self) -> None:
        """Wait for the work under way."""
        await asyncio.gather(*self._tasks)
        self._tasks.clear()

    async def close(self) -> None:
        """Cancel the work under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def prune(bank: Bank, below: float, step: int, emit: Observer) -> None:
    """Remove the entries with a Laplace score below ``below``, and record how many.

    An entry that was never used has a score of 0.5 and stays. At 0.3, the value of EvolveR's
    script, so does one whose only use was in a failure.
    """
    gone = await asyncio.to_thread(partial(bank.prune, score=below, min_uses=0, author="run"))
    emit({"event": "prune", "step": step, "pruned": len(gone), "entries": len(bank)})
