"""Measure what an update costs when sequences are twice as long.

    python -m benchmarks.long_rows [--model tiny] [--lengths 256 --lengths 512 --lengths 1024]

A batch is a group of eight samples that share a prompt of a half of their length. Beside the ratio
of CPU seconds stands the ratio of operations, for a sequence twice as long has more than twice as
many: every token attends to twice as many. Lengths take turns, so that a noisy machine disturbs
all alike.
"""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from experiential.config import LoraSettings, ModelSettings, OptimSettings
from experiential.llm.models import load_model
from experiential.llm.transformers import TransformersLLM
from experiential.training.local import LocalRuntime
from experiential.training.runtime import LossSettings, Sample

GROUP = 8


def main(
    model: str = "tiny",
    dtype: str = "float32",
    lora: Annotated[bool, typer.Option(help="train adapters of rank 8 alone")] = False,
    lengths: Annotated[list[int] | None, typer.Option(help="tokens of a sequence")] = None,
    rounds: int = 3,
    results: Annotated[Path | None, typer.Option(help="file to write")] = None,
) -> None:
    """Print CPU seconds of an update by length, and the ratios of neighbours."""
    torch.set_num_threads(1)
    settings = ModelSettings.model_validate(
        {"name": model, "dtype": dtype, "lora": LoraSettings(rank=8) if lora else None}
    )
    loaded = load_model(settings, adapters=("actor",))
    llm = TransformersLLM(*loaded, adapter="actor" if lora else None)
    runtime = LocalRuntime(llm, OptimSettings(lr=1e-6))
    sizes = lengths or [256, 512, 1024, 2048]
    batches = [_group(len(llm.tokenizer), length) for length in sizes]
    spent: list[list[float]] = [[] for _ in sizes]
    try:
        for turn in range(rounds + 1):  # the first one warms up
            for found, batch in zip(spent, batches, strict=True):
                begin = time.process_time()
                asyncio.run(runtime.train(batch, LossSettings()))
                if turn:
                    found.append(time.process_time() - begin)
    finally:
        runtime.close()
    seconds = [median(found) for found in spent]
    shape = llm.model.config
    counted = [_operations(shape, length) for length in sizes]
    rows: list[dict[str, Any]] = [{"length": sizes[0], "cpu_s": seconds[0]}]
    for (_, length), (less, more), (few, many) in zip(
        pairwise(sizes), pairwise(seconds), pairwise(counted), strict=True
    ):
        rows.append(
            {"length": length, "cpu_s": more, "ratio": more / less, "operations": many / few}
        )
    for row in rows:
        typer.echo(json.dumps(row))
    if results is not None:
        found = {"model": model, "dtype": dtype, "lora": lora, "group": GROUP, "rows": rows}
        results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _group(vocabulary: int, length: int) -> list[Sample]:
    """Return samples of so many tokens that share the first half of them."""
    generator = torch.Generator().manual_seed(length)

    def words(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (count,), generator=generator).tolist())

    half = length // 2
    prompt, answered = words(half), length - half
    return [
        Sample(
            tokens=(*prompt, *words(answered)),
            positions=tuple(range(half, length)),
            logprobs=(-1.0,) * answered,
            advantages=((-1.0) ** member,) * answered,
            weight=1 / GROUP,
        )
        for member in range(GROUP)
    ]


def _operations(shape: Any, length: int) -> float:
    """Return the multiplications of one forward of a group: of weights, attention and the head."""
    half, answered = length // 2, length - length // 2
    heads, shared = shape.num_attention_heads, shape.num_key_value_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    weights = shape.hidden_size * (2 * heads + 2 * shared) * width
    weights += 3 * shape.hidden_size * shape.intermediate_size
    tokens = half + GROUP * answered
    pairs = half**2 / 2 + GROUP * answered * (half + answered / 2)  # a query and a key it sees
    layers = shape.num_hidden_layers * (tokens * weights + 2 * heads * width * pairs)
    return layers + GROUP * answered * shape.hidden_size * shape.vocab_size


if __name__ == "__main__":
    typer.run(main)
