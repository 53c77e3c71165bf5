"""Near-duplicates: found by the cosine of their texts, block by block, and merged into the oldest.

The vectors that a bank searches by hold the task too, with twice the weight of the text; entries of one task are all near each other
there. Here texts alone are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from experiential.bank.credit import total
from experiential.bank.embed import EntryKey, embed_entries
from experiential.bank.history import History
from experiential.bank.operations import common_task
from experiential.bank.state import Draft, State
from experiential.bank.vectors import Vector
from experiential.types import Experience, Record, Statistics

Judge = Callable[[Experience, Experience], bool]
"""Whether two entries, the older first, teach the same: ``ExtractorAgent.judge`` is one."""
Embed = Callable[[Sequence[str]], Vector]
BLOCK = 512
"""Rows compared at a time."""
_COLUMNS = 4096
_TEXTS_AT_ONCE = 1024
_ROUNDING = 1e-6  # of a product of float32 unit vectors


class Duplicates(Record):
    """Entries that say the same: the one that stays and those merged into it, oldest first."""

    survivor: Experience
    merged: tuple[Experience, ...]


def find(
    entries: Sequence[Experience],
    embed: Embed,
    threshold: float,
    judge: Judge | None = None,
    *,
    across_tasks: bool = False,
    among: Iterable[str] | None = None,
) -> list[Duplicates]:
    """Groups of near-duplicates; entries of different kinds never are.

    Each entry, oldest first, joins the older survivor most like it, or survives. So every entry merged is like its survivor itself and
    not only like another one merged, except with ``among``, where the two levels may form a chain.

    Args:
        entries: oldest first.
        embed: unit vectors of texts, shape (n, d).
        threshold: cosine from which on two texts may say the same.
        judge: asked about each pair from the threshold on, most similar first, until it says yes; None takes every pair, and
            equal texts are never asked about.
        across_tasks: compare entries of different tasks too.
        among: ids of a batch of new entries: these are compared with each other, then what is left with older entries (EvolveR);
            None compares all.

    Raises:
        ValueError: the threshold is not in (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"Expected a threshold above 0 and up to 1, got {threshold}")
    batch = None if among is None else frozenset(among)
    groups: dict[tuple[str | None, str], list[Experience]] = {}
    for entry in entries:
        groups.setdefault((None if across_tasks else entry.task, entry.kind), []).append(entry)
    return [found for group in groups.values() if len(group) > 1 for found in _within(group, embed, threshold, judge, batch)]


def _within(
    group: Sequence[Experience], embed: Embed, threshold: float, judge: Judge | None, batch: frozenset[str] | None
) -> list[Duplicates]:
    new = [i for i, entry in enumerate(group) if batch is None or entry.id in batch]
    if not new:
        return []
    vectors = _vectors([entry.text for entry in group], embed)

    def accept(older: int, newer: int) -> bool:
        a, b = group[older], group[newer]
        return judge is None or a.text == b.text or judge(a, b)

    joins = leaders(vectors, threshold, accept, new)
    if batch is not None:
        old = sorted(set(range(len(group))) - set(new))
        left = [i for i in new if joins[i] == i]
        joins |= older_twins(vectors, threshold, accept, left, old)
    return _grouped(group, joins)


def _vectors(texts: Sequence[str], embed: Embed) -> Vector:
    distinct = list(dict.fromkeys(texts))
    parts = [embed(distinct[start : start + _TEXTS_AT_ONCE]) for start in range(0, len(distinct), _TEXTS_AT_ONCE)]
    row = {text: i for i, text in enumerate(distinct)}
    return np.concatenate(parts)[[row[text] for text in texts]]


def _grouped(group: Sequence[Experience], joins: dict[int, int]) -> list[Duplicates]:
    merged: dict[int, list[int]] = {}
    for i in sorted(joins):
        survivor = joins[i]
        while joins.get(survivor, survivor) != survivor:
            survivor = joins[survivor]
        if survivor != i:
            merged.setdefault(survivor, []).append(i)
    return [Duplicates(survivor=group[i], merged=tuple(group[j] for j in those)) for i, those in merged.items()]


def leaders(vectors: Vector, threshold: float, accept: Callable[[int, int], bool], rows: Sequence[int]) -> dict[int, int]:
    """For each row the earlier survivor that it joins, or itself when it survives.

    Compares ``BLOCK`` rows at a time with the survivors so far, which are compared ``_COLUMNS`` at a time.

    Args:
        vectors: unit vectors, shape (n, d), float32.
        threshold: cosine from which on a pair is a candidate.
        accept: whether a candidate pair (survivor, row) is one.
        rows: which rows to look at, in order.
    """
    joins: dict[int, int] = {}
    kept: list[int] = []
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        before = len(kept)
        found = near(vectors, block, kept, threshold)
        inside = vectors[block] @ vectors[block].T
        place = {row: i for i, row in enumerate(block)}
        for i, row in enumerate(block):
            fresh = [(float(inside[i, place[other]]), other) for other in kept[before:]]
            found[i].extend(pair for pair in fresh if pair[0] >= threshold - _ROUNDING)
            joins[row] = _first_accepted(found[i], row, accept)
            if joins[row] == row:
                kept.append(row)
    return joins


