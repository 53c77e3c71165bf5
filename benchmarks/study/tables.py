"""Lay out what the cells of a study found, as tables and as a picture."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study.cells import StudyCell, read_cells
from benchmarks.study.orderings import ORDERINGS, Ordering, findings
from benchmarks.study.setups import (
    ABLATIONS,
    COMPLEMENTARY,
    ENVIRONMENTS,
    RECIPES,
    TRAINED,
    UNTRAINED_VARIANTS,
    WITHOUT_EXTRACTOR,
    WRITERS,
)
from experiential.config import Arm
from experiential.envs import random_agent
from experiential.errors import ConfigError
from experiential.evaluation.card import (
    ARMS,
    DIFFERENCES,
    RecipeReport,
    by_arm,
    make_card,
    recipe_difference,
    used_arm,
)
from experiential.evaluation.cell import Cell
from experiential.evaluation.intervals import RATE, Interval, clustered_mean, unpaired_difference
from experiential.evaluation.page import show_percent, show_points
from experiential.evaluation.picture import Point, mean_curve
from experiential.evaluation.visits import later
from experiential.recipe import load_experiment
from experiential.rollout import make_env, world_facts

TARGETS = (0.5, 0.8)
BASELINES = Path("benchmarks/results/baselines.json")
"""Of `benchmarks.baselines`, on the worlds, visits and seeds of ``vault``."""


def episodes_to_target(points: Sequence[Point], target: float) -> int | None:
    """Return the training episodes at the first evaluation that reached the target."""
    return next((point.episodes for point in points if point.success >= target), None)


def baselines(file: Path = BASELINES) -> dict[str, np.ndarray]:
    """Return success on later visits of each baseline and arm, shape (seeds, worlds).

    Without a file there are none.
    """
    kept = json.loads(file.read_text("utf-8"))["rows"] if file.exists() else []
    found: dict[str, list[np.ndarray]] = {}
    for row in kept:
        table = [[int(digit) for digit in world] for world in row["outcomes"]]
        name = row["name"] if row["name"] == row["arm"] else f"{row['name']}, {row['arm']}"
        found.setdefault(name, []).append(later(table))
    return {name: np.array(seeds) for name, seeds in found.items()}


def rows(
    cells: Sequence[StudyCell], known: Mapping[str, Mapping[str, np.ndarray]] | None = None
) -> list[dict[str, Any]]:
    """Return a row for each environment and recipe.

    Args:
        cells: finished cells.
        known: the baselines of each environment, as `baselines` returns them.
    """
    found: list[dict[str, Any]] = []
    for environment in dict.fromkeys(cell.environment for cell in cells):
        mine = [cell for cell in cells if cell.environment == environment]
        card = make_card([arm for cell in mine for arm in cell.arms])
        blind = chance(environment)
        beside = (environment, *ENVIRONMENTS[environment].beside)
        all_there = [cell for cell in cells if cell.environment in beside]
        base = [arm for cell in all_there if cell.recipe == RECIPES[0] for arm in cell.arms]
        rivals = trained_baselines(all_there)
        for recipe in card.recipes:
            played = [cell for cell in mine if cell.recipe == recipe.recipe]
            row = _row(recipe, played, base) | {"chance": round(blind, 4)}
            used = [arm for cell in played for arm in cell.arms if arm.arm == row["used_arm"]]
            found.append(row | against(used, (known or {}).get(environment, {}), rivals))
    return found


def compared_arm(environment: str, cells: Sequence[Cell]) -> Arm:
    """Return the arm in which a recipe is compared: the environment's, where it was played."""
    arm = ENVIRONMENTS[environment].arm
    if arm is None or all(cell.arm != arm for cell in cells):
        return used_arm(cells)
    return arm


