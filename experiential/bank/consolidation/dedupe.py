"""Find near-duplicates by the cosine of their texts, block by block; merge them into the oldest.

The vectors that a bank searches by hold the task too, with twice the weight of the text; entries of
one task are all near each other there. Here texts alone are compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar, cast

import numpy as np

from experiential.bank.evidence.credit import total
from experiential.bank.extractor import LaterJudge
from experiential.bank.index.embed import EntryKey, embed_entries
from experiential.bank.index.vectors import Vector
from experiential.bank.operations import common_task
from experiential.bank.protocol import Bank
from experiential.bank.records import Duplicates, Judge
from experiential.bank.state import Draft, State
from experiential.bank.storage.history import History
from experiential.types import Experience, Statistics

Embed = Callable[[Sequence[str]], Vector]
Pair = tuple[Experience, Experience]
"""Two entries that may say the same, the older first."""
Q = TypeVar("Q")
T = TypeVar("T")
Asking = Generator[Q, bool, T]
"""A search that yields yes-or-no questions on its way to a result, whoever answers them."""
BLOCK = 512
"""Rows compared at a time."""
_COLUMNS = 4096
_TEXTS_AT_ONCE = 1024
_ROUNDING = 1e-6  # of a product of float32 unit vectors


Write = Callable[[Sequence[Duplicates], str], Awaitable[list[Duplicates]]]
"""Merges groups in one commit that refers to a text: ``merge_duplicates`` of a bank, awaited."""
Attempt = Callable[[Awaitable[list[Duplicates]]], Awaitable[list[Duplicates] | None]]


def find(
    entries: Sequence[Experience],
    embed: Embed,
    threshold: float,
    judge: Judge | None = None,
    *,
    across_tasks: bool = False,
    among: Iterable[str] | None = None,
) -> list[Duplicates]:
    """Return groups of near-duplicates; entries of different kinds never are.

    Each entry, oldest first, joins the older survivor most like it, or survives. So every entry
    merged is like its survivor itself and not only like another one merged, except with ``among``,
    where the two levels may form a chain.

    Args:
        entries: oldest first.
        embed: unit vectors of texts, shape (n, d).
        threshold: cosine from which on two texts may say the same.
        judge: asked about each pair from the threshold on, most similar first, until it says yes;
            None takes every pair, and equal texts are never asked about.
        across_tasks: compare entries of different tasks too.
        among: ids of a batch of new entries: these are compared with each other, then what is left
            with older entries (EvolveR); None compares all.

    Raises:
        ValueError: the threshold is not in (0, 1].
    """
    batch = None if among is None else frozenset(among)
    groups = comparable(entries, threshold, across_tasks=across_tasks)
    return [
        found
        for group in groups
        for found in answered(
            compare(group, embed, threshold, batch), lambda pair: judge is None or judge(*pair)
        )
    ]


def comparable(
    entries: Iterable[Experience], threshold: float, *, across_tasks: bool = False
) -> list[list[Experience]]:
    """Group entries by kind, and by task unless ``across_tasks``; leave out lone ones.

    Raises:
        ValueError: the threshold is not in (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"Expected a threshold above 0 and up to 1, got {threshold}")
    groups: dict[tuple[str | None, str], list[Experience]] = {}
    for entry in entries:
        groups.setdefault((None if across_tasks else entry.task, entry.kind), []).append(entry)
    return [group for group in groups.values() if len(group) > 1]


def compare(
    group: Sequence[Experience], embed: Embed, threshold: float, batch: frozenset[str] | None = None
) -> Asking[Pair, list[Duplicates]]:
    """Find the near-duplicates among comparable entries, see ``find``.

    Yields pairs with different texts, the older entry first.
    """
    new = [i for i, entry in enumerate(group) if batch is None or entry.id in batch]
    if not new:
        return []
    vectors = _vectors([entry.text for entry in group], embed)
    joins = yield from _judged(leaders(vectors, threshold, new), group)
    if batch is not None:
        old = sorted(set(range(len(group))) - set(new))
        joins |= yield from _judged(
            older_twins(vectors, threshold, [i for i in new if joins[i] == i], old), group
        )
    return _grouped(group, joins)


