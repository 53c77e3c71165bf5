"""Measure what a turn of a long episode costs: CPU time per turn, by how many turns there are.

Every turn gives each talk about as many new tokens, so that a cost per turn that grows is the
cost of the history; attention's own part is timed apart. Its bound is the time that one sum over
as many keys and values takes, since each has to be read once.
Run ``python -m benchmarks.long_episodes``.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import torch
import typer

from experiential.config import ModelSettings
from experiential.llm.base import SamplingParams
from experiential.llm.models import load_model
from experiential.llm.transformers import TransformersLLM

OBSERVATION, RESPONSE = 24, 12
"""New tokens of a turn: what the environment says, and at most what is generated."""


def main(
    model: str = "tiny",
    dtype: str = "float32",
    talks: int = 16,
    turns: Annotated[list[int] | None, typer.Option(help="lengths of the episodes")] = None,
) -> None:
    """Print CPU milliseconds per turn of episodes of each length, attention's and its bound."""
    torch.set_num_threads(1)
    loaded = load_model(ModelSettings.model_validate({"name": model, "dtype": dtype}))
    asyncio.run(_play(loaded, talks, 2))  # what is made once
    for length in turns or [5, 20, 60]:
        whole, attention, calls, read = asyncio.run(_play(loaded, talks, length))
        each = 1000 / length / talks
        typer.echo(
            f"{length:3} turns: {whole * each:.2f} CPU-ms a turn, {attention * each:.2f} of them"
            f" attention, which reads {read / length / talks / 1e6:.1f} MB;"
            f" a sum over that takes {_reading(read // calls) * calls * each:.2f}"
        )


def _reading(size: int) -> float:
    """Return the CPU seconds in which numbers of so many bytes are added up, at best."""
    arrays = [torch.ones(size // 4) for _ in range(4)]  # in turn, as layers are
    best = float("inf")
    for _ in range(10):
        begin = time.process_time()
        for array in arrays:
            array.sum()
        best = min(best, (time.process_time() - begin) / len(arrays))
    return best


async def _play(loaded: tuple[Any, Any], talks: int, turns: int) -> tuple[float, float, int, int]:
    """Return CPU seconds of all turns, of attention among them, its calls and the bytes read."""
    llm = TransformersLLM(*loaded, max_batch=64)
    generator = torch.Generator().manual_seed(1)
    size = len(llm.tokenizer)

    def words(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, size, (count,), generator=generator).tolist())

    spent, calls, read = 0.0, 0, 0
    attend = torch.nn.functional.scaled_dot_product_attention

    def timed(*arguments: Any, **options: Any) -> Any:
        nonlocal spent, calls, read
        begin = time.process_time()
        result = attend(*arguments, **options)
        spent += time.process_time() - begin
        calls += 1
        read += sum(one.numel() * one.element_size() for one in arguments[1:3])
        return result

    torch.nn.functional.scaled_dot_product_attention = timed
    histories = [words(60) for _ in range(talks)]
    begin = time.process_time()
    try:
        for turn in range(turns):
            answers = await asyncio.gather(
                *(
                    llm.generate(h, SamplingParams(max_tokens=RESPONSE, seed=1000 * turn + i))
                    for i, h in enumerate(histories)
                )
            )
            histories = [
                (*h, *answer.response_ids, *words(OBSERVATION))
                for h, answer in zip(histories, answers, strict=True)
            ]
        return time.process_time() - begin, spent, calls, read
    finally:
        torch.nn.functional.scaled_dot_product_attention = attend
        llm.close()


if __name__ == "__main__":
    typer.run(main)