def trained_baselines(cells: Sequence[StudyCell]) -> dict[str, list[Cell]]:
    """Return the cells of the recipes without a model as extractor, by recipe and environment."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.recipe in WITHOUT_EXTRACTOR:
            arm = compared_arm(cell.environment, cell.arms)
            found.setdefault(f"{cell.recipe}, {arm} ({cell.environment})", []).extend(
                played for played in cell.arms if played.arm == arm
            )
    return found


def against(
    cells: Sequence[Cell],
    known: Mapping[str, np.ndarray],
    rivals: Mapping[str, Sequence[Cell]],
) -> dict[str, Any]:
    """Return the columns that compare a recipe, as it is compared, with the best baseline.

    The best one is chosen on the very worlds on which it is compared, which favours it. Worlds are
    resampled together; training seeds are paired with those of ``rivals``, and resampled apart for
    ``known``.
    """
    mine = np.array([cell.later() for cell in cells])
    rates = {name: np.array([cell.later() for cell in made]) for name, made in rivals.items()}
    rates |= {name: rate for name, rate in known.items() if rate.shape[1] == mine.shape[1]}
    best = max(rates, key=lambda name: rates[name].mean(), default=None)
    interval, difference = None, None
    if best is not None:
        interval = clustered_mean(rates[best], bounds=RATE)
        paired = recipe_difference(cells, rivals[best]) if best in rivals else None
        difference = paired["interval"] if paired else unpaired_difference(mine, rates[best])
    return (
        {"best_baseline": best}
        | _columns("best_baseline_success", interval)
        | _columns("minus_best_baseline", difference)
    )


@lru_cache
def chance(environment: str) -> float:
    """Return the success of blind play on the evaluation worlds.

    It is written down here, stated by the environment, or else measured with random moves.
    """
    setup = ENVIRONMENTS[environment]
    if setup.chance is not None:
        return setup.chance
    settings = load_experiment("grpo", [*setup.training, *setup.final]).env
    _, stated = world_facts(settings.id, settings.kwargs | settings.eval)
    return random_success(environment) if stated is None else stated


def random_success(environment: str, repeats: int = 100) -> float:
    """Return the share of episodes won by random moves.

    Every evaluation world is played ``repeats`` times.
    """
    setup = ENVIRONMENTS[environment]
    settings = load_experiment("grpo", [*setup.training, *setup.final])
    env = make_env(settings.env, settings.env.eval)
    won = 0
    for repeat in range(repeats):
        agent = random_agent(env, seed=repeat)
        for world in range(settings.eval.worlds):
            options = {"world": world}
            observation, info = env.reset(seed=repeat, options=options)
            done = False
            while not done:
                observation, _, terminated, truncated, info = env.step(agent(observation, info))
                done = terminated or truncated
            won += bool(info["success"])
    env.close()
    return won / (repeats * settings.eval.worlds)


def _row(recipe: RecipeReport, cells: Sequence[StudyCell], base: Sequence[Cell]) -> dict[str, Any]:
    arms = [arm for cell in cells for arm in cell.arms]
    used = compared_arm(cells[0].environment, arms)
    report = recipe.arm(used)
    assert report is not None
    gain = None
    if base and cells[0].recipe != RECIPES[0]:
        gain = recipe_difference(by_arm(arms)[used], by_arm(base)[used_arm(base)])
    row: dict[str, Any] = {
        "environment": cells[0].environment,
        "recipe": recipe.recipe,
        "seeds": len(cells),
        "used_arm": used,
    }
    for arm in ARMS:
        row |= _columns(arm, None if (played := recipe.arm(arm)) is None else played.later)
    row |= _columns(f"minus_{RECIPES[0]}", gain["interval"] if gain and gain["seeds"] else None)
    for first, second in DIFFERENCES:
        interval = next(
            (d.interval for d in recipe.differences if (d.first, d.second) == (first, second)), None
        )
        row |= _columns(f"{first}_minus_{second}", interval)
    for name in ("episodes", "seconds", "actor_tokens", "extractor_tokens"):
        row[f"{name}_per_success"] = (
            round(getattr(report.per_success, name), 2) if report.per_success else None
        )
    for target in TARGETS:
        hit = [
            n
            for n in (episodes_to_target(cell.curve.get(used, ()), target) for cell in cells)
            if n is not None
        ]
        row |= {
            f"reached_{100 * target:.0f}": len(hit),
            f"episodes_to_{100 * target:.0f}": float(np.median(hit)) if hit else None,
        }
    row |= {
        "train_episodes": round(float(np.mean([cell.episodes for cell in cells]))),
        "train_minutes": round(float(np.mean([cell.seconds for cell in cells])) / 60, 1),
        "commits": " ".join(sorted({c.commit for c in cells})),
    }
    return row


def _columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    values = (
        (None, None, None) if interval is None else (interval.mean, interval.low, interval.high)
    )
    keys = (name, f"{name}_low", f"{name}_high")
    return {
        key: None if value is None else round(value, 4)
        for key, value in zip(keys, values, strict=True)
    }


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """Lay out the rows as two tables for each environment.

    The first has success and its speed, the second the worth and the cost of the bank.
    """
    parts: list[str] = []
    targets = [f"{100 * target:.0f}" for target in TARGETS]
    for environment in dict.fromkeys(row["environment"] for row in found):
        mine = [row for row in found if row["environment"] == environment]
        reach = [f"episodes to {target} % (seeds)" for target in targets]
        head = [
            "recipe",
            "seeds",
            "training episodes",
            "chance",
            "off",
            "frozen",
            "on (with test-time writing)",
            "frozen minus off, points",
            f"as used minus {RECIPES[0]}, points",
            "as used minus best baseline, points",
            *reach,
        ]
        body = [
            [
                row["recipe"],
                str(row["seeds"]),
                _number(row["train_episodes"]),
                f"{100 * row['chance']:.1f} %",
                _rate(row, "off"),
                _rate(row, "frozen"),
                _rate(row, "on"),
                _points(row, "frozen_minus_off"),
                _points(row, f"minus_{RECIPES[0]}"),
                _points(row, "minus_best_baseline"),
            ]
            + [
                f"{_number(row[f'episodes_to_{t}'])} ({row[f'reached_{t}']} of {row['seeds']})"
                for t in targets
            ]
            for row in mine
        ]
        pairs = ("on_minus_off", "on_minus_shuffled", "on_minus_placebo", "on_minus_frozen")
        costs = ("episodes_per_success", "actor_tokens_per_success", "extractor_tokens_per_success")
        second = [
            "recipe",
            *(pair.replace("_", " ") for pair in pairs),
            *(cost.replace("_", " ") for cost in costs),
        ]
        more = [
            [
                row["recipe"],
                *(_points(row, pair) for pair in pairs),
                *(_number(row[cost]) for cost in costs),
            ]
            for row in mine
        ]
        parts += [
            f"## {environment}",
            "Success on later visits, and how fast it came:",
            markdown_table(head, body),
            *([f"Best baseline: {named}"] if (named := _best(mine[0])) else []),
        ]
        parts += [
            "What the bank was good for, in points, and what a success cost as the recipe is used:",
            markdown_table(second, more),
        ]
    return "\n\n".join(parts) + "\n"


def orderings(cells: Sequence[StudyCell]) -> str:
    """Lay out the orderings of the papers, and whether each environment agrees."""
    places = dict.fromkeys(cell.environment for cell in cells)
    found: dict[Ordering, dict[str, str]] = {}
    for place in places:
        mine = [cell for cell in cells if cell.environment == place]
        names = dict.fromkeys(cell.recipe for cell in mine)
        for finding in findings(
            {
                name: [arm for cell in mine if cell.recipe == name for arm in cell.arms]
                for name in names
            },
            chance(place),
        ):
            text = f"{finding.verdict}: {show_points(finding.interval)}"
            if finding.over_chance is not None:
                text += (
                    "; the second is below chance, the first minus chance"
                    f" {show_points(finding.over_chance)}"
                )
            found.setdefault(finding.ordering, {})[place] = text
    body = [
        [
            f"`{o.first}` over `{o.second}`",
            o.protocol,
            o.source,
            *(found[o].get(place, "–") for place in places),
        ]
        for o in ORDERINGS
        if o in found
    ]
    return (
        "## Orderings of the papers\n\n"
        + markdown_table(["ordering", "evaluated", "source", *places], body)
        + "\n"
    )


def ablations(cells: Sequence[StudyCell]) -> str:
    """Lay out what a recipe loses or gains by each change to it; empty where none was made."""
    head = ["environment", "recipe", "arm", "success", "unchanged", "minus it, points", "seeds"]
    body = [
        [place, f"`{name}`", arm, show_percent(rate(mine)), f"`{main}`", *difference(mine, base)]
        for changed, whole in ((ABLATIONS, COMPLEMENTARY), (UNTRAINED_VARIANTS, ("static-online",)))
        for place, name, arm, mine, main, base in beside_trained(cells, changed, whole)
    ]
    return f"## Ablations\n\n{markdown_table(head, body)}\n" if body else ""


def by_seed(cells: Sequence[StudyCell]) -> str:
    """Lay out success of each recipe as it is used, by visit and by training seed."""
    head = ["environment", "recipe", "arm", "by visit, percent", "later visits", "each seed"]
    body: list[list[str]] = []
    for place, name in dict.fromkeys((cell.environment, cell.recipe) for cell in cells):
        made = [
            one
            for cell in sorted(cells, key=lambda cell: cell.seed)
            if (cell.environment, cell.recipe) == (place, name)
            for one in cell.arms
        ]
        arm = compared_arm(place, made)
        mine = [one for one in made if one.arm == arm]
        each = ", ".join(f"{100 * one.later().mean():.0f}" for one in mine)
        body.append([place, f"`{name}`", arm, visits(mine), show_percent(rate(mine)), each])
    return f"## By visit and by seed\n\n{markdown_table(head, body)}\n"


def writers(cells: Sequence[StudyCell]) -> str:
    """Lay out what trained extractors have over recipes whose entries somebody else writes."""
    head = ["environment", "recipe", "arm", "by visit, percent", "later visits"]
    head += ["trained", "trained minus it, points", "seeds"]
    body = [
        [place, f"`{name}`", arm, visits(mine), show_percent(rate(mine)), f"`{main}`"]
        + difference(base, mine)
        for trained in TRAINED
        for place, name, arm, mine, main, base in beside_trained(cells, WRITERS, trained)
    ]
    return f"## Who writes the entries\n\n{markdown_table(head, body)}\n" if body else ""


def beside_trained(
    cells: Sequence[StudyCell], recipes: Sequence[str], trained: Sequence[str]
) -> Iterator[tuple[str, str, Arm, list[Cell], str, list[Cell]]]:
    """Yield environment, recipe, arm, its cells, the first of ``trained`` there, and its cells.

    Cells are those of that arm.
    """
    played = dict.fromkeys((cell.environment, cell.recipe) for cell in cells)
    for place, name in played:
        main = next((one for one in trained if (place, one) in played), None)
        if name not in recipes or main is None or main == name:
            continue
        made, base = (
            [one for cell in cells if (cell.environment, cell.recipe) == (place, recipe)
             for one in cell.arms]
            for recipe in (name, main)
        )  # fmt: skip
        arm = compared_arm(place, made)
        mine, theirs = ([one for one in some if one.arm == arm] for some in (made, base))
        yield place, name, arm, mine, main, theirs


def compare(
    cells: Sequence[StudyCell],
    environment: str,
    sides: Sequence[tuple[str, str]],
    seeds: Sequence[int] | None = None,
) -> str:
    """Return success on later visits of two recipes, each under an arm, and their difference.

    Args:
        cells: finished cells.
        environment: of both.
        sides: recipe and arm, twice.
        seeds: training seeds to look at; None for all.

    Raises:
        ConfigError: one of them was not played.
    """
    lines, played = list[str](), list[list[Cell]]()
    for recipe, arm in sides:
        chosen = [c for c in cells if (c.environment, c.recipe) == (environment, recipe)]
        chosen = [c for c in chosen if seeds is None or c.seed in seeds]
        played.append([one for cell in chosen for one in cell.arms if one.arm == arm])
        if not played[-1]:
            raise ConfigError(
                f"Expected finished cells of {recipe} in {environment} under the arm {arm}, found"
                " none; see table.md for what was played"
            )
        each = ", ".join(f"{100 * one.later().mean():.0f}" for one in played[-1])
        lines.append(f"{recipe}, {arm}: {show_percent(rate(played[-1]))} ({each})")
    gap, common = difference(*played)
    return "\n".join([*lines, f"difference: {gap} points, common seeds: {common}"])


def rate(cells: Sequence[Cell]) -> Interval:
    """Return success on later visits, over training seeds and worlds, to four digits as in rows."""
    found = clustered_mean(np.array([cell.later() for cell in cells]), bounds=RATE)
    return Interval(**{name: round(value, 4) for name, value in found.model_dump().items()})


def visits(cells: Sequence[Cell]) -> str:
    """Return success by visit in percent, the mean over training seeds and worlds."""
    won = np.array([[[int(one) for one in world] for world in cell.outcomes] for cell in cells])
    return ", ".join(f"{100 * share:.0f}" for share in won.mean((0, 1)))


def difference(first: Sequence[Cell], second: Sequence[Cell]) -> list[str]:
    """Return success of the first minus the second on common seeds, and how many those are."""
    found = recipe_difference(first, second)
    return [show_points(found["interval"]), str(found["seeds"])] if found else ["–", "0"]


def _interval(row: dict[str, Any], name: str) -> Interval | None:
    return (
        None
        if row[name] is None
        else Interval(mean=row[name], low=row[f"{name}_low"], high=row[f"{name}_high"])
    )


def _rate(row: dict[str, Any], name: str) -> str:
    return "–" if (interval := _interval(row, name)) is None else show_percent(interval)


def _points(row: dict[str, Any], name: str) -> str:
    return "–" if (interval := _interval(row, name)) is None else show_points(interval)


def _best(row: dict[str, Any]) -> str:
    """Describe the best baseline of an environment; empty where none was played."""
    if row["best_baseline"] is None:
        return ""
    return f"{row['best_baseline']}, {_rate(row, 'best_baseline_success')}."


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if 0 < value < 10 else f"{value:,.0f}"


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Lay out rows as a table in Markdown."""
    lines = [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in body),
    ]
    return "\n".join(lines)


