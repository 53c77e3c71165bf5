"""Trust entries on evidence: only a share of the guided episodes sees one before it has helped.

A new entry is provisional, on probation. A version is trusted when the episodes that used it did
better than free members of their groups on enough independent tasks:

* the evidence is that of `experiential.bank.evidence.uplift`: per group (one task, one seed) the
  success rate of guided members that used the version, or a version that it was merged from, minus
  that of free members;
* seeds of one task are not independent, so the differences are first averaged within each task (its
  ``task_id``, or its words where the environment names none), and the interval is Student's 95 %
  t-interval over these task means;
* there must be at least M tasks (``bank.trust_after``), and the lower end of the interval must be
  above zero. One task has no interval, so M = 1 asks for two tasks, as M = 2 does. M = 0 trusts
  everything.

All entries start provisional: written by a person or by an extractor, imported, or rewritten. An
update is another text, so its evidence starts anew; a merged entry starts from the joint evidence
of all it was merged from, the good and the bad. Trust is a function of the journal and of nothing
else, and is never final: later outcomes may take it away again. A rollback brings a version back
with all that has been learned about it since, as counters do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import mean
from typing import Any

from experiential.bank.evidence.credit import Ancestor, lineage
from experiential.bank.evidence.uplift import ALWAYS, Evidence, estimate
from experiential.bank.protocol import Bank, TrustBook
from experiential.bank.records import Standing
from experiential.bank.storage.journal import Journal
from experiential.types import Experience

Episodes = str | Sequence[str]
"""The id of the episode that asks, or one for each query; empty for none."""
_USES = """
    SELECT u.rowid, u.experience, u.version, t.grp FROM uses u
    CROSS JOIN trajectories t ON t.namespace = u.namespace AND t.id = u.trajectory
    WHERE u.rowid > ? AND u.namespace = ? AND t.condition = 'guided' AND t.error IS NULL
        AND t.grp <> '' AND t.commit_id <= ?"""
_GROUPS = """
    SELECT rowid, grp FROM trajectories
    WHERE rowid > ? AND namespace = ? AND error IS NULL AND grp <> '' AND commit_id <= ?"""


def judge(id: str, version: int, by_task: Mapping[str, Sequence[float]], after: int) -> Standing:
    """Judge an entry version by the differences of its groups, which are given by task.

    >>> judge("a", 1, {"door": [1.0, 0.5], "well": [0.5], "oven": [1.0]}, after=3).trusted
    True
    >>> judge("a", 1, {"door": [1.0, 0.5, 1.0, 1.0]}, after=1).trusted
    False
    """
    over = estimate(mean(differences) for differences in by_task.values())
    helps = over.interval is not None and over.interval[0] > 0.0 and over.groups >= after
    shown = over.model_dump(include={"mean", "interval"})
    return Standing(
        id=id, version=version, after=after, tasks=over.groups, trusted=helps or not after, **shown
    )


class Book(TrustBook):
    """Know which entry versions of one namespace are trusted, live or not.

    ``refresh`` reads the journal on from its last call, and judges the versions concerned. Any
    thread may ask meanwhile, and gets the earlier answer.

    Args:
        after: independent tasks asked for; not 0.
        until: the last commit that counts.
    """

    def __init__(self, journal: Journal, namespace: str, after: int, until: int = ALWAYS) -> None:
        if after < 1:
            raise ValueError(
                f"Expected a positive number of tasks to trust an entry after, got {after}"
            )
        self.after = after
        self.trusted: frozenset[Ancestor] = frozenset()
        self._journal = journal
        self._namespace = namespace
        self._until = until
        self._evidence = Evidence(journal, namespace, until)
        self._read: Counter[str] = Counter()  # by statement, the row read last
        self._used_in: dict[str, set[Ancestor]] = {}
        self._groups: Counter[Ancestor] = Counter()
        # Versions to be judged again; a refresh that fails leaves them to the next.
        self._touched: set[Ancestor] = set()
        self._one_at_a_time = threading.Lock()

    def refresh(self) -> None:
        """Read on, and judge every version whose evidence may have changed."""
        with self._one_at_a_time:
            for _, id, version, group in self._rows(_USES):
                known = self._used_in.setdefault(group, set())
                if (id, version) not in known:
                    known.add((id, version))
                    self._groups[id, version] += 1
                self._touched.add((id, version))
            self._touched.update(self._evidence.read_merges())
            for _, group in self._rows(_GROUPS):
                self._touched |= self._used_in.get(group, set())
            children = self._evidence.children
            concerned = {
                heir
                for version in self._touched
                for heir in lineage(*version, lambda id, at: children.get((id, at), ()))
            }
            # Count first: a group belongs to one task, so fewer groups cannot be tasks enough.
            least = max(2, self.after)
            helpful: set[Ancestor] = set()
            for version in concerned:
                family = self._evidence.ancestors(*version)
                if sum(self._groups[one] for one in family) >= least:
                    by_task = self._evidence.by_task(family)
                    if judge(*version, by_task, self.after).trusted:
                        helpful.add(version)
            self.trusted = self.trusted - concerned | helpful
            self._touched.clear()

    def _rows(self, statement: str) -> list[Any]:
        """Return the rows since the last call, each after its row number."""
        rows = self._journal.rows(statement, self._read[statement], self._namespace, self._until)
        if rows:
            self._read[statement] = max(row[0] for row in rows)
        return rows


def may_try(seed: int, episode: str, share: float) -> bool:
    """Draw whether an episode may see provisional entries, reproducibly from the journal.

    >>> sum(may_try(0, f"episode {i}", 0.25) for i in range(1000))
    272
    """
    digest = hashlib.sha256(f"{seed}:{episode}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


class Probation:
    """Hide provisional entries from most episodes; any thread may call.

    A writable bank notes ``after``, so that ``experiential bank`` can list provisional entries.

    Args:
        bank: whose entries are on probation.
        after: independent tasks asked for; not 0.
        share: of the guided episodes, those that may see provisional entries.
        seed: of the draws.

    Attributes:
        book: knows the trusted versions.
        failures: refreshes that failed, by reason; the next one catches up.
    """

    def __init__(self, bank: Bank, after: int, share: float, seed: int) -> None:
        if not bank.read_only:
            bank.trust_after = after
        self.book = bank.trust_book(after)
        self.share = share
        self.failures: Counter[str] = Counter()
        self._bank = bank
        self._seed = seed
        self._rng = random.Random(f"{seed}: provisional entries")
        self._seen = bank.head
        self._lock = threading.Lock()
        self._refreshing: Future[bool] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="experiential-trust")
        self._draws: Counter[bool] = Counter()
        self.book.refresh()

    def admits(self, episode: str) -> bool:
        """Draw whether a search of this episode may find provisional entries.

        Without an id each search draws for itself, in order.
        """
        with self._lock:
            if episode:
                drawn = may_try(self._seed, episode, self.share)
            else:
                drawn = self._rng.random() < self.share
            self._draws[drawn] += 1
        return drawn

    def wake(self) -> None:
        """Refresh the book in the background if the bank has changed."""
        # A RuntimeError says that the thread was closed meanwhile: nobody will ask again.
        with self._lock, contextlib.suppress(RuntimeError):
            is_idle = self._refreshing is None or self._refreshing.done()
            if is_idle and self._seen != self._bank.head:
                self._refreshing = self._thread.submit(self._refresh)

    async def settle(self) -> None:
        """Wait until everything in the bank now is judged, or until that failed."""
        self.wake()
        while self._refreshing is not None and await asyncio.wrap_future(self._refreshing):
            self._refreshing = None
            self.wake()

    def _refresh(self) -> bool:
        # Whatever a disk or a closed bank does to it, retrieval goes on with what is known.
        try:
            head = self._bank.head
            self.book.refresh()
        except Exception as error:
            self.failures[f"trust: {type(error).__name__}"] += 1
            return False
        self._seen = head
        return True

    def stats(self, entries: Iterable[Experience]) -> dict[str, int]:
        """Count trusted and provisional entries, and the draws of searches."""
        standing = Counter(self.book.is_trusted(entry) for entry in entries)
        return {
            "trusted": standing[True],
            "provisional": standing[False],
            "searches_admitted": self._draws[True],
            "searches_held_back": self._draws[False],
        }

    def close(self) -> None:
        """Wait for the refresh that runs, and end the thread."""
        self._thread.shutdown(wait=True)
