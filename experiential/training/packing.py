"""Pack samples into forward passes, and deal these to the ranks that compute them.

The inputs of all samples form a forest: members of a group share their prompt, turns of an episode
continue one another. A `Row` is a part of it laid out in one sequence, branch after branch; with
positions counted along each path and attention to the path alone, every token sees exactly what it
would see in a row of its own, and so gets the same gradient.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, pairwise, product
from typing import Any, cast

import torch

from experiential.training.runtime import LossSettings, Sample

_ROOMS = 9
"""Sizes of units that are tried, each half of the one before the last."""
_SLACK = (1.02, 1.05, 1.1, 1.2)
"""Sizes of rows that are tried, from the least possible one on."""
_WORK = 500_000
"""Placements after which no further sizes are tried: a second or two."""


@dataclass(frozen=True, slots=True)
class Row:
    """Describe one forward pass: token ids, its samples' indices, and the place of each input.

    The first ``known`` tokens, which all paths begin with, are not forwarded: their keys and values
    are at hand.
    """

    tokens: tuple[int, ...]
    samples: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    known: int = 0


def pack(samples: Sequence[Sample], chosen: Sequence[int] | None = None) -> Row:
    """Lay out the inputs ``tokens[:last position]`` of the chosen samples, by default of all.

    Sorted lexicographically, a sequence stands right before its extensions and beside those it
    shares most with, so whatever two of them share is computed once. Plain causal attention is
    right for the row if one of its sequences begins with all others.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index in range(len(samples)) if chosen is None else chosen:
        members.setdefault(inputs(samples[index]), []).append(index)
    laid: list[int] = []
    owners: list[int] = []
    paths: list[tuple[int, ...]] = []
    last: tuple[int, ...] = ()
    for tokens in sorted(members, reverse=True):
        shared = _count_equal(last, tokens)
        trunk = paths[-1][:shared] if shared else ()
        path = (*trunk, *range(len(laid), len(laid) + len(tokens) - shared))
        laid += tokens[shared:]
        owners += members[tokens]
        paths += [path] * len(members[tokens])
        last = tokens
    return Row(tuple(laid), tuple(owners), tuple(paths))


def common_beginning(samples: Sequence[Sample]) -> int:
    """Return how many tokens all samples share, short of what a trained token is drawn from."""
    first, last = min(s.tokens for s in samples), max(s.tokens for s in samples)
    most = min(min(s.positions) for s in samples) - 1
    return _count_equal(first[:most], last)


def by_sample(
    row: Row, samples: Sequence[Sample], measured: torch.Tensor
) -> dict[int, tuple[float, ...]]:
    """Divide what was measured of each trained token of a row by its samples."""
    values = iter(cast("Any", measured).tolist())
    return {m: tuple(islice(values, len(samples[m].positions))) for m in row.samples}


def draw_batches(count: int, batches: int, loss: LossSettings) -> list[list[list[int]]]:
    """Divide samples 0 to ``count`` - 1 among the optimiser steps of each epoch.

    The order is drawn with the seed of ``loss``, except that a first epoch of one step keeps it.
    """
    generator = torch.Generator().manual_seed(loss.seed)
    edges = [round(i * count / batches) for i in range(batches + 1)]
    epochs: list[list[list[int]]] = []
    for epoch in range(loss.epochs):
        order = list(range(count))
        if epoch or batches > 1:
            order = [int(i) for i in torch.randperm(count, generator=generator)]
        epochs.append([order[a:b] for a, b in pairwise(edges)])
    return epochs


