"""Merge, deduplicate and prune the bank beside training, on their schedules."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from experiential.bank.manager import ExperienceManager
from experiential.bank.protocol import Bank
from experiential.config import BankSettings
from experiential.training.metrics import Observer


class BankUpkeep:
    """Start periodic work on the bank in the background, and report failures.

    Args:
        manager: merges and deduplicates.
        settings: how many steps lie between two runs of each kind of work.
        emit: receives the metrics event of each pruning.
    """

    def __init__(self, manager: ExperienceManager, settings: BankSettings, emit: Observer) -> None:
        self._manager, self._settings, self._emit = manager, settings, emit
        self._tasks: set[asyncio.Task[Any]] = set()

    def after_step(self, step: int) -> None:
        """Start the work due after ``step``, counted from 0.

        Raises:
            ExperientialError: work that was started earlier has failed since.
        """
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()  # a failed merge ends the run with its reason, not in silence
        settings, manager = self._settings, self._manager
        for every, work in (
            (settings.merge_every, manager.amerge),
            (settings.dedupe_every, manager.adeduplicate),
            (
                settings.prune_every,
                partial(prune, manager.bank, manager.settings.prune_below, step + 1, self._emit),
            ),
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
