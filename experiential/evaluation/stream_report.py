"""Report streams: success, steps, tokens and forward transfer of every arm, with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from experiential.evaluation.intervals import Interval, clustered_mean, over_tasks, wilson
from experiential.evaluation.memories import NONE
from experiential.evaluation.play_log import PlayedEpisode
from experiential.evaluation.stream import stream_of
from experiential.evaluation.suite_report import MEASURES
from experiential.llm.metered import Spent

COLUMNS = ("success", "reward", "turns", "tokens")
"""The measures that are reported."""
IN_ENVIRONMENT, TRANSFER = "all tasks", "all transfers"
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


def gains(episodes: Sequence[PlayedEpisode], without: Sequence[PlayedEpisode]) -> Values:
    """Return the gain in success over the same episodes without memory, shape (worlds,).

    This is the forward transfer of Lopez-Paz and Ranzato (2017, arXiv 1706.08840, eq. 4),
    FWT = 1/(T-1) sum_{i=2..T} (R_{i-1,i} - b_i), by world: R_{i-1,i} is the success in episode i of
    a memory that has seen those before it, and b_i that of the same episode without memory. The
    first episode of a stream, before which there is nothing to remember, does not count; in a
    transfer from another task all do.
    """
    base = {(one.world, one.visit): float(one.success) for one in without}
    found: dict[int, list[float]] = {}
    for one in episodes:
        if one.place["position"] or one.task != one.place["source"]:
            gain = float(one.success) - base[one.world, one.visit]
            found.setdefault(one.world, []).append(gain)
    return np.array([np.mean(found[world]) for world in sorted(found)])


def success_interval(episodes: Sequence[PlayedEpisode]) -> Interval:
    """Return the success rate of a cell: Wilson's interval for one episode a world, else bootstrap.

    The bootstrap draws orders and worlds, see `clustered_mean`. Where all worlds agree there is
    nothing to draw, so Wilson's interval of as many episodes as worlds stands in.
    """
    values = table(episodes, "success")
    means: list[float] = values.mean(axis=0).tolist()
    is_single = len(values) == 1 and set(means) <= {0.0, 1.0}
    if is_single or np.ptp(values) == 0:
        return wilson(round(sum(means)), len(means))
    return clustered_mean(values)


def gain_interval(
    gain: Values, episodes: Sequence[PlayedEpisode], without: Sequence[PlayedEpisode]
) -> Interval:
    """Return the mean of `gains` with a bootstrap over worlds.

    Where all worlds gain the same there is nothing to draw. The intervals of the two success rates
    then make that of their difference (Newcombe 1998, method 10, without its correlation).
    """
    if np.ptp(gain) > 0:
        return clustered_mean(gain[None])
    mean, one, other = float(gain.mean()), success_interval(episodes), success_interval(without)
    below = math.hypot(one.mean - one.low, other.high - other.mean)
    above = math.hypot(one.high - one.mean, other.mean - other.low)
    return Interval(mean=mean, low=max(-1.0, mean - below), high=min(1.0, mean + above))


def report(episodes: Iterable[PlayedEpisode]) -> dict[str, list[dict[str, Any]]]:
    """Return one row per arm in each task, in each transfer, and over all of either.

    Returns:
        ``rows``, the finished cells, each with an interval for every measure; ``forward_transfer``
        (None without the arm ``none``), ``by_order`` (success in each order, with ``spread`` =
        highest - lowest) and ``curve`` (mean success up to each position, over the orders);
        ``overall``, the means over tasks and over transfers, each counted alike; without forward
        transfer where it is the same in all worlds.
    """
    cells: dict[tuple[str, str, str], list[PlayedEpisode]] = {}
    for one in episodes:
        cells.setdefault((stream_of(one).source, one.task, one.arm), []).append(one)
    rows: list[dict[str, Any]] = []
    tables: dict[tuple[str, bool], list[dict[str, Values]]] = {}
    for (source, task, arm), played in cells.items():
        without = cells.get((task, task, NONE))
        gain = gains(played, without) if without and arm != NONE else np.empty(0)
        by_measure = {name: table(played, name) for name in COLUMNS}
        orders = by_measure["success"].mean(axis=1)
        row: dict[str, Any] = {
            "source": source,
            "task": task,
            "arm": arm,
            "episodes": len(played),
            "failed": sum(one.error is not None for one in played),
            **{name: clustered_mean(values).model_dump() for name, values in by_measure.items()},
            "success": success_interval(played).model_dump(),
            "forward_transfer": None,
            "by_order": orders.tolist(),
            "spread": float(np.ptp(orders)),
            "curve": curve(played),
            "actor": sum((one.spent for one in played), Spent()).model_dump(),
            "memory": sum((Spent(**one.note["memory"]) for one in played), Spent()).model_dump(),
        }
        if without and gain.size:
            row["forward_transfer"] = gain_interval(gain, played, without).model_dump()
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
            row[name] = over_tasks(known).model_dump() if len(known) == len(found) else None
            values = np.concatenate([*known, np.empty(0)])
            if values.size and np.ptp(values) == 0:  # a bootstrap has nothing to draw
                if name == "success" and values[0] in (0.0, 1.0):
                    row[name] = wilson(int(values.sum()), values.size).model_dump()
                elif name == "forward_transfer":
                    row[name] = None
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
