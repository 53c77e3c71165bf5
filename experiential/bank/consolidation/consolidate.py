"""Merge related entries periodically: sliding chunks, whose merged entries join the next chunk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from experiential.types import Experience

MergeChunk = Callable[[Sequence[Experience]], Awaitable[Sequence[Experience]]]
"""Consolidates one chunk and returns the merged entries it wrote."""


def recent_groups(entries: Iterable[Experience], since: int, size: int) -> list[list[Experience]]:
    """Return of each group of related entries what a pass after commit ``since`` has to look at.

    Entries of one task are related, and so are all lone ones, whose group is the last. The part of
    a group begins ``size - 1`` entries before the first one written later, because that one may
    belong to them. Merged entries are not new: they were compared when they were made. Groups
    without a new entry are left out.
    """
    by_task: dict[str | None, list[Experience]] = {}
    for entry in entries:
        by_task.setdefault(entry.task, []).append(entry)
    related = [group for group in by_task.values() if len(group) > 1]
    related.append([group[0] for group in by_task.values() if len(group) == 1])
    groups: list[list[Experience]] = []
    for group in related:
        news = [
            i
            for i, entry in enumerate(group)
            if (entry.provenance.commit or 0) > since and entry.provenance.cause != "merge"
        ]
        if news and len(part := group[max(0, news[0] - size + 1) :]) > 1:
            groups.append(part)
    return groups


async def merge_group(
    group: Sequence[Experience], size: int, merge_chunk: MergeChunk
) -> list[Experience]:
    """Consolidate one group in chunks of at most ``size``.

    The newest ``size - 1`` merged entries of a chunk open the next one, so that what a later chunk
    holds can still join them; at least one place of every chunk is for an entry not seen yet.
    """
    written: list[Experience] = []
    carry: list[Experience] = []
    start = 0
    while start < len(group):
        fresh = group[start : start + size - len(carry)]
        start += len(fresh)
        merged = list(await merge_chunk([*carry, *fresh])) if len(carry) + len(fresh) > 1 else []
        written.extend(merged)
        carry = merged[-(size - 1) :]
    return written
