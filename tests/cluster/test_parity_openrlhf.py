"""Our losses and advantages against OpenRLHF's own code, value and gradient, with every difference
as an exact factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from experiential.config import Ratio
from experiential.training.losses import (
    importance_weights,
    kl_penalty,
    ppo_clip_loss,
    reverse_kl_loss,
    sft_loss,
)
from experiential.training.runtime import LossSettings
from tests.cluster.ragged import (
    EPISODES,
    FLOAT32,
    GROUP_SIZE,
    REWARDS,
    Ragged,
    agree,
    our_advantages,
    our_loss,
    ragged,
)

pytest.importorskip(
    "openrlhf", reason="OpenRLHF is not installed; `make test-cluster` runs these tests"
)
pytestmark = pytest.mark.cluster

LOW, HIGH = 0.2, 0.28
CLIP = LossSettings(low=LOW, high=HIGH)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """float64 wherever no dtype is named."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def their_loss(
    batch: Ragged, advantages: Tensor, rollout: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """``PolicyLoss`` of the batch, and its gradient by every log-probability."""
    from openrlhf.models.loss import PolicyLoss

    logp = batch.fresh()
    loss = PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH, **options)(
        logp, batch.old, advantages[:, None], batch.mask.double(), rollout
    )[0]
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def their_advantages(batch: Ragged, estimator: str) -> Tensor:
    """OpenRLHF's advantage of every token, zero outside the mask, by the method of its experience
    maker.
    """
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    advantage = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        reward=SimpleNamespace(clip_range=None),
        rollout=SimpleNamespace(n_samples_per_prompt=GROUP_SIZE),
    )
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        kl_ctl=SimpleNamespace(value=0.0),
        advantage_estimator=estimator,
    )
    maker.get_cumulative_returns = lambda *a: RemoteExperienceMaker.get_cumulative_returns(
        maker, *a
    )  # type: ignore[arg-type]
    experience = Experience(
        index=list(range(EPISODES)),
        rewards=torch.tensor(REWARDS),
        action_mask=batch.mask,
        kl=torch.zeros(batch.mask.shape),
    )
    RemoteExperienceMaker.compute_advantages_and_returns(maker, [experience])  # type: ignore[arg-type]
    return experience.advantages * batch.mask


def per_token(batch: Ragged, advantages: Tensor) -> Tensor:
    """The advantage of each episode at its sampled tokens."""
    return advantages[:, None] * batch.mask


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_the_clipped_loss_of_training_is_policy_loss(aggregate: str) -> None:
    batch = ragged()
    theirs = their_loss(batch, our_advantages(), token_level_loss=aggregate == "token")
    agree(our_loss(batch, CLIP, aggregate=aggregate), theirs, rtol=FLOAT32)


@pytest.mark.parametrize("token_level", [True, False])
def test_the_clipped_loss_by_itself_is_policy_loss_to_the_last_digits(token_level: bool) -> None:
    batch, lengths = ragged(), ragged().lengths.double()
    # OpenRLHF divides a sequence's sum by its tokens plus 1e-8
    weights = lengths / lengths.sum() if token_level else lengths / (lengths + 1e-8) / EPISODES
    logp = batch.fresh()
    advantages = per_token(batch, our_advantages())[batch.mask]
    loss, stats = ppo_clip_loss(
        logp[batch.mask],
        batch.old[batch.mask],
        advantages,
        segment=batch.segment(),
        weights=weights,
        clip_low=LOW,
        clip_high=HIGH,
    )
    agree(
        (loss.detach(), torch.autograd.grad(loss, logp)[0]),
        their_loss(batch, our_advantages(), token_level_loss=token_level),
    )
    assert 0.1 < stats["clip_fraction"] < 0.9, "both branches are taken"


