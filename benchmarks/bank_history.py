"""Measure what opening a bank for reading and looking at small changes cost, as it grows.

    python -m benchmarks.bank_history [--sizes 10000]
        [--results benchmarks/results/bank_history.json]

All figures are processor milliseconds of one thread, the best of ``--repeats``; vectors have 384
numbers. ``checks`` is the part of a read-only opening that copies the journal and verifies every
checksum; the first call of a reader that asks for history pays it. ``at``, ``diff`` and
``rollback`` are those of one rewritten and one removed entry; ``whole state`` reads what such a
state holds from the journal, ``whole states`` the two that such a diff compares.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiential.bank.folder import FolderBank
from experiential.bank.index.nearest import Nearest
from experiential.bank.storage.journal import JOURNAL_NAME, Journal
from experiential.bank.storage.tables import difference
from experiential.types import Experience


def cost(work: Callable[[], object], repeats: int) -> float:
    """Return the least processor milliseconds that ``work`` took."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append((time.process_time() - start) * 1e3)
    return round(min(times), 3)


def measure(count: int, folder: Path, repeats: int) -> dict[str, float]:
    """Fill a bank in ``folder`` with ``count`` entries, and measure."""
    draw = np.random.default_rng(0)
    with FolderBank(
        folder / "bank", embedder=lambda texts: draw.standard_normal((len(texts), 384))
    ) as bank:
        for start in range(0, count, 1000):
            bank.add_many(
                [
                    f"Lesson {n}: look behind door {n % 97} first."
                    for n in range(start, start + 1000)
                ]
            )
    journal = folder / "bank" / JOURNAL_NAME

    def opened() -> None:
        FolderBank(folder / "bank", read_only=True).close()

    found: dict[str, float] = {
        "open": cost(opened, repeats),
        "checks": cost(lambda: Journal.open_copy(folder / "bank").close(), repeats),
    }
    with FolderBank(
        folder / "bank", embedder=lambda texts: draw.standard_normal((len(texts), 384))
    ) as bank:
        head, ids = bank.head, [entry.id for entry in bank.entries()]
        bank.update(ids[7], "Better.")
        bank.remove(ids[8])
        now, live = bank.head, bank._history.live  # pyright: ignore[reportPrivateUsage]

        def entries(commit: int) -> list[Experience]:
            return [one.experience for one in live(commit).entries]

        found["diff"] = cost(lambda: bank.diff(head, now), repeats)
        found["at"] = cost(lambda: bank.at(head), repeats)
        found["whole state"] = cost(lambda: Nearest(live(head), limit=count), repeats)
        found["whole states"] = cost(lambda: difference(entries(head), entries(now)), repeats)
        found["rollback"] = cost(lambda: bank.rollback(head), 1)
    return found | {"disk bytes per entry": round(journal.stat().st_size / count)}


def main() -> None:
    """Measure every size, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for count in arguments.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            found[str(count)] = measure(count, Path(scratch), arguments.repeats)
        print(count, json.dumps(found[str(count)]), flush=True)
    if arguments.results is not None:
        arguments.results.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
