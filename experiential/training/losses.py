"""Compute token log-probabilities from logits, and losses as pure functions of flat token tensors.

All losses are to be minimised. A policy loss is a function of `Terms`. To add one, name a
``module:function`` as ``actor.loss``, or declare an entry point of group ``experiential.losses``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from experiential.config import Ratio
from experiential.llm.request import Schemas
from experiential.plugins import resolve
from experiential.training.runtime import LOSSES, LossSettings, Sample

Stats = dict[str, float]
Sums = dict[str, tuple[float, int]]
"""Per metric its sum over tokens and their number; the sums of the parts of a batch add up."""
Measure = Callable[[Tensor, Sequence[Sample], Tensor | None], Tensor]
"""Takes logits, samples and what was blocked, and gives one number per trained token."""
LOGITS = 2**24
"""Logits that are held at a time: 64 MB, and a few times that for their softmax and gradients."""
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this, so that ``exp`` and its gradient stay finite."""


def token_logprobs(logits: Tensor, members: Sequence[Sample], blocked: Tensor | None) -> Tensor:
    """Compute the log-probability of every trained token under its temperature and constraint.

    ``logits`` (float32) has shape (n, vocabulary), a row per trained token of ``members`` in their
    order, and ``blocked`` marks its excluded tokens. The result has shape (n,), in nats.
    """
    drawn = [s.tokens[p] for s in members for p in s.positions]
    tokens = torch.tensor(drawn, device=logits.device, dtype=torch.long)
    return _log_softmax(logits, members, blocked).gather(1, tokens[:, None])[:, 0]


def token_entropies(logits: Tensor, members: Sequence[Sample], blocked: Tensor | None) -> Tensor:
    """Compute the entropy at every trained token: -sum_v p(v) log p(v), shape (n,), in nats.

    The arguments are those of ``token_logprobs``.
    """
    logp = _log_softmax(logits, members, blocked)
    return -(logp.exp() * logp.masked_fill(logp == float("-inf"), 0.0)).sum(dim=1)


def token_divergences(
    logits: Tensor, members: Sequence[Sample], blocked: Tensor | None, teacher: Tensor
) -> Tensor:
    """Compute the divergence of policy and teacher at every trained token, over the vocabulary.

    KL(p || q) = sum_v p(v) (log p(v) - log q(v)), shape (n,), in nats. For samples of kind
    ``full_reverse_kl`` p is the policy and q the teacher, for ``full_forward_kl`` the other way
    round (the two ends of GKD's divergence). Temperature and constraint of a sample hold for both
    distributions. ``teacher`` has logits of the same shape as ``logits``, and takes no gradient;
    the other arguments are those of ``token_logprobs``.
    """
    own = _log_softmax(logits, members, blocked)
    its = _log_softmax(teacher, members, blocked).detach()
    forward = torch.tensor(
        [s.kind == "full_forward_kl" for s in members for _ in s.positions], device=logits.device
    )[:, None]
    p, q = torch.where(forward, its, own), torch.where(forward, own, its)
    gap = p - q
    if blocked is not None:  # the logarithm of both is -inf there
        gap = gap.masked_fill(blocked, 0.0)
    return (p.exp() * gap).sum(dim=1)


