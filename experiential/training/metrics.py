"""The metrics file: one JSON object a line, appended and flushed, so that a killed run loses nothing it reported."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        kept = [line for line in lines if json.loads(line).get("step", 0) <= step and json.loads(line)["event"] != "end"]
        self.path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def peak_memory_gb() -> float:
    """Largest resident size of this process so far, in GB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6 / 1.024)
