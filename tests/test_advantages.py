"""Advantages and weights against hand-worked numbers, and the invariants of equations 3, 4, 5 and
7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiential.training.advantages import (
    batch_advantages,
    cell_advantages,
    split_weights,
    training_count_weights,
)

ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=40,
)


def columns(rows: list[tuple[float, int, bool]]) -> tuple[Any, Any, Any]:
    """Rewards, groups and conditions of the rows."""
    rewards, group, guided = zip(*rows, strict=True)
    return np.array(rewards), np.array(group), np.array(guided)


def test_equation_5_by_hand() -> None:
    # guided cell of group 0: rewards 1 1 0 0, mean 1/2, std 1/2; free cell: 1 0 0 0, mean 1/4, std
    # sqrt(3)/4
    rewards = [1, 1, 0, 0, 1, 0, 0, 0]
    guided = [True] * 4 + [False] * 4
    found = cell_advantages(rewards, [0] * 8, guided)
    third = 1 / np.sqrt(3)
    np.testing.assert_allclose(found, [1, 1, -1, -1, np.sqrt(3), -third, -third, -third], rtol=1e-6)
    assert found.dtype == np.float32 and found.shape == (8,)


def test_pooled_advantages_by_hand() -> None:
    # group 7: 1 0 0 0 pooled, mean 1/4, std sqrt(3)/4; group 2: 3 5, mean 4, std 1
    found = cell_advantages([1, 3, 0, 5, 0, 0], [7, 2, 7, 2, 7, 7], [False] * 6)
    third = 1 / np.sqrt(3)
    np.testing.assert_allclose(found, [np.sqrt(3), -1, -third, 1, -third, -third], rtol=1e-6)


def test_a_reward_gap_between_conditions_biases_pooled_advantages_and_not_split_ones() -> None:
    rewards, group, guided = [1, 1, 1, 0, 1, 0, 0, 0], [0] * 8, [True] * 4 + [False] * 4
    assert cell_advantages(rewards, group, [False] * 8)[:4].sum() > 1
    np.testing.assert_allclose(cell_advantages(rewards, group, guided)[:4].sum(), 0, atol=1e-6)


def test_a_lone_member_and_a_constant_cell_give_zero() -> None:
    found = cell_advantages([1, 0, 0.3, 0.3, 0.3], [0, 0, 1, 1, 1], [True, False, True, True, True])
    np.testing.assert_array_equal(found, np.zeros(5, np.float32))


@settings(deadline=None)
@given(ROWS)
def test_every_cell_has_mean_zero_and_unit_variance_or_is_all_zero(
    rows: list[tuple[float, int, bool]],
) -> None:
    rewards, group, guided = columns(rows)
    found = cell_advantages(rewards, group, guided).astype(np.float64)
    for g in set(group):
        for c in (True, False):
            cell, outcomes = (
                found[(group == g) & (guided == c)],
                set(rewards[(group == g) & (guided == c)]),
            )
            if len(outcomes) > 1:
                assert abs(cell.mean()) < 1e-5 and abs(cell.var() - 1) < 1e-4
            else:
                assert not cell.any()


@settings(deadline=None)
@given(ROWS, st.randoms())
def test_order_scale_shift_and_names_of_groups_do_not_matter(
    rows: list[tuple[float, int, bool]], random: Any
) -> None:
    rewards, group, guided = columns(rows)
    base = cell_advantages(rewards, group, guided)
    order = random.sample(range(len(rows)), len(rows))
    np.testing.assert_allclose(
        cell_advantages(rewards[order], group[order], guided[order]), base[order], atol=1e-6
    )
    np.testing.assert_allclose(cell_advantages(3 * rewards - 7, group, guided), base, atol=1e-5)
    np.testing.assert_allclose(
        cell_advantages(rewards, [f"task {g}" for g in group], guided), base, atol=1e-6
    )


def test_weights_by_hand() -> None:
    # group 0: one guided, three free -> 1/2 * 1/2 * {1, 1/3}; group 1: free only, two members ->
    # 1/2 * 1/2 each
    found = split_weights([0, 0, 0, 0, 1, 1], [True, False, False, False, False, False])
    np.testing.assert_allclose(found, [1 / 4, 1 / 12, 1 / 12, 1 / 12, 1 / 4, 1 / 4], rtol=1e-6)


@settings(deadline=None)
@given(ROWS)
def test_weights_sum_to_one_groups_and_halves_count_equally(
    rows: list[tuple[float, int, bool]],
) -> None:
    _, group, guided = columns(rows)
    weights = split_weights(group, guided).astype(np.float64)
    assert abs(weights.sum() - 1) < 1e-5 and (weights > 0).all()
    for g in set(group):
        members = group == g
        assert abs(weights[members].sum() - 1 / len(set(group))) < 1e-5
        if len(set(guided[members])) == 2:
            np.testing.assert_allclose(
                weights[members & guided].sum(), weights[members & ~guided].sum(), rtol=1e-5
            )


def test_equation_5_as_a_whole_equals_its_double_sum() -> None:
    rng = np.random.default_rng(0)
    term, guided = rng.normal(size=6), np.array([True, True, False, False, False, False])
    direct = 0.5 * (term[:2].sum() / 2 + term[2:].sum() / 4)
    np.testing.assert_allclose(
        (split_weights(np.zeros(6, int), guided) * term).sum(), direct, rtol=1e-5
    )


def test_batch_advantages_subtract_the_mean_and_keep_the_scale() -> None:
    np.testing.assert_allclose(batch_advantages([1, -1, 0.5, 0.5]), [0.75, -1.25, 0.25, 0.25])
    # Adding these one by one ends beside 8 r; numpy's pairwise sum is exact here.
    assert not batch_advantages([0.7] * 8).any()


def test_equation_7_by_hand() -> None:
    # never trained; trained this step; just before the window ends; out of it once and three times
    found = training_count_weights(10, [10, 10, 8, 7, 2], [0, 1, 1, 1, 3], cooldown=3, decay=0.5)
    np.testing.assert_allclose(found, [1, 0, 0, 2**-0.5, 0.5], rtol=1e-6)


@settings(deadline=None)
@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=10),
    st.integers(0, 5),
    st.floats(0, 3),
)
def test_weights_of_equation_7_fall_with_the_count_and_stay_in_the_unit_interval(
    step: int, past: Any, cooldown: int, decay: float
) -> None:
    last, counts = [p[0] for p in past], [p[1] for p in past]
    found = training_count_weights(step, last, counts, cooldown=cooldown, decay=decay)
    assert ((found >= 0) & (found <= 1)).all()
    more = training_count_weights(
        step, last, [c + 1 for c in counts], cooldown=cooldown, decay=decay
    )
    assert (more <= found + 1e-7).all()
    free = training_count_weights(step, last, counts, cooldown=0, decay=0.0)
    assert (free == 1).all() or any(t > step for t in last)


def test_nothing_in_gives_nothing_out() -> None:
    for found in (
        cell_advantages([], [], []),
        split_weights([], []),
        batch_advantages([]),
        training_count_weights(0, [], [], cooldown=1, decay=1.0),
    ):
        assert found.shape == (0,) and found.dtype == np.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cell_advantages([1, 2], [0], [True, False]), r"shape \(2,\)"),
        (lambda: cell_advantages([1, 2], [0, 0], [True]), r"shape \(2,\)"),
        (lambda: cell_advantages([1, float("nan")], [0, 0], [True, True]), "finite"),
        (lambda: batch_advantages([[1.0]]), "finite rewards of shape"),
        (lambda: training_count_weights(0, [1], [1, 2], cooldown=0, decay=0), "one shape"),
        (lambda: training_count_weights(0, [1], [1], cooldown=-1, decay=0), "at least 0"),
        (lambda: training_count_weights(0, [1], [-1], cooldown=0, decay=0), "at least 0"),
    ],
)
def test_wrong_arguments_say_what_was_expected(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_a_constant_cell_of_any_size_and_height_is_zero(height: float, members: int) -> None:
    assume(abs(height) > 0)
    assert not cell_advantages([height] * members, [0] * members, [True] * members).any()
