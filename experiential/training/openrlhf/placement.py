"""Place both policies on a cluster, refuse what cannot be, and describe the rest.

All is decided by arithmetic before anything starts: Ray waits without an end and without a word for
GPUs that do not exist, and vLLM and DeepSpeed run out of memory minutes after the start.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiential.config import (
    ActorSettings,
    Experiment,
    ExtractorSettings,
    ModelSettings,
    PolicyClusterSettings,
)
from experiential.errors import ConfigError
from experiential.training.checkpoint import CheckpointStore
from experiential.training.openrlhf.machine import Gpu
from experiential.training.openrlhf.memory import (
    PROCESS_GB,
    PUBLISHED,
    STATE_BYTES,
    EngineMemory,
    RankMemory,
    Shape,
    count_experts,
    engine_memory,
    rank_memory,
    read_config,
    shape_of,
)
from experiential.training.openrlhf.versions import engine_arguments

_ENGINE_SETTINGS = {
    "model": "model.name",
    "tokenizer": "model.name",
    "dtype": "model.dtype",
    "seed": "seed",
    "max_model_len": "{key}.max_length",
    "gpu_memory_utilization": "{key}.gpu_memory",
    "tensor_parallel_size": "{key}.tensor_parallel",
    "enable_sleep_mode": "cluster.share_gpus",
}
"""vLLM's engine arguments that settings of this package stand for."""
_ENGINE_FIXED = {
    "distributed_executor_backend": "Ray places the workers",
    "enable_lora": "the ranks send whole weights",
    "enable_prefix_caching": "all turns of an episode go to one engine for it",
    "logprobs_mode": "importance ratios need the log-probabilities of the draws",
    "max_logprobs": "one is recorded for each token",
    "data_parallel_size": "the placement counts {key}.engines",
    "pipeline_parallel_size": "the placement counts {key}.tensor_parallel",
    "quantization": "the ranks send bfloat16 weights",
    "structured_outputs_config": "the ranks replay the grammar of each response",
    "worker_extension_cls": "OpenRLHF's receives the weights",
}
"""vLLM's engine arguments with one possible value, and the reason."""


@dataclass(frozen=True)
class PolicyPlacement:
    """Describe one policy's share of a cluster.

    Attributes:
        role: ``actor`` or ``extractor``; settings of this policy are under ``cluster.ROLE``.
        ranks: DeepSpeed ranks, one GPU each.
        engine_gpus: GPUs of all its engines.
        shape: of the model; None, as the two below, when only a download could tell.
        rank: memory of one DeepSpeed rank.
        engine: memory of one GPU of an engine.
    """

    role: str
    model: str
    settings: PolicyClusterSettings
    ranks: int
    engine_gpus: int
    shape: Shape | None
    rank: RankMemory | None
    engine: EngineMemory | None


@dataclass(frozen=True)
class Placement:
    """Describe both policies on a cluster.

    Attributes:
        policies: actor and extractor, in this order.
        shared: all use the same GPUs of one node by time-slicing.
        gpus: GPUs needed in all.
        gpu_gb: memory of a GPU in units of 1e9 bytes; None when unknown.
    """

    policies: tuple[PolicyPlacement, PolicyPlacement]
    shared: bool
    gpus: int
    gpu_gb: float | None

    @property
    def bundles(self) -> list[int]:
        """Return the GPUs that must be on one node, group by group."""
        if self.shared:
            return [1] * self.gpus
        return [count for policy in self.policies for count in node_bundles(policy.settings)]


def node_bundles(settings: PolicyClusterSettings) -> list[int]:
    """Return the GPUs of a policy that must be on one node: ranks node by node, then engines."""
    ranks = [settings.gpus_per_node] * settings.nodes
    return ranks + [settings.tensor_parallel] * settings.engines


class Shortage(NamedTuple):
    """Name ranks or an engine that need ``need`` (1e9 bytes) of a GPU, more than it has."""

    who: str
    need: float
    message: str


