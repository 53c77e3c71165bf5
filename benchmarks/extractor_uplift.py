"""Measure whether the extractor gets better, by entries written early and late in one run.

    python -m benchmarks.extractor_uplift RUN [--entries 60] [--seeds 6]
        [--results benchmarks/results/extractor_uplift.json]

For each entry, the final actor plays the world that the entry was learned in, on fresh seeds, once
with exactly this entry shown and once with nothing. The difference is the entry's uplift; actor and
seeds are the same for early and late entries, so what differs is who wrote them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import experiential  # noqa: F401  (registers the environments)
from benchmarks.finished_run import FinishedRun, Shown, finished, keep
from experiential.bank.folder import FolderBank
from experiential.evaluation.intervals import paired_difference
from experiential.rollout import Job, Rollout, Task, episode_seed
from experiential.types import Condition, Experience


def written(bank: FolderBank, early: bool, count: int, seed: int) -> list[Experience]:
    """Draw ``count`` of the fifth of the lessons that were written first, or last.

    Each comes in its first version.
    """
    firsts = [first for entry in bank.entries() if (first := bank.version(entry.id, 1)) is not None]
    lessons = sorted(
        (e for e in firsts if e.task and e.provenance.trajectory),
        key=lambda e: e.provenance.commit or 0,
    )
    share = max(1, len(lessons) // 5)
    entries = lessons[:share] if early else lessons[-share:]
    random.Random(seed).shuffle(entries)
    return entries[:count]


async def uplift(
    final: FinishedRun, entries: Sequence[Experience], worlds: dict[str, int], seeds: int
) -> dict[str, Any]:
    """Return mean success with and without each entry on its own world.

    The difference comes with its interval over entries.
    """
    manager, env = Shown(), final.experiment.env
    rollout = Rollout(env, env.train, manager, final.actor, slots=64)
    rates = np.zeros((2, len(entries)))
    for i, entry in enumerate(entries):
        manager.entry = entry
        jobs = [
            Job(
                Task(episode_seed(77, i, s), f"{i}.{s}", {"world": worlds[entry.task or ""]}),
                condition,
                episode_seed(78, i, s),
            )
            for condition in (Condition.GUIDED, Condition.FREE)
            for s in range(seeds)
        ]
        outcomes = [e.trajectory.success for e in await rollout.play(jobs)]
        rates[:, i] = np.mean(outcomes[:seeds]), np.mean(outcomes[seeds:])
    rollout.close()
    return {
        "with": float(rates[0].mean()),
        "without": float(rates[1].mean()),
        "uplift": paired_difference(rates[0], rates[1]).model_dump(),
    }


async def study(run: Path, count: int, seeds: int) -> dict[str, Any]:
    """Measure the uplift of early and of late entries, with examples of their text."""
    found: dict[str, Any] = {"run": str(run), "seeds": seeds}
    async with finished(run) as final:
        settings = final.experiment.env
        env: Any = gym.make(
            settings.id, disable_env_checker=True, **(settings.kwargs | settings.train)
        ).unwrapped
        worlds = {env.reset(seed=0, options={"world": w})[1]["task"]: w for w in env.worlds}
        for name, early in (("early", True), ("late", False)):
            entries = written(final.bank, early, count, seed=0)
            found[name] = await uplift(final, entries, worlds, seeds)
            found[name] |= {
                "entries": len(entries),
                "examples": [{"task": e.task, "text": e.text} for e in entries[:8]],
            }
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--entries", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results/extractor_uplift.json")
    )
    options = parser.parse_args()
    keep(asyncio.run(study(options.run, options.entries, options.seeds)), options.results)


if __name__ == "__main__":
    main()
