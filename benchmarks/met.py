"""Tell how success with the bank of the training depends on how often the training met a world.

    python -m benchmarks.met [--environments lake-words-seen alfworld-homes-seen]
        [--recipes complementary static-online grpo] [--instances | --new]
        [--results benchmarks/results/study]

Reads the cells of `benchmarks.study`. The training's tasks are drawn by its seed alone, so they are
drawn anew here. A block is ``env.visits`` training steps in a row that meet the same worlds.
``--instances`` makes the environments instead and tells, for each seed, how many worlds the
training met, how often, and how many instances of the evaluation begin like one of them.
``--new`` tells success without a bank on those instances and on the others apart.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study.cells import RESULTS, StudyCell, read_cells
from benchmarks.study.setups import ENVIRONMENTS, SEEN, base_of, overrides_of
from benchmarks.study.tables import compared_arm, markdown_table
from experiential.config import EnvSettings
from experiential.evaluation.visits import held_out_task
from experiential.recipe import load_experiment
from experiential.rollout import Task, TaskSource, make_env


def blocks(environment: str, seed: int, worlds: int) -> Counter[int]:
    """Return in how many blocks of a training each of its worlds was met, by their numbers."""
    base = base_of(environment, "grpo")
    experiment = load_experiment(base, overrides_of(environment, "grpo", seed))
    source, met = TaskSource(experiment.env, worlds, seed), Counter[int]()
    for step in range(0, experiment.run.steps, experiment.env.visits):
        met.update(task.options["world"] for task in source.tasks(step, experiment.actor.groups))
    return met


def success_by_blocks(cells: Sequence[StudyCell]) -> dict[int, list[float]]:
    """Return success on later visits of each world and seed, by how many blocks met the world.

    Args:
        cells: of one environment and recipe, whose evaluation plays every world of the training.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for cell in cells:
        used = compared_arm(cell.environment, cell.arms)
        played = next(one for one in cell.arms if one.arm == used)
        met = blocks(cell.environment, cell.seed, len(played.outcomes))
        for world, success in enumerate(played.later()):
            found[met[world]].append(float(success))
    return dict(sorted(found.items()))


def instances(environment: str, seed: int) -> list[str]:
    """Return a row: worlds met, visits to each, and instances of the evaluation that were met."""
    met, again = repeated(environment, seed)
    visits = f"{met.total() / len(met):.1f}"
    return [environment, str(seed), f"{len(met)} of {len(again)}", visits,
            f"{again.sum()} of {again.size}"]  # fmt: skip


def repeated(environment: str, seed: int) -> tuple[Counter[int], np.ndarray]:
    """Return the training's visits to each world, and what of the evaluation begins like one.

    The latter has a row for each world and a column for each visit, both of the evaluation.
    """
    overrides = overrides_of(environment, "grpo", seed)
    final = [*overrides, *ENVIRONMENTS[environment].final]
    experiment = load_experiment(base_of(environment, "grpo"), final)
    env, played = experiment.env, experiment.eval
    source = TaskSource(env, played.worlds, seed)
    trained = [
        task
        for step in range(experiment.run.steps)
        for task in source.tasks(step, experiment.actor.groups)
    ]
    evaluated = [
        held_out_task(played.seed, world, visit, listed=True)
        for world in range(played.worlds)
        for visit in range(played.visits)
    ]
    begun = set(beginnings(env, env.train, trained))
    again = [one in begun for one in beginnings(env, env.eval, evaluated)]
    met = Counter(task.options["world"] for task in trained)
    return met, np.array(again).reshape(played.worlds, played.visits)


def success_by_instance(cells: Sequence[StudyCell]) -> tuple[float, float]:
    """Return success without a bank on instances that training did not meet, and on those it did.

    Each is a mean over the episodes of all cells, NaN where there is none.
    """
    outcomes: dict[bool, list[str]] = {False: [], True: []}
    for cell in cells:
        again = repeated(cell.environment, cell.seed)[1]
        played = next(one for one in cell.arms if one.arm == "off")
        for met, outcome in zip(again.flat, "".join(played.outcomes), strict=True):
            outcomes[bool(met)].append(outcome)
    new, old = (each.count("1") / len(each) if each else math.nan for each in outcomes.values())
    return new, old


def beginnings(
    settings: EnvSettings, kwargs: dict[str, Any], tasks: Sequence[Task]
) -> Iterator[tuple[int, str]]:
    """Yield the world of each task and its first observation."""
    with closing(make_env(settings, kwargs)) as env:
        for task in tasks:
            observation, _ = env.reset(seed=task.seed, options=dict(task.options))
            yield task.options["world"], observation


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--environments", nargs="+", default=SEEN, choices=list(ENVIRONMENTS))
    parser.add_argument("--recipes", nargs="+", default=["complementary", "static-online", "grpo"])
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--instances", action="store_true", help="compare instances instead")
    instead.add_argument("--new", action="store_true", help="tell success on new instances apart")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.instances:
        head = ["environment", "seed", "worlds met", "visits to each", "instances that were met"]
        seeds = [instances(place, seed) for place in options.environments for seed in range(3)]
        print(markdown_table(head, seeds))
        return 0
    cells = read_cells(options.results)
    played = [
        (place, recipe, mine)
        for place in options.environments
        for recipe in options.recipes
        if (mine := [one for one in cells if (one.environment, one.recipe) == (place, recipe)])
    ]
    if options.new:
        head = ["environment", "recipe", "success on new instances", "on those that were met"]
        body = [
            [place, f"`{recipe}`", *map(_percent, success_by_instance(mine))]
            for place, recipe, mine in played
        ]
    else:
        head = [
            "environment",
            "recipe",
            "blocks that met the world",
            "later visits",
            "worlds × seeds",
        ]
        body = [
            [place, f"`{recipe}`", str(met), _percent(float(np.mean(rates))), str(len(rates))]
            for place, recipe, mine in played
            for met, rates in success_by_blocks(mine).items()
        ]
    print(markdown_table(head, body))
    return 0


def _percent(rate: float) -> str:
    return "–" if math.isnan(rate) else f"{100 * rate:.0f} %"


if __name__ == "__main__":
    raise SystemExit(main())
