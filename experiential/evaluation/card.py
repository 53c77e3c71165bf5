"""The card of a comparison: what was evaluated, success, paired differences and cost, of one or several recipes."""

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
    """Success on one visit, all training seeds together, with its Wilson interval."""

    visit: int
    successes: int
    episodes: int
    interval: Interval


class PerSuccess(Record):
    """What one success took, over all visits; None of an arm without a success."""

    episodes: float
    seconds: float
    actor_tokens: float
    extractor_tokens: float
    actor_seconds: float
    extractor_seconds: float


class ArmReport(Record):
    """One arm of one recipe, over its training seeds.

    Attributes:
        seconds: of the arm, from the copy of the bank to the last distillation.
        later: success on the visits after the first, its interval over training seeds and worlds.
        entries: mean number of entries at the beginning.
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
    """Success of the first arm minus the second on later visits, paired by training seed, world, visit and sampling seed."""

    first: Arm
    second: Arm
    interval: Interval
    seeds: int
    worlds: int


class RunFacts(Record):
    """One run of a recipe."""

    run: str
    seed: int
    step: int
    checkpoint: str
    settings: str
    version: str


class RecipeReport(Record):
    """All runs of one recipe with the same settings."""

    name: str
    recipe: str
    environment: str
    runs: tuple[RunFacts, ...]
    worlds: int
    arms: tuple[ArmReport, ...]
    differences: tuple[Difference, ...]

    def arm(self, name: str) -> ArmReport | None:
        """One arm, or None when it was not played."""
        return next((arm for arm in self.arms if arm.arm == name), None)


class Comparison(Record):
    """Success of one recipe minus another on later visits, each as it is used: with its bank, or without when it has none.

    ``seeds`` says how many training seeds both have, by which they are paired; 0: seeds were
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
    """Everything that a comparison found."""

    versions: dict[str, str]
    overrides: tuple[str, ...] = ()
    arms: tuple[Arm, ...]
    recipes: tuple[RecipeReport, ...]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = Field(
        default=(), description="what could not be played or compared, and why"
    )


def make_card(
    cells: Sequence[Cell], *, arms: Sequence[Arm] = ARMS, overrides: Sequence[str] = ()
) -> Card:
    """The card of these cells; cells of equal settings but for the training seed are repetitions of each other.

    Raises:
        ValueError: there are no cells.
    """
    if not cells:
        raise ValueError("Expected at least one cell, got none")
    families: dict[str, list[Cell]] = {}
    for cell in _distinct(cells):
        families.setdefault(cell.family, []).append(cell)
    named = dict(zip(_names(families.values()), families.values(), strict=True))
    return Card(
        versions=versions(),
        overrides=tuple(overrides),
        arms=tuple(arms),
        recipes=tuple(_recipe_report(name, family) for name, family in named.items()),
        comparisons=tuple(_comparisons(named)),
        notes=tuple(_notes(named, arms)),
    )


