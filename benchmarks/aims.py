"""Compare the study with what it was meant to show: one row for each aim, whatever its sign.

    python -m benchmarks.aims [--results benchmarks/results/study]

Aims and thresholds were set before the worlds of "memory must be earned" were built; rows about
worlds that training met, and then those about worlds under a law, were added after all others had
been read. Figures come from the cells of `benchmarks.study`, and from the results of
`benchmarks.baselines`, `benchmarks.lesson_gain` and `benchmarks.extractor_uplift`. An aim is *met*
if its value reaches the threshold and its intervals exclude zero, in as many environments
as it names.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study.cells import RESULTS, StudyCell, read_cells
from benchmarks.study.setups import (
    ABLATIONS,
    COMPLEMENTARY,
    ENVIRONMENTS,
    FUNCTIONS,
    RULES,
    SEEN,
    TRAINED,
    UNTRAINED,
    WRITERS,
)
from benchmarks.study.tables import baselines, compared_arm, markdown_table, rate, visits
from experiential.config import Arm
from experiential.evaluation.card import recipe_difference
from experiential.evaluation.cell import Cell
from experiential.evaluation.intervals import Interval, independent_mean, unpaired_difference
from experiential.evaluation.page import show_percent, show_points
from experiential.evaluation.picture import mean_curve

HELD_OUT = ("vault-law-note", "lake-words", "alfworld-homes")
"""A law, a grid in dialects, and households: where the papers' gains were to be seen."""
LAWS = ("vault-law-note", "lake-words-law", "alfworld-homes-street")
"""The same, each under a law that held-out worlds share with those of the training."""
PENALISED = {"alfworld-homes-street": "complementary-kl"}
"""Complementary RL with a KL penalty for the extractor, where ``complementary`` has none."""
MET = ("vault-law-note", *SEEN)
"""The same, dialects and households as training met them, on other instances."""
BLIND = ("vault-blind", "vault-blind-lists", "vault-blind-smollm2")
"""Vault without a clerk: with a model that forgets no lever found, with one that also avoids those
ruled out, and with one that nobody here made."""
FEW = "lake-words-few"
"""Dialects that weights can learn, since the first observation names them."""
LEARNABLE = ("vault-law-long", FEW, "alfworld-homes-few")
"""A law, dialects and households that weights can learn: long training, or few worlds."""
IMITATING = "complementary-self-distill-full"
"""Complementary RL that imitates its guided episodes, section 4.3 of the paper."""
MEMORY = (
    *HELD_OUT, *LAWS[1:], *SEEN, "lake-words-habits", "lake-words-habits-drafts",
    "lake-words-smollm2", *BLIND, "vault-law", "vault-law-smollm2", "vault-smollm2", "vault",
    *LEARNABLE,
)  # fmt: skip
"""Where a memory was to beat every baseline without a model as extractor."""
GAIN, GAIN_ALONE, SPEED = 0.087, 0.04, 0.5
"""Aims: over GRPO with the bank of the training, over GRPO without a bank, share of episodes."""
SEEDS = 3
"""Training seeds that a recipe and GRPO must share before the gain counts."""
GRPO = ("grpo", "grpo-fast", "grpo-named", "grpo-named-fast")
"""GRPO, also at a higher rate, and with a first observation that names the world."""
LESSONS = Path("benchmarks/results/lesson_gain.json")
UPLIFT = Path("benchmarks/results/extractor_uplift.json")
TRAINED_AT = "0.6"
"""Temperature of the lessons in the trainings with drafts."""
IDEAL = np.arange(2, 14, 2) / 14
"""Success by visit in Vault without a clerk of a player who never pulls one of the 14 levers twice:
two a visit."""


@dataclass(frozen=True)
class Row:
    """Hold one line of an aim: what was compared, what came out, whether that meets the aim."""

    aim: str
    case: str
    found: str
    met: bool | None

    def cells(self) -> list[str]:
        """Return the columns of the table."""
        verdict = "–" if self.met is None else "met" if self.met else "missed"
        return [self.aim, self.case, self.found, verdict]


