"""Send a run's events to the trackers of ``run.trackers``, beside ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from experiential.errors import ConfigError
from experiential.plugins import resolve

Event = dict[str, Any]


class Tracker(Protocol):
    """Receive the events of a run: ``start``, ``step``, ``eval``, ``checkpoint``, ``end``, ..."""

    def handle(self, event: Event) -> None:
        """Take in one event; ``event["event"]`` is its kind. Called on the trainer's thread."""
        ...

    def close(self) -> None:
        """Write what is left; called once, also when the run fails."""
        ...


class TensorBoardTracker:
    """Write the numbers of step and evaluation events as scalars; do nothing without TensorBoard.

    A resumed run plays the steps after its checkpoint again. The start event says which, and the
    new scalars replace the old ones.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None
        self._installed = bool(find_spec("tensorboard") and find_spec("torch"))

    def handle(self, event: Event) -> None:
        """Write one event of the trainer."""
        if not self._installed:
            return
        if self._writer is None:
            # opened by the first event, which knows the step from which a resumed run goes on
            from torch.utils.tensorboard import SummaryWriter

            step = event.get("step", 0)
            purge = step + 1 if step else None
            self._writer = SummaryWriter(str(self._folder), purge_step=purge)
        if event["event"] == "step":
            for name, value in event.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if is_number and name not in ("step", "time"):
                    self._writer.add_scalar(f"train/{name}", value, event["step"])
        elif event["event"] == "eval":
            for visit in event["visits"]:
                name = f"eval/{event['arm']}/visit_{visit['visit']}"
                rate = visit["successes"] / max(1, visit["episodes"])
                self._writer.add_scalar(name, rate, event["step"])

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._writer is not None:
            self._writer.close()


TRACKERS: dict[str, Callable[[Path], Tracker] | str] = {"tensorboard": TensorBoardTracker}


def open_trackers(names: Sequence[str], folder: Path) -> list[Tracker]:
    """Make the trackers of a run; each chooses its own place in the run's folder."""
    trackers = [resolve("trackers", name, TRACKERS)(folder) for name in names]
    for name, tracker in zip(names, trackers, strict=True):
        for method in ("handle", "close"):
            if not hasattr(tracker, method):
                raise ConfigError(
                    f"Expected the tracker {name!r} to have a method {method}, got"
                    f" {type(tracker).__name__} without one"
                )
    return trackers
