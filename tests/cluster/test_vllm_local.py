"""vLLM in the trainer's process, on the CPU: what it draws, and which weights it draws from."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from math import expm1
from pathlib import Path
from typing import Any

import pytest

from experiential.config import ModelSettings, OptimSettings
from experiential.errors import BackendError
from experiential.llm.base import SamplingParams
from experiential.llm.models import open_model
from experiential.training.runtime import LossSettings, Sample, sample_from_generation
from experiential.types import FinishReason, Generation
from tests.cluster.test_engine import ACTIONS, PROMPTS

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-cluster` runs these tests")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

SCHEMA = {
    "type": "object",
    "properties": {"lever": {"enum": ["red", "blue"]}, "pulls": {"type": "integer"}},
    "required": ["lever", "pulls"],
    "additionalProperties": False,
}
KINDS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 16},
    {"choices": ACTIONS, "temperature": 2.0},
    {"max_tokens": 40, "json_schema": SCHEMA},
)


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    """One policy in float32; the only engine of the process, so it sleeps."""
    from experiential.training.local import build_runtimes

    settings = ModelSettings(name="tiny", threads=1, generator="vllm")
    optim = OptimSettings(lr=3e-4)
    policy, _ = build_runtimes(settings, None, (optim, optim), shared=True)
    yield policy
    policy.close()


async def responses(policy: Any, seed: int = 0) -> list[Generation]:
    """Eight free responses, eight choices and eight under a schema."""
    asked = [
        policy.generate(prompt, SamplingParams(seed=seed + i, **kind))
        for kind in KINDS
        for i, prompt in enumerate(PROMPTS)
    ]
    return list(await asyncio.gather(*asked))


def samples_of(generations: Sequence[Generation]) -> list[Sample]:
    return [
        sample_from_generation(g, (-1.0) ** i * (1 + i % 3), weight=1 / len(generations))
        for i, g in enumerate(generations)
    ]


async def gaps(policy: Any, samples: Sequence[Sample]) -> list[float]:
    """k3 per token between the engine's log-probabilities and the trainer's, per kind."""
    scored, found = await policy.score(samples), []
    for start in range(0, len(samples), len(PROMPTS)):
        part = slice(start, start + len(PROMPTS))
        new = [x for values in scored[part] for x in values]
        old = [x for sample in samples[part] for x in sample.logprobs]
        found.append(sum(expm1(a - b) - (a - b) for a, b in zip(new, old, strict=True)) / len(new))
    return found


async def test_responses_keep_to_their_constraints_and_seeds(actor: Any) -> None:
    first, second = await responses(actor, 7), await responses(actor, 7)
    assert [g.response_ids for g in first] == [g.response_ids for g in second]
    assert {g.text for g in first[8:16]} <= set(ACTIONS)
    assert all(g.finish_reason is FinishReason.CHOICE for g in first[8:16])
    for text in (g.text for g in first[16:] if g.finish_reason is FinishReason.STOP):
        assert set(json.loads(text)) == {"lever", "pulls"} and " " not in text
    assert sum(g.finish_reason is FinishReason.STOP for g in first[16:]) >= 4
    stopped = await actor.generate(PROMPTS[0], SamplingParams(stop=("e",), seed=1))
    assert stopped.text.endswith("e") and stopped.text.count("e") == 1


async def test_greedy_tokens_and_logprobs_are_those_of_the_own_engine(actor: Any) -> None:
    own = open_model(ModelSettings(name="tiny"))
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    for prompt in PROMPTS[:4]:
        here, there = await actor.generate(prompt, greedy), await own.generate(prompt, greedy)
        assert here.response_ids == there.response_ids and here.text == there.text
        assert here.logprobs == pytest.approx(there.logprobs, abs=1e-4)
    own.close()


async def test_what_vllm_cannot_take_is_refused_and_the_engine_goes_on(actor: Any) -> None:
    with pytest.raises(BackendError, match="token ids from 0"):
        await actor.generate([5, 10**9])
    with pytest.raises(BackendError, match="context of 4096 tokens"):
        await actor.generate([5] * 4096)
    with pytest.raises(BackendError, match="temperature"):
        await actor.generate([5, 6], SamplingParams(temperature=5.0))
    with pytest.raises(BackendError, match="no such type"):
        await actor.generate([5, 6], SamplingParams(json_schema={"type": "no such type"}))
    waiting = asyncio.create_task(actor.generate([5, 6], SamplingParams(max_tokens=2000)))
    await asyncio.sleep(0.05)
    waiting.cancel()
    assert (await actor.generate([5, 6], SamplingParams(max_tokens=4))).response_ids


async def test_new_weights_reach_the_engine_with_sync_and_not_before(
    actor: Any, tmp_path: Path
) -> None:
    await actor.save(tmp_path / "before")
    version = actor.version
    samples = samples_of(await responses(actor))
    assert max(await gaps(actor, samples)) < 1e-6
    stats = await actor.train(samples, LossSettings(mini_batches=2))
    assert stats.metrics["mismatch_kl"] < 1e-6, "of the first step only, at equal weights"
    assert actor.generator._asleep, "the engine sleeps while the weights are trained"
    for _ in range(2):
        stats = await actor.train(samples, LossSettings(kind="sft"))
        assert "mismatch_kl" not in stats.metrics, "imitation has no ratio"

    stale = samples_of(await responses(actor, 50))
    assert not actor.generator._asleep, "a request wakes it"
    assert {s.policy_version for s in stale} == {version} and actor.version == version + 4
    assert min(await gaps(actor, stale)) > 5e-3

    assert await actor.sync() == version + 4
    fresh = samples_of(await responses(actor, 50))
    assert {s.policy_version for s in fresh} == {version + 4}
    assert max(await gaps(actor, fresh)) < 1e-6

    await actor.load(tmp_path / "before")
    again = samples_of(await responses(actor))
    assert max(await gaps(actor, again)) < 1e-6
    assert [s.tokens for s in again] == [s.tokens for s in samples], "the weights are back"


async def test_requests_survive_sleep_and_new_weights(actor: Any) -> None:
    samples = samples_of(await responses(actor))
    endless = SamplingParams(max_tokens=300, temperature=2.0)
    running = [asyncio.create_task(actor.generate(p, endless)) for p in PROMPTS]
    await asyncio.sleep(0.1)
    assert actor.generator._running
    await actor.train(samples, LossSettings(kind="sft"))
    await actor.sync()
    assert all(g.response_ids for g in await asyncio.gather(*running))
    assert max(await gaps(actor, samples_of(await responses(actor, 90)))) < 1e-6


PAIR = """
import asyncio, json
from experiential.config import LoraSettings, ModelSettings, OptimSettings
from experiential.training.local import build_runtimes
from experiential.training.runtime import LossSettings
from tests.cluster.test_vllm_local import gaps, responses, samples_of

