"""Make the card of a comparison: success, paired differences and cost of one or more recipes."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

import numpy as np
from pydantic import Field

from experiential.config import Arm
from experiential.evaluation.cell import Cell, package_version
from experiential.evaluation.intervals import Interval, clustered_mean, unpaired_difference, wilson
from experiential.llm.metered import Spent
from experiential.types import Record

ARMS: tuple[Arm, ...] = get_args(Arm)
DIFFERENCES: tuple[tuple[Arm, Arm], ...] = (
    ("on", "off"),
    ("on", "shuffled"),
    ("on", "placebo"),
    ("on", "frozen"),
    ("frozen", "off"),
)
"""The pairs of arms that are compared, first minus second."""
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
    actor_tokens: float
    extractor_tokens: float
    actor_seconds: float
    extractor_seconds: float


class ArmReport(Record):
    """Report one arm of one recipe, over its training seeds.

    Attributes:
        seconds: of the arm, from the copy of the bank to the last distillation.
        later: success on the visits after the first, its interval over training seeds and worlds.
        entries: mean number of entries at the beginning.
        per_success: None for an arm without a success.
    """

    arm: Arm
    visits: tuple[VisitRate, ...]
    later: Interval
    episodes: int
    successes: int
    errors: int
    entries: float
    seconds: float
    actor: Spent
    extractor: Spent
    per_success: PerSuccess | None


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


class Card(Record):
    """Hold all findings of a comparison."""

    versions: dict[str, str]
    overrides: tuple[str, ...] = ()
    arms: tuple[Arm, ...]
    recipes: tuple[RecipeReport, ...]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = Field(
        default=(), description="arms not played, recipes not compared, and why"
    )


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
    return Card(
        versions=versions(),
        overrides=tuple(overrides),
        arms=tuple(arms),
        recipes=tuple(_recipe_report(name, family) for name, family in named.items()),
        comparisons=tuple(_comparisons(named)),
        notes=tuple(_notes(named, arms)),
    )


def versions() -> dict[str, str]:
    """Return the versions of this package, of Python and of the packages that compute."""
    found = {"experiential-rl": package_version(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def arm_report(arm: Arm, cells: Sequence[Cell]) -> ArmReport:
    """Report one arm over the runs of a recipe.

    Args:
        arm: which arm.
        cells: of this arm, one of each run.
    """
    tables = [cell.table() for cell in cells]
    successes, episodes = sum(int(t.sum()) for t in tables), sum(t.size for t in tables)
    actor = sum((cell.cost.actor for cell in cells), Spent())
    extractor = sum((cell.cost.extractor for cell in cells), Spent())
    seconds = sum(cell.cost.seconds for cell in cells)
    visits: list[VisitRate] = []
    for visit in range(tables[0].shape[1]):
        column = np.concatenate([table[:, visit] for table in tables])
        won = int(column.sum())
        interval = wilson(won, column.size)
        visits.append(
            VisitRate(visit=visit + 1, successes=won, episodes=column.size, interval=interval)
        )
    per_success = None
    if successes:
        per_success = PerSuccess(
            episodes=episodes / successes,
            seconds=seconds / successes,
            actor_tokens=actor.tokens / successes,
            extractor_tokens=extractor.tokens / successes,
            actor_seconds=actor.seconds / successes,
            extractor_seconds=extractor.seconds / successes,
        )
    return ArmReport(
        arm=arm,
        visits=tuple(visits),
        later=clustered_mean(_later(cells)),
        episodes=episodes,
        successes=successes,
        errors=sum(cell.errors for cell in cells),
        entries=sum(cell.entries for cell in cells) / len(cells),
        seconds=seconds,
        actor=actor,
        extractor=extractor,
        per_success=per_success,
    )


def difference(first: Sequence[Cell], second: Sequence[Cell]) -> Difference | None:
    """Return the paired difference of two arms; None without a common training seed."""
    pairs = _paired(first, second)
    if pairs is None:
        return None
    a, b = pairs
    interval = clustered_mean(a - b)
    return Difference(
        first=first[0].arm, second=second[0].arm, interval=interval, seeds=len(a), worlds=a.shape[1]
    )


def used_arm(cells: Sequence[Cell]) -> Arm:
    """Return the arm in which a recipe is used: ``on``, else ``off``, else the first played."""
    played = {cell.arm for cell in cells}
    return "on" if "on" in played else "off" if "off" in played else cells[0].arm


def recipe_difference(
    first: Sequence[Cell], second: Sequence[Cell]
) -> tuple[Interval, int, int] | None:
    """Return one recipe minus another on later visits: interval, common training seeds, worlds.

    Recipes without a common training seed are compared all the same, their seeds resampled apart.
    None means that they met different worlds.
    """
    pairs = _paired(first, second)
    if pairs is not None:
        a, b = pairs
        return clustered_mean(a - b), len(a), a.shape[1]
    a, b = _later(first), _later(second)
    if a.shape[1] != b.shape[1]:
        return None
    return unpaired_difference(a, b), 0, a.shape[1]


def _paired(first: Sequence[Cell], second: Sequence[Cell]) -> tuple[np.ndarray, np.ndarray] | None:
    a, b = ({cell.seed: cell for cell in cells} for cells in (first, second))
    both = [seed for seed in a if seed in b and a[seed].table().shape == b[seed].table().shape]
    if not both:
        return None
    return _later([a[seed] for seed in both]), _later([b[seed] for seed in both])


def _later(cells: Sequence[Cell]) -> np.ndarray:
    """Return success on later visits, shape (training seeds, worlds)."""
    return np.array([cell.later() for cell in cells])


def by_arm(cells: Iterable[Cell]) -> dict[Arm, list[Cell]]:
    """Group cells by arm, in the order of the arms, each by training seed."""
    found: dict[Arm, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: (ARMS.index(cell.arm), cell.seed)):
        found.setdefault(cell.arm, []).append(cell)
    return found


def _recipe_report(name: str, cells: Sequence[Cell]) -> RecipeReport:
    arms = by_arm(cells)
    runs = {cell.settings: cell for cell in sorted(cells, key=lambda cell: cell.seed)}
    found = (difference(arms[a], arms[b]) for a, b in DIFFERENCES if a in arms and b in arms)
    return RecipeReport(
        name=name,
        recipe=cells[0].recipe,
        environment=cells[0].environment,
        runs=tuple(
            RunFacts(**{name: getattr(cell, name) for name in RunFacts.model_fields})
            for cell in runs.values()
        ),
        worlds=len(cells[0].outcomes),
        arms=tuple(arm_report(arm, cells) for arm, cells in arms.items()),
        differences=tuple(one for one in found if one is not None),
    )


def _comparisons(named: Mapping[str, Sequence[Cell]]) -> Iterable[Comparison]:
    """Compare every recipe with the first, where it plays the same environment."""
    (base, base_cells), *others = named.items()
    base_arm = used_arm(base_cells)
    for name, cells in others:
        if cells[0].environment != base_cells[0].environment:
            continue
        arm = used_arm(cells)
        found = recipe_difference(by_arm(cells)[arm], by_arm(base_cells)[base_arm])
        if found is not None:
            interval, seeds, worlds = found
            yield Comparison(
                first=name,
                first_arm=arm,
                second=base,
                second_arm=base_arm,
                interval=interval,
                seeds=seeds,
                worlds=worlds,
            )


def _notes(named: Mapping[str, Sequence[Cell]], arms: Sequence[Arm]) -> Iterable[str]:
    for name, cells in named.items():
        played = {cell.arm for cell in cells}
        if missing := [arm for arm in arms if arm not in played]:
            why = "it has no bank" if "off" in played else "no such cell was given"
            yield f"{name}: {', '.join(missing)} not played, since {why}"
        if len({cell.seed for cell in cells}) == 1:
            yield (
                f"{name}: one training seed; its intervals leave out how much another training"
                " would differ"
            )
    base = next(iter(named.values()))[0]
    for name, cells in named.items():
        if cells[0].environment != base.environment:
            yield (
                f"{name}: plays {cells[0].environment}, the first recipe {base.environment}; they"
                " are not compared"
            )
