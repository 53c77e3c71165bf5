"""The shape of a model: what its memory can be computed from, without loading it and without a download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from experiential.errors import ModelNotFoundError
from experiential.llm.models import resolve_model
from experiential.types import Record


class Shape(Record):
    """A dense decoder of the Llama family: grouped-query attention, gated feed-forward, RMS norms."""

    layers: int = Field(gt=0)
    hidden: int = Field(gt=0, description="width of the residual stream")
    intermediate: int = Field(gt=0, description="width of the feed-forward part")
    heads: int = Field(gt=0, description="query heads")
    kv_heads: int = Field(gt=0, description="key and value heads")
    head_dim: int = Field(gt=0)
    vocabulary: int = Field(gt=0, description="rows of the embedding")
    tied: bool = Field(default=False, description="the output layer is the embedding")
    qkv_bias: bool = False
    head_norms: bool = Field(
        default=False, description="queries and keys are normalised in each head, as in Qwen3"
    )
    positions: int | None = Field(
        default=None, description="tokens that positions go up to; None when it is not told"
    )

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads together; the values have the same."""
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        attention = 2 * self.hidden * (self.queries + self.keys) + self.qkv_bias * (
            self.queries + 2 * self.keys
        )
        norms = 2 * self.hidden + self.head_norms * 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + norms
        return (
            (1 if self.tied else 2) * self.vocabulary * self.hidden
            + self.layers * layer
            + self.hidden
        )


_QWEN3_4B = Shape(
    layers=36, hidden=2560, intermediate=9728, heads=32, kv_heads=8, head_dim=128, vocabulary=151_936,
    tied=True, head_norms=True, positions=262_144,
)  # fmt: skip
PUBLISHED: Mapping[str, Shape] = {
    "smollm2": Shape(
        layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocabulary=49_152, tied=True, positions=8192
    ),
    "Qwen/Qwen2.5-7B-Instruct": Shape(
        layers=28, hidden=3584, intermediate=18_944, heads=28, kv_heads=4, head_dim=128, vocabulary=152_064,
        qkv_bias=True, positions=32_768,
    ),
    "Qwen/Qwen3-4B": _QWEN3_4B.model_copy(update={"positions": 40_960}),
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B,
    "Qwen/Qwen3-4B-Thinking-2507": _QWEN3_4B,
    "Qwen/Qwen3-Embedding-0.6B": Shape(
        layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128, vocabulary=151_669,
        tied=True, head_norms=True, positions=32_768,
    ),
}  # fmt: skip
"""Shapes as published in each model's config.json; ``smollm2`` is here so that planning need not
convert its weights.
"""


def shape_of(name: str) -> Shape | None:
    """The shape of a model by the name that ``model.name`` takes, or None when it cannot be known without a download.

    A folder's ``config.json`` is read; ``tiny`` is the packaged one; a few hub names are known
    (`PUBLISHED`).

    Raises:
        ModelNotFoundError: a folder that does not exist, or whose config.json is no JSON.
    """
    known = PUBLISHED.get(name)
    if known is not None:
        return known
    where = resolve_model(name)
    return shape_from_config(_read(where / "config.json")) if isinstance(where, Path) else None


def shape_from_config(config: Mapping[str, Any]) -> Shape | None:
    """The shape that a ``config.json`` in Hugging Face format tells; None for mixtures of experts and for what is no such decoder."""
    generates = any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())
    if not generates or any("experts" in key for key in config):
        return None
    kind = config.get("model_type")
    try:
        return Shape(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            head_norms=kind == "qwen3",
            positions=config.get("max_position_embeddings"),
        )
    except (KeyError, ValidationError):
        return None


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelNotFoundError(
            f"Expected JSON in {file}, got: {error}; copy the model's folder again"
        ) from error
