"""Make the card of a comparison: success, paired differences and cost of one or more recipes."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import numpy as np

from experiential.config import Arm, BankArm, Baseline
from experiential.evaluation.arms import attempts
from experiential.evaluation.cell import Cell, package_version
from experiential.evaluation.intervals import (
    GAIN,
    RATE,
    Interval,
    clustered_mean,
    paired_difference,
    unpaired_difference,
    wilson,
)
from experiential.llm.metered import Spent
from experiential.types import Record

ARMS: tuple[Arm, ...] = get_args(BankArm)
"""The arms that a comparison plays where none are named: all but the baselines."""
BASELINES: tuple[Arm, ...] = get_args(Baseline)
DIFFERENCES: tuple[tuple[Arm, Arm], ...] = (
    ("on", "off"),
    ("on", "shuffled"),
    ("on", "placebo"),
    ("on", "frozen"),
    ("frozen", "off"),
)
"""The pairs of arms that are compared, first minus second; beside them baselines, with two arms."""
_PACKAGES = ("torch", "transformers", "numpy", "gymnasium", "chromadb")


class VisitRate(Record):
    """Hold success on one visit, all training seeds together, with its Wilson interval."""

    visit: int
    successes: int
    episodes: int
    interval: Interval


class PerSuccess(Record):
    """Hold the cost of one success, over all visits."""

    episodes: float
    seconds: float
    actor_tokens: float | None
    """None: no reply has reported them."""
    extractor_tokens: float | None
    actor_seconds: float
    extractor_seconds: float
    actor_cost: float | None = None
    """Dollars; None where no price is known."""
    extractor_cost: float | None = None


class ArmReport(Record):
    """Report one arm of one recipe, over its training seeds."""

    arm: Arm
    visits: tuple[VisitRate, ...]
    later: Interval
    """Success on the visits after the first, its interval over training seeds and worlds."""
    episodes: int
    successes: int
    errors: int
    entries: float
    """Mean number of entries at the beginning."""
    seconds: float
    """From the copy of the bank to the last distillation."""
    actor: Spent
    extractor: Spent
    per_success: PerSuccess | None
    """None for an arm without a success."""


class Difference(Record):
    """Hold success on later visits of the first arm minus the second.

    Both are paired by training seed, world, visit and sampling seed.
    """

    first: Arm
    second: Arm
    interval: Interval
    seeds: int
    worlds: int


class RunFacts(Record):
    """Identify one run of a recipe."""

    run: str
    seed: int
    step: int
    checkpoint: str
    settings: str
    version: str


class RecipeReport(Record):
    """Report all runs of one recipe with the same settings."""

    name: str
    recipe: str
    environment: str
    runs: tuple[RunFacts, ...]
    worlds: int
    arms: tuple[ArmReport, ...]
    differences: tuple[Difference, ...]

    def arm(self, name: str) -> ArmReport | None:
        """Return one arm, or None when it was not played."""
        return next((arm for arm in self.arms if arm.arm == name), None)


class Comparison(Record):
    """Hold success on later visits of one recipe minus another, each in the arm it is used in.

    ``seeds`` counts the training seeds that both have, by which they are paired; 0: seeds were
    resampled apart.
    """

    first: str
    first_arm: Arm
    second: str
    second_arm: Arm
    interval: Interval
    seeds: int
    worlds: int

    def sides(self, sign: str) -> str:
        """Return what is compared, with ``sign`` between the two."""
        return f"{self.first} ({self.first_arm}) {sign} {self.second} ({self.second_arm})"


class Card(Record):
    """Hold all findings of a comparison."""

    versions: dict[str, str]
    overrides: tuple[str, ...] = ()
    arms: tuple[Arm, ...]
    recipes: tuple[RecipeReport, ...]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    """Arms not played, recipes not compared, and why."""


def make_card(
    cells: Sequence[Cell], *, arms: Sequence[Arm] = ARMS, overrides: Sequence[str] = ()
) -> Card:
    """Return the card of some cells.

    Cells whose settings differ in the training seed alone repeat each other; of several cells with
    equal settings, training seed and arm the last one counts.

    Raises:
        ValueError: there are no cells.
    """
    if not cells:
        raise ValueError("Expected at least one cell, got none")
    families: dict[str, list[Cell]] = {}
    for cell in {(cell.settings, cell.arm): cell for cell in cells}.values():
        families.setdefault(cell.family, []).append(cell)
    seen = Counter[str]()
    named: dict[str, list[Cell]] = {}
    for family in families.values():
        recipe = family[0].recipe
        seen[recipe] += 1
        named[recipe if seen[recipe] == 1 else f"{recipe} ({seen[recipe]})"] = family

    base_name, base = next(iter(named.items()))
    comparisons: list[Comparison] = []
    notes: list[str] = []
    apart: list[str] = []
    for name, mine in named.items():
        played = {cell.arm for cell in mine}
        if missing := [arm for arm in arms if arm not in played]:
            why = "it has no bank" if "off" in played else "no such cell was given"
            notes.append(f"{name}: {', '.join(missing)} not played, since {why}")
        if len({cell.seed for cell in mine}) == 1:
            notes.append(
                f"{name}: one training seed; its intervals leave out how much another training"
                " would differ"
            )
        if (chance := mine[0].chance) is not None:
            notes.append(f"{name}: chance, blind play, is {100 * chance:.1f} %")
        for cell in mine:
            for role, spent in (("actor", cell.cost.actor), ("extractor", cell.cost.extractor)):
                if spent.tokens and spent.unreported:
                    notes.append(f"{name}, {cell.arm}, {role}: {spent.describe()}")
        if mine[0].environment != base[0].environment:
            apart.append(
                f"{name}: plays {mine[0].environment}, the first recipe {base[0].environment}; they"
                " are not compared"
            )
        elif name != base_name:
            arm, other = used_arm(mine), used_arm(base)
            if found := recipe_difference(by_arm(mine)[arm], by_arm(base)[other]):
                comparisons.append(
                    Comparison(
                        first=name, first_arm=arm, second=base_name, second_arm=other, **found
                    )
                )
    versions = {"experiential-rl": package_version(), "python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return Card(
        versions=versions,
        overrides=tuple(overrides),
        arms=tuple(arms),
        recipes=tuple(recipe_report(name, family) for name, family in named.items()),
        comparisons=tuple(comparisons),
        notes=(*notes, *apart),
    )


def arm_report(arm: Arm, cells: Sequence[Cell]) -> ArmReport:
    """Report one arm over the runs of a recipe, by the arm's cell of each."""
    tables = [cell.table() for cell in cells]
    successes = sum(int(t.sum()) for t in tables)
    episodes = attempts(arm) * sum(t.size for t in tables)
    actor = sum((cell.cost.actor for cell in cells), Spent())
    extractor = sum((cell.cost.extractor for cell in cells), Spent())
    seconds = sum(cell.cost.seconds for cell in cells)
    visits: list[VisitRate] = []
    for number, column in enumerate(np.concatenate(tables).T, 1):
        won, played = int(column.sum()), column.size
        rate = wilson(won, played)
        visits.append(VisitRate(visit=number, successes=won, episodes=played, interval=rate))
    costs = {
        "episodes": episodes,
        "seconds": seconds,
        "actor_tokens": None if actor.unreported and not actor.tokens else actor.tokens,
        "extractor_tokens": (
            None if extractor.unreported and not extractor.tokens else extractor.tokens
        ),
        "actor_seconds": actor.seconds,
        "extractor_seconds": extractor.seconds,
        "actor_cost": actor.cost,
        "extractor_cost": extractor.cost,
    }
    per_success = None
    if successes:
        each = {name: None if cost is None else cost / successes for name, cost in costs.items()}
        per_success = PerSuccess.model_validate(each)
    return ArmReport(
        arm=arm,
        visits=tuple(visits),
        later=clustered_mean(_later(cells), bounds=RATE),
        episodes=episodes,
        successes=successes,
        errors=sum(cell.errors for cell in cells),
        entries=sum(cell.entries for cell in cells) / len(cells),
        seconds=seconds,
        actor=actor,
        extractor=extractor,
        per_success=per_success,
    )


