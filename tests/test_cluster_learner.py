"""What a rank of the cluster engine adds to OpenRLHF's training loop: the gradient of the local
runtime, to rounding.

The loop itself is OpenRLHF's and needs its packages; here it is played by one that calls the same
things in the same order and divides as DeepSpeed does: every backward pass by the accumulated
micro-batches, gradients by the ranks. tests/cluster runs the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiential.config import OptimSettings
from experiential.llm.base import SamplingParams
from experiential.llm.transformers import TransformersLLM
from experiential.training.local import LocalRuntime
from experiential.training.losses import Sums, add_sums, means
from experiential.training.openrlhf import learner as learners
from experiential.training.openrlhf.learner import BLANK, Learner
from experiential.training.runtime import LossSettings, Sample, sample_from_generation
from tests.llm_tiny import tiny_random_model

MICRO = 3
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["north", "south"]}},
    "required": ["a"],
    "additionalProperties": False,
}


class Wrapped(torch.nn.Module):
    """Stands where DeepSpeed's engine does: the model is its ``module``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model

    def forward(self, *rest: Any, **options: Any) -> Any:
        return self.module(*rest, **options)


class Actor(torch.nn.Module):
    """Stands where OpenRLHF's ``Actor`` does: its forward pass is the one to replace."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = Wrapped(model)

    def forward(self, *rest: Any, **options: Any) -> Any:
        raise AssertionError(
            "OpenRLHF's own forward pass knows neither temperatures nor constraints of a sample"
        )


class Rank:
    """One rank: a replay buffer, and a loop over it in micro-batches padded on the right."""

    def __init__(self, model: Any, tokenizer: Any, ranks: int, accumulated: int) -> None:
        self.actor, self.tokenizer, self.micro_train_batch_size, self.max_epochs = (
            Actor(model),
            tokenizer,
            MICRO,
            1,
        )
        self.actor_loss_fn: Any = None
        self.buffer: list[SimpleNamespace] = []
        self.tokens = 0.0
        self._ranks, self._accumulated = ranks, accumulated

    def training_step(
        self, experience: Any, kl_ctl: float, step: int, info: dict[str, Any]
    ) -> dict[str, Any]:
        log_probs, _ = self.actor(
            experience.sequences,
            experience.action_mask,
            attention_mask=experience.attention_mask,
            return_output=True,
        )
        loss, *rest = self.actor_loss_fn(
            log_probs,
            experience.action_log_probs,
            experience.advantages,
            action_mask=experience.action_mask,
            rollout_log_probs=None,
            **info,
        )
        (loss / self._accumulated / self._ranks).backward()
        assert len(rest) == 4
        return {"num_action_tokens": float(experience.action_mask.sum())}

    def fit(self) -> dict[str, Any]:
        info = {
            "dp_size": self._ranks,
            "batch_num_tokens": self.tokens / self._accumulated,
            "global_batch_size": 0.0,
        }
        for start in range(0, len(self.buffer), MICRO):
            status = self.training_step(
                stacked(self.buffer[start : start + MICRO]), 0.0, start, info
            )
            assert status["num_action_tokens"] >= 1, "OpenRLHF divides by it"
        self.buffer.clear()
        return {"actor_grad_norm": 1.5}


def stacked(experiences: Sequence[SimpleNamespace]) -> SimpleNamespace:
    def padded(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [getattr(e, name)[0] for e in experiences], batch_first=True
        )

    fields = {
        name: padded(name)
        for name in ("sequences", "attention_mask", "action_mask", "action_log_probs", "advantages")
    }
    return SimpleNamespace(
        **fields, info={"sample": torch.tensor([e.info["sample"][0] for e in experiences])}
    )


def local() -> LocalRuntime:
    model, tokenizer = tiny_random_model()
    runtime = LocalRuntime(
        TransformersLLM(model, tokenizer), OptimSettings(lr=1e-9, max_grad_norm=1e9), reference=True
    )
    return runtime


async def drawn(runtime: LocalRuntime) -> list[Sample]:
    """Free, at a temperature, among choices, and under a schema; of weights and advantages of their
    own, off-policy by a little.
    """
    sampling = [
        SamplingParams(max_tokens=7, seed=1),
        SamplingParams(max_tokens=4, temperature=0.6, seed=2),
    ]
    sampling += [
        SamplingParams(choices=("go north", "go south", "wait"), seed=3),
        SamplingParams(json_schema=SCHEMA, max_tokens=40, seed=4),
    ]
    prompts = [[5, 9, 30 + i, 77] for i in range(2)]
    found = await asyncio.gather(*(runtime.generate(p, s) for p in prompts for s in sampling))
    samples = [
        sample_from_generation(g, (-1.0) ** i * (1 + i), weight=0.05 * (1 + i))
        for i, g in enumerate(found)
    ]
    teacher = [tuple(x - 0.3 * (i % 3) for i, x in enumerate(s.logprobs)) for s in samples]
    off = [tuple(x + 0.05 * (-1) ** i for i, x in enumerate(s.logprobs)) for s in samples]
    return [
        replace(s, logprobs=values, teacher=told, policy_version=-1)
        for s, values, told in zip(samples, off, teacher, strict=True)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["ppo", "cispo", "sft", "reverse_kl", "mixed", "corrected"])
async def test_ranks_together_have_the_gradient_and_the_loss_of_the_local_runtime(
    kind: str, ranks: int
) -> None:
    here = local()
    samples = await drawn(here)
    if kind == "mixed":
        kinds: list[str | None] = [None, "sft", "reverse_kl"]
        samples, kind = [replace(s, kind=kinds[i % 3]) for i, s in enumerate(samples)], "ppo"
    loss = LossSettings(kind=kind, low=0.04, high=0.04, kl=0.0 if kind == "sft" else 0.3)
    if kind == "corrected":
        loss = loss.model_copy(update={"kind": "ppo", "correction": "token"})
    stats = await here.train(samples, loss)
    wanted = torch.cat([p.grad.flatten() for p in here._parameters if p.grad is not None])

    filled = [*samples, *[BLANK] * (12 - len(samples))]
    total, found, gradient = sum(len(s.positions) for s in samples), [], torch.zeros_like(wanted)
    for i in range(ranks):
        model, tokenizer = tiny_random_model()
        reference, _ = tiny_random_model()
        rank = Rank(model, tokenizer, ranks, 12 // MICRO // ranks)
        rank.tokens = total
        learner = Learner(
            rank,
            fit=rank.fit,
            append=rank.buffer.append,
            make_experience=SimpleNamespace,
            accumulated=12 // MICRO // ranks,
            reference=SimpleNamespace(model=Wrapped(reference)),
        )
        for sample in filled[i * 12 // ranks : (i + 1) * 12 // ranks]:
            learner.samples.append(sample)
        found.append(learner.learn(loss, updates=1, version=0))
        gradient += torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert wanted.abs().max() > 1e-3
    assert torch.allclose(gradient, wanted, atol=1e-5, rtol=1e-3)
    assert sum(f.loss for f in found) == pytest.approx(stats.loss, rel=1e-4, abs=1e-6)
    assert all(f.grad_norm == 1.5 for f in found)
    sums = Sums()
    for one in found:
        add_sums(sums, one.metrics)
    combined = means(sums)
    assert combined.keys() == stats.metrics.keys()
    for name, value in stats.metrics.items():
        assert combined[name] == pytest.approx(value, rel=1e-3, abs=1e-5)


async def test_logits_a_few_at_a_time_change_neither_loss_nor_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The output layer sees no position that is not trained, and at most three at a time."""
    samples = await drawn(local())
    loss = LossSettings(kind="ppo", low=0.04, high=0.04)
    made: list[int] = []
    linear = torch.nn.Linear.forward

    def counted(self: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
        out = linear(self, states)
        if self.out_features == vocabulary:
            made.append(out.numel() // vocabulary)
        return out

    vocabulary = tiny_random_model()[0].config.vocab_size
    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    found: list[tuple[float, torch.Tensor]] = []
    for tokens in (1000, 3):
        made.clear()
        monkeypatch.setattr(learners, "LOGITS", tokens * vocabulary)
        model, tokenizer = tiny_random_model()
        rank = Rank(model, tokenizer, 1, 4)
        rank.tokens = sum(len(s.positions) for s in samples)
        learner = Learner(
            rank,
            fit=rank.fit,
            append=rank.buffer.append,
            make_experience=SimpleNamespace,
            accumulated=4,
        )
        learner.samples += [*samples, *[BLANK] * (12 - len(samples))]
        stats = learner.learn(loss, updates=1, version=0)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((stats.loss, gradient))
        assert max(made) <= tokens
    (whole, wanted), (parts, gradient) = found
    assert max(made) == 3 and sum(made) > rank.tokens, "in several pieces, and again going back"
    assert parts == pytest.approx(whole, rel=1e-5) and wanted.abs().max() > 1e-3
    assert torch.allclose(gradient, wanted, atol=1e-5, rtol=1e-5)


async def test_scores_are_the_log_probabilities_of_each_sample_in_the_order_given() -> None:
    here = local()
    samples = [
        replace(s, logprobs=tuple(x - 0.05 * (-1) ** i for i, x in enumerate(s.logprobs)))
        for s in await drawn(here)
    ]
    rank = Rank(here.llm.model, here.tokenizer, 1, 1)
    learner = Learner(
        rank,
        fit=rank.fit,
        append=rank.buffer.append,
        make_experience=SimpleNamespace,
        accumulated=1,
    )
    for sample in [*samples, BLANK]:
        learner.samples.append(sample)
    scored = learner.score()
    assert scored.pop() == ()
    for sample, values in zip(samples, scored, strict=True):
        assert values == pytest.approx(sample.logprobs, abs=1e-4)
    learner.samples.append(samples[0])
    with pytest.raises(ValueError, match="reference"):
        learner.learn(LossSettings(kl=0.1), updates=1, version=0)
