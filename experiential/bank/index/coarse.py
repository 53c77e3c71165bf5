"""Find what may be among the nearest of many vectors, for many queries, by products of integers.

Vectors are turned by a random rotation, so that their components are about equally large whatever
made them, and rounded to eight bits, or to seven. ``onnxruntime``, which comes with Chroma,
multiplies such matrices several times as fast as NumPy multiplies float32 where the processor has
an instruction for it, and still twice as fast with seven bits where it has none. The products only
leave out what cannot be among the best; cosines in float32 decide.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from experiential.bank.index.embed import Vector

Indices = npt.NDArray[np.intp]
Int8Product = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.int8]], npt.NDArray[np.int32]]
FEWEST = 4096
"""Rows from which rounding pays, for two queries or more."""
_ROWS = 1024
_BLOCK = 16
_AT_ONCE = 1 << 19
"""Products that stay in the processor's cache."""
_MOST = 256
"""Candidates of a query, on average, beyond which comparing all is as good: most are alike."""
_WIDEST = 5.5
"""Standard deviations of a component that the bits hold."""
_SURE = 10.0
"""Standard deviations of rounding that may put two rows in the wrong order: 7 of a difference."""
_HIDDEN = -(1 << 30)


@lru_cache(1)
def int8_product() -> Int8Product | None:
    """Return the product of matrices of uint8 and int8 in int32; None where it is not exact.

    It is exact for numbers up to `largest_code` on the left.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    runtime: Any = onnxruntime  # has no types
    options = runtime.SessionOptions()
    threads = os.environ.get("OMP_NUM_THREADS", "")  # as for NumPy; 0 is a thread for each core
    options.intra_op_num_threads = int(threads) if threads.isdigit() else 0
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    graph = Path(__file__).with_name("product.onnx").read_bytes()
    session: Any = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def product(left: npt.NDArray[np.uint8], right: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
        [found] = session.run(None, {"left": left, "right": right})
        return found

    return product if _is_exact(product, 127) else None


@lru_cache(1)
def largest_code() -> int:
    """Return the largest number that a row may hold: of eight bits, or of seven.

    Processors without an instruction for the product saturate sums of two products at 16 bits,
    which 2 * 127 * 127 does not reach.
    """
    product = int8_product()
    return 255 if product is not None and _is_exact(product, 255) else 127


def _is_exact(product: Int8Product, largest: int) -> bool:
    left, right = np.full((64, 64), largest, np.uint8), np.full((64, 64), 127, np.int8)
    return all((product(left, sign * right) == sign * 64 * largest * 127).all() for sign in (1, -1))


class Codes:
    """Hold the rounded vectors of an index, whose rows are never rewritten; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes = np.zeros((0, 0), dtype=np.uint8)
        self._count = 0
        self._rotation: Vector = np.zeros((0, 0), dtype=np.float32)
        self._half = 127  # codes go from 1 to 2 * _half + 1
        self._step = 1.0
        self._error = 0.0  # largest distance of a vector from its rounded one

    def candidates(
        self, matrix: Vector, queries: Vector, n: int, dead: Indices
    ) -> tuple[Indices, Indices] | None:
        """Return pairs of query and row, among them the ``n`` nearest rows of each query.

        A row is left out where its product lies so far below the n-th best that rounding cannot
        explain it. The errors of rotated vectors are as good as random, so that is where they would
        have to be ``_SURE`` standard deviations; with few components, the largest possible error.

        Args:
            matrix: unit vectors, shape (r, d), float32.
            queries: unit vectors, shape (m, d), float32.
            n: how many for each query.
            dead: rows that no query may find, rising.

        Returns:
            query and row of each pair, rising; None where comparing all rows is as good, since they
            are few or too many of them alike, or where the processor has no such product.
        """
        count, d = matrix.shape
        size = max(_ROWS, 4 * _BLOCK * n)
        if len(queries) < 2 or count < max(FEWEST, size) or (product := int8_product()) is None:
            return None
        codes, error = self._rounded(matrix)
        turned = queries @ self._rotation
        scale = np.maximum(np.abs(turned).max(axis=1), 1e-9) / 127
        rounded = np.rint(turned / scale[:, None])
        off = np.linalg.norm(turned - rounded * scale[:, None], axis=1)
        likely = _SURE * np.sqrt((error**2 + off**2) / d)
        slack = np.minimum(likely, 2 * (error + off * (1 + error))) / (scale * self._step)
        right = rounded.T.astype(np.int8)
        width = max(16, _AT_ONCE // size)
        pairs: list[tuple[Indices, Indices]] = []
        for first in range(0, len(queries), width):
            part = slice(first, first + width)
            near = _near(
                product, codes, np.ascontiguousarray(right[:, part]), n, size, slack[part], dead
            )
            if near is None:
                return None
            pairs.append((near[0] + first, near[1]))
        query, row = (np.concatenate(side) for side in zip(*pairs, strict=True))
        return query, row

    def _rounded(self, matrix: Vector) -> tuple[npt.NDArray[np.uint8], float]:
        """Return the codes of all rows, those of new ones made now, and the largest error."""
        count, d = matrix.shape
        with self._lock:
            if not len(self._rotation):
                drawn = np.random.default_rng(0).standard_normal((d, d))
                self._rotation = np.linalg.qr(drawn)[0].astype(np.float32)
                self._codes = np.zeros((0, d), dtype=np.uint8)
                self._half = largest_code() // 2
                self._step = min(1.0, _WIDEST / d**0.5) / self._half
            if count > len(self._codes):  # searches of earlier snapshots keep the old codes
                codes = np.zeros((max(count, 2 * len(self._codes)), d), dtype=np.uint8)
                codes[: self._count] = self._codes[: self._count]
                self._codes = codes
            for start in range(self._count, count, _ROWS):
                end = min(count, start + _ROWS)
                turned = matrix[start:end] @ self._rotation
                rounded = np.clip(np.rint(turned / self._step), -self._half, self._half)
                self._codes[start:end] = rounded + self._half + 1
                off = np.linalg.norm(turned - rounded * self._step, axis=1)
                self._error = max(self._error, float(off.max()))
            self._count = max(self._count, count)
            return self._codes[:count], self._error


def _near(
    product: Int8Product,
    codes: npt.NDArray[np.uint8],
    right: npt.NDArray[np.int8],
    n: int,
    size: int,
    slack: npt.NDArray[np.floating[Any]],
    dead: Indices,
) -> tuple[Indices, Indices] | None:
    """Return the candidates of queries, columns of ``right``; ``size`` rows at a time."""
    m = right.shape[1]
    tops = np.empty((m, 0), dtype=np.int32)
    waiting: list[npt.NDArray[np.int32]] = []
    found: list[tuple[Indices, Indices, npt.NDArray[np.int32]]] = []
    least = np.zeros(m, dtype=np.int32)
    total = 0
    for step, start in enumerate(range(0, len(codes), size), 1):
        scores = product(codes[start : start + size], right)
        begin, end = np.searchsorted(dead, (start, start + len(scores)))
        scores[dead[begin:end] - start] = _HIDDEN
        # Each block has a row as good as its maximum, so n rows reach the n-th best maximum.
        blocks = len(scores) // _BLOCK
        waiting.append(scores[: _BLOCK * blocks].reshape(_BLOCK, blocks, m).max(axis=0))
        if step & (step - 1) == 0:
            tops = np.concatenate([tops, *(one.T for one in waiting)], axis=1)
            tops = np.partition(tops, tops.shape[1] - n, axis=1)[:, -n:]
            least, waiting = np.maximum(tops[:, 0] - slack, _HIDDEN).astype(np.int32), []
        flat = np.flatnonzero(scores >= least)
        row, query = np.divmod(flat, m)
        found.append((query, row + start, scores.ravel()[flat]))
        total += len(flat)
        if total > _MOST * m + 8 * n * m:
            return None
    query, row, value = (np.concatenate(side) for side in zip(*found, strict=True))
    order = np.argsort(query.astype(np.uint16), kind="stable")
    query, row, value = query[order], row[order], value[order]
    counts = np.bincount(query, minlength=m)
    place = np.arange(len(query)) - (np.cumsum(counts) - counts)[query]
    table = np.full((m, max(n, int(counts.max()))), _HIDDEN, dtype=np.int32)
    table[query, place] = value
    lowest = np.partition(table, table.shape[1] - n, axis=1)[:, -n] - slack
    kept = (value >= lowest[query]) & (value > _HIDDEN)
    return query[kept], row[kept]
