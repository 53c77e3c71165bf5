"""Compute memory per GPU from a model's shape, before anything starts.

Nothing here was measured on a GPU; units are 1e9 bytes. DeepSpeed's own ZeRO estimators do not
serve: a machine that plans a run may lack DeepSpeed, and they leave out activations and logits,
which decide here.

With N parameters, R ranks, rows of at most T = M L tokens (``micro_batch_size`` x ``max_length``)
and a vocabulary of V, a rank holds:

| Part | Bytes | Divided by R from |
|---|---|---|
| weights, bfloat16 | 2 N | ZeRO 3 |
| gradients, bfloat16 | 2 N | ZeRO 2 |
| float32 weights, AdamW's two moments; in the machine with ``offload_optimizer`` | 12 N | ZeRO 1 |
| reference weights, with a KL penalty | 2 N | ZeRO 3 |
| float32 gradients while the optimiser steps; none with ``offload_optimizer`` | 4 N | ZeRO 1 |
| weights gathered from other ranks under ZeRO 3, to DeepSpeed's limit | 2 min(N, 1e9) | |
| activations | T (layers A), or with checkpointing T (layers 2 hidden + A) | |
| masks, and keys and values of rows that branch | T L + T 32 queries (layers, or 1) | |
| states of P trained positions, and their gradients | 4 P hidden | |
| logits, X = min(P V, `LOGITS`) at a time, and gradients of the head | 12 X + 2 V hidden | |
| gradients of the head while those of several pieces are added | 6 V hidden | |
| process: CUDA context, NCCL buffers, fragments | 1.5e9, assumed | |

A, kept by one layer of one token for the backward pass, is ``16 hidden + 4 queries + 4 keys + 8
intermediate`` bytes: two RMS norms that work in float32 (6 hidden each), the inputs of two blocks
of projections (2 hidden each), queries, keys, values and the result of attention in bfloat16, and
four tensors of the gated feed-forward part. Norms of queries and keys (Qwen3) keep 6 (queries +
keys) more, ``eager`` attention its scores: 6 heads L. On the CPU this is within 4 % of what
autograd keeps of Llama, Qwen2 and Qwen3 (a test).

A query behind a branch keeps at most 8 keys and values of its own (`attention`), on a GPU of each
head of queries; masks have at most half of all pairs of a token and one of its sequence. Rows in
which little is shared need much less.

Logits are made for trained positions only, and again in the backward pass. They are brought to
float32, divided by the temperature and put through log-softmax: 12 bytes of each at one moment,
and one more where draws were restricted. The gradients of the output layer's weight from one
piece, from those before it and their sum are alive together (both measured on the CPU, a test). P
is at most T, but for equal responses of a group, each of which counts. In the dry run, ``logits``
are the states and the larger of the two rows after them, ``activations`` the two rows before them.
Activations and logits are gone when the optimiser steps, so the larger of the two moments counts.

An engine takes ``gpu_memory`` of a GPU: its part of the weights (2 N / tensor_parallel), the
process, 1e9 for the work of one forward pass (assumed), and the rest is cache: 2 (key, value) x 2
bytes x layers x key heads on this GPU x head width for each token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from experiential.config import PolicyClusterSettings
from experiential.errors import ModelNotFoundError
from experiential.llm.models import AFTER_HEAD, resolve_model
from experiential.types import Record

PROCESS_GB = 1.5
"""Taken by any process on a GPU before it holds a tensor; an assumption."""
ENGINE_WORK_GB = 1.0
"""Taken by an engine's forward pass; an assumption, vLLM measures its own when it starts."""
LIVE_PARAMETERS = 1e9
"""Most parameters that ZeRO 3 gathers at once: DeepSpeed's ``stage3_max_live_parameters``."""

LOGITS = 2**27
"""Logits that a rank makes at a time: 883 positions of Qwen2.5-7B, so that a product of the head is
no smaller than its weight, which each piece reads.
"""
STATE_BYTES = 12
"""Bytes of a parameter in a checkpoint: float32 weight and AdamW's two moments."""


