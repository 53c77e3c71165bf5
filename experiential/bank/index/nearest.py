"""Nearest live entries: exact and resident while a bank is small, Chroma with a resident tail of recent writes once it is large."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from experiential.bank.index.chroma import ChromaIndex, IndexLostError
from experiential.bank.index.indexed import IndexedSearch
from experiential.bank.index.lexical import Found, Lexical
from experiential.bank.index.vectors import Scored, Snapshot, Vector, VectorIndex
from experiential.bank.search.where import Members, Scope, Where
from experiential.bank.storage.history import Live, Stored
from experiential.types import Experience

_QUIET = 0.5
"""Seconds without a search or a write after which Chroma may be written: each write of it stops the
process for 30 to 100 ms.
"""
Table = Callable[[], Mapping[str, Live]]
"""Gives the live entries as they are when it is called."""
Row = list[Scored[Experience]]


class Shown(NamedTuple):
    """What searches see: the resident entries, and whether Chroma holds others."""

    resident: Snapshot[Experience] | None
    is_large: bool


class Worded(NamedTuple):
    """What the words of one query found, and the resident rows of these entries (None: in Chroma only)."""

    found: Found
    rows: list[int | None]


class Nearest:
    """The search structure of one bank; the bank's writer changes it under its lock, any thread searches it.

    What is written shows at the next ``publish``, all at once. A search by vectors alone takes no
    lock. One by words too holds up ``publish`` while it looks the words up, so that vectors and
    words are of one moment.

    Args:
        entries: the live ones, oldest first.
        limit: how many are held here before Chroma may answer for those that it holds.
        chroma: gives the index of a large bank; None holds all here.
        lost: called when the index is away; it has to call ``reside``.
        behind: the last journal position, when Chroma does not hold everything up to it yet; None
            when it does.
    """

    def __init__(
        self,
        entries: Sequence[Stored],
        *,
        limit: int,
        chroma: Callable[[], ChromaIndex] | None,
        lost: Callable[[], None] | None = None,
        behind: int | None = None,
    ) -> None:
        self._limit = limit
        self._chroma = chroma
        self._lost = lost
        self._large = chroma is not None and behind is None and len(entries) > limit
        self._tail: dict[str, int] = {}
        self._index: VectorIndex[Experience] | None = None
        self._shown = Shown(None, self._large)
        self._changes: dict[str, tuple[Stored, int] | None] = {}
        self._lock = threading.Lock()
        self._lexical: Lexical | None = None
        self._members = Members()
        self._used = -_QUIET
        for stored in () if self._large else entries:
            self._enter(stored, behind or 0)
        self.publish()

    @property
    def is_large(self) -> bool:
        """Whether Chroma answers, and not the resident matrix alone."""
        return self._large

    def patience(self) -> float:
        """Seconds that Chroma should still wait before it is written: while all is held here, until the bank was unused for a while."""
        if self._large or len(self._tail) > self._limit or self._chroma is None:
            return 0.0
        return max(0.0, self._used + _QUIET - time.monotonic())

    def put(self, stored: Stored, seq: int) -> None:
        """An entry stands at a new version since journal position ``seq``."""
        self._note(stored.experience.id, (stored, seq))

    def remove(self, id: str) -> None:
        """An entry is gone."""
        self._note(id, None)

    def _note(self, id: str, change: tuple[Stored, int] | None) -> None:
        self._changes.pop(id, None)
        self._changes[id] = change

    def publish(self) -> None:
        """Let searches see what was written since the last call, all at once."""
        changes, self._changes = self._changes, {}
        self._used = time.monotonic()
        live = {
            id: None if change is None else Live(change[0].experience, change[0].origins)
            for id, change in changes.items()
        }
        with self._lock:
            if self._lexical is not None:
                self._lexical.apply(live)
            for id, change in changes.items():
                self._members.change(id, live[id])
                self._leave(id) if change is None else self._enter(*change)
            self._show()

    def settle(self, seq: int) -> None:
        """Chroma holds everything up to journal position ``seq``; in a large bank the tail need not."""
        if self._large or len(self._tail) > self._limit:
            settled = [id for id, position in self._tail.items() if position <= seq]
            with self._lock:
                for id in settled:
                    self._leave(id)
                self._large = self._large or bool(settled)
                self._show()

    def reside(self, entries: Sequence[Stored], seq: int) -> None:
        """Chroma is away: hold all live entries here, until it holds everything up to journal position ``seq``."""
        with self._lock:
            self._index, self._tail, self._large = None, {}, False
            for stored in entries:
                self._enter(stored, seq)
            self._show()

    def _show(self) -> None:
        self._shown = Shown(None if self._index is None else self._index.snapshot(), self._large)

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
        """The ``n`` nearest live entries in the scope of each query, best first.

        With ``texts``, the queries in words, also the ``n`` that the words of each find best, and
        of all the share of words that they have.
        """
        self._used = time.monotonic()
        if not texts:
            return self._found(lambda: self._by_vectors(self._shown, queries, n, table, scopes))
        self.index_words(table)
        return self._found(lambda: self._by_both(queries, texts, n, table, scopes))

    def _found(self, search: Callable[[], list[Row]]) -> list[Row]:
        """What a search gives; when Chroma is away, what it gives once all is held here."""
        try:
            return search()
        except IndexLostError:
            if self._lost is None:
                raise
            self._lost()
            return search()

    def _by_both(
        self, queries: Vector, texts: Sequence[str], n: int, table: Table, scopes: Sequence[Scope]
    ) -> list[Row]:
        with self._lock:
            shown = self._shown
            asked = list(zip(texts, scopes, strict=True))
            worded = {
                one: self._look_up(one[0], n, one[1]) for one in dict.fromkeys(asked)
            }  # a group asks the same several times
        rows = self._by_vectors(shown, queries, n, table, scopes)
        return [
            self._joined(shown, query, row, worded[one])
            for query, row, one in zip(queries, rows, asked, strict=True)
        ]

    def index_words(self, table: Table) -> None:
        """Make the index of words, if there is none yet; it is kept up with what is written from then on."""
        if self._lexical is None:
            with self._lock:
                if self._lexical is None:
                    self._lexical = Lexical(list(table().values()))

    def _look_up(self, text: str, n: int, scope: Scope) -> Worded:
        assert self._lexical is not None
        found = self._lexical.search(text, n, scope)
        index = self._index
        return Worded(
            found,
            [None if index is None else index.row(live.experience.id) for live in found.entries],
        )

    def _by_vectors(
        self, shown: Shown, queries: Vector, n: int, table: Table, scopes: Sequence[Scope]
    ) -> list[Row]:
        recent: list[Row] = [[] for _ in queries]
        if shown.resident is not None:
            recent = shown.resident.search(
                queries, n, [scope.exclude for scope in scopes], [scope.where for scope in scopes]
            )
        if not shown.is_large or self._chroma is None:
            return recent
        return IndexedSearch(self._chroma(), table(), self._passing(table)).search(
            queries, n, scopes, recent
        )

    def _passing(self, table: Table) -> Callable[[Where], list[str]]:
        def passing(where: Where) -> list[str]:
            with self._lock:
                return self._members.of(where, lambda: list(table().values()))

        return passing

    def _joined(self, shown: Shown, query: Vector, near: Row, worded: Worded) -> Row:
        """The nearest entries and those that words found, each with its cosine and its share of words."""
        known = {hit.item.id for hit in near}
        pairs = zip(worded.found.entries, worded.rows, strict=True)
        more = [(live.experience, row) for live, row in pairs if live.experience.id not in known]
        placed = [(item, row) for item, row in more if row is not None]
        cosines = (
            []
            if shown.resident is None or not placed
            else shown.resident.cosines(query, [row for _, row in placed])
        )
        hits = [
            *near,
            *(Scored(item, cosine) for (item, _), cosine in zip(placed, cosines, strict=True)),
        ]
        if (
            shown.is_large
            and self._chroma is not None
            and (far := [item for item, row in more if row is None])
        ):
            hits += IndexedSearch.cosines(self._chroma(), query, far)
        weights = worded.found.weights
        return sorted(
            (hit._replace(words=weights.share(hit.item)) for hit in hits),
            key=lambda hit: -hit.score,
        )
