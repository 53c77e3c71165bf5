"""Report streams: success, steps, tokens and forward transfer of every arm, with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from experiential.evaluation.intervals import (
    GAIN,
    RATE,
    clustered_mean,
    over_tasks,
    paired_difference,
    success_rate,
)
from experiential.evaluation.memories import NONE
from experiential.evaluation.play_log import PlayedEpisode
from experiential.evaluation.stream import stream_of
from experiential.evaluation.suite_report import MEASURES
from experiential.llm.metered import Spent

COLUMNS = ("success", "reward", "turns", "tokens")
"""The measures that are reported."""
IN_ENVIRONMENT, TRANSFER = "all tasks", "all transfers"
_BOUNDS = {"success": RATE, "forward_transfer": GAIN}
Values = npt.NDArray[Any]


def table(episodes: Sequence[PlayedEpisode], measure: str) -> Values:
    """Return the mean of a measure by order and world, shape (orders, worlds).

    Every order must hold the same worlds, as finished streams do.
    """
    of = MEASURES[measure]
    found: dict[int, dict[int, list[float]]] = {}
    for one in episodes:
        found.setdefault(stream_of(one).order, {}).setdefault(one.world, []).append(of(one))
    return np.array(
        [[np.mean(found[order][world]) for world in sorted(found[order])] for order in found]
    )


def paired_rates(
    episodes: Sequence[PlayedEpisode], without: Sequence[PlayedEpisode]
) -> tuple[Values, Values]:
    """Return success by world with a memory and without, on the same episodes: each (worlds,).

    Their difference is the forward transfer of Lopez-Paz and Ranzato (2017, arXiv 1706.08840, eq.
    4), FWT = 1/(T-1) sum_{i=2..T} (R_{i-1,i} - b_i), by world: R_{i-1,i} is the success in episode
    i of a memory that has seen those before it, and b_i that of the same episode without memory.
    The first episode of a stream, before which there is nothing to remember, does not count; in a
    transfer from another task all do.
    """
    base = {(one.world, one.visit): one.success for one in without}
    found: dict[int, list[tuple[bool, bool]]] = {}
    for one in episodes:
        if one.place["position"] or one.task != one.place["source"]:
            pair = one.success, base[one.world, one.visit]
            found.setdefault(one.world, []).append(pair)
    rates = np.array([np.mean(found[world], axis=0) for world in sorted(found)]).reshape(-1, 2)
    return rates[:, 0], rates[:, 1]


def report(episodes: Iterable[PlayedEpisode]) -> dict[str, list[dict[str, Any]]]:
    """Return one row per arm in each task, in each transfer, and over all of either.

    Returns:
        ``rows``, the finished cells, each with an interval for every measure; ``forward_transfer``
        (None without the arm ``none``), ``by_order`` (success in each order, with ``spread`` =
        highest - lowest) and ``curve`` (mean success up to each position, over the orders);
        ``overall``, the means over tasks and over transfers, each counted alike.
    """
    cells: dict[tuple[str, str, str], list[PlayedEpisode]] = {}
    for one in episodes:
        cells.setdefault((stream_of(one).source, one.task, one.arm), []).append(one)
    rows: list[dict[str, Any]] = []
    tables: dict[tuple[str, bool], list[dict[str, Values]]] = {}
    for (source, task, arm), played in cells.items():
        without = cells.get((task, task, NONE))
        pair = paired_rates(played, without) if without and arm != NONE else None
        gain = np.empty(0) if pair is None else pair[0] - pair[1]
        by_measure = {name: table(played, name) for name in COLUMNS}
        orders = by_measure["success"].mean(axis=1)
        row: dict[str, Any] = {
            "source": source,
            "task": task,
            "arm": arm,
            "episodes": len(played),
            "failed": sum(one.error is not None for one in played),
            **{name: clustered_mean(values).model_dump() for name, values in by_measure.items()},
            "success": success_rate(by_measure["success"]).model_dump(),
            "forward_transfer": paired_difference(*pair).model_dump()
            if pair is not None and gain.size
            else None,
            "by_order": orders.tolist(),
            "spread": float(np.ptp(orders)),
            "curve": curve(played),
            "actor": sum((one.spent for one in played), Spent()).model_dump(),
            "memory": sum((Spent(**one.note["memory"]) for one in played), Spent()).model_dump(),
        }
        rows.append(row)
        means = {name: values.mean(axis=0) for name, values in by_measure.items()}
        tables.setdefault((arm, source == task), []).append({**means, "forward_transfer": gain})

    overall: list[dict[str, Any]] = []
    for (arm, own), found in tables.items():
        if len(found) == 1:
            continue
        row = {"source": IN_ENVIRONMENT if own else TRANSFER, "task": "", "arm": arm}
        for name in (*COLUMNS, "forward_transfer"):
            known = [one[name] for one in found if one[name].size]
            whole, bounds = len(known) == len(found), _BOUNDS.get(name)
            row[name] = over_tasks(known, bounds).model_dump() if whole else None
        overall.append(row)
    return {"rows": rows, "overall": overall}


def curve(episodes: Sequence[PlayedEpisode]) -> list[float]:
    """Return the success rate of a stream up to each of its positions, averaged over orders."""
    found: dict[int, list[float]] = {}
    for one in sorted(episodes, key=lambda one: one.place["position"]):
        found.setdefault(stream_of(one).order, []).append(float(one.success))
    counts = np.arange(1, min(map(len, found.values())) + 1)
    sums = [np.cumsum(outcomes)[: len(counts)] / counts for outcomes in found.values()]
    return [round(float(value), 4) for value in np.mean(sums, axis=0)]