class Shape(Record):
    """Describe a dense decoder of the Llama family, from which its memory follows.

    Such a decoder has grouped-query attention, a gated feed-forward part and RMS norms.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the feed-forward part.
        tied: the output layer is the embedding.
        head_norms: queries and keys are normalised in each head, as in Qwen3.
        positions: most tokens of a sequence; None when unknown.
    """

    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    intermediate: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocabulary: int = Field(gt=0)
    tied: bool = False
    qkv_bias: bool = False
    head_norms: bool = False
    positions: int | None = None

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (queries + keys) + self.qkv_bias * (queries + 2 * keys)
        norms = 2 * self.hidden + self.head_norms * 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + norms
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return embeddings + self.layers * layer + self.hidden


_QWEN3_4B = Shape(
    layers=36, hidden=2560, intermediate=9728, heads=32, kv_heads=8, head_dim=128,
    vocabulary=151_936, tied=True, head_norms=True, positions=262_144,
)  # fmt: skip
PUBLISHED: Mapping[str, Shape] = {
    "smollm2": Shape(
        layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64,
        vocabulary=49_152, tied=True, positions=8192,
    ),
    "Qwen/Qwen2.5-7B-Instruct": Shape(
        layers=28, hidden=3584, intermediate=18_944, heads=28, kv_heads=4, head_dim=128,
        vocabulary=152_064, qkv_bias=True, positions=32_768,
    ),
    "Qwen/Qwen3-4B": _QWEN3_4B.model_copy(update={"positions": 40_960}),
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B,
    "Qwen/Qwen3-4B-Thinking-2507": _QWEN3_4B,
    "Qwen/Qwen3-Embedding-0.6B": Shape(
        layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128,
        vocabulary=151_669, tied=True, head_norms=True, positions=32_768,
    ),
}  # fmt: skip
"""Shapes as published in each model's config.json; ``smollm2`` is here so that planning need not
convert its weights.
"""


def shape_of(name: str) -> Shape | None:
    """Return the shape of the model called ``name``, or None when only a download could tell.

    A folder's ``config.json`` is read; ``tiny`` is the packaged one; a few hub names are known
    (`PUBLISHED`).

    Raises:
        ModelNotFoundError: a folder that does not exist, or whose config.json is not JSON.
    """
    if name in PUBLISHED:
        return PUBLISHED[name]
    config = read_config(name)
    return None if config is None else shape_from_config(config)


def read_config(name: str) -> dict[str, Any] | None:
    """Return the ``config.json`` of a model folder; None for a hub name.

    Raises:
        ModelNotFoundError: a folder that does not exist, or whose config.json is not JSON.
    """
    folder = resolve_model(name)
    if not isinstance(folder, Path):
        return None
    file = folder / "config.json"
    try:
        return json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelNotFoundError(
            f"Expected JSON in {file}, got: {error}; copy the model's folder again"
        ) from error


def count_experts(config: Mapping[str, Any]) -> int:
    """Return the experts of a layer in a Hugging Face config; 0 for a dense model.

    >>> count_experts({"num_local_experts": 8, "num_experts_per_tok": 2}), count_experts({})
    (8, 0)
    """
    counts = (value for key, value in config.items() if "experts" in key and isinstance(value, int))
    return max((count for count in counts if count > 1), default=0)


def shape_from_config(config: Mapping[str, Any]) -> Shape | None:
    """Return the shape in a Hugging Face ``config.json``, or None for other architectures."""
    generates = any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())
    if not generates or count_experts(config):
        return None
    if any(config.get(name) not in (None, 1, 1.0) for name in AFTER_HEAD):
        return None
    kind = config.get("model_type")
    try:
        heads = config["num_attention_heads"]
        return Shape(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            head_norms=kind == "qwen3",
            positions=config.get("max_position_embeddings"),
        )
    except (KeyError, ValidationError):
        return None


