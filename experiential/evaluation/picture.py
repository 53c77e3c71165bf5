"""Compute the learning curves of runs, and draw them with the success and differences of arms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiential.errors import MissingExtraError
from experiential.evaluation.card import Card
from experiential.evaluation.intervals import Interval
from experiential.evaluation.visits import later
from experiential.types import Record

Event = Mapping[str, Any]
"""An event of a run's metrics file."""
Curves = Mapping[str, Sequence[Sequence[Event]]]
"""Events of each run of each recipe, by the name of the recipe in the card."""


class Point(Record):
    """Hold success on later visits of one evaluation during training."""

    step: int
    episodes: int
    """Training episodes so far, those that filled a bank beforehand included."""
    success: float


def evaluation_curve(events: Iterable[Event], arm: str) -> list[Point]:
    """Return held-out success on later visits in one arm, by training step.

    A resumed run evaluates and plays some steps twice; the newer event counts.
    """
    evaluated: dict[int, Event] = {}
    played: dict[int, int] = {}
    for event in events:
        step = int(event.get("step", 0))
        if event["event"] == "eval" and event["arm"] == arm:
            evaluated[step] = event
        elif event["event"] in ("step", "prepared") and "episodes" in event:
            played[step] = int(event["episodes"])
    return [
        Point(
            step=step,
            episodes=sum(episodes for at, episodes in played.items() if at <= step),
            success=float(later(event["outcomes"]).mean()),
        )
        for step, event in sorted(evaluated.items())
    ]


def training_curve(events: Iterable[Event], field: str) -> list[tuple[int, float]]:
    """Return (step, value) of a field of the step events, where it is known."""
    steps = {int(event["step"]): event.get(field) for event in events if event["event"] == "step"}
    return [(step, float(value)) for step, value in sorted(steps.items()) if value is not None]


def mean_curve(
    curves: Sequence[Sequence[tuple[int, float]]],
) -> list[tuple[int, float, float, float]]:
    """Return (x, mean, lowest, highest) over the curves, at every x that all of them have."""
    tables = [dict(curve) for curve in curves if curve]
    if not tables:
        return []
    common = sorted(set(tables[0]).intersection(*tables))
    rows = [(x, [table[x] for table in tables]) for x in common]
    return [(x, sum(values) / len(values), min(values), max(values)) for x, values in rows]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average of values (weight 0.7), corrected for its start."""
    smoothed: list[float] = []
    total = norm = 0.0
    for value in values:
        total = 0.7 * total + 0.3 * value
        norm = 0.7 * norm + 0.3
        smoothed.append(total / norm)
    return smoothed


def draw_card(card: Card, curves: Curves, path: Path) -> Path:
    """Draw a card and the learning curves of its runs.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench")
    from matplotlib.figure import Figure

    rows = max(1, sum(len(recipe.differences) for recipe in card.recipes) + len(card.comparisons))
    figure: Any = Figure(figsize=(13, max(8.0, 4.5 + 0.28 * rows)), layout="constrained")
    (training, held_out), (arms, differences) = figure.subplots(2, 2)
    names = [arm for arm in card.arms if any(recipe.arm(arm) for recipe in card.recipes)]
    width = 0.8 / max(1, len(card.recipes))
    lines: list[tuple[str, Interval, str]] = []
    for index, recipe in enumerate(card.recipes):
        colour, runs = f"C{index % 10}", curves.get(recipe.name, ())
        # learning curves, of the training episodes and on held-out worlds
        for field, style in (("success_guided", "-"), ("success_free", ":")):
            if found := mean_curve([training_curve(events, field) for events in runs]):
                steps, means, *_ = zip(*found, strict=True)
                label = f"{recipe.name}, {field.removeprefix('success_')}"
                training.plot(steps, smooth(means), style, color=colour, label=label)
        for arm, style in (("on", "-"), ("off", ":")):
            evaluated = [evaluation_curve(events, arm) for events in runs]
            if found := mean_curve([[(p.step, p.success) for p in run] for run in evaluated]):
                steps, means, lows, highs = zip(*found, strict=True)
                label = f"{recipe.name}, {arm}"
                held_out.plot(steps, means, style, marker=".", color=colour, label=label)
                held_out.fill_between(steps, lows, highs, color=colour, alpha=0.12)
        # success in each arm
        shift = (index - (len(card.recipes) - 1) / 2) * width
        reports = [(place, recipe.arm(name)) for place, name in enumerate(names)]
        bars = [(place + shift, report.later) for place, report in reports if report is not None]
        places, means = [place for place, _ in bars], [interval.mean for _, interval in bars]
        ends = distances([interval for _, interval in bars])
        arms.bar(places, means, 0.9 * width, color=colour, alpha=0.6, label=recipe.name)
        arms.errorbar(places, means, yerr=ends, fmt="none", ecolor="black", capsize=2, lw=1)
        for one in recipe.differences:
            lines.append((f"{recipe.name}: {one.first} – {one.second}", one.interval, colour))
    lines += [(one.sides("–"), one.interval, "black") for one in card.comparisons]
    for place, (_, interval, colour) in enumerate(lines):
        ends = distances([interval])
        differences.errorbar([interval.mean], [place], xerr=ends, fmt="o", color=colour, capsize=3)
    finish(training, "Training episodes: success, smoothed", "training step")
    finish(held_out, "Held-out, later visits: mean and range over seeds", "training step")
    arms.set_xticks(range(len(names)), names)
    finish(arms, "After training: later visits by arm, 95 % intervals", "")
    differences.axvline(0.0, color="grey", lw=1)
    differences.set_yticks(range(len(lines)), [label for label, *_ in lines], fontsize=8)
    differences.invert_yaxis()
    title = "Paired differences on later visits, 95 % intervals"
    differences.set(title=title, xlabel="difference of success")
    figure.savefig(str(path), dpi=110)
    return path


def distances(intervals: Sequence[Interval]) -> list[list[float]]:
    """Return the distances from means to ends, 0 where an interval lies beside its mean."""
    return [
        [max(0.0, i.mean - i.low) for i in intervals],
        [max(0.0, i.high - i.mean) for i in intervals],
    ]


def finish(axes: Any, title: str, xlabel: str) -> None:
    """Name the axes of a plot of success, and show its legend."""
    axes.set(title=title, xlabel=xlabel, ylabel="success", ylim=(0, 1))
    if xlabel:
        axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
