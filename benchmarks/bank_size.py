"""Measure what a bank costs as it grows: opening, searching, adding, memory and disk.

    python -m benchmarks.bank_size [--sizes 10000 100000 1000000] [--before CHECKOUT]
        [--drawn] [--results benchmarks/results/bank_size.json]

Each figure is taken in fresh processes, the least of ``--repeats``; one from 1,000,000 entries.
With ``--before``, the folder of another working copy of the project, its code opens a copy of the
bank in turn. Times are processor milliseconds, vectors have 384 numbers, and none is in an index
store (``store="exact"``). Memory is that of the process alone; pages of files that it maps, which
the system takes back when it needs them, are counted as ``mapped_mib``. ``changed`` opens the bank
read-only once more, after the writers have added and removed entries. ``diff_ms`` is a reader's
first question about the past, of the last two commits; ``at_ms`` and the others follow. The longest
figures of ``before`` are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import numpy.typing as npt

from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import Embedder, HashingEmbedder
from experiential.bank.storage.journal import JOURNAL_NAME

DIMENSION, SEARCHES, ADDS = 384, 200, 20
SESSION = 250_000
"""Entries written by one process, which holds what it wrote in memory."""


class Drawn:
    """Draw the vector of a text, near one of 1,000 centres."""

    id = "drawn"
    centres = np.random.default_rng(0).standard_normal((1000, DIMENSION), dtype=np.float32)

    def __call__(self, texts: list[str]) -> npt.NDArray[np.float32]:
        """Return vectors of unit length, shape (n, 384)."""
        made = np.empty((len(texts), DIMENSION), dtype=np.float32)
        for row, one in enumerate(texts):
            seed = zlib.crc32(one.encode())
            made[row] = self.centres[seed % 1000]
            made[row] += np.random.default_rng(seed).standard_normal(DIMENSION, dtype=np.float32)
        return made / np.linalg.norm(made, axis=1, keepdims=True)


def text(number: int) -> str:
    """Return the text of an entry."""
    place, thing = number * 7919 % 10007, number * 104729 % 997
    return (
        f"Lesson {number}: in room {place} look behind door {thing} before you take the brass key,"
        f" and leave box {number % 97} closed until the lamp of hall {number % 89} is lit."
    )


def cost(start: float) -> float:
    """Return the processor milliseconds since ``start``."""
    return (time.process_time() - start) * 1e3


def memory(what: str) -> float:
    """Return a line like ``RssAnon`` of the status of this process in MiB."""
    [line] = [
        one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(what)
    ]
    return int(line.split()[1]) / 1024


def fill(folder: Path, embedder: Embedder, first: int, count: int) -> None:
    """Write the entries of a bank from one on, in commits of 1,000 to 5,000."""
    with FolderBank(folder, embedder=embedder, store="exact") as bank:
        step = 5000 if count > 100_000 else 1000
        for start in range(first, min(count, first + SESSION), step):
            bank.add_many(
                [text(number) for number in range(start, min(count, start + step))],
                task=f"task {start // step}",
            )


def measure(folder: Path, embedder: Embedder, *, read_only: bool) -> dict[str, float]:
    """Open a bank once, use it, and return the figures."""
    before, peak, start = memory("RssAnon"), memory("VmHWM"), time.process_time()
    with FolderBank(folder, embedder=embedder, read_only=read_only) as bank:
        found = {"open_ms": cost(start), "open_mib": memory("RssAnon") - before}
        found["open_peak_mib"] = memory("VmHWM") - peak
        count, times = len(bank), list[float]()
        start = time.process_time()
        assert bank.search(text(7), k=3)
        found["first_search_ms"] = cost(start)
        for number in range(SEARCHES):
            start = time.process_time()
            assert bank.search(text(number * 15485863 % count), k=3)
            times.append(cost(start))
        found |= {"search_p50_ms": median(times), "search_p99_ms": quantiles(times, n=100)[-1]}
        found |= {"used_mib": memory("RssAnon") - before, "mapped_mib": memory("RssFile")}
        if read_only:
            found |= past(bank)
            found["past_mib"] = memory("RssAnon") - before
        else:
            times.clear()
            added: list[str] = []
            for number in range(ADDS):
                start = time.process_time()
                added.append(bank.add(text(count + number)).id)
                times.append(cost(start))
            found |= {"first_add_ms": times[0], "add_ms": median(times[1:])}
            for id in added:
                bank.remove(id)
    return found


def past(bank: FolderBank) -> dict[str, float]:
    """Return what the first questions of a reader about its last two commits cost."""
    found: dict[str, float] = {}
    head, [hit] = bank.head, bank.search(text(7), k=1)
    for name, ask in {
        "diff_ms": lambda: bank.diff(head - 2, head),
        "at_ms": lambda: bank.at(head - 2),
        "history_of_one_ms": lambda: bank.history(hit.experience.id),
        "history_ms": bank.history,
    }.items():
        start = time.process_time()
        assert ask()
        found[name] = cost(start)
    return found


def measured(folder: Path, checkout: Path, drawn: bool, mode: str, *more: int) -> dict[str, float]:
    """Return what a process with the code of ``checkout`` measures."""
    done = subprocess.run(
        [
            sys.executable,
            __file__,
            *["--drawn"] * drawn,
            "--measure",
            str(folder),
            mode,
            *map(str, more),
        ],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def compare(count: int, checkouts: dict[str, Path], repeats: int, drawn: bool) -> dict[str, Any]:
    """Fill a bank, and return the figures of each checkout, read-only and as a writer."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bank"
        for first in range(0, count, SESSION):
            measured(folder, Path(__file__).parent.parent, drawn, "fill", first, count)
        size = sum(file.stat().st_size for file in folder.iterdir())
        found["disk_bytes_per_entry"] = size / count
        found["journal_bytes_per_entry"] = (folder / JOURNAL_NAME).stat().st_size / count
        repeats = repeats if count < 1_000_000 else 1
        folders = {name: folder for name in checkouts}
        if "before" in checkouts:  # a file that readers map is of one version
            folders["before"] = Path(scratch) / "before"
            shutil.copytree(folder, folders["before"], ignore=shutil.ignore_patterns("entries-*"))
            measured(folders["before"], checkouts["before"], drawn, "writer")
        for mode in ("read_only", "writer", "changed"):
            runs = {name: list[dict[str, float]]() for name in checkouts}
            for _ in range(repeats):
                for name, checkout in checkouts.items():
                    if name == "now" or mode == "read_only" or repeats > 1:
                        runs[name].append(measured(folders[name], checkout, drawn, mode))
            for name, made in runs.items():
                if not made:
                    continue
                least = {key: min(run[key] for run in made) for key in made[0]}
                found.setdefault(name, {})[mode] = least
    return found


def rounded(value: Any) -> Any:
    """Round all figures to three digits after the point."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}  # pyright: ignore
    return round(value, 3)


def main() -> None:
    """Measure every size, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drawn", action="store_true", help="draw vectors, which is quicker")
    parser.add_argument("--before", type=Path, help="working copy to compare with")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)  # folder and mode
    arguments = parser.parse_args()
    embedder: Embedder = Drawn() if arguments.drawn else HashingEmbedder(DIMENSION)
    if arguments.measure is not None:
        folder, mode, *numbers = arguments.measure
        if mode == "fill":
            fill(Path(folder), embedder, *map(int, numbers))
            print("{}")
            return
        print(json.dumps(measure(Path(folder), embedder, read_only=mode != "writer")))
        return
    checkouts = {"now": Path(__file__).parent.parent}
    if arguments.before is not None:
        checkouts["before"] = arguments.before.resolve()
    found: dict[str, Any] = {}
    for count in arguments.sizes:
        found[str(count)] = rounded(compare(count, checkouts, arguments.repeats, arguments.drawn))
        print(count, json.dumps(found[str(count)]), flush=True)
        if arguments.results is not None:
            arguments.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
