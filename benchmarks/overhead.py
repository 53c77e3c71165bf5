"""Rollout time with the bank and distillation on, over rollout time without, on the same tasks and seeds.

    python -m benchmarks.overhead [--model tiny] [--rounds 12] [--results benchmarks/results/overhead.json]

Rounds alternate, so that a noisy machine disturbs both arms alike. Nothing is subtracted: a round with the bank
includes retrieval, injection, the longer prompts, submission, and the distillation of earlier rounds running beside it.
What distillation costs in all is given apart, as the time until everything is distilled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.config import EnvSettings, ModelSettings, OptimSettings
from experiential.training.local import build_runtimes
from experiential.training.rollout import NoBank, Rollout
from experiential.training.tasks import TaskSource
from experiential.training.trainer import prompt_set_name


async def measure(settings: ModelSettings, rounds: int, groups: int, group_size: int) -> dict[str, Any]:
    """Seconds per rollout of both arms, alternating."""
    actor, extractor = build_runtimes(settings, None, (OptimSettings(), OptimSettings()))
    prompts = prompt_set_name(settings)
    env = EnvSettings()
    source = TaskSource(env, 32, 0)

    def make_actor() -> ActorAgent:
        return ActorAgent(actor, prompts=prompts, constrain=True, max_tokens=32)

    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder, ExperienceBank(Path(folder) / "bank") as bank:
        manager = ExperienceManager(bank, ExtractorAgent(extractor, prompts=prompts, max_tokens=96), merge_every=0)
        arms = {
            name: Rollout(env, env.train, m, make_actor, slots=groups * group_size)
            for name, m in (("without", NoBank()), ("with", manager))
        }
        for step in range(rounds + 2):
            for name, guided in (("without", "none"), ("with", "half")):
                actor.llm.weights_changed(step)  # as after an update: no prefix is reused from the other arm
                begin = time.perf_counter()
                await arms[name].play(source.jobs(step, groups, group_size, guided))
                if step >= 2:
                    seconds[name].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        stats = manager.stats()
        await manager.adrain()
        left = time.perf_counter() - begin
        for rollout in arms.values():
            rollout.close()
        manager.close()
    actor.close()
    extractor.close()
    return {"seconds": seconds, "ratio": ratio(seconds), "distilled_beside": stats["distilled"], "drain_s": left}


def ratio(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Ratio of the medians, with a bootstrap interval over paired rounds."""
    a, b = np.array(seconds["with"]), np.array(seconds["without"])
    picks = np.random.default_rng(0).integers(len(a), size=(10_000, len(a)))
    low, high = np.quantile(np.median(a[picks], axis=1) / np.median(b[picks], axis=1), (0.025, 0.975))
    return {"median": float(np.median(a) / np.median(b)), "low": float(low), "high": float(high)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/overhead.json"))
    options = parser.parse_args()
    found = asyncio.run(measure(ModelSettings(name=options.model), options.rounds, options.groups, options.group_size))
    found |= {
        "model": options.model,
        "groups": options.groups,
        "group_size": options.group_size,
        "machine": platform.processor(),
        "torch": torch.__version__,
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({k: v for k, v in found.items() if k != "seconds"}, indent=1) + "\n")


if __name__ == "__main__":
    main()