def place(experiment: Experiment, here: Sequence[Gpu] | None = None) -> Placement:
    """Return the placement of an experiment; both policies get ranks and engines, trained or not.

    Args:
        experiment: its ``cluster`` says the sizes.
        here: the GPUs of this machine; None when they are not known, or when the run will be on
            another machine. They are ignored where a cluster is joined (``cluster.address``).

    Raises:
        ConfigError: the placement is impossible; the message says what is required and why.
        ModelNotFoundError: a model folder does not exist.
    """
    cluster = experiment.cluster
    here = None if cluster.address is not None else here
    gpu_gb = cluster.gpu_gb or (min(gpu.gb for gpu in here) if here else None)
    second = experiment.extractor_model or experiment.model
    _check_model("model", experiment.model)
    _check_model("extractor_model", second)
    for role in ("actor", "extractor"):
        settings: ActorSettings | ExtractorSettings = getattr(experiment, role)
        if settings.train and settings.options.top_p < 1:
            raise ConfigError(
                f"Expected {role}.options.top_p to be 1 with runtime openrlhf, got"
                f" {settings.options.top_p}: vLLM does not say which tokens it kept, and importance"
                f" ratios need them; set it to 1, or {role}.train=false"
            )
    placed: list[PolicyPlacement] = []
    for role, model, sizes, training in (
        ("actor", experiment.model, cluster.actor, experiment.actor),
        ("extractor", second, cluster.extractor, experiment.extractor),
    ):
        shape, rank, engine = shape_of(model.name), None, None
        if shape is not None:
            rank = rank_memory(shape, sizes, reference=training.kl > 0)
            engine = engine_memory(shape, sizes, gpu_gb)
        counts = sizes.nodes * sizes.gpus_per_node, sizes.engines * sizes.tensor_parallel
        policy = PolicyPlacement(role, model.name, sizes, *counts, shape, rank, engine)
        _check_policy(policy, training.max_tokens)
        placed.append(policy)
    actor, extractor = placed
    if cluster.share_gpus:
        _check_sharing(actor, extractor)
        gpus = actor.ranks
    else:
        gpus = sum(policy.ranks + policy.engine_gpus for policy in placed)
    placement = Placement((actor, extractor), cluster.share_gpus, gpus, gpu_gb)
    if cluster.gpus is not None and cluster.address is None:
        check_gpus(placement, cluster.gpus, "cluster.gpus offers")
    elif here is not None:
        check_gpus(placement, len(here), "this machine has")
    for shortage in shortages(placement):
        raise ConfigError(shortage.message)
    return placement


def _check_model(key: str, model: ModelSettings) -> None:
    if model.lora is not None:
        raise ConfigError(
            f"Expected {key}.lora to be null with runtime openrlhf, got rank {model.lora.rank}:"
            " OpenRLHF sends LoRA weights to vLLM under names that vLLM does not know; merge the"
            " adapter into the model first (peft's merge_and_unload) and train all weights"
        )
    if model.dtype == "float32":
        raise ConfigError(
            f"Expected {key}.dtype to be auto or bfloat16 with runtime openrlhf, got float32: its"
            " ranks and engines work in bfloat16, with float32 master weights in the optimiser;"
            f" set {key}.dtype=auto"
        )
    if model.name not in PUBLISHED and (config := read_config(model.name)) is not None:
        check_dense(model.name, config)


