"""Draw a comparison: learning curves, success in each arm, and the paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiential.errors import MissingExtraError
from experiential.evaluation.card import Card
from experiential.evaluation.curves import (
    Event,
    evaluation_curve,
    mean_curve,
    smooth,
    training_curve,
)
from experiential.evaluation.intervals import Interval

Curves = Mapping[str, Sequence[Sequence[Event]]]
"""Events of each run of each recipe, by the name of the recipe in the card."""


def draw_card(card: Card, curves: Curves, path: Path) -> Path:
    """Draw a card and the learning curves of its runs.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench")
    from matplotlib.figure import Figure

    rows = max(1, sum(len(recipe.differences) for recipe in card.recipes) + len(card.comparisons))
    figure = Figure(figsize=(13, max(8.0, 4.5 + 0.28 * rows)), layout="constrained")
    (training, held_out), (arms, differences) = figure.subplots(2, 2)
    _draw_training(training, card, curves)
    _draw_evaluations(held_out, card, curves)
    _draw_arms(arms, card)
    _draw_differences(differences, card)
    figure.savefig(str(path), dpi=110)  # pyright: ignore[reportUnknownMemberType]  (untyped keyword arguments in matplotlib)
    return path


def _draw_training(axes: Any, card: Card, curves: Curves) -> None:
    for index, recipe in enumerate(card.recipes):
        for field, style in (("success_guided", "-"), ("success_free", ":")):
            found = mean_curve(
                [training_curve(events, field) for events in curves.get(recipe.name, ())]
            )
            if found:
                label = f"{recipe.name}, {field.removeprefix('success_')}"
                axes.plot(
                    [x for x, *_ in found],
                    smooth([mean for _, mean, *_ in found]),
                    style,
                    color=f"C{index % 10}",
                    label=label,
                )
    _finish(axes, "Training episodes: success, smoothed", "training step")


def _draw_evaluations(axes: Any, card: Card, curves: Curves) -> None:
    for index, recipe in enumerate(card.recipes):
        for arm, style in (("on", "-"), ("off", ":")):
            points = [
                [(p.step, p.success) for p in evaluation_curve(events, arm)]
                for events in curves.get(recipe.name, ())
            ]
            found = mean_curve(points)
            if found:
                xs, means, lows, highs = (list(column) for column in zip(*found, strict=True))
                axes.plot(
                    xs,
                    means,
                    style,
                    marker=".",
                    color=f"C{index % 10}",
                    label=f"{recipe.name}, {arm}",
                )
                axes.fill_between(xs, lows, highs, color=f"C{index % 10}", alpha=0.12)
    _finish(axes, "Held-out, later visits: mean and range over seeds", "training step")


def _draw_arms(axes: Any, card: Card) -> None:
    names = [arm for arm in card.arms if any(recipe.arm(arm) for recipe in card.recipes)]
    width = 0.8 / max(1, len(card.recipes))
    for index, recipe in enumerate(card.recipes):
        found = [
            (place, report.later)
            for place, name in enumerate(names)
            if (report := recipe.arm(name)) is not None
        ]
        places = [place + (index - (len(card.recipes) - 1) / 2) * width for place, _ in found]
        means = [interval.mean for _, interval in found]
        axes.bar(places, means, 0.9 * width, color=f"C{index % 10}", alpha=0.6, label=recipe.name)
        axes.errorbar(
            places,
            means,
            yerr=_errors([interval for _, interval in found]),
            fmt="none",
            ecolor="black",
            capsize=2,
            lw=1,
        )
    axes.set_xticks(range(len(names)), names)
    _finish(axes, "After training: later visits by arm, 95 % intervals", "")


def _draw_differences(axes: Any, card: Card) -> None:
    lines = [
        (f"{recipe.name}: {one.first} – {one.second}", one.interval, f"C{index % 10}")
        for index, recipe in enumerate(card.recipes)
        for one in recipe.differences
    ]
    lines += [
        (f"{c.first} ({c.first_arm}) – {c.second} ({c.second_arm})", c.interval, "black")
        for c in card.comparisons
    ]
    for place, (_, interval, colour) in enumerate(lines):
        axes.errorbar(
            [interval.mean], [place], xerr=_errors([interval]), fmt="o", color=colour, capsize=3
        )
    axes.axvline(0.0, color="grey", lw=1)
    axes.set_yticks(range(len(lines)), [label for label, *_ in lines], fontsize=8)
    axes.invert_yaxis()
    axes.set(
        title="Paired differences on later visits, 95 % intervals", xlabel="difference of success"
    )


def _errors(intervals: Sequence[Interval]) -> list[list[float]]:
    """Return the distances from means to ends, 0 where an interval lies beside its mean."""
    return [
        [max(0.0, i.mean - i.low) for i in intervals],
        [max(0.0, i.high - i.mean) for i in intervals],
    ]


def _finish(axes: Any, title: str, xlabel: str) -> None:
    axes.set(title=title, xlabel=xlabel, ylabel="success", ylim=(0, 1))
    if xlabel:
        axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