@dataclass(frozen=True)
class RankMemory:
    """List the needs of one DeepSpeed rank, by the table above, in units of 1e9 bytes.

    ``step`` holds float32 gradients while the optimiser steps; ``host`` is the machine's memory for
    an offloaded optimiser.
    """

    weights: float
    gradients: float
    optimizer: float
    reference: float
    gathered: float
    activations: float
    logits: float
    step: float
    host: float

    @property
    def total(self) -> float:
        """Return the most that is needed at one moment."""
        states = self.weights + self.gradients + self.optimizer + self.reference
        passes = self.gathered + self.activations + self.logits
        return states + PROCESS_GB + max(passes, self.step)

    @property
    def asleep(self) -> float:
        """Return what stays on the GPU while the rank sleeps: OpenRLHF keeps the weights."""
        return self.weights + self.reference + PROCESS_GB


@dataclass(frozen=True)
class EngineMemory:
    """List the needs of one vLLM engine on each of its GPUs, in units of 1e9 bytes.

    ``needed`` is all but the cache, of which one token takes ``token_bytes``. ``cache`` and the
    ``tokens`` that it holds are None when the GPU's memory is unknown.
    """

    weights: float
    needed: float
    token_bytes: int
    cache: float | None = None
    tokens: int | None = None


def rank_memory(shape: Shape, settings: PolicyClusterSettings, *, reference: bool) -> RankMemory:
    """Return the needs of a rank, in which all tokens of a row may be sampled ones."""
    ranks, stage = settings.nodes * settings.gpus_per_node, settings.zero_stage
    billions = shape.parameters / 1e9
    of_stage = {least: billions / (ranks if stage >= least else 1) for least in (1, 2, 3)}
    positions = settings.micro_batch_size * settings.max_length
    made, head = shape.vocabulary * positions, shape.vocabulary * shape.hidden
    at_once = max(12 * min(made, LOGITS) + 2 * head, 6 * head if made > LOGITS else 0)
    kept = 1 if settings.gradient_checkpointing else shape.layers
    branches = settings.max_length + 32 * shape.heads * shape.head_dim * kept
    offload = settings.offload_optimizer
    return RankMemory(
        weights=2 * of_stage[3],
        gradients=2 * of_stage[2],
        optimizer=0.0 if offload else 12 * of_stage[1],
        reference=2 * of_stage[3] if reference else 0.0,
        gathered=2 * min(billions, LIVE_PARAMETERS / 1e9) if stage == 3 else 0.0,
        activations=positions * (token_activations(shape, settings) + branches) / 1e9,
        logits=(4 * positions * shape.hidden + at_once) / 1e9,
        step=0.0 if offload else 4 * of_stage[1],
        host=12 * of_stage[1] if offload else 0.0,
    )


def token_activations(shape: Shape, settings: PolicyClusterSettings) -> int:
    """Return the bytes kept of one token until the backward pass, without logits."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = 16 * shape.hidden + 4 * queries + 4 * keys + 8 * shape.intermediate
    if shape.head_norms:
        layer += 6 * (queries + keys)
    if settings.attention == "eager":
        layer += 6 * shape.heads * settings.max_length
    if settings.gradient_checkpointing:
        return shape.layers * 2 * shape.hidden + layer
    return shape.layers * layer


def engine_memory(
    shape: Shape, settings: PolicyClusterSettings, gpu_gb: float | None
) -> EngineMemory:
    """Return the needs of an engine on each of its GPUs of ``gpu_gb`` 1e9 bytes, if known."""
    weights = 2 * shape.parameters / 1e9 / settings.tensor_parallel
    needed = weights + PROCESS_GB + ENGINE_WORK_GB
    heads = max(1, shape.kv_heads // settings.tensor_parallel)
    token_bytes = 4 * shape.layers * heads * shape.head_dim
    if gpu_gb is None:
        return EngineMemory(weights, needed, token_bytes)
    cache = settings.gpu_memory * gpu_gb - needed
    tokens = max(0, int(cache * 1e9 / token_bytes))
    return EngineMemory(weights, needed, token_bytes, cache, tokens)
