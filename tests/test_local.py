"""LocalRuntime: what is trained on is what was sampled, and gradients move probabilities the right
way.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from experiential.config import LoraSettings, ModelSettings, OptimSettings
from experiential.errors import CheckpointError
from experiential.llm.base import SamplingParams
from experiential.llm.transformers import TransformersLLM
from experiential.training import local, losses
from experiential.training.local import LocalRuntime, build_runtimes
from experiential.training.runtime import LossSettings, Sample, TrainStats, sample_from_generation
from experiential.training.samples import trajectory_samples
from experiential.types import Generation, Message
from tests.llm_tiny import tiny_random_model

CHOICES = ("left", "right", "wait here")
PROMPTS = [
    [Message(role="user", content=text)]
    for text in ("Go.", "Go.", "A longer question about the door?", "Stop.")
]


def runtime(lr: float = 1e-3, **options: bool) -> LocalRuntime:
    model, tokenizer = tiny_random_model()
    return LocalRuntime(TransformersLLM(model, tokenizer), OptimSettings(lr=lr), **options)


async def generations(policy: LocalRuntime, sampling: SamplingParams) -> list[Generation]:
    return list(await asyncio.gather(*(policy.generate(p, sampling) for p in PROMPTS)))


def logprobs(policy: LocalRuntime, samples: list[Sample]) -> list[float]:
    """Log-probabilities of the trained tokens by a plain forward pass of each sample on its own."""
    values = []
    for sample in samples:
        with torch.no_grad():
            logits = (
                policy.llm.model(input_ids=torch.tensor([sample.tokens])).logits[0].double()
                / sample.temperature
            )
        for i, position in enumerate(sample.positions):
            row = logits[position - 1]
            allowed = sample.allowed[i] if sample.allowed else ()
            pool = row[list(allowed)] if allowed else row
            values.append(float(row[sample.tokens[position]] - torch.logsumexp(pool, 0)))
    return values


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=6),
        SamplingParams(choices=CHOICES),
        SamplingParams(max_tokens=5, temperature=0.7),
    ],
)
async def test_behaviour_logprobs_equal_a_plain_forward(sampling: SamplingParams) -> None:
    policy = runtime()
    samples = [sample_from_generation(g, 1.0) for g in await generations(policy, sampling)]
    recorded = [x for s in samples for x in s.logprobs]
    assert recorded == pytest.approx(logprobs(policy, samples), abs=1e-4)


async def test_first_update_has_ratio_one_and_shares_prompts() -> None:
    policy = runtime()
    samples = [
        sample_from_generation(g, a)
        for g, a in zip(
            await generations(policy, SamplingParams(choices=CHOICES)), (1, -1, 1, -1), strict=True
        )
    ]
    stats = await policy.train(samples, LossSettings())
    assert stats.metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert stats.version == policy.version == 1
    assert stats.forwarded_tokens < stats.sequence_tokens


async def test_training_raises_what_was_rewarded_and_lowers_what_was_punished() -> None:
    policy = runtime(lr=3e-3)
    good, bad = (
        sample_from_generation(g, a)
        for g, a in zip(
            (await generations(policy, SamplingParams(max_tokens=4)))[2:], (1.0, -1.0), strict=True
        )
    )
    before = logprobs(policy, [good]), logprobs(policy, [bad])
    for _ in range(3):
        await policy.train([good, bad], LossSettings(kind="cispo", low=0.9, high=9.0))
    assert sum(logprobs(policy, [good])) > sum(before[0])
    assert sum(logprobs(policy, [bad])) < sum(before[1])


async def test_accumulated_gradients_equal_one_batch() -> None:
    samples = None
    weights = []
    for tokens in (16384, 1):
        policy = runtime()
        policy.optim = OptimSettings(lr=1e-3, tokens_per_micro_batch=tokens)
        samples = samples or [
            sample_from_generation(g, 1.0 - i, weight=0.25)
            for i, g in enumerate(await generations(policy, SamplingParams(max_tokens=5)))
        ]
        await policy.train(samples, LossSettings())
        weights.append(torch.cat([p.detach().flatten() for p in policy.llm.model.parameters()]))
    assert torch.allclose(weights[0], weights[1], atol=2e-4)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])  # the head is trained, or frozen
async def test_logits_in_chunks_give_the_gradients_of_all_at_once(
    lora: LoraSettings | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    optim = OptimSettings(lr=1e-12, max_grad_norm=1e9)
    settings = ModelSettings(name="tiny", lora=lora)
    policy, _ = build_runtimes(settings, None, (optim, optim), shared=True)
    samples = await group(policy)
    found = []
    for logits in (2**24, 7 * 982):  # seven tokens at a time: samples are cut in their middle
        monkeypatch.setattr(losses, "LOGITS", logits)
        await policy.train(samples, LossSettings())
        found.append(gradients(policy))
    policy.close()
    largest = float(found[0].abs().max())
    assert largest > 1e-3
    assert (found[0] - found[1]).abs().max() < 1e-5 * largest


@pytest.mark.parametrize("kind", ["full_reverse_kl", "full_forward_kl"])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])  # the head is trained, or frozen
async def test_full_divergences_have_the_gradient_of_a_plain_loop(
    kind: str, lora: LoraSettings | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are packed and logits cut in chunks here; the loop takes each sample on its own."""
    torch.manual_seed(0)
    optim = OptimSettings(lr=1e-12, max_grad_norm=1e9)
    policy, _ = build_runtimes(
        ModelSettings(name="tiny", lora=lora), None, (optim, optim), shared=True
    )
    prompt = tuple(range(11, 31))  # the teacher's, of another length
    samples: list[Sample] = []
    for one in await group(policy):
        ids = prompt + one.tokens[one.response :]
        moved = len(prompt) - one.response
        taught = replace(
            one,
            tokens=ids,
            positions=tuple(p + moved for p in one.positions),
            response=len(prompt),
        )
        samples.append(replace(one, kind=kind, taught=taught))
    model = policy.llm.model
    model.eval()

    def distribution(sample: Sample) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([sample.tokens])).logits[0]
        logits = logits[[p - 1 for p in sample.positions]] / sample.temperature
        for row, allowed in enumerate(sample.allowed or ()):
            if allowed:
                barred = torch.ones(logits.shape[1], dtype=torch.bool)
                barred[list(allowed)] = False
                logits = logits.masked_fill(
                    barred & (torch.arange(len(logits)) == row)[:, None], -1e9
                )
        return torch.log_softmax(logits, dim=1)

    loss = torch.zeros(())
    for sample in samples:
        assert sample.taught is not None
        own, teacher = distribution(sample), distribution(sample.taught).detach()
        p, q = (own, teacher) if kind == "full_reverse_kl" else (teacher, own)
        loss = loss + sample.weight * (p.exp() * (p - q)).sum(dim=1).mean()
    plain = torch.autograd.grad(loss, policy._parameters)
    wanted = torch.cat([g.flatten() for g in plain])
    monkeypatch.setattr(losses, "LOGITS", 2 * 5 * 982)  # five tokens at a time
    stats = await policy.train(samples, LossSettings())
    found = gradients(policy)
    policy.close()
    assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    largest = float(wanted.abs().max())
    assert largest > 1e-4
    assert (found - wanted).abs().max() < 1e-4 * largest


