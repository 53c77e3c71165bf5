"""Which recipe a paper puts above which, and whether the cells of a study agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiential.config import Arm
from experiential.evaluation.card import by_arm, recipe_difference, used_arm
from experiential.evaluation.cell import Cell
from experiential.evaluation.intervals import Interval


@dataclass(frozen=True)
class Ordering:
    """What a paper says: ``first`` ends with more success than ``second``.

    Attributes:
        first: a recipe.
        second: another.
        source: where the paper says so.
        off: both are played without their banks; else each as it is used.
    """

    first: str
    second: str
    source: str
    off: bool = False


ORDERINGS = (
    Ordering("complementary", "grpo", "Complementary RL, table 1"),
    Ordering(
        "complementary", "grpo", "Complementary RL, table 1, evaluated without experience", off=True
    ),
    Ordering("complementary", "offline", "Complementary RL, figure 3a"),
    Ordering("complementary", "static-online", "Complementary RL, figure 3a, table 1"),
    Ordering("complementary", "exp-only", "Complementary RL, table 1"),
    Ordering(
        "static-online", "grpo", "Complementary RL, figure 3a, by little; table 1 has the opposite"
    ),
    Ordering("grpo", "exp-only", "Complementary RL, table 1"),
    Ordering(
        "complementary-self-distill",
        "complementary",
        "Complementary RL, figure 9b, early; later a collapse",
    ),
    Ordering("evolver", "grpo", "EvolveR, table 1, against RL without experience"),
    Ordering("erl", "grpo", "Experiential RL, table 1"),
    Ordering("erl", "erl-no-memory", "Experiential RL, table 1"),
    Ordering("erl", "erl-no-reflection", "Experiential RL, table 1"),
)
"""The orderings of the papers among the recipes of the study."""


@dataclass(frozen=True)
class Finding:
    """An ordering and the paired difference, first minus second, on later visits."""

    ordering: Ordering
    interval: Interval

    @property
    def verdict(self) -> str:
        """``holds`` or ``reversed`` where the 95 % interval leaves out zero, else ``open``."""
        return (
            "holds" if self.interval.low > 0 else "reversed" if self.interval.high < 0 else "open"
        )


def findings(cells: Mapping[str, Sequence[Cell]]) -> list[Finding]:
    """The orderings that these cells of one environment, by recipe, can speak to."""
    found: list[Finding] = []
    for ordering in ORDERINGS:
        if ordering.first in cells and ordering.second in cells:
            first, second = (
                _played(cells[name], ordering.off) for name in (ordering.first, ordering.second)
            )
            difference = recipe_difference(first, second) if first and second else None
            if difference is not None:
                found.append(Finding(ordering, difference[0]))
    return found


def _played(cells: Sequence[Cell], off: bool) -> Sequence[Cell]:
    arm: Arm = "off" if off else used_arm(cells)
    return by_arm(cells).get(arm, [])
