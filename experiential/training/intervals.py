"""Intervals for what evaluation reports: Wilson for one success rate, a bootstrap over worlds for paired differences."""

from __future__ import annotations

import math

import numpy as np

from experiential.types import Record


class Interval(Record):
    """An estimate with its 95 % interval."""

    mean: float
    low: float
    high: float


def wilson(successes: int, episodes: int, *, z: float = 1.959964) -> Interval:
    """Wilson score interval of a success rate.

    With p = s/n: centre (p + z²/2n) / (1 + z²/n), half width z·sqrt(p(1-p)/n + z²/4n²) / (1 + z²/n).

    Raises:
        ValueError: ``successes`` is not between 0 and ``episodes``.
    """
    if not 0 <= successes <= episodes:
        raise ValueError(f"Expected successes between 0 and {episodes}, got {successes}")
    if episodes == 0:
        return Interval(mean=0.0, low=0.0, high=1.0)
    p, scale = successes / episodes, 1 + z * z / episodes
    centre = (p + z * z / (2 * episodes)) / scale
    half = z * math.sqrt(p * (1 - p) / episodes + z * z / (4 * episodes**2)) / scale
    return Interval(mean=p, low=max(0.0, centre - half), high=min(1.0, centre + half))


def paired_difference(first: np.ndarray, second: np.ndarray, *, samples: int = 10_000, seed: int = 0) -> Interval:
    """Mean of ``first - second`` with a percentile bootstrap over worlds.

    Args:
        first: success rate per world under one arm, shape (worlds,).
        second: the same worlds and seeds under the other arm, shape (worlds,).
        samples: bootstrap resamples.
        seed: of the resampling.

    Raises:
        ValueError: the shapes differ or are empty.
    """
    if first.shape != second.shape or first.ndim != 1 or first.size == 0:
        raise ValueError(f"Expected two equal one-dimensional shapes, got {first.shape} and {second.shape}")
    difference = first.astype(np.float64) - second
    picks = np.random.default_rng(seed).integers(difference.size, size=(samples, difference.size))
    low, high = np.quantile(difference[picks].mean(axis=1), (0.025, 0.975))
    return Interval(mean=float(difference.mean()), low=float(low), high=float(high))
