"""Keep the state of a bank in memory, read it, and stage the commits that change it."""

from __future__ import annotations

import threading
from collections import ChainMap, Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from experiential.bank.evidence.credit import Ledger
from experiential.bank.index.embed import Vector
from experiential.bank.index.nearest import Nearest
from experiential.bank.protocol import TextEmbedder, View
from experiential.bank.search.where import Scored, Where, scopes_of
from experiential.bank.storage.tables import History, Live, Stored
from experiential.errors import BankError
from experiential.types import Experience, Provenance, Statistics

Content = tuple[str | None, str, str]
"""Task, kind and text: two entries that share them say the same."""


class Change(NamedTuple):
    """Hold one change of one entry (None if removed) and its journal position."""

    id: str
    stored: Stored | None
    seq: int


class Counters:
    """Hold the counters of entries: those of the journal, and the retrievals since opening."""

    statistics: MutableMapping[str, Statistics]
    retrieved: Counter[str]

    def counted(self, id: str) -> Statistics | None:
        """Return the counters of an entry with the retrievals since opening; None if unknown."""
        known, retrieved = self.statistics.get(id), self.retrieved.get(id, 0)
        if not retrieved:
            return known
        known = known or Statistics()
        return known.model_copy(update={"retrievals": known.retrievals + retrieved})


class State(Counters):
    """Hold live entries, counters and search structure; readers need no lock."""

    def __init__(
        self, entries: Sequence[Stored], statistics: dict[str, Statistics], nearest: Nearest
    ) -> None:
        self.entries: dict[str, Live] = {}
        self.statistics = statistics
        self.retrieved = Counter()
        self.nearest = nearest
        self._tally = threading.Lock()
        self._unsaved: set[str] = set()
        self._contents: dict[Content, dict[str, None]] = {}
        for stored in entries:
            self._enter(self.entries, stored)

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
        try:
            yield {id: known for id in ids if (known := self.counted(id)) is not None}
        except BaseException:
            with self._tally:
                self._unsaved |= ids
            raise

    def live(self, id: str) -> Live | None:
        """Return the live entry, or None."""
        return self.entries.get(id)

    def twin(self, content: Content) -> str | None:
        """Return the newest live entry with exactly this content."""
        same = self._contents.get(content)
        return next(reversed(same)) if same else None

    def publish(self, changes: Sequence[Change], statistics: Mapping[str, Statistics]) -> None:
        """Show a commit to readers: one change in place, several by replacing the table at once."""
        entries = self.entries if len(changes) < 2 else dict(self.entries)
        for id, stored, _ in changes:
            old = entries.pop(id, None) if stored is None else entries.get(id)
            if old is not None:
                content = content_of(old.experience)
                self._contents[content].pop(id, None)
                if not self._contents[content]:
                    del self._contents[content]
            if stored is not None:
                self._enter(entries, stored)
        self.statistics.update(statistics)
        self.entries = entries
        if changes:
            self.nearest.publish(changes)

    def _enter(self, entries: dict[str, Live], stored: Stored) -> None:
        entries[stored.experience.id] = Live(stored.experience, stored.origins)
        self._contents.setdefault(content_of(stored.experience), {})[stored.experience.id] = None


class StateReader(View):
    """Read the entries and counters of a state in memory."""

    _state: State

    def __len__(self) -> int:
        return len(self._state.entries)

    def entries(self) -> Iterator[Experience]:
        """Return every entry, oldest first."""
        return (self.read(live.experience) for live in list(self._state.entries.values()))

    def get(self, id: str) -> Experience | None:
        """Return the entry with this id, or None."""
        live = self._state.live(id)
        return None if live is None else self.read(live.experience)

    def read(self, experience: Experience) -> Experience:
        """Return the same version with the counters of this state."""
        known = self._state.counted(experience.id)
        return experience if known is None else experience.model_copy(update={"statistics": known})


