"""The extractor's buffer: unique samples, mean rewards, eq. 7 for real, bounded age and size, exact
restore.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.errors import CheckpointError, ConfigError
from experiential.training.extractor_track import ExtractorBuffer
from experiential.types import Generation


def wrote(name: str, version: int = 0) -> Generation:
    """A response of the extractor at one version."""
    return Generation(
        id=name,
        text=name,
        prompt_ids=(1, 2),
        response_ids=(3,),
        logprobs=(-0.1 / 3,),
        policy_version=version,
    )


def buffer(capacity: int = 16, **kwargs: Any) -> ExtractorBuffer:
    """A buffer with batches of two, a short memory and a cooldown of one step."""
    return ExtractorBuffer(
        capacity, **({"batch_size": 2, "max_staleness": 3, "cooldown": 1, "decay": 0.5} | kwargs)
    )


def restored(original: ExtractorBuffer, **kwargs: Any) -> ExtractorBuffer:
    """Such a buffer with the state of this one, by way of JSON."""
    other = buffer(**kwargs)
    other.load_state_dict(json.loads(json.dumps(original.state_dict())))
    return other


def test_drafts_are_compared_with_those_of_their_episode_by_hand() -> None:
    store = buffer(batch_size=6, by_episode=True)
    for name, reward, about in (
        ("a", 1, "easy"), ("b", 1, "hard"), ("c", 1, "easy"), ("d", -1, "hard"), ("a", -1, "easy"),
        ("e", -1, "hard"), ("f", 1, "alone"),
    ):  # fmt: skip
        store.add_use((name, 1), reward, wrote(name), None, about)
    # easy: a has mean 0 of two uses and c 1, mean 1/2; hard: 1, -1 and -1, mean -1/3
    taken = {sample.key[0]: sample.advantage for sample in store.take(0, 0) if sample.key}
    expected = {"a": -1 / 2, "b": 4 / 3, "c": 1 / 2, "d": -2 / 3, "e": -2 / 3, "f": 0}
    assert taken == pytest.approx(expected)


def test_drafts_that_wrote_nothing_wait_until_one_of_their_episode_is_used_by_hand() -> None:
    options = {"batch_size": 3, "by_episode": True, "malformed_share": 0.5}
    store = buffer(**options)
    store.add_malformed(wrote("bad"), -1.0, "one")
    store.add_silent(wrote("silent"), 0.0, "one")
    store.add_silent(wrote("lone"), 0.0, "two")
    assert len(store) == 0 and store.next_batch(0, 0) == {}
    store.add_use(("a", 1), 0.4, wrote("a"), None, "one")
    store = restored(store, **options)
    # 0.4, -1 and 0, mean -0.2
    expected = {"a": 0.6, "bad": -0.8, "silent": 0.2}
    taken = store.take(0, 0)
    assert {one.generation.id: one.advantage for one in taken} == pytest.approx(expected)
    assert [one.key for one in taken if one.generation.id != "a"] == [None, None]
    store.add_use(("a", 1), -0.8, wrote("a"), None, "one")  # used again, all of them wait again
    # -0.8, -1 and 0, mean -0.6
    again = {one.generation.id: one.advantage for one in store.take(2, 0)}
    assert again == pytest.approx({"a": -0.2, "bad": -0.4, "silent": 0.6})


def test_a_batch_takes_all_that_waits_about_its_episodes() -> None:
    store = buffer(batch_size=2, by_episode=True)
    for name, about in (("a", "one"), ("b", "two"), ("c", "three"), ("d", "one"), ("e", "two")):
        store.add_use((name, 1), 1, wrote(name), None, about)
    assert [one.generation.id for one in store.take(0, 0)] == ["a", "b", "d", "e"]
    assert store.take(0, 0) == [] and len(store) == 1


def test_stale_drafts_that_wrote_nothing_do_not_come_again() -> None:
    store = buffer(batch_size=1, by_episode=True, max_staleness=1)
    store.add_silent(wrote("old", 0), 0.0, "one")
    store.take(0, 2)
    store.add_use(("a", 1), 1, wrote("a", 2), None, "one")
    assert [one.generation.id for one in store.take(0, 2)] == ["a"]


def test_one_sample_per_version_with_the_mean_reward_and_the_advantage_by_hand() -> None:
    store = buffer(batch_size=3)
    for step_rewards in (
        [("a", 1), ("b", -1)],
        [("a", 1), ("a", -1), ("c", -1)],
    ):  # two collection steps
        for name, reward in step_rewards:
            store.add_use((name, 1), reward, wrote(name), (2, 5))
    assert len(store) == 3
    batch = store.take(step=0, version=0)
    assert [(s.key, s.uses) for s in batch] == [(("a", 1), 3), (("b", 1), 1), (("c", 1), 1)]
    assert [s.reward for s in batch] == pytest.approx([1 / 3, -1, -1])
    mean = (1 / 3 - 2) / 3
    assert [s.advantage for s in batch] == pytest.approx([1 / 3 - mean, -1 - mean, -1 - mean])
    assert [s.weight for s in batch] == [1.0, 1.0, 1.0]
    assert (batch[0].span, batch[0].generation) == ((2, 5), wrote("a")) and len(store) == 0


def test_versions_of_one_entry_and_entries_of_one_response_are_separate_samples() -> None:
    store = buffer()
    response = wrote("r")
    store.add_use(("a", 1), 1, response, (0, 4))
    store.add_use(("a", 2), -1, response, (5, 9))
    assert [(s.key, s.span, s.reward) for s in store.take(0, 0)] == [
        (("a", 1), (0, 4), 1.0),
        (("a", 2), (5, 9), -1.0),
    ]


def test_nothing_is_taken_before_a_batch_is_full() -> None:
    store = buffer()
    store.add_use(("a", 1), 1, wrote("a"), None)
    assert not store.next_batch(0, 0) and store.take(0, 0) == [] and len(store) == 1
    store.add_use(("b", 1), 1, wrote("b"), None)
    assert store.next_batch(0, 0) and len(store.take(0, 0)) == 2


def test_a_malformed_response_is_a_sample_with_the_lowest_reward() -> None:
    store = buffer()
    store.add_use(("a", 1), 1, wrote("a"), (0, 1))
    store.add_malformed(wrote("bad"), -1.0)
    good, bad = store.take(0, 0)
    assert (bad.key, bad.span, bad.reward, bad.generation.id) == (None, None, -1.0, "bad")
    assert bad.advantage == -1.0 and good.advantage == 1.0 and "history" in store.state_dict()
    assert len(store.state_dict()["history"]) == 1, (
        "responses that never come back are not remembered"
    )


def test_training_counts_are_kept_over_takes_and_weigh_the_next_samples() -> None:
    store = buffer(max_staleness=100)
    weights = []
    for step in range(4):
        for name in "ab":
            store.add_use((name, 1), 1, wrote(name), None)
        weights.append([s.weight for s in store.take(step, version=step)])
    assert weights == [pytest.approx([w, w]) for w in (1.0, 2**-0.5, 3**-0.5, 0.5)]
    assert store.history["a", 1].count == 4 and ("never", 1) not in store.history


def test_a_cooling_sample_stays_and_fills_no_batch() -> None:
    store = buffer(cooldown=2, max_staleness=100)
    for name in "ab":
        store.add_use((name, 1), 1, wrote(name), None)
    assert len(store.take(5, 0)) == 2
    store.add_use(("a", 1), -1, wrote("a"), None)
    store.add_use(("c", 1), 1, wrote("c"), None)
    assert not store.next_batch(6, 1) and store.take(6, 1) == [] and len(store) == 2
    store.add_use(("d", 1), 1, wrote("d"), None)
    assert [s.key for s in store.take(6, 1)] == [
        ("c", 1),
        ("d", 1),
    ], "the cooling sample is passed over"
    store.add_use(("e", 1), 1, wrote("e"), None)
    later = store.take(7, 2)
    assert [s.key for s in later] == [("a", 1), ("e", 1)] and [
        s.weight for s in later
    ] == pytest.approx([2**-0.5, 1.0])


def test_samples_of_a_policy_too_old_are_dropped_and_counted() -> None:
    store = buffer(max_staleness=3)
    for version, name in ((0, "old"), (1, "edge"), (4, "new")):
        store.add_use((name, 1), 1, wrote(name, version), None)
    assert store.next_batch(0, 4)
    assert [s.key for s in store.take(0, version=4)] == [("edge", 1), ("new", 1)]
    assert store.counters.stale == 1 and len(store) == 0


def test_being_ready_ignores_samples_that_would_be_dropped() -> None:
    store = buffer(max_staleness=0)
    for name in "ab":
        store.add_use((name, 1), 1, wrote(name), None)
    assert store.next_batch(0, 0) and not store.next_batch(0, 1)
    assert store.take(0, 1) == [] and store.counters.stale == 2


def test_a_full_buffer_gives_up_its_oldest_sample_and_says_so() -> None:
    store = buffer(capacity=3)
    for name in "abcd":
        store.add_use((name, 1), 1, wrote(name), None)
    store.add_use(("d", 1), 1, wrote("d"), None)
    assert len(store) == 3 and store.counters.evicted == 1
    assert [s.key for s in store.take(0, 0)] == [("b", 1), ("c", 1)]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("use"), st.sampled_from("abcdef"), st.sampled_from([-1, 1]), st.integers(0, 3)
        ),
        st.tuples(st.just("bad"), st.sampled_from("xyz"), st.just(-1), st.integers(0, 3)),
        st.tuples(st.just("silent"), st.sampled_from("uvw"), st.just(0), st.integers(0, 3)),
        st.tuples(st.just("take"), st.just(""), st.integers(0, 6), st.integers(0, 6)),
    ),
    max_size=40,
)


def play(store: ExtractorBuffer, actions: list[tuple[str, str, int, int]]) -> list[Any]:
    """Apply actions; what the takes returned."""
    taken: list[Any] = []
    for what, name, number, version in actions:
        if what == "use":
            store.add_use((name, 1), number, wrote(name, version), (0, 2))
        elif what == "bad":
            store.add_malformed(wrote(name, version), number)
        elif what == "silent":
            store.add_silent(wrote(name, version), number, "")
        else:
            ready = store.next_batch(number, version)
            taken.append(store.take(number, version))
            assert bool(taken[-1]) == bool(ready)
    return taken


@settings(deadline=None, max_examples=80)
@given(before=ACTIONS, after=ACTIONS, by_episode=st.booleans())
def test_a_buffer_restored_from_json_goes_on_exactly_as_the_original(
    before: Any, after: Any, by_episode: bool
) -> None:
    original = buffer(capacity=5, cooldown=2, by_episode=by_episode)
    play(original, before)
    other = restored(original, capacity=5, cooldown=2, by_episode=by_episode)
    assert other.state_dict() == original.state_dict()
    assert play(other, after) == play(original, after)
    assert other.counters == original.counters


@settings(deadline=None, max_examples=80)
@given(ACTIONS)
def test_batches_are_whole_centred_unique_and_every_sample_is_accounted_for(actions: Any) -> None:
    store = buffer(capacity=5)
    batches = [batch for batch in play(store, actions) if batch]
    for batch in batches:
        assert len(batch) == 2 and len({s.generation.id for s in batch}) == 2
        assert sum(s.advantage for s in batch) == pytest.approx(0, abs=1e-6)
        assert all(0 < s.weight <= 1 and -1 <= s.reward <= 1 for s in batch)
    assert store.counters.trained == 2 * len(batches) and len(store) <= 5


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"waiting": 3, "history": [], "counters": {}},
        {"waiting": [], "history": [], "counters": {"x": 1}},
    ],
)
def test_a_wrong_state_is_refused_and_leaves_the_buffer_as_it_was(state: dict[str, Any]) -> None:
    store = buffer()
    store.add_use(("a", 1), 1, wrote("a"), None)
    before = store.state_dict()
    with pytest.raises(CheckpointError, match="state of an extractor buffer"):
        store.load_state_dict(state)
    assert store.state_dict() == before


@pytest.mark.parametrize(
    "kwargs",
    [{"capacity": 1}, {"batch_size": 0}, {"max_staleness": -1}, {"cooldown": -1}, {"decay": -0.1}],
)
def test_a_wrong_argument_says_what_was_expected(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Expected"):
        buffer(**kwargs)


def test_malformed_responses_fill_their_share_of_a_batch_and_the_newest_are_taken() -> None:
    store = buffer(batch_size=4, malformed_share=0.25)
    for name in "vwxyz":
        store.add_malformed(wrote(name), -1.0)
    store.add_use(("a", 1), 1, wrote("a"), None)
    store.add_use(("b", 1), 1, wrote("b"), None)
    assert not store.next_batch(0, 0) and store.take(0, 0) == [], (
        "three more of them would leave no advantage"
    )
    store.add_use(("c", 1), -1, wrote("c"), None)
    batch = store.take(0, 0)
    assert sorted(s.generation.id for s in batch) == ["a", "b", "c", "z"]
    assert len(store) == 4


def test_a_share_outside_zero_to_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="malformed_share between 0 and 1"):
        buffer(malformed_share=1.5)
