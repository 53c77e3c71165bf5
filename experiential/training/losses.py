"""Losses as pure functions of flat token tensors, each with its equation; all are to be minimised."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Stats = dict[str, float]
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this, so that ``exp`` and its gradient stay finite."""


def ppo_clip_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    segment: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    ratio: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, Stats]:
    """Clipped surrogate of eq. 4 and 5 of Complementary RL, negated.

    loss = -sum_s w_s * mean over t in s of min(rho A, clip(rho, 1 - low, 1 + high) A). With
    ``ratio="token"`` rho_t is pi(t) / pi_old(t), as in GRPO's code; with ``"sequence"`` it is the
    ratio of the whole sequence, exp of the *sum* of its token log-ratios, as eq. 4 is written, and
    A is the mean of the sequence's token advantages. With ``advantages.split_group_advantages`` and
    ``advantages.split_weights`` this is eq. 5.

    Args:
        logp: log-probability of each token under the policy, shape (n,), float, carries the
            gradient.
        old_logp: the same under the behaviour policy, shape (n,).
        advantages: advantage of each token (that of its sequence), shape (n,).
        segment: index of each token's sequence in [0, m), shape (n,), long. A sequence-level ratio
            needs all its tokens here.
        weights: weight of each sequence, shape (m,); a sequence without tokens adds nothing.
        clip_low: how far below 1 the ratio may fall before it stops mattering.
        clip_high: how far above 1.
        ratio: ``token`` or ``sequence``.

    Returns:
        the loss, a scalar, and ``ratio`` (mean), ``clip_fraction`` (share of terms where the
        clipped branch is taken) and ``kl`` (k3 estimate of KL(old || new) per token).

    Raises:
        ValueError: the token tensors have different shapes, or ``ratio`` is unknown.
    """
    _same_shape(logp, old_logp, advantages, segment)
    if ratio not in ("token", "sequence"):
        raise ValueError(f"Expected ratio to be token or sequence, got {ratio!r}")
    if logp.numel() == 0:
        return logp.sum() * 0.0, {"ratio": 1.0, "clip_fraction": 0.0, "kl": 0.0}
    log_ratio = logp - old_logp
    if ratio == "sequence":
        lengths = torch.bincount(segment, minlength=len(weights))
        present, share = lengths > 0, weights[lengths > 0]
        advantages = (_segment_sum(advantages, segment, len(weights)) / lengths.clamp(min=1))[
            present
        ]
        rho = _exp(_segment_sum(log_ratio, segment, len(weights))[present])
    else:
        rho, share = _exp(log_ratio), _token_share(segment, weights)
    plain, clipped = rho * advantages, rho.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(share * torch.minimum(plain, clipped)).sum()
    return loss, _stats(log_ratio, rho, clipped < plain)


