"""Losses against hand-worked numbers, autograd and each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.training.losses import (
    Terms,
    batch_loss,
    begin_ratios,
    cispo_loss,
    importance_weights,
    kl_k3,
    kl_penalty,
    ppo_clip_loss,
    reverse_kl_loss,
    sft_loss,
    token_divergences,
)
from experiential.training.runtime import LossSettings, Sample

LOG = math.log


def double(*values: float, grad: bool = False) -> torch.Tensor:
    """A float64 vector."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def ppo(
    logp: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    segment: list[int],
    weights: torch.Tensor,
    **kwargs: Any,
) -> Any:
    """The clipped loss with the usual clip."""
    options = {"clip_low": 0.2, "clip_high": 0.2} | kwargs
    return ppo_clip_loss(
        logp, old, advantages, segment=torch.tensor(segment), weights=weights, **options
    )


def test_token_ratio_by_hand() -> None:
    # sequence 0 (A = +1): ratios 1.5 -> clipped to 1.2, 0.5 -> kept; sequence 1 (A = -2): ratio 0.5
    # -> clipped to 0.8
    logp = double(LOG(1.5), LOG(0.5), LOG(0.5), grad=True)
    loss, stats = ppo(logp, double(0, 0, 0), double(1, 1, -2), [0, 0, 1], double(0.25, 0.75))
    assert loss.item() == pytest.approx(-(0.25 * (1.2 + 0.5) / 2 + 0.75 * (-1.6)))
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, -0.25 * 0.5 / 2, 0.0])
    assert stats["ratio"] == pytest.approx(2.5 / 3) and stats["clip_fraction"] == pytest.approx(
        2 / 3
    )
    kl = ((1.5 - 1 - LOG(1.5)) + 2 * (0.5 - 1 - LOG(0.5))) / 3
    assert stats["kl"] == pytest.approx(kl)


def test_sequence_ratio_by_hand() -> None:
    # sequence 0: rho = 1.1 * 1.05 = 1.155 kept; sequence 2: rho = 0.5, A = -1, clipped to 0.8;
    # sequence 1 has no tokens
    logp = double(LOG(1.1), LOG(1.05), LOG(0.5), grad=True)
    loss, stats = ppo(
        logp, double(0, 0, 0), double(3, 3, -1), [0, 0, 2], double(0.5, 9.0, 0.5), ratio="sequence"
    )
    assert loss.item() == pytest.approx(-(0.5 * 1.155 * 3 + 0.5 * -0.8))
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-0.5 * 1.155 * 3] * 2 + [0.0])
    assert stats["ratio"] == pytest.approx((1.155 + 0.5) / 2) and stats[
        "clip_fraction"
    ] == pytest.approx(0.5)


def test_geometric_mean_ratio_by_hand() -> None:
    # The sequences of the test above: sqrt(1.1 * 1.05), and 0.5, clipped to 0.8.
    logp, root = double(LOG(1.1), LOG(1.05), LOG(0.5), grad=True), (1.1 * 1.05) ** 0.5
    options = {"ratio": "sequence_mean"}
    weights = double(0.5, 9.0, 0.5)
    loss, stats = ppo(logp, double(0, 0, 0), double(3, 3, -1), [0, 0, 2], weights, **options)
    assert loss.item() == pytest.approx(-(0.5 * root * 3 + 0.5 * -0.8))
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-0.5 * root * 3 / 2] * 2 + [0.0])
    assert stats["ratio"] == pytest.approx((root + 0.5) / 2)


def test_length_leaves_a_geometric_mean_in_the_clip_range_and_takes_a_product_out_of_it() -> None:
    # Rounding of .059 nats a token, as between an engine and a trainer in bfloat16, and no update.
    noise = 0.059 * torch.randn(8, 16384, generator=torch.Generator().manual_seed(0))
    segment = torch.arange(8).repeat_interleave(16384).tolist()
    found: dict[str, float] = {}
    for ratio in ("token", "sequence", "sequence_mean"):
        ones = torch.ones(noise.numel())
        signed = torch.sign(noise.sum(1)).repeat_interleave(16384)  # so that the clip can act
        old = torch.zeros_like(ones)
        args = (noise.flatten(), old, signed, segment, torch.full((8,), 1 / 8))
        found[ratio] = ppo(*args, ratio=ratio)[1]["clip_fraction"]
    assert found["sequence"] == 1.0 and found["sequence_mean"] == 0.0
    assert found["token"] < 0.01


