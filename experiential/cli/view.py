"""Show a training run: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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
FIELD_WIDTH = 26
"""Columns of the terminal that a field and its label take in the live view."""


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


def clock(seconds: float) -> str:
    """Format a duration.

    >>> clock(63.4), clock(7262)
    ('1:03', '2:01:02')
    """
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Pace:
    """Follow how far a run is and how long its training still takes, from its events."""

    def __init__(self) -> None:
        self.step = self.steps = 0
        self._begin = 0
        self._minutes: float | None = None
        self._elapsed, self._heard = 0.0, time.monotonic()

    def note(self, event: Event) -> None:
        """Take in an event of the trainer."""
        if event["event"] == "start":
            self.step = self._begin = event.get("step", 0)
            self.steps, self._minutes = event["steps"], event.get("minutes")
        elif event["event"] == "step":
            self.step, self._elapsed = event["step"], event.get("elapsed_s", 0.0)
            self._heard = time.monotonic()

    def left(self) -> str:
        """Return how long training still takes, ``run.minutes`` at most; empty if unknown."""
        if not self._elapsed or not self._begin < self.step < self.steps:
            return ""
        seconds = (self.steps - self.step) * self._elapsed / (self.step - self._begin)
        if self._minutes is not None:
            seconds = min(seconds, 60 * self._minutes - self._elapsed)
        return f"about {clock(seconds - (time.monotonic() - self._heard))} left"

    def opening(self) -> str:
        """Return what a start event means."""
        limit = "" if self._minutes is None else f", for at most {self._minutes:g} minutes"
        if self._begin:
            return f"going on after step {self._begin} of {self.steps}{limit}"
        return f"training for {self.steps} steps{limit}"

    def ending(self, event: Event) -> str:
        """Return why a run has ended."""
        at = f"after step {event['step']} of {self.steps}"
        return {
            "steps": f"done: all {self.steps} steps",
            "minutes": f"done {at}: run.minutes={self._minutes} are over",
            "budget": f"stopped {at}: the budget is spent",
            "interrupted": f"stopped {at}: interrupted",
        }[event.get("reason", "steps")]


class PlainView:
    """Print one line per event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = Pace()

    def handle(self, event: Event) -> None:
        """Print one event of the trainer."""
        self._pace.note(event)
        match event["event"]:
            case "start":
                self.say(self._pace.opening())
            case "step":
                fields = [f"{label} {value}" for label, value in shown_fields(event)]
                if "elapsed_s" in event:
                    fields += [f"elapsed {clock(event['elapsed_s'])}", self._pace.left()]
                place = f"step {event['step']}/{self._pace.steps}"
                self.say("  ".join(filter(None, (place, *fields))))
            case "eval":
                self.say(describe_evaluation(event))
            case "checkpoint":
                self.say(f"checkpoint {event['path']}")
            case "warning":
                self.say(f"warning: {event['text']}")
            case "end":
                self.say(f"{self._pace.ending(event)}, elapsed {clock(event['seconds'])}")
            case _:
                pass

    def say(self, text: str) -> None:
        """Print a line of text."""
        show_line(self._console, text)

    def close(self) -> None:
        """Close nothing: every line has been printed."""


class LiveView:
    """Draw how far the run is, a bar and the newest numbers below it, until closed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace, self._begin = Pace(), time.monotonic()
        self._doing = "loading models"
        self._seconds: float | None = None
        self._latest: Event = {}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def close(self) -> None:
        """Stop drawing; what was drawn last stays."""
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line of text above what is drawn."""
        self._console.print(text, markup=False, highlight=False)

    def handle(self, event: Event) -> None:
        """Redraw for one event of the trainer; evaluations and warnings stay above as lines."""
        self._pace.note(event)
        match event["event"]:
            case "start":
                self._doing = "training"
                self.say(self._pace.opening())
            case "step":
                self._latest = event
            case "eval":
                self.say(describe_evaluation(event))
            case "warning":
                self.say(f"warning: {event['text']}")
            case "end":
                self._doing, self._seconds = self._pace.ending(event), event["seconds"]
            case _:
                pass

    def _render(self) -> Group:
        pace = self._pace
        seconds = time.monotonic() - self._begin if self._seconds is None else self._seconds
        words = [self._doing, f"elapsed {clock(seconds)}"]
        bar: list[Padding] = []
        if pace.steps:
            bar = [Padding(ProgressBar(total=pace.steps, completed=pace.step), 0)]  # a whole line
            if self._seconds is None:
                words[1:] = [f"step {pace.step} of {pace.steps}", *words[1:], pace.left()]
        grid = Table.grid(padding=(0, 2))
        cells = [
            Text.assemble((label, "dim"), " ", value) for label, value in shown_fields(self._latest)
        ]
        columns = max(1, self._console.width // FIELD_WIDTH)
        for start in range(0, len(cells), columns):
            grid.add_row(*cells[start : start + columns])
        return Group(Text("  ".join(filter(None, words))), *bar, grid)
