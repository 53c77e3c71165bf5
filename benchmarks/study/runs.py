"""Run the cells of a study that are not finished, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.study.cells import cell_path, cells_of, play_cell
from benchmarks.study.setups import ENVIRONMENTS, base_of, overrides_of
from experiential.errors import ConfigError
from experiential.recipe import load_experiment


def order(
    environments: Sequence[str], recipes: Sequence[str] | None, seeds: int
) -> list[tuple[str, str, int]]:
    """Return all cells, seed by seed, of these recipes or else of each environment's own.

    Raises:
        ConfigError: an environment does not exist.
    """
    for environment in environments:
        if environment not in ENVIRONMENTS:
            raise ConfigError(
                f"Expected an environment among {', '.join(ENVIRONMENTS)}, got {environment!r}"
            )
    return [
        (environment, recipe, seed)
        for seed in range(seeds)
        for environment in environments
        for recipe in recipes or ENVIRONMENTS[environment].recipes
    ]


def check(cells: Sequence[tuple[str, str, int]], more: Sequence[str]) -> None:
    """Refuse a study one of whose cells cannot be run.

    Raises:
        ConfigError: a recipe or a setting does not exist.
    """
    for environment, recipe, seed in cells:
        load_experiment(
            base_of(environment, recipe), [*overrides_of(environment, recipe, seed), *more]
        )


def run(
    results: Path,
    cells: Sequence[tuple[str, str, int]],
    jobs: int,
    minutes: float | None,
    more: Sequence[str] = (),
    keep: Path | None = None,
) -> int:
    """Run the cells that are not finished, ``jobs`` at a time; return how many failed.

    Args:
        results: folder of the study.
        cells: environment, recipe and seed of each, in the order to run them.
        jobs: processes at once.
        minutes: after which no further cell is started; None has no end.
        more: settings changed for all cells.
        keep: folder in which the files of each training stay; None keeps none.
    """
    check(cells, more)
    left = [cell for cell in cells if not cell_path(results, *cell).exists()]
    say(f"{len(cells) - len(left)} of {len(cells)} cells are finished")
    end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    failed: list[tuple[str, str, int]] = []
    interrupted = threading.Event()

    def one(cell: tuple[str, str, int]) -> None:
        if (
            time.monotonic() < end
            and not interrupted.is_set()
            and not run_process(results, cell, more, keep)
        ):
            failed.append(cell)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(one, left))
        except KeyboardInterrupt:
            interrupted.set()  # what waits in the pool starts nothing
            raise
    done = sum(cell_path(results, *cell).exists() for cell in cells)
    say(f"{done} of {len(cells)} cells are finished, {len(failed)} failed")
    return len(failed)


def run_process(
    results: Path, cell: tuple[str, str, int], more: Sequence[str], keep: Path | None
) -> bool:
    """Run one cell in a process of its own; return whether it finished.

    The output of a failed cell is shown. Each process has one thread.
    """
    begin = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "benchmarks.study",
        "cell",
        *map(str, cell),
        *more,
        "--results",
        str(results),
        *([] if keep is None else ["--keep", str(keep)]),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    minutes = (time.monotonic() - begin) / 60
    name = "/".join(map(str, cell))
    if done.returncode:
        say(f"{name}: exit code {done.returncode} after {minutes:.1f} min\n{done.stderr[-2000:]}")
        return False
    say(f"{name}: {minutes:.1f} min; {done.stdout.strip().splitlines()[-1]}")
    return True


_TALKING = threading.Lock()


def say(text: str) -> None:
    """Write a line at once."""
    with _TALKING:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def finish_cell(
    results: Path,
    environment: str,
    recipe: str,
    seed: int,
    more: Sequence[str],
    keep: Path | None = None,
) -> None:
    """Run one cell here and store it."""
    name = f"{environment}/{recipe}-{seed}"
    with TemporaryDirectory(prefix="experiential-study-") as scratch:
        folder = Path(scratch) if keep is None else keep.resolve() / name
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was ended
        folder.mkdir(parents=True)
        cell = play_cell(environment, recipe, seed, folder, more)
    cells_of(results).keep(name, cell)
    say(f"later visits: {', '.join(f'{arm.arm} {arm.later().mean():.2f}' for arm in cell.arms)}")
