"""What a use of an entry is worth beside the outcome: the actor's verdict, the gain over free
members, a bonus for certainty.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiential.config import BonusKind
from experiential.training.advantages import critic_reward, relative_rewards
from experiential.training.methods.entropy_bonus import entropy_bonus


@pytest.mark.parametrize(
    ("verdict", "outcome", "wanted"),
    [
        ("accept", 1, 2.0),
        ("accept", -1, 0.0),
        ("refine", 1, 1.5),
        ("refine", -1, -0.5),
        ("reject", 1, 1.0),
        ("reject", -1, -1.0),
    ],
)
def test_equation_8_by_hand(verdict: str, outcome: float, wanted: float) -> None:
    assert critic_reward(verdict, outcome) == wanted  # type: ignore[arg-type]


def test_no_accepted_failure_outweighs_a_refined_success_and_no_verdict_adds_nothing() -> None:
    assert critic_reward("accept", -1) < critic_reward("refine", 1)
    assert critic_reward(None, -1) == -1 and critic_reward(None, 1) == 1


def test_gains_over_the_free_members_of_the_group_by_hand() -> None:
    # group a: free members 1 and 0, mean 1/2; group b: free member 1; group c: nobody free
    outcomes = [1, 0, 1, 0, 0, 1, 1]
    group = ["a", "a", "a", "a", "b", "b", "c"]
    guided = [True, True, False, False, True, False, True]
    nan = math.nan
    np.testing.assert_allclose(
        relative_rewards(outcomes, group, guided), [0.5, -0.5, nan, nan, -1, nan, nan]
    )


def test_gains_need_lists_of_one_length() -> None:
    with pytest.raises(ValueError, match="one length, got"):
        relative_rewards([1.0], ["a", "b"], [True])


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("relative", 2 * 0.5),  # (3 - 1.5) / 3
        ("tanh", 2 * math.tanh(1.5)),
        ("sigmoid", 2 * (2 / (1 + math.exp(-1.5 / 0.5)) - 1)),
        ("asymmetric", 2 * 1.0),  # 1.5 clipped to 1
        ("log", 2 * math.log(2.5)),
    ],
)
def test_bonuses_of_a_gain_by_hand(kind: BonusKind, wanted: float) -> None:
    assert entropy_bonus(
        3.0, 1.5, kind, weight=2.0, low=-0.25, high=1.0, temperature=0.5
    ) == pytest.approx(wanted)


def test_a_loss_costs_and_asymmetric_clipping_makes_it_cost_less() -> None:
    lost = {
        kind: entropy_bonus(1.0, 3.0, kind, weight=1.0, low=-0.25, high=1.0)
        for kind in ("relative", "tanh", "asymmetric", "log")
    }
    assert lost == pytest.approx(
        {"relative": -0.25, "tanh": math.tanh(-2), "asymmetric": -0.25, "log": -math.log(3)}
    )


@given(
    before=st.floats(0, 50),
    after=st.floats(0, 50),
    kind=st.sampled_from(["relative", "tanh", "sigmoid", "asymmetric", "log"]),
    weight=st.floats(0.01, 10),
)
def test_a_bonus_has_the_sign_of_the_gain_and_is_bounded_where_it_says_so(
    before: float, after: float, kind: BonusKind, weight: float
) -> None:
    bonus = entropy_bonus(before, after, kind, weight=weight)
    assert bonus * (before - after) >= 0 or before == 0
    if kind != "log":
        assert abs(bonus) <= weight * (1 + 1e-9)


def test_bad_entropies_and_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="finite entropies"):
        entropy_bonus(math.nan, 1.0, "tanh", weight=1.0)
    with pytest.raises(ValueError, match="relative, tanh, sigmoid, asymmetric, log, got 'cube'"):
        entropy_bonus(2.0, 1.0, "cube", weight=1.0)  # type: ignore[arg-type]
