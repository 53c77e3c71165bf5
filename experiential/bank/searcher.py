"""Micro-batched, diversified retrieval on one event loop: queries meet, are embedded together, and are served in order."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from experiential.bank.bank import ExperienceBank
from experiential.bank.retrieval import Candidate, Retrievals, select
from experiential.bank.trust import Probation
from experiential.bank.vectors import Scored
from experiential.bank.where import Where
from experiential.config import RetrievalSettings
from experiential.types import Experience, Hit, Statistics

_TIED = 4
"""Candidates fetched for each place of the pool, so that ties at its border can rotate."""


class Request(NamedTuple):
    """One query that waits for its hits."""

    query: str
    k: int
    exclude: str | None
    where: Where | None
    admitted: bool | None
    future: asyncio.Future[list[Hit]]
    since: float


class SearchCounts:
    """What the searcher has done so far."""

    def __init__(self) -> None:
        self.queries = 0
        self.batches = 0
        self.retrievals = 0
        self.abstentions = 0
        self.seconds: deque[float] = deque(maxlen=4096)


class Searcher:
    """Serves queries in micro-batches of at most B, waiting at most t_max for a batch to fill; lives on one event loop.

    Batches are embedded and compared by several threads at once, but choose their entries one batch after the other, in the order of
    arrival: a run with one seed gives the same hits again. A caller that is cancelled is skipped and holds nobody up.
    """

    def __init__(self, bank: ExperienceBank, settings: RetrievalSettings, seed: int, probation: Probation | None = None) -> None:
        self.counts = SearchCounts()
        self._bank = bank
        self._probation = probation
        self._settings = settings
        self._rng = random.Random(seed)
        # A writable bank knows all counts; beside a read-only one they are kept here, and are forgotten with the searcher.
        self._seen = Retrievals(settings.recency, self._earlier, self._utility)
        self._waiting: deque[Request] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Event | None = None
        self._batches: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(settings.workers, thread_name_prefix="experiential-search")
        self._journalled: dict[str, int] = {}
        self._found: dict[str, Scored[Experience]] = {}  # the candidates of the query that is being answered
        if settings.hybrid:
            bank.nearest([], 1, [], words=True)  # indexes the words now, before somebody waits

    def _earlier(self, id: str) -> int:
        if id not in self._journalled:
            self._journalled[id] = self._counters(id).retrievals
        return self._journalled[id]

    def _utility(self, id: str) -> float:
        return self._counters(id).score

    def _counters(self, id: str) -> Statistics:
        found = self._found.get(id)
        return Statistics() if found is None else self._bank.counters(found.item)

    async def search(
        self, queries: Sequence[str], k: int, exclude: str | None, episodes: Sequence[str], where: Where | None = None
    ) -> list[list[Hit]]:
        """The hits of each query, asked in the episode of the same place; a query of nothing but blanks gets none."""
        loop = asyncio.get_running_loop()
        now = time.perf_counter()
        requests = [
            Request(query, k, exclude, where, self._admitted(episode), loop.create_future(), now)
            for query, episode in zip(queries, episodes, strict=True)
        ]
        for request in requests:
            if request.query.strip():
                self._enqueue(request, loop)
            else:
                request.future.set_result([])
        return list(await asyncio.gather(*(request.future for request in requests)))

    def _admitted(self, episode: str) -> bool | None:
        return None if self._probation is None else self._probation.admits(episode)

    def _enqueue(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting.append(request)
        if len(self._waiting) >= self._settings.batch_size:
            self._dispatch()
        elif self._timer is None:
            self._timer = loop.call_later(self._settings.batch_wait, self._dispatch)

    def _dispatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [request for request in self._waiting if not request.future.done()]
        self._waiting.clear()
        if self._probation is not None:
            self._probation.wake()
        if batch:
            before, self._turn = self._turn, asyncio.Event()
            task = asyncio.get_running_loop().create_task(self._serve(batch, before, self._turn))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _serve(self, batch: list[Request], before: asyncio.Event | None, done: asyncio.Event) -> None:
        try:
            loop = asyncio.get_running_loop()
            rows = await loop.run_in_executor(self._threads, self._candidates, batch)
            if before is not None:
                await before.wait()
            self._answer(batch, rows)
        except Exception as error:  # noqa: BLE001  (whatever the embedder raised belongs to the callers of this batch, and to no other)
            for request in batch:
                if not request.future.done():
                    request.future.set_exception(error)
        finally:
            done.set()

    def _candidates(self, batch: list[Request]) -> list[list[Scored[Experience]]]:
        wanted = max(request.k for request in batch) * self._settings.pool * _TIED
        rows = self._nearest(batch, wanted)
        if self._probation is not None:
            admitted = [request.admitted is True for request in batch]
            floor = -1.0 if self._settings.hybrid else self._settings.floor  # words may lift an entry of any cosine over the floor
            self._probation.sift(rows, admitted, wanted, floor, lambda at, n: self._nearest([batch[i] for i in at], n))
        return rows

    def _nearest(self, batch: list[Request], wanted: int) -> list[list[Scored[Experience]]]:
        queries, exclude, where = zip(*((one.query, one.exclude, one.where) for one in batch), strict=True)
        return self._bank.nearest(queries, wanted, exclude, where, words=self._settings.hybrid > 0.0)

    def _answer(self, batch: list[Request], rows: list[list[Scored[Experience]]]) -> None:
        self.counts.batches += 1
        self.counts.queries += len(batch)
        for request, row in zip(batch, rows, strict=True):
            if request.future.done():
                continue
            hits = self._choose(request, row)
            self.counts.retrievals += len(hits)
            self.counts.abstentions += not hits
            self.counts.seconds.append(time.perf_counter() - request.since)
            request.future.set_result(hits)

    def _choose(self, request: Request, row: list[Scored[Experience]]) -> list[Hit]:
        found = self._found = {scored.item.id: scored for scored in row}
        candidates = [Candidate(id, scored.score, scored.words) for id, scored in found.items()]
        chosen = select(candidates, self._seen, self._settings, self._rng, request.k)
        if not self._bank.read_only:
            self._bank.note_retrievals(candidate.id for candidate, _ in chosen)
        hybrid = self._settings.hybrid
        hits = [
            Hit(experience=self._bank.read(found[one.id].item), score=one.relevance(hybrid), rank=rank, propensity=propensity)
            for rank, (one, propensity) in enumerate(chosen)
        ]
        return hits if self._probation is None or request.admitted is None else self._probation.mark(hits, request.admitted)

    def close(self) -> None:
        """Let the callers that still wait go, and end the threads."""
        for request in self._waiting:
            request.future.cancel()
        for task in self._batches:
            task.cancel()
        self._threads.shutdown(wait=True)