class Study:
    """Look up the cells of a study by environment, recipe and arm."""

    def __init__(self, cells: Sequence[StudyCell]) -> None:
        self._cells = cells

    def of(self, environment: str, recipe: str) -> list[StudyCell]:
        """Return the cells of a recipe; GRPO's may come from an environment with equal worlds."""
        places = (environment, *(ENVIRONMENTS[environment].beside if recipe == "grpo" else ()))
        for place in places:
            found = [c for c in self._cells if (c.environment, c.recipe) == (place, recipe)]
            if found:
                return found
        return []

    def recipes(self, environment: str, names: Sequence[str]) -> list[str]:
        """Return those of some recipes that were played."""
        return [name for name in names if self.of(environment, name)]

    def arm(self, environment: str, recipe: str, arm: Arm | None = None) -> list[Cell]:
        """Return a recipe's outcomes under an arm; None: the one in which it is compared."""
        played = [one for cell in self.of(environment, recipe) for one in cell.arms]
        if not played:
            return []
        chosen = arm or compared_arm(environment, played)
        return [one for one in played if one.arm == chosen]

    def complementary(self, environment: str) -> str | None:
        """Return the recipe that stands for Complementary RL with its defaults."""
        return next(iter(self.recipes(environment, COMPLEMENTARY)), None)

    def best(self, environment: str, names: Sequence[str]) -> tuple[str, str] | None:
        """Return environment and recipe with the highest success, on equal worlds."""
        places = (environment, *ENVIRONMENTS[environment].beside)
        return max(
            ((place, name) for place in places for name in self.recipes(place, names)),
            key=lambda pair: np.mean([cell.later().mean() for cell in self.arm(*pair)]),
            default=None,
        )


def family(environment: str) -> str:
    """Return the name that variants of an environment share.

    >>> family("lake-words-seen"), family("lake-words-habits-drafts"), family("vault-law-note")
    ('lake-words', 'lake-words', 'vault-law')
    >>> family("vault-blind-lists"), family("vault-blind-smollm2")
    ('vault-blind', 'vault-blind')
    >>> family("lake-words-law"), family("vault-law-smollm2")
    ('lake-words', 'vault-law')
    """
    variants = "-note|-seen|-few|-long|-street|-habits|-drafts|-lists|-smollm2|(?<=words|homes)-law"
    return re.sub(f"({variants})+$", "", environment)


def difference(first: Sequence[Cell], second: Sequence[Cell]) -> Interval | None:
    """Return success on later visits of the first minus the second; None if one was not played."""
    found = recipe_difference(first, second) if first and second else None
    return found["interval"] if found else None


def papers_gains(found: Study) -> list[Row]:
    """Compare Complementary RL with GRPO, reading the bank of the training and without a bank."""
    rows: list[Row] = []
    kinds: tuple[tuple[Arm, float, str], ...] = (
        ("frozen", GAIN, "bank of the training, minus GRPO"),
        ("off", GAIN_ALONE, "without the bank, minus GRPO"),
    )
    worlds = (
        ("", HELD_OUT, {}),
        (", worlds under a law", LAWS, {}),
        (", worlds under a law, extractors with a KL penalty", LAWS, PENALISED),
        (", worlds that training met", MET, {}),
    )
    for (arm, least, kind), (which, places, mains) in product(kinds, worlds):
        pairs = [(place, mains.get(place, "complementary")) for place in places]
        rows += _over_grpo(found, f"{kind}{which}", pairs, arm, least)
    return rows


def gains_in_weights(found: Study) -> list[Row]:
    """Compare Complementary RL with GRPO where weights can learn the worlds."""
    rows: list[Row] = []
    kinds: tuple[tuple[Arm, float, str], ...] = (
        ("frozen", GAIN, "with the bank of the training"),
        ("off", GAIN_ALONE, "without the bank"),
    )
    for main, (arm, least, kind) in product(("complementary", IMITATING), kinds):
        name = f"where weights can learn: `{main}` {kind}, minus GRPO"
        rows += _over_grpo(found, name, [(place, main) for place in LEARNABLE], arm, least)
    return rows


def without_bank(found: Study) -> list[Row]:
    """Compare what weights learned: all recipes with GRPO, imitation and ERL with all others."""
    rows: list[Row] = []
    for place in LEARNABLE:
        played = [one for one in found.recipes(place, ENVIRONMENTS[place].recipes) if one != "grpo"]
        pairs = [(one, "grpo") for one in played]
        pairs += [
            (one, other) for one in (IMITATING, "erl-by-task") for other in played if other != one
        ]
        rows += [
            Row("where weights can learn, without a bank", f"{place}: `{one}` minus `{other}`",
                show_points(gap), None)
            for one, other in pairs
            if (gap := difference(found.arm(place, one, "off"), found.arm(place, other, "off")))
        ]  # fmt: skip
    return rows


