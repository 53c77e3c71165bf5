"""Measure what a bank does for an agent whose weights never change, by how often lessons are wrong.

    python -m benchmarks.frozen [--seeds 0 10] [--results benchmarks/results/frozen.json]

The environment is Vault: 16 worlds, 14 levers, two tries; without a memory the live lever is found
by chance in 2 of 14 episodes. Each world is visited twelve times, in turn. The actor is scripted
and honest: it pulls the lever that its advice names, then others at random. The extractor writes
one lesson after each episode, "Its jade lever is live.", which names the live lever, or with
probability ``p`` another one. Everything else is the real thing: bank, manager, retrieval, queue.

Reported is the success rate on visits 9 to 12, over all episodes, those that played free included,
with a 95 % t-interval over seeds. ``drift`` moves the live levers after visit 6.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections.abc import Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

import experiential as xp
from experiential.bank.evidence.uplift import estimate
from experiential.bank.search.strategies import STRATEGIES
from experiential.envs.vault import VaultEnv
from experiential.types import Add, Distillation, Experience, ParsedOperations, Trajectory

WORLDS, VISITS, LATE = 16, 12, slice(8, 12)
ARMS = ("evidence", "diverse", "nearest", "no bank")
_LESSON = re.compile(r"Its (\w+) lever is live\.")


class Extractor:
    """Write one lesson for each episode, wrong with probability ``p``."""

    version = 0

    def __init__(self, p: float, rng: random.Random) -> None:
        self.p, self.rng = p, rng

    async def adistill(self, trajectory: Trajectory, shown: Sequence[Experience]) -> Distillation:
        """Name the live lever, or another one."""
        live, *others = trajectory.instance.split("|")
        lever = self.rng.choice(others) if self.rng.random() < self.p else live
        lesson = Add(text=f"Its {lever} lever is live.")
        return Distillation(parsed=ParsedOperations(operations=(lesson,)))

    async def arefine(self, query: str, experience: Experience) -> tuple[str, None]:
        """Return the entry as it is."""
        return experience.text, None

    async def amerge(self, experiences: Sequence[Experience]) -> Distillation:
        """Merge nothing."""
        return Distillation()


def play(arm: str, p: float, seed: int, moved: bool = False) -> list[list[bool]]:
    """Return the outcome of every episode, by visit and world."""
    rng, env = random.Random(f"{seed} {p}"), VaultEnv(worlds=WORLDS)
    strategy = arm if arm in STRATEGIES else "evidence"
    guided = {"evidence": None, "no bank": False}.get(arm, True)  # None: the manager decides
    outcomes: list[list[bool]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        xp.ExperienceBank(Path(folder) / "bank", embedder="hashing") as bank,
        xp.ExperienceManager(
            bank, Extractor(p, rng), seed=seed, retrieval={"strategy": strategy}
        ) as manager,
    ):
        for visit in range(VISITS):
            outcomes.append([])
            for world in range(WORLDS):
                options = {"world": world, "era": int(moved and visit >= VISITS // 2)}
                _, info = env.reset(seed=(seed * VISITS + visit) * WORLDS + world, options=options)
                live = env.oracle_action().split()[-1]
                levers = [action.split()[-1] for action in info["admissible"]]
                others = [lever for lever in levers if lever != live]
                instance = "|".join([live, *rng.sample(others, len(others))])
                with manager.episode(info["task"], guided=guided, instance=instance) as episode:
                    advised = _LESSON.findall(episode.advice)
                    tries, won = [*advised, *rng.sample(levers, len(levers))], False
                    for lever in list(dict.fromkeys(tries))[: env.tries]:
                        observation, reward, done, _, info = env.step(f"pull {lever}")
                        episode.record(observation, f"pull {lever}", reward)
                        won = bool(info["success"])
                        if done:
                            break
                    episode.finish(success=won)
                outcomes[-1].append(won)
                manager.drain()
    return outcomes


def measure(job: tuple[str, float, int, bool]) -> list[list[bool]]:
    """Play one job of the pool."""
    return play(*job)


def row(arm: str, p: float, played: np.ndarray, moved: bool) -> dict[str, Any]:
    """Return the figures of one arm; ``played`` holds outcomes, shape (seeds, visits, worlds)."""
    late = estimate(played[:, LATE].mean(axis=(1, 2)).tolist())
    return {
        "arm": arm,
        "wrong": p,
        "drift": moved,
        "late": late.mean,
        "interval": late.interval,
        "by_visit": played.mean(axis=(0, 2)).round(3).tolist(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Play all arms, write the results, and print them as a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10), metavar=("FIRST", "END"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/frozen.json"))
    chosen = parser.parse_args(arguments)
    seeds = range(*chosen.seeds)
    cells = [(arm, p, False) for arm in ARMS[:-1] for p in (0.0, 0.5, 1.0)]
    cells += [(ARMS[-1], 0.0, False)]
    cells += [(arm, p, True) for arm in ("evidence", "diverse") for p in (0.0, 0.5)]
    rows: list[dict[str, Any]] = []
    with Pool(chosen.processes) as pool:
        for arm, p, moved in cells:
            played = pool.map(measure, [(arm, p, seed, moved) for seed in seeds])
            rows.append(row(arm, p, np.array(played), moved))
            print(json.dumps(rows[-1]), flush=True)
    chance = VaultEnv().tries / VaultEnv().levers
    found = {"command": "python -m benchmarks.frozen", "seeds": list(seeds), "chance": chance}
    sizes = {"worlds": WORLDS, "visits": VISITS, "late": "visits 9 to 12"}
    chosen.results.write_text(json.dumps({**found, **sizes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
