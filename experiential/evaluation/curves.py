"""Compute the learning curves of runs from the events in their metrics files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiential.evaluation.visits import later
from experiential.types import Record

Event = Mapping[str, Any]


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


def smooth(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """Return the exponential moving average of values, corrected for its start."""
    smoothed: list[float] = []
    total = norm = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed
