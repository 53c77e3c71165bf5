"""Measure the local runtime on a device: tokens a second, memory, share of the device's peak.

    python -m benchmarks.accelerator [--model smollm2] [--dtype bfloat16] [--device auto]
        [--against float32] [--lora 0] [--sequences 64] [--rounds 5]

``--sequences`` prompts of ``--prompt`` random tokens each, all different, so that no prefix is
shared; responses of at most ``--tokens``. ``rollout`` is all generations at once, ``update`` one
optimiser step on them; each is done ``--rounds`` times after one that is not counted, and medians
are given. With ``--against`` both types do each round one after the other, on the same responses,
and ``cpu_speedup`` is the median ratio of their tokens per CPU second. The share is the number of
operations that weights take part in (2 per parameter and token forward, 4 more backward, or 2 more
where only an adapter learns), over time, over the rate of a large matrix product in the same type
on the same device. Attention is left out of it, so it is a lower end.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections import defaultdict
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
from experiential.training.runtime import LossSettings, Sample, sample_from_generation
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
    pairs = {
        dtype: build_runtimes(
            settings := ModelSettings(
                name=options.model, dtype=dtype, device=device, lora=lora, prefix_cache_gb=0
            ),
            settings if lora else None,
            (OptimSettings(lr=1e-6), OptimSettings(lr=1e-6)),
            max_batch=options.sequences,
        )
        for dtype in dict.fromkeys((options.dtype, options.against or options.dtype))
    }
    model = pairs[options.dtype][0].llm.model
    parameters = sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    seconds: dict[str, list[float]] = {"rollout": [], "update": []}
    counts: dict[str, list[int]] = {"rollout": [], "update": []}
    cpu: dict[tuple[str, str], list[float]] = defaultdict(list)  # per token
    for turn in range(options.rounds + 1):
        prompts = torch.randint(
            3, vocabulary, (options.sequences, options.prompt), generator=generator
        ).tolist()
        samples: list[Sample] = []
        for dtype, (policy, _) in pairs.items():
            start = time.perf_counter(), time.process_time()
            generations = await rollout(policy, prompts, options.tokens, 1000 * turn)
            synchronize(device)
            middle = time.perf_counter(), time.process_time()
            samples = samples or [
                sample_from_generation(g, (-1.0) ** i, weight=1 / len(generations))
                for i, g in enumerate(generations)
            ]
            stats = await policy.train(samples, LossSettings())
            synchronize(device)
            end = time.perf_counter(), time.process_time()
            drawn = sum(len(g.prompt_ids) + len(g.response_ids) for g in generations)
            for name, a, b, count in (
                ("rollout", start, middle, drawn),
                ("update", middle, end, stats.sequence_tokens),
            ):
                if turn:
                    cpu[dtype, name].append((b[1] - a[1]) / count)
                if turn and dtype == options.dtype:
                    seconds[name].append(b[0] - a[0])
                    counts[name].append(count)
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
        if options.against:
            times = zip(cpu[options.against, name], cpu[options.dtype, name], strict=True)
            found[name]["cpu_speedup"] = median(theirs / own for theirs, own in times)
    if options.against:
        whole = [
            [sum(phases) for phases in zip(cpu[d, "rollout"], cpu[d, "update"], strict=True)]
            for d in (options.against, options.dtype)
        ]
        found["cpu_speedup"] = median(theirs / own for theirs, own in zip(*whole, strict=True))
    for pair in pairs.values():
        for policy in reversed(pair):
            policy.close()
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
    made.add_argument(
        "--against", choices=("bfloat16", "float32"), help="another type, in the same rounds"
    )
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
