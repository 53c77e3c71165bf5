"""Compute token log-probabilities from logits, and losses as pure functions of flat token tensors.

All losses are to be minimised. A policy loss is a function of `Terms`. To add one, name a
``module:function`` as ``actor.loss``, or declare an entry point of group ``experiential.losses``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from experiential.config import Correction, Ratio
from experiential.llm.request import Schemas
from experiential.plugins import resolve
from experiential.training.runtime import LOSSES, WITHOUT_RATIO, LossSettings, Sample

Stats = dict[str, float]
Sums = dict[str, tuple[float, int]]
"""Per metric its sum over tokens and their number; the sums of the parts of a batch add up."""
Measure = Callable[[Tensor, Sequence[Sample], Tensor | None], Tensor]
"""Takes logits, samples and what was blocked, and gives one number per trained token."""
LOGITS = 2**24
"""Logits that are held at a time: 64 MB, and a few times that for their softmax and gradients."""
LINEAR_FROM = 2.6
"""Log-ratio to the reference from which a penalty grows in proportion: k3 is about 10 there."""
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
    at_once: int | None = None,
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
        at_once: logits that are held at a time; None takes `LOGITS`.

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
    size = max(1, (at_once or LOGITS) // vocabulary // (1 if teacher is None else 2))
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
            fields = ("positions", "logprobs", "old", "advantages", "allowed", "teacher")
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
        old_logp: the same under the policy that ratios are taken to, shape (n,).
        advantages: shape (n,).
        teacher: log-probability under a teacher, shape (n,); empty where the samples have none.
        segment: index of each token's sample, shape (n,), long.
        weights: weight of each sample, shape (m,).
        share: n over the trained tokens of the whole batch.
        settings: clipping and other constants.
        divergence: divergence to a teacher at each token, shape (n,), carries the gradient; empty
            where the samples have no teacher's prompt.
        importance: truncated importance weight of each token, shape (n,), without gradient; None
            without a correction.
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
    importance: Tensor | None = None


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
        importance=terms.importance,
    )


def cispo(terms: Terms) -> tuple[Tensor, Stats]:
    """Compute ``cispo_loss``: the mean over all tokens of the batch; sample weights are ignored."""
    value, stats = cispo_loss(
        terms.logp,
        terms.old_logp,
        terms.advantages,
        eps_low=terms.settings.low,
        eps_high=terms.settings.high,
        importance=terms.importance,
    )
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

    Every runtime minimises this, so that all of them take the same step. Ratios are taken to
    ``Sample.old``, and where that is empty to ``logprobs``.

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
        places = [i for i, s in enumerate(own) for _ in s.positions]
        segment = torch.tensor(places, device=device, dtype=torch.long)
        old = torch.tensor([x for s in own for x in s.old or s.logprobs], device=device)
        importance = None
        if loss.correction != "none" and kind not in WITHOUT_RATIO:
            recorded = torch.tensor([x for s in own for x in s.logprobs], device=device)
            level, cap = loss.correction, loss.correction_cap
            importance = importance_weights(old, recorded, segment, level=level, cap=cap)
        terms = Terms(
            logp=logp[mine],
            old_logp=old,
            advantages=torch.tensor([x for s in own for x in s.advantages], device=device),
            teacher=torch.tensor([x for s in own for x in s.teacher], device=device),
            segment=segment,
            weights=torch.tensor([s.weight for s in own], device=device),
            share=count / total if total else 0.0,
            settings=loss,
            divergence=distances[mine[taught]] if len(distances) else distances,
            importance=importance,
        )
        part, stats = _named(kind)(terms)
        if importance is not None and count:
            stats = stats | {"importance": float(importance.mean())}
        # Imitated tokens are not the policy's own draws: only the batch's loss has the penalty.
        if reference is not None and kind == loss.kind and count:
            penalty = kl_penalty(terms.logp, reference[mine]).mean()
            part = part + loss.kl * penalty * terms.share
            stats = stats | {"kl_reference": float(penalty.detach())}
        value = value + part
        front = "" if kind == loss.kind else f"{kind}_"
        add_sums(sums, {f"{front}{name}": (mean * count, count) for name, mean in stats.items()})
    return value, sums


def takes_old(sample: Sample, loss: LossSettings, version: int, *, exact: bool) -> bool:
    """Test whether a sample's ratio is taken to log-probabilities that the trainer computes itself.

    Another engine, or a batch of another shape in low precision, rounds otherwise. A sample of the
    weights that an update begins with has a ratio of one but for that. With a correction samples of
    older weights are compared with the weights of now, too, and weighted by `importance_weights`.

    Args:
        sample: to learn from.
        loss: of its batch.
        version: of the weights that the update begins with.
        exact: recorded log-probabilities are the trainer's up to a rounding that does not matter.
    """
    if (sample.kind or loss.kind) in WITHOUT_RATIO:
        return False
    return loss.correction != "none" or (sample.policy_version == version and not exact)


def begin_ratios(
    logp: Tensor, members: Sequence[Sample], loss: LossSettings, version: int, *, exact: bool
) -> tuple[list[Sample], Sums]:
    """Take ratios to the log-probabilities of now, and measure how far recorded ones are from them.

    This is for the first optimiser step of an update: no weight has changed yet, so that ``logp``,
    shape (n,), of the trained tokens of ``members`` in their order, is of the old policy as well.
    The other arguments are those of `takes_old`.

    Returns:
        the samples, with ``old`` where they take it, and metrics of those with a ratio. With
        d_t = logp_t - recorded_t, ``mismatch_kl`` is the mean of exp(d_t) - d_t - 1, an estimate of
        KL(sampler || trainer) per token, and ``mismatch_clipped`` the share of tokens whose
        importance weight is above its cap (that of single tokens without a correction).
    """
    found, sums = list[Sample](), Sums()
    parts = torch.split(logp.detach(), [len(s.positions) for s in members])
    for sample, part in zip(members, parts, strict=True):
        if (sample.kind or loss.kind) not in WITHOUT_RATIO and sample.positions:
            recorded = part.new_tensor(sample.logprobs)
            one = torch.zeros(len(part), dtype=torch.long, device=part.device)
            level = "token" if loss.correction == "none" else loss.correction
            weights = importance_weights(part, recorded, one, level=level, cap=math.inf)
            clipped = float((weights > loss.correction_cap).sum())
            divergence = float(kl_k3(recorded, part).sum())
            count = len(part)
            add_sums(
                sums,
                {"mismatch_kl": (divergence, count), "mismatch_clipped": (clipped, count)},
            )
        if takes_old(sample, loss, version, exact=exact):
            sample = replace(sample, old=tuple(cast("Any", part).tolist()))
        found.append(sample)
    return found, sums


def importance_weights(
    old_logp: Tensor, recorded: Tensor, segment: Tensor, *, level: Correction, cap: float
) -> Tensor:
    """Compute truncated importance weights from the sampler mu to the policy of the ratios, pi_old.

    ``level="token"``: w_t = min(pi_old(t) / mu(t), cap). At equal weights this is truncated
    importance sampling (TIS; Yao et al., 2025), where pi_old is newer than mu it is the weight of
    decoupled PPO (Hilton et al., 2021; AReaL). ``level="sequence"``: the ratio of the whole
    sequence in its place, exp of the *sum* of its log-ratios. That is unbiased below the cap, but
    its logarithm falls with every token by the divergence of both, so that it fits short responses
    alone.

    Args:
        old_logp: log-probability of each token under pi_old, shape (n,).
        recorded: the same under mu, as it was recorded, shape (n,).
        segment: index of each token's sequence, shape (n,), long.
        level: ``token`` or ``sequence``.
        cap: the largest weight.

    Returns:
        the weights, shape (n,), without gradient.

    Raises:
        ValueError: the tensors have different shapes, or ``level`` is unknown.
    """
    _same_shape(old_logp, recorded, segment)
    if level not in ("token", "sequence"):
        raise ValueError(f"Expected a correction by token or sequence, got {level!r}")
    gap = (old_logp - recorded).detach()
    if level == "sequence" and len(gap):
        gap = gap.new_zeros(int(segment.max()) + 1).index_add(0, segment, gap)[segment]
    return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)


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
    importance: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Compute the clipped surrogate of eq. 4 and 5 of Complementary RL, negated.

    loss = -sum_s w_s * mean over t in s of i min(rho A, clip(rho, 1 - low, 1 + high) A). With
    ``ratio="token"`` rho_t is pi(t) / pi_old(t), as in GRPO's code; with ``"sequence"`` it is the
    ratio of the whole sequence, exp of the *sum* of its token log-ratios, as eq. 4 is written, and
    with ``"sequence_mean"`` exp of their *mean*, as in GSPO; A is then the mean of the sequence's
    token advantages. With the advantages of ``advantages.cell_advantages`` by half group and
    ``advantages.split_weights`` this is eq. 5. The importance weight i is one by default.

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
        ratio: ``token``, ``sequence`` or ``sequence_mean``.
        importance: weight i of each token's term, shape (n,), without gradient; a sequence's term
            takes their mean.

    Returns:
        the loss, a scalar, and ``ratio`` (mean), ``clip_fraction`` (share of terms where the
        clipped branch is taken) and ``kl`` (k3 estimate of KL(old || new) per token).

    Raises:
        ValueError: the token tensors have different shapes, or ``ratio`` is unknown.
    """
    _same_shape(logp, old_logp, advantages, segment)
    if ratio not in ("token", "sequence", "sequence_mean"):
        raise ValueError(f"Expected ratio to be token, sequence or sequence_mean, got {ratio!r}")
    if logp.numel() == 0:
        return logp.sum() * 0.0, {"ratio": 1.0, "clip_fraction": 0.0, "kl": 0.0}
    log_ratio = logp - old_logp
    if ratio == "token":
        rho = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        share = _token_share(segment, weights)
        if importance is not None:
            share = share * importance
    else:
        lengths = torch.bincount(segment, minlength=len(weights))
        present, ones = lengths > 0, torch.ones_like(log_ratio)
        values = torch.stack((advantages, log_ratio, ones if importance is None else importance))
        sums = values.new_zeros(3, len(weights)).index_add(1, segment, values)[:, present]
        averages = sums / lengths[present]
        advantages, share = averages[0], weights[present] * averages[2]
        log_rho = averages[1] if ratio == "sequence_mean" else sums[1]
        rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain, clipped = rho * advantages, rho.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -(share * torch.minimum(plain, clipped)).sum()
    return loss, _stats(log_ratio, rho, clipped < plain)


