"""Micro-batched, diversified retrieval: queries of threads and event loops, served in order."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from experiential.bank.evidence.credit import Ancestor
from experiential.bank.evidence.trust import Episodes, Probation
from experiential.bank.options import RetrievalOptions
from experiential.bank.protocol import Bank
from experiential.bank.search.strategies import PER_PLACE, STRATEGIES, Candidate, Retrievals, select
from experiential.bank.search.where import Filter, Scope, Scored, Where, checked_queries
from experiential.errors import BankError
from experiential.plugins import resolve
from experiential.sync import Batcher, BatchTimeoutError
from experiential.types import Experience, Hit, Statistics

_MOST = 512
"""Queries of one batch, when so many wait because all workers are busy."""
_WIDER = 4
"""How many times more candidates are asked for when too few of those found are trusted."""
CLOSED = "Expected an open manager, got a closed one; make a new ExperienceManager"
Rows = list[list[Hit]]


class Request(NamedTuple):
    """Hold one query that waits for its hits."""

    query: str
    k: int
    scope: Scope
    admitted: bool | None  # to provisional entries; None if all entries are trusted
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
    Without a probation period all entries are trusted.
    """

    def __init__(
        self, bank: Bank, settings: RetrievalOptions, seed: int, probation: Probation | None = None
    ) -> None:
        self.counts = SearchCounts()
        self._bank = bank
        self._probation = probation
        self._settings = settings
        self._strategy = resolve("strategies", settings.strategy, STRATEGIES)
        self._rng = random.Random(seed)
        # A writable bank knows all counts; beside a read-only one they are kept here, and are
        # forgotten with the searcher.
        self._seen = Retrievals(
            settings.recency,
            earlier=lambda id: self._counters(id).retrievals,
            utility=lambda id: self._counters(id).score,
        )
        self._found: dict[str, Scored[Experience]] = {}  # candidates of the query being answered
        self._batcher: Batcher[Request, list[Hit]] = Batcher(
            self._candidates,
            finish=self._answer,
            size=settings.batch_size,
            wait=settings.batch_wait,
            most=_MOST,
            workers=settings.workers,
            name="experiential-search",
        )
        if settings.hybrid:
            bank.nearest([], 1, (), words=True)  # indexes the words now, before somebody waits

    def _counters(self, id: str) -> Statistics:
        found = self._found.get(id)
        return Statistics() if found is None else self._bank.counters(found.item)

    def requests(
        self,
        query: str | Sequence[str],
        k: int | None,
        exclude: str | None,
        episode: Episodes,
        where: Filter | None,
    ) -> list[Request | None]:
        """Check the arguments of a search; return a request for each query, None if it is blank."""
        k, now = self._settings.k if k is None else k, time.perf_counter()
        queries, scope = checked_queries(query, k, blank=True), Scope(exclude, Where.of(where))
        episodes = [episode] * len(queries) if isinstance(episode, str) else list(episode)
        if len(episodes) != len(queries):
            raise ValueError(
                f"Expected one episode id, or one for each of the {len(queries)} queries, got"
                f" {len(episodes)}"
            )
        requests: list[Request | None] = []
        for one, asking in zip(queries, episodes, strict=True):
            if not one.strip():
                requests.append(None)
                continue
            admitted = None if self._probation is None else self._probation.admits(asking)
            requests.append(Request(one, k, scope, admitted, now))
        return requests

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

    def _candidates(self, batch: list[Request]) -> list[list[Scored[Experience]]]:
        """Return the entries near each query, best first; runs for several batches at a time.

        Provisional entries are taken out of the rows of queries that may not find them. If too few
        trusted ones are left although there may be more above the floor, a longer row is asked for.
        """
        trusted: frozenset[Ancestor] = frozenset()
        if self._probation is not None:
            self._probation.wake()
        hybrid = self._settings.hybrid > 0.0
        floor = -1.0 if hybrid else self._settings.floor  # words may lift an entry of any cosine
        wanted = asked = max(request.k for request in batch) * self._settings.pool * PER_PLACE
        rows: list[list[Scored[Experience]]] = [[] for _ in batch]
        short = list(range(len(batch)))
        while short:
            # A query that a group asks several times is run once.
            keys = [(batch[i].query, batch[i].scope) for i in short]
            distinct = {key: place for place, key in enumerate(dict.fromkeys(keys))}
            queries, scopes = zip(*distinct, strict=True)
            found = self._bank.nearest(queries, asked, scopes, words=hybrid)
            if self._probation is not None and asked == wanted:  # the refresh woken may be done
                trusted = self._probation.book.trusted
            longer: list[int] = []
            for i, key in zip(short, keys, strict=True):
                row = rows[i] = list(found[distinct[key]])
                if batch[i].admitted is not False:
                    continue
                rows[i] = [one for one in row if (one.item.id, one.item.version) in trusted]
                ended = not trusted or len(row) < asked or row[asked - 1].score < floor
                if not ended and len(rows[i]) < wanted:
                    longer.append(i)
            short, asked = longer, asked * _WIDER
        return rows

    def _answer(
        self, batch: list[Request], rows: list[list[Scored[Experience]]]
    ) -> list[list[Hit]]:
        """Choose the hits of each query; one batch after the other."""
        self.counts.batches += 1
        self.counts.queries += len(batch)
        settings, probation = self._settings, self._probation
        answers: list[list[Hit]] = []
        for request, row in zip(batch, rows, strict=True):
            found = self._found = {scored.item.id: scored for scored in row}
            candidates = [Candidate(id, scored.score, scored.words) for id, scored in found.items()]
            chosen = select(candidates, self._seen, settings, self._rng, request.k, self._strategy)
            if not self._bank.read_only:
                self._bank.note_retrievals(candidate.id for candidate, _ in chosen)
            hits: list[Hit] = []
            for rank, (one, propensity) in enumerate(chosen):
                entry, provisional = self._bank.read(found[one.id].item), False
                if probation is not None and request.admitted:
                    provisional = not probation.book.is_trusted(entry)
                    # The draw of the episode is a factor of the propensity.
                    propensity *= probation.share if provisional else 1.0
                hits.append(
                    Hit(
                        experience=entry,
                        score=one.relevance(settings.hybrid),
                        rank=rank,
                        propensity=propensity,
                        provisional=provisional,
                        admitted=request.admitted,
                    )
                )
            self.counts.retrievals += len(hits)
            self.counts.abstentions += not hits
            self.counts.seconds.append(time.perf_counter() - request.since)
            answers.append(hits)
        return answers

    def close(self) -> None:
        """Let the callers that still wait go, with an error, and end the threads."""
        self._batcher.close(BankError(CLOSED), self._settings.timeout)
