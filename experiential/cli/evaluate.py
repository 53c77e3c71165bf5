"""`experiential eval`: evaluate the newest checkpoint of a run by visit, without changing the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from experiential.cli.preflight import CONFIG_FILE, check_experiment
from experiential.config import Experiment
from experiential.errors import CheckpointError
from experiential.recipe import load_experiment

if TYPE_CHECKING:
    from experiential.training.trainer import Trainer


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Output folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Settings to change.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the evaluation events as JSON.")] = False,
) -> None:
    """Evaluate the newest checkpoint of a run on held-out worlds; the run and its bank stay as they are."""
    from experiential.cli.report import headline, summary_table
    from experiential.training.checkpoint import CheckpointStore

    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"Expected the output folder of a run, got {folder}, which has no {CONFIG_FILE}")
    experiment = load_experiment(folder / CONFIG_FILE, overrides or [])
    check_experiment(experiment)
    checkpoint, manifest = CheckpointStore(folder / "checkpoints").latest()
    events = [event | {"step": manifest["step"]} for event in play(experiment, checkpoint)]
    if as_json:
        sys.stdout.write(json.dumps(events, indent=2) + "\n")
        return
    console = Console()
    console.print(summary_table(events))
    for line in headline(events):
        console.print(line, markup=False, highlight=False)


def play(experiment: Experiment, checkpoint: Path) -> list[dict[str, Any]]:
    """Evaluation events of both arms, with the weights and the bank of a checkpoint.

    A training of zero steps in a scratch folder does it, so that evaluation here and in a run are the same code.
    """
    import asyncio

    from experiential.training.trainer import Trainer

    with TemporaryDirectory(prefix="experiential-eval-") as scratch:
        trainer = Trainer(only_evaluation(experiment, checkpoint), Path(scratch))
        return asyncio.run(_restore_and_run(trainer, checkpoint))["evaluations"]


async def _restore_and_run(trainer: Trainer, checkpoint: Path) -> dict[str, Any]:
    await trainer.actor.load(checkpoint / "actor")
    await trainer.extractor.load(checkpoint / "extractor")
    return await trainer.arun()


def only_evaluation(experiment: Experiment, checkpoint: Path) -> Experiment:
    """The experiment without training steps, starting from the bank of a checkpoint."""
    bank = checkpoint / "bank"
    changes = {
        "run": experiment.run.model_copy(update={"steps": 0}),
        "eval": experiment.eval.model_copy(update={"before": False, "after": True}),
        "bank": experiment.bank.model_copy(update={"path": str(bank) if bank.is_dir() else None}),
    }
    return experiment.model_copy(update=changes)