def test_importance_weights_by_hand() -> None:
    # pi_old / mu: 1.5, 3 and 0.5 in the first sequence, 0.8 in the second
    old, recorded = double(LOG(1.5), LOG(3), LOG(0.5), LOG(0.8), grad=True), double(0, 0, 0, 0)
    segment = torch.tensor([0, 0, 0, 1])
    by_token = importance_weights(old, recorded, segment, level="token", cap=2.0)
    assert by_token.tolist() == pytest.approx([1.5, 2.0, 0.5, 0.8]) and not by_token.requires_grad
    by_sequence = importance_weights(old, recorded, segment, level="sequence", cap=3.0)
    assert by_sequence.tolist() == pytest.approx([2.25, 2.25, 2.25, 0.8])
    capped = importance_weights(old, recorded, segment, level="sequence", cap=2.0)
    assert capped.tolist() == pytest.approx([2.0, 2.0, 2.0, 0.8])
    with pytest.raises(ValueError, match="by token or sequence, got 'none'"):
        importance_weights(old, recorded, segment, level="none", cap=2.0)


def test_importance_weights_multiply_each_term_and_leave_the_clip_alone() -> None:
    # Ratios 1.5 (clipped to 1.2) and 0.5 of one sequence, of advantage 1 and weight 1.
    logp, importance = double(LOG(1.5), LOG(0.5), grad=True), double(2.0, 0.5)
    args = (logp, double(0, 0), double(1, 1), [0, 0], double(1))
    loss, stats = ppo(*args, importance=importance)
    assert loss.item() == pytest.approx(-(2.0 * 1.2 + 0.5 * 0.5) / 2)
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, -0.5 * 0.5 / 2])
    assert stats == ppo(*args)[1]
    whole, _ = ppo(*args, importance=double(0.5, 0.5), ratio="sequence")
    assert whole.item() == pytest.approx(-0.5 * 0.75), "the ratio of the sequence is 1.5 * 0.5"
    # CISPO with the same ratios: 1.5 -> 1.1, 0.5 -> 0.9
    value, _ = cispo_loss(*args[:3], eps_low=0.1, eps_high=0.1, importance=importance)
    assert value.item() == pytest.approx(-(2 * 1.1 * LOG(1.5) + 0.5 * 0.9 * LOG(0.5)) / 2)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("correction", ["none", "token", "sequence"])
def test_a_batch_begins_with_ratios_of_one_and_measures_its_mismatch(
    correction: Any, exact: bool
) -> None:
    """Two samples of the weights of now, version 3, one of older weights, and one to imitate."""
    logp = torch.tensor([-1.0, -2.0, -1.5, -0.5, -3.0])
    gaps = (LOG(1.1), LOG(2.5), LOG(0.9), LOG(1.2), LOG(4.0))
    recorded = [float(x) - gap for x, gap in zip(logp, gaps, strict=True)]
    rows = (((1, 2), 3, None), ((1,), 3, None), ((1,), 2, None), ((1,), 3, "sft"))
    samples, start = [], 0
    for places, version, kind in rows:
        end = start + len(places)
        old = tuple(recorded[start:end])
        more = {"weight": 1 / 3, "policy_version": version, "kind": kind}
        samples.append(Sample((5, 6, 7), places, old, (1.0,) * len(places), **more))
        start = end
    loss = LossSettings(correction=correction)
    begun, sums = begin_ratios(logp, samples, loss, 3, exact=exact)
    k3 = sum(math.expm1(gap) - gap for gap in gaps[:4])
    assert sums["mismatch_kl"] == (pytest.approx(k3, rel=1e-5), 4), "what is imitated has no ratio"
    over = 2 if correction == "sequence" else 1  # 2.5, or 1.1 * 2.5, which counts for two tokens
    assert sums["mismatch_clipped"] == (over, 4)
    taken = [bool(s.old) for s in begun]
    wanted = [not exact, not exact, False, False] if correction == "none" else [True] * 3 + [False]
    assert taken == wanted and [s.logprobs for s in begun] == [s.logprobs for s in samples]

    value, metrics = batch_loss(logp, begun, loss, 5.0)
    found = {name: total / count for name, (total, count) in metrics.items()}
    assert metrics["ratio"][1] == 4
    if correction == "none":
        stale = [1.2] if not exact else [1.1, 2.5, 0.9, 1.2]
        assert found["ratio"] == pytest.approx((sum(stale) + 4 - len(stale)) / 4)
        assert "importance" not in found
    else:
        weights = {"token": [1.1, 2.0, 0.9, 1.2], "sequence": [2.0, 2.0, 0.9, 1.2]}[correction]
        assert found["ratio"] == pytest.approx(1.0) and found["clip_fraction"] == 0.0
        assert found["importance"] == pytest.approx(sum(weights) / 4)
        shares = [sum(weights[:2]) / 2, weights[2], weights[3]]
        imitated = 3.0 / 3  # -log pi
        assert value.item() == pytest.approx(-sum(shares) / 3 + imitated)