def _over_grpo(
    found: Study, name: str, pairs: Sequence[tuple[str, str]], arm: Arm, least: float
) -> list[Row]:
    """Compare the recipe of each environment with every GRPO; the mean is over the best of each.

    A bank is asked by the name of a world. Weights can know a world only if they are told the name,
    too, which in some environments only another GRPO is. The aim is met if the mean reaches it and
    each gain is above zero, with `SEEDS` seeds or more.
    """
    rows: list[Row] = []
    parts: list[Interval] = []
    above = 0
    for place, main in pairs:
        mine, gaps = found.arm(place, main, arm), list[tuple[Interval, int]]()
        for rival in found.recipes(place, GRPO):
            theirs = found.arm(place, rival, "off")
            if mine and (gap := recipe_difference(mine, theirs)):
                interval, seeds = gap["interval"], gap["seeds"]
                few = f"; seeds: {seeds}" if seeds < SEEDS else ""
                text = f"{show_points(interval)}{few}"
                rows.append(Row(name, f"{place}: `{main}` minus `{rival}`", text, None))
                gaps.append((interval, seeds))
        if gaps:
            least_gap, seeds = min(gaps, key=lambda gap: gap[0].mean)
            parts.append(least_gap)
            above += least_gap.low > 0 and seeds >= SEEDS
    if parts:
        mean = independent_mean(parts)
        text = f"{show_points(mean)}; {above} of {len(parts)} above zero with {SEEDS} seeds or more"
        met = mean.mean >= least and above == len(pairs)
        rows.append(Row(name, f"mean; aim {100 * least:+.1f}, each above zero", text, met))
    return rows


def over_baselines(found: Study, known: Mapping[str, np.ndarray]) -> list[Row]:
    """Compare the trained pair with each kind of baseline: in two environments above zero.

    Args:
        found: the cells.
        known: later visits of further baselines of plain Vault, as `baselines` returns them.
    """
    kinds = (
        ("minus transcripts or a fixed sentence", FUNCTIONS, ("history", "template")),
        ("minus an untrained extractor, at its best", UNTRAINED, ()),
        ("minus a rule that knows the game", RULES, ("rule",)),
    )
    rows: list[Row] = []
    for name, recipes, words in kinds:
        gaps: list[tuple[str, str, Interval]] = []
        for place in MEMORY:
            if (best := found.best(place, recipes)) is None:
                continue
            for variants in TRAINED:
                for main in found.recipes(place, variants)[:1]:
                    if gap := difference(found.arm(place, main), found.arm(*best)):
                        gaps.append((place, f"`{main}` minus `{best[1]}` ({best[0]})", gap))
        rates = {
            one: rate
            for one, rate in known.items()
            if any(word in one for word in words) and not one.endswith(", off")
        }
        trained = np.array([cell.later() for cell in found.arm("vault", "complementary")])
        if rates and trained.size:
            rival = max(rates, key=lambda one: rates[one].mean())
            gap = unpaired_difference(trained, rates[rival])
            gaps.append(("vault", f"`complementary` minus {rival} (`benchmarks.baselines`)", gap))
        rows += [Row(name, f"{place}: {case}", show_points(gap), None) for place, case, gap in gaps]
        above = {family(place) for place, _, gap in gaps if gap.low > 0}
        case = "environments with a trained pair above zero, aim 2"
        rows.append(Row(name, case, str(len(above)), len(above) >= 2))
    return rows


def accumulation(found: Study) -> list[Row]:
    """Compare success by visit in Vault without a clerk with that of an ideal memory."""
    name, ideal = "success by visit follows the ideal", IDEAL[1:].mean()
    rows = [Row(name, "ideal", ", ".join(f"{100 * one:.0f}" for one in IDEAL), None)]
    pairs = [recipe for variants in TRAINED for recipe in variants]
    for place in BLIND:
        for recipe in found.recipes(place, (*pairs, *WRITERS)):
            text = visits(found.arm(place, recipe))
            rows.append(Row(name, f"{place}: `{recipe}`", text, None))
        if main := found.complementary(place):
            later = rate(found.arm(place, main))
            case = f"{place}: `{main}`, later visits; ideal {100 * ideal:.0f} %"
            rows.append(Row(name, case, show_percent(later), bool(later.high >= ideal)))
    return rows


