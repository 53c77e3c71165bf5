"""Pack samples into forward passes that compute shared prefixes once.

The inputs of all samples form a forest: members of a group share their prompt, turns of an episode
continue one another. A `Row` is a part of it laid out in one sequence, branch after branch; with
positions counted along each path and attention to the path alone, every token sees exactly what it
would see in a row of its own, and so gets the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiential.training.runtime import Sample


@dataclass(frozen=True, slots=True)
class Row:
    """Describe one forward pass: token ids, its samples' indices, and the place of each input."""

    tokens: tuple[int, ...]
    samples: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]

    @property
    def branched(self) -> bool:
        """Return whether a path is no prefix of the row; plain causal attention is then wrong."""
        return any(path[-1] != len(path) - 1 for path in self.paths)

    def positions(self) -> NDArray[np.int64]:
        """Return the position of each token in its own sequence, shape (n,)."""
        positions = np.zeros(len(self.tokens), dtype=np.int64)
        for path in set(self.paths):
            positions[list(path)] = np.arange(len(path))
        return positions

    def visible(self) -> NDArray[np.bool_]:
        """Return whether token i attends to token j, shape (n, n).

        It does if j is i itself or an earlier token on the same path.
        """
        seen = np.zeros((len(self.tokens), len(self.tokens)), dtype=np.bool_)
        for path in set(self.paths):
            seen[np.ix_(path, path)] |= np.tri(len(path), dtype=np.bool_)
        return seen


def pack(samples: Sequence[Sample], *, parity: int = 0) -> list[Row]:
    """Pack every sample's inputs ``tokens[:last position]`` into rows, longest first.

    Sorted lexicographically, a sequence stands right before its extensions and beside those it
    shares most with, so one backward pass finds what to share with what. A sequence that only
    shares a beginning with its neighbour branches off its row where that computes less than a row
    of its own, each row of n tokens costing n + n^2 / parity.

    Args:
        samples: the samples to pack.
        parity: row length at which attention costs as much as all else; 0 keeps every row one
            unbranched sequence.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.tokens[: max(sample.positions)], []).append(index)
    rows: list[_Tree] = []
    last: tuple[int, ...] = ()
    for tokens in sorted(members, reverse=True):
        shared = _common(last, tokens)
        if not rows or not (
            shared == len(tokens) or _worthwhile(len(rows[-1].tokens), len(tokens), shared, parity)
        ):
            rows.append(_Tree([], [], []))
            shared = 0
        rows[-1].grow(tokens, shared, members[tokens])
        last = tokens
    return sorted((tree.row() for tree in rows), key=lambda row: -len(row.tokens))


def micro_batches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Group consecutive rows within a padded size of ``tokens`` (at least one row each)."""
    batch: list[Row] = []
    width = 0
    for row in rows:
        widest = max(width, len(row.tokens))
        if batch and widest * (len(batch) + 1) > tokens:
            yield batch
            batch, widest = [], len(row.tokens)
        batch.append(row)
        width = widest
    if batch:
        yield batch


@dataclass(slots=True)
class _Tree:
    """Build a row, one sequence at a time."""

    tokens: list[int]
    samples: list[int]
    paths: list[tuple[int, ...]]

    def grow(self, tokens: tuple[int, ...], shared: int, samples: Sequence[int]) -> None:
        """Append the tokens after the first ``shared``, which are a prefix of the last path."""
        new = range(len(self.tokens), len(self.tokens) + len(tokens) - shared)
        trunk = self.paths[-1][:shared] if shared else ()
        self.tokens += tokens[shared:]
        self.samples += samples
        self.paths += [(*trunk, *new)] * len(samples)

    def row(self) -> Row:
        return Row(tuple(self.tokens), tuple(self.samples), tuple(self.paths))


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def _worthwhile(width: int, tokens: int, shared: int, parity: int) -> bool:
    """Return whether adding to a row of ``width`` costs less than a row of ``tokens`` alone."""
    if not parity or not shared:
        return False
    new = tokens - shared
    return new + ((width + new) ** 2 - width**2) / parity < tokens + tokens**2 / parity