def test_clip_low_and_high_are_separate() -> None:
    def loss(ratio: float, advantage: float) -> float:
        return -ppo(
            double(LOG(ratio)),
            double(0),
            double(advantage),
            [0],
            double(1),
            clip_low=0.1,
            clip_high=0.4,
        )[0].item()

    assert [loss(1.3, 1), loss(1.5, 1), loss(0.95, -1), loss(0.5, -1)] == pytest.approx(
        [1.3, 1.4, -0.95, -0.9]
    )


def test_cispo_by_hand() -> None:
    # ratios 1.5 -> 1.1, 0.5 -> 0.9, 1 -> 1
    logp, old = double(-1.0, -2.0, -3.0, grad=True), double(-1 - LOG(1.5), -2 - LOG(0.5), -3)
    loss, stats = cispo_loss(logp, old, double(2, -1, 0.5), eps_low=0.1, eps_high=0.1)
    assert loss.item() == pytest.approx(-(1.1 * 2 * -1 + 0.9 * -1 * -2 + 0.5 * -3) / 3)
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-1.1 * 2 / 3, 0.9 / 3, -0.5 / 3]), (
        "every token keeps a gradient, the ratio has none"
    )
    assert stats["clip_fraction"] == pytest.approx(2 / 3)


NUMBERS = st.lists(st.floats(-3, 3), min_size=6, max_size=6)


@settings(deadline=None)
@given(values=NUMBERS, advantages=NUMBERS, ratio=st.sampled_from(["token", "sequence"]))
def test_at_ratio_one_all_losses_have_the_gradient_of_reinforce(
    values: list[float], advantages: list[float], ratio: str
) -> None:
    segment, weights = (
        torch.tensor([0, 0, 1, 2, 2, 2]),
        double(1 / 3, 1 / 6, 1 / 2),
    )  # w_s proportional to |s|: a plain token mean
    per_sequence = double(*advantages)[segment]
    gradients = []
    for kind in ("reinforce", "ppo", "cispo"):
        logp = double(*values, grad=True)
        if kind == "reinforce":
            loss = -(per_sequence * logp).mean()
        elif kind == "ppo":
            loss = ppo(logp, logp.detach(), per_sequence, segment.tolist(), weights, ratio=ratio)[0]
        else:
            loss = cispo_loss(logp, logp.detach(), per_sequence, eps_low=0.1, eps_high=0.1)[0]
        loss.backward()
        gradients.append(logp.grad)
    if (
        ratio == "sequence"
    ):  # the ratio of a whole sequence has the gradient of its sum, not of its mean
        gradients[1] = gradients[1] / torch.bincount(segment)[segment]
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


