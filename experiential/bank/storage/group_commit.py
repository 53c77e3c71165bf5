"""Group commit: writes that come at the same moment share one transaction, and so one wait for the disk."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar, cast

from experiential.bank.evidence.credit import Ledger
from experiential.bank.state import Draft, Ground, Overlay
from experiential.bank.storage.history import History
from experiential.bank.storage.journal import Footnote, Journal
from experiential.bank.text import Gate
from experiential.errors import BankError
from experiential.sync import attempted

T = TypeVar("T")
_INTERRUPTED = (
    "Expected this write to be carried out, but the thread that did it was interrupted; look"
    " whether it is there, then write again"
)


class Group(Overlay):
    """The commits of one transaction: each is drafted on those before it, and nobody else sees any before all are durable."""

    def __init__(self, ground: Ground, journal: Journal, history: History, ledger: Ledger) -> None:
        super().__init__(ground)
        self.drafts: list[Draft] = []
        self._journal = journal
        self._history = history
        self._ledger = ledger
        self._member: list[Draft] = []

    @property
    def is_lost(self) -> bool:
        """Whether SQLite has given up the transaction."""
        return not self._journal.in_transaction

    @contextmanager
    def draft(
        self, author: str, cause: str, ref: str | None = None, gate: Gate | None = None
    ) -> Generator[Draft]:
        """One commit; it counts once the member that makes it has ended well."""
        draft = Draft(self, self._history, self._ledger, self._history.begin(author, cause, ref))
        if gate is not None:
            draft.refused.update(gate.refused)
            draft.redacted.update(gate.redacted)
        yield draft
        self._member.append(draft)

    @contextmanager
    def member(self, note: Footnote | None = None) -> Generator[None]:
        """What one writer does: all of it counts, with its footnote when it made a commit, or nothing of it does."""
        self._member = []
        with self._journal.savepoint():
            yield
            if self._member:
                self._journal.write_footnote(note)
        for draft in self._member:
            self.drafts.append(draft)
            self.lay(draft)


class Member(Generic[T]):
    """One write of one caller, and in the end what it gave or why it failed."""

    def __init__(self, work: Callable[[Group], T], note: Footnote | None = None) -> None:
        self.outcome: T | Exception | None = None
        self.done = False
        self._work = work
        self._note = note

    def attempt(self, group: Group) -> T | Exception:
        """Write in a group whose transaction is open; a failure undoes this member alone.

        Raises:
            Exception: SQLite gave up the whole transaction.
        """
        outcome = attempted(partial(self._write, group))
        if isinstance(outcome, Exception) and group.is_lost:
            raise outcome
        return outcome

    def _write(self, group: Group) -> T:
        with group.member(self._note):
            return self._work(group)

    def end(self, outcome: T | Exception) -> None:
        """Say how it ended; for a success, once it is durable."""
        self.outcome, self.done = outcome, True


class Ticket:
    """The members of one caller, which waits until they are done or until it is its turn to lead."""

    def __init__(self, members: Sequence[Member[Any]]) -> None:
        self.members = members
        self.leads = False
        self._called = threading.Lock()
        self._called.acquire()

    @property
    def done(self) -> bool:
        """Whether every member has its outcome."""
        return all(member.done for member in self.members)

    def wait(self) -> None:
        """Until called."""
        self._called.acquire()

    def call(self) -> None:
        """Wake the caller, or let its next wait end at once."""
        if self._called.locked():
            self._called.release()

    def end(self) -> None:
        """Wake the caller for good; what has no outcome was led by a thread that was interrupted."""
        for member in self.members:
            if not member.done:
                member.end(BankError(_INTERRUPTED))
        self.call()


class GroupCommit:
    """Who comes while a transaction is being committed waits, and one of those waiting then commits what all of them wrote.

    Leader and followers: the first writer leads, carries out every member that waits in a savepoint
    of its own, commits once, and names the next leader. A writer alone waits for nobody, and there
    is no thread between a writer and the disk.

    Args:
        journal: where footnotes of the calling thread are taken from.
        transaction: a method that opens a transaction, and shows what was written to readers after
            it was committed; its object is not kept alive.
    """

    def __init__(
        self, journal: Journal, transaction: Callable[[], AbstractContextManager[Group]]
    ) -> None:
        self._journal = journal
        self._transaction = weakref.WeakMethod(transaction)
        self._guard = threading.Lock()
        self._waiting: list[Ticket] = []
        self._is_led = False

    def run(self, work: Callable[[Group], T]) -> T:
        """Carry out one write; durable when this returns.

        Args:
            work: writes, on the thread of whoever leads; it may be called a second time when the
                transaction of the first was lost.
        """
        member = Member(work, self._journal.take_footnote())
        self._wait_for([member])
        if isinstance(member.outcome, Exception):
            raise member.outcome
        return cast("T", member.outcome)

    def run_all(self, works: Sequence[Callable[[Group], T]]) -> list[T | Exception]:
        """Carry out several writes in their order; gives what each gave or raised."""
        members = [Member(work) for work in works]
        self._wait_for(members)
        return [cast("T | Exception", member.outcome) for member in members]

    def _wait_for(self, members: Sequence[Member[Any]]) -> None:
        """Until these members have their outcomes; the caller may find itself leading."""
        ticket = Ticket(members)
        with self._guard:
            self._waiting.append(ticket)
            if not self._is_led:
                ticket.leads = self._is_led = True
        if not ticket.leads:
            with ExitStack() as interrupted:
                interrupted.callback(self._leave, ticket)
                ticket.wait()
                interrupted.pop_all()
        if not ticket.done:
            self._lead()

    def _leave(self, ticket: Ticket) -> None:
        """A caller that was interrupted while waiting: it writes nothing any more, and somebody else leads in its place."""
        with self._guard:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            if ticket.leads:
                self._name_leader()

    def _name_leader(self) -> None:
        self._is_led = bool(self._waiting)
        if self._waiting:
            self._waiting[0].leads = True
            self._waiting[0].call()

    def _lead(self) -> None:
        tickets: list[Ticket] = []
        try:
            with self._guard:
                tickets, self._waiting = self._waiting, []
            self._carry_out([member for ticket in tickets for member in ticket.members])
        finally:
            with self._guard:
                self._name_leader()
            for ticket in tickets:
                ticket.end()

    def _carry_out(self, members: Sequence[Member[Any]]) -> None:
        failure = attempted(partial(self._commit, members))
        if failure is None:
            return
        if (
            len(members) == 1
        ):  # the failure was of the transaction: alone in one, each is told its own
            members[0].end(failure)
            return
        for member in members:
            self._carry_out([member])

    def _commit(self, members: Sequence[Member[Any]]) -> None:
        transaction = self._transaction()
        assert transaction is not None, "a bank that is gone has no writers"
        with transaction() as group:
            outcomes = [member.attempt(group) for member in members]
        for member, outcome in zip(members, outcomes, strict=True):
            member.end(outcome)
