"""Compute what the pages show of a run: its figures, charts and evaluations."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from experiential.bank.records import EpisodeSummary
from experiential.evaluation.intervals import Interval, wilson
from experiential.evaluation.picture import evaluation_curve
from experiential.types import Condition

Event = Mapping[str, Any]
BUCKETS = 40
"""Most intervals that a curve of success has."""
WIDTH, HEIGHT = 600, 200
"""Of the drawing area of a chart, in units of its SVG."""


def evaluations(events: Iterable[Event]) -> list[Event]:
    """Return the evaluation events; of several at one step and arm (a resumed run) the newest."""
    newest = {(event["step"], event["arm"]): event for event in events if event["event"] == "eval"}
    return [newest[key] for key in sorted(newest)]


def rate(event: Event, visits: slice) -> Interval:
    """Return success over a range of visits, with the 95 % Wilson interval."""
    chosen = event["visits"][visits]
    return wilson(sum(one["successes"] for one in chosen), sum(one["episodes"] for one in chosen))


@dataclass
class Series:
    """Hold a line of a chart: points (x, y) and, where known, the interval of each."""

    name: str
    points: list[tuple[float, float]]
    intervals: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


@dataclass
class Line:
    """Hold a line as SVG has it: ``points`` of a polyline, and of the polygon of its intervals."""

    name: str
    last: str
    points: str
    band: str


@dataclass
class Chart:
    """Hold a drawn chart."""

    title: str
    lines: list[Line]
    lowest: str
    highest: str
    first: str
    final: str


def drawn(
    title: str,
    series: Sequence[Series],
    shown: Callable[[float], str] = "{:.3g}".format,
    bounds: tuple[float, float] | None = None,
) -> Chart | None:
    """Draw series into one chart; None where no point is known."""
    series = [one for one in series if one.points]
    if not series:
        return None
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    low, high = bounds or (min(ys), max(ys))
    left, right = min(xs), max(xs)

    def place(x: float, y: float) -> str:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return f"{across * WIDTH:.1f},{(1 - up) * HEIGHT:.1f}"

    lines: list[Line] = []
    for one in series:
        points = [place(*point) for point in one.points]
        if len(points) == 1:  # a line of one point would not be seen
            points *= 2
        steps = [x for x, _ in one.points]
        upper = [place(x, up) for x, (_, up) in zip(steps, one.intervals, strict=False)]
        lower = [place(x, down) for x, (down, _) in zip(steps, one.intervals, strict=False)]
        band = " ".join([*upper, *reversed(lower)])
        lines.append(Line(one.name, shown(one.points[-1][1]), " ".join(points), band))
    return Chart(title, lines, shown(low), shown(high), f"{left:g}", f"{right:g}")


def success(episodes: Iterable[EpisodeSummary], condition: Condition) -> Series:
    """Return success in one condition by step, with 95 % Wilson intervals; first attempts only.

    Neighbouring steps are taken together where there are more than `BUCKETS`.
    """
    counted: dict[int, list[int]] = {}
    for one in episodes:
        if one.condition is condition and one.attempt == 1 and one.success is not None:
            of = counted.setdefault(one.step or 0, [0, 0])
            of[0] += one.success
            of[1] += 1
    steps = sorted(counted)
    width = -(-len(steps) // BUCKETS) or 1
    line = Series(condition.value, [])
    for start in range(0, len(steps), width):
        some = steps[start : start + width]
        found = wilson(sum(counted[s][0] for s in some), sum(counted[s][1] for s in some))
        line.points.append((some[-1], found.mean))
        line.intervals.append((found.low, found.high))
    return line


@dataclass
class RunView:
    """Hold what the page of a run shows.

    Attributes:
        about: recipe, seed, and how far it is, in words.
        is_live: whether no event says that the run ended.
        figures: names and values, newest.
        warnings: of the run, newest last.
        failures: reasons of failed episodes and how often, over all steps.
    """

    about: str
    is_live: bool
    figures: list[tuple[str, str]]
    charts: list[Chart]
    warnings: list[str]
    failures: list[tuple[str, int]]


def view_run(events: Sequence[Event], episodes: Sequence[EpisodeSummary]) -> RunView:
    """Sum up a run so far."""
    starts = [event for event in events if event["event"] == "start"]
    steps = list({e["step"]: e for e in events if e["event"] == "step"}.values())
    last: Event = steps[-1] if steps else {}
    lines = [success(episodes, condition) for condition in Condition]
    figures = [("step", f"{last.get('step', 0)} of {starts[-1]['steps'] if starts else '?'}")]
    for line in lines:
        if line.points:
            (_, mean), (low, high) = line.points[-1], line.intervals[-1]
            figures.append((f"success, {line.name}", f"{mean:.0%} [{low:.0%}, {high:.0%}]"))
    shapes = {
        "entries": "{:,.0f}",
        "actor_loss": "{:+.4f}",
        "extractor_loss": "{:+.4f}",
        "staleness": "{:.1f}",
        "tokens_per_s": "{:,.0f}",
        "step_s": "{:.1f}",
        "memory_gb": "{:.1f}",
    }
    for name, shape in shapes.items():
        if isinstance(value := last.get(name), int | float):
            figures.append((name.replace("_", " "), shape.format(value)))
    processed = sum((e.get("tokens_per_s") or 0) * (e.get("step_s") or 0) for e in steps)
    figures.append(("tokens processed", f"{processed:,.0f}"))
    for role in ("actor", "extractor"):
        asked = sum((e.get(f"{role}_prompt_tokens") or 0) for e in steps)
        wrote = sum((e.get(f"{role}_completion_tokens") or 0) for e in steps)
        if asked or wrote:
            figures.append((f"{role} tokens of its service", f"{asked:,} read, {wrote:,} written"))
        costs = [e[f"{role}_cost"] for e in steps if e.get(f"{role}_cost") is not None]
        if costs:
            figures.append((f"{role} cost", f"${sum(costs):.4f}"))
    figures.append(("failed episodes", f"{sum(e.get('errors') or 0 for e in steps):,}"))

    def curve(name: str) -> Series:
        known = [(e["step"], e[name]) for e in steps if isinstance(e.get(name), int | float)]
        return Series(name.replace("_", " "), known)

    charts = [
        drawn("Success while training", lines, "{:.0%}".format, (0.0, 1.0)),
        drawn("Loss", [curve("actor_loss"), curve("extractor_loss")]),
        drawn("Staleness of the extractor's samples", [curve("staleness")]),
        drawn("Entries", [curve("entries")], "{:,.0f}".format),
        drawn("Tokens per second", [curve("tokens_per_s")], "{:,.0f}".format),
        drawn("Cost of a step, $", [curve("actor_cost"), curve("extractor_cost")]),
    ]
    failures: dict[str, int] = {}
    for event in steps:
        counted: dict[str, int] = event.get("failures") or {}
        for reason, count in counted.items():
            failures[reason] = failures.get(reason, 0) + count
    ended = bool(events) and events[-1]["event"] == "end"
    about = f"recipe {starts[-1].get('recipe')}, seed {starts[-1].get('seed')}" if starts else ""
    return RunView(
        about=about,
        is_live=not ended,
        figures=figures,
        charts=[chart for chart in charts if chart is not None],
        warnings=[event["text"] for event in events if event["event"] == "warning"],
        failures=sorted(failures.items(), key=lambda one: -one[1]),
    )


@dataclass
class Evaluated:
    """Hold one evaluation of one arm: success by visit, and on later visits where there are any."""

    step: int
    arm: str
    visits: list[Interval]
    later: Interval | None
    errors: int


def view_evaluations(events: Iterable[Event]) -> list[Evaluated]:
    """Return the evaluations of a run, by step and arm."""
    return [
        Evaluated(
            step=event["step"],
            arm=event["arm"],
            visits=[rate(event, slice(i, i + 1)) for i in range(len(event["visits"]))],
            later=rate(event, slice(1, None)) if len(event["visits"]) > 1 else None,
            errors=event.get("errors", 0),
        )
        for event in evaluations(events)
    ]


def evaluation_chart(events: Sequence[Event]) -> Chart | None:
    """Draw held-out success on later visits by training step, a line for each arm."""
    arms = list(dict.fromkeys(str(event["arm"]) for event in evaluations(events)))

    def has_later(event: Event) -> bool:
        worlds: list[list[int]] = event.get("outcomes") or [[]]
        return len(worlds[0]) > 1

    several = [event for event in events if event["event"] != "eval" or has_later(event)]
    series = [
        Series(arm, [(p.step, p.success) for p in evaluation_curve(several, arm)]) for arm in arms
    ]
    title = "Held-out success on later visits"
    return drawn(title, series, "{:.0%}".format, (0.0, 1.0))


Change = tuple[Literal["same", "ins", "del"], str]


def word_changes(old: str, new: str) -> list[Change]:
    """Return a text as runs of words that stayed, came and went.

    >>> word_changes("pull the red lever", "pull the blue lever")
    [('same', 'pull the '), ('del', 'red'), ('ins', 'blue'), ('same', ' lever')]
    """
    a, b = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (old, new))
    found: list[Change] = []
    for kind, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, False).get_opcodes():
        if kind == "equal":
            found.append(("same", "".join(a[a0:a1])))
            continue
        if a1 > a0:
            found.append(("del", "".join(a[a0:a1])))
        if b1 > b0:
            found.append(("ins", "".join(b[b0:b1])))
    return found