def _judged(asking: Asking[tuple[int, int], T], group: Sequence[Experience]) -> Asking[Pair, T]:
    """Yield rows as entries; equal texts are the same without a question."""
    verdict: bool | None = None
    while True:
        try:
            older, newer = asking.send(verdict) if verdict is not None else next(asking)
        except StopIteration as end:
            return end.value
        a, b = group[older], group[newer]
        verdict = a.text == b.text or (yield a, b)


def answered(asking: Asking[Q, T], answer: Callable[[Q], bool]) -> T:
    """Return the result of a search whose questions a function answers."""
    try:
        question = next(asking)
        while True:
            question = asking.send(answer(question))
    except StopIteration as end:
        return end.value


async def answered_later(
    asking: Asking[Q, T], answer: Callable[[Q], Awaitable[bool]], threads: Executor
) -> T:
    """Return the result of a search whose questions are answered by awaiting.

    Between questions it works on a thread, so that the event loop goes on.
    """
    verdict: bool | None = None
    while True:
        question, result = await asyncio.get_running_loop().run_in_executor(
            threads, partial(_next_of, asking, verdict)
        )
        if question is None:
            return cast("T", result)
        verdict = await answer(question)


def _next_of(asking: Asking[Q, T], verdict: bool | None) -> tuple[Q | None, T | None]:
    """Return the next question, or the result: a future cannot carry a StopIteration."""
    try:
        return (next(asking) if verdict is None else asking.send(verdict)), None
    except StopIteration as end:
        return None, end.value


def _vectors(texts: Sequence[str], embed: Embed) -> Vector:
    distinct = list(dict.fromkeys(texts))
    parts = [
        embed(distinct[start : start + _TEXTS_AT_ONCE])
        for start in range(0, len(distinct), _TEXTS_AT_ONCE)
    ]
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
    return [
        Duplicates(survivor=group[i], merged=tuple(group[j] for j in those))
        for i, those in merged.items()
    ]


