"""Compute intervals, by one method everywhere.

Wilson's for a success rate; Newcombe's for the paired difference of two; else a percentile
bootstrap over worlds and seeds. A bootstrap sees no spread where all worlds agree, so success rates
and their differences then have the interval that as many single episodes would have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from experiential.types import Record

Z = 1.959964
"""Quantile of the normal distribution, for 95 %."""
RATE, GAIN = (0.0, 1.0), (-1.0, 1.0)
"""Least and largest success rate, and difference of two."""
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
    z = Z
    p, scale = successes / episodes, 1 + z * z / episodes
    centre = (p + z * z / (2 * episodes)) / scale
    half = z * math.sqrt(p * (1 - p) / episodes + z * z / (4 * episodes**2)) / scale
    return Interval(mean=p, low=max(0.0, centre - half), high=min(1.0, centre + half))


def success_rate(values: np.ndarray) -> Interval:
    """Return the mean of success rates with its interval.

    Where there is one seed and each world was won or lost as a whole, that is Wilson's, else a
    percentile bootstrap over seeds and worlds (see `clustered_mean`).

    Args:
        values: success rate per seed, or order of the episodes, and world, shape (seeds, worlds).

    Raises:
        ValueError: ``values`` is not a table, or empty.
    """
    if values.ndim == 2 and len(values) == 1 and values.size and np.isin(values, (0, 1)).all():
        return wilson(int(values.sum()), values.size)
    return clustered_mean(values, bounds=RATE)


def paired_difference(first: np.ndarray, second: np.ndarray) -> Interval:
    """Return the mean of ``first - second`` over worlds, with its interval.

    Where each world was won or lost as a whole, that is Newcombe's interval for paired proportions
    (see `newcombe`), else a percentile bootstrap over worlds.

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
    if np.isin(first, (0, 1)).all() and np.isin(second, (0, 1)).all():
        won, lost = first == 1, second == 1
        both, neither = int((won & lost).sum()), int((~won & ~lost).sum())
        return newcombe(both, int((won & ~lost).sum()), int((~won & lost).sum()), neither)
    return clustered_mean(first.astype(np.float64)[None] - second, bounds=GAIN)


def newcombe(both: int, first: int, second: int, neither: int) -> Interval:
    """Return the interval of the difference of two paired proportions.

    Method 10 of Newcombe (1998), Improved confidence intervals for the difference between binomial
    proportions based on paired data, Statistics in Medicine 17, 2635-2650. With p1, p2 the
    proportions, l and u their Wilson limits, and phi their correlation, continuity-corrected where
    it is positive, the interval of p1 - p2 goes from
    p1 - p2 - sqrt((p1-l1)² - 2 phi (p1-l1)(u2-p2) + (u2-p2)²) to
    p1 - p2 + sqrt((u1-p1)² - 2 phi (u1-p1)(p2-l2) + (p2-l2)²).

    Args:
        both: pairs of which both are successes.
        first: pairs of which only the first is one.
        second: pairs of which only the second is one.
        neither: all other pairs.
    """
    n = both + first + second + neither
    one, two = wilson(both + first, n), wilson(both + second, n)
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    product = both * neither - first * second
    if product > 0:
        product = max(product - n / 2, 0.0)
    phi = product / math.sqrt(margins) if margins else 0.0

    def distance(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    mean = one.mean - two.mean
    low = mean - distance(one.mean - one.low, two.high - two.mean)
    high = mean + distance(one.high - one.mean, two.mean - two.low)
    return Interval(mean=mean, low=max(-1.0, low), high=min(1.0, high))


def clustered_mean(
    values: np.ndarray,
    *,
    samples: int = SAMPLES,
    bounds: tuple[float, float] | None = None,
) -> Interval:
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
        bounds: `RATE` for success rates, `GAIN` for differences of them; where all values are
            equal, they have the interval of as many episodes as there are worlds. Without it, such
            values have an interval of no width.

    Raises:
        ValueError: ``values`` is not a table, or empty.
    """
    if values.ndim != 2 or values.size == 0:
        raise ValueError(
            f"Expected a table of seeds and worlds with something in it, got shape {values.shape}"
        )
    if bounds is not None and np.ptp(values) == 0:
        return _constant(float(values.flat[0]), values.shape[1], bounds)
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
    if np.ptp(first) == np.ptp(second) == 0:
        return _constant(float(first.flat[0] - second.flat[0]), first.shape[1], GAIN)
    one, other = _resampled(first, second)
    return _percentiles(float(first.mean() - second.mean()), one - other)


def over_tasks(tables: Sequence[np.ndarray], bounds: tuple[float, float] | None = None) -> Interval:
    """Return the mean over tasks, each counted alike, with a percentile bootstrap.

    The worlds of each task are drawn apart.

    Args:
        tables: for each task a value per world, or a paired difference of two, shape (worlds,).
        bounds: as in `clustered_mean`.

    Raises:
        ValueError: there is no task, or one without worlds.
    """
    if not tables or not all(len(table) for table in tables):
        raise ValueError(f"Expected tasks with worlds, got {[len(table) for table in tables]}")
    if bounds is not None and all(np.ptp(table) == 0 for table in tables):
        return independent_mean([_constant(float(t[0]), len(t), bounds) for t in tables])
    rng = np.random.default_rng(SEED)
    drawn = [rng.choice(table, size=(SAMPLES, len(table))).mean(axis=1) for table in tables]
    mean = float(np.mean([table.mean() for table in tables]))
    return _percentiles(mean, np.mean(drawn, axis=0))


def independent_mean(parts: Sequence[Interval]) -> Interval:
    """Return the mean of independent estimates, each counted alike.

    The distances to their limits add up in squares, as in `newcombe`.
    """
    n = len(parts)
    mean = sum(one.mean for one in parts) / n
    below = math.hypot(*(one.mean - one.low for one in parts)) / n
    above = math.hypot(*(one.high - one.mean for one in parts)) / n
    return Interval(mean=mean, low=mean - below, high=mean + above)


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


def _constant(value: float, worlds: int, bounds: tuple[float, float]) -> Interval:
    """Return the interval of a value that all worlds agree on.

    It is as wide as Wilson's for no success in ``worlds`` episodes, and for a difference other than
    0 as two of them together, which is Newcombe's of all against none.
    """
    half = Z * Z / (worlds + Z * Z)
    if bounds == GAIN and value != 0:
        half *= math.sqrt(2)
    low, high = bounds
    return Interval(mean=value, low=max(low, value - half), high=min(high, value + half))
