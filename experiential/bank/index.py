"""Chroma as the index of large banks: written behind the journal, replayed when behind, rebuilt when damaged."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiential.bank.history import History, Stored
from experiential.bank.vectors import Vector

CHROMA_NAME = "chroma"
BATCH = 256
"""Changes after which the follower writes without being asked."""
_log = logging.getLogger(__name__)


class Indexed(NamedTuple):
    """One entry version that Chroma holds, with its cosine similarity to the query."""

    id: str
    version: int
    cosine: float


class ChromaIndex:
    """The Chroma collection of one namespace; ``head`` is the journal position that it has caught up with."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self._folder = folder / CHROMA_NAME
        self._name = f"experience-{hashlib.sha256(namespace.encode()).hexdigest()[:16]}"
        try:
            self._open()
        except Exception as error:  # noqa: BLE001  (Chroma raises many kinds over a damaged folder; none may reach the bank)
            aside = self._folder.with_name(f"{CHROMA_NAME}.damaged-{time.time_ns()}")
            self._folder.rename(aside)
            _log.warning("Chroma folder could not be opened (%s); set aside as %s and rebuilt from the journal", error, aside.name)
            self._forget_failed_client()
            self._open()

    def _forget_failed_client(self) -> None:
        """Chroma keeps a client whose start failed and drops it when it is asked for once more, with an error."""
        with contextlib.suppress(AttributeError):
            self._open()

    def _open(self) -> None:
        import chromadb
        from chromadb.config import Settings

        settings = Settings(anonymized_telemetry=False)
        self._client: Any = chromadb.PersistentClient(path=str(self._folder), settings=settings)
        self._collection: Any = self._client.get_or_create_collection(
            self._name, embedding_function=None, metadata={"head": 0}, configuration={"hnsw": {"space": "cosine"}}
        )
        self._collection.count()

    @property
    def head(self) -> int:
        """Position of the last journal change written here."""
        metadata: dict[str, Any] = self._collection.metadata or {}
        return int(metadata.get("head", 0))

    def __len__(self) -> int:
        return self._collection.count()

    def clear(self) -> None:
        """Forget everything."""
        self._client.delete_collection(self._name)
        self.close()
        self._open()

    def apply(self, changes: list[tuple[int, str, Stored | None]]) -> None:
        """Write a run of journal changes; repeating a run does no harm."""
        last = {id: stored for _, id, stored in changes}
        puts = {id: stored for id, stored in last.items() if stored is not None}
        gone = [id for id, stored in last.items() if stored is None]
        if puts:
            entries = [stored.experience for stored in puts.values()]
            self._collection.upsert(
                ids=list(puts),
                embeddings=[stored.vector for stored in puts.values()],
                documents=[entry.text for entry in entries],
                metadatas=[{"version": entry.version, "kind": entry.kind, "task": entry.task or ""} for entry in entries],
            )
        if gone:
            self._collection.delete(ids=gone)
        self._collection.modify(metadata={"head": changes[-1][0]})

    def search(self, queries: Vector, n: int) -> list[list[Indexed]]:
        """The ``n`` nearest entries of each query by HNSW, best first."""
        count = min(n, len(self))
        if count == 0:
            return [[] for _ in queries]
        found = self._collection.query(query_embeddings=queries, n_results=count, include=["metadatas", "distances"])
        return [
            [Indexed(id, int(meta["version"]), 1.0 - distance) for id, meta, distance in zip(*row, strict=True)]
            for row in zip(found["ids"], found["metadatas"], found["distances"], strict=True)
        ]

    def held(self, ids: list[str]) -> dict[str, tuple[int, Vector]]:
        """Version and vector of those of these entries that are here."""
        found = self._collection.get(ids=ids, include=["metadatas", "embeddings"])
        rows = zip(found["ids"], found["metadatas"], found["embeddings"], strict=True)
        return {id: (int(meta["version"]), np.asarray(vector, dtype=np.float32)) for id, meta, vector in rows}

    def close(self) -> None:
        """Let the folder go."""
        self._client.close()


class IndexFollower:
    """Keeps Chroma behind the journal, on a thread of its own, so that no writer ever waits for it."""

    def __init__(self, folder: Path, namespace: str, history: History) -> None:
        self.failure: Exception | None = None
        self.on_advance: Callable[[int], None] | None = None
        self._folder = folder
        self._namespace = namespace
        self._history = history
        self._index: ChromaIndex | None = None
        self._work = threading.RLock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._pending = 0

    def is_behind(self) -> bool:
        """Whether the journal holds changes that Chroma has not, as far as can be told without opening Chroma."""
        last = self._history.last_seq()
        return last > 0 and (int(self._history.meta("indexed") or 0) != last or not (self._folder / CHROMA_NAME).is_dir())

    def note(self, changes: int) -> None:
        """The journal grew; wake the thread when enough has come together."""
        self._pending += changes
        if self._pending >= BATCH:
            self.wake()

    def wake(self) -> None:
        """Catch up soon, in the background."""
        self._pending = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="experiential-index", daemon=True)
            self._thread.start()
        self._wake.set()

    def flush(self) -> None:
        """Catch up now."""
        with self._work:
            self._catch_up()

    def rebuild(self) -> int:
        """Make the collection again from the journal; gives the number of entries indexed."""
        with self._work:
            index = self.opened()
            index.clear()
            self._catch_up()
            return len(index)

    def opened(self) -> ChromaIndex:
        """The index, opened on first use and cleared when it cannot belong to this journal."""
        if (index := self._index) is not None:
            return index
        with self._work:
            if self._index is None:
                index = ChromaIndex(self._folder, self._namespace)
                if not self._is_credible(index):
                    index.clear()
                self._index = index
            return self._index

    def stop(self, *, catch_up: bool = True) -> None:
        """End the thread and let the folder go, after catching up when behind."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self._work:
            if catch_up and self.is_behind():
                self._try_catch_up()
            if self._index is not None:
                self._index.close()
                self._index = None

    def _is_credible(self, index: ChromaIndex) -> bool:
        last, head = self._history.last_seq(), index.head
        return head < last or (head == last and len(index) == self._history.live_count())

    def _follow(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            if not self._stopping:
                with self._work:
                    self._try_catch_up()

    def _try_catch_up(self) -> None:
        try:
            self._catch_up()
            self.failure = None
        except Exception as error:  # noqa: BLE001  (an index that fails must not end the bank; the journal has everything)
            self.failure = error
            _log.warning("Chroma could not be written (%s); the journal is complete, the index is replayed at the next opening", error)

    def _catch_up(self) -> None:
        index = self.opened()
        while changes := self._history.changes_after(index.head, BATCH):
            index.apply(changes)
            if self.on_advance is not None:
                self.on_advance(changes[-1][0])
        self._history.set_meta("indexed", str(index.head))