def leaders(
    vectors: Vector, threshold: float, rows: Sequence[int]
) -> Asking[tuple[int, int], dict[int, int]]:
    """Return for each row the earlier survivor that it joins, or itself if it survives.

    Yields pairs (survivor, row) to ask about.

    Args:
        vectors: unit vectors, shape (n, d), float32.
        threshold: cosine from which on a pair is a candidate.
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
            joins[row] = yield from _first_accepted(found[i], row)
            if joins[row] == row:
                kept.append(row)
    return joins


def older_twins(
    vectors: Vector, threshold: float, rows: Sequence[int], others: Sequence[int]
) -> Asking[tuple[int, int], dict[int, int]]:
    """Return for each row the earlier other row that it joins, or itself; asks as ``leaders``."""
    joins: dict[int, int] = {}
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        found = near(vectors, block, others, threshold)
        for i, row in enumerate(block):
            joins[row] = yield from _first_accepted(
                [pair for pair in found[i] if pair[1] < row], row
            )
    return joins


def near(
    vectors: Vector, rows: Sequence[int], others: Sequence[int], threshold: float
) -> list[list[tuple[float, int]]]:
    """Return per row (cosine, row) of the others with a cosine from the threshold on."""
    found: list[list[tuple[float, int]]] = [[] for _ in rows]
    for start in range(0, len(others), _COLUMNS):
        part = others[start : start + _COLUMNS]
        cosines = vectors[rows] @ vectors[part].T
        for i, j in np.argwhere(cosines >= threshold - _ROUNDING).tolist():
            found[i].append((float(cosines[i, j]), part[j]))
    return found


def _first_accepted(candidates: list[tuple[float, int]], row: int) -> Asking[tuple[int, int], int]:
    for _, other in sorted(candidates, key=lambda pair: (-pair[0], pair[1])):
        if (yield other, row):
            return other
    return row


def since(entries: Iterable[Experience], commit: int) -> tuple[list[Experience], frozenset[str]]:
    """Return entries in the order of their present texts, and the ids of those after a commit.

    A survivor of a deduplication keeps its text, so it is not among the latter.
    """
    ordered = sorted(entries, key=lambda entry: entry.provenance.commit or 0)
    news = (
        e.id
        for e in ordered
        if (e.provenance.commit or 0) > commit and e.provenance.cause != "dedupe"
    )
    return ordered, frozenset(news)


class Passes:
    """Run passes of two-level deduplication on one event loop.

    A pass compares entries written since the last pass without a failure with each other, then with
    older ones (EvolveR); the first pass compares all. Entries of one task and kind are one piece of
    work, written in one commit, and a failure loses that piece only. Passes run one after the
    other; a cancelled one leaves what it has written.

    Args:
        bank: whose entries are compared.
        threshold: cosine of two texts from which on the judge is asked.
        across_tasks: compare entries of different tasks too; a survivor of several tasks has no
            task.
    """

    def __init__(self, bank: Bank, threshold: float, *, across_tasks: bool = False) -> None:
        self._bank = bank
        self._threshold = threshold
        self._across_tasks = across_tasks
        self._since = 0
        self._turn = asyncio.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="experiential-dedupe")

    async def make(self, judge: LaterJudge, write: Write, attempt: Attempt) -> list[Duplicates]:
        """Run one pass and return the groups merged.

        Args:
            judge: says whether two entries, the older first, teach the same; what it raises ends
                the piece of work.
            write: merges groups in one commit.
            attempt: the groups merged in one piece of work, or None when that failed.
        """
        async with self._turn:
            head = self._bank.head
            groups, news = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._plan
            )
            pieces = await asyncio.gather(
                *(attempt(self._piece(group, news, judge, write)) for group in groups)
            )
            if None not in pieces:
                self._since = head
            return [group for piece in pieces for group in piece or ()]

    def _plan(self) -> tuple[list[list[Experience]], frozenset[str]]:
        ordered, news = since(self._bank.entries(), self._since)
        groups = (
            comparable(ordered, self._threshold, across_tasks=self._across_tasks) if news else []
        )
        return [group for group in groups if any(entry.id in news for entry in group)], news

    async def _piece(
        self, group: Sequence[Experience], news: frozenset[str], judge: LaterJudge, write: Write
    ) -> list[Duplicates]:
        asking = compare(group, self._bank.embedder, self._threshold, news)
        found = await answered_later(asking, lambda pair: judge(*pair), self._threads)
        return await write(found, f"judged from cosine {self._threshold:g} on") if found else []

    def close(self) -> None:
        """Wait for the comparison that runs, and end the thread."""
        self._threads.shutdown(wait=True)


class Merger:
    """Merge groups of duplicates inside one commit.

    The survivor gets a new version with its own text, the summed counters and all entries of the
    group as parents, so that what it earns is credited to each; it has no generation of its own.
    Its task is the one that all share, else None.
    """

    def __init__(
        self, draft: Draft, state: State, history: History, vectors: dict[EntryKey, Vector]
    ) -> None:
        self._draft = draft
        self._state = state
        self._history = history
        self._vectors = vectors

    def merge(self, found: Duplicates) -> Duplicates | None:
        """Merge one group; return None if nothing is left to merge.

        An entry that changed since it was compared stays out.
        """
        merged = tuple(entry for entry in found.merged if self._is_unchanged(entry))
        if not merged or not self._is_unchanged(found.survivor):
            return None
        entry = self._merged(found.survivor, merged)
        origins = frozenset[str]().union(
            *(
                live.origins
                for one in (entry, *merged)
                if (live := self._draft.live(one.id)) is not None
            )
        )
        known = [
            self._state.statistics.get(entry.id),
            *(self._state.counted(one.id) for one in merged),
        ]
        for one in merged:
            self._draft.remove(one.id)
        instance = next(iter(origins)) if len(origins) == 1 else None
        provenance = entry.provenance.model_copy(update={"instance": instance})
        entry = entry.model_copy(update={"provenance": provenance})
        entry = self._draft.put(entry, self._vector(entry), origins)
        self._draft.count(entry.id, total(counts or Statistics() for counts in known))
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
        return survivor.model_copy(
            update={"version": version, "task": common_task(family), "provenance": provenance}
        )

    def _vector(self, entry: Experience) -> Vector:
        key = EntryKey(entry.text, entry.task)
        if key in self._vectors:
            return self._vectors[key]
        (_, version), *_ = entry.provenance.parents
        stored = self._history.stored(entry.id, version)
        assert stored is not None
        return stored.vector


def vectors_needed(found: Iterable[Duplicates], embed: Embed) -> dict[EntryKey, Vector]:
    """Return new vectors of the survivors that lose their task; others keep theirs."""
    lost = [
        group.survivor.text
        for group in found
        if common_task((group.survivor, *group.merged)) != group.survivor.task
    ]
    keys = [EntryKey(text) for text in dict.fromkeys(lost)]
    return dict(zip(keys, embed_entries(embed, keys), strict=True)) if keys else {}
