"""Find near-duplicates by the cosine of their texts, block by block; merge them into the oldest.

The vectors that a bank searches by hold the task too, with twice the weight of the text; entries of
one task are all near each other there. Here texts alone are compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from experiential.bank.evidence.credit import total
from experiential.bank.extractor import LaterJudge
from experiential.bank.index.embed import EntryKey, Vector
from experiential.bank.operations import common_task
from experiential.bank.protocol import Bank
from experiential.bank.records import Duplicates, Judge
from experiential.bank.state import Draft, State
from experiential.bank.storage.tables import History
from experiential.types import Experience, Statistics

T = TypeVar("T")
Embed = Callable[[Sequence[str]], Vector]
Pair = tuple[int, int]
Asking = Generator[Pair, bool, T]
"""A search that asks on its way whether two rows, the older first, say the same."""
Write = Callable[[Sequence[Duplicates], str], Awaitable[list[Duplicates]]]
"""Merges groups in one commit that refers to a text: ``merge_duplicates`` of a bank, awaited."""
Attempt = Callable[[Awaitable[list[Duplicates]]], Awaitable[list[Duplicates] | None]]
BLOCK = 512
"""Rows compared at a time."""
_COLUMNS = 4096
_TEXTS_AT_ONCE = 1024
_ROUNDING = 1e-6  # of a product of float32 unit vectors


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
        threshold: cosine from which on two texts may say the same, in (0, 1].
        judge: asked about each pair from the threshold on, most similar first, until it says yes;
            None takes every pair, and equal texts are never asked about.
        across_tasks: compare entries of different tasks too.
        among: ids of a batch of new entries: these are compared with each other, then what is left
            with older entries (EvolveR); None compares all.
    """
    batch = None if among is None else frozenset(among)
    found: list[Duplicates] = []
    for group in comparable(entries, threshold, across_tasks=across_tasks):
        asking = compare(group, embed, threshold, batch)
        step = next(asking)
        while isinstance(step, tuple):
            older, newer = step
            step = asking.send(judge is None or judge(group[older], group[newer]))
        found += step
    return found


