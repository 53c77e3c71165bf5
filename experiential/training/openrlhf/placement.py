"""Who sits where on a cluster, what it needs of each GPU, and what is impossible: decided before anything starts, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experiential.config import Experiment, ModelSettings, PolicyClusterSettings
from experiential.errors import ConfigError
from experiential.training.openrlhf.machine import Gpu
from experiential.training.openrlhf.memory import (
    PROCESS_GB,
    EngineMemory,
    RankMemory,
    engine_memory,
    rank_memory,
)
from experiential.training.openrlhf.shape import Shape, shape_of


@dataclass(frozen=True)
class Seat:
    """One policy's share of a cluster.

    Attributes:
        role: ``actor`` or ``extractor``; settings of this policy are under ``cluster.ROLE``.
        model: its name, as in the settings.
        settings: its sizes.
        shape: of the model; None when it cannot be known without a download.
        rank: memory of one DeepSpeed rank; None without a shape.
        engine: memory of one GPU of an engine; None without a shape.
    """

    role: str
    model: str
    settings: PolicyClusterSettings
    shape: Shape | None
    rank: RankMemory | None
    engine: EngineMemory | None

    @property
    def ranks(self) -> int:
        """DeepSpeed ranks, one GPU each."""
        return self.settings.nodes * self.settings.gpus_per_node

    @property
    def engine_gpus(self) -> int:
        """GPUs of all its engines."""
        return self.settings.engines * self.settings.tensor_parallel


@dataclass(frozen=True)
class Placement:
    """Both policies on a cluster.

    Attributes:
        seats: actor and extractor, in this order.
        shared: all take turns on the same GPUs of one node.
        gpus: GPUs needed in all.
        gpu_gb: memory of a GPU in units of 1e9 bytes; None when it is not known.
    """

    seats: tuple[Seat, Seat]
    shared: bool
    gpus: int
    gpu_gb: float | None


def place(experiment: Experiment, here: Sequence[Gpu] | None = None) -> Placement:
    """The placement of an experiment; both policies get ranks and engines, trained or not.

    Args:
        experiment: its ``cluster`` says the sizes.
        here: the GPUs of this machine; None when they are not known, or when the run will be on
            another machine. They are ignored where a cluster is joined (``cluster.address``).

    Raises:
        ConfigError: what is asked for is impossible; the message says what is required and why.
        ModelNotFoundError: a model folder does not exist.
    """
    cluster = experiment.cluster
    here = None if cluster.address is not None else here
    gpu_gb = cluster.gpu_gb or (min(gpu.gb for gpu in here) if here else None)
    models = (experiment.model, experiment.extractor_model or experiment.model)
    for role, model in zip(("model", "extractor_model"), models, strict=True):
        _check_model(role, model)
    kl, longest = (
        (experiment.actor.kl > 0, experiment.extractor.kl > 0),
        (experiment.actor.max_tokens, experiment.extractor.max_tokens),
    )
    actor = _seat(
        "actor", models[0], cluster.actor, experiment.env.max_turns * longest[0], kl[0], gpu_gb
    )
    extractor = _seat("extractor", models[1], cluster.extractor, longest[1], kl[1], gpu_gb)
    _check_seat(actor, longest[0])
    _check_seat(extractor, longest[1])
    if cluster.share_gpus:
        _check_sharing((actor, extractor))
    gpus = (
        actor.ranks
        if cluster.share_gpus
        else sum(seat.ranks + seat.engine_gpus for seat in (actor, extractor))
    )
    placement = Placement((actor, extractor), cluster.share_gpus, gpus, gpu_gb)
    if cluster.gpus is not None and cluster.address is None:
        check_gpus(placement, cluster.gpus, "cluster.gpus offers")
    elif here is not None:
        check_gpus(placement, len(here), "this machine has")
    for shortage in shortages(placement):
        raise ConfigError(shortage.message)
    return placement


class Shortage(NamedTuple):
    """A role that does not fit into its GPU."""

    who: str
    need: float
    message: str


def shortages(placement: Placement) -> Iterator[Shortage]:
    """The roles that need more memory than a GPU has, by the estimate of `memory`; none while either is not known."""
    for seat in placement.seats:
        if placement.gpu_gb is None or seat.rank is None or seat.engine is None:
            continue
        beside = resting(placement, seat, rank=True)
        need = seat.rank.total + beside
        if need > placement.gpu_gb:
            yield Shortage(
                f"{seat.role} ranks",
                need,
                _rank_message(seat, seat.rank, need, beside, placement.gpu_gb),
            )
        beside = resting(placement, seat, rank=False)
        yield from _engine_shortages(seat, seat.engine, beside, placement.gpu_gb)


def resting(placement: Placement, awake: Seat, *, rank: bool) -> float:
    """What all others keep on a GPU while one takes its turn, in units of 1e9 bytes; 0 where nobody shares.

    A sleeping rank keeps its bfloat16 weights, a sleeping engine nothing but its process.

    Args:
        placement: who shares.
        awake: whose turn it is.
        rank: whether its rank is awake, else its engine.
    """
    if not placement.shared:
        return 0.0
    ranks = sum(
        seat.rank.asleep for seat in placement.seats if seat.rank and not (rank and seat is awake)
    )
    return ranks + PROCESS_GB * (2 if rank else 1)


def _engine_shortages(
    seat: Seat, engine: EngineMemory, beside: float, gpu_gb: float
) -> Iterator[Shortage]:
    settings, key = seat.settings, f"cluster.{seat.role}"
    taken = settings.gpu_memory * gpu_gb
    if taken + beside > gpu_gb:
        yield Shortage(
            f"{seat.role} engine",
            taken + beside,
            f"Expected an engine of the {seat.role} and the weights of sleeping ranks to fit into"
            f" {gpu_gb:.1f} GB, got {taken:.1f} GB ({key}.gpu_memory={settings.gpu_memory:g}) and"
            f" {beside:.1f} GB; lower {key}.gpu_memory to {max(0.0, 1 - beside / gpu_gb):.2f}, or"
            " use cluster.*.zero_stage=3",
        )
    elif engine.tokens is not None and engine.tokens < settings.max_length:
        yield Shortage(
            f"{seat.role} engine",
            engine.needed,
            f"Expected an engine of the {seat.role} to hold one sequence of {settings.max_length}"
            f" tokens (vLLM refuses to start otherwise), got room for {engine.tokens} in"
            f" {taken:.1f} GB after {engine.needed:.1f} GB for weights and work; raise"
            f" {key}.tensor_parallel or {key}.gpu_memory, or lower {key}.max_length",
        )


def _rank_message(seat: Seat, rank: RankMemory, need: float, beside: float, gpu_gb: float) -> str:
    key = f"cluster.{seat.role}"
    ways = [
        *(() if seat.settings.zero_stage == 3 or seat.ranks == 1 else (f"{key}.zero_stage=3",)),
        *(() if seat.settings.gradient_checkpointing else (f"{key}.gradient_checkpointing=true",)),
        *(() if seat.settings.micro_batch_size == 1 else (f"{key}.micro_batch_size=1",)),
        *(() if seat.settings.offload_optimizer else (f"{key}.offload_optimizer=true",)),
        f"more ranks, or a smaller {key}.max_length",
    ]
    return (
        f"Expected each rank of the {seat.role} to fit into {gpu_gb:.1f} GB, got about {need:.1f}"
        f" GB by arithmetic ({describe_rank(rank, beside)}); try {', '.join(ways)}"
    )


def describe_rank(rank: RankMemory, beside: float = 0.0) -> str:
    """The parts of a rank's memory that count, in GB; what is under 0.05 is left out."""
    parts = {
        "weights": rank.weights,
        "gradients": rank.gradients,
        "optimiser": rank.optimizer,
        "reference": rank.reference,
        "process": PROCESS_GB,
        "others asleep": beside,
    }
    moments = {"gathered": rank.gathered, "activations": rank.activations, "logits": rank.logits}
    if sum(moments.values()) < rank.step:
        moments = {"float32 gradients": rank.step}
    return " + ".join(
        f"{name} {value:.1f}" for name, value in (parts | moments).items() if value >= 0.05
    )


