"""What keeps a bank fit: how its entries did, what it forgets, and what it merges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from experiential.bank import dedupe, forget
from experiential.bank.dedupe import Duplicates, Judge
from experiential.bank.embed import CachedEmbedder
from experiential.bank.explain import Explainer, Explanation
from experiential.bank.forget import Policy
from experiential.bank.history import History
from experiential.bank.journal import Journal
from experiential.bank.log import Difference, Log, Logged, difference
from experiential.bank.state import Draft, State
from experiential.bank.uplift import Evidence
from experiential.errors import BankError, ReadOnlyBankError
from experiential.types import Experience, Generation, Trajectory, Uplift

if TYPE_CHECKING:
    from experiential.bank.view import BankView


class Upkeep(ABC):
    """The part of ``ExperienceBank`` that looks at the whole bank; its subclass gives it what it works on."""

    namespace: str
    read_only: bool
    _journal: Journal
    _state: State

    @property
    @abstractmethod
    def head(self) -> int:
        """The id of the last commit."""

    @property
    @abstractmethod
    def embedder(self) -> CachedEmbedder:
        """What turns texts into vectors."""

    @abstractmethod
    def entries(self) -> Iterator[Experience]:
        """Every entry as it stands now, oldest first."""

    @abstractmethod
    def get(self, id: str) -> Experience | None:
        """One entry as it stands now."""

    @abstractmethod
    def version(self, id: str, version: int) -> Experience | None:
        """One version of one entry."""

    @abstractmethod
    def trajectory(self, id: str) -> Trajectory | None:
        """A recorded trajectory."""

    @abstractmethod
    def generation(self, id: str) -> Generation | None:
        """A journalled generation."""

    @abstractmethod
    def at(self, commit: int) -> BankView:
        """The bank as it stood after one commit."""

    @abstractmethod
    def _draft(self, author: str, cause: str, ref: str | None = None) -> AbstractContextManager[Draft]:
        """One commit, open for writing."""

    # How entries did

    def uplift(self, id: str, version: int | None = None) -> Uplift:
        """How one entry version did: uses, outcomes, and the paired difference to free members of the same group.

        Args:
            id: of an entry.
            version: which version; None takes the one that stands now, or the last of an entry that was removed.

        Raises:
            BankError: there is no such entry or version.
        """
        journal = self._own_journal("uplift")
        if version is None:
            live = self.get(id)
            version = History(journal, self.namespace).last_version(id) if live is None else live.version
        if self.version(id, version) is None:
            raise BankError(f"Expected an entry version that this bank knows, got {id!r} version {version}; list them with bank.history()")
        return Evidence(journal, self.namespace).uplift(id, version)

    def why(self, trajectory: Trajectory | str) -> Explanation:
        """What an episode was shown, how it ended, how those entries are doing now, and which entries were written from it.

        Args:
            trajectory: an episode or the id of a recorded one.

        Raises:
            BankError: no trajectory with this id was recorded.
        """
        journal = self._own_journal("why")
        known = self.trajectory(trajectory) if isinstance(trajectory, str) else trajectory
        if known is None:
            raise BankError(f"Expected the id of a recorded trajectory, got {trajectory!r}; bank.history() lists them as refs")
        explainer = Explainer(self.version, self.generation, Evidence(journal, self.namespace).uplift)
        return explainer.explain(known, Log(journal, self.namespace).written_from(known.id))

    def history(self, id: str | None = None) -> list[Logged]:
        """Every commit with the number of entries that it changed, or those that changed one entry; oldest first.

        Raises:
            BankError: there never was an entry with this id.
        """
        log = Log(self._own_journal("history"), self.namespace)
        if id is None:
            return log.commits()
        if not (found := log.of(id)):
            raise BankError(f"Expected the id of an entry that this bank ever had, got {id!r}; list them with bank.entries()")
        return found

    def diff(self, a: int, b: int) -> Difference:
        """What was added, removed and changed from commit ``a`` to commit ``b``; 0 is before the first."""
        return difference(self.at(a).entries(), self.at(b).entries())

    # What it forgets

    def prune(
        self, *, score: float | None = None, uplift_below: float | None = None, min_uses: int = 5, dry_run: bool = False
    ) -> list[Experience]:
        """Take out, in one commit, entries that were tried and did not help; gives them. ``at`` and ``rollback`` still know them.

        Args:
            score: take out entries whose Laplace score (s + 1) / (u + 2) is below it.
            uplift_below: take out entries whose present version has an uplift interval with its upper end below it.
            min_uses: counted uses that an entry must have had before it may be taken out, by either bound.
            dry_run: change nothing, only say what would go.
        """
        evidence = Evidence(self._own_journal("prune", writes=not dry_run), self.namespace)
        doomed = forget.prunable(list(self.entries()), evidence.uplift, score=score, uplift_below=uplift_below, min_uses=min_uses)
        bounds = {"score": score, "uplift": uplift_below}
        ref = ", ".join(f"{name} < {bound:g}" for name, bound in bounds.items() if bound is not None)
        return doomed if dry_run else self._take_out(doomed, "human", "prune", f"{ref}, uses >= {min_uses}")

    def evict(
        self, cap: int, policy: Policy = "utility", *, seed: int = 0, dry_run: bool = False, author: str = "human"
    ) -> list[Experience]:
        """Take out, in one commit, as many entries as there are above ``cap``; gives them. ``at`` and ``rollback`` still know them.

        Args:
            cap: entries that may stay.
            policy: who goes: "lru", the least recently used (an entry never used counts from its writing); "fifo", the oldest;
                "random"; "utility", the lowest Laplace score. Among equals the older goes. A new entry has a score of 0.5, so
                in a bank of better ones "utility" takes the new.
            seed: of "random"; the draw depends on it and on the last commit.
            dry_run: change nothing, only say what would go.
            author: written into the commit.
        """
        journal = self._own_journal("evict", writes=not dry_run)
        doomed = forget.evictable(
            list(self.entries()),
            cap,
            policy,
            seed=f"{seed}:{self.head}",
            last_use=lambda: forget.last_uses(journal, self.namespace),
        )
        return doomed if dry_run else self._take_out(doomed, author, "evict", f"{policy} to {cap}")

    def _take_out(self, doomed: Sequence[Experience], author: str, cause: str, ref: str) -> list[Experience]:
        if not doomed:
            return []
        with self._draft(author, cause, ref) as draft:
            return forget.take_out(draft, doomed)

    # What it merges

    def deduplicate(
        self,
        threshold: float = 0.95,
        judge: Judge | None = None,
        *,
        across_tasks: bool = False,
        among: Iterable[str] | None = None,
        dry_run: bool = False,
    ) -> list[Duplicates]:
        """Merge near-duplicates into the oldest of each group, in one commit; gives the groups.

        The survivor's new version has the summed counters and all of the group as parents. Entries of different kinds are never
        duplicates. Texts are embedded without their tasks, so this may take as long as writing the bank did.

        Args:
            threshold: cosine of two texts from which on they may say the same.
            judge: asked whether a pair (older, newer) says the same; ``ExtractorAgent.judge`` is one. None takes every pair.
            across_tasks: compare entries of different tasks too; a survivor of several tasks has no task.
            among: ids of new entries: compared with each other first, then with older entries; None compares all.
            dry_run: change nothing, only say what would be merged.
        """
        journal = self._own_journal("deduplicate", writes=not dry_run)
        entries, embed = list(self.entries()), self.embedder
        found = dedupe.find(entries, embed, threshold, judge, across_tasks=across_tasks, among=among)
        if dry_run or not found:
            return found
        vectors = dedupe.vectors_needed(found, embed)
        with self._draft("human", "dedupe", f"cosine >= {threshold:g}") as draft:
            merger = dedupe.Merger(draft, self._state, History(journal, self.namespace), vectors)
            return [merged for group in found if (merged := merger.merge(group)) is not None]

    def _own_journal(self, name: str, *, writes: bool = False) -> Journal:
        journal: Journal | None = getattr(self, "_journal", None)
        if journal is None:
            raise BankError(f"Expected a bank folder for {name}(), got a bank behind a server; call it where the folder is")
        if writes and self.read_only:
            raise ReadOnlyBankError(f"Expected a writable bank for {name}(), got one opened with read_only=True; pass dry_run=True")
        return journal
