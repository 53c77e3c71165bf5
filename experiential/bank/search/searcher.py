"""Micro-batched, diversified retrieval: queries of many threads and event loops meet, are embedded together, and are served in order."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import NamedTuple

from experiential.bank.evidence.trust import Probation
from experiential.bank.index.vectors import Scored
from experiential.bank.options import RetrievalOptions
from experiential.bank.protocol import Bank
from experiential.bank.search.strategies import Candidate, Retrievals, candidates_for, select
from experiential.bank.search.where import Where
from experiential.errors import BankError
from experiential.sync import attempted
from experiential.types import Experience, Hit, Statistics

_MOST = 512
"""Queries of one batch, when so many wait because all workers are busy."""
_CLOSED = "Expected an open manager, got a closed one; make a new ExperienceManager"
Rows = list[list[Hit]]


class Call:
    """The queries of one caller, and what they have found so far; the caller waits in a thread or on an event loop."""

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.rows: Rows = [[] for _ in range(count)]
        self.missing = count
        self.loop = loop
        self.future: Future[Rows] | asyncio.Future[Rows] = (
            Future[Rows]() if loop is None else loop.create_future()
        )

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.future.done()


class Request(NamedTuple):
    """One query that waits for its hits, and its place in its call."""

    query: str
    k: int
    exclude: str | None
    where: Where | None
    admitted: bool | None
    call: Call
    place: int
    since: float


class SearchCounts:
    """What the searcher has done so far."""

    def __init__(self) -> None:
        self.queries = 0
        self.batches = 0
        self.retrievals = 0
        self.abstentions = 0
        self.timeouts = 0
        self.seconds: deque[float] = deque(maxlen=4096)


class Searcher:
    """Serves queries in micro-batches: a batch starts when B queries wait, or t_max after the first of them came.

    What has come meanwhile goes with it, so that a crowd is served in few batches. Batches are
    embedded and compared by several threads at once, but choose their entries one batch after the
    other, in the order of arrival: a run with one seed gives the same hits again. A caller that is
    cancelled is skipped and holds nobody up.
    """

    def __init__(
        self,
        bank: Bank,
        settings: RetrievalOptions,
        seed: int,
        probation: Probation | None = None,
    ) -> None:
        self.counts = SearchCounts()
        self._bank = bank
        self._probation = probation
        self._settings = settings
        self._rng = random.Random(seed)
        # A writable bank knows all counts; beside a read-only one they are kept here, and are
        # forgotten with the searcher.
        self._seen = Retrievals(settings.recency, self._earlier, self._utility)
        self._journalled: dict[str, int] = {}
        self._found: dict[
            str, Scored[Experience]
        ] = {}  # the candidates of the query that is being answered
        self._waiting: deque[Request] = deque()
        self._arrived = threading.Condition()
        self._gathering = False
        self._idle = 0
        self._closed = False
        self._taken = 0
        self._answered = 0
        self._turn = threading.Condition()
        self._threads: list[threading.Thread] = []
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

    def search(
        self,
        queries: Sequence[str],
        k: int,
        exclude: str | None,
        episodes: Sequence[str],
        where: Where | None = None,
    ) -> Rows:
        """The hits of each query, asked in the episode of the same place; a query of nothing but blanks gets none.

        Raises:
            BankError: they were not found within ``timeout`` seconds.
        """
        call = Call(len(queries))
        self._enqueue(call, queries, k, exclude, episodes, where)
        assert isinstance(call.future, Future)
        try:
            return call.future.result(self._settings.timeout)
        except TimeoutError as error:
            if not call.future.cancel():  # it ended so: the embedder's own
                raise
            raise self._late() from error

    async def asearch(
        self,
        queries: Sequence[str],
        k: int,
        exclude: str | None,
        episodes: Sequence[str],
        where: Where | None = None,
    ) -> Rows:
        """``search``, awaitable on any event loop."""
        call = Call(len(queries), asyncio.get_running_loop())
        self._enqueue(call, queries, k, exclude, episodes, where)
        assert isinstance(call.future, asyncio.Future) and call.loop is not None
        alarm = call.loop.call_later(
            self._settings.timeout, lambda: None if call.is_over else _resolve([call], self._late())
        )
        try:
            return await call.future
        finally:
            alarm.cancel()

    def _late(self) -> BankError:
        self.counts.timeouts += 1
        return BankError(
            f"Expected the bank's answer within {self._settings.timeout} s, got none; "
            "look at what the embedder waits for, or raise bank.options.retrieval.timeout"
        )

    def _enqueue(
        self,
        call: Call,
        queries: Sequence[str],
        k: int,
        exclude: str | None,
        episodes: Sequence[str],
        where: Where | None,
    ) -> None:
        now = time.perf_counter()
        asked = [(place, query) for place, query in enumerate(queries) if query.strip()]
        call.missing = len(asked)
        if not asked:
            call.future.set_result(call.rows)
            return
        requests = [
            Request(query, k, exclude, where, self._admitted(episodes[place]), call, place, now)
            for place, query in asked
        ]
        with self._arrived:
            if self._closed:
                raise BankError(_CLOSED)
            if not self._idle and len(self._threads) < self._settings.workers:
                self._hire()
            self._waiting.extend(requests)
            if not self._gathering:
                self._arrived.notify()
            elif len(self._waiting) >= self._settings.batch_size:
                self._arrived.notify_all()  # one of them is gathering

    def _admitted(self, episode: str) -> bool | None:
        return None if self._probation is None else self._probation.admits(episode)

    def _hire(self) -> None:
        worker = threading.Thread(
            target=self._work, name=f"experiential-search-{len(self._threads)}", daemon=True
        )
        self._threads.append(worker)
        worker.start()

    def _work(self) -> None:
        while (taken := self._next_batch()) is not None:
            number, batch = taken
            rows = attempted(lambda batch=batch: self._candidates(batch))
            with self._turn:
                while self._answered != number:
                    self._turn.wait()
                found = (
                    rows
                    if isinstance(rows, Exception)
                    else attempted(lambda batch=batch, rows=rows: self._answer(batch, rows))
                )
                self._answered += 1
                self._turn.notify_all()
            if isinstance(found, Exception):
                _deliver(dict.fromkeys(request.call for request in batch), found)
            else:
                _deliver(found)

    def _next_batch(self) -> tuple[int, list[Request]] | None:
        """The next batch and its number, once B queries wait or the first has waited for t_max; None when the searcher is closed."""
        with self._arrived:
            while True:
                self._idle += 1
                while not self._closed and (self._gathering or not self._waiting):
                    self._arrived.wait()
                self._idle -= 1
                if self._closed:
                    return None
                self._gathering = True
                self._gather()
                self._gathering = False
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST))]
                if self._waiting:
                    self._arrived.notify()
                if batch := [request for request in batch if not request.call.is_over]:
                    self._taken += 1
                    break
            return self._taken - 1, batch

    def _gather(self) -> None:
        until = self._waiting[0].since + self._settings.batch_wait
        while (
            len(self._waiting) < self._settings.batch_size
            and (left := until - time.perf_counter()) > 0
            and not self._closed
        ):
            self._arrived.wait(left)

    def _candidates(self, batch: list[Request]) -> list[list[Scored[Experience]]]:
        if self._probation is not None:
            self._probation.wake()
        wanted = candidates_for(max(request.k for request in batch), self._settings.pool)
        rows = self._nearest(batch, wanted)
        if self._probation is not None:
            admitted = [request.admitted is True for request in batch]
            floor = (
                -1.0 if self._settings.hybrid else self._settings.floor
            )  # words may lift an entry of any cosine over the floor
            self._probation.sift(
                rows,
                admitted,
                wanted,
                floor,
                lambda at, n: self._nearest([batch[i] for i in at], n),
            )
        return rows

    def _nearest(self, batch: list[Request], wanted: int) -> list[list[Scored[Experience]]]:
        """Candidates of each query; what a group asks several times is looked up once."""
        asked = [(one.query, one.exclude, one.where) for one in batch]
        distinct = {one: place for place, one in enumerate(dict.fromkeys(asked))}
        queries, exclude, where = zip(*distinct, strict=True)
        rows = self._bank.nearest(
            queries, wanted, exclude, where, words=self._settings.hybrid > 0.0
        )
        return [list(rows[distinct[one]]) for one in asked]

    def _answer(self, batch: list[Request], rows: list[list[Scored[Experience]]]) -> list[Call]:
        """Choose the hits of each query; gives the calls that have all of theirs."""
        self.counts.batches += 1
        self.counts.queries += len(batch)
        finished: list[Call] = []
        for request, row in zip(batch, rows, strict=True):
            call = request.call
            if call.is_over:
                continue
            hits = call.rows[request.place] = self._choose(request, row)
            self.counts.retrievals += len(hits)
            self.counts.abstentions += not hits
            self.counts.seconds.append(time.perf_counter() - request.since)
            call.missing -= 1
            if not call.missing:
                finished.append(call)
        return finished

    def _choose(self, request: Request, row: list[Scored[Experience]]) -> list[Hit]:
        found = self._found = {scored.item.id: scored for scored in row}
        candidates = [Candidate(id, scored.score, scored.words) for id, scored in found.items()]
        chosen = select(candidates, self._seen, self._settings, self._rng, request.k)
        if not self._bank.read_only:
            self._bank.note_retrievals(candidate.id for candidate, _ in chosen)
        hybrid = self._settings.hybrid
        hits = [
            Hit(
                experience=self._bank.read(found[one.id].item),
                score=one.relevance(hybrid),
                rank=rank,
                propensity=propensity,
            )
            for rank, (one, propensity) in enumerate(chosen)
        ]
        return (
            hits
            if self._probation is None or request.admitted is None
            else self._probation.mark(hits, request.admitted)
        )

    def close(self) -> None:
        """Let the callers that still wait go, and end the threads."""
        with self._arrived:
            self._closed = True
            left = [*self._waiting]
            self._waiting.clear()
            self._arrived.notify_all()
        _deliver(dict.fromkeys(request.call for request in left), BankError(_CLOSED))
        for thread in self._threads:
            thread.join(self._settings.timeout)


def _deliver(calls: Iterable[Call], error: Exception | None = None) -> None:
    """Let the callers go on: a thread at once, the tasks of an event loop with one wake-up for all."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Call]] = {}
    for call in calls:
        if call.loop is None:
            _resolve([call], error)
        else:
            by_loop.setdefault(call.loop, []).append(call)
    for loop, several in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a loop that has closed has nobody waiting
            loop.call_soon_threadsafe(_resolve, several, error)


def _resolve(calls: Iterable[Call], error: Exception | None) -> None:
    for call in calls:
        with contextlib.suppress(
            CancelledError, InvalidStateError, asyncio.InvalidStateError
        ):  # the caller has just given up
            if call.is_over:
                continue
            if error is None:
                call.future.set_result(call.rows)
            else:
                call.future.set_exception(error)
