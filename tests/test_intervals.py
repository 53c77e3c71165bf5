"""Intervals by hand, and what must hold of any."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from experiential.evaluation.intervals import clustered_mean, paired_difference, unpaired_difference

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