def plot(cells: Sequence[StudyCell], target: Path) -> None:
    """Plot held-out success on later visits against training episodes, mean and range.

    Above each recipe is as it is used, below without the bank.
    """
    from matplotlib.figure import Figure

    environments = list(dict.fromkeys(cell.environment for cell in cells))
    figure = Figure(figsize=(7 * len(environments), 8), layout="constrained")
    grid = figure.subplots(2, len(environments), squeeze=False)
    for column, environment in enumerate(environments):
        mine = [cell for cell in cells if cell.environment == environment]
        for row, title in enumerate(("as the recipe is used", "without the bank")):
            for number, recipe in enumerate(dict.fromkeys(cell.recipe for cell in mine)):
                runs = [cell for cell in mine if cell.recipe == recipe]
                played = [one for cell in runs for one in cell.arms]
                arm = "off" if row else compared_arm(environment, played)
                curves = [
                    [(point.episodes, point.success) for point in cell.curve.get(arm, ())]
                    for cell in runs
                ]
                _draw(grid[row, column], curves, f"C{number % 10}", f"{recipe} ({arm})")
            grid[row, column].set(
                title=f"{environment}, {title}",
                xlabel="training episodes",
                ylabel="later visits",
                ylim=(0, 1),
            )
            grid[row, column].legend(fontsize=7, frameon=False)
    figure.savefig(str(target), dpi=120)


