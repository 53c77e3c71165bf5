"""Credit of section 3.3: plus or minus one per use, averaged per experience version."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.training.advantages import outcome, use_reward
from experiential.training.extractor_track import ExtractorBuffer, counted_uses
from experiential.types import Condition, Generation, Trajectory, Use


def use(entry: str, version: int = 1, episode: str = "") -> Use:
    """A use of one entry version."""
    return Use(experience_id=entry, experience_version=version, episode=episode)


def test_a_use_is_worth_plus_or_minus_one() -> None:
    assert (use_reward(True), use_reward(False)) == (1, -1)


def test_the_outcome_is_success_not_a_fraction_of_it() -> None:
    assert outcome(Trajectory(task="t", success=True, reward=0.4)) == 1.0
    assert outcome(Trajectory(task="t", success=False, reward=0.9)) == 0.0


def mean_rewards(rows: Iterable[tuple[Use, bool]]) -> dict[tuple[str, int], float]:
    """Credit each use to its entry version in the extractor's buffer; return the means."""
    buffer = ExtractorBuffer(99, batch_size=1, max_staleness=9, cooldown=0, decay=0.0)
    for one, success in rows:
        key = one.experience_id, one.experience_version
        wrote = Generation(id=str(key), text="")
        buffer.add_use(key, use_reward(success), wrote, None)
    taken = [sample for _ in range(len(buffer)) for sample in buffer.take(0, 0)]
    return {sample.key: sample.reward for sample in taken if sample.key is not None}


def test_rewards_are_averaged_per_version_by_hand() -> None:
    uses = [
        (use("a"), True),
        (use("a"), True),
        (use("a"), False),
        (use("a", 2), False),
        (use("b"), True),
    ]
    assert mean_rewards(uses) == pytest.approx({("a", 1): 1 / 3, ("a", 2): -1.0, ("b", 1): 1.0})


def test_an_entry_met_twice_in_one_episode_counts_once_for_it() -> None:
    episodes = [
        Trajectory(task="t", success=True, uses=(use("a"), use("a"), use("b"))),
        Trajectory(task="t", success=False, uses=(use("a"),)),
    ]
    uses = [(one, t.success is True) for t in episodes for one in counted_uses(t)]
    assert mean_rewards(uses) == {("a", 1): 0.0, ("b", 1): 1.0}


def test_failed_and_experience_free_episodes_give_no_credit() -> None:
    uses = (use("a"),)
    trajectories = [
        Trajectory(task="t", success=True, uses=uses),
        Trajectory(task="t", success=False, uses=uses, error="backend: gone"),
        Trajectory(task="t", success=False, uses=uses, condition=Condition.FREE),
    ]
    assert [counted_uses(t) for t in trajectories] == [[uses[0]], [], []]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.booleans()), max_size=30))
def test_a_mean_is_the_share_of_successes_stretched_to_plus_minus_one(
    rows: list[tuple[str, int, bool]],
) -> None:
    rewards = mean_rewards((use(entry, version), success) for entry, version, success in rows)
    assert set(rewards) == {(entry, version) for entry, version, _ in rows}
    for key, mean in rewards.items():
        wins = [success for entry, version, success in rows if (entry, version) == key]
        assert mean == pytest.approx(2 * sum(wins) / len(wins) - 1)
