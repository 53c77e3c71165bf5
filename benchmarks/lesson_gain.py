"""Measure what training changed in an extractor: lessons about equal plays, before and after.

    python -m benchmarks.lesson_gain RUN [RUN ...] [--plays 5] [--layouts 6]
        [--temperatures 0.1 0.3 0.6] [--rule benchmarks.earned_rules:lake]
        [--name lake-words-drafts] [--results benchmarks/results/lesson_gain.json]

Runs are of one recipe and environment, with different seeds. The final actor of a run plays the
worlds held out for evaluation without advice. About each play the extractor that the run began
with and the one that it ended with write a lesson, without seeing an entry. With each lesson the
same actor then plays its world on fresh seeds, the same for both lessons. So nothing differs but
who wrote the lesson; no bank takes part. An answer that adds nothing is played without advice.
Baselines are ``template``, a fixed sentence about each play with its last answer, and
``transcript``, the play itself. ``--rule`` adds the lessons of an extractor that knows the game,
named as in the setting ``extractor.agent``: the most that this actor can be given.

What was measured of each run is kept beside the results, in ``lesson_gain/NAME/SEED.json``, so
that runs can be measured one by one, and again at further temperatures: the results are of all
that is there. Results of other environments stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import experiential  # noqa: F401  (registers the environments)
from benchmarks.finished_run import Shown, finished, keep
from experiential.agents.extractor import open_extractor
from experiential.agents.prompts import experience_block
from experiential.bank.extractor import Extractor
from experiential.evaluation.intervals import GAIN, RATE, clustered_mean
from experiential.evaluation.results import ResultStore
from experiential.rollout import Job, Rollout, Task, episode_seed
from experiential.types import Add, Condition, Record, Trajectory

BASELINES = ("template", "transcript")
_PLAYS, _TESTS, _SAMPLING = 91, 92, 93  # streams of seeds


class Measured(Record):
    """Hold what a run's actor made of the lessons of each writer.

    Attributes:
        seed: of the run.
        settings: plays of each world, and layouts on which each lesson was tried.
        success: by world, of each writer (``untrained 0.3``: at temperature 0.3), and without a
            lesson (``none``).
    """

    seed: int
    settings: dict[str, int]
    success: dict[str, tuple[float, ...]]


async def plays(rollout: Rollout, worlds: Sequence[int], count: int) -> list[Trajectory]:
    """Return ``count`` plays of each world without advice, world by world."""
    jobs = [
        Job(
            Task(episode_seed(_PLAYS, world, number), f"{world}.{number}", {"world": world}),
            Condition.FREE,
            episode_seed(_SAMPLING, world, number),
        )
        for world in worlds
        for number in range(count)
    ]
    return [one.trajectory for one in await rollout.play(jobs)]


async def lessons(extractor: Extractor, plays: Sequence[Trajectory]) -> list[str]:
    """Return the lesson that an extractor adds after each play; "" for none."""
    answers = await asyncio.gather(*(extractor.adistill(one, []) for one in plays))
    return [
        next((one.text for one in answer.parsed.operations if isinstance(one, Add)), "")
        for answer in answers
    ]


async def success(
    rollout: Rollout, worlds: Sequence[int], texts: Sequence[str], layouts: int
) -> np.ndarray:
    """Return the success of each world with its lessons, shape (worlds,).

    ``texts`` has as many lessons for each world, world by world; each is played on ``layouts``
    seeds, the same whatever it says.
    """
    count = len(texts) // len(worlds)
    jobs = [
        Job(
            Task(
                episode_seed(_TESTS, world, number, layout),
                f"{world}.{number}.{layout}",
                {"world": world},
            ),
            Condition.GUIDED if text else Condition.FREE,
            episode_seed(_SAMPLING, world, number, layout),
            advice=experience_block([text]) if text else None,
        )
        for (world, number), text in zip(product(worlds, range(count)), texts, strict=True)
        for layout in range(layouts)
    ]
    won = [one.trajectory.success is True for one in await rollout.play(jobs)]
    return np.array(won, dtype=float).reshape(len(worlds), -1).mean(1)


async def measure(
    run: Path,
    count: int,
    layouts: int,
    temperatures: Sequence[float],
    rule: str | None = None,
) -> Measured:
    """Measure the success of a run's actor without a lesson and with those of each writer."""
    others = {name: name for name in BASELINES} | ({} if rule is None else {"rule": rule})
    async with finished(run) as final:
        settings = final.experiment.env
        held_out = settings.kwargs | settings.eval
        env: Any = gym.make(settings.id, disable_env_checker=True, **held_out).unwrapped
        worlds = list(env.worlds)
        rollout = Rollout(settings, settings.eval, Shown(), final.actor, slots=64)
        played = await plays(rollout, worlds, count)
        found = {"none": await success(rollout, worlds, [""] * len(played), layouts)}
        for name, kind in others.items():
            told = await lessons(open_extractor(kind, final.extractor), played)
            found[name] = await success(rollout, worlds, told, layouts)
        async for writer in final.writers():
            for temperature in temperatures:
                told = await lessons(final.distiller(temperature), played)
                found[f"{writer} {temperature:g}"] = await success(rollout, worlds, told, layouts)
        rollout.close()
    return Measured(
        seed=final.experiment.seed,
        settings={"plays": count, "layouts": layouts},
        success={name: tuple(rates.round(6).tolist()) for name, rates in found.items()},
    )


