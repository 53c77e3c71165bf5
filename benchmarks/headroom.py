"""Measure whether advice could help at all: nothing, true lessons, or the way itself.

    python -m benchmarks.headroom RUN [--layouts 60] [--seeds 6]
        [--results benchmarks/results/headroom.json]

The final actor of a grid run plays held-out layouts.

Each layout is played on the same sampling seeds under every kind of advice: ``nothing``; ``rules``,
what the symbols mean, which holds for every layout; ``way``, the moves of a shortest way of this
very layout, which no entry of another layout could hold; and ``bank``, the entry that the run's own
bank finds. ``first_move`` is the share of episodes that begin as that way does. An actor that is
given the way and neither begins with it nor succeeds more often cannot be helped by any extractor:
it does not act on advice here.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import experiential  # noqa: F401  (registers the environments)
from benchmarks.finished_run import Shown, finished, keep
from experiential.bank.folder import FolderBank
from experiential.evaluation.intervals import paired_difference
from experiential.rollout import Job, Rollout, Task, episode_seed
from experiential.types import Condition, Experience

KINDS = ("nothing", "rules", "way", "bank")


def advice(kind: str, env: Any, task: str, bank: FolderBank) -> str | None:
    """Return the advice of a kind for the layout that ``env`` stands at."""
    if kind == "nothing":
        return None
    if kind == "rules":
        agent, goal, hole, free = env.symbols[:4]
        return f"You are {agent}. Take the shortest way to {goal} over {free}. Never enter {hole}."
    if kind == "way":
        return f"Go {', then '.join(env.plan())}."
    hits = bank.search(task, k=1)
    return hits[0].experience.text if hits else None


async def headroom(run: Path, layouts: int, seeds: int) -> dict[str, Any]:
    """Measure success under each kind of advice.

    The difference from no advice has a bootstrap interval over layouts.
    """
    manager = Shown()
    rates = {kind: np.zeros(layouts) for kind in KINDS}
    firsts = {kind: np.zeros(layouts) for kind in KINDS}
    shown: dict[str, str] = {}
    async with finished(run) as final:
        env = final.experiment.env
        rollout = Rollout(env, env.eval, manager, final.actor, slots=seeds)
        probe: Any = gym.make(env.id, disable_env_checker=True, **(env.kwargs | env.eval)).unwrapped
        for i in range(layouts):
            seed = episode_seed(91, i, 0)
            task = probe.reset(seed=seed)[1]["task"]
            first = probe.plan()[0].lower()
            for kind in KINDS:
                text = advice(kind, probe, task, final.bank)
                shown[kind], manager.entry = (
                    text or "",
                    None if text is None else Experience(text=text),
                )
                jobs = [
                    Job(Task(seed, f"{i}.{s}"), Condition.GUIDED, episode_seed(92, i, s))
                    for s in range(seeds)
                ]
                played = [episode.trajectory for episode in await rollout.play(jobs)]
                rates[kind][i] = np.mean([trajectory.success for trajectory in played])
                firsts[kind][i] = np.mean(
                    [first in trajectory.turns[0].action.lower() for trajectory in played]
                )
        rollout.close()
    found = {
        kind: {
            "success": float(rates[kind].mean()),
            "over_nothing": paired_difference(rates[kind], rates["nothing"]).model_dump(),
            "first_move": float(firsts[kind].mean()),
            "first_move_over_nothing": (
                paired_difference(firsts[kind], firsts["nothing"]).model_dump()
            ),
        }
        for kind in KINDS
    }
    return {"run": str(run), "layouts": layouts, "seeds": seeds, "example": shown, **found}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path)
    parser.add_argument("--layouts", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/headroom.json"))
    options = parser.parse_args()
    keep(asyncio.run(headroom(options.run, options.layouts, options.seeds)), options.results)


if __name__ == "__main__":
    main()