class BankView(StateReader):
    """Read a bank as it stood after one commit; later writes do not change it.

    Counters are those known when the view was made.
    """

    def __init__(
        self,
        commit: int,
        entries: Sequence[Stored],
        statistics: dict[str, Statistics],
        embedder: TextEmbedder,
    ) -> None:
        self.commit = commit
        self._embedder = embedder
        self._stored = list(entries)
        self._state = State(entries, statistics, Nearest((), limit=0))
        self._nearest: Nearest | None = None
        self._lock = threading.Lock()

    def nearest(
        self,
        queries: Sequence[str],
        n: int,
        exclude: Sequence[str | None],
        where: Sequence[Where | None] = (),
        words: bool = False,
    ) -> list[list[Scored[Experience]]]:
        """Return the ``n`` nearest entries of each query; see ``View.nearest``."""
        if not queries:
            return []
        vectors, scopes = self._embedder(queries), scopes_of(queries, exclude, where)
        with self._lock:  # the first search makes the index
            if self._nearest is None:
                self._nearest = Nearest(self._stored, limit=len(self._stored))
        return self._nearest.search(
            vectors, n, lambda: self._state.entries, scopes, queries if words else ()
        )


class StagedState(Counters):
    """Stage writes on a base state, unseen by readers; it is the base of the next writes."""

    def __init__(self, base: State | StagedState) -> None:
        self.changes: list[Change] = []
        self._staged: dict[str, Live | None] = {}
        self.own_statistics: dict[str, Statistics] = {}
        self.statistics = ChainMap(self.own_statistics, base.statistics)
        self.retrieved = base.retrieved
        self._base = base

    def live(self, id: str) -> Live | None:
        """Return the entry as staged, or None."""
        return self._staged[id] if id in self._staged else self._base.live(id)

    def has(self, experience: Experience) -> bool:
        """Return whether exactly this version of an entry is live."""
        live = self.live(experience.id)
        return live is not None and live.experience.version == experience.version

    def twin(self, content: Content) -> str | None:
        """Return an entry with exactly this content, staged ones first."""
        for id, live in reversed(self._staged.items()):
            if live is not None and content_of(live.experience) == content:
                return id
        id = self._base.twin(content)
        return None if id is None or id in self._staged else id


class Draft(StagedState):
    """Write one commit: into the open transaction now, into memory only after it."""

    def __init__(
        self, base: State | StagedState, history: History, ledger: Ledger, commit: int
    ) -> None:
        super().__init__(base)
        self.commit = commit
        self.refused: Counter[str] = Counter()
        self.redacted: Counter[str] = Counter()
        self._history = history
        self._ledger = ledger

    def put(self, experience: Experience, vector: Vector, origins: frozenset[str]) -> Experience:
        """Write a new version and make it the live one."""
        provenance = experience.provenance.model_copy(update={"commit": self.commit})
        update = {"provenance": provenance, "statistics": Statistics()}
        stored = Stored(experience.model_copy(update=update), vector, origins)
        self._history.write(stored, self.commit)
        self.point(experience.id, stored)
        return stored.experience

    def revise(self, id: str, text: str, provenance: Provenance, vector: Vector) -> Experience:
        """Write the next version of a live entry; its origins are kept and added to."""
        live = self.live(id)
        if live is None:
            raise unknown_entry(id)
        version = self._history.last_version(id) + 1
        update = {"version": version, "text": text, "provenance": provenance}
        origins = live.origins | origins_of(provenance)
        return self.put(live.experience.model_copy(update=update), vector, origins)

    def remove(self, id: str) -> None:
        """Remove a live entry; its history stays."""
        if self.live(id) is None:
            raise unknown_entry(id)
        self.point(id, None)

    def point(self, id: str, stored: Stored | None) -> None:
        """Make a version that was written the live one of its entry; None removes the entry."""
        version = None if stored is None else stored.experience.version
        seq = self._history.point(id, version, self.commit)
        self._staged[id] = None if stored is None else Live(stored.experience, stored.origins)
        self.changes.append(Change(id, stored, seq))

    def count(self, id: str, known: Statistics) -> None:
        """Set the counters of an entry, without its retrievals since opening."""
        self.statistics[id] = known
        self._ledger.save({id: self.counted(id) or known})


def content_of(experience: Experience) -> Content:
    """Return the content of an entry, by which twins are found."""
    return experience.task, experience.kind, experience.text


def origins_of(provenance: Provenance) -> frozenset[str]:
    """Return the task instance of a provenance, as a set."""
    return frozenset({provenance.instance} if provenance.instance else ())


def unknown_entry(id: str) -> BankError:
    """Return the error for an id without a live entry."""
    return BankError(f"Expected the id of a live entry, got {id!r}; list them with bank.entries()")
