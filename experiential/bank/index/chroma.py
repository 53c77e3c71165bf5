"""Chroma as the index of large banks: written behind the journal, replayed when behind, rebuilt when damaged, done without when away."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiential.bank.index.seal import Seal
from experiential.bank.index.vectors import Vector
from experiential.bank.storage.history import History, Stored
from experiential.errors import BankError
from experiential.sync import attempted

CHROMA_NAME = "chroma"
_NEIGHBOURS = 32
"""Links of an entry in Chroma's graph; with its default of 16, entries whose texts are much alike
cut each other off from the rest.
"""
BATCH = 256
"""Changes after which the follower writes without being asked."""
PAUSES = (1.0, 60.0)
"""Seconds after which the follower tries again what failed: at first, and at most."""
_log = logging.getLogger(__name__)


class IndexLostError(BankError):
    """Chroma does not answer, or does not hold what it should; the journal does."""


class Indexed(NamedTuple):
    """One entry version that Chroma holds, with its cosine similarity to the query."""

    id: str
    version: int
    cosine: float


class ChromaIndex:
    """The Chroma collection of one namespace in a folder; ``head`` is the journal position that it has caught up with.

    What Chroma raises comes as ``IndexLostError``.
    """

    _seal = Seal(None)

    def __init__(self, folder: Path, namespace: str) -> None:
        self._folder = folder / CHROMA_NAME
        self._place = f"in {str(self._folder)!r}"
        self._seal = Seal(self._folder)
        self._name = collection_name(namespace)
        if self._seal.is_broken():
            self._set_aside("its vector files are not those that were sealed")
        try:
            with self._told():
                self._open()
        except IndexLostError as error:
            self._set_aside(error.__cause__)
            self._forget_failed_client()
            with self._told():
                self._open()

    def _set_aside(self, reason: object) -> None:
        self._seal.leave()
        aside = self._folder.with_name(f"{CHROMA_NAME}.damaged-{time.time_ns()}")
        self._folder.rename(aside)
        _log.warning(
            "Chroma folder could not be opened (%s); set aside as %s and rebuilt from the journal",
            reason,
            aside.name,
        )

    def _forget_failed_client(self) -> None:
        """Chroma keeps a client whose start failed and drops it when it is asked for once more, with an error."""
        with contextlib.suppress(AttributeError):
            self._open()

    def _open(self) -> None:
        with self._seal:
            self._client = self._connected()
            self._collection = self._found()
            self._collection.count()

    def _found(self) -> Any:
        graph = {"space": "cosine", "max_neighbors": _NEIGHBOURS}
        return self._client.get_or_create_collection(
            self._name, embedding_function=None, metadata={"head": 0}, configuration={"hnsw": graph}
        )

    def _connected(self) -> Any:
        import chromadb
        from chromadb.config import Settings

        return chromadb.PersistentClient(
            path=str(self._folder), settings=Settings(anonymized_telemetry=False)
        )

    @contextlib.contextmanager
    def _told(self) -> Generator[None]:
        """Turn whatever Chroma raises into one error."""
        try:
            yield
        except Exception as error:  # Chroma raises many kinds when its files or its server are gone
            raise IndexLostError(
                f"Expected Chroma {self._place} to answer, got {type(error).__name__}: {error}"
            ) from error

    @property
    def head(self) -> int:
        """Position of the last journal change written here."""
        return int(self._metadata.get("head", 0))

    @property
    def stamp(self) -> str:
        """What the journal that was written here had to tell its change at ``head`` from others by."""
        return str(self._metadata.get("stamp", ""))

    @property
    def _metadata(self) -> dict[str, Any]:
        return self._collection.metadata or {}

    def __len__(self) -> int:
        with self._told():
            return self._collection.count()

    def clear(self) -> None:
        """Forget everything."""
        with self._told(), self._seal:
            self._client.delete_collection(self._name)
            self.close()
            self._open()

    def apply(self, changes: list[tuple[int, str, Stored | None]], stamp: str) -> None:
        """Write a run of journal changes, the last of which has a stamp; repeating a run does no harm."""
        with self._told(), self._seal:
            self._apply(changes)
            self._collection.count()  # makes Chroma write its vector files now, if it is time to, and not in some search
            self._collection.modify(metadata={"head": changes[-1][0], "stamp": stamp})

    def _apply(self, changes: list[tuple[int, str, Stored | None]]) -> None:
        last = {id: stored for _, id, stored in changes}
        puts = {id: stored for id, stored in last.items() if stored is not None}
        gone = [id for id, stored in last.items() if stored is None]
        if puts:
            entries = [stored.experience for stored in puts.values()]
            self._collection.upsert(
                ids=list(puts),
                embeddings=[stored.vector for stored in puts.values()],
                documents=[entry.text for entry in entries],
                metadatas=[
                    {"version": entry.version, "kind": entry.kind, "task": entry.task or ""}
                    for entry in entries
                ],
            )
        if gone:
            self._collection.delete(ids=gone)

    def search(
        self, queries: Vector, n: int, where: dict[str, Any] | None = None
    ) -> list[list[Indexed]]:
        """The ``n`` nearest entries of each query by HNSW, best first; ``where`` is a filter in Chroma's language."""
        count = min(n, len(self))
        if count == 0:
            return [[] for _ in queries]
        with self._told():
            found = self._collection.query(
                query_embeddings=queries,
                n_results=count,
                where=where,
                include=["metadatas", "distances"],
            )
        return [
            [
                Indexed(id, int(meta["version"]), 1.0 - distance)
                for id, meta, distance in zip(*row, strict=True)
            ]
            for row in zip(found["ids"], found["metadatas"], found["distances"], strict=True)
        ]

    def held(self, ids: list[str]) -> dict[str, tuple[int, Vector]]:
        """Version and vector of those of these entries that are here."""
        with self._told():
            found = self._collection.get(ids=ids, include=["metadatas", "embeddings"])
        rows = zip(found["ids"], found["metadatas"], found["embeddings"], strict=True)
        return {
            id: (int(meta["version"]), np.asarray(vector, dtype=np.float32))
            for id, meta, vector in rows
        }

    def close(self) -> None:
        """Let Chroma go."""
        with self._seal:
            self._client.close()
        self._seal.leave()


