"""Search a bank too large for memory: a store's approximate answers, checked and completed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from experiential.bank.index.embed import Vector
from experiential.bank.index.follower import Replica
from experiential.bank.search.where import Ranking, Scope, Scored, Where
from experiential.bank.storage.tables import Live
from experiential.types import Experience

_SPARE = 32
"""Results asked of the store beyond those wanted, for versions that have changed since."""
_FEW = 500
"""Entries that pass a filter, up to which all of them are compared."""
_MOST = 4096
"""Results asked of the store for one query; what is missing then is compared one by one."""
_AT_ONCE = 2000


def search_indexed(
    replica: Replica,
    live: Mapping[str, Live],
    passing: Callable[[Where], list[str]],
    queries: Vector,
    n: int,
    scopes: Sequence[Scope],
    recent: Sequence[Ranking],
) -> list[Ranking]:
    """Return the ``n`` nearest entries of each query, best first.

    Args:
        replica: the store.
        live: the entries as they stand.
        passing: returns the ids of the entries that pass a filter.
        queries: unit vectors, shape (m, d), float32.
        n: entries for each query.
        scopes: what each query may find.
        recent: for each query the nearest of the recent writes, which the store may lack.
    """
    rows = list(recent)
    for where in dict.fromkeys(scope.where for scope in scopes):
        short = [place for place, scope in enumerate(scopes) if scope.where == where]
        ids = None if where is None else passing(where)
        size = len(live) if ids is None else len(ids)
        # Ask for more if the store cannot check the whole filter, and again while a row is short:
        # some of the answers are old versions, or out of the query's scope.
        clauses = {} if where is None else where.indexed
        is_whole = where is None or len(clauses) == len(where.fields)
        asked = 2 * n * (1 if is_whole else math.ceil(len(live) / max(1, size))) + _SPARE
        while short and (ids is None or size > _FEW):
            count = min(asked, len(live), _MOST)
            with replica.answering():
                found = replica.store.search(queries[short], count, clauses)
            still_short: list[int] = []
            for place, hits in zip(short, found, strict=True):
                current = [
                    Scored(entry.experience, hit.cosine)
                    for hit in hits
                    if (entry := live.get(hit.id)) is not None
                    and entry.experience.version == hit.version
                    and scopes[place].admits(entry)
                ]
                row = rows[place] = _merged(recent[place], current, n)
                # A row that ends below the last answer may lack an entry between the two.
                ends_below = bool(row and hits) and row[-1].score < hits[-1].cosine
                if len(row) < min(n, size) or ends_below:
                    still_short.append(place)
            short = still_short
            if count < asked or count in (len(live), _MOST):
                break
            asked *= 4
        compared = list(live) if short and ids is None else ids or []
        for place in short:  # compare every entry that passes
            rows[place] = recent[place]
            for start in range(0, len(compared), _AT_ONCE):
                items = [
                    entry.experience
                    for id in compared[start : start + _AT_ONCE]
                    if (entry := live.get(id)) is not None and scopes[place].admits(entry)
                ]
                rows[place] = _merged(rows[place], cosines(replica, queries[place], items), n)
    return rows


def cosines(
    replica: Replica, query: Vector, items: Sequence[Experience]
) -> list[Scored[Experience]]:
    """Return the entries that the store has at the same version, each with its cosine."""
    held: Mapping[str, tuple[int, Vector]] = {}
    if items:
        with replica.answering():
            held = replica.store.fetch([item.id for item in items])
    return [
        Scored(item, float(held[item.id][1] @ query))
        for item in items
        if item.id in held and held[item.id][0] == item.version
    ]


def _merged(recent: Ranking, indexed: Ranking, n: int) -> Ranking:
    """Return the ``n`` best of both; of an entry in both, the recent version."""
    best = {hit.item.id: hit for hit in [*indexed, *recent]}
    return sorted(best.values(), key=lambda hit: -hit.score)[:n]