async def main():
    model = ModelSettings(
        name="tiny", threads=1, generator="vllm", dtype="bfloat16", lora=LoraSettings(rank=8)
    )
    optim = OptimSettings(lr=3e-3)
    actor, extractor = build_runtimes(model, None, (optim, optim))
    found = []
    samples = samples_of(await responses(actor))
    found.append(await gaps(actor, samples))
    for _ in range(4):
        await actor.train(samples, LossSettings(kind="sft"))
    found.append(await gaps(actor, samples_of(await responses(actor, 50))))
    await actor.sync()
    found.append(await gaps(actor, samples_of(await responses(actor, 50))))
    found.append(await gaps(extractor, samples_of(await responses(extractor, 50))))
    actor.close()
    extractor.close()
    print(json.dumps(found))

asyncio.run(main())
"""


def without_stand_ins(*arguments: str) -> str:
    """Run Python with vLLM as it is: without `tests/cluster/shim`."""
    env = {k: v for k, v in os.environ.items() if k != "EXPERIENTIAL_CPU_CLUSTER"}
    env["PYTHONPATH"] = os.getcwd()
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_adapters_over_one_base_in_bfloat16_have_an_engine_each() -> None:
    before, stale, synced, other = json.loads(without_stand_ins("-c", PAIR).splitlines()[-1])
    assert max(before) < 1e-3 and max(other) < 1e-3
    # Sharper after training, so the rounding of bfloat16, which differs by machine, weighs more:
    # 0.0008 and 0.0010 were seen, and 0.047 with the weights before.
    assert max(synced) < min(stale) / 20


def test_a_run_learns_from_what_vllm_draws(tmp_path: Path) -> None:
    """Four vaults met again and again, both policies trained and drawn by engines of their own."""
    without_stand_ins(
        "-m",
        "experiential.cli.train",
        *("--recipe", "complementary", "--output", str(tmp_path / "run")),
        *("model.generator=vllm", "env.train={split: train, worlds: 4}", "actor.groups=4"),
        *("actor.group_size=8", "extractor.batch_size=16", "run.steps=16", "run.minutes=null"),
        *("run.checkpoint_every=0", "eval.before=false", "eval.after=false"),
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 17))
    assert sum(event["errors"] for event in steps) == 0
    updated = [event for event in steps if "actor_mismatch_kl" in event]
    assert len(updated) >= 10 and max(event["actor_mismatch_kl"] for event in updated) < 1e-3
    early, late = (sum(event["reward"] for event in part) / 4 for part in (steps[:4], steps[-4:]))
    assert late > early + 0.1, f"success went from {early:.2f} to {late:.2f}"


def test_a_model_that_is_only_asked_answers_by_name() -> None:
    command = (
        "import asyncio, experiential as xp\n"
        "llm = xp.VLLM('tiny', dtype='float32')\n"
        "async def main():\n"
        "    prompt = [{'role': 'user', 'content': 'the door is locked.'}]\n"
        "    made = await llm.generate(prompt, xp.SamplingParams(max_tokens=8, seed=1))\n"
        "    print(made.policy, len(made.response_ids) == len(made.logprobs) > 0)\n"
        "asyncio.run(main())\n"
        "llm.close()\n"
    )
    assert without_stand_ins("-c", command).split() == ["tiny", "True"]
