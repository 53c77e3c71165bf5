"""Nearest live entries: exact and resident while a bank is small, Chroma with a resident tail of recent writes once it is large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from experiential.bank.history import Live, Stored
from experiential.bank.index import ChromaIndex
from experiential.bank.vectors import Scored, Snapshot, Vector, VectorIndex
from experiential.types import Experience

_SPARE = 32
"""Results asked of Chroma beyond those wanted, for versions that have changed since they were indexed."""


class Nearest:
    """The search structure of one bank; the bank's writer changes it under its lock, any thread searches it."""

    def __init__(self, entries: Sequence[Stored], *, limit: int, chroma: Callable[[], ChromaIndex] | None) -> None:
        self._limit = limit
        self._chroma = chroma
        self._large = chroma is not None and len(entries) > limit
        self._tail: dict[str, int] = {}
        self._index: VectorIndex[Experience] | None = None
        self._snapshot: Snapshot[Experience] | None = None
        for stored in () if self._large else entries:
            self.put(stored, 0)
        self.publish()

    @property
    def is_large(self) -> bool:
        """Whether Chroma answers, and not the resident matrix alone."""
        return self._large

    def put(self, stored: Stored, seq: int) -> None:
        """An entry stands at a new version since journal position ``seq``."""
        if self._index is None:
            self._index = VectorIndex(len(stored.vector))
        self._index.put(stored.experience.id, stored.vector, stored.experience, stored.origins)
        self._tail[stored.experience.id] = seq

    def remove(self, id: str) -> None:
        """An entry is gone."""
        self._tail.pop(id, None)
        if self._index is not None:
            self._index.remove(id)

    def publish(self) -> None:
        """Let searches see what was written since the last call, all at once."""
        if self._chroma is not None and not self._large and len(self._tail) > self._limit:
            self._large = True
        self._snapshot = None if self._index is None else self._index.snapshot()

    def settle(self, seq: int) -> None:
        """Chroma holds everything up to journal position ``seq``; in a large bank the tail need not."""
        if self._large:
            for id in [id for id, position in self._tail.items() if position <= seq]:
                self.remove(id)
            self.publish()

    def search(
        self, queries: Vector, n: int, live: Mapping[str, Live], exclude: Sequence[str | None] = ()
    ) -> list[list[Scored[Experience]]]:
        """The ``n`` nearest live entries of each query, best first; ``exclude`` names a task instance per query."""
        resident = self._snapshot
        recent: list[list[Scored[Experience]]] = [[] for _ in queries]
        if resident is not None:
            recent = resident.search(queries, n, exclude)
        if not self._large or self._chroma is None:
            return recent
        hidden = exclude or [None] * len(queries)
        asked = min(2 * n + _SPARE, len(live))
        found = self._chroma().search(queries, asked)
        indexed = [
            [
                Scored(live[hit.id].experience, hit.cosine)
                for hit in row
                if hit.id in live and live[hit.id].experience.version == hit.version and label not in live[hit.id].origins
            ]
            for row, label in zip(found, hidden, strict=True)
        ]
        return [_merged(new, old, n) for new, old in zip(recent, indexed, strict=True)]


def _merged(recent: list[Scored[Experience]], indexed: list[Scored[Experience]], n: int) -> list[Scored[Experience]]:
    best = {hit.item.id: hit for hit in [*indexed, *recent]}
    return sorted(best.values(), key=lambda hit: -hit.score)[:n]
