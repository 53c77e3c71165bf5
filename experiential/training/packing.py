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
        """Return whether token i attends to token j, itself or earlier on a path, shape (n, n)."""
        seen = np.zeros((len(self.tokens), len(self.tokens)), dtype=np.bool_)
        for path in set(self.paths):
            seen[np.ix_(path, path)] |= np.tri(len(path), dtype=np.bool_)
        return seen


def pack(samples: Sequence[Sample], *, parity: int = 0) -> list[Row]:
    """Pack every sample's inputs ``tokens[:last position]`` into rows, longest first.

    Sorted lexicographically, a sequence stands right before its extensions and beside those it
    shares most with. One that only shares a beginning with its neighbour branches off its row where
    that computes less than a row of its own, a row of n tokens costing n + n^2 / parity: ``parity``
    is the length at which attention costs as much as all else; 0 keeps every row unbranched.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.tokens[: max(sample.positions)], []).append(index)
    rows: list[tuple[list[int], list[int], list[tuple[int, ...]]]] = []  # the fields of `Row`
    last: tuple[int, ...] = ()
    for tokens in sorted(members, reverse=True):
        pairs = enumerate(zip(last, tokens, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(last), len(tokens)))
        joins = bool(rows) and shared == len(tokens)
        if rows and shared and parity and not joins:
            width, new = len(rows[-1][0]), len(tokens) - shared
            grown = new + ((width + new) ** 2 - width**2) / parity
            joins = grown < len(tokens) + len(tokens) ** 2 / parity
        if not joins:
            rows.append(([], [], []))
            shared = 0
        laid, owners, paths = rows[-1]
        trunk = paths[-1][:shared] if shared else ()
        path = (*trunk, *range(len(laid), len(laid) + len(tokens) - shared))
        laid += tokens[shared:]
        owners += members[tokens]
        paths += [path] * len(members[tokens])
        last = tokens
    made = (Row(tuple(laid), tuple(owners), tuple(paths)) for laid, owners, paths in rows)
    return sorted(made, key=lambda row: -len(row.tokens))


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