async def test_less_free_memory_gives_shorter_rows_and_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, rows = [], []
    samples: list[Sample] = []
    monkeypatch.setattr(local, "MICRO_BATCH", (1, 16384))
    for free in (10**11, 2 * 10**7):
        monkeypatch.setattr(local, "free_memory", lambda device, free=free: free)
        policy = runtime(lr=1e-12)
        policy.optim = OptimSettings(lr=1e-12, max_grad_norm=1e9)
        samples = samples or await group(policy)
        await policy.train(samples, LossSettings())
        rows.append(len(policy._rows(samples)))
        found.append(gradients(policy))
    assert rows[0] == 1 < rows[1]
    assert torch.allclose(found[0], found[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_gradients_and_moments_will_take_is_left_to_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny_random_model()
    policy = LocalRuntime(TransformersLLM(model.to(dtype), tokenizer), OptimSettings())
    size = 4 * sum(p.numel() for p in model.parameters())  # in float32, as masters are
    monkeypatch.setattr(local, "MICRO_BATCH", (1, 16384))
    monkeypatch.setattr(local, "_SHARES", {"cpu": 1.0})
    monkeypatch.setattr(local, "free_memory", lambda device: 3 * size)
    assert policy._fitting == 1


def test_a_context_shorter_than_the_probe_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    _, tokenizer = tiny_random_model()
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=48, n_embd=16, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    policy = LocalRuntime(TransformersLLM(GPT2LMHeadModel(config), tokenizer), OptimSettings())
    monkeypatch.setattr(local, "free_memory", lambda device: 10**12)
    assert policy._fitting == local.MICRO_BATCH[1]


async def test_kl_penalty_is_zero_at_the_reference_and_grows_away_from_it() -> None:
    policy = runtime(lr=1e-2, reference=True)
    samples = [
        sample_from_generation(g, 1.0)
        for g in await generations(policy, SamplingParams(max_tokens=4))
    ]
    first = await policy.train(samples, LossSettings(kl=0.1))
    second = await policy.train(samples, LossSettings(kl=0.1))
    assert first.metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert second.metrics["kl_reference"] > 1e-4


async def test_save_and_load_restore_weights_optimiser_and_version(tmp_path: Path) -> None:
    policy, other = runtime(), runtime()
    samples = [
        sample_from_generation(g, 1.0)
        for g in await generations(policy, SamplingParams(max_tokens=4))
    ]
    await policy.train(samples, LossSettings())
    await policy.save(tmp_path / "actor")
    await other.load(tmp_path / "actor")
    assert other.version == 1
    for p in (policy, other):
        await p.train(samples, LossSettings())
    for a, b in zip(policy.llm.model.parameters(), other.llm.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(CheckpointError, match="state"):
        await other.load(tmp_path)


async def test_malformed_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="positions between"):
        await runtime().train([Sample((1, 2), (5,), (0.0,), (1.0,))], LossSettings())


async def test_a_conversation_kept_whole_is_one_sample() -> None:
    policy = runtime()
    first = await policy.generate(PROMPTS[0], SamplingParams(max_tokens=3))
    second = await policy.generate(
        [*first.prompt_ids, *first.response_ids, 5, 6], SamplingParams(max_tokens=3)
    )
    lone = await policy.generate(PROMPTS[2], SamplingParams(max_tokens=3))
    samples = trajectory_samples([first, second, lone], 2.0, 0.5)
    assert len(samples) == 2
    assert len(samples[0].positions) == len(first.response_ids) + len(second.response_ids)
    assert sum(s.weight for s in samples) == pytest.approx(0.5)


async def group(policy: LocalRuntime) -> list[Sample]:
    """Two groups of responses to long prompts, of different lengths, free and constrained."""
    sampling = [
        SamplingParams(max_tokens=n, temperature=t, seed=n)
        for n, t in ((3, 1.0), (7, 0.7), (12, 1.0), (5, 1.3))
    ]
    sampling.append(SamplingParams(choices=CHOICES, seed=1))
    prompts = [[3 + (7 * i + k) % 300 for i in range(40 + 9 * k)] for k in range(2)]
    found = await asyncio.gather(*(policy.generate(p, s) for p in prompts for s in sampling))
    return [
        sample_from_generation(g, (-1.0) ** i * (1 + i), weight=0.1) for i, g in enumerate(found)
    ]


def gradients(policy: LocalRuntime) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy._parameters if p.grad is not None])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["ppo", "cispo"])
async def test_branched_rows_give_the_gradients_of_plain_rows_at_less_cost(
    attention: str, kind: Literal["ppo", "cispo"]
) -> None:
    found, forwarded = [], []
    samples: list[Sample] = []
    for branching in (True, False):
        policy = runtime(lr=0.1)
        policy.optim = OptimSettings(lr=0.1, max_grad_norm=1e9)
        policy.llm.model.set_attn_implementation(attention)
        if not branching:
            policy._packed.branching = False
        samples = samples or await group(policy)
        stats = await policy.train(samples, LossSettings(kind=kind))
        found.append(gradients(policy))
        forwarded.append(stats.forwarded_tokens)
    assert forwarded[0] < 0.5 * forwarded[1]
    assert found[1].abs().max() > 1e-2
    assert torch.allclose(found[0], found[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4), LoraSettings(targets=("up_proj",))])