def older_twins(
    vectors: Vector, threshold: float, accept: Callable[[int, int], bool], rows: Sequence[int], others: Sequence[int]
) -> dict[int, int]:
    """For each row the other row before it that it joins, or itself."""
    joins: dict[int, int] = {}
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        found = near(vectors, block, others, threshold)
        joins |= {row: _first_accepted([pair for pair in found[i] if pair[1] < row], row, accept) for i, row in enumerate(block)}
    return joins


def near(vectors: Vector, rows: Sequence[int], others: Sequence[int], threshold: float) -> list[list[tuple[float, int]]]:
    """Per row, the others with a cosine from the threshold on: (cosine, row) pairs."""
    found: list[list[tuple[float, int]]] = [[] for _ in rows]
    for start in range(0, len(others), _COLUMNS):
        part = others[start : start + _COLUMNS]
        cosines = vectors[rows] @ vectors[part].T
        for i, j in np.argwhere(cosines >= threshold - _ROUNDING).tolist():
            found[i].append((float(cosines[i, j]), part[j]))
    return found


def _first_accepted(candidates: list[tuple[float, int]], row: int, accept: Callable[[int, int], bool]) -> int:
    ordered = sorted(candidates, key=lambda pair: (-pair[0], pair[1]))
    return next((other for _, other in ordered if accept(other, row)), row)


class Merger:
    """Merges groups of duplicates inside one commit.

    The survivor gets a new version with its own text, the summed counters and all entries of the group as parents, so that what it
    earns is credited to each; it has no generation of its own. Its task is the one that all share, else None.
    """

    def __init__(self, draft: Draft, state: State, history: History, vectors: dict[EntryKey, Vector]) -> None:
        self._draft = draft
        self._state = state
        self._history = history
        self._vectors = vectors

    def merge(self, found: Duplicates) -> Duplicates | None:
        """Merge one group; an entry that changed since it was compared stays out, and None says that nothing was left to merge."""
        merged = tuple(entry for entry in found.merged if self._is_unchanged(entry))
        if not merged or not self._is_unchanged(found.survivor):
            return None
        entry = self._merged(found.survivor, merged)
        origins = frozenset[str]().union(*(live.origins for one in (entry, *merged) if (live := self._draft.live(one.id)) is not None))
        known = [self._state.statistics.get(entry.id), *(self._state.counted(one.id) for one in merged)]
        for one in merged:
            self._draft.remove(one.id)
        entry = self._draft.put(_made_from(entry, origins), self._vector(entry), origins)
        self._draft.start_from(entry.id, total(counts or Statistics() for counts in known))
        return Duplicates(survivor=entry, merged=merged)

    def _is_unchanged(self, entry: Experience) -> bool:
        live = self._draft.live(entry.id)
        return live is not None and live.experience.version == entry.version

    def _merged(self, survivor: Experience, merged: Sequence[Experience]) -> Experience:
        family = (survivor, *merged)
        parents = tuple((entry.id, entry.version) for entry in family)
        own = {"cause": "dedupe", "parents": parents, "generation": None, "span": None}
        provenance = survivor.provenance.model_copy(update=own)
        version = self._history.last_version(survivor.id) + 1
        return survivor.model_copy(update={"version": version, "task": common_task(family), "provenance": provenance})

    def _vector(self, entry: Experience) -> Vector:
        key = EntryKey(entry.text, entry.task)
        if key in self._vectors:
            return self._vectors[key]
        ((_, version), *_) = entry.provenance.parents
        stored = self._history.stored(entry.id, version)
        assert stored is not None
        return stored.vector


def _made_from(entry: Experience, origins: frozenset[str]) -> Experience:
    instance = next(iter(origins)) if len(origins) == 1 else None
    return entry.model_copy(update={"provenance": entry.provenance.model_copy(update={"instance": instance})})


def vectors_needed(found: Iterable[Duplicates], embed: Embed) -> dict[EntryKey, Vector]:
    """Vectors of the survivors that lose their task, by which they were found; those of others stay as they are."""
    lost = [group.survivor.text for group in found if common_task((group.survivor, *group.merged)) != group.survivor.task]
    keys = [EntryKey(text) for text in dict.fromkeys(lost)]
    return dict(zip(keys, embed_entries(embed, keys), strict=True)) if keys else {}