def _draw(
    axes: Any, curves: Sequence[Sequence[tuple[int, float]]], colour: str, label: str
) -> None:
    found = mean_curve(curves)
    if found:
        xs, means, lows, highs = (list(column) for column in zip(*found, strict=True))
        axes.plot(xs, means, marker=".", color=colour, label=label)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.1)


def table(results: Path) -> None:
    """Write the rows as CSV and Markdown, and the picture."""
    cells = read_cells(results)
    found = rows(cells, {"vault": baselines()})
    with (results / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    parts = markdown(found), orderings(cells), ablations(cells), writers(cells), by_seed(cells)
    text = "\n".join(filter(None, parts))
    (results / "table.md").write_text(text, encoding="utf-8")
    plot(cells, results / "curves.png")
    print(text)
    for note in mixed_cells(cells):
        print(f"note: {note}")


def mixed_cells(cells: Sequence[StudyCell]) -> Iterator[str]:
    """Name the recipes whose cells are not of one kind, by what differs.

    Overrides that only some cells have change what is compared, unless they state what was the
    default before. Where overrides are equal, later code had further settings or other defaults.
    A model that was made anew, e.g. by `make homes-model` elsewhere, may have other weights.
    """
    for environment in dict.fromkeys(cell.environment for cell in cells):
        begun: dict[str, list[str]] = {}
        for cell in cells:
            if cell.environment == environment and cell.weights is not None:
                begun.setdefault(cell.weights, []).append(f"{cell.recipe}-{cell.seed}")
        if len(begun) > 1:
            told = "; ".join(f"{weights}: {', '.join(names)}" for weights, names in begun.items())
            yield f"the cells of {environment} begin with different weights ({told})"
    for environment, recipe in dict.fromkeys((cell.environment, cell.recipe) for cell in cells):
        mine = [cell for cell in cells if (cell.environment, cell.recipe) == (environment, recipe)]
        if len({cell.settings for cell in mine}) == 1:
            continue
        name = f"the cells of {environment}/{recipe}"
        given = [{o for o in cell.overrides if not o.startswith("seed=")} for cell in mine]
        if some := sorted(set[str]().union(*given) - set[str].intersection(*given)):
            yield (
                f"{name} were made with different settings ({', '.join(some)} in some); remove the"
                " older ones and run again if that changed them"
            )
        else:
            commits = ", ".join(dict.fromkeys(cell.commit for cell in mine))
            yield f"{name} have equal overrides, by code with other settings: {commits}"
