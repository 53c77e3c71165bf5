"""Search vectors exactly: normalised float32 rows in one matrix, compared by one product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from experiential.bank.search.where import Scope, Where
from experiential.types import Experience

Vector = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]
T = TypeVar("T")
_SCORES_AT_ONCE = 1 << 24
"""Cosines of one product (64 MiB): many queries of a small bank, few of a large one."""
_BLOCK = 16
_MOST_MASKS = 32


class Scored(NamedTuple, Generic[T]):
    """Hold one item found and its cosine similarity to the query."""

    item: T
    score: float
    words: float = 0.0  # weighted share of the query's words in it, if words were asked for


# Does as ``Scored._make``, without counting the fields in Python: a batch has thousands.
_scored: Callable[[Iterable[Any]], Scored[Any]] = partial(cast("Any", tuple).__new__, Scored)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Hold the index at one moment; searching it takes no lock, whatever is written meanwhile.

    Attributes:
        matrix: one vector per row, shape (r, d), float32.
        dead: rows whose items were replaced or removed.
        items: of all rows, and of rows written since.
        labels: rows by label, with rows written since.
        masks: which of the items pass each of the last filters.
    """

    matrix: Vector
    dead: Indices
    items: list[Experience]
    labels: dict[str, list[int]]
    masks: dict[Where, Mask]

    def search(
        self, queries: Vector, n: int, scopes: Sequence[Scope]
    ) -> list[list[Scored[Experience]]]:
        """Return the ``n`` nearest items in the scope of each query, best first.

        Queries are normalised, shape (m, d), float32. Equal scores keep the order in which the
        items were written.
        """
        found: list[list[Scored[Experience]]] = []
        count = len(self.matrix)
        step = max(1, _SCORES_AT_ONCE // max(1, count))
        for start in range(0, len(queries), step):
            scores = queries[start : start + step] @ self.matrix.T
            if len(self.dead):
                scores[:, self.dead] = -np.inf
            for row, (label, where) in enumerate(scopes[start : start + step]):
                if label is not None and (hidden := self.labels.get(label)):
                    scores[row, [one for one in hidden if one < count]] = -np.inf
                if where is not None:
                    # two threads that test the same items find the same
                    known = self.masks.get(where, np.empty(0, dtype=np.bool_))
                    if len(known) < count:
                        new = [where.matches(item) for item in self.items[len(known) : count]]
                        known = np.concatenate([known, np.array(new, dtype=np.bool_)])
                        if len(self.masks) >= _MOST_MASKS:
                            self.masks.clear()
                        self.masks[where] = known
                    scores[row, ~known[:count]] = -np.inf
            columns, values, counts = best_of_each(scores, n)
            items = map(self.items.__getitem__, columns.tolist())
            triples = zip(items, values.tolist(), repeat(0.0), strict=False)
            hits: list[Scored[Experience]] = list(map(_scored, triples))
            edges = [0, *np.cumsum(counts).tolist()]
            found.extend(hits[begin:end] for begin, end in pairwise(edges))
        return found


def best_of_each(scores: Vector, n: int) -> tuple[Indices, Vector, Indices]:
    """Return the ``n`` best finite scores of each row of ``scores``, shape (m, r), best first.

    Equal scores keep the order of their columns.

    Returns:
        columns and values of all rows, one after the other, and the number of each row.
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


class VectorIndex:
    """Keep vectors with their items by key; rows are never rewritten, so snapshots stay true.

    One thread writes at a time; any number search snapshots.

    Attributes:
        rows: the row of each key in the next snapshot.
    """

    def __init__(self, dimension: int) -> None:
        self._dimension = dimension
        self._reset(64)

    def _reset(self, capacity: int) -> None:
        self._matrix = np.zeros((capacity, self._dimension), dtype=np.float32)
        self._alive = np.zeros(capacity, dtype=np.bool_)
        self._items: list[Experience] = []
        self._labels: dict[str, list[int]] = {}
        self._masks: dict[Where, Mask] = {}
        self.rows: dict[str, int] = {}

    def put(self, key: str, vector: Vector, item: Experience, labels: Iterable[str]) -> None:
        """Write an item under ``key``, in place of an earlier one."""
        self.remove(key)
        row = len(self._items)
        if row == len(self._alive):  # twice the room; snapshots keep the old matrix
            self._matrix = np.concatenate([self._matrix, np.zeros_like(self._matrix)])
            self._alive = np.concatenate([self._alive, np.zeros_like(self._alive)])
        self._matrix[row] = vector
        self._alive[row] = True
        self._items.append(item)
        self.rows[key] = row
        for label in labels:
            self._labels.setdefault(label, []).append(row)

    def remove(self, key: str) -> None:
        """Take the item of ``key`` out, if there is one."""
        row = self.rows.pop(key, None)
        if row is None:
            return
        self._alive[row] = False
        if len(self._items) > 64 + 2 * len(self.rows):  # mostly dead rows: write the others anew
            matrix, items = self._matrix, self._items
            kept = sorted(self.rows.items(), key=lambda pair: pair[1])
            labels: dict[int, list[str]] = {}
            for label, rows in self._labels.items():
                for row in rows:
                    labels.setdefault(row, []).append(label)
            self._reset(max(64, 2 * len(kept)))
            for key, row in kept:
                self.put(key, matrix[row], items[row], labels.get(row, ()))

    def snapshot(self) -> Snapshot:
        """Return the present state, fixed."""
        count = len(self._items)
        dead = np.flatnonzero(~self._alive[:count])
        return Snapshot(self._matrix[:count], dead, self._items, self._labels, self._masks)
