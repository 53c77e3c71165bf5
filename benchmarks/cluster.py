"""Measure what keeps a cluster waiting: rollouts with and without the bank, and busy shares.

    python -m benchmarks.cluster [--steps 12] [--results benchmarks/results/cluster.json]
        [key=value ...]

A busy share is the part of the time in which engines or ranks work.

One pair of policies plays the same tasks three times, from the same weights: without a bank
(``grpo``), with bank, distillation and an extractor that learns, and the same with rollouts one
step ahead of updates (``run.ahead=1``). The first two steps of each are left out: they start
environments. Further arguments are settings, as of ``experiential-train``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.finished_run import keep
from experiential.recipe import load_experiment
from experiential.training.openrlhf.runtime import build_runtimes
from experiential.training.runtime import Policies
from experiential.training.trainer import Trainer

ARMS = {"grpo": ("grpo", 0), "bank": ("complementary", 0), "ahead": ("complementary", 1)}


def arm(
    name: str, runtimes: Policies, initial: Path, folder: Path, steps: int, overrides: list[str]
) -> dict[str, Any]:
    """Train one arm; return mean times of a step, and the busy shares."""
    recipe, ahead = ARMS[name]
    for runtime in runtimes:
        asyncio.run(runtime.load(initial / runtime.name))
    fixed = [
        "run.minutes=null",
        "run.checkpoint_every=0",
        "eval.before=false",
        "eval.after=false",
        f"run.ahead={ahead}",
    ]
    experiment = load_experiment(recipe, [*overrides, *fixed, f"run.steps={steps}"])
    events: list[dict[str, Any]] = []
    Trainer(experiment, folder / name, observer=events.append, runtimes=runtimes).run()
    done = [e for e in events if e["event"] == "step"][2:]
    measured = [
        "rollout_s",
        "waited_s",
        "update_s",
        "step_s",
        "actor_staleness",
        *(key for key in done[-1] if key.endswith("_busy")),
    ]
    found: dict[str, Any] = {key: mean(e[key] for e in done) for key in measured}
    found["updates"] = {
        "actor": done[-1]["actor_version"],
        "extractor": done[-1].get("extractor_updates", 0),
    }
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/cluster.json"))
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    runtimes = build_runtimes(load_experiment("complementary", options.settings))
    with tempfile.TemporaryDirectory() as folder:
        initial = Path(folder) / "initial"
        for runtime in runtimes:
            asyncio.run(runtime.save(initial / runtime.name))
        found = {
            name: arm(name, runtimes, initial, Path(folder), options.steps, options.settings)
            for name in ARMS
        }
    for runtime in runtimes:
        runtime.close()
    ratio = found["bank"]["rollout_s"] / found["grpo"]["rollout_s"]
    keep(
        {
            "cores": os.cpu_count(),
            "settings": options.settings,
            "rollout_with_bank_over_without": ratio,
            **found,
        },
        options.results,
    )


if __name__ == "__main__":
    main()
