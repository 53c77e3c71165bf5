"""draw_tokens: the probability reported is that of the distribution drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.llm.engine import draw_tokens


def draw(
    scores: torch.Tensor, temperature: float, top_k: int, top_p: float, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    n = len(uniform)
    full = torch.full((n,), 1.0)
    return draw_tokens(
        scores.expand(n, -1), full * temperature, (full * top_k).long(), full * top_p, uniform
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 5),
    st.sampled_from([0.2, 0.9, 1.0]),
)
def test_reported_probabilities_sum_to_one_and_match_the_shares(
    scores: list[float], temperature: float, top_k: int, top_p: float
):
    """Over an even grid of uniforms each index is drawn in its reported share, and only within
    top-k and top-p.
    """
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    index, logprobs, _ = draw(torch.tensor(scores), temperature, top_k, top_p, grid)
    probability = {int(i): float(p.exp()) for i, p in zip(index, logprobs, strict=True)}
    for i, p in probability.items():
        assert float((index == i).double().mean()) == pytest.approx(p, abs=1e-3)
    assert sum(probability.values()) == pytest.approx(1.0, abs=0.01)
    assert not top_k or len(probability) <= top_k


def test_hand_worked_top_p():
    """Of (.5, .3, .2) top-p 0.7 keeps the first two, with probabilities 5/8 and 3/8."""
    scores = torch.tensor([0.5, 0.3, 0.2]).log()
    index, logprobs, kept = draw(scores, 1.0, 0, 0.7, torch.tensor([0.6, 0.7], dtype=torch.float64))
    assert index.tolist() == [0, 1]
    assert logprobs.exp().tolist() == pytest.approx([0.625, 0.375])
    assert [kept[row].tolist() for row in (0, 1)] == [[0, 1], [0, 1]]


def test_temperature_zero_takes_the_best_and_ignores_truncation():
    index, logprobs, _ = draw(
        torch.tensor([0.0, 1.0]), 0.0, 1, 0.1, torch.tensor([0.99], dtype=torch.float64)
    )
    assert index.tolist() == [1]
    assert logprobs.exp().item() == pytest.approx(0.7310586, abs=1e-6)


def test_forbidden_indices_are_never_drawn():
    scores = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    index, _, _ = draw(
        scores, 1.0, 0, 1.0, torch.tensor([0.0, 0.25, 0.5, 1 - 2**-53], dtype=torch.float64)
    )
    assert index.tolist() == [1, 1, 3, 3]
