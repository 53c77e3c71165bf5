"""Keep the state of a bank in memory, read it, and stage the commits that change it."""

from __future__ import annotations

import threading
from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from operator import attrgetter
from typing import NamedTuple, cast

from experiential.bank.evidence.credit import Ledger
from experiential.bank.index.embed import Vector
from experiential.bank.index.nearest import Nearest
from experiential.bank.protocol import TextEmbedder, View
from experiential.bank.search.where import Ranking, Scope
from experiential.bank.storage.tables import History, Live, LiveEntries, Stored
from experiential.errors import BankError
from experiential.types import Experience, Provenance, Statistics, Trajectory

Content = tuple[str | None, str, str]
"""Task, kind and text: two entries that share them say the same."""
content_of: Callable[[Experience], Content] = attrgetter("task", "kind", "text")


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
        return Statistics(  # at half the cost of a copy
            retrievals=known.retrievals + retrieved, uses=known.uses, successes=known.successes
        )


class State(Counters):
    """Hold live entries, counters and search structure; readers need no lock.

    Attributes:
        unsaved: entries whose retrievals the journal lacks; ``tally`` is held to change it.
    """

    def __init__(
        self, entries: Mapping[str, Live], statistics: dict[str, Statistics], nearest: Nearest
    ) -> None:
        self.entries = entries
        self.statistics = statistics
        self.retrieved = Counter()
        self.nearest = nearest
        self.tally = threading.Lock()
        self.unsaved: set[str] = set()
        # The ids of the entries of each content, made when first asked for: it parses every entry.
        self._contents: defaultdict[Content, dict[str, None]] | None = None

    def twin(self, content: Content) -> str | None:
        """Return the newest live entry with exactly this content; the caller writes the bank."""
        if self._contents is None:
            self._contents = defaultdict(dict)
            for id, live in self.entries.items():
                self._contents[content_of(live.experience)][id] = None
        same = self._contents.get(content)
        return next(reversed(same)) if same else None

    def publish(self, changes: Sequence[Change], statistics: Mapping[str, Statistics]) -> None:
        """Show a commit to readers: one change in place, several by replacing the table at once."""
        held = cast("dict[str, Live]", self.entries)  # a mapped file has no writer
        entries = held if len(changes) < 2 else dict(held)
        for id, stored, _ in changes:
            old = entries.pop(id, None) if stored is None else entries.get(id)
            if stored is not None:
                entries[id] = Live(stored.experience, stored.origins)
            if self._contents is None:
                continue
            if old is not None:
                content = content_of(old.experience)
                self._contents[content].pop(id, None)
                if not self._contents[content]:
                    del self._contents[content]
            if stored is not None:
                self._contents[content_of(stored.experience)][id] = None
        self.statistics.update(statistics)
        self.entries = entries
        if changes:
            self.nearest.publish(changes)


class StateReader(View):
    """Read the entries and counters of a state in memory."""

    _state: State

    def __len__(self) -> int:
        return len(self._state.entries)

    def entries(self) -> Iterator[Experience]:
        """Return every entry, oldest first."""
        entries = self._state.entries
        found = list(entries.values()) if isinstance(entries, dict) else entries.values()
        return (self.read(live.experience) for live in found)

    def get(self, id: str) -> Experience | None:
        """Return the entry with this id, or None."""
        live = self._state.entries.get(id)
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
        entries: Mapping[str, Live],
        statistics: dict[str, Statistics],
        embedder: TextEmbedder,
        nearest: Callable[[], Nearest],
    ) -> None:
        self.commit = commit
        self._embedder = embedder
        self._state = State(entries, statistics, Nearest(LiveEntries(), limit=0))
        self._made = nearest
        self._nearest: Nearest | None = None
        self._lock = threading.Lock()

    def nearest(
        self, queries: Sequence[str], n: int, scopes: Sequence[Scope], words: bool = False
    ) -> list[Ranking]:
        """Return the ``n`` nearest entries of each query; see ``View.nearest``."""
        if not queries:
            return []
        vectors = self._embedder(queries)
        with self._lock:  # the first search makes the index
            if self._nearest is None:
                self._nearest = self._made()
        return self._nearest.search(
            vectors, n, lambda: self._state.entries, scopes, queries if words else ()
        )


class StagedState(Counters):
    """Stage writes on a base state, unseen by readers; it is the base of the next writes.

    Attributes:
        entries: those of the base under the staged ones; None for one that was removed.
        commit: the commit being drafted; 0 for a group of them.
        refused, redacted: as in `Gate`.
        recorded: the episode that it journals, and whether again, because its outcome is known now.
    """

    def __init__(
        self, base: State | StagedState, history: History, ledger: Ledger, commit: int = 0
    ) -> None:
        self.changes: list[Change] = []
        self.commit = commit
        self.refused: Counter[str] = Counter()
        self.redacted: Counter[str] = Counter()
        self.own_statistics: dict[str, Statistics] = {}
        self.recorded: tuple[Trajectory, bool] | None = None
        self.statistics = ChainMap(self.own_statistics, base.statistics)
        self.retrieved = base.retrieved
        self._staged: dict[str, Live | None] = {}
        self.entries = ChainMap(self._staged, cast("dict[str, Live | None]", base.entries))
        self._base = base
        self._history = history
        self._ledger = ledger

    def twin(self, content: Content) -> str | None:
        """Return an entry with exactly this content, staged ones first."""
        for id, live in reversed(self._staged.items()):
            if live is not None and content_of(live.experience) == content:
                return id
        id = self._base.twin(content)
        return None if id is None or id in self._staged else id


class Draft(StagedState):
    """Write one commit: into the open transaction now, into memory only after it."""

    def has(self, experience: Experience) -> bool:
        """Return whether exactly this version of an entry is live."""
        live = self.entries.get(experience.id)
        return live is not None and live.experience.version == experience.version

    def put(
        self, experience: Experience, vector: Vector, origins: frozenset[str] = frozenset()
    ) -> Experience:
        """Write a new version and make it the live one.

        ``origins`` are those of the entries that it is made from; its own instance is added.
        """
        provenance = experience.provenance.model_copy(update={"commit": self.commit})
        if provenance.instance:
            origins |= {provenance.instance}
        update = {"provenance": provenance, "statistics": Statistics()}
        stored = Stored(experience.model_copy(update=update), vector, origins)
        self._history.write(stored, self.commit)
        self.point(experience.id, stored)
        return stored.experience

    def revise(
        self, id: str, text: str, task: str | None, provenance: Provenance, vector: Vector
    ) -> Experience:
        """Write the next version of a live entry; its origins are kept and added to."""
        live = self.entries.get(id)
        if live is None:
            raise unknown_entry(id)
        version = self._history.last_version(id) + 1
        update = {"version": version, "text": text, "task": task, "provenance": provenance}
        return self.put(live.experience.model_copy(update=update), vector, live.origins)

    def vector(self, entry: Experience) -> Vector:
        """Return the vector of a journalled entry version."""
        stored = self._history.stored(entry.id, entry.version)
        assert stored is not None
        return stored.vector

    def said(self, id: str) -> int:
        """Return how often extractors wrote the text of a live entry."""
        live = self.entries.get(id)
        return 0 if live is None else live.experience.provenance.said

    def remove(self, id: str) -> None:
        """Remove a live entry; its history stays."""
        if self.entries.get(id) is None:
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


def unknown_entry(id: str) -> BankError:
    """Return the error for an id without a live entry."""
    return BankError(f"Expected the id of a live entry, got {id!r}; list them with bank.entries()")
