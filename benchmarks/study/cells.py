"""Train and evaluate one cell of the study, and store it as a small file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import demonstrations, smollm2_reader
from benchmarks.study.setups import DEMONSTRATIONS, ENVIRONMENTS, RECIPES, base_of, overrides_of
from experiential.config import Experiment
from experiential.errors import ConfigError
from experiential.evaluation.card import ARMS
from experiential.evaluation.cell import Cell, cell_of, settings_digest
from experiential.evaluation.picture import Point, evaluation_curve
from experiential.evaluation.results import ResultStore, write_whole
from experiential.llm.models import resolve_model
from experiential.recipe import dump_experiment, load_experiment
from experiential.training.checkpoint import CheckpointStore
from experiential.training.roles import CONFIG
from experiential.training.run_evaluation import only_evaluation
from experiential.training.runtime import build_runtime
from experiential.training.trainer import Trainer
from experiential.types import Record

RESULTS = Path("benchmarks/results/study")


class StudyCell(Record):
    """Hold one run of the study: its learning curve, and the trained pair under each arm.

    Attributes:
        environment: name of its setup.
        recipe: name of the recipe.
        seed: training seed.
        commit: of the code; with ``+`` when it had changes that were not committed.
        settings: digest of the settings of the training, without the seed and what follows from it.
        overrides: settings changed from the recipe's.
        steps: training steps.
        episodes: training episodes, second attempts and those that filled a bank beforehand
            included.
        seconds: of the training with its evaluations, on one thread beside another run.
        tokens: that actor and extractor processed in training and its evaluations, prompts
            included; one figure where they share weights.
        curve: success on later visits while training, by arm.
        arms: a cell for each arm that could be played at the end.
        weights: digest of the weights that its environment begins with; None in cells made before
            this was recorded, and of a model from a hub.
    """

    environment: str
    recipe: str
    seed: int
    commit: str
    settings: str
    overrides: tuple[str, ...]
    steps: int
    episodes: int
    seconds: float
    tokens: dict[str, int]
    curve: dict[str, tuple[Point, ...]]
    arms: tuple[Cell, ...]
    weights: str | None = None


def play_cell(
    environment: str, recipe: str, seed: int, scratch: Path, more: Sequence[str] = ()
) -> StudyCell:
    """Train and evaluate one cell in a scratch folder.

    Args:
        environment: name of its setup.
        recipe: name of a recipe.
        seed: training seed.
        scratch: an empty folder.
        more: settings changed for all runs of the study, to try it small.
    """
    code = commit()  # before it can change under a run of hours
    overrides = [*overrides_of(environment, recipe, seed), *more]
    base = base_of(environment, recipe)
    named = load_experiment(base, overrides)
    of_all_seeds = load_experiment(base, [*overrides_of(environment, recipe, 0), *more])
    begun = cold_start(environment, recipe, overrides, seed, scratch, more)
    experiment = load_experiment(base, [*overrides, *begun])
    write_whole(scratch / "run" / CONFIG, dump_experiment(experiment))  # for `experiential eval`
    begin = time.perf_counter()
    # The final arms play with the policies as trained, so these outlive the run.
    with closing(build_runtime(experiment)) as runtime:
        events: list[dict[str, Any]] = []
        trainer = Trainer(
            experiment,
            scratch / "run",
            observer=events.append,
            runtimes=(runtime.actor, runtime.extractor),
        )
        summary = trainer.run()
        seconds = time.perf_counter() - begin
        policies = {"actor": trainer.actor} | (
            {} if trainer.extractor is trainer.actor else {"extractor": trainer.extractor}
        )
        tokens = {name: policy.tokens_processed for name, policy in policies.items()}
        return StudyCell(
            environment=environment,
            recipe=recipe,
            seed=seed,
            commit=code,
            settings=settings_digest(of_all_seeds, seed=False),
            overrides=tuple(overrides),
            steps=summary["steps"],
            episodes=sum(
                event["episodes"] for event in events if event["event"] in ("step", "prepared")
            ),
            seconds=seconds,
            tokens=tokens,
            curve={
                arm: tuple(evaluation_curve(events, arm))
                for arm in ARMS
                if evaluation_curve(events, arm)
            },
            arms=tuple(
                final_cells(
                    trainer,
                    environment,
                    recipe,
                    [*overrides, *ENVIRONMENTS[environment].final, *more],
                    scratch,
                )
            ),
            weights=weights_digest(str(named.model.name)),
        )


def cold_start(
    environment: str,
    recipe: str,
    overrides: Sequence[str],
    seed: int,
    scratch: Path,
    more: Sequence[str] = (),
) -> list[str]:
    """Make what a cell begins with: demonstrations, a bank of records, an actor that can read.

    Returns:
        the settings that name it.
    """
    setup = ENVIRONMENTS[environment]
    experiment = load_experiment(base_of(environment, recipe), overrides)
    if setup.reader is not None:
        return reader(setup.reader, seed, scratch, more)
    if setup.records and experiment.extractor.enabled:
        smollm2_reader.write_bank(scratch / "records")
        return [f"bank.path={scratch / 'records'}"]
    if recipe not in DEMONSTRATIONS:
        return []
    file = scratch / "demonstrations.jsonl"
    chats = demonstrations.demonstrations(
        experiment, DEMONSTRATIONS[recipe], ask=0.8, follow=0.8, seed=seed
    )
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return [f"methods.cold_start={{demonstrations: {file}}}"]


def reader(environment: str, seed: int, scratch: Path, more: Sequence[str]) -> list[str]:
    """Train the actor of an environment's `static-online`, as its study does.

    Returns:
        the settings by which a run begins with that actor and a fresh extractor.
    """
    recipe = next(one for one in ENVIRONMENTS[environment].recipes if one.startswith("static-on"))
    overrides = [*overrides_of(environment, recipe, seed), *more]
    begun = cold_start(environment, recipe, overrides, seed, scratch, more)
    experiment = load_experiment(base_of(environment, recipe), [*overrides, *begun])
    quiet = experiment.eval.model_copy(update={"before": False, "every": 0, "after": False})
    output = scratch / "reader"
    Trainer(experiment.model_copy(update={"eval": quiet}), output).run()
    first = experiment.model
    second = first.model_dump(mode="json", exclude_unset=True) | {"name": str(first.name)}
    return [f"model.name={output / 'actor'}", f"extractor_model={json.dumps(second)}"]


def evaluated(
    trained: Experiment, environment: str, recipe: str, overrides: Sequence[str]
) -> Experiment:
    """Return the settings of a cell's last evaluation: as trained, but for what a setup may change.

    Args:
        trained: the settings of its training.
        environment: name of its setup.
        recipe: name of its recipe in the study.
        overrides: settings of the training, and after them those of this evaluation.
    """
    final = load_experiment(base_of(environment, recipe), overrides)
    bank = trained.bank.model_copy(update={"retrieval": final.bank.retrieval})
    cooled = {"temperature": final.extractor.temperature}
    extractor = trained.extractor.model_copy(update=cooled)
    return trained.model_copy(update={"eval": final.eval, "bank": bank, "extractor": extractor})


def final_cells(
    trainer: Trainer, environment: str, recipe: str, overrides: Sequence[str], scratch: Path
) -> Iterator[Cell]:
    """Play the trained pair under every arm that it can play, without loading its weights.

    Args:
        trainer: that ran.
        environment: name of its setup.
        recipe: name of its recipe in the study.
        overrides: settings of the training, and after them those of this evaluation.
        scratch: a folder for it.
    """
    experiment = evaluated(trainer.experiment, environment, recipe, overrides)
    checkpoint, manifest = CheckpointStore(trainer.output / "checkpoints").latest()
    evaluation = Trainer(
        only_evaluation(experiment, ARMS),
        scratch / "evaluation",
        runtimes=(trainer.actor, trainer.extractor),
    )
    family, seed = f"{environment}/{recipe}", experiment.seed
    for event in asyncio.run(evaluation.aevaluate(checkpoint, manifest)):
        made = cell_of(event, f"{recipe}-{seed}", experiment, checkpoint="")
        yield made.model_copy(
            update={
                "family": family,
                "settings": f"{family}/{seed}",
                "environment": environment,
                "recipe": recipe,
            }
        )


def weights_digest(model: str) -> str | None:
    """Return a digest of a model's weights; None of one from a hub."""
    files = sorted(Path(resolve_model(model)).glob("*.safetensors"))
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16] if files else None


def commit() -> str:
    """Return the commit of the code that runs, with ``+`` when it was changed since.

    Outside a repository it is ``unknown``.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "experiential", "benchmarks/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cells_of(results: Path) -> ResultStore[StudyCell]:
    """Return the store of the study's finished cells."""
    return ResultStore(
        results / "cells",
        StudyCell,
        about="a cell of the study",
        remedy="remove it and run again",
        indent=None,
    )


def cell_path(results: Path, environment: str, recipe: str, seed: int) -> Path:
    """Return the file of a finished cell."""
    return cells_of(results).path(f"{environment}/{recipe}-{seed}")


def read_cells(results: Path = RESULTS) -> list[StudyCell]:
    """Return all finished cells, by environment, recipe and seed.

    Raises:
        ConfigError: a file is damaged, or there are none.
    """
    found = list(cells_of(results).all())
    if not found:
        raise ConfigError(
            f"Expected finished cells in {results / 'cells'}, found none; run the study first"
        )
    place = {recipe: number for number, recipe in enumerate(RECIPES)}
    return sorted(
        found,
        key=lambda cell: (
            cell.environment,
            place.get(cell.recipe, len(place)),
            cell.recipe,
            cell.seed,
        ),
    )
