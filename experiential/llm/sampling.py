"""Draw one token per row and report the log-probability of exactly the distribution drawn from."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_tokens(
    scores: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """One index per row of ``softmax(scores / temperature)`` after top-k, then top-p, renormalised; by inverse CDF.

    A row depends on its own scores and its own uniform number only, hence not on what it is batched
    with.

    Args:
        scores: logits, shape (n, v), float32; ``-inf`` marks what a constraint forbids.
        temperature: shape (n,), float32; 0 takes the best index, and the log-probability reported
            is then the one at temperature 1 without truncation (a greedy choice has no density of
            its own).
        top_k: shape (n,), int64; 0 means no limit.
        top_p: shape (n,), float32; 1 means no limit.
        uniform: numbers in [0, 1), shape (n,), float64.

    Returns:
        indices, shape (n,), int64, and their log-probabilities in nats, shape (n,), float32.
    """
    greedy = temperature == 0
    scaled = scores / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    truncated = ((top_k > 0) | (top_p < 1)) & ~greedy
    if bool(truncated.any()):
        scaled[truncated] = _truncate(scaled[truncated], top_k[truncated], top_p[truncated])
    logprobs = torch.log_softmax(scaled, dim=-1)
    mass = logprobs.double().exp().cumsum(dim=-1)
    target = (uniform * mass[:, -1]).unsqueeze(1)
    drawn = torch.searchsorted(mass, target, right=True).squeeze(1).clamp(max=scores.shape[1] - 1)
    index = torch.where(greedy, scores.argmax(dim=-1), drawn) if bool(greedy.any()) else drawn
    return index, logprobs.gather(1, index.unsqueeze(1)).squeeze(1)


def _truncate(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set to ``-inf`` what lies outside the top k, and then outside the smallest set with mass top_p; ties go to the lower index."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    limit = torch.where(top_k > 0, top_k, scores.shape[1]).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= limit, -torch.inf)
    probability = torch.softmax(ordered, dim=-1)
    before = probability.cumsum(dim=-1) - probability
    ordered = ordered.masked_fill((before >= top_p.unsqueeze(1)) & (rank > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ordered)
