"""Both policies' engines and ranks on the same "GPU" in turns, on the CPU: DeepSpeed moves its
states, vLLM's scheduler sleeps.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from math import expm1
from pathlib import Path
from typing import Any

import pytest

from experiential.errors import BackendError
from experiential.llm.base import SamplingParams
from experiential.training.runtime import LossSettings, Sample, sample_from_generation
from tests.cluster.experiments import cluster_experiment
from tests.cluster.kills import kill

pytest.importorskip("ray", reason="Ray is not installed; `make test-cluster` runs these tests")
pytest.importorskip("vllm", reason="vLLM is not installed; `make test-cluster` runs these tests")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

PROMPTS = [
    [{"role": "user", "content": f"task {i}: the door is locked. What now?"}] for i in range(6)
]


@pytest.fixture(scope="module")
def policies() -> Iterator[tuple[Any, Any]]:
    import ray

    from experiential.training.openrlhf.runtime import build_runtimes

    ray.init(
        num_cpus=4,
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=300 * 2**20,
        log_to_driver=False,
    )
    found = build_runtimes(
        cluster_experiment("cluster.share_gpus=true", "actor.kl=0.1", "extractor.kl=0.1")
    )
    assert ray.available_resources().get("GPU", 0) == 0
    yield found
    for runtime in found:
        runtime.close()
    ray.shutdown()


async def drawn(runtime: Any, seed: int) -> list[Sample]:
    found = await asyncio.gather(
        *(
            runtime.generate(p, SamplingParams(max_tokens=16, seed=seed + i))
            for i, p in enumerate(PROMPTS)
        )
    )
    return [sample_from_generation(g, 1.0, weight=1 / len(found)) for g in found]


async def apart(runtime: Any, samples: Sequence[Sample]) -> float:
    """How far the ranks are from the engines that drew the samples: mean k3 estimate of the KL
    divergence, in nats.
    """
    scored = [value for part in await runtime.score(samples) for value in part]
    return sum(
        expm1(a - b) - (a - b)
        for a, b in zip(scored, [x for s in samples for x in s.logprobs], strict=True)
    ) / len(scored)


@pytest.mark.parametrize("which", [0, 1], ids=["actor", "extractor"])
async def test_weights_reach_the_engines_with_sync_and_not_before(
    policies: tuple[Any, Any], which: int
) -> None:
    runtime = policies[which]
    samples = await drawn(runtime, 0)
    assert await apart(runtime, samples) < 1e-3
    for _ in range(3):
        await runtime.train(samples, LossSettings(kind="sft"))
    stale = await drawn(runtime, 50)
    moved = await apart(runtime, stale)
    assert moved > 0.05 and all(s.policy_version == 0 for s in stale), (
        "the ranks have moved, the engines have not"
    )
    await runtime.sync()
    fresh = await drawn(runtime, 50)
    assert await apart(runtime, fresh) < min(1e-3, moved / 50) and all(
        s.policy_version == 3 for s in fresh
    )


async def test_a_checkpoint_is_read_back_into_ranks_and_engines(
    policies: tuple[Any, Any], tmp_path: Path
) -> None:
    actor, _ = policies
    samples, version = await drawn(actor, 10), actor.version
    before = await actor.score(samples)
    await actor.save(tmp_path / "saved")
    await actor.train(samples, LossSettings(kind="sft"))
    assert await actor.score(samples) != before
    await actor.load(tmp_path / "saved")
    assert actor.version == version
    again = await actor.score(samples)
    assert [x for part in again for x in part] == pytest.approx(
        [x for part in before for x in part], abs=0.02
    )
    assert await apart(actor, await drawn(actor, 20)) < 1e-3


async def test_both_policies_at_once_take_turns_and_end_with_the_same_weights_everywhere(
    policies: tuple[Any, Any],
) -> None:
    chance = random.Random(1)

    async def work(runtime: Any) -> None:
        samples = await drawn(runtime, 30)
        for _ in range(4):
            task = chance.choice(["draw", "train", "sync"])
            await (
                drawn(runtime, 40)
                if task == "draw"
                else runtime.sync()
                if task == "sync"
                else runtime.train(samples, LossSettings())
            )

    await asyncio.gather(*(work(runtime) for runtime in (*policies, *policies)))
    for runtime in policies:
        await runtime.sync()
        assert await apart(runtime, await drawn(runtime, 60)) < 1e-3


async def test_a_killed_engine_is_named_and_not_started_again(policies: tuple[Any, Any]) -> None:
    import ray

    actor, _ = policies
    kill(ray, actor._engines.handles[0])
    with pytest.raises(BackendError, match="actor engine 0 to be alive"):
        await drawn(actor, 0)
    with pytest.raises(
        BackendError,
        match=r"actor engine 0 to be alive.*not started again alone \(cluster.share_gpus\)",
    ):
        await actor.sync()
