"""The metrics file: one JSON object a line, appended and flushed, so that a killed run loses nothing it reported."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiential.errors import ConfigError

Observer = Callable[[dict[str, Any]], None]


class Metrics:
    """Writes every event to ``metrics.jsonl`` and hands it to an observer."""

    def __init__(self, path: Path, observer: Observer | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        self._observer = observer

    def emit(self, event: dict[str, Any]) -> None:
        """Record one event with the time."""
        event = {"time": time.time()} | event
        self._file.write(json.dumps(event, default=float) + "\n")
        self._file.flush()
        if self._observer is not None:
            self._observer(event)

    def rewind(self, step: int) -> None:
        """Drop the events of steps after ``step``: a resumed run plays them again."""
        self._file.close()
        kept = [
            e for e in read_events(self.path) if e.get("step", 0) <= step and e["event"] != "end"
        ]
        self.path.write_text("".join(json.dumps(e) + "\n" for e in kept), encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a metrics file, in order; a last line that a kill cut off is left out.

    Raises:
        ConfigError: a line before the last is damaged.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(
                    f"Expected JSON in line {number} of {path}, got: {error}"
                ) from error
    return events


def peak_memory_gb() -> float:
    """Largest resident size of this process so far, in GB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6 / 1.024)
