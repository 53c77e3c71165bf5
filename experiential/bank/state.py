"""Keep the state of a bank in memory, and stage the commits that change it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Protocol

from experiential.bank.evidence.credit import Ledger, total
from experiential.bank.index.nearest import Nearest
from experiential.bank.index.vectors import Vector
from experiential.bank.storage.history import History, Live, Stored
from experiential.errors import BankError
from experiential.types import Experience, Provenance, Statistics

Content = tuple[str | None, str, str]
"""Task, kind and text: two entries that share them say the same."""


class BaseState(Protocol):
    """Provide the entries and counters before a commit."""

    @property
    def retrieved(self) -> Mapping[str, int]:
        """Return the retrievals since opening, by entry."""
        ...

    def live(self, id: str) -> Live | None:
        """Return the live entry, or None."""
        ...

    def twin(self, content: Content) -> str | None:
        """Return the newest live entry with exactly this content."""
        ...

    def saved(self, id: str) -> Statistics | None:
        """Return the counters of an entry, or None, without the retrievals since opening."""
        ...


class State:
    """Hold live entries, counters and search structure; readers need no lock."""

    def __init__(
        self, entries: Sequence[Stored], statistics: dict[str, Statistics], nearest: Nearest
    ) -> None:
        self.entries: dict[str, Live] = {}
        self.statistics = statistics
        self.retrieved: Counter[str] = Counter()
        self.nearest = nearest
        self._tally = threading.Lock()
        self._unsaved: set[str] = set()
        self._contents: dict[Content, dict[str, None]] = {}
        for stored in entries:
            self._enter(self.entries, stored)

    def read(self, experience: Experience) -> Experience:
        """Return the experience with its present counters."""
        known = self.counted(experience.id)
        return experience if known is None else experience.model_copy(update={"statistics": known})

    def counted(self, id: str) -> Statistics | None:
        """Return the counters of an entry with the retrievals since opening; None if unknown."""
        return _with_retrievals(self.statistics.get(id), self.retrieved.get(id, 0))

    def saved(self, id: str) -> Statistics | None:
        """Return the counters of an entry, or None, without the retrievals since opening."""
        return self.statistics.get(id)

    def note(self, ids: Iterable[str]) -> None:
        """Count retrievals, in memory."""
        with self._tally:
            for id in ids:
                self.retrieved[id] += 1
                self._unsaved.add(id)

    @contextmanager
    def unsaved(self) -> Generator[dict[str, Statistics]]:
        """Yield the counters that the journal lacks; they stay unsaved if the block fails."""
        with self._tally:
            ids, self._unsaved = self._unsaved, set()
        with ExitStack() as undo:
            undo.callback(self._keep_unsaved, ids)
            yield {id: known for id in ids if (known := self.counted(id)) is not None}
            undo.pop_all()

    def _keep_unsaved(self, ids: set[str]) -> None:
        with self._tally:
            self._unsaved |= ids

    def live(self, id: str) -> Live | None:
        """Return the live entry, or None."""
        return self.entries.get(id)

    def twin(self, content: Content) -> str | None:
        """Return the newest live entry with exactly this content."""
        same = self._contents.get(content)
        return next(reversed(same)) if same else None

    def publish(self, changes: Sequence[Change], statistics: dict[str, Statistics]) -> None:
        """Show a commit to readers: one change in place, several by replacing the table at once."""
        entries = self.entries if len(changes) < 2 else dict(self.entries)
        for change in changes:
            self._leave(entries, change.id, forget=change.stored is None)
            if change.stored is None:
                self.nearest.remove(change.id)
            else:
                self._enter(entries, change.stored)
                self.nearest.put(change.stored, change.seq)
        self.statistics.update(statistics)
        self.entries = entries
        if changes:
            self.nearest.publish()

    def arrange(self, order: Iterable[str]) -> None:
        """Put the entries into the order in which they would be read back."""
        self.entries = {id: self.entries[id] for id in order}

    def _enter(self, entries: dict[str, Live], stored: Stored) -> None:
        entries[stored.experience.id] = Live(stored.experience, stored.origins)
        self._contents.setdefault(content_of(stored.experience), {})[stored.experience.id] = None

    def _leave(self, entries: dict[str, Live], id: str, *, forget: bool) -> None:
        old = entries.pop(id, None) if forget else entries.get(id)
        if old is None:
            return
        content = content_of(old.experience)
        same = self._contents[content]
        same.pop(id, None)
        if not same:
            del self._contents[content]


class Change(NamedTuple):
    """Hold one change of one entry (None if removed) and its journal position."""

    id: str
    stored: Stored | None
    seq: int


class StagedState:
    """Stage writes on a base state, unseen by readers; it is the base of the next writes."""

    def __init__(self, base: BaseState) -> None:
        self.changes: list[Change] = []
        self.statistics: dict[str, Statistics] = {}
        self._base = base
        self._staged: dict[str, Stored | None] = {}

    @property
    def retrieved(self) -> Mapping[str, int]:
        """Return the retrievals since opening, by entry."""
        return self._base.retrieved

    def live(self, id: str) -> Live | None:
        """Return the entry as staged, or None."""
        if id in self._staged:
            stored = self._staged[id]
            return None if stored is None else Live(stored.experience, stored.origins)
        return self._base.live(id)

    def twin(self, content: Content) -> str | None:
        """Return an entry with exactly this content, staged ones first."""
        for id, stored in reversed(self._staged.items()):
            if stored is not None and content_of(stored.experience) == content:
                return id
        id = self._base.twin(content)
        return None if id is None or id in self._staged else id

    def saved(self, id: str) -> Statistics | None:
        """Return the staged counters of an entry, without the retrievals since opening."""
        return self.statistics.get(id) or self._base.saved(id)

    def lay(self, other: StagedState) -> None:
        """Take over the writes staged on this one."""
        self.changes += other.changes
        self.statistics.update(other.statistics)
        self._staged.update(other._staged)


class Draft(StagedState):
    """Write one commit: into the open transaction now, into memory only after it."""

    def __init__(self, base: BaseState, history: History, ledger: Ledger, commit: int) -> None:
        super().__init__(base)
        self.commit = commit
        self.refused: Counter[str] = Counter()
        self.redacted: Counter[str] = Counter()
        self._history = history
        self._ledger = ledger

    def put(self, experience: Experience, vector: Vector, origins: frozenset[str]) -> Experience:
        """Write a new version and make it the live one."""
        provenance = experience.provenance.model_copy(update={"commit": self.commit})
        experience = experience.model_copy(
            update={"provenance": provenance, "statistics": Statistics()}
        )
        stored = Stored(experience, vector, origins)
        self._history.write(stored, self.commit)
        self._stage(experience.id, stored, experience.version)
        return experience

    def revise(self, id: str, text: str, provenance: Provenance, vector: Vector) -> Experience:
        """Write the next version of a live entry; its origins are kept and added to."""
        live = self.live(id)
        if live is None:
            raise unknown_entry(id)
        update = {
            "version": self._history.last_version(id) + 1,
            "text": text,
            "provenance": provenance,
        }
        return self.put(
            live.experience.model_copy(update=update), vector, live.origins | origins_of(provenance)
        )

    def remove(self, id: str) -> None:
        """Remove a live entry; its history stays."""
        if self.live(id) is None:
            raise unknown_entry(id)
        self._stage(id, None, None)

    def restore(self, stored: Stored) -> None:
        """Make an earlier version of an entry live again."""
        self._stage(stored.experience.id, stored, stored.experience.version)

    def inherit(self, id: str, parents: Sequence[str]) -> None:
        """Start a merged entry from the summed counters of its parents."""
        self._count(id, total(self._counted(parent) for parent in dict.fromkeys(parents)))

    def credit(self, id: str, success: bool) -> None:
        """Count one use of an entry and how it ended."""
        known = self.saved(id) or Statistics()
        self._count(
            id,
            known.model_copy(
                update={"uses": known.uses + 1, "successes": known.successes + success}
            ),
        )

    def start_from(self, id: str, statistics: Statistics) -> None:
        """Start an imported entry from its counters."""
        self._count(id, statistics)

    def _count(self, id: str, known: Statistics) -> None:
        self.statistics[id] = known
        self._ledger.save({id: self._counted(id)})

    def _counted(self, id: str) -> Statistics:
        return _with_retrievals(self.saved(id), self.retrieved.get(id, 0)) or Statistics()

    def _stage(self, id: str, stored: Stored | None, version: int | None) -> None:
        seq = self._history.point(id, version, self.commit)
        self._staged[id] = stored
        self.changes.append(Change(id, stored, seq))


def _with_retrievals(known: Statistics | None, retrieved: int) -> Statistics | None:
    if not retrieved:
        return known
    known = known or Statistics()
    return known.model_copy(update={"retrievals": known.retrievals + retrieved})


def content_of(experience: Experience) -> Content:
    """Return the content of an entry, by which twins are found."""
    return experience.task, experience.kind, experience.text


def origins_of(provenance: Provenance) -> frozenset[str]:
    """Return the task instance of a provenance, as a set."""
    return frozenset({provenance.instance} if provenance.instance else ())


def unknown_entry(id: str) -> BankError:
    """Return the error for an id without a live entry."""
    return BankError(f"Expected the id of a live entry, got {id!r}; list them with bank.entries()")
