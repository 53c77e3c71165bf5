"""Serve episodes of a bank where no manager runs: ``bank.episode``."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

from experiential.bank.options import ManagerOptions
from experiential.bank.outcome import OutcomeJudge, judged
from experiential.bank.protocol import Bank
from experiential.bank.search.searcher import Searcher
from experiential.bank.search.where import Filter
from experiential.types import Answer, Hit, Trajectory


class Unmanaged:
    """Take the manager's place for episodes of a bank that no manager runs.

    It shows entries by evidence and lets a share of the episodes play free, as a manager does by
    default. Entries are shown as they are, and records are queued durably for whoever distils this
    bank. It starts no thread, so nothing needs to be closed.
    """

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._searchers: dict[int, Searcher] = {}  # by process: a fork may cut a search in two

    @property
    def _searcher(self) -> Searcher:
        if (made := self._searchers.get(os.getpid())) is None:
            settings = ManagerOptions()
            share = settings.free_share
            made = Searcher(self._bank, settings.retrieval, 0, free_share=share, threads=False)
        return self._searchers.setdefault(os.getpid(), made)

    def search(
        self,
        query: str,
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        where: Filter | None = None,
    ) -> list[Hit]:
        """Return the hits of one query, as ``ExperienceManager.search`` does."""
        searcher = self._searcher
        return searcher.search(searcher.requests(query, k, exclude_instance, where))[0]

    def ask(self, query: str, *, episode: str = "", turn: int = 0, **scope: Any) -> Answer:
        """Return the best entry as it is."""
        for hit in self.search(query, k=1, **scope):
            use = hit.use("search_and_ask", episode=episode, turn=turn)
            return Answer(text=hit.experience.text, hit=hit, use=use)
        return Answer()

    def submit(
        self, trajectory: Trajectory, judge: OutcomeJudge | None = None, *, distil: bool = True
    ) -> str | None:
        """Queue a record; a read-only bank keeps none.

        A judge is waited for, since nothing runs here in the background.
        """
        if self._bank.read_only:
            return None
        if judge is not None:
            self._bank.record(trajectory)
            said = judged(trajectory, judge)
            if said.judgement:
                self._bank.conclude(said.id, said.success, judgement=said.judgement)
        if not distil:
            self._bank.record(trajectory)
            return None
        self._bank.submit(trajectory)
        return trajectory.id

    async def asearch(self, query: str, **options: Any) -> list[Hit]:
        """Search in another thread."""
        return await asyncio.to_thread(self.search, query, **options)

    async def aask(self, query: str, **options: Any) -> Answer:
        """Ask in another thread."""
        return await asyncio.to_thread(self.ask, query, **options)

    async def asubmit(
        self, trajectory: Trajectory, judge: OutcomeJudge | None = None, *, distil: bool = True
    ) -> str | None:
        """Submit in another thread, to the end even if the caller is cancelled."""
        submit = partial(self.submit, trajectory, judge, distil=distil)
        return await asyncio.shield(asyncio.to_thread(submit))

    def plays_free(self, task: str) -> bool:
        """Draw whether the next episode of a task plays free, as the manager does by default.

        None does where records are not kept, since no evidence would come of it.
        """
        return not self._bank.read_only and self._searcher.plays_free(task)

    def close(self) -> None:
        """Do nothing; the bank is its opener's."""
