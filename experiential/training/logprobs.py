"""Compute log-probabilities from logits, for the losses.

Temperature and constraints are those at which the tokens were drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from experiential.llm.constraints import Schemas
from experiential.training.runtime import Sample

Measure = Callable[[torch.Tensor, Sequence[Sample], torch.Tensor | None], torch.Tensor]
"""Takes logits, samples and what was blocked, and gives one number per trained token."""


def token_logprobs(
    logits: torch.Tensor, members: Sequence[Sample], blocked: torch.Tensor | None
) -> torch.Tensor:
    """Compute the log-probability of every trained token under its temperature and constraint.

    Args:
        logits: float32, shape (n, vocabulary): one row per trained token of ``members``, in their
            order.
        members: the samples.
        blocked: marks the excluded tokens, shape (n, vocabulary), on the device of ``logits``;
            None when there are none.

    Returns:
        shape (n,), in nats.
    """
    tokens = torch.tensor(
        [s.tokens[p] for s in members for p in s.positions], device=logits.device, dtype=torch.long
    )
    return _log_softmax(logits, members, blocked).gather(1, tokens[:, None])[:, 0]


def token_entropies(
    logits: torch.Tensor, members: Sequence[Sample], blocked: torch.Tensor | None
) -> torch.Tensor:
    """Compute the entropy at every trained token: -sum_v p(v) log p(v).

    The arguments are those of ``token_logprobs``.

    Returns:
        shape (n,), in nats; 0 where only one token was allowed.
    """
    logp = _log_softmax(logits, members, blocked)
    return -(logp.exp() * logp.masked_fill(logp == float("-inf"), 0.0)).sum(dim=1)


def _log_softmax(
    logits: torch.Tensor, members: Sequence[Sample], blocked: torch.Tensor | None
) -> torch.Tensor:
    temperatures = torch.tensor(
        [s.temperature for s in members for _ in s.positions], device=logits.device
    )
    scaled = (
        logits / temperatures[:, None] if any(s.temperature != 1.0 for s in members) else logits
    )
    if blocked is not None:
        scaled = scaled.masked_fill(blocked, float("-inf"))
    return torch.log_softmax(scaled, dim=1)


def blocked_tokens(
    members: Sequence[Sample], vocabulary: int, schemas: Callable[[], Schemas]
) -> torch.Tensor | None:
    """Mark the tokens excluded at each trained position, shape (n, vocabulary).

    The result is None if no position excludes any.

    Args:
        members: the samples.
        vocabulary: columns of the logits.
        schemas: gives what restricts responses to a JSON schema; only called for samples that have
            one.
    """
    sets = [a for s in members for a in s.allowed or ((),) * len(s.positions)]
    if not any(sets) and not any(s.json_schema for s in members):
        return None
    blocked = torch.zeros(len(sets), vocabulary, dtype=torch.bool)
    start = 0
    for sample in members:
        end = start + len(sample.positions)
        if sample.json_schema is not None:
            places = [p - sample.response for p in sample.positions]
            allowed = schemas().allowed(
                sample.json_schema, sample.tokens[sample.response :], places
            )
            blocked[start:end] = torch.as_tensor(~allowed)
        start = end
    blocked[[i for i, a in enumerate(sets) if a]] = True
    blocked[[i for i, a in enumerate(sets) for _ in a], [t for a in sets for t in a]] = False
    return blocked
