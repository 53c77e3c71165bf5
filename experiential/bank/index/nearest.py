"""Find the nearest live entries: in memory, exactly, or in an index store once a bank is large."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from experiential.bank.index.coarse import Codes, Indices
from experiential.bank.index.embed import Vector
from experiential.bank.index.follower import Replica
from experiential.bank.index.indexed import cosines, search_indexed
from experiential.bank.index.lexical import Found, Lexical
from experiential.bank.search.where import Ranking, Row, Scope, Scored, Where
from experiential.bank.storage.mapped import Mapped
from experiential.bank.storage.tables import Live, LiveEntries, Stored

Mask = npt.NDArray[np.bool_]
Ranked = tuple[Indices, Vector, Indices]
"""Columns and scores of several rows, one after the other, and the number of each row."""
_SCORES_AT_ONCE = 1 << 24
"""Cosines of one product (64 MiB): many queries of a small bank, few of a large one."""
_PAIRS = 128
"""Pairs of vectors of one product, which then stay in the processor's cache."""
_BLOCK = 16
_MOST_MASKS = 32
_MOST_FILTERS = 32
_QUIET = 0.5
"""Seconds without a search or a write after which the store may be written."""
Table = Callable[[], Mapping[str, Live]]
"""Returns the live entries as they are when it is called."""
Changed = tuple[str, Stored | None, int]
"""Id of an entry, its new version (None removes it), and the position in the journal."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Hold the index at one moment; searching it takes no lock, whatever is written meanwhile.

    Attributes:
        matrix: one vector per row, shape (r, d), float32.
        dead: rows whose items were replaced or removed.
        ids: of all rows, and of rows written since.
        entries: of the same.
        labels: rows by label, with rows written since.
        row: returns the row of an entry as of now, None where there is none.
        masks: which of the entries pass each of the last filters.
        codes: the rows rounded.
    """

    matrix: Vector
    dead: Indices
    ids: Sequence[str]
    entries: Sequence[Live]
    labels: Mapping[str, Sequence[int]]
    masks: dict[Where, Mask]
    codes: Codes
    row: Callable[[str], int | None]

    @classmethod
    def of(cls, mapped: Mapped) -> Snapshot:
        """Return the index of a mapped file, whose checksums of the vectors are compared now."""
        held = mapped.names, mapped, mapped.labels
        return cls(mapped.vectors, mapped.dead, *held, {}, Codes(), mapped.row)

    def cosines(self, rows: Sequence[int], query: Vector) -> Vector:
        """Return the cosines of these rows with a query."""
        return self.matrix[rows] @ query

    def search(self, queries: Vector, n: int, scopes: Sequence[Scope]) -> list[Row]:
        """Return the ``n`` nearest entries in the scope of each query, best first.

        Queries are normalised, shape (m, d), float32. Equal scores keep the order in which the
        entries were written.
        """
        columns, values, counts = self.ranked(queries, n, scopes)
        places: list[int] = columns.tolist()
        ids = list(map(self.ids.__getitem__, places))
        return _rows(ids, self.live(places), values, counts)

    def live(self, rows: Sequence[int | Live]) -> Sequence[Live]:
        """Return the entries in rows; those of a mapped file are read when they are looked at."""
        entries = self.entries
        if isinstance(entries, Mapped):
            return entries.part(rows)
        return [entries[row] if isinstance(row, int) else row for row in rows]

    def ranked(self, queries: Vector, n: int, scopes: Sequence[Scope]) -> Ranked:
        """Return the rows and scores of what ``search`` finds, and how many of each query."""
        if not len(self.matrix):
            none = np.zeros(0, dtype=np.intp)
            return none, np.zeros(0, dtype=np.float32), np.zeros(len(queries), dtype=np.intp)
        found = self._by_codes(queries, n, scopes) or self._by_all(queries, n, scopes)
        columns, values, counts = zip(*found, strict=True)
        return np.concatenate(columns), np.concatenate(values), np.concatenate(counts)

    def _by_codes(self, queries: Vector, n: int, scopes: Sequence[Scope]) -> list[Ranked] | None:
        """Compare exactly what rounded vectors leave; None where ``_by_all`` is as good."""
        if any(scope.where is not None for scope in scopes):
            return None
        out = [() if (of := one.exclude) is None else self.labels.get(of, ()) for one in scopes]
        wanted = n + max(map(len, out), default=0)  # as many are left without those out of scope
        pairs = self.codes.candidates(self.matrix, queries, wanted, self.dead)
        if pairs is None:
            return None
        query, row = pairs
        values = np.empty(len(query), dtype=np.float32)
        for start in range(0, len(query), _PAIRS):
            part = slice(start, start + _PAIRS)
            values[part] = np.einsum("pd,pd->p", self.matrix[row[part]], queries[query[part]])
        if wanted > n:
            edges = np.searchsorted(query, np.arange(len(queries) + 1))
            for hidden, (begin, end) in zip(out, pairwise(edges.tolist()), strict=True):
                values[begin:end][np.isin(row[begin:end], hidden)] = -np.inf
        return [ranked(query, row, values, len(queries), n)]

    def _by_all(self, queries: Vector, n: int, scopes: Sequence[Scope]) -> list[Ranked]:
        """Compare each query with every row."""
        found: list[Ranked] = []
        count = len(self.matrix)
        step = max(1, _SCORES_AT_ONCE // count)
        for start in range(0, len(queries), step):
            scores = queries[start : start + step] @ self.matrix.T
            if len(self.dead):
                scores[:, self.dead] = -np.inf
            for row, (label, where) in enumerate(scopes[start : start + step]):
                if label is not None and (hidden := self.labels.get(label)):
                    scores[row, [one for one in hidden if one < count]] = -np.inf
                if where is not None:
                    # two threads that test the same entries find the same
                    known = self.masks.get(where, np.empty(0, dtype=np.bool_))
                    if len(known) < count:
                        untested = self.entries[len(known) : count]
                        new = [where.matches(live.experience) for live in untested]
                        known = np.concatenate([known, np.array(new, dtype=np.bool_)])
                        if len(self.masks) >= _MOST_MASKS:
                            self.masks.clear()
                        self.masks[where] = known
                    scores[row, ~known[:count]] = -np.inf
            found.append(best_of_each(scores, n))
        return found


def _rows(ids: Sequence[str], live: Sequence[Live], values: Vector, counts: Indices) -> list[Row]:
    scores: list[float] = values.tolist()
    edges = [0, *np.cumsum(counts).tolist()]
    return [Row(ids, live, scores, begin, end) for begin, end in pairwise(edges)]


def best_of_each(scores: Vector, n: int) -> Ranked:
    """Return the ``n`` best finite scores of each row of ``scores``, shape (m, r), best first.

    Equal scores keep the order of their columns.

    Returns:
        as ``ranked``.
    """
    # Sort few of the scores: those that reach the n-th best maximum of a row's blocks. At least n
    # do, because n blocks have such a maximum.
    m, width = scores.shape
    least = np.full(m, np.finfo(np.float32).min)
    if n < width:
        blocks, tops = width // _BLOCK, scores
        if blocks >= n:
            tops = scores[:, : _BLOCK * blocks].reshape(m, _BLOCK, blocks).max(axis=1)
        last = tops.shape[1] - n
        least = np.maximum(least, np.partition(tops, last, axis=1)[:, last])
    flat = np.flatnonzero(scores >= least[:, None])
    row, column = np.divmod(flat, width)
    return ranked(row, column, scores.ravel()[flat], m, n)


def ranked(row: Indices, column: Indices, score: Vector, m: int, n: int) -> Ranked:
    """Return the ``n`` best finite scores of each of ``m`` rows, best first.

    Args:
        row: of each score, rising.
        column: of each score, rising within a row.
        score: the scores, float32.
        m: number of rows.
        n: how many of each.

    Returns:
        columns and scores of all rows, one after the other, and the number of each row.
    """
    found = np.bincount(row, minlength=m)
    place = np.arange(len(row)) - (np.cumsum(found) - found)[row]
    shape = (m, int(found.max(initial=0)))
    values, columns = np.full(shape, -np.inf, dtype=np.float32), np.zeros(shape, dtype=np.intp)
    values[row, place], columns[row, place] = score, column
    order = np.argsort(-values, axis=1, kind="stable")[:, :n]
    columns, values = np.take_along_axis(columns, order, 1), np.take_along_axis(values, order, 1)
    kept: Mask = values > -np.inf
    return columns[kept], values[kept], kept.sum(axis=1)


class VectorIndex:
    """Keep the vectors of entries; rows are never rewritten, so snapshots stay true.

    One thread writes at a time; any number search snapshots.

    Attributes:
        rows: the row of each entry, in the order of writing.
        positions: of the last write of each entry, in the journal.
    """

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.positions: dict[str, int] = {}
        self._matrix = np.zeros((0, 0), dtype=np.float32)
        self._alive = np.zeros(0, dtype=np.bool_)
        self._ids: list[str] = []
        self._entries: list[Live] = []
        self._labels: dict[str, list[int]] = {}
        self._masks: dict[Where, Mask] = {}
        self._codes = Codes()

    def load(self, entries: LiveEntries, seq: int) -> Snapshot:
        """Hold these entries, written up to a position of the journal; return the first state.

        Proposed entries stay out.
        """
        proposed = [place for place, live in enumerate(entries.entries) if live.proposed]
        ids, self._entries = list(entries.ids), list(entries.entries)
        self._ids = ids
        self._matrix = np.delete(entries.vectors, proposed, axis=0) if proposed else entries.vectors
        for place in reversed(proposed):
            del ids[place], self._entries[place]
        self._alive = np.arange(len(self._matrix)) < len(ids)
        self.rows = {id: row for row, id in enumerate(ids)}
        self.positions = dict.fromkeys(ids, seq)
        self._label_rows()
        return self._snapshot()

    def vector(self, id: str) -> Vector | None:
        """Return the vector of an entry, None where it is not here."""
        row = self.rows.get(id)
        return None if row is None else self._matrix[row]

    def apply(self, changes: Iterable[Changed]) -> Snapshot:
        """Put entries in place of earlier versions, or take them out; return the new state.

        Proposed entries stay out.
        """
        for id, stored, seq in changes:
            if (old := self.rows.pop(id, None)) is not None:
                self._alive[old] = False
                del self.positions[id]
            if stored is None or stored.experience.proposed:
                continue
            row = len(self._entries)
            if row == len(self._alive):  # twice the room; snapshots keep the old matrix
                matrix, alive = self._matrix, self._alive
                room = max(64, 2 * row)
                self._matrix = np.zeros((room, len(stored.vector)), dtype=np.float32)
                self._alive = np.zeros(room, dtype=np.bool_)
                if row:
                    self._matrix[:row], self._alive[:row] = matrix, alive
            self._matrix[row] = stored.vector
            self._alive[row] = True
            self._ids.append(id)
            self._entries.append(Live(stored.experience, stored.origins))
            self.rows[id], self.positions[id] = row, seq
            for label in stored.origins:
                self._labels.setdefault(label, []).append(row)
        if len(self._entries) > 64 + 2 * len(self.rows):  # mostly dead rows: write the others anew
            kept = list(self.rows.values())
            self._matrix, self._alive = self._matrix[kept], self._alive[kept]
            self._ids, self._entries = list(self.rows), [self._entries[row] for row in kept]
            self.rows = {id: row for row, id in enumerate(self.rows)}
            self._masks, self._codes = {}, Codes()
            self._label_rows()
        return self._snapshot()

    def _label_rows(self) -> None:
        self._labels = {}
        for row, live in enumerate(self._entries):
            for label in live.origins:
                self._labels.setdefault(label, []).append(row)

    def _snapshot(self) -> Snapshot:
        count = len(self._entries)
        dead = np.flatnonzero(~self._alive[:count])
        held = self._ids, self._entries, self._labels, self._masks, self._codes
        return Snapshot(self._matrix[:count], dead, *held, self.rows.get)


class Layered:
    """Search entries that stay as they are, and changes made over them, as one index.

    Args:
        below: returns the entries that stay; asked at the first search.
        row: returns the row of an entry among these, None where there is none.
        changes: entries that are others, or none, instead.
        place: returns a key that sorts an entry among the rows, by which those stand whose scores
            are equal; by default, after all rows.
    """

    def __init__(
        self,
        below: Callable[[], Snapshot],
        row: Callable[[str], int | None],
        changes: Mapping[str, Stored | None],
        place: Callable[[str], tuple[float, int]] = lambda id: (math.inf, 0),
    ) -> None:
        self._base = below
        self._row = row
        self._place = place
        self.changes = changes
        rows = {id: found for id in changes if (found := row(id)) is not None}
        # Equal scores keep the order of the entries, in which a changed one has its old place.
        places = {id: (rows[id], 0) if id in rows else place(id) for id in changes}
        order = sorted(changes, key=places.__getitem__)
        self._above = VectorIndex().apply((id, changes[id], 0) for id in order)
        self._replaced = np.array([*rows.values()], dtype=np.intp)
        self._places = np.array([places[id][0] for id in self._above.ids])

    @cached_property
    def _below(self) -> Snapshot:
        below = self._base()
        return replace(below, dead=np.union1d(below.dead, self._replaced))

    def over(self, changes: Mapping[str, Stored | None]) -> Layered:
        """Return the index with further changes."""
        return Layered(self._base, self._row, {**self.changes, **changes}, self._place)

    def search(self, queries: Vector, n: int, scopes: Sequence[Scope]) -> list[Row]:
        """Return the ``n`` nearest entries in the scope of each query, as a snapshot does."""
        below, above = self._below, self._above
        if not above.ids:
            return below.search(queries, n, scopes)
        low, high = (one.ranked(queries, n, scopes) for one in (below, above))
        columns, values = np.append(low[0], ~high[0]), np.append(low[1], high[1])
        places = np.append(low[0], self._places[high[0]])
        numbers = np.arange(len(queries))
        query = np.append(np.repeat(numbers, low[2]), np.repeat(numbers, high[2]))
        order = np.lexsort((places, -values, query))
        found = low[2] + high[2]
        first = np.repeat(np.cumsum(found) - found, found)
        order = order[np.arange(len(order)) - first < n]
        rows: list[int] = columns[order].tolist()
        ids = [above.ids[~row] if row < 0 else below.ids[row] for row in rows]
        live = below.live([above.entries[~row] if row < 0 else row for row in rows])
        return _rows(ids, live, values[order], np.minimum(found, n))

    def row(self, id: str) -> int | None:
        """Return the number of the row of an entry: those above the others are negative."""
        if id not in self.changes:
            return self._row(id)
        above = self._above.row(id)
        return None if above is None else ~above

    def cosines(self, rows: Sequence[int], query: Vector) -> Vector:
        """Return the cosines of these rows with a query."""
        low, high = self._below.matrix, self._above.matrix
        # one product, because each of its own would be rounded otherwise
        return np.stack([high[~row] if row < 0 else low[row] for row in rows]) @ query


class Nearest:
    """Search the entries of one bank; the bank's writer changes them under its lock.

    A search by vectors alone takes no lock. A search by words holds up ``publish`` while it looks
    the words up, so that vectors and words are of one moment.

    Args:
        entries: the live ones, oldest first.
        limit: how many are held in memory before the store may answer for those that it holds.
        replica: returns the store; None holds all entries in memory.
        behind: the last journal position, if the store does not hold everything up to it yet.

    Attributes:
        is_large: whether the store answers, and not memory alone.
    """

    def __init__(
        self,
        entries: LiveEntries,
        *,
        limit: int,
        replica: Callable[[], Replica] | None = None,
        behind: int | None = None,
    ) -> None:
        self._limit = limit
        self._replica = replica
        self.is_large = replica is not None and behind is None and len(entries) > limit
        self._lock = threading.Lock()
        self._lexical: Lexical | None = None
        self._members: dict[Where, dict[str, None]] = {}  # ids that pass each of the last filters
        self._used = time.monotonic()
        self._index = VectorIndex()
        held = LiveEntries() if self.is_large else entries
        first = self._index.load(held, behind or 0)
        self._published: tuple[Snapshot | Layered, bool] = first, self.is_large

    @classmethod
    def of(cls, layered: Layered) -> Nearest:
        """Return the search of an index that nothing is written to."""
        made = cls(LiveEntries(), limit=0)
        made._published = layered, False
        return made

    def over(self, changes: Mapping[str, Stored | None]) -> Nearest | None:
        """Return the search with other entries in place of some, which later writes do not change.

        None where the index store answers.
        """
        below, is_large = self._published
        if is_large:
            return None
        if isinstance(below, Layered):
            return Nearest.of(below.over(changes))
        return Nearest.of(Layered(lambda: below, dict(self._index.rows).get, changes))

    def vector(self, id: str) -> Vector | None:
        """Return the vector of an entry, None where it is not in memory."""
        return self._index.vector(id)

    def patience(self) -> float:
        """Return the seconds that writing the store should wait: until the bank is unused.

        There is nothing to wait for once the store is needed to answer searches.
        """
        if self.is_large or len(self._index.rows) > self._limit or self._replica is None:
            return 0.0
        return max(0.0, self._used + _QUIET - time.monotonic())

    def publish(self, changes: Sequence[Changed]) -> None:
        """Let searches see changes, all at once."""
        live = {
            id: None if stored is None else Live(stored.experience, stored.origins)
            for id, stored, _ in changes
        }
        self._used = time.monotonic()
        with self._lock:
            if self._lexical is not None:
                self._lexical.apply(live)
            for where, ids in self._members.items():
                for id, entry in live.items():
                    ids.pop(id, None)
                    if entry is not None and where.matches(entry.experience):
                        ids[id] = None
            self._published = self._index.apply(changes), self.is_large

    def drop_indexed(self, seq: int) -> None:
        """Drop what the store, at journal position ``seq``, holds; a small bank keeps it all."""
        if self.is_large or len(self._index.rows) > self._limit:
            held = self._index.positions.items()
            indexed = [(id, None, seq) for id, position in held if position <= seq]
            with self._lock:
                self.is_large = self.is_large or bool(indexed)
                self._published = self._index.apply(indexed), self.is_large

    def hold_all(self, entries: LiveEntries, seq: int) -> None:
        """Hold all live entries in memory until the store is at journal position ``seq``."""
        with self._lock:
            self._index, self.is_large = VectorIndex(), False
            self._published = self._index.load(entries, seq), self.is_large

    def search(
        self,
        queries: Vector,
        n: int,
        table: Table,
        scopes: Sequence[Scope],
        texts: Sequence[str] = (),
    ) -> list[Ranking]:
        """Return the ``n`` nearest live entries in the scope of each query, best first.

        Args:
            queries: unit vectors, shape (m, d), float32.
            n: how many for each query.
            table: the live entries.
            scopes: what each query may find.
            texts: the queries in words. A row then also has the ``n`` entries that the words find
                best, and of each entry the share of the words that it has.

        Raises:
            IndexLostError: the store does not answer.
            ValueError: there is not one scope per query.
        """
        if len(scopes) != len(queries):  # a query without its scope would find what it may not
            raise ValueError(f"Expected {len(queries)} scopes, one per query, got {len(scopes)}")
        self._used = time.monotonic()
        n = min(n, len(table()))  # whatever is asked for, no more is kept than there can be
        if not n:
            return [[] for _ in queries]
        resident, is_large = self._published
        asked = list(zip(texts, scopes, strict=True)) if texts else []
        by_words: dict[tuple[str, Scope], tuple[Found, list[int | None]]] = {}
        if asked:
            self.index_words(table)
            with self._lock:
                assert self._lexical is not None
                resident, is_large = self._published
                for text, scope in dict.fromkeys(asked):  # a group asks the same several times
                    found = self._lexical.search(text, n, scope)
                    ids = [live.experience.id for live in found.entries]
                    by_words[text, scope] = found, [resident.row(id) for id in ids]
        rows: list[Ranking] = [*resident.search(queries, n, scopes)]
        replica = self._replica if is_large else None
        if replica is not None:
            passing = partial(self.passing, table)
            rows = search_indexed(replica(), table(), passing, queries, n, scopes, rows)
        for place, one in enumerate(asked):  # add the entries found by words, and shares of words
            (found, at), query, hits = by_words[one], queries[place], [*rows[place]]
            known = {hit.item.id for hit in hits}
            more = [
                (live.experience, row)
                for live, row in zip(found.entries, at, strict=True)
                if live.experience.id not in known
            ]
            if here := [(item, row) for item, row in more if row is not None]:
                scores = resident.cosines([row for _, row in here], query)
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

    def passing(self, table: Table, where: Where) -> list[str]:
        """Return the ids of the entries that pass a filter; the last filters are remembered."""
        with self._lock:
            known = self._members.pop(where, None)
            if known is None:
                items = (live.experience for live in list(table().values()))
                known = {item.id: None for item in items if where.matches(item)}
                while len(self._members) >= _MOST_FILTERS:
                    del self._members[next(iter(self._members))]
            self._members[where] = known
            return list(known)

    def index_words(self, table: Table) -> None:
        """Index the words of all entries, at the first call; writes keep the index up to date."""
        if self._lexical is None:
            with self._lock:
                if self._lexical is None:
                    self._lexical = Lexical(list(table().values()))
