"""Read a state in memory: that of a bank now, or as it stood after one commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from experiential.bank.index.nearest import Nearest
from experiential.bank.index.vectors import Scored
from experiential.bank.protocol import TextEmbedder, View
from experiential.bank.search.searchable import scopes_of
from experiential.bank.search.where import Where
from experiential.bank.state import State
from experiential.bank.storage.history import Stored
from experiential.types import Experience, Statistics


class StateReader(View):
    """Read the entries and counters of a state in memory."""

    _state: State

    def __len__(self) -> int:
        return len(self._state.entries)

    def entries(self) -> Iterator[Experience]:
        """Return every entry, oldest first."""
        state = self._state
        return (state.read(live.experience) for live in list(state.entries.values()))

    def get(self, id: str) -> Experience | None:
        """Return the entry with this id, or None."""
        live = self._state.live(id)
        return None if live is None else self._state.read(live.experience)

    def read(self, experience: Experience) -> Experience:
        """Return the same version with the counters of this state."""
        return self._state.read(experience)


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
