"""Compute intervals: Wilson's for a success rate, else a bootstrap over worlds and seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from experiential.types import Record

SAMPLES, SEED = 10_000, 0
"""Resamples of a bootstrap, and the seed of their draw."""


class Interval(Record):
    """Hold an estimate with its 95 % interval."""

    mean: float
    low: float
    high: float


def wilson(successes: int, episodes: int) -> Interval:
    """Return the Wilson score interval of a success rate.

    With p = s/n: centre (p + z²/2n) / (1 + z²/n), half width
    z·sqrt(p(1-p)/n + z²/4n²) / (1 + z²/n).

    Raises:
        ValueError: ``successes`` is not between 0 and ``episodes``.
    """
    if not 0 <= successes <= episodes:
        raise ValueError(f"Expected successes between 0 and {episodes}, got {successes}")
    if episodes == 0:
        return Interval(mean=0.0, low=0.0, high=1.0)
    z = 1.959964  # of the normal distribution, for 95 %
    p, scale = successes / episodes, 1 + z * z / episodes
    centre = (p + z * z / (2 * episodes)) / scale
    half = z * math.sqrt(p * (1 - p) / episodes + z * z / (4 * episodes**2)) / scale
    return Interval(mean=p, low=max(0.0, centre - half), high=min(1.0, centre + half))


def paired_difference(first: np.ndarray, second: np.ndarray) -> Interval:
    """Return the mean of ``first - second`` with a percentile bootstrap over worlds.

    Args:
        first: success rate per world under one arm, shape (worlds,).
        second: the same worlds and seeds under the other arm, shape (worlds,).

    Raises:
        ValueError: the shapes differ or are empty.
    """
    if first.shape != second.shape or first.ndim != 1 or first.size == 0:
        raise ValueError(
            f"Expected two equal one-dimensional shapes, got {first.shape} and {second.shape}"
        )
    return clustered_mean(first.astype(np.float64)[None] - second)


def clustered_mean(values: np.ndarray, *, samples: int = SAMPLES) -> Interval:
    """Return the mean over training seeds and worlds with a percentile bootstrap over both.

    The clusters are the worlds: all visits to a world are drawn together. Every training seed is
    evaluated on the same worlds, and a world that is hard for one is hard for others, so one draw
    of worlds serves all seeds of a resample: with seeds i(1..S) and worlds j(1..W) drawn with
    replacement, its mean is the mean of ``values[i(a), j(b)]`` over all a and b.

    Caveat: with one training seed the interval leaves out how much another training would differ.

    Args:
        values: success rates, or paired differences of them, per training seed and world, shape
            (seeds, worlds).
        samples: bootstrap resamples.

    Raises:
        ValueError: ``values`` is not a table, or empty.
    """
    if values.ndim != 2 or values.size == 0:
        raise ValueError(
            f"Expected a table of seeds and worlds with something in it, got shape {values.shape}"
        )
    return _percentiles(float(values.mean()), _resampled(values, samples=samples)[0])


def unpaired_difference(first: np.ndarray, second: np.ndarray) -> Interval:
    """Return the difference of two means on the same worlds, by runs without a common seed.

    Training seeds are resampled apart, worlds together.

    Args:
        first: success rates, shape (seeds, worlds).
        second: subtracted from them, shape (other seeds, the same worlds).

    Raises:
        ValueError: one is no table, is empty, or the worlds differ in number.
    """
    tables = first.ndim == second.ndim == 2 and first.size and second.size
    if not tables or first.shape[1] != second.shape[1]:
        raise ValueError(
            f"Expected two tables over the same worlds, got shapes {first.shape} and {second.shape}"
        )
    one, other = _resampled(first, second)
    return _percentiles(float(first.mean() - second.mean()), one - other)


def over_tasks(tables: Sequence[np.ndarray]) -> Interval:
    """Return the mean over tasks, each counted alike, with a percentile bootstrap.

    The worlds of each task are drawn apart.

    Args:
        tables: for each task a value per world, or a paired difference of two, shape (worlds,).

    Raises:
        ValueError: there is no task, or one without worlds.
    """
    if not tables or not all(len(table) for table in tables):
        raise ValueError(f"Expected tasks with worlds, got {[len(table) for table in tables]}")
    rng = np.random.default_rng(SEED)
    drawn = [rng.choice(table, size=(SAMPLES, len(table))).mean(axis=1) for table in tables]
    mean = float(np.mean([table.mean() for table in tables]))
    return _percentiles(mean, np.mean(drawn, axis=0))


def _resampled(*tables: np.ndarray, samples: int = SAMPLES) -> list[np.ndarray]:
    """Return the means of each table in every resample, shape (samples,).

    Seeds are drawn with replacement for each table apart, worlds for all at once.
    """
    rng = np.random.default_rng(SEED)
    n = tables[0].shape[1]
    worlds = rng.multinomial(n, np.full(n, 1 / n), size=samples)
    means: list[np.ndarray] = []
    for table in tables:
        seeds = rng.multinomial(len(table), np.full(len(table), 1 / len(table)), size=samples)
        sums = ((seeds @ table.astype(np.float64)) * worlds).sum(axis=1)
        means.append(sums / table.size)
    return means


def _percentiles(mean: float, means: np.ndarray) -> Interval:
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(mean=mean, low=float(low), high=float(high))
