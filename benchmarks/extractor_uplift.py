"""Measure whether the extractor gets better, by entries written in each fifth of a training.

    python -m benchmarks.extractor_uplift RUN [RUN ...] [--name vault] [--entries 30] [--seeds 6]
        [--kin] [--results benchmarks/results/extractor_uplift.json]

Runs are of one recipe and environment, with different seeds. For each entry, the final actor of its
run plays the world that the entry was learned in, on fresh seeds, once with exactly this entry
shown and once with nothing. The difference is the entry's uplift; actor and seeds are the same for
early and late entries, so what differs is who wrote them. An entry comes in its first version;
those that are no longer in the bank are not seen.

With ``--kin`` the actor plays another training vault, whose name begins with the same word: under a
law, an entry is worth what it does there.

Results of other environments in the file stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import experiential  # noqa: F401  (registers the environments)
from benchmarks.finished_run import FinishedRun, Shown, finished, keep
from experiential.bank.folder import FolderBank
from experiential.evaluation.intervals import GAIN, RATE, clustered_mean
from experiential.rollout import Job, Rollout, Task, episode_seed
from experiential.types import Condition, Experience

FIFTHS = 5


def written(bank: FolderBank, fifth: int, count: int, seed: int) -> list[Experience]:
    """Draw ``count`` of the lessons that were written in a fifth of the training, 0 the first.

    Each comes in its first version.
    """
    firsts = [first for entry in bank.entries() if (first := bank.version(entry.id, 1)) is not None]
    lessons = sorted(
        (e for e in firsts if e.task and e.provenance.trajectory),
        key=lambda e: e.provenance.commit or 0,
    )
    entries = lessons[fifth * len(lessons) // FIFTHS : (fifth + 1) * len(lessons) // FIFTHS]
    random.Random(seed).shuffle(entries)
    return entries[:count]


def kin(task: str, worlds: dict[str, int]) -> int:
    """Return the next vault, by name, whose name begins with the same word."""
    first = " ".join(task.split()[:-1])
    tasks = sorted(one for one in worlds if " ".join(one.split()[:-1]) == first)
    return worlds[tasks[(tasks.index(task) + 1) % len(tasks)]]


async def play(
    final: FinishedRun, entries: Sequence[Experience], worlds: Sequence[int], seeds: int
) -> np.ndarray:
    """Return the success with and without each entry on its world, shape (2, entries)."""
    manager, env = Shown(), final.experiment.env
    rollout = Rollout(env, env.train, manager, final.actor, slots=64)
    rates = np.zeros((2, len(entries)))
    for i, entry in enumerate(entries):
        manager.entry = entry
        jobs = [
            Job(
                Task(episode_seed(77, i, s), f"{i}.{s}", {"world": worlds[i]}),
                condition,
                episode_seed(78, i, s),
            )
            for condition in (Condition.GUIDED, Condition.FREE)
            for s in range(seeds)
        ]
        outcomes = [e.trajectory.success for e in await rollout.play(jobs)]
        rates[:, i] = np.mean(outcomes[:seeds]), np.mean(outcomes[seeds:])
    rollout.close()
    return rates


async def study(
    runs: Sequence[Path], count: int, seeds: int, *, of_kin: bool = False
) -> dict[str, Any]:
    """Measure the uplift of the entries of each fifth, with examples of their text."""
    tables: list[list[np.ndarray]] = [[] for _ in range(FIFTHS)]
    examples: list[list[dict[str, Any]]] = [[] for _ in range(FIFTHS)]
    for run in runs:
        async with finished(run) as final:
            settings = final.experiment.env
            env: Any = gym.make(
                settings.id, disable_env_checker=True, **(settings.kwargs | settings.train)
            ).unwrapped
            worlds = {env.reset(seed=0, options={"world": w})[1]["task"]: w for w in env.worlds}
            for fifth in range(FIFTHS):
                entries = written(final.bank, fifth, count, seed=0)
                played = [
                    kin(one.task or "", worlds) if of_kin else worlds[one.task or ""]
                    for one in entries
                ]
                tables[fifth].append(await play(final, entries, played, seeds))
                examples[fifth] += [{"task": e.task, "text": e.text} for e in entries[:3]]
    least = min(table.shape[1] for of in tables for table in of)  # the same for all runs
    rates = np.array([[table[:, :least] for table in of] for of in tables])
    gains = rates[:, :, 0] - rates[:, :, 1]
    fifths = [
        {
            "with": clustered_mean(rates[i, :, 0], bounds=RATE).model_dump(),
            "without": clustered_mean(rates[i, :, 1], bounds=RATE).model_dump(),
            "uplift": clustered_mean(gains[i], bounds=GAIN).model_dump(),
            "examples": examples[i],
        }
        for i in range(FIFTHS)
    ]
    # entries of two fifths are drawn in random order, so that pairs of them are independent
    rise = clustered_mean(gains[-1] - gains[0], bounds=None).model_dump()
    return {"runs": len(runs), "entries": least, "seeds": seeds, "fifths": fifths, "rise": rise}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--name", default="vault", help="of the environment, in the results")
    parser.add_argument("--entries", type=int, default=30, help="of each fifth and run, at most")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--kin", action="store_true", help="play a vault of the same first word")
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results/extractor_uplift.json")
    )
    options = parser.parse_args()
    made = study(options.runs, options.entries, options.seeds, of_kin=options.kin)
    found = asyncio.run(made)
    known = json.loads(options.results.read_text("utf-8")) if options.results.exists() else {}
    keep(known | {options.name: found}, options.results)


if __name__ == "__main__":
    main()
