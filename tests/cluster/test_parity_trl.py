"""Our losses and advantages against TRL's own trainers, value and gradient, with every difference
as an exact factor.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from experiential.config import ActorSettings, OptimSettings
from experiential.llm.transformers import TransformersLLM
from experiential.rollout import Episode
from experiential.training.local import LocalRuntime
from experiential.training.losses import cispo_loss, kl_k3, ppo_clip_loss
from experiential.training.runtime import LossSettings
from experiential.training.samples import actor_samples
from experiential.types import Condition, Generation, Trajectory
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
from tests.llm_tiny import tiny_random_model

pytest.importorskip("trl", reason="TRL is not installed; `make test-cluster` runs these tests")
pytestmark = pytest.mark.cluster

LOW, HIGH = 0.2, 0.28
CLIP = LossSettings(low=LOW, high=HIGH)
LONGEST = 24
"""``max_completion_length``: the constant that Dr. GRPO divides by."""


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """float64 wherever no dtype is named."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def stand_in(args: Any, logp: Tensor) -> Any:
    """Stand in for TRL's trainer in ``_compute_loss``, with log-probabilities for a model."""
    return SimpleNamespace(
        args=args,
        beta=args.beta,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon_high,
        loss_type=getattr(args, "loss_type", None),
        importance_sampling_level=getattr(args, "importance_sampling_level", None),
        max_completion_length=args.max_completion_length,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )


