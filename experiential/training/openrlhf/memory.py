"""Memory per GPU by arithmetic, before anything starts. Nothing here was measured on a GPU; units are 1e9 bytes.

With N parameters, R ranks, micro-batches of M sequences of L tokens (T = M L positions) and a
vocabulary of V, a rank holds:

| Part | Bytes | Divided by R from |
|---|---|---|
| weights, bfloat16 | 2 N | ZeRO 3 |
| gradients, bfloat16 | 2 N | ZeRO 2 |
| float32 weights and AdamW's two moments | 12 N; none with ``offload_optimizer``, then in the machine's memory | ZeRO 1 |
| reference weights, with a KL penalty | 2 N | ZeRO 3 |
| float32 gradients, while the optimiser steps | 4 N; none with ``offload_optimizer`` | ZeRO 1 |
| weights gathered from other ranks under ZeRO 3 | 2 min(N, 1e9): DeepSpeed's limit of live parameters | |
| activations | T (layers A), or with checkpointing T (layers 2 hidden + A) | |
| logits | V (2 T + 12 P) for P trained positions | |
| process: CUDA context, NCCL buffers, fragments | 1.5e9, assumed | |

A, what one layer keeps of one token for the backward pass, is ``16 hidden + 4 queries + 4 keys + 8
intermediate`` bytes: two RMS norms that work in float32 (6 hidden each), the inputs of two blocks
of projections (2 hidden each), queries, keys, values and the result of attention in bfloat16, and
four tensors of the gated feed-forward part. Norms of queries and keys (Qwen3) keep 6 (queries +
keys) more, ``eager`` attention its scores: 6 heads L. On the CPU this is within 4 % of what
autograd keeps of Llama, Qwen2 and Qwen3 (a test).

The logits are bfloat16 at every position; those of trained positions are brought to float32,
divided by the temperature and put through log-softmax, which makes three of that size (measured on
the CPU, a test; where draws were restricted, one byte more). P is at most T and at most what M
sequences may sample. Activations and logits are gone when the optimiser steps, so the larger of the
two moments counts.

An engine takes ``gpu_memory`` of a GPU: its part of the weights (2 N / tensor_parallel), the
process, 1e9 for the work of one forward pass (assumed), and the rest is cache: 2 (key, value) x 2
bytes x layers x key heads on this GPU x head width for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiential.config import PolicyClusterSettings
from experiential.training.openrlhf.shape import Shape

PROCESS_GB = 1.5
"""Taken by any process on a GPU before it holds a tensor; an assumption."""
ENGINE_WORK_GB = 1.0
"""Taken by an engine's forward pass; an assumption, vLLM measures its own when it starts."""
LIVE_PARAMETERS = 1e9
"""Parameters that ZeRO 3 gathers at once at most: DeepSpeed's default of
``stage3_max_live_parameters``.
"""


@dataclass(frozen=True)
class RankMemory:
    """What one DeepSpeed rank needs of its GPU, in units of 1e9 bytes, and of its machine."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    gathered: float
    activations: float
    logits: float
    step: float
    host: float
    """Of the machine's memory: the optimiser's state when it is offloaded."""

    @property
    def total(self) -> float:
        """Most that is needed at one moment."""
        passes = self.gathered + self.activations + self.logits
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.reference
            + PROCESS_GB
            + max(passes, self.step)
        )

    @property
    def asleep(self) -> float:
        """What stays on the GPU while another takes its turn: DeepSpeed moves optimiser and gradients away, OpenRLHF keeps the weights."""
        return self.weights + self.reference + PROCESS_GB

    @property
    def moved(self) -> float:
        """What goes to the machine's memory while another takes its turn."""
        return self.gradients + self.optimizer


@dataclass(frozen=True)
class EngineMemory:
    """What one vLLM engine needs of each of its GPUs, in units of 1e9 bytes."""

    weights: float
    token_bytes: int
    """Cache of one token on one GPU."""
    cache: float | None
    """None when the memory of the GPU is not known."""

    @property
    def needed(self) -> float:
        """Without any cache."""
        return self.weights + PROCESS_GB + ENGINE_WORK_GB

    @property
    def tokens(self) -> int | None:
        """Tokens that the cache holds."""
        return None if self.cache is None else max(0, int(self.cache * 1e9 / self.token_bytes))


def rank_memory(
    shape: Shape, settings: PolicyClusterSettings, *, sampled: int, reference: bool
) -> RankMemory:
    """What a rank needs, by the table above.

    Args:
        shape: of the model.
        settings: sizes of the policy.
        sampled: tokens of one sequence that were sampled, at most.
        reference: the first weights are kept for a KL penalty.
    """
    ranks, stage = settings.nodes * settings.gpus_per_node, settings.zero_stage
    billions = shape.parameters / 1e9
    of_stage = {least: billions / (ranks if stage >= least else 1) for least in (1, 2, 3)}
    positions = settings.micro_batch_size * settings.max_length
    trained = settings.micro_batch_size * min(sampled, settings.max_length)
    offload = settings.offload_optimizer
    return RankMemory(
        weights=2 * of_stage[3],
        gradients=2 * of_stage[2],
        optimizer=0.0 if offload else 12 * of_stage[1],
        reference=2 * of_stage[3] if reference else 0.0,
        gathered=2 * min(billions, LIVE_PARAMETERS / 1e9) if stage == 3 else 0.0,
        activations=positions * token_activations(shape, settings) / 1e9,
        logits=shape.vocabulary * (2 * positions + 12 * trained) / 1e9,
        step=0.0 if offload else 4 * of_stage[1],
        host=12 * of_stage[1] if offload else 0.0,
    )


def token_activations(shape: Shape, settings: PolicyClusterSettings) -> int:
    """Bytes kept of one token until the backward pass, without logits."""
    layer = 16 * shape.hidden + 4 * shape.queries + 4 * shape.keys + 8 * shape.intermediate
    if shape.head_norms:
        layer += 6 * (shape.queries + shape.keys)
    if settings.attention == "eager":
        layer += 6 * shape.heads * settings.max_length
    if settings.gradient_checkpointing:
        return shape.layers * 2 * shape.hidden + layer
    return shape.layers * layer


def engine_memory(
    shape: Shape, settings: PolicyClusterSettings, gpu_gb: float | None
) -> EngineMemory:
    """What an engine needs of each of its GPUs.

    Args:
        shape: of the model.
        settings: sizes of the policy.
        gpu_gb: memory of a GPU in units of 1e9 bytes, if it is known.
    """
    weights = 2 * shape.parameters / 1e9 / settings.tensor_parallel
    heads = max(1, shape.kv_heads // settings.tensor_parallel)
    rest = (
        None
        if gpu_gb is None
        else settings.gpu_memory * gpu_gb - weights - PROCESS_GB - ENGINE_WORK_GB
    )
    return EngineMemory(
        weights=weights, token_bytes=4 * shape.layers * heads * shape.head_dim, cache=rest
    )
