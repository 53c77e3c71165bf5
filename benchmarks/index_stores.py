"""Compare the index stores with the exact matrix in memory: processor time and recall.

    pip install faiss-cpu hnswlib  # measured where they are installed
    python -m benchmarks.index_stores [--sizes 10000 30000 100000]
        [--results benchmarks/results/index_stores.json]

Each arm answers the same queries, 384 numbers each, ten hits: alone, 32 and 512 at once. Times are
processor milliseconds of all threads, the best of several turns in which the arms alternate, so
that arms of one size compare. Recall@10 is the share of the ten exactly nearest that were found.
Points are clustered, as lessons of many tasks are. ``made_ms`` is the processor time of one entry
when the index is made.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.bank import DIMENSION, HITS, QUERIES, Lookup
from experiential.bank.index.chroma import ChromaStore
from experiential.bank.index.embed import Vector
from experiential.bank.index.nearest import VectorIndex
from experiential.bank.search.where import Scope
from experiential.bank.storage.tables import Stored
from experiential.types import Experience, Provenance

BATCHES = {1: 64, 32: 256, QUERIES: QUERIES}
"""Queries of one turn, by how many are asked at once."""
TURNS = 3
LINKS, MADE_WITH, ASKED_WITH = 32, 100, 64
"""Of the graphs: neighbours, and width of the search when they are made and asked."""
Found = list[list[int]]
Search = Callable[[Vector], Found]


def exact(vectors: Vector, _: Path) -> Search:
    """Compare with every vector, as a bank does in memory."""
    index = VectorIndex()
    snapshot = index.apply((one.experience.id, one, 0) for one in stored(vectors))
    return lambda queries: [
        [int(hit.item.id) for hit in row]
        for row in snapshot.search(queries, HITS, [Scope()] * len(queries))
    ]


def chroma(vectors: Vector, folder: Path) -> Search:
    """Ask the store ``chroma`` of a bank, in a folder."""
    store = ChromaStore(folder, "benchmark")
    entries = stored(vectors)
    for start in range(0, len(entries), 4096):
        store.write(entries[start : start + 4096], [], str(start))
    return lambda queries: [[int(hit.id) for hit in row] for row in store.search(queries, HITS, {})]


def faiss_flat(vectors: Vector, _: Path) -> Search:
    """Compare with every vector by FAISS."""
    import faiss  # pyright: ignore[reportMissingImports]

    index: Any = faiss.IndexFlatIP(DIMENSION)  # pyright: ignore
    index.add(vectors)
    return lambda queries: index.search(queries, HITS)[1].tolist()


def faiss_graph(vectors: Vector, folder: Path) -> Search:
    """Ask the store ``faiss`` of a bank, a graph."""
    from experiential.bank.index.graph import FaissStore

    store = FaissStore(folder, "benchmark")
    store.write(stored(vectors), [], "all")
    return lambda queries: [[int(hit.id) for hit in row] for row in store.search(queries, HITS, {})]


def hnswlib(vectors: Vector, _: Path) -> Search:
    """Ask a graph of hnswlib with the numbers of the store ``faiss``."""
    import hnswlib as library  # pyright: ignore[reportMissingImports]

    index: Any = library.Index("ip", DIMENSION)  # pyright: ignore
    index.init_index(len(vectors), ef_construction=MADE_WITH, M=LINKS)
    index.set_num_threads(1)
    index.set_ef(ASKED_WITH)
    index.add_items(vectors)
    return lambda queries: index.knn_query(queries, HITS)[0].tolist()


ARMS: dict[str, tuple[str, Callable[[Vector, Path], Search]]] = {
    "exact": ("numpy", exact),
    "chroma": ("chromadb", chroma),
    "faiss flat": ("faiss", faiss_flat),
    "faiss": ("faiss", faiss_graph),
    "hnswlib": ("hnswlib", hnswlib),
}


def stored(vectors: Vector) -> list[Stored]:
    """Return an entry for each vector, its id the row."""
    made = Provenance(cause="import")
    return [
        Stored(
            Experience(id=str(row), version=1, text=f"entry {row}", provenance=made),
            vector,
            frozenset(),
        )
        for row, vector in enumerate(vectors)
    ]


def nearest(vectors: Vector, queries: Vector) -> npt.NDArray[np.intp]:
    """Return the rows of the ten nearest of each query."""
    return np.argpartition(-(queries @ vectors.T), HITS, axis=1)[:, :HITS]


def measure(count: int) -> dict[str, dict[str, float]]:
    """Return the figures of each arm with so many entries."""
    table = Lookup(count + QUERIES).table
    vectors, queries = table[:count], table[count:]
    truth = nearest(vectors, queries)
    figures: dict[str, dict[str, float]] = {}
    searches: dict[str, Search] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, (module, arm) in ARMS.items():
            if importlib.util.find_spec(module) is None:
                continue
            begin = time.process_time()
            searches[name] = arm(vectors, Path(folder))
            made = time.process_time() - begin
            found = searches[name](queries)
            figures[name] = {
                "made_ms": made / count * 1e3,
                "recall": float(
                    np.mean([np.isin(t, f).mean() for t, f in zip(truth, found, strict=True)])
                ),
            }
            print(count, name, figures[name], flush=True)
        for size, asked in BATCHES.items():
            for _ in range(TURNS):
                for name, search in searches.items():
                    begin = time.process_time()
                    for start in range(0, asked, size):
                        search(queries[start : start + size])
                    spent = (time.process_time() - begin) / (asked // size) * 1e3
                    best = figures[name].get(f"{size}_ms", spent)
                    figures[name][f"{size}_ms"] = min(best, spent)
    return figures


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 30_000, 100_000])
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results/index_stores.json")
    )
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.results.exists():  # sizes measured before are kept
        found = json.loads(options.results.read_text(encoding="utf-8"))
    for size in options.sizes:
        found[str(size)] = measure(size)
        print(json.dumps(found[str(size)], indent=1), flush=True)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