def test_gspo_is_our_ratio_of_mean_log_ratios_and_not_of_their_sums() -> None:
    batch, lengths = ragged(), ragged().lengths.double()
    theirs = their_loss(batch, our_advantages(), policy_loss_type="gspo")
    weights = lengths / (lengths + 1e-8) / EPISODES
    found: list[tuple[Tensor, Tensor]] = []
    ratios: tuple[Ratio, ...] = ("sequence_mean", "sequence")
    for ratio in ratios:
        logp = batch.fresh()
        loss, _ = ppo_clip_loss(
            logp[batch.mask],
            batch.old[batch.mask],
            per_token(batch, our_advantages())[batch.mask],
            segment=batch.segment(),
            weights=weights,
            clip_low=LOW,
            clip_high=HIGH,
            ratio=ratio,
        )
        found.append((loss.detach(), torch.autograd.grad(loss, logp)[0]))
    agree(found[0], theirs)
    assert abs(found[1][0] - theirs[0]) > 1e-3


def test_a_correction_by_token_is_their_truncated_importance_sampling() -> None:
    # Theirs clamps on both sides; a lower bound of 0 leaves the upper one.
    batch, lengths, cap = ragged(), ragged().lengths.double(), 1.3
    options = {
        "is_correction_level": "token",
        "is_correction_mode": "clip",
        "is_correction_threshold": [0.0, cap],
        "token_level_loss": False,
    }
    theirs = their_loss(batch, our_advantages(), rollout=batch.reference, **options)
    importance = importance_weights(
        batch.old[batch.mask], batch.reference[batch.mask], batch.segment(), level="token", cap=cap
    )
    assert 0 < (importance == cap).double().mean() < 1, "some weights are truncated"
    logp = batch.fresh()
    loss, _ = ppo_clip_loss(
        logp[batch.mask],
        batch.old[batch.mask],
        per_token(batch, our_advantages())[batch.mask],
        segment=batch.segment(),
        weights=lengths / (lengths + 1e-8) / EPISODES,
        clip_low=LOW,
        clip_high=HIGH,
        importance=importance,
    )
    agree((loss.detach(), torch.autograd.grad(loss, logp)[0]), theirs)


@pytest.mark.parametrize(("ours", "theirs"), [("rloo", "rloo"), ("dr_grpo", "dr_grpo")])
def test_advantages_that_are_the_same(ours: str, theirs: str) -> None:
    batch = ragged()
    torch.testing.assert_close(
        per_token(batch, our_advantages(ours)),
        their_advantages(batch, theirs),
        rtol=FLOAT32,
        atol=1e-12,
    )


def test_group_norm_divides_by_the_sample_standard_deviation() -> None:
    # theirs: K - 1 and 1e-9; ours, eq. 5: K and nothing
    batch, rewards = ragged(), torch.tensor(REWARDS).view(-1, GROUP_SIZE)
    ratio = (rewards.std(1, correction=0) / (rewards.std(1) + 1e-9)).repeat_interleave(GROUP_SIZE)
    assert ratio[0].item() == pytest.approx(((GROUP_SIZE - 1) / GROUP_SIZE) ** 0.5, rel=1e-8)
    torch.testing.assert_close(
        per_token(batch, our_advantages() * ratio),
        their_advantages(batch, "group_norm"),
        rtol=FLOAT32,
        atol=1e-12,
    )


def test_reinforce_baseline_normalises_over_tokens_where_ours_does_over_trajectories() -> None:
    batch = ragged()
    centred = our_advantages("dr_grpo")
    ours = our_advantages("reinforce++")
    torch.testing.assert_close(
        ours * centred.pow(2).mean().sqrt(), centred, rtol=FLOAT32, atol=1e-12
    )
    share = batch.lengths / batch.lengths.sum()
    mean = (share * centred).sum()
    spread = (share * (centred - mean) ** 2).sum().sqrt()
    theirs = their_advantages(batch, "reinforce_baseline")
    torch.testing.assert_close(
        theirs, per_token(batch, (centred - mean) / spread), rtol=FLOAT32, atol=FLOAT32
    )  # theirs in float32
    assert abs(mean) > 1e-3, "with ragged responses the mean over tokens is not 0"