def store(results: Path, name: str) -> ResultStore[Measured]:
    """Return the store of what was measured of each run of an environment."""
    return ResultStore(
        results.with_suffix("") / name,
        Measured,
        about="lessons of a run",
        remedy="remove it, or give another --name",
        indent=None,
    )


def remember(runs: ResultStore[Measured], found: Measured) -> None:
    """Store what was measured of a run, beside what was measured of it before.

    A run whose actor plays otherwise without a lesson is another one, and replaces its seed's.

    Raises:
        ConfigError: the run was measured with another number of plays or layouts.
    """
    before = runs.find(str(found.seed), found.settings)
    if before is not None and before.success["none"] == found.success["none"]:
        found = found.model_copy(update={"success": before.success | found.success})
    runs.keep(str(found.seed), found)


def summary(runs: Iterable[Measured]) -> dict[str, Any]:
    """Return success and gain with intervals over runs and worlds, of what all runs have."""
    measured = sorted(runs, key=lambda run: run.seed)
    rates = {
        name: np.array([run.success[name] for run in measured])
        for name in measured[0].success
        if all(name in run.success for run in measured)
    }
    temperatures = sorted(
        float(writer.split()[1]) for writer in rates if writer.startswith("untrained ")
    )
    told: dict[str, Any] = {
        **measured[0].settings,
        "runs": len(measured),
        "seeds": [run.seed for run in measured],
        "success": {
            name: clustered_mean(table, bounds=RATE).model_dump() for name, table in rates.items()
        },
        "success of each run": {
            name: table.mean(1).round(4).tolist() for name, table in rates.items()
        },
    }
    told["trained minus untrained"] = {
        f"{temperature:g}": clustered_mean(
            rates[f"trained {temperature:g}"] - rates[f"untrained {temperature:g}"], bounds=GAIN
        ).model_dump()
        for temperature in temperatures
    }
    untrained = [f"untrained {temperature:g}" for temperature in temperatures]
    best = max(untrained, key=lambda name: rates[name].mean())
    bases = (("best untrained", best), ("fixed sentence", "template"), ("transcript", "transcript"))
    for title, base in bases:
        told[f"each minus the {title}"] = {
            f"trained {temperature:g}": clustered_mean(
                rates[f"trained {temperature:g}"] - rates[base], bounds=GAIN
            ).model_dump()
            for temperature in temperatures
        } | ({"best": best} if base == best else {})
    return told


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--plays", type=int, default=5, help="of each held-out world")
    parser.add_argument("--layouts", type=int, default=6, help="episodes with each lesson")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.1, 0.3, 0.6])
    parser.add_argument("--rule", help="an extractor that knows the game, as module:attribute")
    parser.add_argument("--name", default="lake-words-drafts", help="of the environment")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/lesson_gain.json"))
    options = parser.parse_args()
    runs = store(options.results, options.name)
    for run in options.runs:
        found = measure(run, options.plays, options.layouts, options.temperatures, options.rule)
        remember(runs, asyncio.run(found))
    known = json.loads(options.results.read_text("utf-8")) if options.results.exists() else {}
    keep(known | {options.name: summary(runs.all())}, options.results)


if __name__ == "__main__":
    main()
