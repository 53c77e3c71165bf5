"""Packing: equal prefixes are computed once, nothing is lost, and each token sees its own path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.rank_balance import batch, compare
from experiential.training import attention
from experiential.training.packing import Row, common_beginning, deal, pack
from experiential.training.runtime import Sample

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=25)


def _sample(tokens: list[int]) -> Sample:
    return Sample(
        tokens=tuple(tokens), positions=(len(tokens) - 1,), logprobs=(0.0,), advantages=(1.0,)
    )


def dense(row: Row) -> torch.Tensor:
    """Whether token i sees token j: itself or earlier on one of its paths, shape (n, n)."""
    visible = torch.zeros(len(row.tokens), len(row.tokens), dtype=torch.bool)
    for path in row.paths:
        for depth, i in enumerate(path):
            visible[i, list(path[: depth + 1])] = True
    return visible


def rows(samples: list[Sample], limit: int, *, branching: bool = True) -> list[Row]:
    """The rows of one rank."""
    dealt = deal(samples, 1, limit=limit, branching=branching)
    return [pack(samples, chosen) for (chosen,) in dealt]


def test_equal_prompts_cost_one_row() -> None:
    samples = [_sample([1, 2, 3, 9]), _sample([1, 2, 3, 8]), _sample([1, 2, 3, 7])]
    (row,) = rows(samples, 100)
    assert row.tokens == (1, 2, 3)
    assert sorted(row.samples) == [0, 1, 2]


def test_a_turn_is_read_off_the_longer_conversation() -> None:
    samples = [_sample([1, 2, 3]), _sample([1, 2, 3, 4, 5]), _sample([1, 7, 3])]
    found = rows(samples, 100, branching=False)
    assert {r.tokens: sorted(r.samples) for r in found} == {(1, 2, 3, 4): [0, 1], (1, 7): [2]}


def test_members_of_a_group_share_their_prompt_where_rows_may_branch() -> None:
    prompt = list(range(150))
    group = [_sample([*prompt, *range(200 + 40 * k, 232 + 40 * k)]) for k in range(8)]
    (row,) = rows(group, 1000)
    assert len(row.tokens) == 150 + 8 * 31
    assert [len(r.tokens) for r in rows(group, 300)] == [150 + 4 * 31] * 2
    assert len(rows(group, 1000, branching=False)) == 8


@given(SEQUENCES, st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_every_sample_is_in_one_row_within_the_limit_and_has_its_own_path(
    sequences: list[list[int]], ranks: int, limit: int, branching: bool
) -> None:
    samples = [_sample(s) for s in sequences]
    dealt = deal(samples, ranks, limit=limit, branching=branching)
    assert all(len(chosen) == ranks and any(chosen) for chosen in dealt)
    found = [pack(samples, chosen) for each in dealt for chosen in each if chosen]
    assert sorted(i for r in found for i in r.samples) == list(range(len(samples)))
    for row in found:
        plain = all(path == tuple(range(len(path))) for path in row.paths)
        assert plain or (branching and len(row.tokens) <= limit)
        for index, path in zip(row.samples, row.paths, strict=True):
            assert tuple(row.tokens[i] for i in path) == samples[index].tokens[:-1]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("kind", "count"), [("episodes", 70), ("episodes", 40), ("turns", 70)])
def test_ranks_that_wait_for_each_other_at_every_row_lose_little(
    kind: str, count: int, ranks: int
) -> None:
    """Ideal is what one device forwards, divided by the ranks."""
    for seed in range(3):
        cost = compare(batch(kind, count, seed), ranks)
        assert 1 - 1e-9 <= cost["deal"] <= 1.15 and cost["robin"] > 1.3 and cost["blocks"] > 1.7
        assert cost["tokens"] < 1.1


def test_a_group_stays_on_one_rank_unless_balance_saves_more() -> None:
    def forwarded(prompt: int, response: int) -> int:
        """Tokens of three groups of four on two ranks."""
        samples = [
            _sample([1000 * g, *range(prompt - 1), 5000 + k, *range(response)])
            for g in range(3)
            for k in range(4)
        ]
        dealt = deal(samples, 2, limit=10**6)
        return sum(len(pack(samples, chosen).tokens) for each in dealt for chosen in each)

    assert forwarded(100, 1) == 3 * (100 + 4), "2 + 1 groups: the prompt is nearly all"
    assert 4 * 10 <= forwarded(10, 100) - 12 * 100 <= 6 * 10, "divided, for six responses each"


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])  # the second shares keys among queries
@given(sequences=SEQUENCES, queries=st.sampled_from([2, 3, 256]), kept=st.sampled_from([1, 8]))
def test_attention_and_its_gradients_are_those_of_a_dense_mask(
    heads: tuple[int, int], sequences: list[list[int]], queries: int, kept: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERIES", queries)
        patch.setattr(attention, "_KEPT", kept)
        row = pack([_sample(s) for s in sequences])
        layout = attention.layout(row, torch.device("cpu"), torch.float64)
        assert all(
            [int(layout.positions[0, i]) for i in path] == list(range(len(path)))
            for path in row.paths
        )
        torch.manual_seed(0)
        made = [
            torch.randn(1, h, len(row.tokens), 4, dtype=torch.float64, requires_grad=True)
            for h in (heads[0], heads[1], heads[1])
        ]
        packed, _ = attention.packed_attention(torch.nn.Module(), *made, None, layout=layout)
    plain = scaled_dot_product_attention(
        *made, attn_mask=dense(row), enable_gqa=heads[0] != heads[1]
    ).transpose(1, 2)
    assert torch.allclose(packed, plain, atol=1e-12)
    pull = torch.randn_like(plain)
    for a, b in zip(
        torch.autograd.grad(packed, made, pull), torch.autograd.grad(plain, made, pull), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-12)


def test_masks_grow_with_the_group_and_not_with_its_square() -> None:
    def elements(members: int) -> int:
        group = [_sample([*range(200), 500 + k, *range(600)]) for k in range(members)]
        row = pack(group)
        masks = attention.layout(row, torch.device("cpu"), torch.float32).masks
        return sum({id(m): m.numel() for m in masks if m is not None}.values())

    assert elements(16) == elements(4) < 10**6


def test_the_common_beginning_ends_before_what_a_trained_token_is_drawn_from() -> None:
    first, second = _sample([1, 2, 3, 4, 5, 9]), _sample([1, 2, 3, 6, 6, 7, 8])
    assert common_beginning([first, second]) == 3
    assert common_beginning([first, first]) == 4  # token 5 alone predicts the last
    assert common_beginning([first, second, _sample([7, 2, 3, 4])]) == 0
