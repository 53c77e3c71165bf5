"""Choose entries to forget: those that did not help, and those above a cap. History keeps all."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from experiential.bank.index.lexical import content_words
from experiential.bank.records import Policy
from experiential.bank.storage.journal import Journal
from experiential.types import Experience, Uplift

_LAST_USE = """
    SELECT m.experience, t.commit_id FROM (
        SELECT experience, MAX(rowid) AS last FROM uses WHERE namespace = ?1 GROUP BY experience) m
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
    """Return those of the live entries, read with their counters, that are to be pruned.

    The bounds are those of ``Bank.prune``; None does not look at one.
    ``uplift`` returns counts and estimates of an entry version.

    Raises:
        ValueError: no bound is given, or ``min_uses`` is negative.
    """
    if score is None and uplift_below is None:
        raise ValueError("Expected score= or uplift_below= to prune by, got neither")
    if min_uses < 0:
        raise ValueError(f"Expected min_uses to be 0 or more, got {min_uses}")
    doomed: list[Experience] = []
    for entry in entries:
        if entry.statistics.uses < min_uses:
            continue
        if score is not None and entry.statistics.score < score:
            doomed.append(entry)
        elif uplift_below is not None:
            interval = uplift(entry.id, entry.version).interval
            if interval is not None and interval[1] < uplift_below:
                doomed.append(entry)
    return doomed


def about(entries: Sequence[Experience]) -> dict[str, tuple[float, int]]:
    """Return by id how far an entry's text is about its task; more is greater.

    First comes the share of the task's own words that the text has, from 0 to 1, and then minus the
    number of its words that are other tasks' own. A task's own words are those that not all tasks
    of ``entries`` have. An entry without a task, or whose task has no such words, is about it.
    """
    words = {entry.task or "": content_words(entry.task or "") for entry in entries}
    words.pop("", None)
    common = set[str].intersection(*words.values()) if words else set[str]()
    own = {task: held - common for task, held in words.items()}
    names = set[str]().union(*own.values())
    found: dict[str, tuple[float, int]] = {}
    for entry in entries:
        mine, said = own.get(entry.task or "", set[str]()), content_words(entry.text)
        share = len(said & mine) / len(mine) if mine else 1.0
        found[entry.id] = share, -len(said & names - mine) if mine else 0
    return found


def evictable(
    entries: Sequence[Experience],
    cap: int,
    policy: Policy,
    seed: str,
    journal: Journal,
    namespace: str,
    subjects: Mapping[str, tuple[float, int]],
) -> list[Experience]:
    """Return the entries to evict so that ``cap`` are left, in the order of ``entries``.

    ``entries`` are the live ones, oldest first; of equals the older one goes. ``seed`` is that of
    the policy ``random``; in the journal ``lru`` finds the commit of an entry's last use;
    ``subjects`` are those of ``about``, for ``subject``.

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
    places = range(len(entries))
    if policy == "random":
        doomed = random.Random(seed).sample(places, surplus)
    elif policy == "fifo":
        doomed = list(places)[:surplus]
    elif policy == "utility":
        doomed = sorted(places, key=lambda i: entries[i].statistics.score)[:surplus]
    elif policy == "subject":
        order = [(subjects[one.id], one.statistics.score) for one in entries]
        doomed = sorted(places, key=order.__getitem__)[:surplus]
    else:
        used = dict(journal.rows(_LAST_USE, namespace))
        recent = [max(used.get(one.id, 0), one.provenance.commit or 0) for one in entries]
        doomed = sorted(places, key=recent.__getitem__)[:surplus]
    return [entries[i] for i in sorted(doomed)]