def check_dense(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a model with a mixture of experts; ``config`` is its Hugging Face config."""
    if experts := count_experts(config):
        raise ConfigError(
            f"Expected a dense model with runtime openrlhf, got {name} with {experts} experts: vLLM"
            " and the ranks may route a token to different experts, which makes importance ratios"
            " wrong, and the memory arithmetic knows dense models only; train a dense model"
        )


def _check_policy(policy: PolicyPlacement, longest: int) -> None:
    """Refuse sizes of a policy that DeepSpeed, vLLM or its model cannot have."""
    settings, shape, key = policy.settings, policy.shape, f"cluster.{policy.role}"
    if settings.zero_stage == 0:
        raise ConfigError(
            f"Expected {key}.zero_stage of 1, 2 or 3, got 0: checkpoints, offloading and sleep go"
            " through DeepSpeed's divided optimiser; stage 1 on one rank divides nothing"
        )
    if longest >= settings.max_length:
        raise ConfigError(
            f"Expected {key}.max_length to be above {policy.role}.max_tokens, which is {longest},"
            f" got {settings.max_length}: it counts the prompt too"
        )
    _check_engine_arguments(key, settings)
    if shape is None:
        return
    if shape.positions is not None and settings.max_length > shape.positions:
        raise ConfigError(
            f"Expected {key}.max_length of at most {shape.positions}, the positions that"
            f" {policy.model} has, got {settings.max_length}; lower it"
        )
    # vLLM divides query heads among an engine's GPUs; key heads are divided too, or copied whole.
    heads, kv_heads = shape.heads, shape.kv_heads
    possible = [n for n in range(1, heads + 1) if heads % n == 0]
    possible = [n for n in possible if kv_heads % n == 0 or n % kv_heads == 0]
    if settings.tensor_parallel not in possible:
        raise ConfigError(
            f"Expected {key}.tensor_parallel to divide the {heads} query heads of {policy.model}"
            f" and to divide its {kv_heads} key heads or be a multiple of them, got"
            f" {settings.tensor_parallel}; possible: {', '.join(map(str, possible))}"
        )


def _check_engine_arguments(key: str, settings: PolicyClusterSettings) -> None:
    """Refuse arguments that vLLM's engine does not have, or that are set elsewhere or fixed."""
    known = engine_arguments()
    for name in settings.vllm:
        if setting := _ENGINE_SETTINGS.get(name):
            raise ConfigError(
                f"Expected {key}.vllm without {name}; set {setting.format(key=key)} instead"
            )
        if reason := _ENGINE_FIXED.get(name):
            reason = reason.format(key=key)
            raise ConfigError(f"Expected {key}.vllm without {name}, which is fixed: {reason}")
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; see vllm's EngineArgs"
            raise ConfigError(
                f"Expected {key}.vllm to hold engine arguments of vLLM, got {name!r}{hint}"
            )


def _check_sharing(*policies: PolicyPlacement) -> None:
    """Refuse sizes with which two policies cannot share GPUs by time-slicing."""
    shared = policies[0].settings.gpus_per_node
    for policy in policies:
        key, settings = f"cluster.{policy.role}", policy.settings
        if settings.nodes > 1:  # one process schedules, and it must see all that use a GPU
            raise ConfigError(
                f"Expected {key}.nodes=1 with cluster.share_gpus, got {settings.nodes}: turns are"
                " taken on the GPUs of one node; give each policy its own GPUs"
                " (cluster.share_gpus=false) to use several"
            )
        if policy.ranks != shared:  # each rank has a bundle of the shared placement group
            raise ConfigError(
                f"Expected {key}.gpus_per_node={shared} with cluster.share_gpus, as cluster.actor"
                f" has, got {policy.ranks}: both policies train on all the shared GPUs, in turns"
            )
        if policy.engine_gpus != shared:  # CUDA IPC: NCCL refuses two processes on one GPU
            raise ConfigError(
                f"Expected {key}.engines x tensor_parallel to be {shared} with cluster.share_gpus,"
                f" one GPU for each rank, got {settings.engines} x {settings.tensor_parallel}: an"
                " engine takes new weights from the rank on its own GPU"
            )


def check_gpus(placement: Placement, offered: int, source: str) -> None:
    """Raise `ConfigError` where fewer GPUs are ``offered`` than a placement needs.

    ``source`` is subject and verb of the message, e.g. ``this machine has``.
    """
    if placement.gpus > offered:
        parts = [
            f"{policy.role} {policy.ranks} ranks and {policy.engine_gpus} for engines"
            for policy in placement.policies
        ]
        parts += ["in turns"] if placement.shared else []
        raise ConfigError(
            f"Expected at least {placement.gpus} GPUs ({'; '.join(parts)}), {source} {offered};"
            " lower cluster.*.gpus_per_node or engines, share them (cluster.share_gpus=true), or"
            " join a larger cluster (cluster.address)"
        )


def shortages(placement: Placement) -> Iterator[Shortage]:
    """Yield ranks and engines that need more than a GPU has; nothing where either is unknown."""
    gpu_gb = placement.gpu_gb
    for policy in placement.policies:
        if gpu_gb is None or policy.rank is None or policy.engine is None:
            continue
        settings, key, role = policy.settings, f"cluster.{policy.role}", policy.role
        need, listed = _rank_need(placement, policy, policy.rank)
        if need > gpu_gb:
            ways = {
                "zero_stage=3": settings.zero_stage < 3 and policy.ranks > 1,
                "gradient_checkpointing=true": not settings.gradient_checkpointing,
                "micro_batch_size=1": settings.micro_batch_size > 1,
                "offload_optimizer=true": not settings.offload_optimizer,
            }
            helpful = "".join(f"{key}.{way}, " for way, helps in ways.items() if helps)
            yield Shortage(
                f"{role} ranks",
                need,
                f"Expected each rank of the {role} to fit into {gpu_gb:.1f} GB, got about"
                f" {need:.1f} GB by arithmetic ({listed}); try"
                f" {helpful}more ranks, or a smaller {key}.max_length",
            )
        engine, taken, beside = policy.engine, settings.gpu_memory * gpu_gb, 0.0
        if placement.shared:
            beside = PROCESS_GB + sum(p.rank.asleep for p in placement.policies if p.rank)
        if taken + beside > gpu_gb:
            yield Shortage(
                f"{role} engine",
                taken + beside,
                f"Expected an engine of the {role} and the weights of sleeping ranks to fit into"
                f" {gpu_gb:.1f} GB, got {taken:.1f} GB ({key}.gpu_memory={settings.gpu_memory:g})"
                f" and {beside:.1f} GB; lower {key}.gpu_memory to"
                f" {max(0.0, 1 - beside / gpu_gb):.2f}, or use cluster.*.zero_stage=3",
            )
        elif engine.tokens is not None and engine.tokens < settings.max_length:
            yield Shortage(
                f"{role} engine",
                engine.needed,
                f"Expected an engine of the {role} to hold one sequence of {settings.max_length}"
                f" tokens (vLLM refuses to start otherwise), got room for {engine.tokens} in"
                f" {taken:.1f} GB after {engine.needed:.1f} GB for weights and work; raise"
                f" {key}.tensor_parallel or {key}.gpu_memory, or lower {key}.max_length",
            )


def _rank_need(
    placement: Placement, policy: PolicyPlacement, rank: RankMemory
) -> tuple[float, str]:
    """Return the GB that are taken while a rank uses its GPU, and a list of the parts from 0.05.

    A sleeping rank keeps its bfloat16 weights, a sleeping engine nothing but its process.
    """
    beside = 0.0
    if placement.shared:
        others = (p.rank.asleep for p in placement.policies if p.rank and p is not policy)
        beside = sum(others) + 2 * PROCESS_GB
    parts = {
        "weights": rank.weights,
        "gradients": rank.gradients,
        "optimiser": rank.optimizer,
        "reference": rank.reference,
        "process": PROCESS_GB,
        "others asleep": beside,
    }
    moment = {"gathered": rank.gathered, "activations": rank.activations, "logits": rank.logits}
    if sum(moment.values()) < rank.step:
        moment = {"float32 gradients": rank.step}
    listed = (parts | moment).items()
    text = " + ".join(f"{name} {value:.1f}" for name, value in listed if value >= 0.05)
    return rank.total + beside, text


def describe_placement(experiment: Experiment, placement: Placement) -> Iterator[str]:
    """Yield the lines of ``--dry-run``: GPUs, then each policy, then the machine's memory."""
    where = "a Ray started on this machine"
    if experiment.cluster.address:
        where = f"the Ray cluster at {experiment.cluster.address}"
    turns = ", all of them in turns by both policies' ranks and engines" if placement.shared else ""
    memory = " of unknown memory (say cluster.gpu_gb to have it checked)"
    if placement.gpu_gb:
        memory = f" of {placement.gpu_gb:.1f} GB"
    yield f"placement: {_count(placement.gpus, 'GPU')}{memory} on {where}{turns}"
    hosts: list[str] = []  # offloaded optimisers, sleeping states and the embedder
    for policy in placement.policies:
        settings, shape, rank, engine = policy.settings, policy.shape, policy.rank, policy.engine
        size = "memory unknown: no config.json at hand"
        if shape:
            size = f"{shape.parameters / 1e6:,.0f} million parameters"
        ranks, per_node = _count(policy.ranks, "rank"), _count(settings.gpus_per_node, "GPU")
        yield f"{policy.role}: {policy.model}, {size}"
        yield (
            f"  training: {ranks} ({_count(settings.nodes, 'node')} x {per_node}), ZeRO"
            f" {settings.zero_stage}; a step takes at most {settings.batch_size} sequences of"
            f" {settings.max_length} tokens, packed into rows of at most"
            f" {settings.micro_batch_size * settings.max_length}"
        )
        if rank:
            need, listed = _rank_need(placement, policy, rank)
            yield f"    GB a GPU: {need:.1f} = {listed}"
        yield (
            f"  generation: {_count(settings.engines, 'engine')} x"
            f" {_count(settings.tensor_parallel, 'GPU')}, {settings.gpu_memory:.0%} of each"
        )
        if engine:
            parts = f"weights {engine.weights:.1f} + work {engine.needed - engine.weights:.1f}"
            if engine.cache is None or engine.tokens is None:
                yield f"    GB a GPU: {parts} + cache, {engine.token_bytes:,} bytes a token"
            else:
                whole = _count(engine.tokens // settings.max_length, "sequence")
                yield (
                    f"    GB a GPU: {engine.needed + engine.cache:.1f} = {parts} + cache"
                    f" {engine.cache:.1f}: {engine.tokens:,} tokens, {whole} of"
                    f" {settings.max_length} at once"
                )
        if rank and rank.host:
            optimizer = f"{rank.host * settings.gpus_per_node:.1f} GB on each node"
            hosts.append(f"{optimizer} that trains the {policy.role} (optimiser)")
        if policy.shape and experiment.cluster.background_checkpoints:
            copy = STATE_BYTES * policy.shape.parameters / 1e9 / settings.nodes
            hosts.append(f"{copy:.1f} GB on each node that trains the {policy.role} (checkpoint)")
        if rank and engine and placement.shared:
            moved = (rank.gradients + rank.optimizer) * settings.gpus_per_node
            asleep = moved + engine.weights * policy.engine_gpus
            hosts.append(f"{asleep:.1f} GB while the {policy.role} sleeps")
    sizes = {p.role: STATE_BYTES * p.shape.parameters / 1e9 for p in placement.policies if p.shape}
    if len(sizes) == len(placement.policies):
        listed = " + ".join(f"{role} {size:.1f}" for role, size in sizes.items())
        size, keep = sum(sizes.values()), CheckpointStore.keep
        yield (
            f"checkpoint: {size:.1f} GB = {listed}, written by all ranks;"
            f" {(keep + 1) * size:.1f} GB on disk while it is written beside the {keep} kept"
        )
    embedder = PUBLISHED.get(experiment.bank.embedder or "")
    if embedder:
        need, name = f"{4 * embedder.parameters / 1e9:.1f} GB", experiment.bank.embedder
        hosts.append(f"{need} where the bank is (embedder {name}, float32, on CPU)")
    yield from (f"machine memory: {line}" for line in hosts)
    yield "these are sums, not measurements: see docs/cluster.md"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
