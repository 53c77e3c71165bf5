"""Group commit: concurrent writes share one transaction, and so one wait for the disk."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from experiential.bank.evidence.credit import Ledger
from experiential.bank.state import Draft, StagedState, State
from experiential.bank.storage.journal import Attached, Journal
from experiential.bank.storage.tables import History
from experiential.bank.text import Gate
from experiential.errors import BankError
from experiential.sync import Batcher, BatchInterruptedError

T = TypeVar("T")


class Group(StagedState):
    """Collect the commits of one transaction; each is drafted on those before it.

    Readers see none of them before all are durable.
    """

    def __init__(self, base: State, journal: Journal, history: History, ledger: Ledger) -> None:
        super().__init__(base, history, ledger)
        self.drafts: list[Draft] = []
        self._journal = journal
        self._member: list[Draft] = []

    @contextmanager
    def draft(
        self, author: str, cause: str, ref: str | None = None, gate: Gate | None = None
    ) -> Generator[Draft]:
        """Open one commit; it counts once the member that makes it has succeeded."""
        draft = Draft(self, self._history, self._ledger, self._history.begin(author, cause, ref))
        if gate is not None:
            draft.refused.update(gate.refused)
            draft.redacted.update(gate.redacted)
        yield draft
        self._history.seal()
        self._member.append(draft)

    @contextmanager
    def member(self, note: Attached | None = None) -> Generator[None]:
        """Open a savepoint for one writer: all of its commits count, or none.

        Args:
            note: written with the commits, in the same savepoint; without a commit it is not.
        """
        self._member = []
        self._journal.run("SAVEPOINT member")
        try:
            yield
            if self._member and note is not None:
                self._journal.run(*note)
        except BaseException:
            if self._journal.in_transaction:
                self._journal.run("ROLLBACK TO member")
                self._journal.run("RELEASE member")
            raise
        self._journal.run("RELEASE member")
        for draft in self._member:
            self.drafts.append(draft)
            self.changes += draft.changes
            self._staged.update(draft._staged)
            self.statistics.update(draft.own_statistics)


@dataclass(eq=False, slots=True)
class Member(Generic[T]):
    """Hold one write and its note, and once it is durable its result, or its error."""

    work: Callable[[Group], T]
    note: Attached | None
    outcome: T | Exception


class GroupCommit:
    """Commit the writes of concurrent callers together.

    The first waiting writer becomes the leader and carries out every queued write, each in a
    savepoint of its own, in one transaction. A writer alone waits for nobody, and there is no
    thread between a writer and the disk.

    Args:
        journal: where statements attached by the calling thread are taken from.
        transaction: a method that opens a transaction, and after its commit shows what was written
            to readers; its object is not kept alive.
    """

    def __init__(
        self, journal: Journal, transaction: Callable[[], AbstractContextManager[Group]]
    ) -> None:
        self._journal = journal
        self._transaction = weakref.WeakMethod(transaction)
        self._batcher: Batcher[Member[Any], None] = Batcher(self._carry_out)

    def run(self, work: Callable[[Group], T]) -> T:
        """Carry out one write; durable when this returns.

        Args:
            work: writes, on the thread of the leader; called a second time if the transaction of
                the first was lost.
        """
        note = self._journal.attached.pop(threading.get_ident(), None)
        [outcome] = self.run_all([work], note)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def run_all(
        self, works: Sequence[Callable[[Group], T]], note: Attached | None = None
    ) -> list[T | Exception]:
        """Carry out several writes in their order; return the result or the error of each."""
        lost = BankError(
            "Expected this write to be carried out, but the thread that did it was interrupted;"
            " look whether it is there, then write again"
        )
        members = [Member(work, note, lost) for work in works]
        # A leader that is interrupted leaves members of others behind, of which some may be done:
        # the members know, and the batcher does not.
        with contextlib.suppress(BatchInterruptedError):
            self._batcher.run(members)
        return [member.outcome for member in members]

    def _carry_out(self, members: Sequence[Member[Any]]) -> list[None]:
        transaction = self._transaction()
        assert transaction is not None, "a bank that is gone has no writers"
        outcomes: list[Any] = []
        try:
            with transaction() as group:
                for member in members:  # a failure undoes this member alone
                    try:
                        with group.member(member.note):
                            outcome = member.work(group)
                    except Exception as error:
                        if not self._journal.in_transaction:  # SQLite gave up the transaction
                            raise
                        outcome = error
                    outcomes.append(outcome)
        except Exception as error:
            # The failure was of the whole transaction. Each member again in one of its own: a full
            # disk, for example, fails the large write, and the small ones fit.
            if len(members) == 1:
                members[0].outcome = error
            else:
                for member in members:
                    self._carry_out([member])
        else:
            for member, outcome in zip(members, outcomes, strict=True):
                member.outcome = outcome
        return [None] * len(members)
