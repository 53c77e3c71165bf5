"""Measure how fast the bank is, as ratios within one run.

    pip install faiss-cpu  # the yardstick; without it a plain NumPy product stands in
    python -m benchmarks.bank [--sizes 1000 10000 20000 100000] [--only crowd ...]
        [--before CHECKOUT] [--results benchmarks/results/bank.json]

* ``search``: a batch of 512 queries, 384 numbers each, ten hits: from vectors (the resident index
  or, in a large bank, what the bank uses), and from text with a warm cache, beside an exact FAISS
  index and a Chroma collection of the same vectors.
* ``concurrent``: 512 single queries at once through the manager, as tasks of one event loop and as
  threads; ``distinct`` ones, and ``groups`` of eight that ask the same, as the members of a group
  do; and ``spread`` over one second, as 512 environments ask; milliseconds at the median and the
  99th percentile, with the selection of training and with ``evidence``.
* ``crowd``: processor milliseconds, garbage collection included, of 512 different queries at one
  moment, and their latency: as tasks of one event loop by three strategies, from threads, and from
  vectors alone, with rounded vectors first and with all compared in float32; of one query
  (``one_*``, the mean of a hundred); and of parts that nothing can save: the product of rounded
  vectors, 512 futures, and the look-up of cached vectors. All take turns. With ``--before``, the
  folder of another working copy, its code takes turns with this one. ``other_hits`` counts the
  queries that have other hits by rounding.
* ``writes``: durable adds a second one by one, in one commit, by 4 and by 64 threads; beside
  one-by-one adds to Chroma; and the 99th percentile of a search while four threads write, over the
  same without.
* ``size``: bytes of memory and of disk per entry, and the time to open the bank again.
* ``step``: microseconds that the wrapper adds to an environment step without retrieval.

Arms alternate and each figure is the best of several repeats: other work on the machine makes
things slower, never faster. ``--only`` measures some parts (a size, or a name above) and keeps the
others of the results as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.index import coarse
from experiential.bank.index.embed import Vector
from experiential.bank.manager import ExperienceManager
from experiential.bank.search.where import Scope
from experiential.envs.text_env import UnicodeText
from experiential.wrappers.experience import ExperienceWrapper

DIMENSION, QUERIES, HITS, REPEATS = 384, 512, 10, 5
_STRATEGIES = ("diverse", "nearest", "evidence")
_ONE = tuple(f"one_{strategy}" for strategy in _STRATEGIES)
_CROWD = (*_STRATEGIES, "diverse_threads", "vectors", "vectors_float32")
_FLOORS = ("product", "futures", "embedding")


class Lookup:
    """Embed by lookup: text ``n`` has row n of a table.

    The points are clustered, as lessons of many tasks are.
    """

    id = "benchmark-lookup"

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        centres = rng.standard_normal((max(1, count // 50), DIMENSION))
        points = centres[rng.integers(len(centres), size=count)] + 0.5 * rng.standard_normal(
            (count, DIMENSION)
        )
        self.table: Vector = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(
            np.float32
        )

    def __call__(self, texts: Sequence[str]) -> Vector:
        """Return rows of the table."""
        return self.table[[int(text) for text in texts]]


def best(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the seconds of the quickest of several calls."""
    times: list[float] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def exact_search(vectors: Vector, queries: Vector) -> tuple[str, Callable[[], object]]:
    """Return an exact inner-product search: FAISS where it is installed."""
    if importlib.util.find_spec("faiss") is None:
        return "numpy", lambda: np.argpartition(-(queries @ vectors.T), HITS, axis=1)[:, :HITS]
    import faiss  # pyright: ignore[reportMissingImports]

    index: Any = faiss.IndexFlatIP(DIMENSION)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    index.add(vectors)
    return "faiss", lambda: index.search(queries, HITS)


def chroma_collection(folder: Path, vectors: Vector) -> Any:
    """Return a persistent collection that holds the vectors."""
    import chromadb
    from chromadb.config import Settings

    client = chromadb.PersistentClient(
        path=str(folder), settings=Settings(anonymized_telemetry=False)
    )
    collection: Any = client.create_collection(
        "benchmark", embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
    )
    for start in range(0, len(vectors), 4000):
        part = vectors[start : start + 4000]
        collection.add(ids=[str(start + i) for i in range(len(part))], embeddings=part.tolist())
    return collection