def collection_name(namespace: str, bank: str = "") -> str:
    """The name of the collection of a namespace, in Chroma's alphabet; ``bank`` sets it apart from those of other banks."""
    return f"experience-{bank}{'-' if bank else ''}{hashlib.sha256(namespace.encode()).hexdigest()[:16]}"


class Place(NamedTuple):
    """Where the index of a bank is: how it is opened, the key under which the journal notes its position, and its folder, if it has one."""

    open: Callable[[], ChromaIndex]
    mark: str
    folder: Path | None


class IndexFollower:
    """Keeps Chroma behind the journal, on a thread of its own, so that no writer ever waits for it.

    What fails is tried again after a while, the longer the more often it failed.

    Args:
        history: what is followed.
        place: where the index is.
    """

    def __init__(self, history: History, place: Place) -> None:
        self.failure: Exception | None = None
        self.on_advance: Callable[[int], None] | None = None
        self.patience: Callable[[], float] = _at_once
        self._history = history
        self._index: ChromaIndex | None = None
        self._work = threading.RLock()
        self._wake = threading.Event()
        self._stopping = False
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._pause = PAUSES[0]
        self._is_lost = False
        self._place = place
        self._held = int(history.meta(place.mark) or 0)

    def is_behind(self) -> bool:
        """Whether the journal holds changes that Chroma has not, as far as can be told without opening Chroma."""
        last = self._history.last_seq()
        is_gone = self._place.folder is not None and not self._place.folder.is_dir()
        return last > 0 and (self._held != last or is_gone)

    def note(self, changes: int) -> None:
        """The journal grew; wake the thread when enough has come together."""
        self._pending += changes
        if self._pending >= BATCH:
            self.wake()

    def wake(self) -> None:
        """Catch up soon, in the background."""
        self._pending = 0
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._follow, name="experiential-index", daemon=True
            )
            self._thread.start()
        self._wake.set()

    def flush(self) -> None:
        """Catch up now.

        Raises:
            IndexLostError: Chroma does not answer.
        """
        with self._work:
            self._catch_up()

    def rebuild(self) -> int:
        """Make the collection again from the journal; gives the number of entries indexed."""
        with self._work:
            self.opened().clear()
            self._catch_up()
            return len(self.opened())

    def opened(self) -> ChromaIndex:
        """The index, opened on first use and cleared when it cannot belong to this journal.

        Raises:
            IndexLostError: Chroma does not answer.
        """
        if (index := self._index) is not None:
            return index
        with self._work:
            if self._index is None:
                index = self._place.open()
                if not self._is_credible(index):
                    index.clear()
                self._index = index
            return self._index

    def searchable(self) -> ChromaIndex:
        """The index, when it holds all that it was said to hold.

        Raises:
            IndexLostError: it does not, or does not answer.
        """
        index = self.opened()
        if index.head < self._held:
            raise IndexLostError(
                f"Expected Chroma at position {self._held} of the journal, got it at {index.head}"
            )
        return index

    def lose(self) -> None:
        """The index did not answer: open it anew in the background, and catch up as soon as that can be done; waits for nothing."""
        self._is_lost = True
        self.wake()

    def stop(self, *, catch_up: bool = True) -> None:
        """End the thread and let Chroma go, after catching up when behind."""
        self._stopping = True
        self._halt.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self._work:
            if catch_up and self.is_behind():
                self._try_catch_up()
            self._drop()

    def _drop(self) -> None:
        with self._work:
            index, self._index = self._index, None
        if index is not None:
            index.close()

    def _is_credible(self, index: ChromaIndex) -> bool:
        last, head = self._history.last_seq(), index.head
        if head == 0:
            return len(index) == 0
        return (
            head <= last
            and index.stamp == self._history.stamp(head)
            and (head < last or len(index) == self._history.live_count())
        )

    def _follow(self) -> None:
        while not self._stopping:
            self._wake.wait(None if self.failure is None else self._pause)
            self._wake.clear()
            while self._is_time() and self._try_catch_up(1):
                pass

    def _is_time(self) -> bool:
        """Wait while the bank has no need of Chroma and is busy: Chroma stops the whole process while it writes. False at the end."""
        while not self._stopping and (left := self.patience()) > 0:
            self._halt.wait(left)
        return not self._stopping

    def _try_catch_up(self, batches: int | None = None) -> bool:
        """Catch up by so many batches, or wholly; gives whether there is more to write, as far as is known."""
        with self._work:
            outcome = attempted(partial(self._catch_up, batches))
        if not isinstance(outcome, Exception):
            return outcome
        self._pause = PAUSES[0] if self.failure is None else min(2 * self._pause, PAUSES[1])
        if self.failure is None:
            _log.warning(
                "Chroma could not be written (%s); the journal is complete, the index is replayed"
                " when it can be",
                outcome,
            )
        self.failure = outcome
        self._drop()
        return False

    def _catch_up(self, batches: int | None = None) -> bool:
        if self._is_lost:
            self._is_lost = False
            self._drop()
        index = self.opened()
        written = 0
        while changes := self._history.changes_after(index.head, BATCH):
            if written == batches:
                return True
            index.apply(changes, self._history.stamp(changes[-1][0]))
            self._advance(changes[-1][0])
            written += 1
        self._advance(index.head)
        self._history.set_meta(self._place.mark, str(index.head))
        if self.failure is not None:
            _log.warning("Chroma has caught up with the journal again")
            self.failure = None
        return False

    def _advance(self, seq: int) -> None:
        self._held = seq
        if self.on_advance is not None:
            self.on_advance(seq)


def _at_once() -> float:
    """Nothing to wait for."""
    return 0.0