@pytest.mark.parametrize("checkpoints", [False, True])
async def test_what_all_micro_batches_begin_with_is_computed_once(
    lora: LoraSettings | None, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_SHARING", 100)
    settings = ModelSettings(lora=lora, gradient_checkpointing=checkpoints, dtype="float32")
    beginning = [3 + 5 * i % 300 for i in range(90)]
    prompts = [[*beginning, 7, 9 + i] for i in range(3)]
    found: list[torch.Tensor] = []
    reports: list[TrainStats] = []
    samples: list[Sample] = []
    for limit in (16384, 60):
        optim = OptimSettings(lr=1e-2, max_grad_norm=1e9, tokens_per_micro_batch=limit)
        torch.manual_seed(0)  # adapters begin at random
        policy, _ = build_runtimes(
            settings, None, (optim, optim), shared=True, references=(True, True)
        )
        if not samples:
            asked = (SamplingParams(max_tokens=5 + i, seed=i) for i in range(9))
            drawn = [policy.generate(prompts[i % 3], one) for i, one in enumerate(asked)]
            samples = [
                sample_from_generation(g, (-1.0) ** i)
                for i, g in enumerate(await asyncio.gather(*drawn))
            ]
        torch.manual_seed(1)  # away from the reference, to the same place
        with torch.no_grad():
            for weights in policy._parameters:
                weights += 0.03 * torch.randn_like(weights)
        reports.append(await policy.train(samples, LossSettings(kind="cispo", kl=0.1)))
        found.append(gradients(policy))
        assert len(policy._rows(samples)) == 1 or limit == 60
        policy.close()
    whole, parts = reports
    assert len(found[0]) and whole.metrics["kl_reference"] > 1e-4
    assert parts.metrics["kl_reference"] == pytest.approx(whole.metrics["kl_reference"], rel=1e-3)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-3)
    assert whole.forwarded_tokens <= parts.forwarded_tokens < whole.forwarded_tokens + 90
    assert torch.allclose(found[0], found[1], atol=1e-4 * float(found[0].abs().max()), rtol=1e-2)