def search(count: int, folder: Path) -> dict[str, Any]:
    """Measure a batch of queries against ``count`` entries, in seconds.

    Memory, disk and opening time of the bank come with it.
    """
    lookup = Lookup(count + QUERIES)
    texts, asked = [str(i) for i in range(count)], [str(count + i) for i in range(QUERIES)]
    vectors, queries = lookup.table[:count], lookup.table[count:]
    with ExperienceBank(folder / "bank", embedder=lookup) as bank:
        for start in range(0, count, 5000):
            bank.add_many(texts[start : start + 5000])
        bank.flush_index()
    gc.collect()
    before, begin = _resident(), time.perf_counter()
    with ExperienceBank(folder / "bank", embedder=lookup) as bank:
        opened, memory = time.perf_counter() - begin, _resident() - before
        bank.search(asked, k=HITS)  # warms the cache
        state, nobody = (
            bank._state,
            [Scope()] * QUERIES,
        )  # pyright: ignore[reportPrivateUsage]  (what a search does after embedding)
        seconds = {
            "text": best(lambda: bank.search(asked, k=HITS)),
            "vectors": best(
                lambda: state.nearest.search(queries, HITS, lambda: state.entries, nobody)
            ),
        }
    name, exact = exact_search(vectors, queries)
    seconds[name] = best(exact)
    collection = chroma_collection(folder / "chroma", vectors)
    wanted = queries.tolist()
    seconds["chroma"] = best(lambda: collection.query(query_embeddings=wanted, n_results=HITS), 2)
    disk = sum(p.stat().st_size for p in (folder / "bank").rglob("*") if p.is_file())
    return {
        "seconds": seconds,
        f"vectors_over_{name}": seconds["vectors"] / seconds[name],
        "vectors_over_chroma": seconds["vectors"] / seconds["chroma"],
        "open_s": opened,
        "memory_bytes_per_entry": memory / count,
        "disk_bytes_per_entry": disk / count,
    }


