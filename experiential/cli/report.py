"""Report a run: a table of evaluations, a learning curve, and the paths of all files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from experiential.cli.rows import show_line, show_table
from experiential.errors import ConfigError
from experiential.evaluation.intervals import paired_difference
from experiential.evaluation.page import show_percent
from experiential.evaluation.picture import distances, finish, smooth, training_curve
from experiential.llm.metered import Spent
from experiential.training.metrics import read_events
from experiential.ui.views import evaluations, rate

Event = Mapping[str, Any]
METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "learning-curve.png"
REWARDS = {
    "direct": "the success of the episodes that used them: +1, else -1; scores do not count",
    "relative": "success above that of their group's free episodes; scores do not count",
}
"""What ``extractor.reward`` means, in words."""
ARMS = {"on": "with the bank", "off": "without"}


def before_and_after(events: Iterable[Event]) -> list[tuple[str, Event]]:
    """Return titles and events of the first and last evaluation of each arm."""
    found = evaluations(events)
    chosen: list[tuple[str, Event]] = []
    for arm, title in ARMS.items():
        mine = [event for event in found if event["arm"] == arm]
        chosen += [(f"{title}\nstep {e['step']}", e) for e in (*mine[:1], *mine[1:][-1:])]
    return chosen


def summary_table(events: Iterable[Event]) -> Table:
    """Lay out success by visit, with the bank and without, before and after training."""
    columns = before_and_after(events)
    table = Table(title="Held-out success, 95 % intervals", title_justify="left")
    table.add_column("visit")
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for index in range(max((len(event["visits"]) for _, event in columns), default=0)):
        visit = slice(index, index + 1)
        table.add_row(str(index + 1), *(show_percent(rate(event, visit)) for _, event in columns))
    table.add_section()
    later = (show_percent(rate(event, slice(1, None))) for _, event in columns)
    table.add_row("later (2+)", *later, style="bold")
    played = (sum(visit["episodes"] for visit in event["visits"]) for _, event in columns)
    table.add_row("episodes", *map(str, played))
    return table


def headline(events: Iterable[Event]) -> list[str]:
    """Sum the run up in at most two sentences."""
    found = evaluations(events)
    bank = [event for event in found if event["arm"] == "on"]
    lines: list[str] = []
    if len(bank) > 1:
        first, last = (rate(event, slice(1, None)).mean for event in (bank[0], bank[-1]))
        times = f", {last / first:.1f} times" if first else ""
        lines.append(
            f"Later visits with the bank: {first:.0%} before training, {last:.0%} after{times}."
        )
    # The last step that evaluated both arms, by world.
    arms: dict[int, dict[str, np.ndarray]] = {}
    for event in found:
        outcomes = np.array(event.get("outcomes", []), dtype=np.float64)
        if outcomes.ndim == 2 and outcomes.shape[1] > 1:
            arms.setdefault(event["step"], {})[event["arm"]] = outcomes[:, 1:].mean(axis=1)
    both = [step for step, tables in arms.items() if tables.keys() >= ARMS.keys()]
    if both:
        newest = arms[max(both)]
        gain = paired_difference(newest["on"], newest["off"])
        mean, low, high = (f"{100 * value:+.0f}" for value in (gain.mean, gain.low, gain.high))
        lines.append(
            f"Later visits, with the bank minus without: {mean} points, 95 % interval [{low},"
            f" {high}], paired by world."
        )
    return lines


def spending(events: Iterable[Event]) -> list[str]:
    """Say what actor and extractor of a run took, in its steps and evaluations.

    Critic and reflector are parts of the actor, and counted in steps only. Empty where no service
    reports tokens, as in a run with local models.
    """
    total = {role: Spent() for role in ("actor", "critic", "reflector", "extractor")}
    steps = {event["step"]: event for event in events if event["event"] == "step"}
    for role in total:
        for event in steps.values():
            total[role] += Spent(
                prompt_tokens=event.get(f"{role}_prompt_tokens", 0),
                generated_tokens=event.get(f"{role}_completion_tokens", 0),
                unreported=event.get(f"{role}_unreported", 0),
                cost=event.get(f"{role}_cost"),
            )
        for event in evaluations(events):
            cost: dict[str, Any] = event.get("cost") or {}
            total[role] += Spent.model_validate(cost.get(role) or {})
    hosted = any(event.get("actor_prompt_tokens") is not None for event in steps.values())
    hosted = hosted or any(one.cost is not None for one in total.values())
    words = {role: f"{role} {one.describe()}" for role, one in total.items()}
    parts = [words[role] for role in ("critic", "reflector") if total[role].tokens]
    if parts:
        words["actor"] += f" (of which {', '.join(parts)})"
    said = f"Spent in steps and evaluations: {words['actor']}; {words['extractor']}."
    return [said] if hosted else []


def show_report(console: Console, folder: Path, summary: Mapping[str, Any] | None = None) -> None:
    """Print the table, the headline and the paths of a finished run; draw the learning curve.

    ``summary`` is what `Trainer.run` returned; its `files` are listed too.
    """
    if not (folder / METRICS_FILE).is_file():
        raise ConfigError(f"Expected the folder of a run with {METRICS_FILE}, got {folder}")
    events = read_events(folder / METRICS_FILE)
    if evaluations(events):
        show_table(console, summary_table(events))
    lines = [*headline(events), *spending(events)]
    if (folder / "config.yaml").is_file():
        extractor = yaml.safe_load((folder / "config.yaml").read_text("utf-8")).get("extractor", {})
        if extractor.get("train") and extractor.get("reward") in REWARDS:
            lines.append(f"Entries were rewarded by {REWARDS[extractor['reward']]}.")
    for line in lines:
        console.print(line, markup=False, highlight=False)
    files = dict[str, object]((summary or {}).get("files") or {})
    for name in ("config.yaml", METRICS_FILE, "tensorboard"):
        if (folder / name).exists():
            files.setdefault(name.partition(".")[0], folder / name)
    if curve := draw_learning_curve(events, folder / CURVE_FILE):
        files["learning curve"] = curve
    for name, path in files.items():
        show_line(console, f"{name:>15}  {path}")


def draw_learning_curve(events: Iterable[Event], path: Path) -> Path | None:
    """Draw success while training and by visit; None without matplotlib, or nothing to draw."""
    events = list(events)
    drawn = any(event["event"] in ("step", "eval") for event in events)
    if find_spec("matplotlib") is None or not drawn:
        return None
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(11, 4), layout="constrained")
    training, held_out = figure.subplots(1, 2)
    for field, colour in (("success_guided", "tab:blue"), ("success_free", "tab:orange")):
        if points := training_curve(events, field):
            steps, values = zip(*points, strict=True)
            label = field.removeprefix("success_")
            training.plot(steps, values, color=colour, alpha=0.25)
            training.plot(steps, smooth(values), color=colour, label=label)
    columns = before_and_after(events)
    last = max((event["step"] for _, event in columns), default=0)
    for shift, (title, event) in enumerate(columns):
        intervals = [rate(event, slice(index, index + 1)) for index in range(len(event["visits"]))]
        held_out.errorbar(
            [visit["visit"] + 0.04 * (shift - 1.5) for visit in event["visits"]],
            [interval.mean for interval in intervals],
            yerr=distances(intervals),
            color="tab:blue" if event["arm"] == "on" else "tab:orange",
            linestyle="-" if event["step"] == last else "--",
            marker="o",
            capsize=3,
            label=title.replace("\n", ", "),
        )
    finish(training, "Training", "step")
    finish(held_out, "Held-out worlds, 95 % intervals", "visit")
    figure.savefig(str(path), dpi=120)
    return path
