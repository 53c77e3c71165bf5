"""Intervals by hand, and what must hold of any."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from experiential.evaluation.intervals import (
    GAIN,
    RATE,
    Interval,
    clustered_mean,
    independent_mean,
    newcombe,
    over_tasks,
    paired_difference,
    unpaired_difference,
)

TABLES = arrays(
    np.float64,
    st.tuples(st.integers(1, 5), st.integers(1, 8)),
    elements=st.integers(-4, 4).map(lambda n: n / 4),
)


def exact_quantiles(values: np.ndarray) -> tuple[float, float]:
    """The 2.5 and 97.5 % quantiles of the bootstrap's own distribution, every resample counted."""
    seeds, worlds = values.shape
    means = [
        values[np.ix_(s, w)].mean()
        for s in itertools.product(range(seeds), repeat=seeds)
        for w in itertools.product(range(worlds), repeat=worlds)
    ]
    low, high = np.quantile(means, (0.025, 0.975), method="inverted_cdf")
    return float(low), float(high)


def test_by_hand_two_seeds_and_two_worlds() -> None:
    """Seed 1 gains (1, 1), seed 2 (0, 0): a resample is 0, 1/2 or 1 with 1/4, 1/2, 1/4, whichever
    worlds are drawn.
    """
    found = clustered_mean(np.array([[1.0, 1.0], [0.0, 0.0]]))
    assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)


def test_every_resample_counted() -> None:
    values = np.array([[1.0, 0.0, 0.5], [0.5, 0.25, 0.0]])
    found = clustered_mean(values, samples=40_000)
    assert (found.low, found.high) == pytest.approx(exact_quantiles(values), abs=0.03)


def test_one_seed_is_the_bootstrap_over_worlds() -> None:
    a, b = np.array([1.0, 0.5, 0.0, 1.0]), np.array([0.0, 0.5, 0.0, 0.5])
    assert paired_difference(a, b) == clustered_mean((a - b)[None])


def test_worlds_are_drawn_for_all_seeds_together() -> None:
    """A world that is hard for every seed stays uncertain however many seeds there are; drawn apart
    for each seed it would not.
    """
    values = np.tile([1.0, 0.0], (50, 1))
    found = clustered_mean(values)
    assert (found.low, found.high) == (0.0, 1.0)


def test_spread_between_seeds_widens_the_interval() -> None:
    calm, wild = np.full((5, 40), 0.5), np.repeat([[0.1], [0.3], [0.5], [0.7], [0.9]], 40, axis=1)
    assert clustered_mean(calm).low == clustered_mean(calm).high == 0.5
    assert clustered_mean(wild).high - clustered_mean(wild).low > 0.3


@settings(max_examples=40, deadline=None)
@given(TABLES)
def test_properties(values: np.ndarray) -> None:
    found = clustered_mean(values, samples=300)
    assert (
        found.low <= found.high
        and values.min() - 1e-9 <= found.low
        and found.high <= values.max() + 1e-9
    )
    assert found.mean == pytest.approx(values.mean())
    shifted, turned = (
        clustered_mean(values + 2.0, samples=300),
        clustered_mean(-values, samples=300),
    )
    assert (shifted.low, shifted.high) == pytest.approx((found.low + 2, found.high + 2))
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))
    assert clustered_mean(values, samples=300) == found


def test_unpaired_seeds_on_the_same_worlds() -> None:
    """What worlds have in common cancels; seeds do not."""
    worlds = np.array([0.0, 0.25, 0.5, 0.75])
    found = unpaired_difference(np.tile(worlds + 0.25, (3, 1)), np.tile(worlds, (2, 1)))
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    spread = unpaired_difference(np.array([[0.0, 0.0], [1.0, 1.0]]), np.zeros((1, 2)))
    assert (spread.mean, spread.low, spread.high) == (0.5, 0.0, 1.0)


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((0, 3)), np.zeros((2, 0))])
def test_what_is_no_table_is_refused(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match="Expected a table"):
        clustered_mean(values)
    with pytest.raises(ValueError, match="Expected two tables"):
        unpaired_difference(values, np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        # Newcombe (1998), Statistics in Medicine 17, 873-890, table II, method 10, of samples that
        # are not paired: the same formula where phi is 0, by a margin of 0 or the correction.
        ((0, 10, 0, 0), 0.6075, 1.0),  # 10/10 - 0/10
        ((3, 6, 0, 1), 0.1705, 0.8090),  # 9/10 - 3/10; ad - bc = 3 < n/2
        # By hand: n = 8, u = z²/(8 + z²) = 3.84146/11.84146
        ((0, 0, 0, 8), -0.3244, 0.3244),
        ((8, 0, 0, 0), -0.3244, 0.3244),
    ],
)
def test_newcombes_published_intervals(
    table: tuple[int, int, int, int], low: float, high: float
) -> None:
    found = newcombe(*table)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


def test_correlation_widens_or_narrows_a_paired_interval_as_by_hand() -> None:
    """p1 = 8/10 [0.4902, 0.9433], p2 = 4/10 [0.1682, 0.6873] with (both, first, second, neither).

    (2, 6, 2, 0): ad - bc = -12, phi = -12/sqrt(8*2*4*6) = -0.6124, so the lower distance is
    sqrt(0.3098² + 2*0.6124*0.3098*0.2873 + 0.2873²) = 0.5363.
    """
    found = newcombe(2, 6, 2, 0)
    assert (round(found.mean, 4), round(found.low, 4)) == (0.4, -0.1363)
    independent, together = newcombe(3, 5, 1, 1), newcombe(4, 4, 0, 2)
    assert found.low < independent.low < together.low


def test_worlds_that_agree_have_an_interval_of_as_many_episodes() -> None:
    none = np.zeros(8)
    for found in (
        paired_difference(none, none),
        clustered_mean(np.zeros((3, 8)), bounds=GAIN),
        unpaired_difference(np.zeros((2, 8)), np.zeros((3, 8))),
    ):
        assert (found.mean, round(found.low, 4), round(found.high, 4)) == (0.0, -0.3244, 0.3244)
    rate = clustered_mean(np.ones((2, 8)), bounds=RATE)
    assert (rate.mean, round(rate.low, 4), rate.high) == (1.0, 0.6756, 1.0)
    both = over_tasks([none, none], GAIN)  # two tasks: 0.3244/sqrt(2)
    assert (round(both.low, 4), round(both.high, 4)) == (-0.2294, 0.2294)
    half = paired_difference(np.full(8, 0.5), none)  # 0.3244 * sqrt(2) on both sides
    assert (half.mean, round(half.low, 4), round(half.high, 4)) == (0.5, 0.0412, 0.9588)


def test_the_mean_of_independent_estimates_adds_distances_in_squares() -> None:
    parts = [Interval(mean=0.6, low=0.3, high=0.8), Interval(mean=0.2, low=-0.2, high=0.2)]
    mean = independent_mean(parts)
    assert (mean.mean, mean.low, mean.high) == pytest.approx((0.4, 0.15, 0.5))
