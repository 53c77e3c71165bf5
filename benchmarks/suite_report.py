"""What a played suite came to: intervals per task and overall, differences between the arms, a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.suite_play import Cell, PlayedEpisode
from experiential.evaluation.intervals import Interval, clustered_mean, paired_difference, wilson
from experiential.rollout.rollout import shortened

MEASURES: dict[str, Callable[[PlayedEpisode], float]] = {
    "success": lambda one: float(one.success),
    "reward": lambda one: one.reward,
    "turns": lambda one: float(one.turns),
    "tokens": lambda one: float(one.prompt_tokens + one.response_tokens),
    "seconds": lambda one: one.seconds,
}
OVERALL = "all tasks"
_SAMPLES = 10_000


def by_world(cell: Cell, measure: str) -> np.ndarray:
    """Mean of a measure in each world, in the order of the worlds, shape (worlds,)."""
    found: dict[int, list[float]] = {}
    for episode in cell.episodes:
        found.setdefault(episode.world, []).append(MEASURES[measure](episode))
    return np.array([np.mean(found[world]) for world in sorted(found)])


def cell_summary(cell: Cell) -> dict[str, Any]:
    """Each measure with its interval: success of one visit a world by Wilson, all else by a bootstrap over worlds."""
    found: dict[str, Any] = {
        name: clustered_mean(by_world(cell, name)[None]).model_dump() for name in MEASURES
    }
    if all(episode.visit == 0 for episode in cell.episodes):
        found["success"] = wilson(
            sum(episode.success for episode in cell.episodes), len(cell.episodes)
        ).model_dump()
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


def over_tasks(tables: Sequence[np.ndarray], seed: int = 0) -> Interval:
    """Mean of the means of tasks, each task alike, with a percentile bootstrap that draws the worlds of each task apart.

    Args:
        tables: a value for each world, or a paired difference of two, shape (worlds,), one for each
            task.
        seed: of the resampling.

    Raises:
        ValueError: there is no task, or one without worlds.
    """
    if not tables or not all(len(table) for table in tables):
        raise ValueError(f"Expected tasks with worlds, got {[len(table) for table in tables]}")
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(table, size=(_SAMPLES, len(table))).mean(axis=1) for table in tables]
    low, high = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
    return Interval(
        mean=float(np.mean([table.mean() for table in tables])), low=float(low), high=float(high)
    )


def overall(cells: Sequence[Cell], arm: str) -> dict[str, Any]:
    """All tasks under an arm, each counted alike."""
    mine = [cell for cell in cells if cell.arm == arm]
    told = [cell_summary(cell) for cell in mine]
    counts = {name: sum(one[name] for one in told) for name in ("episodes", "worlds", "failed")}
    measured = {
        name: over_tasks([by_world(cell, name) for cell in mine]).model_dump() for name in MEASURES
    }
    return {"task": OVERALL, "arm": arm, **counts, **measured}


def differences(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """With the bank minus without, on the same worlds and seeds, by task and over all tasks that both arms have played."""
    plain = {cell.task: cell for cell in cells if cell.arm == "off"}
    pairs = [(cell, plain[cell.task]) for cell in cells if cell.arm != "off" and cell.task in plain]
    found = [
        {"task": one.task, "arms": [one.arm, "off"]}
        | {
            name: paired_difference(by_world(one, name), by_world(other, name)).model_dump()
            for name in MEASURES
        }
        for one, other in pairs
    ]
    if len(pairs) > 1:
        told = {
            name: over_tasks([by_world(one, name) - by_world(other, name) for one, other in pairs])
            for name in MEASURES
        }
        found.append(
            {"task": OVERALL, "arms": [pairs[0][0].arm, "off"]}
            | {name: one.model_dump() for name, one in told.items()}
        )
    return found


def report(cells: Sequence[Cell]) -> dict[str, Any]:
    """All that is told of a suite."""
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    return {
        "tasks": [cell_summary(cell) for cell in cells],
        "overall": (
            [overall(cells, arm) for arm in arms] if len({cell.task for cell in cells}) > 1 else []
        ),
        "differences": differences(cells),
    }


def rich_table(title: str, found: dict[str, Any]) -> Table:
    """The report for a terminal; differences in success are points of a hundred."""
    shown = Table(
        title=title,
        caption=(
            "95 % intervals; tokens 0: the agent has no model, or its backend shows no token ids"
        ),
    )
    for column in (
        "task",
        "arm",
        "success, %",
        "reward",
        "turns",
        "tokens",
        "seconds",
        "episodes",
        "failed",
    ):
        shown.add_column(column, justify="left" if column in ("task", "arm") else "right")
    for row in (*found["tasks"], *found["overall"]):
        counts = (f"{row['episodes']}", f"{row['failed']}")
        shown.add_row(
            row["task"], row["arm"], *_measured(row), *counts, end_section=row is found["tasks"][-1]
        )
    for row in found["differences"]:
        shown.add_row(row["task"], " − ".join(row["arms"]), *_measured(row, "+"), "", "")
    return shown


def _measured(row: dict[str, Any], sign: str = "") -> list[str]:
    forms = {
        "success": (100.0, ".1f"),
        "reward": (1.0, ".3f"),
        "turns": (1.0, ".1f"),
        "tokens": (1.0, ",.0f"),
        "seconds": (1.0, ".2f"),
    }
    return [
        f"{format(scale * row[name]['mean'], sign + form)}"
        f" [{format(scale * row[name]['low'], sign + form)},"
        f" {format(scale * row[name]['high'], sign + form)}]"
        for name, (scale, form) in forms.items()
    ]
