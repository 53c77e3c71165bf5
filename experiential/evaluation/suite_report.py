"""Report a played suite: intervals per task and overall, and differences between the arms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from experiential.config import Arm
from experiential.evaluation.intervals import (
    GAIN,
    RATE,
    clustered_mean,
    over_tasks,
    paired_difference,
    success_rate,
)
from experiential.evaluation.play_log import PlayedEpisode
from experiential.llm.metered import Spent
from experiential.rollout import shortened
from experiential.types import Record


class SuiteCell(Record):
    """Hold the episodes of one task under one arm."""

    task: str
    arm: Arm
    episodes: tuple[PlayedEpisode, ...] = Field(min_length=1)
    entries: tuple[int, int] | None = None
    """Of the bank at the beginning and at the end; None for ``off``."""
    extractor: Spent = Spent()
    """Tokens, cost and seconds of distillation."""
    actor: Spent = Spent()
    """The same of the agent's language model, attempts that failed included; the seconds of
    requests that were open at one time add up."""


MEASURES: dict[str, Callable[[PlayedEpisode], float]] = {
    "success": lambda one: float(one.success),
    "reward": lambda one: one.reward,
    "turns": lambda one: float(one.turns),
    "tokens": lambda one: float(one.prompt_tokens + one.response_tokens),
    "seconds": lambda one: one.seconds,
}
OVERALL = "all tasks"
CONTRASTS: tuple[tuple[Arm, Arm], ...] = (
    *((arm, "off") for arm in ("frozen", "on", "shuffled", "placebo")),
    *((arm, other) for arm in ("frozen", "on") for other in ("shuffled", "placebo")),
)
"""Pairs of arms whose difference is reported: the first minus the second."""


def by_world(
    cell: SuiteCell, measure: str, played: Container[tuple[int, int]] | None = None
) -> np.ndarray:
    """Return the mean of a measure in each world, in the order of the worlds, shape (worlds,).

    Of the episodes only those in ``played`` count, each a world and a visit, if that is given.
    """
    found: dict[int, list[float]] = {}
    for episode in cell.episodes:
        if played is None or (episode.world, episode.visit) in played:
            found.setdefault(episode.world, []).append(MEASURES[measure](episode))
    return np.array([np.mean(found[world]) for world in sorted(found)])


def episodes_of(cell: SuiteCell) -> set[tuple[int, int]]:
    """Return world and visit of each episode of a cell."""
    return {(one.world, one.visit) for one in cell.episodes}


FACTS = ("data", "split", "digest", "protocol")
"""What every row of a task says about what was played."""


def report(cells: Sequence[SuiteCell], played: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return rates and means by task and overall, and the differences between the arms.

    ``played`` are `TaskFacts` as mappings, which the rows of a task repeat.

    Returns:
        ``tasks``, ``overall`` (empty with one task, and without the arms
        that some task has not been played under yet) and ``differences`` (of `CONTRASTS`, paired by
        world, over the episodes that both arms have played), each a list of rows with an interval
        for every measure.
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
            "again": sum(one.again for one in cell.episodes),
            "failures": dict(reasons.most_common()),
            "actor": cell.actor.model_dump(),
            "extractor": cell.extractor.model_dump(),
            **facts.get(cell.task, {}),
        }
        for name, values in worlds[cell.task, cell.arm].items():
            interval = success_rate if name == "success" else clustered_mean
            row[name] = interval(values[None]).model_dump()
        tasks.append(row)

    overall: list[dict[str, Any]] = []
    every = len(played or {cell.task for cell in cells})  # a stopped run lacks some
    if every > 1:
        for arm in dict.fromkeys(cell.arm for cell in cells):
            rows = [row for row in tasks if row["arm"] == arm]
            if len(rows) < every:
                continue
            row = {"task": OVERALL, "arm": arm}
            row |= {key: sum(one[key] for one in rows) for key in ("episodes", "worlds", "failed")}
            for name in MEASURES:
                tables = [worlds[one["task"], arm][name] for one in rows]
                bounds = RATE if name == "success" else None
                row[name] = over_tasks(tables, bounds).model_dump()
            overall.append(row)

    differences: list[dict[str, Any]] = []
    found = {(cell.task, cell.arm): cell for cell in cells}
    for arm, other in CONTRASTS:
        gains: dict[str, list[np.ndarray]] = {name: [] for name in MEASURES}
        for task in dict.fromkeys(cell.task for cell in cells):
            one, two = found.get((task, arm)), found.get((task, other))
            if one is None or two is None:
                continue
            both = episodes_of(one) & episodes_of(two)
            if not both:
                continue
            row = {"task": task, "arms": [arm, other], **facts.get(task, {})}
            for name in MEASURES:
                first, second = by_world(one, name, both), by_world(two, name, both)
                row[name] = (
                    paired_difference(first, second)
                    if name == "success"
                    else clustered_mean((first - second)[None])
                ).model_dump()
                gains[name].append(first - second)
            differences.append(row)
        if len(gains["success"]) == every > 1:
            row = {"task": OVERALL, "arms": [arm, other]}
            for name, tables in gains.items():
                bounds = GAIN if name == "success" else None
                row[name] = over_tasks(tables, bounds).model_dump()
            differences.append(row)
    return {"tasks": tasks, "overall": overall, "differences": differences}
