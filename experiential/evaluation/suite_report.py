"""Report a played suite: intervals per task and overall, and differences between the arms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from experiential.evaluation.intervals import clustered_mean, over_tasks, paired_difference, wilson
from experiential.evaluation.play_log import PlayedEpisode
from experiential.llm.metered import Spent
from experiential.rollout import shortened
from experiential.types import Record


class SuiteCell(Record):
    """Hold the episodes of one task under one arm."""

    task: str
    arm: Literal["off", "frozen", "on"]
    """``off``: no bank; ``frozen``: one that is only read; ``on``: one that grows."""
    episodes: tuple[PlayedEpisode, ...] = Field(min_length=1)
    entries: tuple[int, int] | None = None
    """Of the bank at the beginning and at the end; None for ``off``."""
    extractor: Spent = Spent()
    """Tokens, cost and seconds of distillation."""
    actor: Spent = Spent()
    """The same of the agent's language model, failed episodes included."""


MEASURES: dict[str, Callable[[PlayedEpisode], float]] = {
    "success": lambda one: float(one.success),
    "reward": lambda one: one.reward,
    "turns": lambda one: float(one.turns),
    "tokens": lambda one: float(one.prompt_tokens + one.response_tokens),
    "seconds": lambda one: one.seconds,
}
OVERALL = "all tasks"


def by_world(cell: SuiteCell, measure: str) -> np.ndarray:
    """Return the mean of a measure in each world, in the order of the worlds, shape (worlds,)."""
    found: dict[int, list[float]] = {}
    for episode in cell.episodes:
        found.setdefault(episode.world, []).append(MEASURES[measure](episode))
    return np.array([np.mean(found[world]) for world in sorted(found)])


FACTS = ("data", "split", "digest", "protocol")
"""What every row of a task says about what was played."""


def report(cells: Sequence[SuiteCell], played: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return rates and means by task and overall, and the differences between the arms.

    ``played`` are `TaskFacts` as mappings, which the rows of a task repeat.

    Returns:
        ``tasks``, ``overall`` (empty with one task) and ``differences`` (with the bank minus
        without, paired by world), each a list of rows with an interval for every measure.
    """
    worlds = {
        (cell.task, cell.arm): {name: by_world(cell, name) for name in MEASURES} for cell in cells
    }
    facts = {one["name"]: {key: one[key] for key in FACTS} for one in played}
    tasks: list[dict[str, Any]] = []
    for cell in cells:
        reasons = Counter(shortened(one.error) for one in cell.episodes if one.error is not None)
        row: dict[str, Any] = {
            "task": cell.task,
            "arm": cell.arm,
            "episodes": len(cell.episodes),
            "worlds": len({one.world for one in cell.episodes}),
            "failed": sum(reasons.values()),
            "failures": dict(reasons.most_common()),
            "actor": cell.actor.model_dump(),
            "extractor": cell.extractor.model_dump(),
            **facts.get(cell.task, {}),
        }
        for name, values in worlds[cell.task, cell.arm].items():
            row[name] = clustered_mean(values[None]).model_dump()
        if all(one.visit == 0 for one in cell.episodes):  # with one visit a world: independent
            successes = sum(one.success for one in cell.episodes)
            row["success"] = wilson(successes, len(cell.episodes)).model_dump()
        tasks.append(row)

    overall: list[dict[str, Any]] = []
    if len({cell.task for cell in cells}) > 1:
        for arm in dict.fromkeys(cell.arm for cell in cells):
            rows = [row for row in tasks if row["arm"] == arm]
            row = {"task": OVERALL, "arm": arm}
            row |= {key: sum(one[key] for one in rows) for key in ("episodes", "worlds", "failed")}
            for name in MEASURES:
                tables = [worlds[one["task"], arm][name] for one in rows]
                row[name] = over_tasks(tables).model_dump()
            overall.append(row)

    differences: list[dict[str, Any]] = []
    pairs = [key for key in worlds if key[1] != "off" and (key[0], "off") in worlds]
    for task, arm in pairs:
        row = {"task": task, "arms": [arm, "off"], **facts.get(task, {})}
        for name, values in worlds[task, arm].items():
            row[name] = paired_difference(values, worlds[task, "off"][name]).model_dump()
        differences.append(row)
    if len(pairs) > 1:
        row = {"task": OVERALL, "arms": [pairs[0][1], "off"]}
        for name in MEASURES:
            gains = [worlds[task, arm][name] - worlds[task, "off"][name] for task, arm in pairs]
            row[name] = over_tasks(gains).model_dump()
        differences.append(row)
    return {"tasks": tasks, "overall": overall, "differences": differences}