def _seat(
    role: str,
    model: ModelSettings,
    settings: PolicyClusterSettings,
    sampled: int,
    reference: bool,
    gpu_gb: float | None,
) -> Seat:
    shape = shape_of(model.name)
    if shape is None:
        return Seat(role, model.name, settings, None, None, None)
    rank = rank_memory(shape, settings, sampled=sampled, reference=reference)
    return Seat(role, model.name, settings, shape, rank, engine_memory(shape, settings, gpu_gb))


def _check_model(key: str, model: ModelSettings) -> None:
    if model.lora is not None:
        raise ConfigError(
            f"Expected {key}.lora to be null with runtime openrlhf, got rank {model.lora.rank}:"
            " OpenRLHF sends LoRA weights to vLLM under names that vLLM does not know; merge the"
            " adapter into the model first (peft's merge_and_unload) and train all weights"
        )
    if model.dtype != "bfloat16":
        raise ConfigError(
            f"Expected {key}.dtype to be bfloat16 with runtime openrlhf, got {model.dtype}: its"
            " ranks and engines work in bfloat16, with float32 master weights in the optimiser;"
            f" set {key}.dtype=bfloat16"
        )


def _check_seat(seat: Seat, longest: int) -> None:
    _check_batch(seat)
    _check_optimizer(seat)
    _check_lengths(seat, longest)
    _check_heads(seat)