def concurrent(count: int, folder: Path) -> dict[str, dict[str, float]]:
    """Measure 512 single queries at once, through the manager, on cached embeddings."""
    lookup = Lookup(count + QUERIES)
    found: dict[str, dict[str, float]] = {}
    with ExperienceBank(folder / "bank", embedder=lookup) as bank:
        bank.add_many([str(i) for i in range(count)])
        bank.flush_index()
        for strategy, prefix in (("diverse", ""), ("evidence", "evidence_")):
            with (
                ExperienceManager(
                    bank, retrieval={"floor": -1.0, "strategy": strategy}, share_queue=False
                ) as manager,
                ThreadPoolExecutor(QUERIES) as pool,
            ):
                for name, each in (("distinct", 1), ("groups", 8)):
                    asked = [str(count + i // each) for i in range(QUERIES)]
                    found[f"{prefix}tasks_{name}"] = _latency(
                        lambda asked=asked: asyncio.run(_tasks(manager, asked))
                    )
                    found[f"{prefix}threads_{name}"] = _latency(
                        lambda asked=asked: list(pool.map(partial(_timed, manager), asked))
                    )
                asked = [str(count + i) for i in range(QUERIES)]
                starts = np.random.default_rng(0).uniform(0, 1, QUERIES).tolist()
                found[f"{prefix}spread"] = _latency(
                    lambda asked=asked, starts=starts: asyncio.run(_tasks(manager, asked, starts))
                )
    return found


def crowd(count: int, parts: Sequence[str], before: Path | None) -> dict[str, Any]:
    """Measure parts of a crowd with this code and, in turn, with that of another working copy."""
    checkouts = {"now": Path(__file__).parent.parent} | ({"before": before} if before else {})
    children = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--serve-crowd", str(count)],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, checkout in checkouts.items()
    }
    found: dict[str, Any] = {part: {name: [] for name in checkouts} for part in parts}

    def ask(name: str, part: str) -> Any:
        ends = children[name].stdin, children[name].stdout
        assert ends[0] is not None and ends[1] is not None
        ends[0].write(f"{part}\n")
        ends[0].flush()
        return json.loads(ends[1].readline())

    for repeat in range(4 * REPEATS + 1):
        for part in parts:
            for name in sorted(checkouts, reverse=bool(repeat % 2)):
                run = ask(name, part)
                if repeat:  # the first warms up
                    found[part][name].append(run)
    for part, runs in found.items():
        for name, made in runs.items():
            runs[name] = {f"{key}_min": min(one[key] for one in made) for key in made[0]}
            runs[name]["cpu_ms_median"] = float(np.median([one["cpu_ms"] for one in made]))
        if before:
            runs["cpu_ratio"] = runs["now"]["cpu_ms_min"] / runs["before"]["cpu_ms_min"]
            found[part] = runs
    found |= ask("now", "other_hits")
    for child in children.values():
        child.communicate()
    return found


def serve_crowd(count: int, folder: Path) -> None:
    """Measure each part whose name comes in, in the process that the measurement started."""
    lookup = Lookup(count + QUERIES)
    asked, queries = [str(count + i) for i in range(QUERIES)], lookup.table[count:]
    quick, scopes = coarse.int8_product, [Scope()] * QUERIES
    with ExperienceBank(folder / "bank", embedder=lookup) as bank, ThreadPoolExecutor(64) as pool:
        bank.add_many([str(i) for i in range(count)])
        bank.flush_index()
        state = bank._state  # pyright: ignore[reportPrivateUsage]
        work: dict[str, Callable[[], Any]] = {
            "vectors": lambda: state.nearest.search(queries, 16, lambda: state.entries, scopes),
            "futures": lambda: asyncio.run(_futures()),
            "embedding": lambda: bank.embedder(asked),
        }
        work["vectors_float32"] = work["vectors"]
        if (product := quick()) is not None:
            left = np.zeros((count, DIMENSION), np.uint8)
            right = np.zeros((DIMENSION, QUERIES), np.int8)
            parts = [left[start : start + 1024] for start in range(0, count, 1024)]
            work["product"] = lambda: [len(product(part, right)) for part in parts]
        for strategy in _STRATEGIES:
            manager = ExperienceManager(
                bank, retrieval={"floor": -1.0, "strategy": strategy}, share_queue=False
            )
            work[strategy] = lambda manager=manager: asyncio.run(_tasks(manager, asked))
            work[f"{strategy}_threads"] = lambda manager=manager: list(
                pool.map(partial(_timed, manager), asked)
            )
            work[f"one_{strategy}"] = lambda manager=manager: [
                _timed(manager, one) for one in asked[:100]
            ]
        for line in sys.stdin:
            part = line.strip()
            if part == "other_hits":
                answer: dict[str, float] = _other_hits(bank, asked)
            elif part not in work:  # the other working copy has no such product here
                answer = {"cpu_ms": math.nan}
            else:
                coarse.int8_product = (lambda: None) if part.endswith("float32") else quick
                begin = time.process_time()
                seconds = work[part]()
                spent = (time.process_time() - begin) * 1e3
                answer = {"cpu_ms": spent / 100 if part.startswith("one_") else spent}
                if part.removeprefix("one_").removesuffix("_threads") in _STRATEGIES:
                    times = np.array(seconds)
                    for name, quantile in (("p50_ms", 0.5), ("p99_ms", 0.99)):
                        answer[name] = float(np.quantile(times, quantile)) * 1e3
                coarse.int8_product = quick
            sys.stdout.write(f"{json.dumps(answer)}\n")
            sys.stdout.flush()


def _other_hits(bank: FolderBank, asked: Sequence[str]) -> dict[str, float]:
    """Compare the hits with rounded vectors first with those of float32 alone."""
    quick, rows = coarse.int8_product, list[list[list[tuple[str, float]]]]()
    for arm in (quick, lambda: None):
        coarse.int8_product = arm
        found = bank.search(list(asked), k=HITS)
        rows.append([[(one.experience.id, one.score) for one in row] for row in found])
    coarse.int8_product = quick
    gaps = [
        max((abs(one[1] - other[1]) for one, other in zip(*row, strict=True) if one[0] != other[0]))
        for row in zip(*rows, strict=True)
        if [id for id, _ in row[0]] != [id for id, _ in row[1]]
    ]
    return {"other_hits": len(gaps), "their_largest_gap": max(gaps, default=0.0)}


async def _futures() -> None:
    """Let as many tasks as there are queries wait for a future each."""
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(QUERIES)]

    async def one(future: asyncio.Future[None]) -> None:
        await asyncio.sleep(0.0)
        await future

    def resolve() -> None:
        for future in futures:
            future.set_result(None)

    loop.call_later(0.0, resolve)
    await asyncio.gather(*map(one, futures))


def _timed(manager: ExperienceManager, query: str) -> float:
    begin = time.perf_counter()
    manager.search(query)
    return time.perf_counter() - begin


async def _tasks(
    manager: ExperienceManager, queries: Sequence[str], starts: Sequence[float] | None = None
) -> list[float]:
    async def one(query: str, start: float) -> float:
        await asyncio.sleep(start)
        begin = time.perf_counter()
        await manager.asearch(query)
        return time.perf_counter() - begin

    return list(await asyncio.gather(*map(one, queries, starts or [0.0] * len(queries))))


def _latency(crowd: Callable[[], Sequence[float]]) -> dict[str, float]:
    """Return the quickest of several rounds, the first left out."""
    crowd()
    rounds = [np.array(crowd()) for _ in range(REPEATS)]
    quickest = min(rounds, key=lambda times: float(np.quantile(times, 0.99)))
    return {
        "p50_ms": float(np.median(quickest)) * 1e3,
        "p99_ms": float(np.quantile(quickest, 0.99)) * 1e3,
    }