def speed(found: Study) -> list[Row]:
    """Compare the episodes after which success first was 80 % of that at the end.

    The end is first each recipe's own, then GRPO's for both.
    """
    rows: list[Row] = []
    for whose in ("the", "GRPO's"):
        name = f"episodes to 80 % of {whose} final success"
        for place in ENVIRONMENTS:
            main = found.complementary(place)
            mine, theirs = (_curve(found, place, one) if one else [] for one in (main, "grpo"))
            if not mine or not theirs:
                continue
            last = theirs[-1][1]
            reached = _episodes(mine, last if whose == "GRPO's" else mine[-1][1])
            needed = _episodes(theirs, last) or 0  # its end is above 80 % of it
            shown = "never" if reached is None else f"{reached:,}"
            starts = 0 in (reached, needed)
            text = f"{shown} and {needed:,}" + ("; one starts there" if starts else "")
            met = None if starts else reached is not None and reached <= SPEED * needed
            rows.append(Row(name, f"{place}: `{main}`, GRPO; aim half", text, met))
    return rows


def _curve(found: Study, environment: str, recipe: str) -> list[tuple[int, float]]:
    """Return episodes and mean success of the evaluations of a recipe's training."""
    cells = found.of(environment, recipe)
    if not cells:
        return []
    arm = compared_arm(environment, [one for cell in cells for one in cell.arms])
    curves = [[(p.episodes, p.success) for p in cell.curve.get(arm, ())] for cell in cells]
    return [(x, success) for x, success, *_ in mean_curve(curves)]


def _episodes(curve: Sequence[tuple[int, float]], final: float) -> int | None:
    """Return the episodes after which success first was 80 % of ``final``; None if it never was."""
    return next((x for x, success in curve if success >= 0.8 * final), None)


def reflection(found: Study) -> list[Row]:
    """Compare ERL with GRPO and with its ablation, in dialects."""
    recipes = {
        "erl": ("grpo", "erl-no-reflection"),
        "erl-by-task": ("grpo", "grpo-fast", "erl-no-reflection-full"),
    }
    return [
        Row(f"{place}: `{erl}`", f"minus `{other}`, aim above zero", show_points(gap), gap.low > 0)
        for place in ("lake-words", "lake-words-seen", FEW, "lake-words-smollm2")
        for erl, others in recipes.items()
        for other in others
        if (gap := difference(found.arm(place, erl, "off"), found.arm(place, other, "off")))
    ]


def extractor(lessons: Path = LESSONS, uplift: Path = UPLIFT) -> list[Row]:
    """Compare what an extractor wrote early and late in its training."""
    rows: list[Row] = []
    name, above = "uplift of entries, last fifth of training minus first", set[str]()
    for environment, told in _read(uplift).items():
        gap = Interval(**told["rise"])
        rows.append(Row(name, f"{environment}; runs: {told['runs']}", show_points(gap), None))
        above |= {environment.split(",")[0]} if gap.low > 0 else set()
    rows.append(Row(name, "environments above zero, aim 2", str(len(above)), len(above) >= 2))
    for name, title, over_best in (
        ("lessons about equal plays, trained minus untrained", "trained minus untrained", False),
        ("the same, minus the best untrained", "each minus the best untrained", True),
    ):
        above.clear()
        for environment, told in _read(lessons).items():
            if over_best and " at " in environment:
                continue  # one temperature was played, so that it is the best
            gaps = {
                at.removeprefix("trained "): Interval(**gap)
                for at, gap in told[title].items()
                if at != "best"
            }
            rows += [
                Row(name, f"{environment}, lessons at {at}", show_points(gap), None)
                for at, gap in gaps.items()
            ]
            best = max(gaps.values(), key=lambda gap: gap.mean)
            gap = best if over_best else gaps.get(TRAINED_AT)
            above |= {environment.split(" at ")[0]} if gap and gap.low > 0 else set()
        case = "at its best temperature" if over_best else f"at {TRAINED_AT}, as in training"
        case = f"environments above zero {case}, aim 2"
        rows.append(Row(name, case, str(len(above)), len(above) >= 2))
    return rows


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def ablations(found: Study) -> list[Row]:
    """Count the training seeds of each ablation under a law."""
    place = "vault-law-note"
    played = (name for name in ENVIRONMENTS[place].recipes if name in ABLATIONS)
    counts = {name: len(found.of(place, name)) for name in played}
    few = [f"{name}: {n}" for name, n in counts.items() if n < 5]
    text = f"{len(counts) - len(few)} of {len(counts)}" + "".join(f"; {one}" for one in few)
    return [Row("ablations", f"{place}, with five seeds or more", text, not few)]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = Study(read_cells(options.results))
    rows = [
        *papers_gains(found), *gains_in_weights(found), *without_bank(found),
        *over_baselines(found, baselines()), *accumulation(found), *speed(found),
        *reflection(found), *extractor(), *ablations(found),
    ]  # fmt: skip
    text = markdown_table(["aim", "case", "found", "verdict"], [row.cells() for row in rows])
    (options.results / "aims.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