def cispo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    importance: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Compute CISPO, eq. 3 of Complementary RL, negated.

    loss = -(1 / n) * sum_t sg(i_t clip(rho_t, 1 - low, 1 + high)) A_t log pi(t). The clipped ratio
    only weighs the gradient (sg: stop-gradient), so that no token loses its gradient; at rho = 1 it
    is that of REINFORCE. ``old_logp`` is of the weights that sampled the token, not of weights of
    now unless these are the same, and ``advantages`` include eq. 7's weight; all have shape (n,).
    The importance weight i is one by default.

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
    weighted = advantages if importance is None else importance * advantages
    loss = -(clipped * weighted * logp).sum() / logp.numel()
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


def kl_penalty(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Return the penalty of each token: k3, and its tangent beyond d = log ref - log pi = 2.6.

    The gradient of k3 grows with exp(d). Sampling at a low temperature multiplies d, so that one
    token of a batch, likely under the reference and not under pi, outweighed all others. Beyond 2.6
    it now pulls as hard as there; OpenRLHF caps the value there, and such a token does not pull at
    all. Arguments as for ``kl_k3``.

    Raises:
        ValueError: the shapes differ.
    """
    _same_shape(logp, ref_logp)
    gap = (ref_logp - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    near = gap.clamp(max=LINEAR_FROM)
    return torch.expm1(near) - near + math.expm1(LINEAR_FROM) * (gap - near)


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
