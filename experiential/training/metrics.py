"""Write the metrics file: one JSON object per line, flushed after each, so a kill loses none."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiential.errors import ConfigError
from experiential.evaluation.results import write_whole
from experiential.rollout import Episode, failures
from experiential.training.advantages import outcome
from experiential.training.runtime import TrainStats
from experiential.types import Condition

Observer = Callable[[dict[str, Any]], None]


class Metrics:
    """Write every event to ``metrics.jsonl`` and hand it to an observer."""

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
        events = read_events(self.path)
        kept = [e for e in events if e.get("step", 0) <= step and e["event"] != "end"]
        write_whole(self.path, "".join(json.dumps(e) + "\n" for e in kept))
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def is_result(event: dict[str, Any]) -> bool:
    """Return whether an event ends a run with a result; one stopped before has checkpoints."""
    return event["event"] == "end" and event.get("reason") not in ("interrupted", "budget")


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events of a metrics file, in order; skip a last line cut off by a kill.

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
                where = f"line {number} of {path}"
                raise ConfigError(f"Expected JSON in {where}, got: {error}") from error
    return events


def peak_memory_gb() -> float:
    """Measure the largest resident size of this process so far, in GB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6 / 1.024)


def step_event(step: int, episodes: Sequence[Episode], update: TrainStats) -> dict[str, Any]:
    """Describe the episodes of a step and the actor's update in one flat record.

    Success rates are those of first attempts.
    """
    finished = [e for e in episodes if e.trajectory.error is None]
    first = [e.trajectory for e in finished if e.attempt == 1]
    guided = [t for t in first if t.condition is Condition.GUIDED]
    free = [t for t in first if t.condition is Condition.FREE]
    advised = [t for t in first if any(use.verdict != "reject" for use in t.uses)]
    event: dict[str, Any] = {
        "event": "step",
        "step": step + 1,
        "episodes": len(episodes),
        "errors": len(episodes) - len(finished),
        "reward": mean([t.reward for t in first]),
        "turns": mean([len(e.trajectory.turns) for e in finished]),
        "success_guided": mean([outcome(t) for t in guided]),
        "success_free": mean([outcome(t) for t in free]),
        "success_advised": mean([outcome(t) for t in advised]),
        "actor_loss": update.loss,
        "actor_grad_norm": update.grad_norm,
        "actor_version": update.version,
        "update_s": update.seconds,
        "update_tokens": update.sequence_tokens,
        "forwarded_tokens": update.forwarded_tokens,
        "memory_gb": peak_memory_gb(),
    }
    event |= {f"actor_{name}": value for name, value in update.metrics.items()}
    if outgrown := sum(e.outgrown for e in episodes):
        event["outgrown"] = outgrown
    if any(any(e.asked) for e in episodes):
        event["asked"] = mean([sum(e.asked) for e in finished])
    if reasons := failures(episodes):
        event["failures"] = reasons
    return event


def mean(values: Sequence[float]) -> float | None:
    """Return the mean of values; None without any."""
    return sum(values) / len(values) if values else None