def versions() -> dict[str, str]:
    """Versions of this package, of Python and of what computes."""
    found = {"experiential-rl": package_version(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def arm_report(arm: Arm, cells: Sequence[Cell]) -> ArmReport:
    """One arm over the runs of a recipe, a cell of each."""
    tables = [cell.table() for cell in cells]
    successes, episodes = sum(int(t.sum()) for t in tables), sum(t.size for t in tables)
    actor, extractor = (
        sum((getattr(cell.cost, role) for cell in cells), Spent())
        for role in ("actor", "extractor")
    )
    seconds = sum(cell.cost.seconds for cell in cells)
    return ArmReport(
        arm=arm,
        visits=tuple(_visit_rates(tables)),
        later=clustered_mean(_later(cells)),
        episodes=episodes,
        successes=successes,
        errors=sum(cell.errors for cell in cells),
        entries=sum(cell.entries for cell in cells) / len(cells),
        seconds=seconds,
        actor=actor,
        extractor=extractor,
        per_success=_per_success(successes, episodes, seconds, actor, extractor),
    )


def difference(first: Sequence[Cell], second: Sequence[Cell]) -> Difference | None:
    """The paired difference of two arms over the training seeds that both were played with; None without a common one."""
    pairs = _paired(first, second)
    if pairs is None:
        return None
    a, b = pairs
    interval = clustered_mean(a - b)
    return Difference(
        first=first[0].arm, second=second[0].arm, interval=interval, seeds=len(a), worlds=a.shape[1]
    )


def used_arm(cells: Sequence[Cell]) -> Arm:
    """The arm in which a recipe is used: ``on`` where it was played, else ``off``, else what there is."""
    played = {cell.arm for cell in cells}
    return "on" if "on" in played else "off" if "off" in played else cells[0].arm


def recipe_difference(
    first: Sequence[Cell], second: Sequence[Cell]
) -> tuple[Interval, int, int] | None:
    """One recipe minus another on later visits, each in one arm: interval, common training seeds, and worlds.

    Recipes without a common training seed are compared all the same, their seeds resampled apart,
    as long as they met the same worlds; None when they did not.
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
    """Success on later visits, shape (training seeds, worlds)."""
    return np.array([cell.later() for cell in cells])


def _visit_rates(tables: Sequence[np.ndarray]) -> Iterable[VisitRate]:
    for index in range(tables[0].shape[1]):
        successes, episodes = (
            sum(int(t[:, index].sum()) for t in tables),
            sum(len(t) for t in tables),
        )
        yield VisitRate(
            visit=index + 1,
            successes=successes,
            episodes=episodes,
            interval=wilson(successes, episodes),
        )


def _per_success(
    successes: int, episodes: int, seconds: float, actor: Spent, extractor: Spent
) -> PerSuccess | None:
    if not successes:
        return None
    return PerSuccess(
        episodes=episodes / successes,
        seconds=seconds / successes,
        actor_tokens=actor.tokens / successes,
        extractor_tokens=extractor.tokens / successes,
        actor_seconds=actor.seconds / successes,
        extractor_seconds=extractor.seconds / successes,
    )


def _distinct(cells: Sequence[Cell]) -> list[Cell]:
    """Each cell once: of several with equal settings, training seed and arm the last."""
    return list({(cell.settings, cell.arm): cell for cell in cells}.values())


def _names(families: Iterable[Sequence[Cell]]) -> list[str]:
    """The recipe of each family, numbered where several share one."""
    told = Counter[str]()
    names: list[str] = []
    for family in families:
        recipe = family[0].recipe
        told[recipe] += 1
        names.append(recipe if told[recipe] == 1 else f"{recipe} ({told[recipe]})")
    return names


def by_arm(cells: Iterable[Cell]) -> dict[Arm, list[Cell]]:
    """Cells of each arm, in the order of the arms and by training seed."""
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
        runs=tuple(_facts(cell) for cell in runs.values()),
        worlds=len(cells[0].outcomes),
        arms=tuple(arm_report(arm, cells) for arm, cells in arms.items()),
        differences=tuple(one for one in found if one is not None),
    )


def _facts(cell: Cell) -> RunFacts:
    return RunFacts(**{name: getattr(cell, name) for name in RunFacts.model_fields})


def _comparisons(named: Mapping[str, Sequence[Cell]]) -> Iterable[Comparison]:
    """Every recipe minus the first, in the same environment."""
    (base, base_cells), *others = named.items()
    base_arm = used_arm(base_cells)
    for name, cells in others:
        arm = used_arm(cells)
        if cells[0].environment != base_cells[0].environment:
            continue
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
        missing = [arm for arm in arms if arm not in {cell.arm for cell in cells}]
        if missing:
            why = (
                "it has no bank"
                if "off" in {cell.arm for cell in cells}
                else "no such cell was given"
            )
            yield f"{name}: {', '.join(missing)} not played, since {why}"
        seeds = len({cell.seed for cell in cells})
        if seeds == 1:
            yield (
                f"{name}: one training seed; its intervals do not tell how much another training"
                " would differ"
            )
    base = next(iter(named.values()))[0]
    for name, cells in named.items():
        if cells[0].environment != base.environment:
            yield (
                f"{name}: plays {cells[0].environment}, the first recipe {base.environment}; they"
                " are not compared"
            )
