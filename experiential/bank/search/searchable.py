"""Search by text: shared by banks, snapshots of them and banks behind a server."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, overload

from experiential.bank.search.strategies import PER_PLACE, Candidate, above_floor
from experiential.bank.search.where import Filter, Ranking, Scope, Where, checked_queries
from experiential.config import RetrievalSettings
from experiential.types import Experience, Hit

_POOL = RetrievalSettings().pool


class Searchable(Protocol):
    """Find entries by text; the subclass compares them."""

    @abstractmethod
    def nearest(
        self, queries: Sequence[str], n: int, scopes: Sequence[Scope], words: bool = False
    ) -> list[Ranking]:
        """Return the ``n`` nearest entries of each query with their cosines, nearest first.

        Args:
            queries: texts to compare the entries with.
            n: entries for each query, at most.
            scopes: what each query may find.
            words: add the ``n`` entries that share the rarest words with the query, and give the
                share of its words that each entry has, in [0, 1]. The first such call indexes the
                words, even without queries.
        """
        ...

    @abstractmethod
    def read(self, experience: Experience) -> Experience:
        """Return the same version with its counters filled in."""
        ...

    @overload
    def search(
        self,
        query: str,
        *,
        k: int = 1,
        hybrid: float = 0.0,
        exclude_instance: str | None = None,
        where: Filter | None = None,
    ) -> list[Hit]: ...

    @overload
    def search(
        self,
        query: list[str] | tuple[str, ...],
        *,
        k: int = 1,
        hybrid: float = 0.0,
        exclude_instance: str | None = None,
        where: Filter | None = None,
    ) -> list[list[Hit]]: ...

    def search(
        self,
        query: str | list[str] | tuple[str, ...],
        *,
        k: int = 1,
        hybrid: float = 0.0,
        exclude_instance: str | None = None,
        where: Filter | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """Return the ``k`` most similar entries of each query; no counter changes.

        Args:
            query: one text or a list of texts.
            k: how many hits for each.
            hybrid: weight of the words that query and entry share beside their cosine, in [0, 1]:
                hits are ranked by (1 - hybrid) cosine + hybrid words, which is their score.
                Candidates are the nearest entries and those that words find best, ``16 k`` of each.
                The first search with words indexes them.
            exclude_instance: leave out entries that were made from this task instance, by whatever
                updates and merges.
            where: only entries that pass a filter, as ``{"kind": "lesson", "tags": ["alfworld",
                "webshop"]}``, see ``experiential.bank.search.where.Where``.
        """
        queries = checked_queries(query, k)
        is_number = isinstance(hybrid, int | float)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_number or isinstance(hybrid, bool) or not 0.0 <= hybrid <= 1.0:
            raise ValueError(f"Expected hybrid to be a number from 0 to 1, got {hybrid!r}")
        rows = self._hits(queries, k, float(hybrid), Scope(exclude_instance, Where.of(where)))
        return rows[0] if isinstance(query, str) else rows

    def _hits(self, queries: list[str], k: int, hybrid: float, scope: Scope) -> list[list[Hit]]:
        # A remote bank asks its server for the hits instead, in one request.
        wanted = k * _POOL * PER_PLACE if hybrid else k
        answers: list[list[Hit]] = []
        for row in self.nearest(queries, wanted, [scope] * len(queries), words=hybrid > 0.0):
            found = {scored.item.id: scored.item for scored in row}
            candidates = [Candidate(one.item.id, one.score, one.words) for one in row]
            best = above_floor(candidates, -math.inf, hybrid)[:k]
            answers.append(
                [
                    Hit(experience=self.read(found[one.id]), score=one.relevance(hybrid), rank=rank)
                    for rank, one in enumerate(best)
                ]
            )
        return answers
