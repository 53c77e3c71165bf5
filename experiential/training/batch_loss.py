"""The loss of some samples of a batch: what every runtime minimises, so that all of them take the same step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from experiential.training import losses
from experiential.training.runtime import LossSettings, Sample


def batch_loss(
    logp: torch.Tensor, members: Sequence[Sample], loss: LossSettings, total: float, reference: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """What these samples add to the loss of their batch; the parts of a batch add up to its loss.

    Args:
        logp: log-probability of every trained token of ``members`` in their order, shape (n,), carries the gradient.
        members: samples of one batch, each whole.
        loss: which loss, and its constants.
        total: trained tokens of the whole batch, over which token means are taken.
        reference: log-probability of the same tokens under the reference policy, shape (n,), for the KL penalty.

    Returns:
        the loss, a scalar, and metrics that are means over the tokens of ``members``.
    """
    device = logp.device
    old = torch.tensor([x for s in members for x in s.logprobs], device=device)
    advantages = torch.tensor([x for s in members for x in s.advantages], device=device)
    segment = torch.tensor([i for i, s in enumerate(members) for _ in s.positions], device=device, dtype=torch.long)
    weights = torch.tensor([s.weight for s in members], device=device)
    share = len(logp) / total if total else 0.0
    metrics: dict[str, float] = {}
    if loss.kind == "cispo":
        value, metrics = losses.cispo_loss(logp, old, advantages, eps_low=loss.low, eps_high=loss.high)
        value = value * share
    elif loss.kind == "sft":
        value = losses.sft_loss(logp, segment, weights)
    elif loss.kind == "reverse_kl":
        teacher = torch.tensor([x for s in members for x in s.teacher], device=device)
        value, metrics = losses.reverse_kl_loss(logp, teacher, segment=segment, weights=weights)
    else:
        value, metrics = losses.ppo_clip_loss(
            logp, old, advantages, segment=segment, weights=weights, clip_low=loss.low, clip_high=loss.high, ratio=loss.ratio
        )
    if reference is not None and len(logp):
        penalty = losses.kl_k3(logp, reference)
        value = value + loss.kl * penalty.mean() * share
        metrics = metrics | {"kl_reference": float(penalty.detach().mean())}
    return value, metrics
