"""From logits to the log-probabilities that losses take: temperature and constraints as they were when the tokens were drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from experiential.llm.grammar import Schemas
from experiential.training.runtime import Sample


def token_logprobs(logits: torch.Tensor, members: Sequence[Sample], blocked: torch.Tensor | None) -> torch.Tensor:
    """Log-probability of every trained token under its sample's temperature and constraint.

    Args:
        logits: float32, shape (n, vocabulary): one row per trained token of ``members``, in their order.
        members: the samples.
        blocked: what could not have been drawn, shape (n, vocabulary), on the device of ``logits``; None when anything could.

    Returns:
        shape (n,), in nats.
    """
    device = logits.device
    temperatures = torch.tensor([s.temperature for s in members for _ in s.positions], device=device)
    tokens = torch.tensor([s.tokens[p] for s in members for p in s.positions], device=device, dtype=torch.long)
    scaled = logits / temperatures[:, None] if any(s.temperature != 1.0 for s in members) else logits
    if blocked is not None:
        scaled = scaled.masked_fill(blocked, float("-inf"))
    return torch.log_softmax(scaled, dim=1).gather(1, tokens[:, None])[:, 0]


def blocked_tokens(members: Sequence[Sample], vocabulary: int, schemas: Callable[[], Schemas]) -> torch.Tensor | None:
    """The tokens that could not have been drawn at each trained position, shape (n, vocabulary); None when any could.

    Args:
        members: the samples.
        vocabulary: columns of the logits.
        schemas: gives what restricts responses to a JSON schema; only called for samples that have one.
    """
    sets = [a for s in members for a in (s.allowed or ((),) * len(s.positions))]
    if not any(sets) and not any(s.json_schema for s in members):
        return None
    blocked = torch.zeros(len(sets), vocabulary, dtype=torch.bool)
    start = 0
    for sample in members:
        end = start + len(sample.positions)
        if sample.json_schema is not None:
            places = [p - sample.response for p in sample.positions]
            allowed = schemas().allowed(sample.json_schema, sample.tokens[sample.response :], places)
            blocked[start:end] = torch.as_tensor(~allowed)
        start = end
    blocked[[i for i, a in enumerate(sets) if a]] = True
    blocked[[i for i, a in enumerate(sets) for _ in a], [t for a in sets for t in a]] = False
    return blocked
