"""Compare the cells of a study with the orderings that the papers report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from experiential.evaluation.card import by_arm, recipe_difference, used_arm
from experiential.evaluation.cell import Cell
from experiential.evaluation.intervals import RATE, Interval, clustered_mean

Protocol = Literal["frozen", "off", "writing"]
"""How both recipes are evaluated.

``frozen``: the bank of the training, read only (the papers' protocol). ``off``: without a bank.
``writing``: the bank keeps growing during evaluation (arm ``on``). A recipe without a bank is
always played without one.
"""
NOT_IN_A_PAPER = "test-time writing, not in the paper"


@dataclass(frozen=True)
class Ordering:
    """Order two recipes: ``first`` ends with more success than ``second``.

    Attributes:
        first: a recipe.
        second: another.
        source: where a paper reports it.
        protocol: how both are evaluated.
    """

    first: str
    second: str
    source: str
    protocol: Protocol = "frozen"


ORDERINGS = (
    Ordering("complementary", "grpo", "Complementary RL, table 1"),
    Ordering(
        "complementary", "grpo", "Complementary RL, table 1, evaluated without experience", "off"
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
    Ordering("complementary", "grpo", NOT_IN_A_PAPER, "writing"),
    Ordering("complementary", "offline", NOT_IN_A_PAPER, "writing"),
    Ordering("complementary", "static-online", NOT_IN_A_PAPER, "writing"),
    Ordering("complementary", "exp-only", NOT_IN_A_PAPER, "writing"),
    Ordering("static-online", "grpo", NOT_IN_A_PAPER, "writing"),
    Ordering("grpo", "exp-only", NOT_IN_A_PAPER, "writing"),
    Ordering("complementary-self-distill", "complementary", NOT_IN_A_PAPER, "writing"),
    Ordering("evolver", "grpo", NOT_IN_A_PAPER, "writing"),
)
"""Orderings of the papers under their own protocol, then the same pairs with test-time writing."""


@dataclass(frozen=True)
class Finding:
    """Hold an ordering against the cells: first minus second on later visits, paired.

    Attributes:
        ordering: what is compared.
        interval: first minus second.
        over_chance: first minus chance, where second itself is below chance; else None.
    """

    ordering: Ordering
    interval: Interval
    over_chance: Interval | None = None

    @property
    def verdict(self) -> str:
        """Return ``holds`` or ``reversed`` where the 95 % interval leaves out zero, else ``open``.

        A second that is worse than chance shows nothing about the first, which then has to beat
        chance.
        """
        if self.interval.high < 0:
            return "reversed"
        low = self.interval.low if self.over_chance is None else self.over_chance.low
        return "holds" if self.interval.low > 0 and low > 0 else "open"


def findings(cells: Mapping[str, Sequence[Cell]], chance: float = 0.0) -> list[Finding]:
    """Return the orderings that the cells of one environment, by recipe, can speak to.

    Args:
        cells: cells of all arms and training seeds, by recipe.
        chance: success of blind play there, in [0, 1].
    """
    found: list[Finding] = []
    for ordering in ORDERINGS:
        if ordering.first not in cells or ordering.second not in cells:
            continue
        first, second = (
            _played(cells[name], ordering.protocol) for name in (ordering.first, ordering.second)
        )
        difference = recipe_difference(first, second) if first and second else None
        if difference is None:
            continue
        is_below = np.mean([cell.later().mean() for cell in second]) < chance
        rate = clustered_mean(np.array([cell.later() for cell in first]), bounds=RATE)
        over = Interval(**{end: value - chance for end, value in rate.model_dump().items()})
        found.append(Finding(ordering, difference["interval"], over if is_below else None))
    return found


def _played(cells: Sequence[Cell], protocol: Protocol) -> Sequence[Cell]:
    arms = by_arm(cells)
    if protocol == "writing" or "on" not in arms:  # a recipe without a bank has one arm, off
        return arms[used_arm(cells)]
    return arms.get(protocol, [])
