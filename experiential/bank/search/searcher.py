"""Micro-batched, diversified retrieval: queries of threads and event loops, served in order."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from experiential.bank.options import RetrievalOptions
from experiential.bank.protocol import Bank
from experiential.bank.records import Standing, asked_near
from experiential.bank.search.strategies import (
    NEAR,
    PER_PLACE,
    STRATEGIES,
    Candidates,
    Near,
    Retrievals,
    by_evidence,
    select,
)
from experiential.bank.search.where import Filter, Ranking, Scope, Where, checked_queries
from experiential.errors import BankError
from experiential.plugins import resolve
from experiential.sync import Batcher, BatchTimeoutError
from experiential.types import Hit, Statistics

_MOST = 512
"""Queries of one batch, when so many wait because all workers are busy."""
_MOST_QUERIES = 4096
CROWD = 1024
"""Candidates at most that lie as near as the best, or among which the newest are looked for."""
CLOSED = "Expected an open manager, got a closed one; make a new ExperienceManager"
Rows = list[list[Hit]]
_EVERYTHING = Scope()


class Request(NamedTuple):
    """Hold one query that waits for its hits."""

    query: str
    k: int
    scope: Scope
    since: float  # ``time.perf_counter()``


@dataclass
class SearchCounts:
    """Count what a searcher has done; the last 4,096 latencies are kept, in seconds."""

    queries: int = 0
    batches: int = 0
    retrievals: int = 0
    abstentions: int = 0
    timeouts: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=4096))


class Searcher:
    """Serve queries in micro-batches: a batch starts at B queries, or t_max after its first.

    Batches are embedded and compared by several threads at once, but choose their entries one batch
    after the other, in the order of arrival, so that a run with one seed finds the same hits again.
    Without ``threads`` a caller searches on its own thread, and coroutines cannot.

    Args:
        bank: where entries are read.
        settings: of retrieval.
        seed: of every draw.
        free_share: of the episodes, see ``plays_free``.
        threads: whether threads of its own search.
    """

    def __init__(
        self,
        bank: Bank,
        settings: RetrievalOptions,
        seed: int,
        *,
        free_share: float,
        threads: bool = True,
    ) -> None:
        self.counts = SearchCounts()
        self._bank = bank
        self._settings = settings
        self._strategy = resolve("strategies", settings.strategy, STRATEGIES)
        self._rng = random.Random(seed)
        # A writable bank knows all counts; beside a read-only one they are kept here, and are
        # forgotten with the searcher.
        self._seen = Retrievals(
            settings.recency,
            earlier=lambda id: self._counters(id).retrievals,
            evidence=self._standings,
        )
        self._has_outcomes = False  # near the query answered last
        self._query = ""  # that is being answered, and its candidates
        self._near = Near([])
        self._settled: dict[str, bool] = {}  # of the queries answered last; "" is the last of all
        self._free_share = free_share
        # Another stream after each start, the same one from the same seed and journal.
        self._age = bank.head  # and the episodes since
        self._free_draws = random.Random(f"free episodes: {seed} {self._age}")
        self._batcher: Batcher[Request, list[Hit]]
        if threads:
            self._batcher = Batcher(
                self._candidates,
                finish=self._answer,
                size=settings.batch_size,
                wait=settings.batch_wait,
                most=_MOST,
                workers=settings.workers,
                name="experiential-search",
            )
        else:
            self._batcher = Batcher(
                lambda batch: self._answer(batch, self._candidates(batch)), most=_MOST
            )
        # Now, before somebody waits: the words are indexed, the outcomes read.
        if settings.hybrid:
            bank.nearest([], 1, (), words=True)
        if settings.strategy == "evidence":
            bank.standings([])

    def _counters(self, id: str) -> Statistics:
        near = self._near
        return self._bank.counters(near.entry(id)) if id in near.ids else Statistics()

    def _standings(self, near: Candidates) -> list[Standing]:
        if isinstance(near, Near):
            found = list(zip(near.entries(), near.cosines, strict=True))
        else:
            hybrid, entry = self._settings.hybrid, self._near.entry
            found = [(entry(one.id), one.relevance(hybrid)) for one in near]
        if self._strategy is by_evidence:
            standings = self._bank.standings_near(self._query, found)
        else:  # other strategies may ask for ages
            standings = self._bank.standings(asked_near(self._query, found))
        self._has_outcomes = standings[0].others > 0
        for query in (self._query, ""):
            self._settled.pop(query, None)
            self._settled[query] = standings[0].settled
        if len(self._settled) > _MOST_QUERIES:
            self._settled.pop(next(iter(self._settled)), None)
        return standings

    def plays_free(self, task: str) -> bool:
        """Draw whether the next episode of a task plays free (``ExperienceManager.plays_free``)."""
        self._age += 1
        share = self._free_share
        drawn = self._free_draws.random() < share and self._age * share >= 1.0
        # The last search for the task, else the last of all, says whether outcomes settle it.
        return drawn and not self._settled.get(task, self._settled.get("", False))

    def requests(
        self,
        query: str | Sequence[str],
        k: int | None,
        exclude: str | None,
        where: Filter | None,
    ) -> list[Request | None]:
        """Check the arguments of a search; return a request for each query, None if it is blank."""
        k, now = self._settings.k if k is None else k, time.perf_counter()
        queries, asked = checked_queries(query, k, blank=True), Where.of(where)

        scope = _EVERYTHING if exclude is None and asked is None else Scope(exclude, asked)

        def scoped(query: str) -> Scope:
            if not self._settings.same_task:
                return scope
            return Scope(exclude, Where({**(asked.fields if asked else {}), "task": query}))

        return [Request(one, k, scoped(one), now) if one.strip() else None for one in queries]

    def search(self, requests: Sequence[Request | None]) -> Rows:
        """Return the hits of each request, none for None.

        Raises:
            BankError: no answer within ``timeout`` seconds, or the searcher is closed.
        """
        asked = [one for one in requests if one is not None]
        try:
            found = iter(self._batcher.run(asked, self._settings.timeout))
        except BatchTimeoutError as error:
            raise self._late() from error
        return [[] if one is None else next(found) for one in requests]

    async def asearch(self, requests: Sequence[Request | None]) -> Rows:
        """Do as ``search``, awaitable on any event loop."""
        asked = [one for one in requests if one is not None]
        try:
            found = iter(await self._batcher.arun(asked, self._settings.timeout))
        except BatchTimeoutError as error:
            raise self._late() from error
        return [[] if one is None else next(found) for one in requests]

    def _late(self) -> BankError:
        self.counts.timeouts += 1
        return BankError(
            f"Expected the bank's answer within {self._settings.timeout} s, got none; "
            "look at what the embedder waits for, or raise bank.options.retrieval.timeout"
        )

    def _candidates(self, batch: list[Request]) -> list[Ranking]:
        """Return the entries near each query, best first; runs for several batches at a time."""
        hybrid = self._settings.hybrid > 0.0
        wanted = max(request.k for request in batch) * self._settings.pool * PER_PLACE
        wanted *= 4 if self._settings.strategy == "evidence" else 1
        if self._settings.strategy == "recent":  # the newest need not be the nearest
            wanted = max(wanted, CROWD)
        # A query that a group asks several times is run once.
        keys = [(request.query, request.scope) for request in batch]
        distinct = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        queries, scopes = zip(*distinct, strict=True)
        rows = self._bank.nearest(queries, wanted, scopes, words=hybrid)
        for place, row in enumerate(rows if self._has_outcomes and not hybrid else ()):
            # A crowd of untried entries as near as the best must not hide a proven one behind it.
            is_crowded = len(row) == wanted < CROWD and row[0].score - row[-1].score <= NEAR
            if is_crowded and not any(self._bank.counters(one.item).uses for one in row):
                [rows[place]] = self._bank.nearest([queries[place]], CROWD, [scopes[place]])
        return [rows[distinct[key]] for key in keys]

    def _answer(self, batch: list[Request], rows: list[Ranking]) -> list[list[Hit]]:
        """Choose the hits of each query; one batch after the other."""
        self.counts.batches += 1
        self.counts.queries += len(batch)
        settings = self._settings
        answers: list[list[Hit]] = []
        for request, row in zip(batch, rows, strict=True):
            self._query = request.query
            near = self._near = Near(row)
            chosen = select(near, self._seen, settings, self._rng, request.k, self._strategy)
            if not self._bank.read_only:
                self._bank.note_retrievals(candidate.id for candidate, _ in chosen)
            hits: list[Hit] = []
            for rank, (one, propensity) in enumerate(chosen):
                hit = Hit(
                    experience=self._bank.read(near.entry(one.id)),
                    score=one.relevance(settings.hybrid),
                    rank=rank,
                    propensity=propensity,
                )
                hits.append(hit)
            self.counts.retrievals += len(hits)
            self.counts.abstentions += not hits
            self.counts.seconds.append(time.perf_counter() - request.since)
            answers.append(hits)
        return answers

    def close(self) -> None:
        """Let the callers that still wait go, with an error, and end the threads."""
        self._batcher.close(BankError(CLOSED), self._settings.timeout)