def measure_tokens(
    states: Tensor,
    head: Callable[[Tensor], Tensor],
    members: Sequence[Sample],
    schemas: Callable[[], Schemas],
    measure: Measure = token_logprobs,
    *,
    frozen: bool = False,
    teacher: Tensor | None = None,
) -> Tensor:
    """Measure every trained token without the logits of all of them at once.

    Logits are made for a bounded number of tokens at a time, and again going backward. Where
    ``head`` is ``frozen`` the gradient of each token's number with respect to its state is taken
    going forward instead, which costs no second product and keeps a state's size per token.

    Args:
        states: last hidden state from which each trained token of ``members`` is drawn, in their
            order, shape (n, width).
        head: takes states to logits, shape (n, vocabulary).
        members: samples.
        schemas: only called for samples restricted to a JSON schema.
        measure: what to compute.
        frozen: whether ``head`` takes no gradient.
        teacher: states of a teacher for the same tokens, shape (n, width); ``token_divergences``
            is measured then.

    Returns:
        one number per trained token, shape (n,).
    """

    def work(some: Tensor, part: Sequence[Sample], its: Tensor | None) -> Tensor:
        logits = head(some).float()
        blocked = blocked_tokens(part, logits.shape[1], schemas)
        blocked = None if blocked is None else blocked.to(logits.device)
        if its is None:
            return measure(logits, part, blocked)
        with torch.no_grad():
            taught = head(its).float()
        return token_divergences(logits, part, blocked, taught)

    with torch.no_grad():
        vocabulary = head(states[:1]).shape[1]
    size = max(1, LOGITS // vocabulary // (1 if teacher is None else 2))
    if len(states) <= size:
        return work(states, members, teacher)
    again = cast("Any", torch.utils.checkpoint).checkpoint  # torch leaves its arguments untyped
    found: list[Tensor] = []
    pieces = torch.split(states, size)
    theirs = [None] * len(pieces) if teacher is None else torch.split(teacher, size)
    parts = _token_parts(members, size)
    for some, part, its in zip(pieces, parts, theirs, strict=True):
        if not torch.is_grad_enabled():
            found.append(work(some, part, its))
        elif frozen:
            leaf = some.detach().requires_grad_()
            value = work(leaf, part, its)
            (slope,) = torch.autograd.grad(value.sum(), leaf)  # a token's number has one state
            change = (some - some.detach()).float() * slope.float()  # zero, with that gradient
            found.append(value.detach() + change.sum(dim=1))
        else:
            found.append(again(work, some, part, its, use_reentrant=False))
    return torch.cat(found)


def _token_parts(members: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Cut samples into lists of ``size`` trained tokens, and a shorter last one."""
    part: list[Sample] = []
    room = size
    for sample in members:
        start = 0
        while start < len(sample.positions):
            cut = slice(start, start + room)
            fields = ("positions", "logprobs", "advantages", "allowed", "teacher")
            piece = replace(sample, **{name: getattr(sample, name)[cut] for name in fields})
            part.append(piece)
            start, room = start + room, room - len(piece.positions)
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part


def _log_softmax(logits: Tensor, members: Sequence[Sample], blocked: Tensor | None) -> Tensor:
    if any(s.temperature != 1.0 for s in members):
        temperatures = [s.temperature for s in members for _ in s.positions]
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    if blocked is not None:
        logits = logits.masked_fill(blocked, float("-inf"))
    return torch.log_softmax(logits, dim=1)


def blocked_tokens(
    members: Sequence[Sample], vocabulary: int, schemas: Callable[[], Schemas]
) -> Tensor | None:
    """Mark the tokens excluded at each trained position, shape (n, vocabulary); None if none is.

    ``schemas`` is only called for samples restricted to a JSON schema.
    """
    sets = [a for s in members for a in s.allowed or ((),) * len(s.positions)]
    if not any(sets) and not any(s.json_schema for s in members):
        return None
    blocked = torch.zeros(len(sets), vocabulary, dtype=torch.bool)
    start = 0
    for sample in members:
        end = start + len(sample.positions)
        if sample.json_schema is not None:
            response = sample.tokens[sample.response :]
            places = [p - sample.response for p in sample.positions]
            allowed = schemas().allowed(sample.json_schema, response, places)
            blocked[start:end] = torch.as_tensor(~allowed)
        start = end
    blocked[[i for i, a in enumerate(sets) if a]] = True
    blocked[[i for i, a in enumerate(sets) for _ in a], [t for a in sets for t in a]] = False
    return blocked


class Terms(NamedTuple):
    """Hold the n tokens of the m samples that one policy loss is computed for.

    Attributes:
        logp: log-probability of each token under the policy, shape (n,), carries the gradient.
        old_logp: the same under the behaviour policy, shape (n,).
        advantages: shape (n,).
        teacher: log-probability under a teacher, shape (n,); empty where the samples have none.
        segment: index of each token's sample, shape (n,), long.
        weights: weight of each sample, shape (m,).
        share: n over the trained tokens of the whole batch.
        settings: clipping and other constants.
        divergence: divergence to a teacher at each token, shape (n,), carries the gradient; empty
            where the samples have no teacher's prompt.
    """

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    teacher: Tensor
    segment: Tensor
    weights: Tensor
    share: float
    settings: LossSettings
    divergence: Tensor = torch.zeros(0)


PolicyLoss = Callable[[Terms], tuple[Tensor, Stats]]
"""Returns the loss, a scalar to be minimised, and metrics that are means over the tokens."""


def ppo(terms: Terms) -> tuple[Tensor, Stats]:
    """Compute ``ppo_clip_loss`` with the settings' ratio and clipping."""
    return ppo_clip_loss(
        terms.logp,
        terms.old_logp,
        terms.advantages,
        segment=terms.segment,
        weights=terms.weights,
        clip_low=terms.settings.low,
        clip_high=terms.settings.high,
        ratio=terms.settings.ratio,
    )


def cispo(terms: Terms) -> tuple[Tensor, Stats]:
    """Compute ``cispo_loss``: the mean over all tokens of the batch; sample weights are ignored."""
    logp, old_logp, low, high = terms.logp, terms.old_logp, terms.settings.low, terms.settings.high
    value, stats = cispo_loss(logp, old_logp, terms.advantages, eps_low=low, eps_high=high)
    return value * terms.share, stats


def sft(terms: Terms) -> tuple[Tensor, Stats]:
    """Compute ``sft_loss``; ``nll`` is the mean negative log-likelihood."""
    stats = {"nll": -float(terms.logp.detach().mean())} if len(terms.logp) else {}
    return sft_loss(terms.logp, terms.segment, terms.weights), stats


def reverse_kl(terms: Terms) -> tuple[Tensor, Stats]:
    """Compute ``reverse_kl_loss`` to the samples' teacher."""
    return reverse_kl_loss(terms.logp, terms.teacher, segment=terms.segment, weights=terms.weights)


def full_divergence(terms: Terms) -> tuple[Tensor, Stats]:
    """Compute sum_s w_s * mean over t in s of the divergence to the teacher at t.

    Raises:
        ValueError: the runtime has measured no divergence.
    """
    _same_shape(terms.logp, terms.divergence, terms.segment)
    stats = {"kl_teacher": float(terms.divergence.detach().mean())} if len(terms.logp) else {}
    return (_token_share(terms.segment, terms.weights) * terms.divergence).sum(), stats


full_reverse_kl = full_forward_kl = full_divergence  # `token_divergences` takes the direction


@cache  # once, not for every micro-batch
def _named(kind: str) -> PolicyLoss:
    return resolve("losses", kind, LOSSES)


def batch_loss(
    logp: Tensor,
    members: Sequence[Sample],
    loss: LossSettings,
    total: float,
    reference: Tensor | None = None,
    divergence: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """Compute these samples' share of their batch's loss; the parts of a batch add up to it.

    Every runtime minimises this, so that all of them take the same step.

    Args:
        logp: log-probability of every trained token of ``members`` in their order, shape (n,),
            carries the gradient.
        members: samples of one batch, each whole.
        loss: which loss, and its constants.
        total: trained tokens of the whole batch, over which token means are taken.
        reference: log-probability of the same tokens under the reference of the KL penalty.
        divergence: of the tokens of samples with a teacher's prompt, in their order, shape (m,),
            carries the gradient (``token_divergences``).

    Returns:
        the loss, a scalar, and its metrics; those of a loss that only some samples ask for
        (`Sample.kind`) carry its name in front.
    """
    device = logp.device
    distances = logp.new_zeros(0) if divergence is None else divergence
    taught = torch.tensor(
        [s.taught is not None for s in members for _ in s.positions],
        device=device,
        dtype=torch.bool,
    )
    kinds = [s.kind or loss.kind for s in members for _ in s.positions]
    value, sums = logp.sum() * 0.0, Sums()
    for kind in dict.fromkeys([loss.kind, *kinds]):
        own = [s for s in members if (s.kind or loss.kind) == kind]
        mine = torch.tensor([k == kind for k in kinds], device=device, dtype=torch.bool)
        count = kinds.count(kind)
        segment = [i for i, s in enumerate(own) for _ in s.positions]
        terms = Terms(
            logp=logp[mine],
            old_logp=torch.tensor([x for s in own for x in s.logprobs], device=device),
            advantages=torch.tensor([x for s in own for x in s.advantages], device=device),
            teacher=torch.tensor([x for s in own for x in s.teacher], device=device),
            segment=torch.tensor(segment, device=device, dtype=torch.long),
            weights=torch.tensor([s.weight for s in own], device=device),
            share=count / total if total else 0.0,
            settings=loss,
            divergence=distances[mine[taught]] if len(distances) else distances,
        )
        part, stats = _named(kind)(terms)
        # Imitated tokens are not the policy's own draws: only the batch's loss has the penalty.
        if reference is not None and kind == loss.kind and count:
            penalty = kl_k3(terms.logp, reference[mine]).mean()
            part = part + loss.kl * penalty * terms.share
            stats = stats | {"kl_reference": float(penalty.detach())}
        value = value + part
        front = "" if kind == loss.kind else f"{kind}_"
        add_sums(sums, {f"{front}{name}": (mean * count, count) for name, mean in stats.items()})
    return value, sums


def add_sums(into: Sums, more: Mapping[str, tuple[float, int]]) -> None:
    """Add the metrics of a part of a batch to those of the parts before."""
    for name, (value, count) in more.items():
        before, tokens = into.get(name, (0.0, 0))
        into[name] = before + value, tokens + count


def means(sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Return each metric's mean over the tokens that have it."""
    return {name: value / max(1, count) for name, (value, count) in sums.items()}


def ppo_clip_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    segment: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    ratio: Ratio = "token",
) -> tuple[Tensor, Stats]:
    """Compute the clipped surrogate of eq. 4 and 5 of Complementary RL, negated.

    loss = -sum_s w_s * mean over t in s of min(rho A, clip(rho, 1 - low, 1 + high) A). With
    ``ratio="token"`` rho_t is pi(t) / pi_old(t), as in GRPO's code; with ``"sequence"`` it is the
    ratio of the whole sequence, exp of the *sum* of its token log-ratios, as eq. 4 is written, and
    A is the mean of the sequence's token advantages. With the advantages of
    ``advantages.cell_advantages`` by half group and ``advantages.split_weights`` this is eq. 5.

    Args:
        logp: log-probability of each token under the policy, shape (n,), float, carries the
            gradient.
        old_logp: the same under the behaviour policy, shape (n,).
        advantages: advantage of each token (that of its sequence), shape (n,).
        segment: index of each token's sequence in [0, m), shape (n,), long. A sequence-level ratio
            needs all its tokens here.
        weights: weight of each sequence, shape (m,); a sequence without tokens adds nothing.
        clip_low: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        clip_high: see ``clip_low``.
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
        values = torch.stack((advantages, log_ratio))
        sums = values.new_zeros(2, len(weights)).index_add(1, segment, values)[:, present]
        advantages = sums[0] / lengths[present]
        rho = sums[1].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    else:
        rho = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        share = _token_share(segment, weights)
    plain, clipped = rho * advantages, rho.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(share * torch.minimum(plain, clipped)).sum()
    return loss, _stats(log_ratio, rho, clipped < plain)


def cispo_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Stats]:
    """Compute CISPO, eq. 3 of Complementary RL, negated.

    loss = -(1 / n) * sum_t sg(clip(rho_t, 1 - low, 1 + high)) A_t log pi(t). The clipped ratio only
    weighs the gradient (sg: stop-gradient), so that no token loses its gradient; at rho = 1 it is
    that of REINFORCE. ``old_logp`` is of the policy that sampled the token (stored at generation,
    not recomputed), and ``advantages`` include eq. 7's weight; all have shape (n,).

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
    rho = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = rho.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = -(clipped * advantages * logp).sum() / logp.numel()
    return loss, _stats(log_ratio, rho, clipped != rho)


def kl_k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Estimate KL(pi || ref) per token drawn from pi: exp(d) - d - 1 with d = log ref - log pi.

    Never negative, unbiased in value, low in variance (Schulman's k3, the KL term of GRPO). As a
    loss it does not follow the gradient of that divergence, but of the other direction: over
    tokens drawn from pi its expected gradient is that of KL(ref || pi), as in every GRPO that adds
    k3 to its loss (docs/methods.md). The arguments are log-probabilities of shape (n,); detach the
    reference's.

    Raises:
        ValueError: the shapes differ.
    """
    _same_shape(logp, ref_logp)
    gap = (ref_logp - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(gap) - gap


def sft_loss(logp: Tensor, segment: Tensor, weights: Tensor) -> Tensor:
    """Compute the distillation loss of ERL: -sum_s w_s * mean over t in s of log pi(t).

    ``logp`` and ``segment`` have shape (n,), ``weights`` (m,), as for ``ppo_clip_loss``.

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
    """Compute the loss of on-policy distillation by KL(pi || teacher), from ERL's appendix.

    loss = sum_s w_s * mean over t in s of sg(log pi(t) - log teacher(t)) log pi(t), for tokens
    drawn from pi (sg: stop-gradient). In expectation its gradient is that of the divergence: the
    term that is left out, the gradient of log pi itself, has mean zero under pi. The value is not
    the divergence; ``kl_teacher`` estimates that (k3, per token).

    ``logp`` is without the context that the teacher has; the arguments have the shapes of those of
    ``ppo_clip_loss``.

    Raises:
        ValueError: the token tensors have different shapes.
    """
    _same_shape(logp, teacher_logp, segment)
    if logp.numel() == 0:
        return logp.sum() * 0.0, {"kl_teacher": 0.0}
    gap = (logp - teacher_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    divergence = kl_k3(logp.detach(), teacher_logp).mean()
    loss = (_token_share(segment, weights) * gap * logp).sum()
    return loss, {"kl_teacher": float(divergence)}


def _same_shape(first: Tensor, *others: Tensor) -> None:
    shapes = [tuple(t.shape) for t in (first, *others)]
    if first.ndim != 1 or len(set(shapes)) != 1:
        found = ", ".join(map(str, shapes))
        raise ValueError(f"Expected token tensors of one shape (n,), got {found}")


def _token_share(segment: Tensor, weights: Tensor) -> Tensor:
    """Return w_s / |s| of each token."""
    lengths = torch.bincount(segment, minlength=len(weights))
    return (weights / lengths.clamp(min=1))[segment]


@torch.no_grad()
def _stats(log_ratio: Tensor, rho: Tensor, clipped: Tensor) -> Stats:
    gap = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "ratio": float(rho.mean()),
        "clip_fraction": float(clipped.float().mean()),
        "kl": float((torch.expm1(gap) - gap).mean()),
    }
