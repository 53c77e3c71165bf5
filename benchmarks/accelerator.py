"""Measure the local runtime on a device: tokens a second, memory, share of the device's peak.

    python -m benchmarks.accelerator [--model smollm2] [--dtype bfloat16] [--device auto]
        [--lora 0] [--sequences 64] [--rounds 5]

``--sequences`` prompts of ``--prompt`` random tokens each, all different, so that no prefix is
shared; responses of at most ``--tokens``. ``rollout`` is all generations at once, ``update`` one
optimiser step on them; each is done ``--rounds`` times after one that is not counted, and medians
are given. The share is the number of operations that weights take part in (2 per parameter and
token forward, 4 more backward, or 2 more where only an adapter learns), over time, over the rate of
a large matrix product in the same type on the same device. Attention is left out of it, so it is a
lower end.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.finished_run import keep
from experiential.config import LoraSettings, ModelSettings, OptimSettings
from experiential.llm.base import SamplingParams
from experiential.llm.models import resolve_device
from experiential.training.local import LocalRuntime, build_runtimes
from experiential.training.metrics import peak_memory_gb
from experiential.training.runtime import LossSettings, sample_from_generation
from experiential.types import Generation


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def ceiling(device: str, dtype: torch.dtype, rounds: int = 5) -> float:
    """Return operations a second of a square matrix product: the best of some."""
    size = 8192 if device.startswith("cuda") else 1024
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(rounds + 1):
        synchronize(device)
        begin = time.perf_counter()
        a @ b
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def operations(parameters: float, tokens: int, *, update: bool, adapter: bool) -> float:
    """Return the floating-point operations of the weights.

    They are 2 per parameter and token, in an update 6, or 4 where the base is frozen.
    """
    return parameters * tokens * ((4 if adapter else 6) if update else 2)


async def rollout(
    policy: LocalRuntime, prompts: list[list[int]], tokens: int, seed: int
) -> list[Generation]:
    """Generate one response to each prompt, all at once."""
    sampling = [SamplingParams(max_tokens=tokens, seed=seed + i) for i in range(len(prompts))]
    return list(
        await asyncio.gather(
            *(policy.generate(p, s) for p, s in zip(prompts, sampling, strict=True))
        )
    )


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians over rounds."""
    device = resolve_device(options.device)
    lora = LoraSettings(rank=options.lora) if options.lora else None
    settings = ModelSettings(
        name=options.model,
        dtype=options.dtype,
        device=device,
        lora=lora,
        prefix_cache_tokens=0,
    )
    policy, other = build_runtimes(
        settings,
        settings if lora else None,
        (OptimSettings(lr=1e-6), OptimSettings(lr=1e-6)),
        max_batch=options.sequences,
    )
    parameters = sum(p.numel() for p in policy.llm.model.parameters())
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.llm.model.get_input_embeddings().num_embeddings
    seconds: dict[str, list[float]] = {"rollout": [], "update": []}
    counts: dict[str, list[int]] = {"rollout": [], "update": []}
    for turn in range(options.rounds + 1):
        prompts = torch.randint(
            3, vocabulary, (options.sequences, options.prompt), generator=generator
        ).tolist()
        begin = time.perf_counter()
        generations = await rollout(policy, prompts, options.tokens, 1000 * turn)
        synchronize(device)
        middle = time.perf_counter()
        samples = [
            sample_from_generation(g, (-1.0) ** i, weight=1 / len(generations))
            for i, g in enumerate(generations)
        ]
        stats = await policy.train(samples, LossSettings())
        synchronize(device)
        if turn:
            for name, taken in (
                ("rollout", middle - begin),
                ("update", time.perf_counter() - middle),
            ):
                seconds[name].append(taken)
                counts[name].append(stats.sequence_tokens)
    most = ceiling(device, getattr(torch, options.dtype))
    found: dict[str, Any] = {"ceiling_tflops": most / 1e12, "parameters": parameters}
    for name in seconds:
        rate = median(
            count / taken for count, taken in zip(counts[name], seconds[name], strict=True)
        )
        share = (
            operations(parameters, 1, update=name == "update", adapter=lora is not None)
            * rate
            / most
        )
        found[name] = {
            "tokens_per_s": rate,
            "seconds": median(seconds[name]),
            "share_of_ceiling": share,
        }
    policy.close()
    other.close()
    found["memory_gb"] = (
        torch.cuda.max_memory_allocated(device) / 1e9
        if device.startswith("cuda")
        else peak_memory_gb()
    )
    name = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else platform.processor() or platform.machine()
    )
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return {
        "device": name,
        "versions": versions,
        **{k: v for k, v in vars(options).items() if k not in ("results", "device")},
        **found,
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--model", default="smollm2")
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--device", default="auto")
    made.add_argument(
        "--lora",
        type=int,
        default=0,
        help="rank of an adapter over a frozen base; 0 trains all weights",
    )
    for name, value in (("sequences", 64), ("prompt", 256), ("tokens", 64), ("rounds", 5)):
        made.add_argument(f"--{name}", type=int, default=value)
    made.add_argument("--results", type=Path, default=Path("benchmarks/results/accelerator.json"))
    return made


def main() -> None:
    """Run the command line."""
    options = parser().parse_args()
    keep(asyncio.run(measure(options)), options.results)


if __name__ == "__main__":
    main()