def writes(count: int, folder: Path) -> dict[str, float]:
    """Measure adds a second, and the reads of one reader beside four busy writers."""
    lookup = Lookup(17 * count)
    with ExperienceBank(folder / "bank", embedder=lookup) as bank:
        texts = iter(str(i) for i in range(17 * count))
        one = count / best(lambda: [bank.add(next(texts)) for _ in range(count)], 1)
        many = count / best(lambda: bank.add_many([next(texts) for _ in range(count)]), 1)
        parts = [[next(texts) for _ in range(count)] for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            four = (
                4
                * count
                / best(
                    lambda: list(pool.map(lambda part: [bank.add(text) for text in part], parts)), 1
                )
            )
        crowd = [[next(texts) for _ in range(count // 8)] for _ in range(64)]
        with ThreadPoolExecutor(64) as pool:
            many_threads = (
                8
                * count
                / best(
                    lambda: list(pool.map(lambda part: [bank.add(text) for text in part], crowd)), 1
                )
            )
        bank.flush_index()
        quiet = _search_p99(bank)
        parts = [[next(texts) for _ in range(count // 2)] for _ in range(4)]
        threads = [
            threading.Thread(target=lambda part=part: [bank.add(text) for text in part])
            for part in parts
        ]
        for thread in threads:
            thread.start()
        busy = _search_p99(bank)
        for thread in threads:
            thread.join()
    collection = chroma_collection(folder / "chroma", lookup.table[:1])
    rows = lookup.table[1 : count + 1].tolist()
    chroma = count / best(
        lambda: [collection.add(ids=[f"n{i}"], embeddings=[row]) for i, row in enumerate(rows)], 1
    )
    return {
        "adds_per_s": one,
        "adds_per_s_in_one_commit": many,
        "adds_per_s_four_threads": four,
        "adds_per_s_64_threads": many_threads,
        "chroma_adds_per_s": chroma,
        "adds_over_chroma": one / chroma,
        "adds_64_threads_over_chroma": many_threads / chroma,
        "adds_in_one_commit_over_chroma": many / chroma,
        "search_p99_while_writing_over_quiet": busy / quiet,
    }


def _search_p99(bank: FolderBank) -> float:
    times = [best(lambda: bank.search("0", k=HITS), 1) for _ in range(200)]
    return float(np.quantile(times, 0.99))


class _Still(gym.Env[str, str]):
    """Play an environment that does nothing, at once."""

    observation_space = UnicodeText(max_length=64)
    action_space = UnicodeText(max_length=64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Return the only observation."""
        return "here", {"task": "stand"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Change nothing."""
        return "here", 0.0, False, False, {}


def step(folder: Path, count: int = 20_000) -> dict[str, float]:
    """Measure the microseconds of a step with and without the wrapper."""
    with ExperienceBank(folder / "bank", embedder="hashing") as bank:
        plain, wrapped = _Still(), ExperienceWrapper(_Still(), bank)
        plain.reset()
        wrapped.reset()
        bare = best(lambda: [plain.step("wait") for _ in range(count)]) / count
        full = best(lambda: [wrapped.step("wait") for _ in range(count)], 2) / count
        wrapped.close()
    return {"added_us": (full - bare) * 1e6}


def _resident() -> int:
    """Return the bytes of memory that this process holds; elsewhere than on Linux the peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 20_000, 100_000])
    parser.add_argument("--writes", type=int, default=1_000)
    parser.add_argument("--only", nargs="+", help="parts to measure")
    parser.add_argument("--before", type=Path, help="working copy to compare a crowd with")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/bank.json"))
    parser.add_argument("--serve-crowd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_crowd:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            serve_crowd(options.serve_crowd, Path(folder))
        return
    found: dict[str, Any] = {"search": {}}
    if options.only and options.results.exists():
        found = json.loads(options.results.read_text("utf-8"))
    many = min(20_000, max(options.sizes))
    jobs: list[tuple[str, Callable[[Path], dict[str, Any]]]] = [
        (f"{size}", partial(search, size)) for size in options.sizes
    ]

    def crowds(_: Path) -> dict[str, Any]:
        parts = [*_CROWD, *_ONE, *_FLOORS]
        if coarse.int8_product() is None:
            parts.remove("product")
        few = min(1_000, many)
        return {
            f"{many}": crowd(many, parts, options.before),
            f"{few}": crowd(few, _ONE, options.before),
        }

    jobs += [
        ("concurrent", partial(concurrent, many)),
        ("crowd", crowds),
        ("writes", partial(writes, options.writes)),
        ("step", step),
    ]
    for name, work in jobs:
        if options.only and name not in options.only:
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            result = work(Path(folder))
        (found["search"] if name.isdigit() else found)[name] = result
        sys.stdout.write(f"{name} {json.dumps(result)}\n")
        sys.stdout.flush()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
