"""FAISS as an index store: an HNSW graph in memory, saved into a folder (extra ``faiss``)."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from experiential.bank.index.embed import Vector
from experiential.bank.index.store import Indexed
from experiential.bank.storage.tables import Stored
from experiential.errors import MissingExtraError

_NEIGHBOURS, _MADE_WITH, _ASKED_WITH = 32, 100, 64
"""Links of an entry, and widths of the search for them and of a query's."""
_AT_ONCE = 32
"""Entries linked before searches, which wait meanwhile, are let in."""
_UNSAVED = 0.1
"""Share of the rows that may be unsaved; a killed process has as many replayed from the journal."""


class FaissStore:
    """Keep entries in one graph of FAISS; an old version stays in it, unseen, until most are old.

    The graph is saved when it is closed and when it has grown by a tenth.

    Args:
        folder: of the store; each name has a folder in it, whose files the bank seals.
        name: of the entries.
    """

    pays_from = 30_000  # benchmarks/results/index_stores.json

    def __init__(self, folder: Path, name: str) -> None:
        try:
            import faiss  # pyright: ignore[reportMissingTypeStubs]
        except ImportError:
            raise MissingExtraError("faiss-cpu", "faiss") from None
        self._faiss: Any = faiss
        self._folder = folder / name
        self._lock = threading.Lock()
        self._index: Any = None
        self._items: list[tuple[str, int]] = []  # id and version of each row
        self._rows: dict[str, int] = {}  # of the versions that count
        self._mark = ""
        self._unsaved = 0
        if (self._folder / "rows.json").exists():
            known = json.loads((self._folder / "rows.json").read_text(encoding="utf-8"))
            self._mark, self._rows = known["mark"], known["rows"]
            self._items = [(id, version) for id, version in known["items"]]
            if self._items:
                self._index = faiss.read_index(str(self._folder / "graph.faiss"))
                if self._index.ntotal != len(self._items):
                    raise ValueError(f"{self._index.ntotal} rows for {len(self._items)} entries")

    def mark(self) -> str:
        """Return the mark of the last write."""
        return self._mark

    def __len__(self) -> int:
        return len(self._rows)

    def write(self, put: Sequence[Stored], removed: Sequence[str], mark: str) -> None:
        """Put and remove entries, then keep the mark; save it all now and then."""
        items = [(stored.experience.id, stored.experience.version) for stored in put]
        for start in range(0, len(put), _AT_ONCE):
            vectors = np.stack([stored.vector for stored in put[start : start + _AT_ONCE]])
            with self._lock:
                if self._index is None:
                    self._index = self._graph(vectors.shape[1])
                self._add(self._index, vectors)
                for id, version in items[start : start + _AT_ONCE]:
                    self._rows[id] = len(self._items)
                    self._items.append((id, version))
        with self._lock:
            for id in removed:
                self._rows.pop(id, None)
        if len(self._items) > 64 + 2 * len(self._rows):  # mostly old versions: make the graph anew
            rows = list(self._rows.values())
            items = [self._items[row] for row in rows]
            graph: Any = None
            if rows:
                vectors = self._vectors(rows)
                graph = self._graph(vectors.shape[1])
                self._add(graph, vectors)
            with self._lock:
                self._index, self._items = graph, items
                self._rows = {id: row for row, (id, _) in enumerate(items)}
        self._mark = mark
        self._unsaved += len(put) + len(removed)
        if self._unsaved > _UNSAVED * len(self._items) + 1000:
            self._save()

    def search(
        self, queries: Vector, n: int, where: Mapping[str, Sequence[str]]
    ) -> list[list[Indexed]]:
        """Return the ``n`` nearest entries of each query by HNSW, best first."""
        with self._lock, self._one_thread():
            if not self._rows:
                return [[] for _ in queries]
            count = min(len(self._items), math.ceil(n * len(self._items) / len(self._rows)))
            wide = self._faiss.SearchParametersHNSW(efSearch=max(_ASKED_WITH, count))
            cosines, rows = self._index.search(queries, count, params=wide)
            found: list[list[Indexed]] = []
            near: list[int]
            for near, scores in zip(rows.tolist(), cosines.tolist(), strict=True):
                hits = [
                    Indexed(self._items[row][0], self._items[row][1], cosine)
                    for row, cosine in zip(near, scores, strict=True)
                    if row >= 0 and self._rows.get(self._items[row][0]) == row
                ]
                found.append(hits[:n])
            return found

    def fetch(self, ids: Sequence[str]) -> Mapping[str, tuple[int, Vector]]:
        """Return version and vector of those of these entries that are here."""
        with self._lock:
            rows = {id: self._rows[id] for id in ids if id in self._rows}
            vectors = self._vectors(list(rows.values()))
            return {
                id: (self._items[row][1], vector)
                for (id, row), vector in zip(rows.items(), vectors, strict=True)
            }

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._index, self._items, self._rows = None, [], {}
        self._mark = ""
        self._save()

    def close(self) -> None:
        """Save what is unsaved."""
        if self._unsaved:
            self._save()

    def _graph(self, dimension: int) -> Any:
        metric = self._faiss.METRIC_INNER_PRODUCT
        graph = self._faiss.IndexHNSWFlat(dimension, _NEIGHBOURS, metric)
        graph.hnsw.efConstruction = _MADE_WITH
        return graph

    def _add(self, graph: Any, vectors: Vector) -> None:
        with self._one_thread():
            graph.add(vectors)

    def _vectors(self, rows: Sequence[int]) -> Vector:
        if not rows:
            return np.zeros((0, 0), dtype=np.float32)
        return self._index.reconstruct_batch(np.array(rows, dtype=np.int64))

    @contextmanager
    def _one_thread(self) -> Generator[None]:
        """Let FAISS start no threads, since a fork of this process would wait for them."""
        before = self._faiss.omp_get_max_threads()
        self._faiss.omp_set_num_threads(1)
        try:
            yield
        finally:
            self._faiss.omp_set_num_threads(before)

    def _save(self) -> None:
        """Write both files; a kill in between breaks their seal."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._index is not None:
            part = self._folder / "graph.part"
            self._faiss.write_index(self._index, str(part))
            os.replace(part, self._folder / "graph.faiss")
        known = {"mark": self._mark, "rows": self._rows, "items": self._items}
        part = self._folder / "rows.part"
        part.write_text(json.dumps(known), encoding="utf-8")
        os.replace(part, self._folder / "rows.json")
        self._unsaved = 0
