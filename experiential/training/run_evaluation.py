"""Evaluate a finished run: its newest checkpoint, arm by arm; run and bank stay unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiential.bank.index.site import CHROMA
from experiential.config import Arm, Experiment
from experiential.errors import CheckpointError
from experiential.evaluation.arms import NEEDS_BANK
from experiential.evaluation.cell import Cell, cell_name, cell_of, folder_digest, settings_digest
from experiential.evaluation.results import ResultStore
from experiential.training.checkpoint import CheckpointStore
from experiential.training.metrics import Observer

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class EvaluatedRun:
    """Hold the newest checkpoint of a run, its manifest and the settings to evaluate it with."""

    folder: Path
    name: str
    experiment: Experiment
    checkpoint: Path
    manifest: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        """Return the digest of all files of the checkpoint."""
        return folder_digest(self.checkpoint)


def open_run(folder: Path, experiment: Experiment) -> EvaluatedRun:
    """Open the newest checkpoint in a run's folder; raise CheckpointError if it has none."""
    checkpoint, manifest = CheckpointStore(folder / "checkpoints").latest()
    if experiment.extractor.enabled and not (checkpoint / "bank").is_dir():
        raise CheckpointError(
            f"Expected a bank in {checkpoint}, found none; leave extractor.enabled as it was in"
            " training"
        )
    return EvaluatedRun(folder, folder.resolve().name, experiment, checkpoint, manifest)


def evaluate_run(
    run: EvaluatedRun,
    arms: Sequence[Arm],
    store: ResultStore[Cell],
    *,
    observer: Observer | None = None,
    episodes: Path | None = None,
) -> list[Cell]:
    """Return one cell for each arm that the run can play, in order.

    Without a bank these are ``off`` and the baselines.

    Cells in ``store`` are not played again; others are stored as soon as they are finished.
    ``observer`` receives the events of the episodes, and ``episodes`` is the file that the episodes
    are added to.

    Raises:
        BudgetError: the budget of a backend is spent; `finished_cells` has what was played.
    """
    from experiential.training.trainer import Trainer

    settings = settings_digest(run.experiment)
    has_bank = run.experiment.extractor.enabled and (run.checkpoint / "bank").is_dir()
    wanted: list[Arm] = [arm for arm in arms if arm not in NEEDS_BANK or has_bank]
    found = finished_cells(run, wanted, store)
    left: tuple[Arm, ...] = tuple(arm for arm in wanted if arm not in found)
    if not left:
        return [found[arm] for arm in wanted]

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "eval":
            cell = cell_of(event, run.name, run.experiment, run.digest)
            found[cell.arm] = cell
            store.keep(cell_name(run.digest, settings, cell.arm), cell)
        if observer is not None:
            observer(event)

    with TemporaryDirectory(prefix="experiential-eval-") as scratch:
        trainer = Trainer(only_evaluation(run.experiment, left), Path(scratch), observer=observe)
        asyncio.run(trainer.aevaluate(run.checkpoint, run.manifest, episodes))
    return [found[arm] for arm in wanted]


def finished_cells(
    run: EvaluatedRun, arms: Sequence[Arm], store: ResultStore[Cell]
) -> dict[Arm, Cell]:
    """Return the cells of these arms that ``store`` holds."""
    settings = settings_digest(run.experiment)
    found: dict[Arm, Cell] = {}
    for arm in arms:
        if (cell := store.find(cell_name(run.digest, settings, arm))) is not None:
            found[arm] = cell
    return found


def only_evaluation(experiment: Experiment, arms: tuple[Arm, ...]) -> Experiment:
    """Return the settings to play these arms in a scratch folder, on an index of its own."""
    changes = {
        "eval": experiment.eval.model_copy(update={"before": False, "arms": arms}),
        "bank": experiment.bank.model_copy(update={"path": None, "store": CHROMA}),
    }
    return experiment.model_copy(update=changes)