def deal(
    samples: Sequence[Sample], ranks: int, *, limit: int, branching: bool = True
) -> list[list[tuple[int, ...]]]:
    """Deal samples to the rows of ranks that compute one row after the other, all at once.

    Ranks wait for each other at every row (ZeRO 3 gathers weights layer by layer), so the cost is
    the sum of the longest rows. Sequences that share a prefix are joined into units, those that
    share most first. The units go, largest first, to the row that grows least and has room, in
    several sizes of unit and of row; the cheapest result is kept. A group is divided where balance
    saves more than its prefix costs on a second rank.

    Args:
        samples: with trained positions.
        ranks: rows that are computed at the same time.
        limit: tokens of a row, unless a single sequence has more.
        branching: whether rows may branch; without, a row is one sequence and what begins it.

    Returns:
        for each round, the indices of the samples of every rank's row, shape (rounds, ranks);
        the longest rounds come first, and the last ones may have empty rows.
    """
    forest = _Forest(samples)
    total, longest = forest.size(0, len(forest.members)), max(forest.lengths)
    limit = limit if branching else 0
    ideal = max(longest, total / ranks)
    # of a round, where all rows of as many rounds as are needed, or of one more, are alike
    rounds = -(-total // (limit * ranks)) if limit else 1
    even = {max(longest, total / (ranks * n)) for n in (rounds, rounds + 1)}
    capacities = [limit, *(min(limit, size * slack) for size in even for slack in _SLACK)]
    rooms = [min(limit, total / ranks / 2 ** (k / 2)) for k in reversed(range(_ROOMS))]
    rooms += [limit, 0]
    if ranks == 1:  # nobody waits, and larger units share more
        capacities, rooms = [limit], [limit]
    best, lowest, work = list[list[_Bin]](), (float("inf"), 0), 0
    for room, capacity in dict.fromkeys(product(rooms, capacities)):
        if work > _WORK or lowest[0] <= ideal:
            break
        units = forest.join(room)
        found = forest.fill(units, ranks, capacity)
        longest_rows = sum(max(row.size for row in rows) for rows in found)
        cost = (longest_rows, sum(row.size for rows in found for row in rows))
        if cost < lowest:
            best, lowest = found, cost
        work += len(units) * ranks * len(found)
    totals, dealt = [0] * ranks, list[list[tuple[int, ...]]]()
    for rows in sorted(best, key=lambda rows: -max(row.size for row in rows)):
        rows.sort(key=lambda row: -row.size)
        chosen: list[tuple[int, ...]] = [()] * ranks
        for rank, row in zip(sorted(range(ranks), key=totals.__getitem__), rows, strict=True):
            chosen[rank] = tuple(i for a, b in row.ranges for i in chain(*forest.members[a:b]))
            totals[rank] += row.size
        dealt.append(chosen)
    return dealt


@dataclass
class _Bin:
    """Collect a row: ranges of sequences in ascending order, and the tokens of all together."""

    ranges: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    size: int = 0


class _Forest:
    """Sort the distinct inputs of samples, so that neighbours share most.

    Attributes:
        lengths: tokens of each sequence, ascending in the lexicographic order.
        members: the samples of each.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        members: dict[tuple[int, ...], list[int]] = {}
        for index, sample in enumerate(samples):
            members.setdefault(inputs(sample), []).append(index)
        ordered = sorted(members)
        self.members = [members[tokens] for tokens in ordered]
        self.lengths = [len(tokens) for tokens in ordered]
        self._shared = [
            0,
            *(_count_equal(a, b) for a, b in pairwise(ordered)),
        ]  # with the one before
        new = (n - shared for n, shared in zip(self.lengths, self._shared, strict=True))
        self._sums = [0, *accumulate(new)]
        self._least = [self._shared]  # of 1, 2, 4, ... neighbours
        while (width := 1 << len(self._least)) <= len(ordered):
            one = self._least[-1]
            self._least.append([min(pair) for pair in zip(one, one[width // 2 :], strict=False)])

    def size(self, start: int, stop: int) -> int:
        """Count the tokens of neighbouring sequences in one row."""
        return self._sums[stop] - self._sums[start] + self._shared[start]

    def join(self, room: float) -> list[tuple[int, int]]:
        """Join neighbours that share most into units of at most ``room`` tokens, largest first.

        One that another begins with joins it whatever the room, because it costs nothing.
        """
        count = len(self.lengths)
        starts, stops = list(range(count)), list(range(1, count + 1))  # known at a unit's ends
        for i in sorted(range(1, count), key=self._shared.__getitem__, reverse=True):
            start, stop = starts[i - 1], stops[i]
            least = max(self.size(start, i), self.size(i, stop))
            if self.size(start, stop) <= max(room, least):
                stops[start], starts[stop - 1] = stop, start
        units: list[tuple[int, int]] = []
        while not units or units[-1][1] < count:
            start = units[-1][1] if units else 0
            units.append((start, stops[start]))
        return sorted(units, key=lambda unit: -self.size(*unit))

    def fill(
        self, units: Sequence[tuple[int, int]], ranks: int, capacity: float
    ) -> list[list[_Bin]]:
        """Put units into rows of at most ``capacity`` tokens, unless one alone has more."""
        shared = [*self._shared, 0]
        least = min(self.size(a, b) - max(shared[a], shared[b]) for a, b in units)
        rounds: list[list[_Bin]] = []
        while units:
            rows, left = [_Bin() for _ in range(ranks)], list[tuple[int, int]]()
            for number, unit in enumerate(units):
                if min(row.size for row in rows) + least > max(capacity, least):
                    left += units[number:]  # every row is full
                    break
                size, place = min((self._grown(row, unit), i) for i, row in enumerate(rows))
                row = rows[place]
                if size <= max(capacity, row.size, self.size(*unit)):
                    insort(row.ranges, unit)
                    row.size = size
                else:
                    left.append(unit)
            rounds.append(rows)
            units = left
        return rounds

    def _grown(self, row: _Bin, unit: tuple[int, int]) -> int:
        """Count the tokens of a row with one more unit."""
        start, stop = unit
        place = bisect(row.ranges, unit)
        before = self._common(row.ranges[place - 1][1], start) if place else 0
        after = self._common(stop, row.ranges[place][0]) if place < len(row.ranges) else 0
        return row.size + self.size(start, stop) - before - after + min(before, after)

    def _common(self, stop: int, start: int) -> int:
        """Count the tokens that sequence ``stop`` - 1 shares with a later one, ``start``."""
        level = (start + 1 - stop).bit_length() - 1
        return min(self._least[level][stop], self._least[level][start + 1 - (1 << level)])


def inputs(sample: Sample) -> tuple[int, ...]:
    """Return the tokens up to the last trained one; of a sample without any, the first token."""
    return sample.tokens[: max(sample.positions, default=1)]


def _count_equal(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Count the tokens with which both begin, by bisection: slices are compared fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
