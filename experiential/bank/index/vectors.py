"""Search vectors exactly: normalised float32 rows in one matrix, compared by one product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, repeat
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
T = TypeVar("T")
S = TypeVar("S", contravariant=True)
_SCORES_AT_ONCE = 1 << 24
"""Cosines of one product (64 MiB): many queries of a small bank, few of a large one."""
_BLOCK = 16
_MOST_MASKS = 32


class Condition(Protocol[S]):
    """Test items; hashable, and equal to a condition that tests for the same."""

    def __hash__(self) -> int: ...

    def matches(self, item: S) -> bool:
        """Return whether an item passes."""
        ...


class Scored(NamedTuple, Generic[T]):
    """Hold one item found and its cosine similarity to the query.

    Attributes:
        words: weighted share of the query's words in it, if words were asked for.
    """

    item: T
    score: float
    words: float = 0.0


_scored: Callable[[Iterable[Any]], Scored[Any]] = partial(cast("Any", tuple).__new__, Scored)
"""Does as ``Scored._make``, without counting the fields in Python: a batch has thousands."""


class Masks(Generic[T]):
    """Remember which of a growing list of items pass each of the last conditions.

    Any thread may ask: two threads that test the same items find the same.
    """

    def __init__(self, items: list[T]) -> None:
        self._items = items
        self._known: dict[Condition[T], Mask] = {}

    def get(self, condition: Condition[T], count: int) -> Mask:
        """Return for each of the first ``count`` items whether it passes, shape (count,)."""
        known = self._known.get(condition)
        if known is None or len(known) < count:
            start = 0 if known is None else len(known)
            passed = (condition.matches(item) for item in self._items[start:count])
            new = np.fromiter(passed, dtype=np.bool_, count=count - start)
            known = new if known is None else np.concatenate([known, new])
            if len(self._known) >= _MOST_MASKS:
                self._known.clear()
            self._known[condition] = known
        return known[:count]


class Snapshot(Generic[T]):
    """Hold the index at one moment; searching it takes no lock, whatever is written meanwhile."""

    def __init__(
        self,
        matrix: Vector,
        alive: Mask,
        items: list[T],
        labels: dict[str, list[int]],
        masks: Masks[T],
    ) -> None:
        self._matrix = matrix
        self._alive = alive
        self._items = items
        self._labels = labels
        self._masks = masks
        self._dead = np.flatnonzero(~alive)

    def __len__(self) -> int:
        return len(self._alive) - len(self._dead)

    def search(
        self,
        queries: Vector,
        n: int,
        exclude: Sequence[str | None] = (),
        where: Sequence[Condition[T] | None] = (),
    ) -> list[list[Scored[T]]]:
        """Return the ``n`` nearest items of each query, best first.

        Equal scores keep the order in which the items were written.

        Args:
            queries: normalised, shape (m, d), float32.
            n: how many for each query.
            exclude: per query, a label whose items are left out; empty excludes nothing.
            where: per query, what items must pass; empty lets all pass.
        """
        found: list[list[Scored[T]]] = []
        step = max(1, _SCORES_AT_ONCE // max(1, len(self._items)))
        for start in range(0, len(queries), step):
            scores = queries[start : start + step] @ self._matrix.T
            if len(self._dead):
                scores[:, self._dead] = -np.inf
            for row, label in enumerate(exclude[start : start + step]):
                if label is not None and (hidden := self._labels.get(label)):
                    # Rows beyond the scores were written after this snapshot.
                    scores[row, [one for one in hidden if one < scores.shape[1]]] = -np.inf
            for row, condition in enumerate(where[start : start + step]):
                if condition is not None:
                    scores[row, ~self._masks.get(condition, scores.shape[1])] = -np.inf
            columns, values, counts = best_of_each(scores, n)
            items = map(self._items.__getitem__, columns.tolist())
            triples = zip(items, values.tolist(), repeat(0.0), strict=False)
            hits: list[Scored[T]] = list(map(_scored, triples))
            edges = [0, *np.cumsum(counts).tolist()]
            found.extend(hits[begin:end] for begin, end in pairwise(edges))
        return found

    def cosines(self, query: Vector, rows: Sequence[int]) -> list[float]:
        """Return the cosine of one query, shape (d,), with each of these rows."""
        return [float(cosine) for cosine in self._matrix[list(rows)] @ query]


Indices = npt.NDArray[np.intp]


def best_of_each(scores: Vector, n: int) -> tuple[Indices, Vector, Indices]:
    """Return the ``n`` best finite scores of each row of ``scores``, shape (m, r), best first.

    Equal scores keep the order of their columns.

    Returns:
        columns and values of all rows, one after the other, and the number of each row.
    """
    # Sort few of the scores: those that reach the n-th best maximum of a row's blocks. At least n
    # do, because n blocks have such a maximum.
    m, width = scores.shape
    least = _nth_best_block(scores, n)
    flat = np.flatnonzero(scores >= np.maximum(least, np.finfo(np.float32).min)[:, None])
    row, column = np.divmod(flat, width)
    found = np.bincount(row, minlength=m)
    place = np.arange(len(row)) - (np.cumsum(found) - found)[row]
    shape = (m, int(found.max(initial=0)))
    values, columns = np.full(shape, -np.inf, dtype=np.float32), np.zeros(shape, dtype=np.intp)
    values[row, place], columns[row, place] = scores.ravel()[flat], column
    order = np.argsort(-values, axis=1, kind="stable")[:, :n]
    counts: Indices = np.minimum(found, n)
    rank: Indices = np.arange(n)[: order.shape[1]]
    kept: Mask = rank < counts[:, None]
    best: Indices = np.take_along_axis(columns, order, 1)
    value: Vector = np.take_along_axis(values, order, 1)
    return best[kept], value[kept], counts


def _nth_best_block(scores: Vector, n: int) -> Vector:
    """Return per row a number that at least ``n`` of its scores reach; -inf if it has fewer."""
    m, width = scores.shape
    if n >= width:
        return np.full(m, -np.inf, dtype=np.float32)  # pyright: ignore[reportUnknownVariableType]
    blocks = width // _BLOCK
    tops = (
        scores[:, : _BLOCK * blocks].reshape(m, _BLOCK, blocks).max(axis=1)
        if blocks >= n
        else scores
    )
    return np.partition(tops, tops.shape[1] - n, axis=1)[:, tops.shape[1] - n]


class VectorIndex(Generic[T]):
    """Keep vectors with their items by key; rows are never rewritten, so snapshots stay true.

    One thread writes at a time; any number search snapshots.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._reset(64)

    def _reset(self, capacity: int) -> None:
        self._matrix = np.zeros((capacity, self.dimension), dtype=np.float32)
        self._alive = np.zeros(capacity, dtype=np.bool_)
        self._shared = False
        self._items: list[T] = []
        self._rows: dict[str, int] = {}
        self._labels: dict[str, list[int]] = {}
        self._masks = Masks(self._items)

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, key: str, vector: Vector, item: T, labels: frozenset[str] = frozenset()) -> None:
        """Write an item under ``key``, in place of an earlier one."""
        self.remove(key)
        row = len(self._items)
        if row == len(self._alive):  # twice the room; snapshots keep the old arrays
            self._matrix = np.concatenate([self._matrix, np.zeros_like(self._matrix)])
            self._alive = np.concatenate([self._alive, np.zeros_like(self._alive)])
            self._shared = False
        self._matrix[row] = vector
        self._alive[row] = True
        self._items.append(item)
        self._rows[key] = row
        for label in labels:
            self._labels.setdefault(label, []).append(row)

    def remove(self, key: str) -> None:
        """Take the item of ``key`` out, if there is one."""
        row = self._rows.pop(key, None)
        if row is None:
            return
        if self._shared:
            self._alive, self._shared = self._alive.copy(), False
        self._alive[row] = False
        if len(self._items) > 64 + 2 * len(self._rows):
            self._compact()

    def row(self, key: str) -> int | None:
        """Return the row of ``key`` in the next snapshot, or None."""
        return self._rows.get(key)

    def snapshot(self) -> Snapshot[T]:
        """Return the present state, fixed."""
        self._shared = True
        count = len(self._items)
        return Snapshot(
            self._matrix[:count], self._alive[:count], self._items, self._labels, self._masks
        )

    def _compact(self) -> None:
        matrix, items = self._matrix, self._items
        kept = sorted(self._rows.items(), key=lambda pair: pair[1])
        labels: dict[int, list[str]] = {}
        for label, rows in self._labels.items():
            for row in rows:
                labels.setdefault(row, []).append(label)
        self._reset(max(64, 2 * len(kept)))
        for key, row in kept:
            self.put(key, matrix[row], items[row], frozenset(labels.get(row, ())))