@settings(deadline=None)
@given(
    values=NUMBERS, old=NUMBERS, advantages=NUMBERS, ratio=st.sampled_from(["token", "sequence"])
)
def test_the_clipped_loss_agrees_with_a_loop(
    values: list[float], old: list[float], advantages: list[float], ratio: str
) -> None:
    segment, weights = [1, 0, 1, 2, 0, 1], [0.2, 0.5, 0.3]
    signal = [advantages[s] for s in segment]
    total = 0.0
    for s, weight in enumerate(weights):
        members = [i for i, other in enumerate(segment) if other == s]
        gaps = [values[i] - old[i] for i in members]
        rhos = [math.exp(g) for g in gaps] if ratio == "token" else [math.exp(sum(gaps))]
        terms = [min(rho * advantages[s], min(max(rho, 0.8), 1.2) * advantages[s]) for rho in rhos]
        total -= weight * sum(terms) / len(terms)
    loss = ppo(
        double(*values), double(*old), double(*signal), segment, double(*weights), ratio=ratio
    )[0]
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_gradients_agree_with_finite_differences(ratio: str) -> None:
    torch.manual_seed(0)
    logp = (torch.randn(5, dtype=torch.float64) * 0.1).requires_grad_()
    old, advantages, weights = (
        torch.randn(5, dtype=torch.float64) * 0.1,
        double(1, 1, -1, -1, -1),
        double(0.4, 0.6),
    )

    def loss(x: torch.Tensor) -> torch.Tensor:
        return ppo(x, old, advantages, [0, 0, 1, 1, 1], weights, ratio=ratio)[0]

    assert torch.autograd.gradcheck(loss, (logp,))
    assert torch.autograd.gradcheck(lambda x: kl_k3(x, old), (logp,))
    assert torch.autograd.gradcheck(
        lambda x: sft_loss(x, torch.tensor([0, 0, 1, 1, 1]), weights), (logp,)
    )


def test_micro_batches_of_whole_sequences_add_up_to_the_batch() -> None:
    torch.manual_seed(1)
    logp, old, advantages = torch.randn(3, 7, dtype=torch.float64) * 0.3
    segment, weights = torch.tensor([0, 0, 1, 1, 1, 2, 2]), double(0.1, 0.6, 0.3)
    for ratio in ("token", "sequence"):
        whole = ppo(logp, old, advantages, segment.tolist(), weights, ratio=ratio)[0]
        parts = sum(
            ppo(
                logp[m],
                old[m],
                advantages[m],
                (segment[m] - segment[m].min()).tolist(),
                weights[segment[m].unique()],
                ratio=ratio,
            )[0]
            for m in (segment == 0, segment > 0)
        )
        torch.testing.assert_close(whole, parts)


def test_a_ratio_computed_against_itself_hides_what_a_stored_one_shows() -> None:
    stored, now = double(-2.0, -2.0), double(-1.0, -3.0)
    recomputed = cispo_loss(now, now, double(1, 1), eps_low=0.1, eps_high=0.1)[1]
    true = cispo_loss(now, stored, double(1, 1), eps_low=0.1, eps_high=0.1)[1]
    assert recomputed["clip_fraction"] == 0.0 and true["clip_fraction"] == 1.0


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_k3_is_never_negative_and_zero_only_at_equality(
    policy: list[float], reference: list[float]
) -> None:
    found = kl_k3(double(*policy), double(*reference))
    assert (found >= 0).all() and found.shape == (6,)
    assert kl_k3(double(*policy), double(*policy)).abs().max() == 0


def test_k3_estimates_the_divergence() -> None:
    p, q = double(0.5, 0.3, 0.2), double(0.2, 0.3, 0.5)
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_k3(p.log(), q.log())).sum(), exact)
    assert kl_k3(double(-1.0), double(-1.0 - LOG(2))).item() == pytest.approx(0.5 - 1 + LOG(2))


def test_sft_by_hand() -> None:
    logp = double(-1, -3, -5, grad=True)
    loss = sft_loss(logp, torch.tensor([0, 0, 1]), double(0.5, 2.0))
    assert loss.item() == pytest.approx(0.5 * 2 + 2 * 5)
    loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-0.25, -0.25, -2.0])


