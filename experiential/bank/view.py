"""The bank as it stood after one commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, overload

from experiential.bank.embed import CachedEmbedder
from experiential.bank.history import Stored
from experiential.bank.nearest import Nearest
from experiential.bank.state import State
from experiential.types import Experience, Hit, Statistics


class BankView:
    """A read-only picture of a bank; later writes do not change it.

    Counters are those known when the view was made.
    """

    def __init__(self, commit: int, entries: Sequence[Stored], statistics: dict[str, Statistics], embedder: CachedEmbedder) -> None:
        self.commit = commit
        self._embedder = embedder
        self._stored = list(entries)
        self._state = State(entries, dict(statistics), Nearest((), limit=0, chroma=None))
        self._nearest: Nearest | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._state.entries)

    def __iter__(self) -> Iterator[Experience]:
        return self.entries()

    def entries(self) -> Iterator[Experience]:
        """Every entry, oldest first."""
        return (self._state.read(live.experience) for live in self._state.entries.values())

    def get(self, id: str) -> Experience | None:
        """The entry with this id, or None."""
        live = self._state.entries.get(id)
        return None if live is None else self._state.read(live.experience)

    @overload
    def search(self, query: str, *, k: int = 1, exclude_instance: str | None = None) -> list[Hit]: ...

    @overload
    def search(self, query: list[str] | tuple[str, ...], *, k: int = 1, exclude_instance: str | None = None) -> list[list[Hit]]: ...

    def search(
        self, query: str | list[str] | tuple[str, ...], *, k: int = 1, exclude_instance: str | None = None
    ) -> list[Hit] | list[list[Hit]]:
        """The ``k`` most similar entries of one query, or of each of several."""
        queries = checked_queries(query, k)
        if not queries:
            return []
        rows = self._searcher().search(self._embedder(queries), k, self._state.entries, [exclude_instance] * len(queries))
        hits = [[Hit(experience=self._state.read(s.item), score=s.score, rank=i) for i, s in enumerate(row)] for row in rows]
        return hits[0] if isinstance(query, str) else hits

    def _searcher(self) -> Nearest:
        with self._lock:
            if self._nearest is None:
                self._nearest = Nearest(self._stored, limit=len(self._stored), chroma=None)
            return self._nearest


def checked_queries(query: object, k: object, *, blank: bool = False) -> list[str]:
    """The queries as a list; a wrong type is refused with what was expected, and so is blank text unless ``blank`` allows it."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"Expected k to be a positive whole number, got {k!r}")
    if not isinstance(query, (str, list, tuple)):
        raise ValueError(f"Expected a query to be text or a list of texts, got {query!r}")
    queries: list[Any] = [query] if isinstance(query, str) else list(query)  # pyright: ignore[reportUnknownArgumentType]  (elements are checked next)
    for one in queries:
        if not isinstance(one, str) or not (blank or one.strip()):
            raise ValueError(f"Expected a query to be non-empty text, got {one!r}")
    return queries
