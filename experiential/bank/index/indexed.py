"""Search a bank too large for memory: a store's approximate answers, checked and completed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiential.bank.index.follower import Replica
from experiential.bank.index.vectors import Scored, Vector
from experiential.bank.search.where import Scope, Where
from experiential.bank.storage.history import Live
from experiential.types import Experience

_SPARE = 32
"""Results asked of the store beyond those wanted, for versions that have changed since."""
_FEW = 500
"""Entries that pass a filter, up to which all of them are compared."""
_MOST = 4096
"""Results asked of the store for one query; what is missing then is compared one by one."""
_AT_ONCE = 2000
Row = list[Scored[Experience]]


class IndexedSearch:
    """Search a store and the recent writes that it does not hold yet.

    Args:
        replica: the store.
        live: the entries as they stand.
        passing: returns the ids of the entries that pass a filter.
    """

    def __init__(
        self, replica: Replica, live: Mapping[str, Live], passing: Callable[[Where], list[str]]
    ) -> None:
        self._replica = replica
        self._live = live
        self._passing = passing

    def search(
        self, queries: Vector, n: int, scopes: Sequence[Scope], recent: Sequence[Row]
    ) -> list[Row]:
        """Return the ``n`` nearest entries of each query, best first.

        Args:
            queries: unit vectors, shape (m, d), float32.
            n: how many for each query.
            scopes: what each query may find.
            recent: for each query the nearest entries that are held in memory.
        """
        rows: list[Row] = [[] for _ in queries]
        for where in dict.fromkeys(scope.where for scope in scopes):
            places = [place for place, scope in enumerate(scopes) if scope.where == where]
            part = [(queries[place], scopes[place], recent[place]) for place in places]
            for place, row in zip(places, self._search_filtered(part, n, where), strict=True):
                rows[place] = row
        return rows

    def _search_filtered(
        self, part: Sequence[tuple[Vector, Scope, Row]], n: int, where: Where | None
    ) -> list[Row]:
        total = len(self._live)
        ids = None if where is None else self._passing(where)
        size = total if ids is None else len(ids)
        if ids is not None and size <= _FEW:
            return [self._compare_all(query, scope, row, n, ids) for query, scope, row in part]
        # Ask for more if the store cannot check the whole filter, and again while a row is short:
        # some of the answers are old versions, or out of the query's scope.
        scale = 1 if where is None or where.is_indexed else math.ceil(total / size)
        asked = 2 * n * scale + _SPARE
        rows = [row for _, _, row in part]
        short: list[int] = list(range(len(part)))
        while short:
            count = min(asked, total, _MOST)
            vectors = np.stack([part[i][0] for i in short])
            found = self._replica.search(vectors, count, {} if where is None else where.indexed)
            still_short: list[int] = []
            for i, hits in zip(short, found, strict=True):
                _, scope, recent = part[i]
                current = [
                    Scored(live.experience, hit.cosine)
                    for hit in hits
                    if (live := self._live.get(hit.id)) is not None
                    and live.experience.version == hit.version
                    and scope.admits(live)
                ]
                row = rows[i] = merged(recent, current, n)
                # A row that ends below the last answer may lack an entry between the two.
                ends_below = bool(row and hits) and row[-1].score < hits[-1].cosine
                if len(row) < min(n, size) or ends_below:
                    still_short.append(i)
            short = still_short
            if count < asked or count in (total, _MOST):
                break
            asked *= 4
        for i in short:
            rows[i] = self._compare_all(*part[i], n, list(self._live) if ids is None else ids)
        return rows

    def _compare_all(
        self, query: Vector, scope: Scope, recent: Row, n: int, ids: Sequence[str]
    ) -> Row:
        """Return the exact answer among some entries."""
        row = recent
        for start in range(0, len(ids), _AT_ONCE):
            found = [
                live.experience
                for id in ids[start : start + _AT_ONCE]
                if (live := self._live.get(id)) is not None and scope.admits(live)
            ]
            row = merged(row, cosines(self._replica, query, found), n)
        return row


def cosines(replica: Replica, query: Vector, items: Sequence[Experience]) -> Row:
    """Return the entries that the store has at the same version, each with its cosine."""
    held: Mapping[str, tuple[int, Vector]]
    held = replica.fetch([item.id for item in items]) if items else {}
    return [
        Scored(item, float(held[item.id][1] @ query))
        for item in items
        if item.id in held and held[item.id][0] == item.version
    ]


def merged(recent: Row, indexed: Row, n: int) -> Row:
    """Return the ``n`` best of both; of an entry in both, the recent version."""
    best = {hit.item.id: hit for hit in [*indexed, *recent]}
    return sorted(best.values(), key=lambda hit: -hit.score)[:n]
