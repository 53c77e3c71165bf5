"""Define what a bank can do, wherever its entries are kept.

`FolderBank` keeps them in a folder of this machine, `RemoteBank` asks a server. Code that needs
"a bank" is typed against `Bank`; the methods are documented here, once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeGuard, Unpack

from experiential.bank.episode import Episode, EpisodeOptions
from experiential.bank.index.embed import Embedder, Vector
from experiential.bank.records import (
    LEASE_SECONDS,
    Asked,
    Commit,
    DeadLetter,
    Difference,
    Duplicates,
    Explanation,
    Judge,
    LogEntry,
    Policy,
    Standing,
    asked_near,
)
from experiential.bank.search.searchable import Searchable
from experiential.bank.storage import bundle
from experiential.bank.storage.tables import difference
from experiential.types import Distillation, Experience, Generation, Statistics, Trajectory, Uplift


class TextEmbedder(Protocol):
    """Turn texts into vectors, with a cache around ``wrapped``."""

    id: str
    hits: int
    misses: int
    wrapped: Embedder

    def __call__(self, texts: Sequence[str]) -> Vector:
        """Return vectors of unit length, shape (n, d), float32; n must not be 0."""
        ...


class Queue(Protocol):
    """Hold trajectories, by their ids, from ``Bank.submit`` to ``Bank.apply``, durably."""

    def state(self, id: str) -> str | None:
        """Return "queued", "done", "dead", or None for an unknown item."""
        ...

    def waiting(self) -> list[str]:
        """Return the ids of queued items, oldest first."""
        ...

    def counts(self) -> dict[str, int]:
        """Return the number of items in each state: "queued", "done" and "dead"."""
        ...

    def lease(
        self,
        holder: str,
        most: int,
        *,
        keep: Sequence[str] = (),
        seconds: float = LEASE_SECONDS,
    ) -> list[str]:
        """Return up to ``most`` queued items, oldest first, that no other distiller works on.

        They are the holder's for ``seconds``, and so are those of ``keep``, unless another has
        them by now. A lease only spares work: the first result applied to an item counts.

        Args:
            holder: name of the distiller, different for each.
            most: further items that it can work on.
            keep: items that it works on already.
            seconds: a distiller that is silent for longer loses its items to others.

        Raises:
            ValueError: blank ``holder``, negative ``most``, or ``seconds`` that are not positive.
        """
        ...

    def release(self, holder: str, id: str | None = None) -> None:
        """Give back one item that a distiller holds, or all of them, for others to take."""
        ...

    def fail(self, id: str, reason: str, *, last: bool) -> int:
        """Count a failed attempt and return the number so far; ``last`` makes a dead letter.

        An item that is not queued stays as it is: whoever failed may have lost only the answer to
        a result that was applied.
        """
        ...

    def attempts(self, id: str) -> int:
        """Return the number of failed attempts."""
        ...

    def dead_letters(self) -> list[DeadLetter]:
        """Return the items that were given up, oldest first."""
        ...

    def requeue(self, id: str) -> bool:
        """Queue a dead letter again with all its attempts; return False if it is not dead."""
        ...


class View(Searchable, Protocol):
    """Read and search entries: those of a bank now, or as they stood after one commit."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Experience]:
        return self.entries()

    def entries(self) -> Iterator[Experience]:
        """Return every entry, oldest first."""
        ...

    def get(self, id: str) -> Experience | None:
        """Return the entry with this id, or None."""
        ...


