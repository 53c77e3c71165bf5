"""Learning curves of runs, from the events in their metrics files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiential.evaluation.visits import later
from experiential.types import Record

Event = Mapping[str, Any]


class Point(Record):
    """One evaluation while a run trained: training step, training episodes so far, and success on later visits."""

    step: int
    episodes: int
    success: float


def evaluation_curve(events: Iterable[Event], arm: str) -> list[Point]:
    """Held-out success on later visits in one arm, by training step; of several evaluations of a step the newest counts."""
    events = list(events)
    played = _episodes(events)
    newest = {
        int(event["step"]): event
        for event in events
        if event["event"] == "eval" and event["arm"] == arm
    }
    return [
        Point(
            step=step, episodes=played(step), success=float(later(newest[step]["outcomes"]).mean())
        )
        for step in sorted(newest)
    ]


def training_curve(events: Iterable[Event], field: str) -> list[tuple[int, float]]:
    """(step, value) of a field of the step events, where it is known."""
    steps = {int(event["step"]): event.get(field) for event in events if event["event"] == "step"}
    return [(step, float(value)) for step, value in sorted(steps.items()) if value is not None]


def mean_curve(
    curves: Sequence[Sequence[tuple[int, float]]],
) -> list[tuple[int, float, float, float]]:
    """(x, mean, lowest, highest) over the curves, at every x that all of them have."""
    tables = [dict(curve) for curve in curves if curve]
    if not tables:
        return []
    common = sorted(set(tables[0]).intersection(*tables))
    rows = [(x, np.array([table[x] for table in tables])) for x in common]
    return [
        (x, float(values.mean()), float(values.min()), float(values.max())) for x, values in rows
    ]


def smooth(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average, corrected for its start; as long as `values`."""
    smoothed: list[float] = []
    total = norm = 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed


def _episodes(events: Sequence[Event]) -> Callable[[int], int]:
    """How many training episodes were played up to and including a step, those that filled a bank beforehand included."""
    played_in = (
        event for event in events if event["event"] in ("step", "prepared") and "episodes" in event
    )
    counts = {int(event["step"]): int(event["episodes"]) for event in played_in}

    def played(step: int) -> int:
        return sum(n for at, n in counts.items() if at <= step)

    return played
