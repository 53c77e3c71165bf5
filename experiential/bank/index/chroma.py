"""Chroma as an index store: embedded in a folder, or a server given by its address."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from experiential.bank.index.embed import Vector
from experiential.bank.index.store import Indexed
from experiential.bank.storage.tables import Stored
from experiential.errors import BankError
from experiential.types import Experience, Provenance

TOKEN_VARIABLE = "EXPERIENTIAL_CHROMA_TOKEN"
DEFAULT_PORT = 8000
CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 30.0
_NEIGHBOURS = 32
"""Links of an entry in Chroma's graph; with its default of 16, entries whose texts are much alike
cut each other off from the rest.
"""

_started_by = 0
"""The process that first opened a folder; a fork of it lacks the threads of Chroma's runtime, and
would wait for them."""


class ChromaStore:
    """Keep entries in one Chroma collection, made at the first write.

    Args:
        where: a folder, opened in this process, or the address of a server, to which the token of
            the environment is sent along.
        name: of the collection.
    """

    pays_from = 200_000  # extrapolated from benchmarks/results/index_stores.json

    def __init__(self, where: Path | str, name: str) -> None:
        self._where = where
        self._name = name
        self._open()

    def _open(self) -> None:
        from chromadb.errors import NotFoundError

        self._client = _client(self._where)
        self._collection: Any = None
        try:
            with contextlib.suppress(NotFoundError):
                collection = self._client.get_collection(self._name, embedding_function=None)
                collection.count()  # opens its files, damaged ones fail here
                self._collection = collection
        except BaseException:  # a panic of Chroma's Rust part is not an Exception
            self._client.close()
            raise

    def mark(self) -> str:
        """Return the mark of the last write, from the collection's metadata."""
        known: dict[str, Any] = {} if self._collection is None else self._collection.metadata or {}
        return str(known.get("mark", ""))

    def __len__(self) -> int:
        return 0 if self._collection is None else self._collection.count()

    def write(self, put: Sequence[Stored], removed: Sequence[str], mark: str) -> None:
        """Put and remove entries, then keep the mark."""
        made = self._collection is None
        if made:
            self._collection = self._client.get_or_create_collection(
                self._name,
                embedding_function=None,
                configuration={"hnsw": {"space": "cosine", "max_neighbors": _NEIGHBOURS}},
            )
        entries = [stored.experience for stored in put]
        if entries:
            self._collection.upsert(
                ids=[entry.id for entry in entries],
                embeddings=[stored.vector for stored in put],
                documents=[entry.text for entry in entries],
                metadatas=[
                    {"version": entry.version, "kind": entry.kind, "task": entry.task or ""}
                    for entry in entries
                ],
            )
        if removed:
            self._collection.delete(ids=list(removed))
        # Chroma writes its vector files when it is asked next: now, rather than in some search.
        self._collection.count()
        if made and isinstance(self._where, Path):
            _blank_unused(self._where)
        self._collection.modify(metadata={"mark": mark})

    def search(
        self, queries: Vector, n: int, where: Mapping[str, Sequence[str]]
    ) -> list[list[Indexed]]:
        """Return the ``n`` nearest entries of each query by HNSW, best first."""
        if not (count := min(n, len(self))):
            return [[] for _ in queries]
        clauses: list[Any] = [{field: {"$in": list(values)}} for field, values in where.items()]
        found = self._collection.query(
            query_embeddings=queries,
            n_results=count,
            where={"$and": clauses} if len(clauses) > 1 else (clauses or [None])[0],
            include=["metadatas", "distances"],
        )
        rows = zip(found["ids"], found["metadatas"], found["distances"], strict=True)
        return [
            [Indexed(id, int(meta["version"]), 1 - far) for id, meta, far in zip(*row, strict=True)]
            for row in rows
        ]

    def fetch(self, ids: Sequence[str]) -> dict[str, tuple[int, Vector]]:
        """Return version and vector of those of these entries that are here."""
        if self._collection is None or not ids:
            return {}
        found = self._collection.get(ids=list(ids), include=["metadatas", "embeddings"])
        rows = zip(found["ids"], found["metadatas"], found["embeddings"], strict=True)
        return {
            id: (int(meta["version"]), np.asarray(vector, dtype=np.float32))
            for id, meta, vector in rows
        }

    def entries(self) -> list[Experience]:
        """Return what is known here of all entries: version, text, kind and task."""
        if self._collection is None:
            return []
        found = self._collection.get(include=["metadatas", "documents"])
        return [
            Experience(
                id=id,
                version=int(meta["version"]),
                text=text,
                kind=str(meta["kind"]),
                task=str(meta["task"]) or None,
                provenance=Provenance(cause="import"),
            )
            for id, meta, text in zip(
                found["ids"], found["metadatas"], found["documents"], strict=True
            )
        ]

    def clear(self) -> None:
        """Delete the collection, and start the client again, which lets go of its files."""
        if self._collection is not None:
            self._client.delete_collection(self._name)
        self.close()
        self._open()

    def close(self) -> None:
        """Let Chroma go."""
        self._client.close()


def _blank_unused(folder: Path) -> None:
    """Overwrite the room for entries in new graphs with zeros.

    Chroma writes that room as it finds it: memory of this process which was used before, and may
    hold an API key.
    """
    for header in folder.glob("*/header.bin"):
        _version, _offset, _room, entries = struct.unpack_from("=iQQQ", header.read_bytes())
        if not entries:
            for name in ("data_level0.bin", "length.bin"):
                file = header.with_name(name)
                with file.open("r+b") as room:
                    room.write(bytes(file.stat().st_size))


def _client(where: Path | str) -> Any:
    import chromadb
    from chromadb.config import Settings

    settings = Settings(anonymized_telemetry=False)
    if isinstance(where, Path):
        global _started_by
        if _started_by not in (0, os.getpid()):
            raise BankError(
                f"Expected a process of its own to run Chroma in, got a fork of process"
                f" {_started_by}, which runs it; start processes by the method 'spawn', or open the"
                " bank with store='exact'"
            )
        _started_by = os.getpid()
        start: Any = partial(chromadb.PersistentClient, str(where), settings)
        try:
            return start()
        except BaseException:
            # Chroma keeps a client whose start failed, and drops it when it is asked once more.
            with contextlib.suppress(BaseException):
                start().close()
            raise
    token = os.environ.get(TOKEN_VARIABLE)
    headers = {"Authorization": f"Bearer {token}", "X-Chroma-Token": token} if token else {}
    address, timeout = urlsplit(where), httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    httpx.get(f"{where}/api/v2/heartbeat", headers=headers, timeout=timeout).raise_for_status()
    client = chromadb.HttpClient(
        host=address.hostname or "",
        port=address.port or DEFAULT_PORT,
        ssl=address.scheme == "https",
        headers=headers,
        settings=settings,
    )
    # Chroma sets no time-out of its own and would wait for ever.
    server: Any = getattr(client, "_server")  # noqa: B009  (private, so without a type)
    server._session.timeout = timeout
    return client
