"""Show a bank as it stood after one commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from experiential.bank.index.embed import CachedEmbedder
from experiential.bank.index.nearest import Nearest
from experiential.bank.index.vectors import Scored
from experiential.bank.search.searchable import Searchable, scopes_of
from experiential.bank.search.where import Where
from experiential.bank.state import State
from experiential.bank.storage.history import Stored
from experiential.types import Experience, Statistics


class BankView(Searchable):
    """Read a bank as it stood after one commit; later writes do not change it.

    Counters are those known when the view was made.
    """

    def __init__(
        self,
        commit: int,
        entries: Sequence[Stored],
        statistics: dict[str, Statistics],
        embedder: CachedEmbedder,
    ) -> None:
        self.commit = commit
        self._embedder = embedder
        self._stored = list(entries)
        self._state = State(entries, dict(statistics), Nearest((), limit=0))
        self._nearest: Nearest | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._state.entries)

    def __iter__(self) -> Iterator[Experience]:
        return self.entries()

    def entries(self) -> Iterator[Experience]:
        """Return every entry, oldest first."""
        return (self._state.read(live.experience) for live in self._state.entries.values())

    def get(self, id: str) -> Experience | None:
        """Return the entry with this id, or None."""
        live = self._state.entries.get(id)
        return None if live is None else self._state.read(live.experience)

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
        return self._searcher().search(
            vectors, n, lambda: self._state.entries, scopes, queries if words else ()
        )

    def read(self, experience: Experience) -> Experience:
        """Return the same version with the counters of this view."""
        return self._state.read(experience)

    def _searcher(self) -> Nearest:
        with self._lock:
            if self._nearest is None:
                self._nearest = Nearest(self._stored, limit=len(self._stored))
            return self._nearest
