"""A placement in words: what `--dry-run` prints."""

from __future__ import annotations

from collections.abc import Iterator

from experiential.config import Experiment
from experiential.training.openrlhf.placement import Placement, Seat, describe_rank, resting
from experiential.training.openrlhf.shape import PUBLISHED


def describe_placement(experiment: Experiment, placement: Placement) -> Iterator[str]:
    """Lines: GPUs in all, then each policy's ranks and engines with their memory, then the machine's memory."""
    cluster = experiment.cluster
    where = (
        f"the Ray cluster at {cluster.address}"
        if cluster.address
        else "a Ray started on this machine"
    )
    turns = ", all of them in turns by both policies' ranks and engines" if placement.shared else ""
    memory = (
        f" of {placement.gpu_gb:.1f} GB"
        if placement.gpu_gb
        else " of unknown memory (say cluster.gpu_gb to have it checked)"
    )
    yield f"placement: {_count(placement.gpus, 'GPU')}{memory} on {where}{turns}"
    for seat in placement.seats:
        yield from _seat_lines(placement, seat)
    yield from _host_lines(experiment, placement)
    yield "these are sums, not measurements: see docs/cluster.md"


def _seat_lines(placement: Placement, seat: Seat) -> Iterator[str]:
    s = seat.settings
    size = (
        f"{seat.shape.parameters / 1e6:,.0f} million parameters"
        if seat.shape
        else "memory unknown: no config.json at hand"
    )
    steps = s.batch_size // (s.micro_batch_size * seat.ranks)
    yield f"{seat.role}: {seat.model}, {size}"
    yield (
        f"  training: {_count(seat.ranks, 'rank')} ({_count(s.nodes, 'node')} x"
        f" {_count(s.gpus_per_node, 'GPU')}), ZeRO {s.zero_stage}; an update takes {s.batch_size}"
        f" sequences of at most {s.max_length} tokens = {_count(seat.ranks, 'rank')} x"
        f" {_count(steps, 'micro-batch', 'es')} of {s.micro_batch_size}"
    )
    if seat.rank:
        beside = resting(placement, seat, rank=True)
        yield f"    GB a GPU: {seat.rank.total + beside:.1f} = {describe_rank(seat.rank, beside)}"
    yield (
        f"  generation: {_count(s.engines, 'engine')} x {_count(s.tensor_parallel, 'GPU')},"
        f" {s.gpu_memory:.0%} of each"
    )
    if seat.engine:
        yield f"    GB a GPU: {_engine_words(seat)}"


def _engine_words(seat: Seat) -> str:
    engine, length = seat.engine, seat.settings.max_length
    assert engine is not None
    needed = f"weights {engine.weights:.1f} + work {engine.needed - engine.weights:.1f}"
    if engine.cache is None or engine.tokens is None:
        return f"{needed} + cache, {engine.token_bytes:,} bytes a token"
    total, whole = engine.needed + engine.cache, engine.tokens // length
    return (
        f"{total:.1f} = {needed} + cache {engine.cache:.1f}: {engine.tokens:,} tokens,"
        f" {_count(whole, 'sequence')} of {length} at once"
    )


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def _host_lines(experiment: Experiment, placement: Placement) -> Iterator[str]:
    """What is kept in the memory of machines: offloaded optimisers, what sleeps, and the embedder."""
    for seat in placement.seats:
        if seat.rank is None or seat.engine is None:
            continue
        on_node = seat.settings.gpus_per_node
        if seat.rank.host:
            yield (
                f"machine memory: {seat.rank.host * on_node:.1f} GB on each node that trains the"
                f" {seat.role} (optimiser)"
            )
        if placement.shared:
            asleep = seat.rank.moved * on_node + seat.engine.weights * seat.engine_gpus
            yield f"machine memory: {asleep:.1f} GB while the {seat.role} sleeps"
    embedder = PUBLISHED.get(experiment.bank.embedder or "")
    if embedder:
        size = 4 * embedder.parameters / 1e9
        yield (
            f"machine memory: {size:.1f} GB where the bank is (embedder {experiment.bank.embedder},"
            " float32, on CPU)"
        )