def _check_batch(seat: Seat) -> None:
    settings, unit = seat.settings, seat.settings.micro_batch_size * seat.ranks
    if settings.batch_size % unit:
        raise ConfigError(
            f"Expected cluster.{seat.role}.batch_size to be a multiple of {unit} = micro_batch_size"
            f" {settings.micro_batch_size} x {seat.ranks} ranks, got {settings.batch_size}: every"
            f" rank takes as many micro-batches; set it to {-(-settings.batch_size // unit) * unit}"
        )


def _check_optimizer(seat: Seat) -> None:
    if seat.settings.zero_stage == 0:
        raise ConfigError(
            f"Expected cluster.{seat.role}.zero_stage of 1, 2 or 3, got 0: checkpoints, offloading"
            " and sleep go through DeepSpeed's divided optimiser; stage 1 on one rank divides"
            " nothing"
        )


def _check_lengths(seat: Seat, longest: int) -> None:
    settings, key = seat.settings, f"cluster.{seat.role}.max_length"
    if longest >= settings.max_length:
        raise ConfigError(
            f"Expected {key} to be above {seat.role}.max_tokens, which is {longest}, got"
            f" {settings.max_length}: it counts the prompt too"
        )
    if (
        seat.shape is not None
        and seat.shape.positions is not None
        and settings.max_length > seat.shape.positions
    ):
        raise ConfigError(
            f"Expected {key} of at most {seat.shape.positions}, the positions that {seat.model}"
            f" has, got {settings.max_length}; lower it"
        )


def _check_heads(seat: Seat) -> None:
    """An engine divides query heads among its GPUs; key heads are divided too, or copied whole."""
    if seat.shape is None:
        return
    parts, heads, kv_heads = seat.settings.tensor_parallel, seat.shape.heads, seat.shape.kv_heads
    if heads % parts or (kv_heads % parts and parts % kv_heads):
        possible = [
            n
            for n in range(1, heads + 1)
            if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
        ]
        raise ConfigError(
            f"Expected cluster.{seat.role}.tensor_parallel to divide the {heads} query heads of"
            f" {seat.model} and to divide its {kv_heads} key heads or be a multiple of them, got"
            f" {parts}; possible: {', '.join(map(str, possible))}"
        )


def _check_sharing(seats: tuple[Seat, Seat]) -> None:
    """Turns on the same GPUs.

    One node, because a turn is given on one machine. As many ranks of each policy as GPUs, because
    each has one bundle of the shared placement group. As many GPUs of engines, because an engine
    takes new weights through CUDA IPC from the rank on its own GPU: NCCL refuses two processes of
    one group on one GPU.
    """
    shared = seats[0].settings.gpus_per_node
    for seat in seats:
        key = f"cluster.{seat.role}"
        if seat.settings.nodes > 1:
            raise ConfigError(
                f"Expected {key}.nodes=1 with cluster.share_gpus, got {seat.settings.nodes}: turns"
                " are taken on the GPUs of one node; give each policy its own GPUs"
                " (cluster.share_gpus=false) to use several"
            )
        if seat.ranks != shared:
            raise ConfigError(
                f"Expected {key}.gpus_per_node={shared} with cluster.share_gpus, as cluster.actor"
                f" has, got {seat.ranks}: both policies train on all the shared GPUs, in turns"
            )
        if seat.engine_gpus != shared:
            raise ConfigError(
                f"Expected {key}.engines x tensor_parallel to be {shared} with cluster.share_gpus,"
                f" one GPU for each rank, got {seat.settings.engines} x"
                f" {seat.settings.tensor_parallel}: an engine takes new weights from the rank on"
                " its own GPU"
            )


def check_gpus(placement: Placement, offered: int, source: str) -> None:
    """Refuse a placement that needs more GPUs than there are; Ray would wait for them without an end and without a word.

    Args:
        placement: what is needed.
        offered: GPUs that there are.
        source: who has them, for the message, e.g. ``this machine has``.

    Raises:
        ConfigError: there are too few.
    """
    if placement.gpus > offered:
        parts = [
            f"{seat.role} {seat.ranks} ranks and {seat.engine_gpus} for engines"
            for seat in placement.seats
        ]
        raise ConfigError(
            f"Expected at least {placement.gpus} GPUs"
            f" ({'; '.join(parts)}{'; in turns' if placement.shared else ''}), {source} {offered};"
            " lower cluster.*.gpus_per_node or engines, share them (cluster.share_gpus=true), or"
            " join a larger cluster (cluster.address)"
        )
