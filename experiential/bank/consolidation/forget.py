"""What a bank may forget: entries that did not help, and entries above a cap. History keeps all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import get_args

from experiential.bank.records import Policy
from experiential.bank.state import Draft
from experiential.bank.storage.journal import Journal
from experiential.types import Experience, Uplift

_LAST_USE = """
    SELECT m.experience, t.commit_id FROM (SELECT experience, MAX(rowid) AS last FROM uses WHERE namespace = ?1 GROUP BY experience) m
    JOIN uses u ON u.rowid = m.last
    JOIN trajectories t ON t.namespace = ?1 AND t.id = u.trajectory"""


def prunable(
    entries: Sequence[Experience],
    uplift: Callable[[str, int], Uplift],
    *,
    score: float | None,
    uplift_below: float | None,
    min_uses: int,
) -> list[Experience]:
    """The entries to prune, see ``Bank.prune``.

    Args:
        entries: the live entries with their counters.
        uplift: counts and estimates of an entry version.
        score: prune Laplace scores below it; None does not look at them.
        uplift_below: prune when the upper end of the uplift's interval is below it; None does not
            look at it.
        min_uses: counted uses that an entry must have had before it may be pruned.

    Raises:
        ValueError: no bound is given, or ``min_uses`` is negative.
    """
    if score is None and uplift_below is None:
        raise ValueError("Expected score= or uplift_below= to prune by, got neither")
    if min_uses < 0:
        raise ValueError(f"Expected min_uses to be 0 or more, got {min_uses}")
    tried = [entry for entry in entries if entry.statistics.uses >= min_uses]
    return [
        entry
        for entry in tried
        if (score is not None and entry.statistics.score < score)
        or (uplift_below is not None and _upper_end(uplift(entry.id, entry.version)) < uplift_below)
    ]


def _upper_end(uplift: Uplift) -> float:
    return float("inf") if uplift.interval is None else uplift.interval[1]


def evictable(
    entries: Sequence[Experience],
    cap: int,
    policy: Policy,
    *,
    seed: str,
    last_use: Callable[[], dict[str, int]],
) -> list[Experience]:
    """The entries to evict so that ``cap`` are left, in the order of ``entries``.

    Args:
        entries: the live entries with their counters, oldest first.
        cap: how many may stay.
        policy: who goes; among equals the older entry does.
        seed: of the policy ``random``.
        last_use: asked by the policy ``lru``: the commit of the last use of every entry ever used.

    Raises:
        ValueError: the cap is negative, or there is no such policy.
    """
    if cap < 0:
        raise ValueError(f"Expected cap to be 0 or more, got {cap}")
    if policy not in get_args(Policy):
        raise ValueError(
            f"Expected policy to be one of {', '.join(get_args(Policy))}, got {policy!r}"
        )
    surplus = max(0, len(entries) - cap)
    if policy == "random":
        doomed = random.Random(seed).sample(range(len(entries)), surplus)
    else:
        rank = _ranking(policy, last_use)
        doomed = sorted(range(len(entries)), key=lambda i: rank(entries[i]))[:surplus]
    return [entries[i] for i in sorted(doomed)]


def _ranking(
    policy: Policy, last_use: Callable[[], dict[str, int]]
) -> Callable[[Experience], float]:
    if policy == "utility":
        return lambda entry: entry.statistics.score
    if policy == "fifo":
        return lambda entry: 0.0
    used = last_use()
    return lambda entry: max(used.get(entry.id, 0), entry.provenance.commit or 0)


def last_uses(journal: Journal, namespace: str) -> dict[str, int]:
    """The commit that recorded the last use of every entry ever used."""
    return {row[0]: row[1] for row in journal.rows(_LAST_USE, namespace)}


def take_out(draft: Draft, doomed: Sequence[Experience]) -> list[Experience]:
    """Remove entries in one commit, those excepted that are gone or were rewritten since they were chosen; gives those removed."""
    removed: list[Experience] = []
    for entry in doomed:
        live = draft.live(entry.id)
        if live is not None and live.experience.version == entry.version:
            draft.remove(entry.id)
            removed.append(entry)
    return removed
