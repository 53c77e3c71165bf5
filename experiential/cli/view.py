"""Show a training run: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from experiential.cli.rows import show_line
from experiential.training.metrics import peak_memory_gb

Event = dict[str, Any]

FIELDS = (
    ("success_guided", "guided", "{:.0%}"),
    ("success_free", "free", "{:.0%}"),
    ("reward", "reward", "{:.2f}"),
    ("entries", "entries", "{:,.0f}"),
    ("actor_loss", "actor loss", "{:+.3f}"),
    ("extractor_loss", "extractor loss", "{:+.3f}"),
    ("extractor_updates", "extractor updates", "{:,.0f}"),
    ("malformed", "malformed", "{:,.0f}"),
    ("staleness", "staleness", "{:.1f}"),
    ("errors", "errors", "{:,.0f}"),
    ("actor_cost", "actor $", "{:.4f}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ("rollout_s", "rollout s", "{:.1f}"),
    ("update_s", "update s", "{:.1f}"),
)
"""Fields of a step event in the order shown: name, label, format."""
WHEN_ANY = ("errors", "actor_loss", "extractor_loss", "staleness", "malformed", "update_s")
"""Fields that are shown only when they are not 0, as where nothing is trained."""
ARMS = {"on": "with the bank", "off": "without the bank", "frozen": "with the bank frozen"}
"""What the arms of an evaluation are called."""


def make_view(console: Console, *, plain: bool) -> PlainView | LiveView:
    """Return a live view on a terminal, plain lines elsewhere or on request; it is a `Tracker`."""
    return PlainView(console) if plain or not console.is_terminal else LiveView(console)


def shown_fields(event: Event) -> list[tuple[str, str]]:
    """Return labels and formatted values of a step event; absent values are left out."""
    shown: list[tuple[str, str]] = []
    for name, label, form in FIELDS:
        value = event.get(name)
        if isinstance(value, int | float) and (value or name not in WHEN_ANY):
            shown.append((label, form.format(value)))
    return [*shown, ("memory", f"{event.get('memory_gb') or peak_memory_gb():.1f} GB")]


def describe_evaluation(event: Event) -> str:
    """Format an evaluation event as one line."""
    visits = (visit for visit in event["visits"] if visit["episodes"])
    rates = " ".join(f"{visit['successes'] / visit['episodes']:.0%}" for visit in visits)
    arm = ARMS.get(event["arm"], f"in the arm {event['arm']}")
    errors = f"; {event['errors']} episodes failed" if event.get("errors") else ""
    return f"evaluation at step {event['step']} {arm}, success by visit: {rates}{errors}"


class PlainView:
    """Print one line per event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0

    def handle(self, event: Event) -> None:
        """Print one event of the trainer."""
        match event["event"]:
            case "start":
                self._steps = event["steps"]
                line = f"training for {self._steps} steps"
            case "step":
                fields = "  ".join(f"{label} {value}" for label, value in shown_fields(event))
                line = f"step {event['step']}/{self._steps}  {fields}"
            case "eval":
                line = describe_evaluation(event)
            case "checkpoint":
                line = f"checkpoint {event['path']}"
            case "warning":
                line = f"warning: {event['text']}"
            case _:
                return
        show_line(self._console, line)

    def close(self) -> None:
        """Close nothing: every line has been printed."""


class LiveView:
    """Draw a progress bar with time left, and the newest numbers below it, until closed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("loading models", total=None)
        self._latest: Event = {}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def close(self) -> None:
        """Stop drawing; what was drawn last stays."""
        self._live.stop()

    def handle(self, event: Event) -> None:
        """Redraw for one event of the trainer; evaluations and warnings stay above as lines."""
        match event["event"]:
            case "start":
                done = event.get("step", 0)
                self._progress.update(
                    self._task, description="training", total=event["steps"], completed=done
                )
            case "step":
                self._latest = event
                self._progress.update(self._task, completed=event["step"])
            case "eval":
                self._console.print(describe_evaluation(event), markup=False, highlight=False)
            case "warning":
                self._console.print(f"warning: {event['text']}", markup=False, highlight=False)
            case "end":
                self._progress.update(self._task, description="done")
            case _:
                pass

    def _render(self) -> Group:
        grid = Table.grid(padding=(0, 2))
        cells = [f"[dim]{label}[/dim] {value}" for label, value in shown_fields(self._latest)]
        for start in range(0, len(cells), 4):
            grid.add_row(*cells[start : start + 4])
        return Group(self._progress, grid)
