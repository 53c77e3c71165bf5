"""Step-wise credit: an advantage per turn, among the members that got so far."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiential.config import ActorSettings
from experiential.rollout import Episode, Job, Task
from experiential.training.advantages import cell_advantages, turn_advantages
from experiential.training.samples import actor_samples, uninformative
from experiential.types import Condition, Generation, Trajectory, Turn


def test_advantages_of_turns_by_hand() -> None:
    # returns with discount 1/2: [0 + .5, 1], [0, 0, 0] and [2]; turn 0: .5 0 2, mean 5/6; turn 1: 1
    # 0; turn 2: 0 alone
    found = turn_advantages(
        [[0, 1], [0, 0, 0], [2]], [7, 7, 7], [False] * 3, discount=0.5, estimator="dr_grpo"
    )
    np.testing.assert_allclose(found[0], [0.5 - 5 / 6, 0.5], rtol=1e-6)
    np.testing.assert_allclose(found[1], [-5 / 6, -0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(found[2], [2 - 5 / 6], rtol=1e-6)
    first, second = turn_advantages([[0.0], [0.5]], [7, 7], [False] * 2, eps=0.25)
    assert not first.any() and not second.any(), "a spread up to eps counts as none"


def test_groups_and_conditions_are_kept_apart_at_every_turn() -> None:
    found = turn_advantages(
        [[1], [0], [5], [3], [9]],
        ["a", "a", "a", "a", "b"],
        [True, True, False, False, True],
        estimator="dr_grpo",
    )
    assert [row.tolist() for row in found] == [[0.5], [-0.5], [1], [-1], [0]]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from([0.0, 1.0]), st.integers(1, 4)),
        max_size=12,
    )
)
def test_with_one_reward_at_the_end_the_first_turn_has_the_advantage_of_the_trajectory(
    rows: list[tuple[int, bool, float, int]],
) -> None:
    group, guided = [r[0] for r in rows], [r[1] for r in rows]
    rewards = [[0.0] * (turns - 1) + [reward] for _, _, reward, turns in rows]
    found = turn_advantages(rewards, group, guided)
    whole = cell_advantages([sum(r) for r in rewards], group, guided)
    np.testing.assert_allclose([row[0] for row in found], whole, atol=1e-6)
    for turn in range(4):
        for name in set(zip(group, guided, strict=True)):
            members = [
                row[turn]
                for row, key in zip(found, zip(group, guided, strict=True), strict=True)
                if key == name and len(row) > turn
            ]
            assert abs(sum(members)) < 1e-4


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match="shape \\(1,\\), got \\(2,\\)"):
        turn_advantages([[1.0]], ["a", "b"], [True])


def episode(
    rewards: list[float], *, asked: tuple[bool, ...] = (), group: str = "a", attempt: int = 1
) -> Episode:
    turns = tuple(Turn(observation="o", action="a", reward=r) for r in rewards)
    count = len(asked) or len(rewards)
    made = tuple(
        Generation(text="x", prompt_ids=(1, 2 + i), response_ids=(3,), logprobs=(-0.5,))
        for i in range(count)
    )
    told = Trajectory(
        task="t", group=group, condition=Condition.FREE, turns=turns, reward=sum(rewards)
    )
    return Episode(
        told, made, asked=asked, job=Job(Task(0, group), Condition.FREE, 0, attempt=attempt)
    )


def test_every_response_is_trained_on_with_the_advantage_of_its_turn() -> None:
    settings = ActorSettings(advantage="pooled", credit="turn", estimator="dr_grpo")
    samples = actor_samples([episode([1.0, 0.0]), episode([0.0, 1.0])], settings)
    # turn 0: returns 1 and 1; turn 1: 0 and 1
    assert [s.advantages for s in samples] == [(0.0,), (-0.5,), (0.0,), (0.5,)]


def test_a_question_to_the_bank_stands_in_for_a_turn_without_reward() -> None:
    settings = ActorSettings(advantage="pooled", credit="turn", estimator="dr_grpo")
    asking = episode([1.0], asked=(True, False))
    samples = actor_samples([asking, episode([0.0, 0.0])], settings)
    assert [s.advantages for s in samples] == [(0.5,), (0.5,), (-0.5,), (-0.5,)]
    assert asking.acts() == [asking.generations[1]]


def test_what_an_episode_is_worth_beyond_its_rewards_comes_at_the_end() -> None:
    settings = ActorSettings(advantage="pooled", credit="turn", estimator="dr_grpo")
    first, second = episode([0.0, 0.0]), episode([0.0, 0.0])
    samples = actor_samples([first, second], settings, lambda e: 1.0 if e is first else 0.0)
    assert [s.advantages for s in samples] == [(0.5,), (0.5,), (-0.5,), (-0.5,)]


def test_second_attempts_are_compared_with_second_attempts() -> None:
    settings = ActorSettings(advantage="pooled", estimator="dr_grpo")
    members = [episode([0.0]), episode([1.0]), episode([1.0], attempt=2), episode([1.0], attempt=2)]
    assert [s.advantages for s in actor_samples(members, settings)] == [(-0.5,), (0.5,)]


def test_what_teaches_nothing_is_counted() -> None:
    empty = Episode(Trajectory(task="t", group="a", condition=Condition.FREE), ())
    failed = Episode(
        Trajectory(task="t", group="a", condition=Condition.FREE, error="env: gone"), ()
    )
    members = [
        episode([1.0], group="one"),
        episode([1.0], group="b"),
        episode([1.0], group="b"),
        empty,
        failed,
    ]
    assert uninformative(members, ActorSettings()) == {"empty": 1, "lone": 1, "constant": 1}
    assert uninformative([episode([1.0]), episode([0.0])], ActorSettings()) == {}
    assert actor_samples(members, ActorSettings()) == []
