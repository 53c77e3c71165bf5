"""Report a run: a table of evaluations, a learning curve, and the paths of all files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from experiential.errors import ConfigError
from experiential.evaluation.curves import smooth
from experiential.evaluation.intervals import Interval, paired_difference, wilson
from experiential.evaluation.page import show_percent
from experiential.training import metrics

Event = Mapping[str, Any]
METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "learning-curve.png"
ARMS = {"on": "with the bank", "off": "without"}


def read_events(folder: Path) -> list[Event]:
    """Read the events of the run in ``folder``, in order.

    Raises:
        ConfigError: the folder holds no run, or its metrics are damaged.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise ConfigError(f"Expected the folder of a run with {METRICS_FILE}, got {folder}")
    return [*metrics.read_events(path)]


def evaluations(events: Iterable[Event]) -> list[Event]:
    """Return the evaluation events; of several at one step and arm (a resumed run) the newest."""
    newest = {(event["step"], event["arm"]): event for event in events if event["event"] == "eval"}
    return [newest[key] for key in sorted(newest)]


def rate(event: Event, visits: slice) -> Interval:
    """Return success over a range of visits, with the 95 % Wilson interval."""
    chosen = event["visits"][visits]
    return wilson(
        sum(visit["successes"] for visit in chosen), sum(visit["episodes"] for visit in chosen)
    )


def before_and_after(events: Iterable[Event]) -> list[tuple[str, Event]]:
    """Return titles and events of the first and last evaluation of each arm."""
    chosen: list[tuple[str, Event]] = []
    found = evaluations(events)
    for arm, title in ARMS.items():
        mine = [event for event in found if event["arm"] == arm]
        if mine:
            chosen.append((f"{title}\nstep {mine[0]['step']}", mine[0]))
        if len(mine) > 1:
            chosen.append((f"{title}\nstep {mine[-1]['step']}", mine[-1]))
    return chosen


def summary_table(events: Iterable[Event]) -> Table:
    """Lay out success by visit, with the bank and without, before and after training."""
    columns = before_and_after(events)
    table = Table(title="Held-out success, 95 % intervals", title_justify="left")
    table.add_column("visit")
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    visits = max((len(event["visits"]) for _, event in columns), default=0)
    for index in range(visits):
        table.add_row(
            str(index + 1),
            *(show_percent(rate(event, slice(index, index + 1))) for _, event in columns),
        )
    table.add_section()
    table.add_row(
        "later (2+)",
        *(show_percent(rate(event, slice(1, None))) for _, event in columns),
        style="bold",
    )
    table.add_row(
        "episodes",
        *(str(sum(visit["episodes"] for visit in event["visits"])) for _, event in columns),
    )
    return table


def headline(events: Iterable[Event]) -> list[str]:
    """Sum the run up in at most two sentences."""
    found = evaluations(events)
    bank = [event for event in found if event["arm"] == "on"]
    lines: list[str] = []
    if len(bank) > 1:
        first, last = rate(bank[0], slice(1, None)).mean, rate(bank[-1], slice(1, None)).mean
        times = f", {last / first:.1f} times" if first else ""
        lines.append(
            f"Later visits with the bank: {first:.0%} before training, {last:.0%} after{times}."
        )
    difference = on_minus_off(found)
    if difference is not None:
        mean, low, high = (
            f"{100 * value:+.0f}" for value in (difference.mean, difference.low, difference.high)
        )
        lines.append(
            f"Later visits, with the bank minus without: {mean} points, 95 % interval [{low},"
            f" {high}], paired by world."
        )
    return lines


def on_minus_off(found: list[Event]) -> Interval | None:
    """Return the paired difference on later visits at the last step that evaluated both arms.

    None means that no step did.
    """
    arms: dict[int, dict[str, np.ndarray]] = {}
    for event in found:
        outcomes = np.array(event.get("outcomes", []), dtype=np.float64)
        if outcomes.ndim == 2 and outcomes.shape[1] > 1:
            arms.setdefault(event["step"], {})[event["arm"]] = outcomes[:, 1:].mean(axis=1)
    both = [step for step, tables in arms.items() if tables.keys() >= ARMS.keys()]
    if not both:
        return None
    last = arms[max(both)]
    return paired_difference(last["on"], last["off"])


def show_report(console: Console, folder: Path, summary: Mapping[str, Any] | None = None) -> None:
    """Print the table, the headline and the paths of a finished run; draw the learning curve.

    Args:
        console: where to print.
        folder: the run's output folder.
        summary: what `Trainer.run` returned; its `files` are listed too.
    """
    events = read_events(folder)
    if evaluations(events):
        console.print(summary_table(events))
    for line in headline(events):
        console.print(line, markup=False, highlight=False)
    curve = draw_learning_curve(events, folder / CURVE_FILE)
    for name, path in written_files(folder, summary or {}, curve):
        console.print(f"{name:>15}  {path}", markup=False, highlight=False, soft_wrap=True)


def written_files(
    folder: Path, summary: Mapping[str, Any], curve: Path | None
) -> list[tuple[str, str]]:
    """Return names and paths of everything that the run wrote."""
    files: dict[str, str] = {
        str(name): str(path)
        for name, path in cast("Mapping[str, str]", summary.get("files") or {}).items()
    }
    for name in ("config.yaml", METRICS_FILE, "tensorboard"):
        if (folder / name).exists():
            files.setdefault(name.partition(".")[0], str(folder / name))
    if curve is not None:
        files["learning curve"] = str(curve)
    return list(files.items())


def draw_learning_curve(events: Iterable[Event], path: Path) -> Path | None:
    """Draw success while training and held-out success by visit.

    Returns:
        The file; None without matplotlib, or with nothing to draw.
    """
    events = list(events)
    if find_spec("matplotlib") is None or not any(
        event["event"] in ("step", "eval") for event in events
    ):
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    training, visits = figure.subplots(1, 2)
    _draw_training(training, [event for event in events if event["event"] == "step"])
    _draw_visits(visits, before_and_after(events))
    figure.savefig(str(path), dpi=120)  # pyright: ignore[reportUnknownMemberType]  (untyped keyword arguments in matplotlib)
    return path


def _draw_training(axes: Any, steps: list[Event]) -> None:
    for name, colour in (("success_guided", "tab:blue"), ("success_free", "tab:orange")):
        points = [(event["step"], event[name]) for event in steps if event.get(name) is not None]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, color=colour, alpha=0.25)
            axes.plot(xs, smooth(list(ys)), color=colour, label=name.removeprefix("success_"))
    axes.set(title="Training", xlabel="step", ylabel="success", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if steps:
        axes.legend(frameon=False)


def _draw_visits(axes: Any, columns: list[tuple[str, Event]]) -> None:
    last = max((event["step"] for _, event in columns), default=0)
    for shift, (title, event) in enumerate(columns):
        intervals = [rate(event, slice(index, index + 1)) for index in range(len(event["visits"]))]
        means = [interval.mean for interval in intervals]
        errors = [[i.mean - i.low for i in intervals], [i.high - i.mean for i in intervals]]
        colour = "tab:blue" if event["arm"] == "on" else "tab:orange"
        style = "-" if event["step"] == last else "--"
        visits = [visit["visit"] + 0.04 * (shift - 1.5) for visit in event["visits"]]
        axes.errorbar(
            visits,
            means,
            yerr=errors,
            color=colour,
            linestyle=style,
            marker="o",
            capsize=3,
            label=title.replace("\n", ", "),
        )
    axes.set(title="Held-out worlds, 95 % intervals", xlabel="visit", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if columns:
        axes.legend(frameon=False)
