"""Packing: equal prefixes are computed once, and nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from experiential.training.runtime import Sample
from experiential.training.samples import micro_batches, pack


def _sample(tokens: list[int]) -> Sample:
    return Sample(
        tokens=tuple(tokens), positions=(len(tokens) - 1,), logprobs=(0.0,), advantages=(1.0,)
    )


def test_equal_prompts_cost_one_row() -> None:
    rows = pack([_sample([1, 2, 3, 9]), _sample([1, 2, 3, 8]), _sample([1, 2, 3, 7])])
    assert [r.tokens for r in rows] == [(1, 2, 3)]
    assert sorted(rows[0].samples) == [0, 1, 2]


def test_a_turn_is_read_off_the_longer_conversation() -> None:
    rows = pack([_sample([1, 2, 3]), _sample([1, 2, 3, 4, 5]), _sample([1, 7, 3])])
    assert {r.tokens: sorted(r.samples) for r in rows} == {(1, 2, 3, 4): [0, 1], (1, 7): [2]}


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=8), min_size=1, max_size=30))
def test_every_sample_is_in_exactly_one_row_that_begins_with_its_inputs(
    sequences: list[list[int]],
) -> None:
    samples = [_sample(s) for s in sequences]
    rows = pack(samples)
    assert sorted(i for r in rows for i in r.samples) == list(range(len(samples)))
    assert all(
        r.tokens[: len(samples[i].tokens) - 1] == samples[i].tokens[:-1]
        for r in rows
        for i in r.samples
    )
    assert not any(a is not b and b.tokens[: len(a.tokens)] == a.tokens for a in rows for b in rows)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_micro_batches_keep_order_and_respect_the_limit(lengths: list[int], limit: int) -> None:
    rows = pack([_sample([i % 7, i, *range(n)]) for i, n in enumerate(lengths)])
    batches = list(micro_batches(rows, limit))
    assert [r for b in batches for r in b] == rows
    assert all(len(b) == 1 or max(len(r.tokens) for r in b) * len(b) <= limit for b in batches)


def test_members_of_a_group_share_their_prompt_where_rows_may_branch() -> None:
    prompt = list(range(150))
    group = [_sample([*prompt, *range(200 + 40 * k, 232 + 40 * k)]) for k in range(8)]
    (row,) = pack(group, parity=768)
    assert row.branched and len(row.tokens) == 150 + 8 * 31
    assert not any(r.branched for r in pack(group)) and len(pack(group)) == 8


def test_a_row_does_not_grow_to_where_attention_costs_more_than_sharing_saves() -> None:
    samples = [_sample([1, 2, 3, 4, *(10 * k + i % 7 for i in range(100))]) for k in range(1, 30)]
    assert len(pack(samples, parity=10**9)) == 1
    assert len(pack(samples, parity=100)) == len(samples)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=25),
    st.sampled_from([0, 8, 64, 10**9]),
)
def test_in_a_branched_row_every_token_sees_its_own_sequence_and_nothing_else(
    sequences: list[list[int]], parity: int
) -> None:
    samples = [_sample(s) for s in sequences]
    rows = pack(samples, parity=parity)
    assert sorted(i for r in rows for i in r.samples) == list(range(len(samples)))
    for row in rows:
        positions, visible = row.layout()
        for index, path in zip(row.samples, row.paths, strict=True):
            assert tuple(row.tokens[i] for i in path) == samples[index].tokens[:-1]
            assert [positions[i] for i in path] == list(range(len(path)))
            for depth, i in enumerate(path):
                assert set(visible[i].nonzero()[0]) == set(path[: depth + 1])
        assert row.branched == any(path != tuple(range(len(path))) for path in row.paths)
    assert sum(len(r.tokens) for r in rows) <= sum(len(r.tokens) for r in pack(samples))