class Bank(View, Protocol):
    """Keep experience durably: versioned, searchable, with the evidence of every use.

    A write is on the disk when its method returns. All methods may be called from any thread.

    Attributes:
        namespace: entries of different namespaces never meet; each has its own history.
        read_only: whether writes raise ``ReadOnlyBankError``.
        embedder: makes the vectors of this bank.
        queue: trajectories that wait for distillation.
        head: id of the last commit; 0 for a bank never written.
        text_limit: greatest number of characters that the text of an entry may have.
        refused: operations of extractors that could not be carried out since opening, by reason.
        redacted: secrets taken out of written texts since opening, by kind.
    """

    namespace: str
    read_only: bool
    embedder: TextEmbedder
    queue: Queue
    head: int
    text_limit: int
    refused: Counter[str]
    redacted: Counter[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Return whether ``close`` was called."""
        ...

    def close(self) -> None:
        """Save counters and release everything that is held; safe to call twice."""
        ...

    # Reading

    def version(self, id: str, version: int) -> Experience | None:
        """Return one version of one entry, live or not; None if it never existed."""
        ...

    def counters(self, experience: Experience) -> Statistics:
        """Return the present counters of an entry that ``nearest`` returned."""
        ...

    def commits(self) -> list[Commit]:
        """Return every commit, oldest first."""
        ...

    def history(self, id: str | None = None) -> list[LogEntry]:
        """Return every commit, or those that changed one entry, oldest first.

        Raises:
            BankError: there never was an entry with this id.
        """
        ...

    def at(self, commit: int) -> View:
        """Return the bank as it stood after one commit; 0 is before the first."""
        ...

    def snapshot(self) -> View:
        """Return the bank as it stands now; later writes do not change the result."""
        return self.at(self.head)

    def diff(self, a: int, b: int) -> Difference:
        """Return the entries added, removed and changed from commit ``a`` to commit ``b``."""
        return difference(self.at(a).entries(), self.at(b).entries())

    def generation(self, id: str) -> Generation | None:
        """Return a journalled generation with token ids and log-probabilities, or None."""
        ...

    def trajectory(self, id: str) -> Trajectory | None:
        """Return a recorded trajectory, or None."""
        ...

    # Evidence

    def outcomes(self, id: str, version: int) -> list[int]:
        """Return 1 or 0 for every recorded use of one entry version, oldest first."""
        ...

    def lineage(self, id: str, version: int) -> list[tuple[str, int]]:
        """Return the (id, version) credited for a use: this one and all it was merged from."""
        ...

    def uplift(self, id: str, version: int | None = None) -> Uplift:
        """Estimate the effect of one entry version against free members of the same groups.

        Without such groups the baseline is all episodes of the same tasks that saw no entry, and
        the interval is valid at any time (``Standing.interval``).
        ``version`` None takes the live version, or the last one of a removed entry.

        Raises:
            BankError: there is no such entry or version.
        """
        ...

    def why(self, trajectory: Trajectory | str) -> Explanation:
        """Explain an episode: the entries it saw, its outcome, and the entries written from it.

        Raises:
            BankError: no trajectory with this id was recorded.
        """
        ...

    def standings(self, asked: Sequence[Asked]) -> list[Standing]:
        """Say of each entry version what the episodes journalled here tell of it.

        Raises:
            BankError: there is no such entry or version.
        """
        ...

    def standings_near(
        self, query: str, found: Sequence[tuple[Experience, float]]
    ) -> list[Standing]:
        """Do as ``standings`` for entries that a search found, each with its relevance to a query.

        Ages may be missing.
        """
        return self.standings(asked_near(query, found))

    # Writing

    def add(
        self,
        text: str,
        *,
        task: str | None = None,
        kind: str = "lesson",
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Experience:
        """Write a new entry.

        ``key``, here and in other writes, names the write: repeated under it, after a crash or an
        answer that was lost, it is not made again and its first answer is returned.
        """
        ...

    def add_many(
        self,
        texts: Iterable[str],
        *,
        task: str | None = None,
        kind: str = "lesson",
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> list[Experience]:
        """Write several entries in one commit."""
        ...

    def update(self, id: str, text: str, *, key: str | None = None) -> Experience:
        """Write the next version of an entry; its history keeps the old one."""
        ...

    def approve(self, id: str, *, key: str | None = None) -> Experience:
        """Let searches find a proposed entry; return the live version.

        The proposal of another text for an entry becomes its next version instead.

        Raises:
            BankError: there is no such entry, or it is not proposed.
        """
        ...

    def remove(self, id: str, *, key: str | None = None) -> None:
        """Remove an entry; ``at`` and ``rollback`` still know it."""
        ...

    def rollback(self, commit: int, *, key: str | None = None) -> Commit:
        """Restore the entries of an earlier commit by a new commit; counters stay."""
        ...

    def episode(self, task: str, **options: Unpack[EpisodeOptions]) -> Episode:
        """Return an episode of an agent whose record another process distils.

        Entries are shown by evidence, and a share of the episodes plays free, as with a manager;
        the record is queued durably, for a manager with an extractor here or behind a server.
        ``ExperienceManager.episode`` also distils and refines.

        Args:
            task: what is asked, in words: the query of retrieval, and the task of entries.
            options: see `Episode`.
        """
        ...

    def record(self, trajectory: Trajectory) -> bool:
        """Journal the outcome and uses of a trajectory; return False if it was recorded before."""
        ...

    def submit(self, trajectory: Trajectory, *, holder: str = "") -> bool:
        """Record a trajectory and queue it in one commit; return False if it was queued before.

        ``holder`` names the distiller that takes the item at once, as in ``Queue.lease``; by
        default the next that asks gets it.

        An episode that failed for a technical cause (``error``) is recorded and never queued.
        """
        ...

    def submit_many(
        self, trajectories: Sequence[Trajectory], *, distil: bool = True, holder: str = ""
    ) -> list[bool | Exception]:
        """Submit each trajectory, or record it when not ``distil``; return results or errors."""
        ...

    def conclude(self, id: str, success: bool | None, *, judgement: str = "") -> bool:
        """Journal the outcome of a recorded trajectory that was unknown; it is evidence from now.

        Args:
            id: of the trajectory.
            success: the outcome; None journals the words alone.
            judgement: who said so, or why.

        Returns:
            False if the outcome was known before; nothing changes then.

        Raises:
            BankError: no trajectory with this id was recorded.
        """
        ...

    def apply(
        self,
        distillation: Distillation,
        *,
        trajectory: Trajectory,
        shown: Sequence[Experience],
        item: str | None = None,
        extractor_version: int | None = None,
        review: bool = False,
    ) -> list[Experience]:
        """Write the operations distilled from a trajectory in one commit; return the new versions.

        Args:
            distillation: the operations and the generation that asked for them.
            trajectory: the episode.
            shown: the entries that ``Update`` counts, from 1. An operation on an entry that is out
                of range or gone is refused and counted in ``refused``.
            item: the queue item to finish in the same transaction; nothing is written when it is
                finished already.
            extractor_version: recorded when the distillation carries no generation.
            review: write new texts as proposed entries (``approve``).
        """
        ...

    def consolidate(
        self,
        distillation: Distillation,
        *,
        shown: Sequence[Experience],
        extractor_version: int | None = None,
    ) -> list[Experience]:
        """Write the operations of a merge in one commit; return the merged entries.

        An operation on an entry that changed since it was shown is refused; the others are done.
        """
        ...

    def keep_generation(self, generation: Generation) -> None:
        """Journal a generation that wrote no entry (a refinement), so that it can be trained on."""
        ...

    def note_retrievals(self, ids: Iterable[str]) -> None:
        """Count retrievals in memory; the next commit or ``close`` journals them."""
        ...

    def save_counters(self) -> None:
        """Journal the retrieval counts now."""
        ...

    def prune(
        self,
        *,
        score: float | None = None,
        uplift_below: float | None = None,
        min_uses: int = 5,
        dry_run: bool = False,
        author: str = "human",
    ) -> list[Experience]:
        """Remove and return, in one commit, entries that were tried and did not help.

        Args:
            score: remove entries whose Laplace score (s + 1) / (u + 2) is below this bound.
            uplift_below: remove entries whose live version has an uplift interval that ends below
                this bound.
            min_uses: counted uses that an entry must have had before it may be removed.
            dry_run: change nothing, only return the entries.
            author: named in the commit.
        """
        ...

    def evict(
        self,
        cap: int,
        policy: Policy = "utility",
        *,
        per_task: bool = False,
        seed: int = 0,
        dry_run: bool = False,
        author: str = "human",
    ) -> list[Experience]:
        """Remove and return, in one commit, as many entries as there are above ``cap``.

        Args:
            cap: entries that may stay.
            per_task: so many of each task; entries without a task count as one.
            policy: order of eviction; among equals the older goes. A new entry has a score of 0.5,
                so in a bank of better ones "utility" evicts the new. "subject" begins with texts
                that have the fewest of the words that tell their task from the bank's other tasks,
                then those with words of other tasks, and goes by score among equals.
            seed: of "random"; the draw depends on it and on the last commit.
            dry_run: change nothing, only return the entries.
            author: named in the commit.
        """
        ...

    def deduplicate(
        self,
        threshold: float = 0.95,
        judge: Judge | None = None,
        *,
        across_tasks: bool = False,
        among: Iterable[str] | None = None,
        dry_run: bool = False,
    ) -> list[Duplicates]:
        """Merge near-duplicates into the oldest of each group, in one commit; return the groups.

        The survivor's new version has the summed counters and the whole group as parents. Entries
        of different kinds are never duplicates. This may take as long as writing the bank did,
        because texts are embedded again, without their tasks.

        Args:
            threshold: least cosine of two texts that may say the same.
            judge: decides for a pair (older, newer) whether both say the same; None accepts every
                pair. It runs in this process, so a remote bank sends texts and vectors here.
            across_tasks: compare entries of different tasks too; a survivor of several tasks has
                no task.
            among: ids of new entries, compared with each other first and then with older ones;
                None compares all.
            dry_run: change nothing, only return the groups.
        """
        ...

    def merge_duplicates(
        self, found: Sequence[Duplicates], ref: str = "groups given", *, author: str = "human"
    ) -> list[Duplicates]:
        """Merge groups found by ``deduplicate(dry_run=True)`` in one commit; return those merged.

        No entry may be in two groups; one that changed since, or is gone, stays out. ``ref`` and
        ``author`` are named in the commit.
        """
        ...

    # Moving

    def export(self, file: str | os.PathLike[str]) -> int:
        """Write every entry with provenance and counters to a file; return their number.

        A name ending in .md gives Markdown, any other JSON Lines.
        """
        return bundle.write(Path(file), list(self.entries()), self.namespace, self.embedder.id)

    def import_(
        self, file: str | os.PathLike[str], *, edited: bool = False, key: str | None = None
    ) -> int:
        """Add the entries of an exported file in one commit; return the number added.

        An entry that repeats a live one is left out. A file that differs from its hash is refused
        unless ``edited`` says that it was changed on purpose.
        """
        entries = bundle.read(Path(file), edited=edited)
        return self.import_entries(entries, Path(file).name, key=key)

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Write the journal, all namespaces of it, into a new folder, which is a bank again.

        Writers go on meanwhile. The index is not copied; a bank makes it again. Retrievals counted
        since the last commit are not in it.

        Raises:
            BankError: the folder holds a bank already, or a server serves some namespaces only.
        """
        ...

    def import_entries(
        self, entries: Sequence[Experience], ref: str, *, key: str | None = None
    ) -> int:
        """Add entries as ``import_`` does; the commit refers to ``ref``."""
        ...


class ForkableBank(Bank, Protocol):
    """Describe a bank whose folder is on this machine, so that its journal can be copied."""

    def fork(self, path: str | os.PathLike[str], *, keep_queue: bool = False) -> ForkableBank:
        """Return a writable copy in another folder, with all history.

        Its distillation queue is empty unless ``keep_queue``.

        Raises:
            BankError: the folder holds a bank already.
        """
        ...


def is_bank(value: object) -> TypeGuard[Bank]:
    """Return whether a value has the methods of a bank.

    The class is asked, not the value: looking at ``head`` of a remote bank would ask its server.
    """
    needed = ("add", "search", "nearest", "submit", "apply", "note_retrievals")
    return all(callable(getattr(type(value), name, None)) for name in needed)