def batch_inputs(batch: Ragged, advantages: Tensor) -> dict[str, Tensor]:
    """The batch as TRL has it: what was injected is in the completion and masked as a tool's."""
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)
    ends = batch.mask.shape[1] - batch.mask.flip(1).long().argmax(1)
    completion = (torch.arange(batch.mask.shape[1]) < ends[:, None]).long()
    assert (completion.bool() & ~batch.mask).any(), "something was injected"
    return {
        "prompt_ids": ids[:, :2],
        "prompt_mask": torch.ones(EPISODES, 2, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": completion,
        "tool_mask": (batch.mask | ~completion.bool()).long(),
        "advantages": advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
    }


def their_loss(batch: Ragged, advantages: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """``GRPOTrainer._compute_loss`` of the batch, and its gradient by every log-probability."""
    from trl import GRPOConfig, GRPOTrainer

    fixed = {
        "output_dir": "unused",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_completion_length": LONGEST,
    }
    args = GRPOConfig(**fixed | {"epsilon": LOW, "epsilon_high": HIGH, "beta": 0.0} | options)
    logp = batch.fresh()
    loss = GRPOTrainer._compute_loss(stand_in(args, logp), None, batch_inputs(batch, advantages))
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


@pytest.mark.parametrize(
    ("loss_type", "settings"),
    [
        ("grpo", {"aggregate": "sequence"}),
        ("dapo", {"aggregate": "token"}),
        ("bnpo", {"aggregate": "token"}),
        (
            "dr_grpo",
            {"aggregate": "constant", "options": {"length_norm": LONGEST}, "estimator": "dr_grpo"},
        ),
    ],
)
def test_the_clipped_loss_of_training_is_that_of_grpo_trainer(
    loss_type: str, settings: dict[str, Any]
) -> None:
    batch = ragged()
    theirs = their_loss(
        batch, our_advantages(settings.get("estimator", "grpo")), loss_type=loss_type
    )
    agree(our_loss(batch, CLIP, **settings), theirs, rtol=FLOAT32)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_clipped_loss_by_itself_agrees_to_the_last_digits(level: str) -> None:
    # Sequence level is GSPO: exp of the mean log-ratio, where eq. 4 has the exp of the sum.
    batch = ragged(spread=0.4 if level == "token" else 0.8)
    logp, mask = batch.fresh(), batch.mask
    loss, stats = ppo_clip_loss(
        logp[mask],
        batch.old[mask],
        (our_advantages()[:, None] * mask)[mask],
        segment=batch.segment(),
        weights=torch.full((EPISODES,), 1 / EPISODES),
        clip_low=LOW,
        clip_high=HIGH,
        ratio="token" if level == "token" else "sequence_mean",
    )
    theirs = their_loss(batch, our_advantages(), loss_type="grpo", importance_sampling_level=level)
    agree((loss.detach(), torch.autograd.grad(loss, logp)[0]), theirs)
    assert 0 < stats["clip_fraction"] < 1, "both branches are taken"


def test_the_sequence_ratio_of_equation_4_is_that_of_rloo_trainer() -> None:
    from trl import RLOOConfig, RLOOTrainer

    batch, advantages = ragged(), our_advantages("rloo")
    args = RLOOConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_completion_length=LONGEST,
        epsilon=LOW,
        epsilon_high=HIGH,
    )
    logp = batch.fresh()
    inputs = batch_inputs(batch, advantages) | {
        "completion_mask": batch.mask.long(),
        "old_logps": (batch.old * batch.mask).sum(1),
    }
    loss = RLOOTrainer._compute_loss(stand_in(args, logp), None, inputs)
    ours = our_loss(
        batch, CLIP.model_copy(update={"ratio": "sequence"}), aggregate="sequence", estimator="rloo"
    )
    agree(ours, (loss.detach(), torch.autograd.grad(loss, logp)[0]), rtol=FLOAT32)


@pytest.mark.parametrize("low", [1.0, 0.2])
def test_cispo_is_theirs_but_for_the_lower_clip(low: float) -> None:
    # theirs: min(rho, epsilon_high), a bound on the ratio itself and none below; ours, eq. 3:
    # clip(rho, 1 - low, 1 + high)
    batch, advantages, high = ragged(), our_advantages(), 0.3
    logp, mask = batch.fresh(), batch.mask
    loss, _ = cispo_loss(
        logp[mask], batch.old[mask], (advantages[:, None] * mask)[mask], eps_low=low, eps_high=high
    )
    ours = loss.detach(), torch.autograd.grad(loss, logp)[0]
    value, gradient = their_loss(batch, advantages, loss_type="cispo", epsilon_high=1 + high)
    rho = (batch.logp - batch.old).exp()
    raised = ((1 - low) / rho).clamp(min=1)
    assert (raised[mask] > 1).any() == (low < 1)
    value = (
        value + ((raised - 1) * gradient * batch.logp).sum()
    )  # each term is its gradient times its log-probability
    agree(ours, (value, gradient * raised))


def test_the_penalty_is_theirs_under_token_means_those_without_advantage_included() -> None:
    batch, beta = ragged(), 0.1
    plain, pulled = (
        their_loss(batch, our_advantages(), loss_type="dapo", beta=b, use_bias_correction_kl=False)
        for b in (0.0, beta)
    )
    wanted = pulled[0] - plain[0], pulled[1] - plain[1]
    ours = [
        our_loss(batch, CLIP.model_copy(update={"kl": b}), aggregate="token", reference=True)
        for b in (0.0, beta)
    ]
    found = ours[1][0] - ours[0][0], ours[1][1] - ours[0][1]
    idle = batch.mask & (our_advantages() == 0)[:, None]
    assert idle.any() and (found[1][idle] != 0).all(), (
        "the third group has no advantage, and is held to the reference all the same"
    )
    agree(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("corrected", [False, True])
def test_under_grpo_their_penalty_is_a_mean_of_sequence_means_and_ours_of_tokens(
    corrected: bool,
) -> None:
    # and with use_bias_correction_kl, their default, each token's divergence is multiplied by its
    # ratio, through which gradient flows
    batch, beta = ragged(), 0.1
    plain, pulled = (
        their_loss(
            batch, our_advantages(), loss_type="grpo", beta=b, use_bias_correction_kl=corrected
        )
        for b in (0.0, beta)
    )
    logp = batch.fresh()
    divergence = kl_k3(logp[batch.mask], batch.reference[batch.mask])
    if corrected:
        divergence = divergence * (logp - batch.old)[batch.mask].exp()
    # the factor from ours, 1 / N for each token, to theirs: N / (B n) for a token of a sequence of
    # n
    factor = batch.lengths.sum() / (EPISODES * batch.lengths.double())
    ours = beta * (divergence * factor[batch.segment()]).mean()
    agree(
        (ours.detach(), torch.autograd.grad(ours, logp)[0]),
        (pulled[0] - plain[0], pulled[1] - plain[1]),
    )


def played(folder: Path, kind: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A real trainer and its batch: it samples from a tiny model, is given `REWARDS` for them and
    compares them.
    """
    import trl
    from datasets import Dataset

    torch.set_default_dtype(torch.float32)
    model, tokenizer = tiny_random_model()
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=EPISODES,
        num_generations=GROUP_SIZE,
        max_completion_length=5,
        beta=0.0,
        **options,
    )
    rows = [{"prompt": f"task {i // GROUP_SIZE}"} for i in range(EPISODES)]

    def rewards(prompts: list[str], **_: Any) -> list[float]:
        assert prompts == [row["prompt"] for row in rows]
        return list(REWARDS)

    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.model.train()
    return trainer, trainer._generate_and_score_completions(rows)


def their_advantages(folder: Path, kind: str, **options: Any) -> Tensor:
    """Advantages of `REWARDS` by a real trainer."""
    return played(folder, kind, **options)[1]["advantages"].double()


def test_without_a_scale_their_advantage_is_dr_grpo_s(tmp_path: Path) -> None:
    found = their_advantages(tmp_path, "GRPO", scale_rewards="none")
    torch.testing.assert_close(our_advantages("dr_grpo"), found, rtol=FLOAT32, atol=1e-12)


def test_theirs_divides_by_the_sample_standard_deviation_of_the_group(tmp_path: Path) -> None:
    # theirs: K - 1 and 1e-4; ours: K and nothing
    rewards = torch.tensor(REWARDS).view(-1, GROUP_SIZE)
    factor = (rewards.std(1, correction=0) / (rewards.std(1) + 1e-4)).repeat_interleave(GROUP_SIZE)
    found = their_advantages(tmp_path, "GRPO", scale_rewards="group")
    torch.testing.assert_close(our_advantages() * factor, found, rtol=FLOAT32, atol=1e-12)


def test_scaled_by_the_batch_theirs_divides_by_the_spread_of_rewards_ours_of_centred_rewards(
    tmp_path: Path,
) -> None:
    centred = our_advantages("dr_grpo")
    factor = centred.pow(2).mean().sqrt() / (torch.tensor(REWARDS).std() + 1e-4)
    assert factor < 0.9
    found = their_advantages(tmp_path, "GRPO", scale_rewards="batch")
    torch.testing.assert_close(
        our_advantages("reinforce++") * factor, found, rtol=FLOAT32, atol=1e-12
    )


def test_the_leave_one_out_baseline_is_theirs(tmp_path: Path) -> None:
    found = their_advantages(tmp_path, "RLOO")
    torch.testing.assert_close(
        our_advantages("rloo"), found, rtol=FLOAT32, atol=FLOAT32
    )  # theirs in float32


@pytest.mark.parametrize(("loss_type", "aggregate"), [("grpo", "sequence"), ("dapo", "token")])
def test_from_tokens_to_the_gradient_of_the_weights_both_trainers_agree(
    tmp_path: Path, loss_type: str, aggregate: str
) -> None:
    trainer, inputs = played(tmp_path, "GRPO", scale_rewards="none", loss_type=loss_type)
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, inputs).backward()
    theirs = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm().item()

    policy = LocalRuntime(TransformersLLM(*tiny_random_model()), OptimSettings())
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    episodes = []
    for i, (prompt, shown, reply, said) in enumerate(
        zip(*(inputs[name] for name in names), strict=True)
    ):
        prompt_ids, response_ids = (
            tuple(prompt[shown.bool()].tolist()),
            tuple(reply[said.bool()].tolist()),
        )
        made = Generation(
            text="x",
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            logprobs=(0.0,) * len(response_ids),
        )
        trajectory = Trajectory(
            task="t", group=str(i // GROUP_SIZE), condition=Condition.FREE, reward=REWARDS[i]
        )
        episodes.append(Episode(trajectory, (made,)))
    settings = ActorSettings.model_validate(
        {"advantage": "pooled", "estimator": "dr_grpo", "aggregate": aggregate}
    )
    samples = actor_samples(episodes, settings)

    async def update() -> float:
        scored = await policy.score(samples)  # the behaviour policy is that of now on both sides
        return (
            await policy.train(
                [replace(s, logprobs=row) for s, row in zip(samples, scored, strict=True)], CLIP
            )
        ).grad_norm

    assert theirs > 0.01
    assert asyncio.run(update()) == pytest.approx(
        theirs, rel=1e-4
    )  # float32 throughout, in other orders of summation
