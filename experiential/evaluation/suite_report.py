"""Report a played suite: intervals per task and overall, and differences between the arms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from experiential.evaluation.intervals import Interval, clustered_mean, paired_difference, wilson
from experiential.llm.metered import Spent
from experiential.rollout.rollout import shortened
from experiential.types import Record


class PlayedEpisode(Record):
    """Hold the outcome of one episode.

    Attributes:
        world: index of its world; where the environment lists none, the number of its seed.
        visit: number of the visit to that world, from 0.
        task_id: name of the world, from the environment.
        success: whether the task was done.
        reward: sum of rewards; where the episode failed for a technical reason, the least that the
            task gives.
        turns: steps of the environment.
        prompt_tokens: of all prompts; 0 where the backend shows no token ids.
        response_tokens: of all responses; 0 likewise.
        seconds: wall clock from the reset to the end of the last step, the agent's time included.
        shown: entries of the bank that reached the agent.
        error: the reason of a technical failure.
    """

    world: int
    visit: int
    task_id: str
    success: bool
    reward: float
    turns: int
    prompt_tokens: int
    response_tokens: int
    seconds: float
    shown: int
    error: str | None = None


class SuiteCell(Record):
    """Hold the episodes of one task under one arm.

    Attributes:
        task: name of the task.
        arm: ``off`` plays without a bank, ``frozen`` with one that is only read, ``on`` with one
            that grows.
        episodes: in the order of worlds and visits.
        entries: of the bank at the beginning and at the end; None for ``off``.
        extractor: tokens and seconds of distillation.
    """

    task: str
    arm: Literal["off", "frozen", "on"]
    episodes: tuple[PlayedEpisode, ...] = Field(min_length=1)
    entries: tuple[int, int] | None = None
    extractor: Spent = Spent()


MEASURES: dict[str, Callable[[PlayedEpisode], float]] = {
    "success": lambda one: float(one.success),
    "reward": lambda one: one.reward,
    "turns": lambda one: float(one.turns),
    "tokens": lambda one: float(one.prompt_tokens + one.response_tokens),
    "seconds": lambda one: one.seconds,
}
OVERALL = "all tasks"
_SAMPLES = 10_000


def by_world(cell: SuiteCell, measure: str) -> np.ndarray:
    """Return the mean of a measure in each world, in the order of the worlds, shape (worlds,)."""
    found: dict[int, list[float]] = {}
    for episode in cell.episodes:
        found.setdefault(episode.world, []).append(MEASURES[measure](episode))
    return np.array([np.mean(found[world]) for world in sorted(found)])


def over_tasks(tables: Sequence[np.ndarray], seed: int = 0) -> Interval:
    """Return the mean over tasks, each counted alike, with a percentile bootstrap.

    The worlds of each task are drawn apart.

    Args:
        tables: for each task a value per world, or a paired difference of two, shape (worlds,).
        seed: of the resampling.

    Raises:
        ValueError: there is no task, or one without worlds.
    """
    if not tables or not all(len(table) for table in tables):
        raise ValueError(f"Expected tasks with worlds, got {[len(table) for table in tables]}")
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(table, size=(_SAMPLES, len(table))).mean(axis=1) for table in tables]
    low, high = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
    mean = float(np.mean([table.mean() for table in tables]))
    return Interval(mean=mean, low=float(low), high=float(high))


def report(cells: Sequence[SuiteCell]) -> dict[str, Any]:
    """Return rates and means by task and overall, and the differences between the arms.

    Returns:
        ``tasks``, ``overall`` (empty with one task) and ``differences`` (with the bank minus
        without, paired by world), each a list of rows with an interval for every measure.
    """
    tasks = [_summary(cell) for cell in cells]
    overall: list[dict[str, Any]] = []
    if len({cell.task for cell in cells}) > 1:
        for arm in dict.fromkeys(cell.arm for cell in cells):
            rows = [row for row in tasks if row["arm"] == arm]
            counts = {
                key: sum(row[key] for row in rows) for key in ("episodes", "worlds", "failed")
            }
            mine = [cell for cell in cells if cell.arm == arm]
            measured = {
                name: over_tasks([by_world(cell, name) for cell in mine]).model_dump()
                for name in MEASURES
            }
            overall.append({"task": OVERALL, "arm": arm, **counts, **measured})

    plain = {cell.task: cell for cell in cells if cell.arm == "off"}
    pairs = [(cell, plain[cell.task]) for cell in cells if cell.arm != "off" and cell.task in plain]
    differences: list[dict[str, Any]] = []
    for one, other in pairs:
        measured = {
            name: paired_difference(by_world(one, name), by_world(other, name)).model_dump()
            for name in MEASURES
        }
        differences.append({"task": one.task, "arms": [one.arm, "off"], **measured})
    if len(pairs) > 1:
        measured = {
            name: over_tasks(
                [by_world(one, name) - by_world(other, name) for one, other in pairs]
            ).model_dump()
            for name in MEASURES
        }
        differences.append({"task": OVERALL, "arms": [pairs[0][0].arm, "off"], **measured})
    return {"tasks": tasks, "overall": overall, "differences": differences}


def _summary(cell: SuiteCell) -> dict[str, Any]:
    """Return a cell's measures with their intervals, by a bootstrap over worlds.

    Success with one visit a world has independent episodes, hence Wilson's interval.
    """
    found: dict[str, Any] = {
        name: clustered_mean(by_world(cell, name)[None]).model_dump() for name in MEASURES
    }
    if all(episode.visit == 0 for episode in cell.episodes):
        successes = sum(episode.success for episode in cell.episodes)
        found["success"] = wilson(successes, len(cell.episodes)).model_dump()
    reasons = Counter(
        shortened(episode.error) for episode in cell.episodes if episode.error is not None
    )
    return {
        "task": cell.task,
        "arm": cell.arm,
        "episodes": len(cell.episodes),
        "worlds": len({episode.world for episode in cell.episodes}),
        "failed": sum(reasons.values()),
        "failures": dict(reasons.most_common()),
        **found,
    }
