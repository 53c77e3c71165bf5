"""Find the nearest live entries: in memory, exactly, or in an index store once a bank is large."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from experiential.bank.index.follower import Replica
from experiential.bank.index.indexed import cosines, search_indexed
from experiential.bank.index.lexical import Found, Lexical
from experiential.bank.index.store import IndexLostError
from experiential.bank.index.vectors import Scored, Snapshot, Vector, VectorIndex
from experiential.bank.search.where import Members, Scope, Where
from experiential.bank.storage.tables import Live, Stored
from experiential.types import Experience

_QUIET = 0.5
"""Seconds without a search or a write after which the store may be written."""
Table = Callable[[], Mapping[str, Live]]
"""Returns the live entries as they are when it is called."""
Row = list[Scored[Experience]]


class Nearest:
    """Search the entries of one bank; the bank's writer changes them under its lock.

    A search by vectors alone takes no lock. A search by words holds up ``publish`` while it looks
    the words up, so that vectors and words are of one moment.

    Args:
        entries: the live ones, oldest first.
        limit: how many are held in memory before the store may answer for those that it holds.
        replica: returns the store; None holds all entries in memory.
        lost: called when the store does not answer; it has to call ``hold_all``.
        behind: the last journal position, if the store does not hold everything up to it yet.

    Attributes:
        is_large: whether the store answers, and not memory alone.
    """

    def __init__(
        self,
        entries: Sequence[Stored],
        *,
        limit: int,
        replica: Callable[[], Replica] | None = None,
        lost: Callable[[], None] | None = None,
        behind: int | None = None,
    ) -> None:
        self._limit = limit
        self._replica = replica
        self._lost = lost
        self.is_large = replica is not None and behind is None and len(entries) > limit
        self._tail: dict[str, int] = {}  # entries in memory, with the position of their last write
        self._index: VectorIndex | None = None
        self._lock = threading.Lock()
        self._lexical: Lexical | None = None
        self._members = Members()
        self._used = time.monotonic()
        for stored in () if self.is_large else entries:
            self._enter(stored, behind or 0)
        self._show()

    def patience(self) -> float:
        """Return the seconds that writing the store should wait: until the bank is unused.

        There is nothing to wait for once the store is needed to answer searches.
        """
        if self.is_large or len(self._tail) > self._limit or self._replica is None:
            return 0.0
        return max(0.0, self._used + _QUIET - time.monotonic())

    def publish(self, changes: Iterable[tuple[str, Stored | None, int]]) -> None:
        """Let searches see changes, all at once: id, new version (None removes), position."""
        latest: dict[str, tuple[Stored | None, int]] = {}
        for id, stored, seq in changes:
            latest.pop(id, None)
            latest[id] = stored, seq
        live = {
            id: None if stored is None else Live(stored.experience, stored.origins)
            for id, (stored, _) in latest.items()
        }
        self._used = time.monotonic()
        with self._lock:
            if self._lexical is not None:
                self._lexical.apply(live)
            for id, (stored, seq) in latest.items():
                self._members.change(id, live[id])
                if stored is None:
                    self._leave(id)
                else:
                    self._enter(stored, seq)
            self._show()

    def drop_indexed(self, seq: int) -> None:
        """Drop what the store, at journal position ``seq``, holds; a small bank keeps it all."""
        if self.is_large or len(self._tail) > self._limit:
            indexed = [id for id, position in self._tail.items() if position <= seq]
            with self._lock:
                for id in indexed:
                    self._leave(id)
                self.is_large = self.is_large or bool(indexed)
                self._show()

    def hold_all(self, entries: Sequence[Stored], seq: int) -> None:
        """Hold all live entries in memory until the store is at journal position ``seq``."""
        with self._lock:
            self._index, self._tail, self.is_large = None, {}, False
            for stored in entries:
                self._enter(stored, seq)
            self._show()

    def _show(self) -> None:
        resident = None if self._index is None else self._index.snapshot()
        self._published: tuple[Snapshot | None, bool] = resident, self.is_large

    def _enter(self, stored: Stored, seq: int) -> None:
        if self._index is None:
            self._index = VectorIndex(len(stored.vector))
        self._index.put(stored.experience.id, stored.vector, stored.experience, stored.origins)
        self._tail[stored.experience.id] = seq

    def _leave(self, id: str) -> None:
        self._tail.pop(id, None)
        if self._index is not None:
            self._index.remove(id)

    def search(
        self,
        queries: Vector,
        n: int,
        table: Table,
        scopes: Sequence[Scope],
        texts: Sequence[str] = (),
    ) -> list[Row]:
        """Return the ``n`` nearest live entries in the scope of each query, best first.

        Args:
            queries: unit vectors, shape (m, d), float32.
            n: how many for each query.
            table: the live entries.
            scopes: what each query may find.
            texts: the queries in words. A row then also has the ``n`` entries that the words find
                best, and of each entry the share of the words that it has.
        """
        self._used = time.monotonic()
        try:
            return self._search(queries, n, table, scopes, texts)
        except IndexLostError:
            if self._lost is None:
                raise
            self._lost()  # from now on all entries are in memory
            return self._search(queries, n, table, scopes, texts)

    def _search(
        self, queries: Vector, n: int, table: Table, scopes: Sequence[Scope], texts: Sequence[str]
    ) -> list[Row]:
        resident, is_large = self._published
        asked = list(zip(texts, scopes, strict=True)) if texts else []
        by_words: dict[tuple[str, Scope], tuple[Found, list[int | None]]] = {}
        if asked:
            self.index_words(table)
            with self._lock:
                assert self._lexical is not None
                (resident, is_large), index = self._published, self._index
                for text, scope in dict.fromkeys(asked):  # a group asks the same several times
                    found = self._lexical.search(text, n, scope)
                    ids = [live.experience.id for live in found.entries]
                    at = [None if index is None else index.rows.get(id) for id in ids]
                    by_words[text, scope] = found, at
        rows: list[Row] = [[] for _ in queries]
        if resident is not None:
            rows = resident.search(queries, n, scopes)
        replica = self._replica if is_large else None
        if replica is not None:

            def passing(where: Where) -> list[str]:
                with self._lock:
                    return self._members.of(where, lambda: list(table().values()))

            rows = search_indexed(replica(), table(), passing, queries, n, scopes, rows)
        for place, one in enumerate(asked):  # add the entries found by words, and shares of words
            (found, at), query, hits = by_words[one], queries[place], [*rows[place]]
            known = {hit.item.id for hit in hits}
            more = [
                (live.experience, row)
                for live, row in zip(found.entries, at, strict=True)
                if live.experience.id not in known
            ]
            if resident is not None:
                here = [(item, row) for item, row in more if row is not None]
                scores = resident.matrix[[row for _, row in here]] @ query
                hits += [
                    Scored(item, float(score))
                    for (item, _), score in zip(here, scores, strict=True)
                ]
            far = [item for item, row in more if row is None]
            if far and replica is not None:
                hits += cosines(replica(), query, far)
            worded = [hit._replace(words=found.weights.share(hit.item)) for hit in hits]
            rows[place] = sorted(worded, key=lambda hit: -hit.score)
        return rows

    def index_words(self, table: Table) -> None:
        """Index the words of all entries, at the first call; writes keep the index up to date."""
        if self._lexical is None:
            with self._lock:
                if self._lexical is None:
                    self._lexical = Lexical(list(table().values()))