def test_reverse_kl_by_hand() -> None:
    # sequence 0: gaps log(0.5 / 0.25) = log 2 and 0; sequence 1: log(0.25 / 0.5) = -log 2
    logp = double(LOG(0.5), LOG(0.1), LOG(0.25), grad=True)
    teacher = double(LOG(0.25), LOG(0.1), LOG(0.5))
    loss, stats = reverse_kl_loss(
        logp, teacher, segment=torch.tensor([0, 0, 1]), weights=double(0.5, 2.0)
    )
    assert loss.item() == pytest.approx(0.25 * LOG(2) * LOG(0.5) + 2.0 * -LOG(2) * LOG(0.25))
    loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx(
        [0.25 * LOG(2), 0.0, -2.0 * LOG(2)]
    )
    assert stats["kl_teacher"] == pytest.approx(((0.5 - 1 + LOG(2)) + 0 + (2 - 1 - LOG(2))) / 3)


def test_k3_as_a_loss_follows_the_divergence_from_the_reference() -> None:
    """Its value estimates KL(pi || ref), its expected gradient is that of KL(ref || pi)."""
    logits = double(0.3, -1.0, 0.8, 0.1, grad=True)
    policy = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(double(1.0, 0.0, -0.5, 0.2), 0)
    there = (policy.exp() * (policy - reference)).sum()  # KL(pi || ref)
    back = (reference.exp() * (reference - policy)).sum()  # KL(ref || pi)
    found, value = torch.zeros(4, dtype=torch.float64), 0.0
    for token in range(4):  # drawn with its probability under the policy
        penalty = kl_k3(policy[token : token + 1], reference[token : token + 1]).sum()
        (gradient,) = torch.autograd.grad(penalty, logits, retain_graph=True)
        found += policy[token].exp().detach() * gradient
        value += float(policy[token].exp().detach() * penalty.detach())
    gradients = [torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (there, back)]
    assert value == pytest.approx(there.item(), abs=1e-12)
    assert found.tolist() == pytest.approx(gradients[1].tolist(), abs=1e-12)
    assert (found - gradients[0]).abs().max() > 0.05


def test_a_penalty_is_k3_and_beyond_it_pulls_no_harder() -> None:
    gaps = double(-3.0, 0.0, 1.0, 2.6, 3.6, 9.0)  # log ref - log pi
    logp, nothing = (-gaps).requires_grad_(), torch.zeros_like(gaps)
    found = kl_penalty(logp, nothing)
    assert found[:4].tolist() == pytest.approx(kl_k3(logp, nothing)[:4].tolist())
    slope = math.expm1(2.6)  # 12.46
    at = slope - 2.6  # 9.86
    assert found[4:].tolist() == pytest.approx([at + slope, at + 6.4 * slope])
    never = kl_penalty(double(-1.0, -1e9), double(-math.inf, 0.0))
    assert never.isfinite().all()
    (gradient,) = torch.autograd.grad(found.sum(), logp)
    assert gradient.tolist() == pytest.approx(
        [-math.expm1(-3.0), 0.0, -math.expm1(1.0), -slope, -slope, -slope]
    )


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        # policy (1/2, 1/2), teacher (1/4, 3/4): 1/2 log 2 + 1/2 log 2/3, 1/4 log 1/2 + 3/4 log 3/2
        ("full_reverse_kl", 0.5 * LOG(2) + 0.5 * LOG(2 / 3)),
        ("full_forward_kl", 0.25 * LOG(0.5) + 0.75 * LOG(1.5)),
    ],
)
def test_full_divergences_by_hand(kind: str, wanted: float) -> None:
    sample = Sample((9, 0, 1), (1, 2), (0.0, 0.0), (0.0, 0.0), kind=kind, weight=2.0)
    sample = replace(sample, taught=sample)
    logits = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[LOG(0.25), LOG(0.75), 50.0]] * 2, dtype=torch.float64)
    blocked = torch.tensor([[False, False, True]] * 2)  # what a constraint excludes does not count
    found = token_divergences(logits, [sample], blocked, teacher)
    assert found.tolist() == pytest.approx([wanted] * 2, abs=1e-12)
    loss, sums = batch_loss(found * 0.0, [sample], LossSettings(), 2, divergence=found)
    assert loss.item() == pytest.approx(2.0 * wanted)  # weight times the mean over the tokens
    assert sums[f"{kind}_kl_teacher"] == (pytest.approx(2 * wanted), 2)
    loss.backward()
    assert logits.grad is not None and logits.grad[:, 2].tolist() == [0.0, 0.0]
    # d/dz of KL(p || q) is p (log p/q - KL), of KL(q || p) it is p - q
    slope = 0.5 * (LOG(2) - wanted) if kind == "full_reverse_kl" else 0.5 - 0.25
    assert logits.grad[:, 0].tolist() == pytest.approx([slope] * 2, abs=1e-12)  # 2.0 / 2 tokens
    with pytest.raises(ValueError, match="Expected token tensors of one shape"):
        batch_loss(found, [sample], LossSettings(), 2)  # a runtime that measures no divergence