async def test_states_of_old_weights_are_gone_when_an_update_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = runtime()
    samples = await group(policy)
    cache = policy.llm._engine.cache
    assert len(cache) > 0
    held: list[int] = []
    rows = policy._rows
    monkeypatch.setattr(policy, "_rows", lambda part: held.append(cache.tokens) or rows(part))
    await policy.train(samples, LossSettings())
    assert held == [0]


@pytest.mark.parametrize(("limit", "times"), [(16384, 0), (60, 1)])
async def test_an_update_for_which_memory_is_short_gives_memory_back_at_its_end(
    limit: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    policy = runtime()
    policy.optim = OptimSettings(tokens_per_micro_batch=limit)
    monkeypatch.setattr(local, "give_back", lambda: given.append(policy.version))
    await policy.train(await group(policy), LossSettings())
    assert given == [1] * times


@pytest.mark.slow
async def test_packed_rows_of_a_model_with_shared_keys_have_the_gradients_of_plain_rows() -> None:
    """SmolLM2: nine heads of queries over three of keys, prompts and responses beyond a block."""
    settings = ModelSettings(name="smollm2", dtype="float32", lora=LoraSettings(rank=4))
    optim = OptimSettings(lr=1e-12, max_grad_norm=1e9, tokens_per_micro_batch=1024)
    policy, _ = build_runtimes(settings, None, (optim, optim), shared=True)
    prompt = tuple(1000 + 37 * i % 9000 for i in range(120))
    samples = [
        Sample(
            tokens=(*prompt, *(2000 + (k + 1) * 53 * i % 7000 for i in range(300))),
            positions=tuple(range(120, 420)),
            logprobs=(-9.0,) * 300,
            advantages=(1.0,) * 300,
        )
        for k in range(2)
    ]
    found, forwarded = [], []
    for branching in (True, False):
        policy._packed.branching = branching
        stats = await policy.train(samples, LossSettings(kind="sft"))
        found.append(gradients(policy))
        forwarded.append(stats.forwarded_tokens)
    policy.close()
    assert forwarded == [121 + 2 * 298, 2 * 419]  # both responses begin with one token
    assert torch.allclose(found[0], found[1], atol=1e-5 * float(found[1].abs().max()), rtol=1e-3)


async def test_a_model_that_takes_no_attention_from_outside_gets_plain_rows() -> None:
    policy, other = runtime(), runtime()
    forward = policy.llm.model.model.forward

    def causal_only(
        input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **options: object
    ) -> object:
        return forward(input_ids=input_ids, position_ids=position_ids, use_cache=False)

    samples = await group(other)
    policy.llm.model.model.forward = causal_only
    plain, branched = (
        await policy.train(samples, LossSettings()),
        await other.train(samples, LossSettings()),
    )
    assert plain.forwarded_tokens > 2 * branched.forwarded_tokens
    assert plain.loss == pytest.approx(branched.loss, abs=1e-5)


async def test_checkpointed_activations_give_the_same_gradients() -> None:
    """`model.gradient_checkpointing`, for whole weights and for an adapter."""
    for lora in (None, LoraSettings(rank=4)):
        found, samples = [], []
        for checkpointed in (False, True):
            torch.manual_seed(0)
            settings = ModelSettings(name="tiny", lora=lora, gradient_checkpointing=checkpointed)
            policy, other = build_runtimes(
                settings,
                settings if lora else None,
                (OptimSettings(lr=1e-9), OptimSettings(lr=1e-9)),
            )
            samples = samples or [
                sample_from_generation(g, 1.0)
                for g in await generations(policy, SamplingParams(max_tokens=5, seed=1))
            ]
            await policy.train(samples, LossSettings(kind="sft"))
            assert policy.llm.model.is_gradient_checkpointing == checkpointed
            found.append(gradients(policy))
            policy.close()
            other.close()
        assert found[0].abs().max() > 1e-4
        assert torch.allclose(found[0], found[1], atol=1e-6, rtol=1e-4)


async def test_scores_and_entropies_are_those_of_a_plain_forward_pass() -> None:
    policy = runtime()
    drawn = [
        *await generations(policy, SamplingParams(max_tokens=6)),
        *await generations(policy, SamplingParams(choices=CHOICES)),
    ]
    samples = [sample_from_generation(g, 1.0) for g in drawn]
    empty = Sample((1, 2), (), (), ())
    scored = await policy.score([*samples, empty])
    assert scored[-1] == ()
    assert [x for row in scored for x in row] == pytest.approx(logprobs(policy, samples), abs=1e-4)
    found = await policy.entropies([*samples, empty])
    for sample, row in zip(samples, found, strict=False):
        with torch.no_grad():
            logits = policy.llm.model(input_ids=torch.tensor([sample.tokens])).logits[0].double()
        for i, (position, entropy) in enumerate(zip(sample.positions, row, strict=True)):
            pool = (
                logits[position - 1][list(sample.allowed[i])]
                if sample.allowed[i]
                else logits[position - 1]
            )
            p = torch.softmax(pool, 0)
            assert entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-4)