def test_with_responses_of_one_length_both_normalise_alike() -> None:
    batch = ragged()
    batch.mask = torch.zeros_like(batch.mask)
    batch.mask[:, :3] = True
    theirs = their_advantages(batch, "reinforce_baseline")
    torch.testing.assert_close(
        theirs, per_token(batch, our_advantages("reinforce++")), rtol=FLOAT32, atol=FLOAT32
    )


def test_the_penalty_is_theirs_up_to_their_cap_of_ten() -> None:
    from openrlhf.models.utils import compute_approx_kl

    gaps = torch.linspace(
        -2.6, 9.0, 200, dtype=torch.float32
    )  # log pi - log ref; below -2.61 k3 exceeds 10
    for values, capped in (
        (gaps, False),
        (torch.tensor([-2.7, -6.0, -9.0], dtype=torch.float32), True),
    ):
        logp, base = values.clone().requires_grad_(), torch.zeros_like(values)
        ours, theirs = kl_penalty(logp, base), compute_approx_kl(logp, base, kl_estimator="k3")
        gradients = [torch.autograd.grad(x.sum(), logp)[0] for x in (ours, theirs)]
        if capped:
            assert (theirs == 10).all() and (gradients[1] == 0).all(), (
                "theirs stops pulling back where the policy is furthest"
            )
            assert (ours > 10).all() and (gradients[0] < -12).all()
        else:  # theirs is exp(x) - 1 - x, which cancels near 0: roundings of numbers up to 10
            torch.testing.assert_close(ours, theirs, rtol=FLOAT32, atol=2e-6)
            torch.testing.assert_close(gradients[0], gradients[1], rtol=FLOAT32, atol=2e-6)


def test_reverse_kl_has_the_gradient_of_their_unbiased_divergence() -> None:
    from openrlhf.models.utils import compute_approx_kl

    batch, lengths = ragged(), ragged().lengths.double()
    logp = batch.fresh()
    flat, teacher = logp[batch.mask], batch.reference[batch.mask]
    ours, stats = reverse_kl_loss(
        flat, teacher, segment=batch.segment(), weights=lengths / lengths.sum()
    )
    theirs = compute_approx_kl(
        flat, teacher, flat.detach(), kl_estimator="k3", unbiased_gradient=True
    ).mean()
    gradients = [torch.autograd.grad(x, logp, retain_graph=True)[0] for x in (ours, theirs)]
    # they compute in float32: log-probabilities near 2 are rounded to within 1.2e-7, and differ by
    # about 0.5
    torch.testing.assert_close(gradients[0], gradients[1], rtol=FLOAT32, atol=4e-7 / flat.numel())
    assert stats["kl_teacher"] == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("token_level", [True, False])
def test_imitation_is_sft_loss(token_level: bool) -> None:
    from openrlhf.models.loss import SFTLoss

    batch, lengths = ragged(), ragged().lengths.double()
    weights = lengths / lengths.sum() if token_level else lengths / (lengths + 1e-8) / EPISODES
    found = []
    for kind in ("ours", "theirs"):
        logp = batch.fresh()
        if kind == "ours":
            loss = sft_loss(logp[batch.mask], batch.segment(), weights)
        else:
            loss = SFTLoss(token_level_loss=token_level)(logp, batch.mask.double())
        found.append((loss.detach(), torch.autograd.grad(loss, logp)[0]))
    agree(found[0], found[1])


def test_imitation_of_tokens_is_cross_entropy_of_their_language_model_loss() -> None:
    from openrlhf.models.loss import GPTLMLoss

    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((2, 6, 11), generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([[-100, -100, 3, 4, -100, 5], [-100, 7, 8, 9, 10, 2]])
    theirs = GPTLMLoss()(logits, labels)
    wanted = labels[:, 1:] != -100
    chosen = (
        logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    )
    segment = torch.arange(2)[:, None].expand_as(wanted)[wanted]
    ours = sft_loss(chosen[wanted], segment, torch.tensor([3 / 8, 5 / 8]))
    pairs = [
        (x.detach(), torch.autograd.grad(x, logits, retain_graph=True)[0]) for x in (ours, theirs)
    ]
    agree(pairs[0], pairs[1])