def test_its_expected_gradient_is_that_of_the_divergence() -> None:
    logits, teacher = (
        double(0.3, -1.0, 0.8, 0.1, grad=True),
        torch.log_softmax(double(1.0, 0.0, -0.5, 0.2), 0),
    )
    policy = torch.log_softmax(logits, 0)
    (wanted,) = torch.autograd.grad(
        (policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True
    )
    found = torch.zeros(4, dtype=torch.float64)
    for token in range(4):  # drawn with its probability under the policy
        loss, _ = reverse_kl_loss(
            policy[token : token + 1],
            teacher[token : token + 1],
            segment=torch.tensor([0]),
            weights=double(1.0),
        )
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        found += policy[token].exp().detach() * gradient
    assert wanted.abs().max() > 0.1
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_no_tokens_give_a_zero_that_can_be_differentiated(ratio: str) -> None:
    logp = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0)
    for loss in (
        ppo(logp, nothing, nothing, [], torch.ones(2), ratio=ratio)[0],
        cispo_loss(logp, nothing, nothing, eps_low=0.1, eps_high=0.1)[0],
        sft_loss(logp, torch.zeros(0, dtype=torch.long), torch.ones(2)),
    ):
        loss.backward()
        assert loss.item() == 0.0
    assert kl_k3(logp, nothing).shape == (0,)


@pytest.mark.parametrize("gap", [-1e4, 1e4])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_absurd_log_ratios_stay_finite(gap: float, ratio: str) -> None:
    logp = torch.full((3,), gap, requires_grad=True)
    losses = [
        ppo(logp, torch.zeros(3), torch.ones(3) * sign, [0, 0, 1], torch.ones(2), ratio=ratio)[0]
        for sign in (1.0, -1.0)
    ] + [
        cispo_loss(logp, torch.zeros(3), torch.ones(3), eps_low=0.1, eps_high=0.1)[0],
        kl_k3(logp, torch.zeros(3)).sum(),
    ]
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss, logp, retain_graph=True)
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()


def test_wrong_shapes_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one shape \(n,\), got \(2,\), \(1,\)"):
        kl_k3(double(1, 2), double(1))
    with pytest.raises(ValueError, match="one shape"):
        cispo_loss(double(1), double(1, 2), double(1), eps_low=0.1, eps_high=0.1)
    with pytest.raises(ValueError, match="ratio to be token, sequence or sequence_mean"):
        ppo(double(1), double(1), double(1), [0], double(1), ratio="word")


def squared(terms: Terms) -> tuple[torch.Tensor, dict[str, float]]:
    """Pull log-probabilities to their advantages."""
    return ((terms.logp - terms.advantages) ** 2).sum() * terms.share, {"n": float(terms.share)}


def test_a_loss_from_outside_is_found_by_module_and_attribute() -> None:
    sample = Sample(
        tokens=(1, 2, 3), positions=(1, 2), logprobs=(-1.0, -1.0), advantages=(0.5, 1.5)
    )
    loss, sums = batch_loss(
        torch.tensor([0.0, 1.0]), [sample], LossSettings(kind=f"{__name__}:squared"), total=4
    )
    assert loss.item() == pytest.approx((0.25 + 0.25) * 2 / 4)
    assert sums == {"n": (1.0, 2)}
