"""Baselines of the field: advantages and weights by hand, and the loss that they give."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiential.config import ActorSettings
from experiential.errors import ConfigError
from experiential.recipe import load_experiment
from experiential.rollout import Episode
from experiential.training.advantages import Cells, cell_advantages
from experiential.training.samples import actor_samples
from experiential.types import Condition, Generation, Trajectory

REWARDS, GROUP, FREE = [1.0, 0.0, 0.0, 0.0, 3.0, 1.0], [0, 0, 0, 0, 1, 1], [False] * 6


def test_advantages_by_hand() -> None:
    # group 0: 1 0 0 0, mean 1/4; group 1: 3 1, mean 2
    np.testing.assert_allclose(
        cell_advantages(REWARDS, GROUP, FREE, estimator="dr_grpo"),
        [0.75, -0.25, -0.25, -0.25, 1, -1],
    )
    # against the mean of the others: 1 - 0, 0 - 1/3 three times; 3 - 1, 1 - 3
    np.testing.assert_allclose(
        cell_advantages(REWARDS, GROUP, FREE, estimator="rloo"),
        [1, -1 / 3, -1 / 3, -1 / 3, 2, -2],
        rtol=1e-6,
    )
    # squares of what is centred: 9/16 + 3/16 + 2 = 11/4 over 6 members
    wanted = np.array([0.75, -0.25, -0.25, -0.25, 1, -1]) / np.sqrt(11 / 24)
    np.testing.assert_allclose(
        cell_advantages(REWARDS, GROUP, FREE, estimator="reinforce++"), wanted, rtol=1e-6
    )


def test_each_half_of_a_group_is_a_cell_of_its_own() -> None:
    guided = [True, True, False, False]
    np.testing.assert_allclose(
        cell_advantages([1, 0, 5, 1], [0] * 4, guided, estimator="rloo"), [1, -1, 4, -4]
    )


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match="grpo, dr_grpo, rloo, reinforce\\+\\+.*got 'gae'"):
        cell_advantages([1.0], [0], [False], estimator="gae")


def maxrl(cells: Cells) -> npt.NDArray[np.float64]:
    """Divide by the mean instead of the spread."""
    return cells.centred / cells.mean


def test_an_estimator_from_outside_is_found_by_module_and_attribute() -> None:
    # group 0: mean 1/4; group 1: mean 2; a constant cell stays 0 although maxrl divides by 0 there
    found = cell_advantages(
        [*REWARDS, 0.0, 0.0], [*GROUP, 2, 2], [False] * 8, estimator=f"{__name__}:maxrl"
    )
    np.testing.assert_allclose(found, [3, -1, -1, -1, 0.5, -0.5, 0, 0], rtol=1e-6)


def test_an_estimator_may_unpack_the_five_documented_fields() -> None:
    def less_the_mean(cells: Cells) -> npt.NDArray[np.float64]:
        rewards, _, _, mean, _ = cells
        return rewards - mean

    found = cell_advantages([1.0, 0.0], [0, 0], [False] * 2, estimator=less_the_mean)
    np.testing.assert_array_equal(found, [0.5, -0.5])


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.integers(0, 3)), min_size=1, max_size=30
    ),
    estimator=st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce++"]),
)
def test_every_cell_sums_to_zero_whatever_the_estimator(
    rows: list[tuple[float, int]], estimator: str
) -> None:
    rewards, group = (np.array(column) for column in zip(*rows, strict=True))
    found = cell_advantages(rewards, group, np.zeros(len(rows), bool), estimator=estimator)
    for label in set(group.tolist()):
        assert abs(found[group == label].sum()) < 1e-4
        if len(set(rewards[group == label].tolist())) == 1:
            assert not found[group == label].any()


def episodes() -> list[Episode]:
    """Group a: rewards 1 and 0, of 1 and 3 tokens; group b: both 1, of 2 tokens each."""
    made = {
        n: Generation(text="x" * n, prompt_ids=(1, 2), response_ids=(3,) * n, logprobs=(-0.5,) * n)
        for n in (1, 2, 3)
    }
    members = [("a", 1.0, 1), ("a", 0.0, 3), ("b", 1.0, 2), ("b", 1.0, 2)]
    return [
        Episode(Trajectory(task="t", group=g, condition=Condition.FREE, reward=r), (made[n],))
        for g, r, n in members
    ]


def weights(**settings: object) -> list[float]:
    samples = actor_samples(
        episodes(), ActorSettings.model_validate({"advantage": "pooled", **settings})
    )
    assert [len(s.positions) for s in samples] == [1, 3], "group b has nothing to teach"
    return [s.weight for s in samples]


def test_how_tokens_add_up() -> None:
    # a sequence's weight times the mean over its tokens: per token w / n
    assert weights() == pytest.approx([1 / 4, 1 / 4])
    # every one of the 8 tokens counts 1/8
    assert weights(aggregate="token") == pytest.approx([1 / 8, 3 / 8])
    # every token counts 1/4 of 1/10
    assert weights(aggregate="constant", options={"length_norm": 10}) == pytest.approx(
        [1 / 40, 3 / 40]
    )


def test_groups_that_teach_nothing_may_be_left_out_of_the_weights() -> None:
    assert weights(drop_constant=True) == pytest.approx([1 / 2, 1 / 2])
    assert weights(drop_constant=True, aggregate="token") == pytest.approx([1 / 4, 3 / 4])
    assert weights(drop_constant=True, advantage="split") == pytest.approx([1 / 2, 1 / 2])
    constant = [e for e in episodes() if e.trajectory.group == "b"]
    assert actor_samples(constant, ActorSettings(drop_constant=True, advantage="pooled")) == []


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        ("dr-grpo", ("dr_grpo", "constant", 0.2, False)),
        ("rloo", ("rloo", "sequence", 0.2, False)),
        ("reinforce-baseline", ("reinforce++", "token", 0.2, False)),
        ("dapo", ("grpo", "token", 0.28, True)),
    ],
)
def test_recipes_of_the_baselines(recipe: str, wanted: tuple[str, str, float, bool]) -> None:
    actor = load_experiment(recipe).actor
    assert (actor.estimator, actor.aggregate, actor.clip_high, actor.drop_constant) == wanted
    assert actor.guided == "none" and actor.advantage == "pooled"


def test_a_penalty_holds_episodes_without_an_advantage_too() -> None:
    samples = actor_samples(episodes(), ActorSettings(advantage="pooled", kl=0.1))
    assert [len(s.positions) for s in samples] == [1, 3, 2, 2] and [
        s.advantages[0] for s in samples[2:]
    ] == [0.0, 0.0]