def cispo_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Stats]:
    """CISPO, eq. 3 of Complementary RL, negated: -(1 / n) * sum_t sg(clip(rho_t, 1 - low, 1 + high)) A_t log pi(t).

    The clipped ratio only weighs the gradient (sg: stop-gradient), so that no token loses its
    gradient. The mean is over all tokens of the batch. Its gradient at rho = 1 is that of
    REINFORCE.

    Args:
        logp: log-probability of each token under the policy, shape (n,), float, carries the
            gradient.
        old_logp: the same under the policy that sampled it (stored at generation, not recomputed),
            shape (n,).
        advantages: advantage of each token, eq. 7's weight included, shape (n,).
        eps_low: how far below 1 the ratio may fall before it is clipped.
        eps_high: how far above 1.

    Returns:
        the loss, a scalar, and the statistics of ``ppo_clip_loss`` (``clip_fraction``: tokens whose
        ratio was clipped).

    Raises:
        ValueError: the tensors have different shapes.
    """
    _same_shape(logp, old_logp, advantages)
    if logp.numel() == 0:
        return logp.sum() * 0.0, {"ratio": 1.0, "clip_fraction": 0.0, "kl": 0.0}
    log_ratio = (logp - old_logp).detach()
    rho = _exp(log_ratio)
    clipped = rho.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = -(clipped * advantages * logp).sum() / logp.numel()
    return loss, _stats(log_ratio, rho, clipped != rho)


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Per-token estimate of KL(pi || ref) for tokens sampled from pi: exp(d) - d - 1 with d = log ref - log pi.

    Never negative, unbiased in value, low in variance (Schulman's k3, the KL term of GRPO).

    Args:
        logp: log-probability of each token under the policy, shape (n,), float.
        ref_logp: the same under the reference, shape (n,).

    Returns:
        the estimates, shape (n,); the gradient flows through ``logp`` only if ``ref_logp`` is
        detached by the caller.

    Raises:
        ValueError: the shapes differ.
    """
    _same_shape(logp, ref_logp)
    gap = (ref_logp - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(gap) - gap


def sft_loss(logp: Tensor, segment: Tensor, weights: Tensor) -> Tensor:
    """Weighted negative log-likelihood: -sum_s w_s * mean over t in s of log pi(t); the distillation loss of ERL.

    Args:
        logp: log-probability of each target token, shape (n,), float.
        segment: index of each token's sequence in [0, m), shape (n,), long.
        weights: weight of each sequence, shape (m,).

    Returns:
        the loss, a scalar; 0 for no tokens.

    Raises:
        ValueError: ``logp`` and ``segment`` have different shapes.
    """
    _same_shape(logp, segment)
    if logp.numel() == 0:
        return logp.sum() * 0.0
    return -(_token_share(segment, weights) * logp).sum()


def reverse_kl_loss(
    logp: Tensor, teacher_logp: Tensor, *, segment: Tensor, weights: Tensor
) -> tuple[Tensor, Stats]:
    """On-policy distillation by KL(pi || teacher): the internalisation that ERL's appendix gives beside the supervised one.

    loss = sum_s w_s * mean over t in s of sg(log pi(t) - log teacher(t)) log pi(t), for tokens
    drawn from pi (sg: stop-gradient). In expectation its gradient is that of the divergence: the
    term that is left out, the gradient of log pi itself, has mean zero under pi. The value is not
    the divergence; ``kl_teacher`` estimates that.

    Args:
        logp: log-probability of each token under the policy that drew it, without the context that
            the teacher has, shape (n,), float.
        teacher_logp: the same token under the teacher, shape (n,).
        segment: index of each token's sequence in [0, m), shape (n,), long.
        weights: weight of each sequence, shape (m,).

    Returns:
        the loss, a scalar, and ``kl_teacher``, the k3 estimate of the divergence per token.

    Raises:
        ValueError: the token tensors have different shapes.
    """
    _same_shape(logp, teacher_logp, segment)
    if logp.numel() == 0:
        return logp.sum() * 0.0, {"kl_teacher": 0.0}
    gap = (logp - teacher_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    divergence = kl_k3(logp.detach(), teacher_logp)
    return (_token_share(segment, weights) * gap * logp).sum(), {
        "kl_teacher": float(divergence.mean())
    }


def _same_shape(first: Tensor, *others: Tensor) -> None:
    shapes = [tuple(t.shape) for t in (first, *others)]
    if first.ndim != 1 or len(set(shapes)) != 1:
        raise ValueError(
            f"Expected token tensors of one shape (n,), got {', '.join(map(str, shapes))}"
        )


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _token_share(segment: Tensor, weights: Tensor) -> Tensor:
    """w_s / |s| for every token, shape (n,)."""
    lengths = torch.bincount(segment, minlength=len(weights))
    return (weights / lengths.clamp(min=1))[segment]


def _segment_sum(values: Tensor, segment: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, segment, values)


@torch.no_grad()
def _stats(log_ratio: Tensor, rho: Tensor, clipped: Tensor) -> Stats:
    gap = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "ratio": float(rho.mean()),
        "clip_fraction": float(clipped.float().mean()),
        "kl": float((torch.expm1(gap) - gap).mean()),
    }
