"""Write what a run has trained into a folder that other machines can use."""

from __future__ import annotations

import asyncio
import json
import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Literal

from experiential.bank.folder import FolderBank
from experiential.config import Experiment, ModelSettings
from experiential.errors import CheckpointError, ConfigError, ModelNotFoundError
from experiential.llm.models import ADAPTER, load_model, portable_base, resolve_model
from experiential.recipe import dump_experiment
from experiential.training.checkpoint import CheckpointStore
from experiential.training.metrics import is_result, read_events
from experiential.training.roles import CONFIG, prompt_set_name
from experiential.training.runtime import build_runtime

MANIFEST, METRICS = "export.json", "metrics.jsonl"
Role = Literal["actor", "extractor"]
Precision = Literal["float32", "bfloat16"]
"""Of merged weights."""


@dataclass(frozen=True)
class Trained:
    """Hold what a run has trained, at one step.

    Attributes:
        weights: the folder of ``actor`` and ``extractor``, those that were trained.
        bank: folder of the bank; None for a run without one.
        step: training steps taken.
        methods: state of the run's methods, by name.
    """

    weights: Path
    bank: Path | None
    step: int
    methods: dict[str, Any]


def trained_roles(experiment: Experiment) -> list[Role]:
    """Return the roles that have weights of their own from this run."""
    actor, extractor = experiment.actor, experiment.extractor
    own = extractor.enabled and extractor.train and not extractor.shared
    roles: list[tuple[Role, bool]] = [("actor", actor.train), ("extractor", own)]
    return [role for role, trained in roles if trained]


def model_settings(experiment: Experiment, role: Role) -> ModelSettings:
    """Return the model that a role of a run starts from."""
    return (role == "extractor" and experiment.extractor_model) or experiment.model


@contextmanager
def open_trained(folder: Path, experiment: Experiment) -> Generator[Trained]:
    """Find what was trained in an export, or in the folder of a run, until the end of the block.

    A run that has not ended, or was resumed and stopped, has it in its newest checkpoint, whose
    weights are then written into a scratch folder.

    Raises:
        CheckpointError: there is neither a result nor a checkpoint, or weights are missing.
        ConfigError: the checkpoint is of a runtime whose weights cannot be read here.
    """
    bank = experiment.extractor.enabled
    store = CheckpointStore(folder / "checkpoints")
    checkpoint, manifest = store.latest() if store.all() else (None, dict[str, Any]())
    if (folder / MANIFEST).is_file():
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    metrics = folder / METRICS
    events = read_events(metrics) if metrics.is_file() else []
    ended = [event["step"] for event in events if is_result(event)]
    if ended or (folder / MANIFEST).is_file():
        for role in trained_roles(experiment):
            if not (folder / role).is_dir():
                raise CheckpointError(
                    f"Expected the weights of the {role} in {folder / role}, found none; copy"
                    " them there, or train again"
                )
        step = int(manifest.get("step", ended[-1] if ended else 0))
        where = folder / "bank" if bank else None
        yield Trained(folder, where, step, manifest.get("methods", {}))
        return
    if checkpoint is None:
        raise CheckpointError(
            f"Expected a run with a result or a checkpoint, got {folder} with neither; go on with:"
            f" experiential-train --resume --output {folder}"
        )
    if trained_roles(experiment) and experiment.runtime != "local":
        raise ConfigError(
            f"Expected a run that has ended, since a checkpoint of runtime={experiment.runtime} is"
            f" not read here, got {folder}; end it with: experiential-train --resume --output"
            f" {folder}"
        )
    with TemporaryDirectory(prefix="experiential-weights-") as scratch:
        asyncio.run(_write_weights(experiment, checkpoint, Path(scratch)))
        where = checkpoint / "bank" if bank else None
        yield Trained(Path(scratch), where, int(manifest["step"]), manifest.get("methods", {}))


async def _write_weights(experiment: Experiment, checkpoint: Path, target: Path) -> None:
    if not (roles := trained_roles(experiment)):
        return
    runtime = build_runtime(experiment)
    try:
        for role in roles:
            policy = runtime.actor if role == "actor" else runtime.extractor
            await policy.load(checkpoint / role)
            await policy.export(target / role)
    finally:
        runtime.close()


def export_trained(
    trained: Trained,
    experiment: Experiment,
    target: Path,
    *,
    merge: bool = False,
    dtype: Precision = "float32",
) -> None:
    """Write models, bank and settings into an empty or new folder; it appears whole or not at all.

    Args:
        trained: what to write.
        experiment: the settings of its run.
        target: the folder.
        merge: add adapters to the weights of their base, so that any program can load them.
        dtype: of merged weights.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
        ModelNotFoundError: the base of an adapter is a folder of this machine.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"Expected an empty or new folder for --to, got {target}; choose another")
    sources: dict[Role, Path] = {}
    for role in ("actor", "extractor") if experiment.extractor.enabled else ("actor",):
        if (trained.weights / role).is_dir():
            sources[role] = trained.weights / role
        elif (folder := _local_folder(model_settings(experiment, role))) is not None:
            sources[role] = folder
    bases = {  # before anything is written
        role: portable_base(str(source))
        for role, source in sources.items()
        if not merge and is_adapter(source)
    }
    draft: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        draft.chmod(0o755)
        for role, source in sources.items():
            if merge and is_adapter(source):
                _write_merged(source, draft / role, dtype)
            else:
                shutil.copytree(source, draft / role)
            if role in bases:
                _set_base(draft / role, bases[role])
        if trained.bank is not None:
            namespace = experiment.bank.namespace
            with FolderBank(trained.bank, namespace=namespace, read_only=True) as bank:
                bank.fork(draft / "bank").close()
        (draft / CONFIG).write_text(dump_experiment(portable_settings(experiment)), "utf-8")
        manifest = {"step": trained.step, "methods": trained.methods}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        draft.replace(target)
    except ModelNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(
            f"Expected a folder that can be written for --to, got {target}: {error}"
        ) from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def is_adapter(folder: Path) -> bool:
    """Test whether a model folder holds a LoRA adapter instead of all weights."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()


def portable_settings(experiment: Experiment) -> Experiment:
    """Return the settings of an export: no folders of models or banks, prompt sets by name."""

    def portable(model: ModelSettings) -> ModelSettings:
        local = _local_folder(model)
        name = model.name if local is None else local.name
        return model.model_copy(update={"name": name, "prompts": prompt_set_name(model)})

    second = experiment.extractor_model
    changes = {
        "model": portable(experiment.model),
        "extractor_model": None if second is None else portable(second),
        "bank": experiment.bank.model_copy(update={"path": None}),
    }
    return experiment.model_copy(update=changes)


def _local_folder(model: ModelSettings) -> Path | None:
    """Return the folder of a model that only this machine has."""
    if model.server is not None or model.name in ("tiny", "smollm2"):
        return None
    folder = Path(model.name).expanduser()
    if not folder.is_absolute() and not folder.is_dir():
        return None
    found = resolve_model(model.name, adapters=True)
    return found if isinstance(found, Path) else None


def _write_merged(source: Path, target: Path, dtype: Precision) -> None:
    settings = ModelSettings(name=str(source), device="cpu", dtype=dtype)
    model, tokenizer = load_model(settings)
    with warnings.catch_warnings():  # transformers warns of what it calls itself
        warnings.simplefilter("ignore", FutureWarning)
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _set_base(folder: Path, base: str) -> None:
    """Name the base of an adapter in its settings."""
    file = folder / ADAPTER
    settings = json.loads(file.read_text("utf-8")) | {"base_model_name_or_path": base}
    file.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
