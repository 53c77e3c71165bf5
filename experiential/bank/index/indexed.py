"""Searches of a large bank: Chroma's approximate answers, checked against the live entries, until there are as many as there should be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiential.bank.index.chroma import ChromaIndex, Indexed
from experiential.bank.index.vectors import Scored, Vector
from experiential.bank.search.where import Scope, Where
from experiential.bank.storage.history import Live
from experiential.types import Experience

_SPARE = 32
"""Results asked of Chroma beyond those wanted, for versions that have changed since they were
indexed.
"""
_FEW = 500
"""Entries that pass a filter, up to which all of them are compared."""
_MOST = 4096
"""Results asked of Chroma for one query, at most; what is missing then is compared one by one."""
_AT_ONCE = 2000
Row = list[Scored[Experience]]


class IndexedSearch:
    """One search: ``live`` are the entries as they stand, ``passing`` gives the ids of those that pass a filter."""

    def __init__(
        self, chroma: ChromaIndex, live: Mapping[str, Live], passing: Callable[[Where], list[str]]
    ) -> None:
        self._chroma = chroma
        self._live = live
        self._passing = passing

    def search(
        self, queries: Vector, n: int, scopes: Sequence[Scope], recent: Sequence[Row]
    ) -> list[Row]:
        """The ``n`` nearest entries of each query, those of ``recent`` (not yet in Chroma) counted in."""
        rows: list[Row] = [[] for _ in queries]
        for where in dict.fromkeys(scope.where for scope in scopes):
            places = [place for place, scope in enumerate(scopes) if scope.where == where]
            part = [(queries[place], scopes[place], recent[place]) for place in places]
            for place, row in zip(places, self._of_one_filter(part, n, where), strict=True):
                rows[place] = row
        return rows

    def _of_one_filter(
        self, part: Sequence[tuple[Vector, Scope, Row]], n: int, where: Where | None
    ) -> list[Row]:
        ids = None if where is None else self._passing(where)
        size = len(self._live) if ids is None else len(ids)
        if ids is not None and size <= _FEW:
            return [self._exact(query, scope, row, n, ids) for query, scope, row in part]
        rows = [row for _, _, row in part]
        total = len(self._live)
        scale = 1 if where is None or where.is_for_chroma else math.ceil(total / size)
        asked = 2 * n * scale + _SPARE
        short: list[int] = list(range(len(part)))
        while short:
            count = min(asked, total, _MOST)
            found = self._chroma.search(
                np.stack([part[i][0] for i in short]),
                count,
                None if where is None else where.for_chroma(),
            )
            for i, hits in zip(short, found, strict=True):
                rows[i] = merged(part[i][2], self._checked(hits, part[i][1]), n)
            short = [i for i in short if len(rows[i]) < min(n, size)]
            if count < asked or count in (total, _MOST):
                break
            asked *= 4
        for i in short:
            rows[i] = self._exact(*part[i], n, list(self._live) if ids is None else ids)
        return rows

    def _checked(self, hits: Sequence[Indexed], scope: Scope) -> Row:
        """Those that stand at the version that Chroma has, and that the query may find."""
        return [
            Scored(live.experience, hit.cosine)
            for hit in hits
            if (live := self._live.get(hit.id)) is not None
            and live.experience.version == hit.version
            and scope.admits(live)
        ]

    def _exact(self, query: Vector, scope: Scope, recent: Row, n: int, ids: Sequence[str]) -> Row:
        row = recent
        for start in range(0, len(ids), _AT_ONCE):
            found = [
                live
                for id in ids[start : start + _AT_ONCE]
                if (live := self._live.get(id)) is not None and scope.admits(live)
            ]
            row = merged(
                row, self.cosines(self._chroma, query, [live.experience for live in found]), n
            )
        return row

    @staticmethod
    def cosines(chroma: ChromaIndex, query: Vector, items: Sequence[Experience]) -> Row:
        """Each of these entries that Chroma has at the same version, with its cosine."""
        held = chroma.held([item.id for item in items]) if items else {}
        known = [
            (item, held[item.id][1])
            for item in items
            if item.id in held and held[item.id][0] == item.version
        ]
        return [Scored(item, float(vector @ query)) for item, vector in known]


def merged(recent: Row, indexed: Row, n: int) -> Row:
    """The ``n`` best of both, the recent version of an entry that is in both."""
    best = {hit.item.id: hit for hit in [*indexed, *recent]}
    return sorted(best.values(), key=lambda hit: -hit.score)[:n]