async def test_one_batch_may_learn_from_some_and_imitate_others() -> None:
    samples = [
        sample_from_generation(g, 1.0)
        for g in await generations(runtime(), SamplingParams(max_tokens=4))
    ]
    separate = []
    for kind, chosen in (("ppo", samples[:2]), ("sft", samples[2:])):
        policy = runtime()
        stats = await policy.train(chosen, LossSettings(kind=cast("Any", kind)))
        separate.append(
            (stats, [p.grad.clone() for p in policy.llm.model.parameters() if p.grad is not None])
        )
    policy = runtime()
    mixed = await policy.train(
        [*samples[:2], *(replace(s, kind="sft") for s in samples[2:])], LossSettings()
    )
    assert mixed.loss == pytest.approx(separate[0][0].loss + separate[1][0].loss, abs=1e-5)
    assert mixed.metrics["ratio"] == pytest.approx(1.0, abs=1e-4), (
        "imitated tokens do not dilute the ratio"
    )
    assert mixed.metrics["sft_nll"] == pytest.approx(separate[1][0].metrics["nll"], abs=1e-4)
    together = torch.cat(
        [p.grad.flatten() for p in policy.llm.model.parameters() if p.grad is not None]
    )
    first, second = (torch.cat([g.flatten() for g in grads]) for _, grads in separate)
    clipped = [
        x * max(1.0, s.grad_norm) for x, (s, _) in zip((first, second), separate, strict=True)
    ]
    assert torch.allclose(together * max(1.0, mixed.grad_norm), clipped[0] + clipped[1], atol=1e-4)
