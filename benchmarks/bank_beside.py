"""Measure banks beside vector libraries: opening, searching, adding, memory and disk.

    pip install faiss-cpu hnswlib lancedb sqlite-vec  # measured where they are installed
    pip install pysqlite3-binary  # for sqlite-vec, where Python loads no extensions of SQLite
    python -m benchmarks.bank_beside [--sizes 10000 100000] [--arms bank reader ...]
        [--results benchmarks/results/bank_beside.json]

Each arm is filled by one process and measured by another: opening up to the first answer, then
single queries for ten of 384 numbers, then additions, if each is on the disk when it returns. Times
are processor milliseconds of all threads. ``open_mib`` is memory of the process itself,
``mapped_mib`` file pages that it maps. Banks and Chroma keep texts, the others vectors alone.
Points are clustered, as lessons of many tasks are. Of a bank, ``bank`` writes, ``reader`` reads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bank import DIMENSION, HITS, Lookup
from benchmarks.bank_size import cost, memory
from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import Vector

SEARCHES, ADDS = 100, 10
LINKS, MADE_WITH, ASKED_WITH = 32, 100, 64
"""Of the graphs: neighbours, and width of the search when they are made and asked."""


@dataclass(frozen=True)
class Opened:
    """Hold what an arm does with rows of the table; ``add`` is None where it rewrites a file."""

    search: Callable[[int], list[int]]
    add: Callable[[int], object] | None = None


class Arm(NamedTuple):
    """Hold the package that an arm needs, and how it is filled and opened."""

    package: str
    fill: Callable[[Path, Vector], object]
    open: Callable[[Path, Vector], Opened]


def embedder(table: Vector) -> Lookup:
    """Return an embedder of row numbers."""
    lookup = Lookup(1)
    lookup.table = table
    return lookup


def fill_bank(folder: Path, vectors: Vector) -> None:
    """Write entries whose texts are their row numbers."""
    with FolderBank(folder / "bank", embedder=embedder(vectors), store="exact") as bank:
        for start in range(0, len(vectors), 1000):
            bank.add_many([str(n) for n in range(start, min(len(vectors), start + 1000))])


def open_bank(folder: Path, table: Vector, *, read_only: bool = False) -> Opened:
    """Open a bank."""
    bank = FolderBank(folder / "bank", embedder=embedder(table), read_only=read_only)

    def search(row: int) -> list[int]:
        return [int(hit.experience.text) for hit in bank.search(str(row), k=HITS)]

    return Opened(search, None if read_only else lambda row: bank.add(str(row)))


def open_reader(folder: Path, table: Vector) -> Opened:
    """Open a bank for reading."""
    return open_bank(folder, table, read_only=True)


def fill_faiss(folder: Path, vectors: Vector, *, graph: bool = False) -> None:
    """Write a file of FAISS."""
    faiss: Any = importlib.import_module("faiss")

    index: Any = faiss.IndexFlatIP(DIMENSION)
    if graph:
        index = faiss.IndexHNSWFlat(DIMENSION, LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = MADE_WITH
    index.add(vectors)
    faiss.write_index(index, str(folder / "index"))


def fill_faiss_graph(folder: Path, vectors: Vector) -> None:
    """Write a graph of FAISS."""
    fill_faiss(folder, vectors, graph=True)


def open_faiss(folder: Path, table: Vector) -> Opened:
    """Read a file of FAISS."""
    faiss: Any = importlib.import_module("faiss")

    index: Any = faiss.read_index(str(folder / "index"))
    if hasattr(index, "hnsw"):
        index.hnsw.efSearch = ASKED_WITH
    return Opened(lambda row: index.search(table[row : row + 1], HITS)[1][0].tolist())


def fill_hnswlib(folder: Path, vectors: Vector) -> None:
    """Write a graph of hnswlib."""
    hnswlib: Any = importlib.import_module("hnswlib")

    index: Any = hnswlib.Index("ip", DIMENSION)
    index.init_index(len(vectors), ef_construction=MADE_WITH, M=LINKS)
    index.set_num_threads(1)
    index.add_items(vectors)
    index.save_index(str(folder / "index"))


def open_hnswlib(folder: Path, table: Vector) -> Opened:
    """Read a graph of hnswlib."""
    hnswlib: Any = importlib.import_module("hnswlib")

    index: Any = hnswlib.Index("ip", DIMENSION)
    index.load_index(str(folder / "index"))
    index.set_num_threads(1)
    index.set_ef(ASKED_WITH)
    return Opened(lambda row: index.knn_query(table[row : row + 1], HITS)[0][0].tolist())


def _records(vectors: Vector, first: int = 0) -> list[dict[str, Any]]:
    return [{"id": first + row, "vector": vector} for row, vector in enumerate(vectors)]


def fill_lance(folder: Path, vectors: Vector) -> None:
    """Write a table of LanceDB, without an index."""
    lancedb: Any = importlib.import_module("lancedb")

    base: Any = lancedb.connect(str(folder))
    table = base.create_table("vectors", _records(vectors[:10_000]))
    for start in range(10_000, len(vectors), 10_000):
        table.add(_records(vectors[start : start + 10_000], start))


def open_lance(folder: Path, table: Vector) -> Opened:
    """Open a table of LanceDB, which compares every vector."""
    lancedb: Any = importlib.import_module("lancedb")

    held: Any = lancedb.connect(str(folder)).open_table("vectors")

    def search(row: int) -> list[int]:
        found = held.search(table[row]).metric("dot").limit(HITS).select(["id"]).to_list()
        return [one["id"] for one in found]

    def add(row: int) -> None:
        held.add(_records(table[row : row + 1], row))

    return Opened(search, add)


def extensible_sqlite() -> Any:
    """Return a module of SQLite that loads extensions, None where there is none."""
    for name in ("sqlite3", "pysqlite3"):
        module: Any = importlib.import_module(name) if importlib.util.find_spec(name) else None
        if hasattr(getattr(module, "Connection", None), "enable_load_extension"):
            return module
    return None


def _sqlite_vec(folder: Path) -> Any:
    sqlite_vec: Any = importlib.import_module("sqlite_vec")

    base = extensible_sqlite().connect(folder / "vectors.sqlite", isolation_level=None)
    base.enable_load_extension(True)
    sqlite_vec.load(base)
    base.execute("PRAGMA journal_mode=WAL")
    base.execute("PRAGMA synchronous=FULL")
    return base


def fill_sqlite_vec(folder: Path, vectors: Vector) -> None:
    """Write a table of sqlite-vec."""
    base = _sqlite_vec(folder)
    base.execute(
        f"CREATE VIRTUAL TABLE held USING vec0(vector float[{DIMENSION}] distance_metric=cosine)"
    )
    base.execute("BEGIN")
    base.executemany(
        "INSERT INTO held (rowid, vector) VALUES (?, ?)",
        ((row, vector.tobytes()) for row, vector in enumerate(vectors)),
    )
    base.execute("COMMIT")
    base.close()


def open_sqlite_vec(folder: Path, table: Vector) -> Opened:
    """Open a table of sqlite-vec, which compares every vector."""
    base = _sqlite_vec(folder)
    asked = f"SELECT rowid FROM held WHERE vector MATCH ? AND k = {HITS} ORDER BY distance"

    def search(row: int) -> list[int]:
        return [one[0] for one in base.execute(asked, (table[row].tobytes(),))]

    def add(row: int) -> None:
        written = (row, table[row].tobytes())
        base.execute("INSERT INTO held (rowid, vector) VALUES (?, ?)", written)

    return Opened(search, add)


def _collection(folder: Path) -> Any:
    chromadb: Any = importlib.import_module("chromadb")
    client = chromadb.PersistentClient(str(folder / "chroma"))
    return client.get_or_create_collection("held", configuration={"hnsw": {"space": "ip"}})


def fill_chroma(folder: Path, vectors: Vector) -> None:
    """Write a collection of Chroma, with texts."""
    held = _collection(folder)
    for start in range(0, len(vectors), 2000):
        names = [str(n) for n in range(start, min(len(vectors), start + 2000))]
        held.add(ids=names, embeddings=vectors[start : start + 2000], documents=names)


def open_chroma(folder: Path, table: Vector) -> Opened:
    """Open a collection of Chroma."""
    held = _collection(folder)

    def search(row: int) -> list[int]:
        found = held.query(query_embeddings=table[row : row + 1], n_results=HITS, include=[])
        return [int(id) for id in found["ids"][0]]

    def add(row: int) -> None:
        held.add(ids=[str(row)], embeddings=table[row : row + 1], documents=[str(row)])

    return Opened(search, add)


ARMS = {
    "bank": Arm("numpy", fill_bank, open_bank),
    "reader": Arm("numpy", fill_bank, open_reader),
    "faiss flat": Arm("faiss", fill_faiss, open_faiss),
    "faiss": Arm("faiss", fill_faiss_graph, open_faiss),
    "hnswlib": Arm("hnswlib", fill_hnswlib, open_hnswlib),
    "lancedb": Arm("lancedb", fill_lance, open_lance),
    "sqlite-vec": Arm("sqlite_vec", fill_sqlite_vec, open_sqlite_vec),
    "chroma": Arm("chromadb", fill_chroma, open_chroma),
}


def run(name: str, table: Vector, folder: Path, *, fill: bool) -> dict[str, float]:
    """Fill the folder of an arm, or open and measure it."""
    arm, count = ARMS[name], len(table) - SEARCHES - ADDS
    begin = time.process_time()
    if fill:
        arm.fill(folder, table[:count])
        return {"fill_ms_per_entry": cost(begin) / count}
    importlib.import_module(arm.package)
    before, begin = memory("RssAnon"), time.process_time()
    opened = arm.open(folder, table)
    search, add = opened.search, opened.add
    search(count)
    found = {"open_ms": cost(begin), "open_mib": memory("RssAnon") - before}
    recall, times = list[float](), list[float]()
    for row in range(count, count + SEARCHES):
        nearest = np.argpartition(-(table[:count] @ table[row]), HITS)[:HITS]
        begin = time.process_time()
        got = search(row)
        times.append(cost(begin))
        recall.append(len(set(got) & set(nearest.tolist())) / HITS)
    found |= {"search_p50_ms": median(times), "search_p99_ms": quantiles(times, n=100)[-1]}
    found |= {"recall": float(np.mean(recall)), "mapped_mib": memory("RssFile")}
    if add is not None:
        times.clear()
        for row in range(len(table) - ADDS, len(table)):
            begin = time.process_time()
            add(row)
            times.append(cost(begin))
        found["add_ms"] = median(times)
    return found


def measured(name: str, table: Path, folder: Path, mode: str) -> dict[str, float]:
    """Return what another process measures."""
    command = [sys.executable, "-m", "benchmarks.bank_beside", "--measure", name, str(table)]
    done = subprocess.run(
        [*command, str(folder), mode], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure every arm at every size, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        name, table, folder, mode = arguments.measure
        print(json.dumps(run(name, np.load(table), Path(folder), fill=mode == "fill")))
        return
    results: Path | None = arguments.results
    figures: dict[str, dict[str, Any]] = {}
    if results is not None and results.is_file():
        figures = json.loads(results.read_text())
    for count in arguments.sizes:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            table = Path(scratch) / "table.npy"
            np.save(table, Lookup(count + SEARCHES + ADDS).table)
            for name in arguments.arms:
                if importlib.util.find_spec(ARMS[name].package) is None:
                    continue
                if name == "sqlite-vec" and extensible_sqlite() is None:
                    continue
                folder = Path(scratch) / name.replace(" ", "-")
                folder.mkdir()
                found = measured(name, table, folder, "fill")
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                found["disk_bytes_per_entry"] = size / count
                found |= measured(name, table, folder, "open")
                found = {key: round(value, 3) for key, value in found.items()}
                figures.setdefault(str(count), {})[name] = found
                print(count, name, json.dumps(found), flush=True)
                if results is not None:
                    results.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
