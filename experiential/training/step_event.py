"""What a training step is told as: one flat record for the metrics file, the live view and TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiential.rollout.rollout import Episode, failures
from experiential.training.extractor_track import ExtractorTrack
from experiential.training.metrics import peak_memory_gb
from experiential.training.runtime import TrainStats
from experiential.types import Condition


def step_event(step: int, episodes: Sequence[Episode], update: TrainStats) -> dict[str, Any]:
    """What was played in a step and what the actor made of it; success rates are of first attempts."""
    played = [e.trajectory for e in episodes if e.trajectory.error is None]
    first = [
        e.trajectory
        for e in episodes
        if e.trajectory.error is None and (e.job is None or e.job.attempt == 1)
    ]
    event: dict[str, Any] = {
        "event": "step",
        "step": step + 1,
        "episodes": len(episodes),
        "errors": len(episodes) - len(played),
        "reward": _mean([t.reward for t in first]),
        "turns": _mean([float(len(t.turns)) for t in played]),
        "success_guided": _mean(
            [float(t.success) for t in first if t.condition is Condition.GUIDED]
        ),
        "success_free": _mean([float(t.success) for t in first if t.condition is Condition.FREE]),
        "success_advised": _mean(
            [float(t.success) for t in first if any(use.verdict != "reject" for use in t.uses)]
        ),
        "actor_loss": update.loss,
        "actor_grad_norm": update.grad_norm,
        "actor_version": update.version,
        "update_s": update.seconds,
        "update_tokens": update.sequence_tokens,
        "forwarded_tokens": update.forwarded_tokens,
        "memory_gb": peak_memory_gb(),
    }
    event |= {f"actor_{name}": value for name, value in update.metrics.items()}
    if any(any(e.asked) for e in episodes):
        event["asked"] = _mean(
            [float(sum(e.asked)) for e in episodes if e.trajectory.error is None]
        )
    found = failures(episodes)
    return event | ({"failures": found} if found else {})


def extractor_event(track: ExtractorTrack) -> dict[str, Any]:
    """How the background track stands."""
    return {
        "extractor_updates": track.updates,
        "extractor_loss": track.last.loss,
        "extractor_reward": track.mean_reward,
        "extractor_weight": track.weight,
        "staleness": track.staleness,
        "malformed": track.malformed,
        "uncredited": track.uncredited,
        "buffer": len(track.buffer),
    }


def episode_row(episode: Episode) -> dict[str, Any]:
    """One line of the episode log."""
    t = episode.trajectory
    fields = {
        "task_id": t.task_id,
        "instance": t.instance,
        "group": t.group,
        "condition": t.condition.value,
        "seed": t.seed,
    }
    fields |= {"attempt": episode.job.attempt if episode.job else 1}
    return fields | {
        "success": t.success,
        "reward": t.reward,
        "turns": len(t.turns),
        "uses": len(t.uses),
        "error": t.error,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
