"""What keeps a bank fit: how its entries did, what it forgets, and what it merges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from experiential.bank.consolidation import dedupe, forget
from experiential.bank.consolidation.dedupe import Duplicates, Judge
from experiential.bank.consolidation.forget import Policy
from experiential.bank.evidence import trust
from experiential.bank.evidence.explain import Explainer, Explanation
from experiential.bank.evidence.trust import Book, Standing
from experiential.bank.evidence.uplift import Evidence
from experiential.bank.index.embed import CachedEmbedder
from experiential.bank.state import Draft, State
from experiential.bank.storage.history import History
from experiential.bank.storage.journal import Journal
from experiential.bank.storage.log import Difference, Log, Logged, difference
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
    def _draft(
        self, author: str, cause: str, ref: str | None = None
    ) -> AbstractContextManager[Draft]:
        """One commit, open for writing."""

    # How entries did

    def uplift(self, id: str, version: int | None = None) -> Uplift:
        """How one entry version did: uses, outcomes, and the paired difference to free members of the same group.

        Args:
            id: of an entry.
            version: which version; None takes the one that stands now, or the last of an entry that
                was removed.

        Raises:
            BankError: there is no such entry or version.
        """
        if version is None:
            live = self.get(id)
            version = (
                History(self._journal, self.namespace).last_version(id)
                if live is None
                else live.version
            )
        if self.version(id, version) is None:
            raise BankError(
                f"Expected an entry version that this bank knows, got {id!r} version {version};"
                " list them with bank.history()"
            )
        return Evidence(self._journal, self.namespace).uplift(id, version)

    @property
    def trust_after(self) -> int:
        """``bank.trust_after`` of the last manager that had one and could write; 0 when there was none."""
        return trust.recorded(self._journal, self.namespace)

    @trust_after.setter
    def trust_after(self, after: int) -> None:
        trust.record(self._journal, self.namespace, after)

    def trust_book(self, after: int, *, at: int | None = None) -> Book:
        """Which entry versions are trusted on the evidence of now, or of commit ``at``; not refreshed yet.

        Args:
            after: independent tasks on which an entry must have helped; at least 1.
            at: the last commit whose outcomes count.
        """
        return Book(self._journal, self.namespace, after, *(() if at is None else (at,)))

    def standing(self, id: str, *, after: int | None = None) -> Standing:
        """How far the present version of an entry is trusted, and on what evidence.

        Args:
            id: of a live entry.
            after: independent tasks asked for; ``trust_after`` by default.

        Raises:
            BankError: there is no such entry.
        """
        if (entry := self.get(id)) is None:
            raise BankError(
                f"Expected the id of a live entry, got {id!r}; list them with bank.entries()"
            )
        return trust.standing(
            self._journal, self.namespace, entry, self.trust_after if after is None else after
        )

    def trusted(self, *, after: int | None = None, at: int | None = None) -> list[Experience]:
        """The entries that are trusted, oldest first: now, or those of commit ``at`` on the evidence of then.

        Args:
            after: independent tasks asked for; ``trust_after`` by default. 0 trusts all.
            at: a commit.
        """
        after = self.trust_after if after is None else after
        entries = list(self.entries() if at is None else self.at(at).entries())
        if not after:
            return entries
        book = self.trust_book(after, at=at)
        book.refresh()
        return [entry for entry in entries if book.is_trusted(entry)]

    def why(self, trajectory: Trajectory | str) -> Explanation:
        """What an episode was shown, how it ended, how those entries are doing now, and which entries were written from it.

        Args:
            trajectory: an episode or the id of a recorded one.

        Raises:
            BankError: no trajectory with this id was recorded.
        """
        known = self.trajectory(trajectory) if isinstance(trajectory, str) else trajectory
        if known is None:
            raise BankError(
                f"Expected the id of a recorded trajectory, got {trajectory!r}; bank.history()"
                " lists them as refs"
            )
        explainer = Explainer(
            self.version, self.generation, Evidence(self._journal, self.namespace).uplift
        )
        return explainer.explain(known, Log(self._journal, self.namespace).written_from(known.id))

    def history(self, id: str | None = None) -> list[Logged]:
        """Every commit with the number of entries that it changed, or those that changed one entry; oldest first.

        Raises:
            BankError: there never was an entry with this id.
        """
        log = Log(self._journal, self.namespace)
        if id is None:
            return log.commits()
        if not (found := log.of(id)):
            raise BankError(
                f"Expected the id of an entry that this bank ever had, got {id!r}; list them with"
                " bank.entries()"
            )
        return found

    def diff(self, a: int, b: int) -> Difference:
        """What was added, removed and changed from commit ``a`` to commit ``b``; 0 is before the first."""
        return difference(self.at(a).entries(), self.at(b).entries())

    # What it forgets

    def prune(
        self,
        *,
        score: float | None = None,
        uplift_below: float | None = None,
        min_uses: int = 5,
        dry_run: bool = False,
        author: str = "human",
    ) -> list[Experience]:
        """Take out, in one commit, entries that were tried and did not help; gives them. ``at`` and ``rollback`` still know them.

        Args:
            score: take out entries whose Laplace score (s + 1) / (u + 2) is below it.
            uplift_below: take out entries whose present version has an uplift interval with its
                upper end below it.
            min_uses: counted uses that an entry must have had before it may be taken out, by either
                bound.
            dry_run: change nothing, only say what would go.
            author: written into the commit.
        """
        self._may_change("prune", dry_run)
        evidence = Evidence(self._journal, self.namespace)
        doomed = forget.prunable(
            list(self.entries()),
            evidence.uplift,
            score=score,
            uplift_below=uplift_below,
            min_uses=min_uses,
        )
        bounds = {"score": score, "uplift": uplift_below}
        ref = ", ".join(
            f"{name} < {bound:g}" for name, bound in bounds.items() if bound is not None
        )
        return (
            doomed
            if dry_run
            else self._take_out(doomed, author, "prune", f"{ref}, uses >= {min_uses}")
        )

    def evict(
        self,
        cap: int,
        policy: Policy = "utility",
        *,
        seed: int = 0,
        dry_run: bool = False,
        author: str = "human",
    ) -> list[Experience]:
        """Take out, in one commit, as many entries as there are above ``cap``; gives them. ``at`` and ``rollback`` still know them.

        Args:
            cap: entries that may stay.
            policy: who goes: "lru", the least recently used (an entry never used counts from its
                writing); "fifo", the oldest; "random"; "utility", the lowest Laplace score. Among
                equals the older goes. A new entry has a score of 0.5, so in a bank of better ones
                "utility" takes the new.
            seed: of "random"; the draw depends on it and on the last commit.
            dry_run: change nothing, only say what would go.
            author: written into the commit.
        """
        self._may_change("evict", dry_run)
        doomed = forget.evictable(
            list(self.entries()),
            cap,
            policy,
            seed=f"{seed}:{self.head}",
            last_use=lambda: forget.last_uses(self._journal, self.namespace),
        )
        return doomed if dry_run else self._take_out(doomed, author, "evict", f"{policy} to {cap}")

    def _take_out(
        self, doomed: Sequence[Experience], author: str, cause: str, ref: str
    ) -> list[Experience]:
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

        The survivor's new version has the summed counters and all of the group as parents. Entries
        of different kinds are never duplicates. Texts are embedded without their tasks, so this may
        take as long as writing the bank did.

        Args:
            threshold: cosine of two texts from which on they may say the same.
            judge: asked whether a pair (older, newer) says the same; ``ExtractorAgent.judge`` is
                one. None takes every pair. Of a bank behind a server it is asked here, and so the
                texts and their vectors travel here.
            across_tasks: compare entries of different tasks too; a survivor of several tasks has no
                task.
            among: ids of new entries: compared with each other first, then with older entries; None
                compares all.
            dry_run: change nothing, only say what would be merged.
        """
        self._may_change("deduplicate", dry_run)
        found = dedupe.find(
            list(self.entries()),
            self.embedder,
            threshold,
            judge,
            across_tasks=across_tasks,
            among=among,
        )
        return found if dry_run else self.merge_duplicates(found, f"cosine >= {threshold:g}")

    def merge_duplicates(
        self, found: Sequence[Duplicates], ref: str = "groups given", *, author: str = "human"
    ) -> list[Duplicates]:
        """Merge the groups that ``deduplicate(dry_run=True)`` found, or some of them, in one commit; gives those merged.

        An entry that changed since, or is gone, stays out.

        Args:
            found: groups; no entry may be in two of them.
            ref: written into the commit.
            author: written into the commit.
        """
        self._may_change("merge_duplicates", dry_run=False)
        if not found:
            return []
        vectors = dedupe.vectors_needed(found, self.embedder)
        with self._draft(author, "dedupe", ref) as draft:
            merger = dedupe.Merger(
                draft, self._state, History(self._journal, self.namespace), vectors
            )
            return [merged for group in found if (merged := merger.merge(group)) is not None]

    def _may_change(self, name: str, dry_run: bool) -> None:
        if self.read_only and not dry_run:
            hint = (
                "open it without"
                if name == "merge_duplicates"
                else "open it without, or pass dry_run=True"
            )
            raise ReadOnlyBankError(
                f"Expected a writable bank for {name}(), got one opened with read_only=True; {hint}"
            )