def used_arm(cells: Sequence[Cell]) -> Arm:
    """Return the arm in which a recipe is used: ``on``, else ``off``, else the first played."""
    played = {cell.arm for cell in cells}
    return "on" if "on" in played else "off" if "off" in played else cells[0].arm


def recipe_difference(first: Sequence[Cell], second: Sequence[Cell]) -> dict[str, Any] | None:
    """Return one recipe minus another on later visits: ``interval``, common ``seeds``, ``worlds``.

    Recipes without a common training seed are compared all the same, their seeds resampled apart.
    None means that they met different worlds.
    """
    a, b = ({cell.seed: cell for cell in cells} for cells in (first, second))
    both = [seed for seed in a if seed in b and a[seed].table().shape == b[seed].table().shape]
    if both:
        one, other = _later([a[seed] for seed in both]), _later([b[seed] for seed in both])
        interval = clustered_mean(one - other, bounds=GAIN)
        if len(both) == 1:
            interval = paired_difference(one[0], other[0])
        return {"interval": interval, "seeds": len(both), "worlds": one.shape[1]}
    one, other = _later(first), _later(second)
    if one.shape[1] != other.shape[1]:
        return None
    return {"interval": unpaired_difference(one, other), "seeds": 0, "worlds": one.shape[1]}


def _later(cells: Sequence[Cell]) -> np.ndarray:
    """Return success on later visits, shape (training seeds, worlds)."""
    return np.array([cell.later() for cell in cells])


def by_arm(cells: Iterable[Cell]) -> dict[Arm, list[Cell]]:
    """Group cells by arm, in the order of the arms, each by training seed."""
    found: dict[Arm, list[Cell]] = {}
    order = (*ARMS, *BASELINES)
    for cell in sorted(cells, key=lambda cell: (order.index(cell.arm), cell.seed)):
        found.setdefault(cell.arm, []).append(cell)
    return found


def recipe_report(name: str, cells: Sequence[Cell]) -> RecipeReport:
    """Report the cells of one recipe with the same settings."""
    arms = by_arm(cells)
    runs = {cell.settings: cell for cell in sorted(cells, key=lambda cell: cell.seed)}
    differences: list[Difference] = []
    baselines = [pair for one in BASELINES for pair in (("on", one), (one, "off"))]
    for first, second in (*DIFFERENCES, *baselines):
        if first in arms and second in arms:
            found = recipe_difference(arms[first], arms[second])
            if found and found["seeds"]:  # arms of one recipe are compared only when paired
                differences.append(Difference(first=first, second=second, **found))
    return RecipeReport(
        name=name,
        recipe=cells[0].recipe,
        environment=cells[0].environment,
        runs=tuple(
            RunFacts(**cell.model_dump(include=set(RunFacts.model_fields)))
            for cell in runs.values()
        ),
        worlds=len(cells[0].outcomes),
        arms=tuple(arm_report(arm, cells) for arm, cells in arms.items()),
        differences=tuple(differences),
    )
