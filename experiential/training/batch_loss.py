"""The loss of some samples of a batch: what every runtime minimises, so that all of them take the same step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from experiential.training import losses
from experiential.training.runtime import LossKind, LossSettings, Sample

Sums = dict[str, tuple[float, int]]
"""Per metric its sum over tokens and their number, so that parts of a batch can be added up and
become a mean in the end.
"""


def add_sums(into: Sums, more: Mapping[str, tuple[float, int]]) -> None:
    """Add the metrics of a part of a batch to those of the parts before."""
    for name, (value, count) in more.items():
        before = into.get(name, (0.0, 0))
        into[name] = before[0] + value, before[1] + count


def means(sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Each metric's mean over the tokens that have it."""
    return {name: value / max(1, count) for name, (value, count) in sums.items()}


def batch_loss(
    logp: torch.Tensor,
    members: Sequence[Sample],
    loss: LossSettings,
    total: float,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """What these samples add to the loss of their batch; the parts of a batch add up to its loss.

    Args:
        logp: log-probability of every trained token of ``members`` in their order, shape (n,),
            carries the gradient.
        members: samples of one batch, each whole.
        loss: which loss, and its constants.
        total: trained tokens of the whole batch, over which token means are taken.
        reference: log-probability of the same tokens under the reference policy, shape (n,), for
            the KL penalty.

    Returns:
        the loss, a scalar, and its metrics; those of a loss that only some samples ask for
        (`Sample.kind`) carry its name in front.
    """
    kinds: list[LossKind] = [s.kind or loss.kind for s in members]
    owner = torch.tensor(
        [i for i, s in enumerate(members) for _ in s.positions],
        device=logp.device,
        dtype=torch.long,
    )
    value, sums = logp.sum() * 0.0, Sums()
    order: list[LossKind] = [loss.kind, *kinds]
    for kind in dict.fromkeys(order):
        chosen = [i for i, k in enumerate(kinds) if k == kind]
        mine = torch.isin(owner, torch.tensor(chosen, device=logp.device, dtype=torch.long))
        own = reference[mine] if reference is not None and kind == loss.kind else None
        part, metrics = _one_kind(logp[mine], [members[i] for i in chosen], loss, kind, total, own)
        value = value + part
        front, count = "" if kind == loss.kind else f"{kind}_", int(mine.sum())
        add_sums(
            sums, {f"{front}{name}": (metric * count, count) for name, metric in metrics.items()}
        )
    return value, sums


def _one_kind(
    logp: torch.Tensor,
    members: Sequence[Sample],
    loss: LossSettings,
    kind: LossKind,
    total: float,
    reference: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of samples that share one, and metrics that are means over their tokens."""
    device = logp.device
    old = torch.tensor([x for s in members for x in s.logprobs], device=device)
    advantages = torch.tensor([x for s in members for x in s.advantages], device=device)
    segment = torch.tensor(
        [i for i, s in enumerate(members) for _ in s.positions], device=device, dtype=torch.long
    )
    weights = torch.tensor([s.weight for s in members], device=device)
    share = len(logp) / total if total else 0.0
    metrics: dict[str, float] = {}
    if kind == "cispo":
        value, metrics = losses.cispo_loss(
            logp, old, advantages, eps_low=loss.low, eps_high=loss.high
        )
        value = value * share
    elif kind == "sft":
        value = losses.sft_loss(logp, segment, weights)
        metrics = {"nll": -float(logp.detach().mean())} if len(logp) else {}
    elif kind == "reverse_kl":
        teacher = torch.tensor([x for s in members for x in s.teacher], device=device)
        value, metrics = losses.reverse_kl_loss(logp, teacher, segment=segment, weights=weights)
    else:
        value, metrics = losses.ppo_clip_loss(
            logp,
            old,
            advantages,
            segment=segment,
            weights=weights,
            clip_low=loss.low,
            clip_high=loss.high,
            ratio=loss.ratio,
        )
    if reference is not None and len(logp):
        penalty = losses.kl_k3(logp, reference)
        value = value + loss.kl * penalty.mean() * share
        metrics = metrics | {"kl_reference": float(penalty.detach().mean())}
    return value, metrics