def comparable(
    entries: Iterable[Experience], threshold: float, *, across_tasks: bool = False
) -> list[list[Experience]]:
    """Group entries by kind, and by task unless ``across_tasks``; leave out lone and proposed ones.

    Raises:
        ValueError: the threshold is not in (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"Expected a threshold above 0 and up to 1, got {threshold}")
    groups: dict[tuple[str | None, str], list[Experience]] = {}
    for entry in entries:
        if not entry.proposed:
            task = None if across_tasks else entry.task
            groups.setdefault((task, entry.kind), []).append(entry)
    return [group for group in groups.values() if len(group) > 1]


def compare(
    group: Sequence[Experience], embed: Embed, threshold: float, batch: frozenset[str] | None = None
) -> Generator[Pair | list[Duplicates], bool, None]:
    """Find the near-duplicates among comparable entries, see ``find``.

    Yields the places of two entries with different texts, is sent whether they say the same, and in
    the end yields the groups found.
    """
    new = [i for i, entry in enumerate(group) if batch is None or entry.id in batch]
    if not new:
        yield []
        return
    texts = [entry.text for entry in group]
    distinct = list(dict.fromkeys(texts))
    row = {text: i for i, text in enumerate(distinct)}
    starts = range(0, len(distinct), _TEXTS_AT_ONCE)
    parts = [embed(distinct[start : start + _TEXTS_AT_ONCE]) for start in starts]
    vectors = np.concatenate(parts)[[row[text] for text in texts]]
    joins = yield from leaders(vectors, threshold, new, texts=texts)
    if batch is not None:
        left = [i for i in new if joins[i] == i]
        old = sorted(set(range(len(group))) - set(new))
        joins |= yield from leaders(vectors, threshold, left, old, texts)
    merged: dict[int, list[Experience]] = {}
    for i in sorted(joins):
        survivor = joins[i]
        while joins.get(survivor, survivor) != survivor:
            survivor = joins[survivor]
        if survivor != i:
            merged.setdefault(survivor, []).append(group[i])
    # Yielded and not returned: the future of a thread cannot carry a StopIteration.
    yield [Duplicates(survivor=group[i], merged=tuple(those)) for i, those in merged.items()]


def leaders(
    vectors: Vector,
    threshold: float,
    rows: Sequence[int],
    others: Sequence[int] | None = None,
    texts: Sequence[str] = (),
) -> Asking[dict[int, int]]:
    """Return for each row the earlier row that it joins, or itself if it joins none.

    Args:
        vectors: unit vectors, shape (n, d), float32.
        threshold: cosine from which on a pair is a candidate; the most similar is asked about
            first.
        rows: which rows to look at, in order.
        others: rows that may be joined; None: those of ``rows`` that join none themselves.
        texts: of all rows; equal ones are the same without a question.
    """
    joins: dict[int, int] = {}
    kept = list(others or ())
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        before = len(kept)
        found: list[list[tuple[float, int]]] = [[] for _ in block]
        for column in range(0, before, _COLUMNS):
            part = kept[column : column + _COLUMNS]
            cosines = vectors[block] @ vectors[part].T
            for i, j in np.argwhere(cosines >= threshold - _ROUNDING).tolist():
                found[i].append((float(cosines[i, j]), part[j]))
        inside = vectors[block] @ vectors[block].T
        place = {row: i for i, row in enumerate(block)}
        for i, row in enumerate(block):
            fresh = ((float(inside[i, place[other]]), other) for other in kept[before:])
            pairs = [*found[i], *(pair for pair in fresh if pair[0] >= threshold - _ROUNDING)]
            joins[row] = row
            for _, other in sorted(pairs, key=lambda pair: (-pair[0], pair[1])):
                if other < row and ((texts and texts[other] == texts[row]) or (yield other, row)):
                    joins[row] = other
                    break
            if others is None and joins[row] == row:
                kept.append(row)
    return joins


@dataclass(eq=False)
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

    bank: Bank
    threshold: float
    across_tasks: bool = field(default=False, kw_only=True)
    _since: int = field(default=0, init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "experiential-dedupe"), init=False
    )

    async def make(self, judge: LaterJudge, write: Write, attempt: Attempt) -> list[Duplicates]:
        """Run one pass and return the groups merged.

        Args:
            judge: says whether two entries, the older first, teach the same; what it raises ends
                the piece of work.
            write: merges groups in one commit.
            attempt: the groups merged in one piece of work, or None when that failed.
        """

        async def merged(group: Sequence[Experience], news: frozenset[str]) -> list[Duplicates]:
            asking = compare(group, self.bank.embedder, self.threshold, news)
            # Between questions it works on a thread, so that the event loop goes on.
            loop = asyncio.get_running_loop()
            step = await loop.run_in_executor(self._threads, next, asking)
            while isinstance(step, tuple):
                verdict = await judge(group[step[0]], group[step[1]])
                step = await loop.run_in_executor(self._threads, asking.send, verdict)
            return await write(step, f"judged from cosine {self.threshold:g} on") if step else []

        async with self._turn:
            head, loop = self.bank.head, asyncio.get_running_loop()
            groups, news = await loop.run_in_executor(self._threads, self._plan)
            pieces = await asyncio.gather(*(attempt(merged(group, news)) for group in groups))
            if None not in pieces:
                self._since = head
            return [group for piece in pieces for group in piece or ()]

    def _plan(self) -> tuple[list[list[Experience]], frozenset[str]]:
        """Return the groups with new entries, in the order of their texts, and the ids of those."""
        ordered = sorted(self.bank.entries(), key=lambda entry: entry.provenance.commit or 0)
        # A survivor of a deduplication keeps its text, so it is not new.
        news = frozenset(
            entry.id
            for entry in ordered
            if (entry.provenance.commit or 0) > self._since and entry.provenance.cause != "dedupe"
        )
        if not news:
            return [], news
        groups = comparable(ordered, self.threshold, across_tasks=self.across_tasks)
        return [group for group in groups if any(entry.id in news for entry in group)], news

    def close(self) -> None:
        """Wait for the comparison that runs, and end the thread."""
        self._threads.shutdown(wait=True)


def merge(
    draft: Draft, state: State, history: History, vectors: dict[EntryKey, Vector], found: Duplicates
) -> Duplicates | None:
    """Merge one group inside a commit; return None if nothing is left to merge.

    The survivor gets a new version with its own text, the summed counters and all entries of the
    group as parents, so that what it earns is credited to each; it has no generation of its own.
    Its task is the one that all share, else None. An entry that changed since it was compared stays
    out. ``vectors`` has a vector for each survivor that loses its task; others keep theirs.
    """
    survivor = found.survivor
    merged = tuple(entry for entry in found.merged if draft.has(entry))
    if not merged or not draft.has(survivor):
        return None
    family = (survivor, *merged)
    task = common_task(family)
    lives = [draft.entries.get(entry.id) for entry in family]
    origins = frozenset[str]().union(*(live.origins for live in lives if live is not None))
    vector = vectors.get(EntryKey(survivor.text, task))
    if vector is None:
        stored = history.stored(survivor.id, survivor.version)
        assert stored is not None
        vector = stored.vector
    known = [state.statistics.get(survivor.id), *(state.counted(entry.id) for entry in merged)]
    for entry in merged:
        draft.remove(entry.id)
    own = {
        "cause": "dedupe",
        "parents": tuple((entry.id, entry.version) for entry in family),
        "generation": None,
        "span": None,
        "instance": next(iter(origins)) if len(origins) == 1 else None,
    }
    update = {
        "version": history.last_version(survivor.id) + 1,
        "task": task,
        "provenance": survivor.provenance.model_copy(update=own),
    }
    entry = draft.put(survivor.model_copy(update=update), vector, origins)
    draft.count(entry.id, total(counts or Statistics() for counts in known))
    return Duplicates(survivor=entry, merged=merged)
