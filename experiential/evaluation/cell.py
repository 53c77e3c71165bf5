"""Keep the finished cells of a comparison: one checkpoint under one arm, a small JSON file each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from experiential.config import Arm, Experiment
from experiential.evaluation.results import ResultStore
from experiential.evaluation.visits import Cost, later
from experiential.llm.hosted import NEUTRAL
from experiential.types import Record


class Cell(Record):
    """Hold the outcomes of one checkpoint of a run under one arm."""

    run: str
    """Name of the run's folder."""
    recipe: str
    environment: str
    seed: int
    step: int
    arm: Arm
    checkpoint: str
    """Digest of all files of the checkpoint."""
    settings: str
    """Digest of the settings of the evaluation, the training seed included."""
    family: str
    """The same without the training seed; runs of one family repeat each other."""
    version: str
    """Of this package."""
    outcomes: tuple[str, ...] = Field(min_length=1)
    """Per held-out world one text of 0 and 1, a digit for each visit."""
    errors: int = 0
    """Episodes that failed for a technical reason, and so count as no success."""
    entries: int = 0
    """Entries of the bank at the beginning."""
    chance: float | None = None
    """Success rate of blind play, where the environment states it."""
    failures: dict[str, int] = {}
    cost: Cost = Cost()

    def table(self) -> np.ndarray:
        """Return the outcomes as 0 and 1, shape (worlds, visits)."""
        return np.array([[int(digit) for digit in row] for row in self.outcomes])

    def later(self) -> np.ndarray:
        """Return the success rate of each world on later visits, shape (worlds,)."""
        return later(self.table())


def cell_of(event: Mapping[str, Any], run: str, experiment: Experiment, checkpoint: str) -> Cell:
    """Return the cell of an eval event, as `Trainer` emits it."""
    kept = ("arm", "step", "errors", "entries", "chance", "failures", "cost")
    return Cell(
        run=run,
        recipe=experiment.recipe,
        environment=experiment.env.id,
        seed=experiment.seed,
        checkpoint=checkpoint,
        settings=settings_digest(experiment),
        family=settings_digest(experiment, seed=False),
        version=package_version(),
        outcomes=tuple("".join(map(str, row)) for row in event["outcomes"]),
        **{name: event[name] for name in kept if name in event},
    )


def cell_store(folder: Path, *, overwrite: bool = False) -> ResultStore[Cell]:
    """Return the store of cells in a folder; a cell's name in it is its `cell_name`."""
    remedy = "remove it, or use --no-resume"
    return ResultStore(folder, Cell, about="a finished cell", remedy=remedy, overwrite=overwrite)


def cell_name(checkpoint: str, settings: str, arm: Arm) -> str:
    """Return the name of a cell in a store, by all that decides its outcomes."""
    return f"{_digest(f'{checkpoint} {settings} {package_version()}')}-{arm}"


def settings_digest(experiment: Experiment, *, seed: bool = True) -> str:
    """Return a digest of the settings, and without ``seed`` of all but the seed.

    The list of arms does not count, nor what a server's replies may cost.
    """
    tree = experiment.model_dump(mode="json", exclude=None if seed else {"seed"})
    tree["eval"].pop("arms")
    models: list[dict[str, Any] | None] = [tree["model"], tree["extractor_model"]]
    for model in models:
        if model is not None and model["server"] is not None:
            options: dict[str, Any] = model["server"]["options"]
            model["server"]["options"] = {k: v for k, v in options.items() if k not in NEUTRAL}
    return _digest(json.dumps(tree, sort_keys=True))


def folder_digest(folder: Path) -> str:
    """Return a digest of the names and contents of all files in a folder."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(str(path.relative_to(folder)).encode() + b"\0")
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]


def package_version() -> str:
    """Return the version of this package; ``unknown`` where it is not installed."""
    try:
        return version("experiential-rl")
    except PackageNotFoundError:
        return "unknown"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
