"""The cluster engine whole: two tiny policies on one Ray cluster, with vLLM engines and DeepSpeed
ranks, on the CPU.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from experiential.config import ModelSettings, OptimSettings
from experiential.errors import BackendError
from experiential.llm.base import SamplingParams
from experiential.training.runtime import LossSettings, Sample, sample_from_generation
from experiential.training.trainer import Trainer
from experiential.types import FinishReason, Generation
from tests.cluster.experiments import cluster_experiment
from tests.cluster.kills import engine_cores, kill

pytest.importorskip("ray", reason="Ray is not installed; `make test-cluster` runs these tests")
pytest.importorskip("vllm", reason="vLLM is not installed; `make test-cluster` runs these tests")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

PROMPTS = [
    [{"role": "user", "content": f"task {i}: the door is locked. What now?"}] for i in range(8)
]
ACTIONS = ("pull red", "pull blue", "pull green", "wait")
LR = 3e-4


@pytest.fixture(scope="module")
def ray_with_gpus() -> Iterator[Any]:
    """Ray with seven GPUs that are none: one for each engine and rank."""
    import ray

    ray.init(
        num_cpus=16,
        num_gpus=7,
        include_dashboard=False,
        object_store_memory=300 * 2**20,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def policies(ray_with_gpus: Any) -> Iterator[tuple[Any, Any]]:
    from experiential.training.openrlhf.runtime import build_runtimes

    further = "cluster.actor.vllm={max_num_seqs: 32}"
    found = build_runtimes(cluster_experiment("actor.kl=0.1", "extractor.kl=0.1", further))
    yield found
    for runtime in found:
        runtime.close()


@pytest.fixture(scope="module")
def initial(
    policies: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Both policies as they began."""
    folder = tmp_path_factory.mktemp("initial")
    for runtime in policies:
        asyncio.run(runtime.save(folder / runtime.name))
    return folder / "actor", folder / "extractor"


@pytest.fixture
def actor(policies: tuple[Any, Any], initial: tuple[Path, Path]) -> Any:
    """The actor with the weights and the optimiser that it began with."""
    asyncio.run(policies[0].load(initial[0]))
    return policies[0]


async def responses(runtime: Any, seed: int = 0) -> list[Generation]:
    """Sixteen responses: half free, half one of the actions."""
    free = [
        runtime.generate(p, SamplingParams(max_tokens=16, seed=seed + i))
        for i, p in enumerate(PROMPTS)
    ]
    chosen = [
        runtime.generate(p, SamplingParams(choices=ACTIONS, seed=seed + i, temperature=2.0))
        for i, p in enumerate(PROMPTS)
    ]
    return list(await asyncio.gather(*free, *chosen))


def samples_of(generations: Sequence[Generation]) -> list[Sample]:
    return [
        sample_from_generation(g, (-1.0) ** i * (1 + i % 3), weight=1 / len(generations))
        for i, g in enumerate(generations)
    ]


def flat(parts: Sequence[Sequence[float]]) -> list[float]:
    return [value for part in parts for value in part]


def kl(new: Sequence[float], old: Sequence[float]) -> float:
    """Mean k3 estimate over tokens drawn from ``old``: exp(d) - d - 1 with d = log new - log old;
    never negative.
    """
    from math import expm1

    return sum(expm1(a - b) - (a - b) for a, b in zip(new, old, strict=True)) / len(new)


async def test_engines_and_ranks_give_the_same_tokens_the_same_probability(actor: Any) -> None:
    generations = await responses(actor)
    samples = samples_of(generations)
    scored = await actor.score(samples)
    assert [len(s.positions) for s in samples] == [len(part) for part in scored]
    behaviour = flat([s.logprobs for s in samples])
    assert kl(flat(scored), behaviour) < 1e-3
    assert abs(sum(flat(scored)) - sum(behaviour)) / len(behaviour) < 1e-2
    chosen = generations[len(PROMPTS) :]
    assert {g.text for g in chosen} <= set(ACTIONS) and len({g.text for g in chosen}) > 1
    assert all(g.allowed is not None and len(g.allowed) == len(g.response_ids) for g in chosen)


async def test_a_json_schema_restricts_responses_and_the_ranks_replay_it(actor: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"lever": {"enum": ["red", "blue"]}, "pulls": {"type": "integer"}},
        "required": ["lever", "pulls"],
        "additionalProperties": False,
    }
    ask = SamplingParams(max_tokens=40, json_schema=schema)
    drawn = await asyncio.gather(
        *(actor.generate(p, ask.model_copy(update={"seed": i})) for i, p in enumerate(PROMPTS))
    )
    whole = [g for g in drawn if g.finish_reason is FinishReason.STOP]
    assert len(whole) >= 4 and all(g.json_schema for g in drawn)
    for text in (g.text for g in whole):
        assert set(json.loads(text)) == {"lever", "pulls"} and " " not in text
    samples = samples_of(drawn)
    assert kl(flat(await actor.score(samples)), flat([s.logprobs for s in samples])) < 1e-3


async def test_a_seed_makes_a_response_repeatable(actor: Any) -> None:
    first, second = await responses(actor, seed=5), await responses(actor, seed=5)
    assert [g.response_ids for g in first] == [g.response_ids for g in second]


async def test_a_prompt_that_does_not_fit_is_refused_and_not_cut(actor: Any) -> None:
    with pytest.raises(BackendError, match="fewer than 1024 tokens, got 1030"):
        await actor.generate([5] * 1030)
    with pytest.raises(BackendError, match="actor engine 0"):
        await actor.generate([5, 10**9], SamplingParams(max_tokens=4))
    assert (await actor.generate([5, 6], SamplingParams(max_tokens=4))).response_ids, (
        "the engine goes on"
    )


def local_actor(dtype: Literal["float32", "bfloat16"] = "float32") -> Any:
    from experiential.training.local import build_runtimes

    settings = ModelSettings(name="tiny", threads=1, dtype=dtype)
    return build_runtimes(
        settings, None, (OptimSettings(lr=LR), OptimSettings(lr=LR)), references=(True, True)
    )[0]


def rounded_step(samples: Sequence[Sample], loss: LossSettings) -> tuple[float, float]:
    """Loss and gradient norm of the local runtime, rounded about as on a rank: in bfloat16, one
    sample a row. Kernels round by shape and CPU.
    """
    from experiential.training.packing import Row

    local, value, ends = local_actor("bfloat16"), 0.0, [max(s.positions) for s in samples]
    rows = [
        Row(s.tokens[:end], (i,), (tuple(range(end)),))
        for i, (s, end) in enumerate(zip(samples, ends, strict=True))
    ]
    total = sum(len(s.positions) for s in samples)
    references = local._referred(rows, samples) if loss.kl > 0 else [None] * len(rows)
    for row, reference in zip(rows, references, strict=True):
        part, _ = local._loss(row, samples, loss, total, reference, [], first=True)
        part.backward()
        value += float(part.detach())
    gradients = [p.grad.double() for p in local._parameters if p.grad is not None]
    local.close()
    return value, sum(float(g.square().sum()) for g in gradients) ** 0.5


@pytest.mark.parametrize("kind", ["ppo", "cispo", "sft"])
async def test_both_runtimes_take_the_same_step(
    actor: Any, kind: Literal["ppo", "cispo", "sft"]
) -> None:
    """Loss, gradient norm and the log-probabilities after the update.

    The cluster computes in bfloat16, the other in float32, and the responses depend on the CPU.
    Greatest differences in 30 steps (ten seeds, each kind; AMD EPYC without AMX):

    | from the local runtime | loss | gradient norm |
    |---|---|---|
    | in float32 | 0.008 | 4.5 % |
    | rounded as on a rank | 0.002 | 0.2 % |
    """
    local = local_actor()
    samples = samples_of(await responses(actor))
    loss = LossSettings(kind=kind, kl=0.0 if kind == "sft" else 0.1)
    there, here = await actor.train(samples, loss), await local.train(samples, loss)
    assert there.updates == here.updates == 1 and there.tokens == here.tokens
    assert there.forwarded_tokens == here.forwarded_tokens < there.sequence_tokens
    if kind != "sft":
        assert there.metrics["ratio"] == pytest.approx(1.0, abs=1e-6), "to the ranks' own"
        assert 0 < there.metrics["mismatch_kl"] < 1e-3 and here.metrics["mismatch_kl"] < 1e-3
        assert there.metrics["mismatch_clipped"] == there.metrics["clip_fraction"] == 0.0
    assert there.loss == pytest.approx(here.loss, rel=0.1, abs=0.03)
    assert there.grad_norm == pytest.approx(here.grad_norm, rel=0.1)
    value, norm = rounded_step(samples, loss)
    assert there.loss == pytest.approx(value, rel=0.005, abs=0.005)
    assert there.grad_norm == pytest.approx(norm, rel=0.005)
    before = flat([s.logprobs for s in samples])
    mine, theirs = flat(await local.score(samples)), flat(await actor.score(samples))
    moved = [abs(a - b) for a, b in zip(mine, before, strict=True)]
    apart = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    assert sum(apart) < 0.2 * sum(moved), "both went the same way, and as far"
    local.close()


async def test_weights_reach_the_engines_with_sync_and_not_before(actor: Any) -> None:
    samples = samples_of(await responses(actor))
    for _ in range(3):
        await actor.train(samples, LossSettings(kind="sft"))
    stale = samples_of(await responses(actor, seed=50))
    assert all(s.policy_version == 0 for s in stale) and actor.version == 3
    reference = flat([s.logprobs for s in stale])
    moved = kl(flat(await actor.score(stale)), reference)
    assert moved > 0.05, "the ranks have moved away from the reference, the engines have not"
    await actor.sync()
    fresh = samples_of(await responses(actor, seed=50))
    assert all(s.policy_version == 3 for s in fresh)
    assert kl(flat(await actor.score(fresh)), flat([s.logprobs for s in fresh])) < min(
        1e-3, moved / 50
    )


async def test_a_batch_larger_than_the_configured_one_takes_several_steps(actor: Any) -> None:
    samples = samples_of(await responses(actor))
    many = [replace(s, weight=s.weight / 5) for s in samples * 5]
    stats = await actor.train(many, LossSettings(kind="cispo", epochs=2))
    assert len(many) == 80 and stats.updates == 4 and actor.version == 4
    assert (await actor.train([], LossSettings())).updates == 0


async def test_a_killed_engine_is_replaced_by_one_with_the_weights_of_now(
    actor: Any, ray_with_gpus: Any
) -> None:
    await actor.train(samples_of(await responses(actor)), LossSettings(kind="sft"))
    await actor.sync()
    before = actor.restarts
    running = [
        asyncio.create_task(actor.generate(p, SamplingParams(max_tokens=200, seed=i)))
        for i, p in enumerate(PROMPTS)
    ]
    await asyncio.sleep(0.05)
    ray_with_gpus.kill(actor._engines.handles[0])
    assert all(g.response_ids for g in await asyncio.gather(*running)), "every request was answered"
    assert actor.restarts == before + 1
    samples = samples_of(await responses(actor))
    assert kl(flat(await actor.score(samples)), flat([s.logprobs for s in samples])) < 1e-3


def processes(ray: Any, handle: Any) -> list[psutil.Process]:
    """The process of an engine's actor, and vLLM's own below it: its engine, then its workers."""
    actor = psutil.Process(ray._private.state.actors(handle._actor_id.hex())["Pid"])
    (core,) = engine_cores(actor)
    return [actor, core, *core.children(recursive=True)]


@pytest.mark.parametrize("which", [1, 0], ids=["vllm", "actor"])
async def test_a_process_killed_unnoticed_is_replaced_and_leaves_none_behind(
    policies: tuple[Any, Any], initial: tuple[Path, Path], ray_with_gpus: Any, which: int
) -> None:
    extractor = policies[1]
    await extractor.load(initial[1])
    before = extractor.restarts
    killed = processes(ray_with_gpus, extractor._engines.handles[0])
    killed[which].kill()
    await extractor.sync()
    assert extractor.restarts == before + 1
    samples = samples_of(await responses(extractor))
    assert kl(flat(await extractor.score(samples)), flat([s.logprobs for s in samples])) < 1e-3
    gone, alive = psutil.wait_procs(killed, timeout=60)
    assert len(gone) == len(killed) >= 2, alive


async def test_a_checkpoint_is_resumed_on_two_ranks_with_zero_3_and_a_dead_rank_is_named(
    actor: Any, ray_with_gpus: Any, tmp_path: Path
) -> None:
    from experiential.config import ClusterSettings, PolicyClusterSettings
    from experiential.llm.models import load_tokenizer, resolve_model
    from experiential.sync import EventLoopThread
    from experiential.training.openrlhf.runtime import OpenRLHFRuntime

    samples = samples_of(await responses(actor))
    for seed in range(2):
        await actor.train(samples, LossSettings(kind="cispo", seed=seed))
    await actor.save(tmp_path / "saved")
    sizes = cluster_experiment().cluster.actor
    wide = PolicyClusterSettings(**sizes.model_dump() | {"gpus_per_node": 2, "zero_stage": 3})
    other = OpenRLHFRuntime(
        resolve_model("tiny"),
        load_tokenizer("tiny"),
        wide,
        ClusterSettings(),
        OptimSettings(lr=LR),
        name="wide",
        seed=1,
        reference=False,
        thread=EventLoopThread("wide"),
    )
    await other.ready()
    await other.load(tmp_path / "saved")
    assert other.version == actor.version == 2
    assert kl(flat(await other.score(samples)), flat(await actor.score(samples))) < 1e-3
    mine, theirs = [
        await runtime.train(samples, LossSettings(kind="cispo")) for runtime in (actor, other)
    ]
    assert theirs.loss == pytest.approx(
        mine.loss, rel=0.02, abs=0.01
    ) and theirs.grad_norm == pytest.approx(mine.grad_norm, rel=0.05)
    after, before = flat(await actor.score(samples)), [x for s in samples for x in s.logprobs]
    apart = [abs(a - b) for a, b in zip(after, flat(await other.score(samples)), strict=True)]
    moved = [abs(a - b) for a, b in zip(after, before, strict=True)]
    assert sum(apart) < 0.2 * sum(moved), (
        "the moments of the optimiser were restored too: the third step is the same"
    )
    await other.sync()
    drawn = samples_of(await responses(other))
    assert kl(flat(await other.score(drawn)), flat([s.logprobs for s in drawn])) < 1e-3

    kill(ray_with_gpus, other._ranks[1])
    with pytest.raises(BackendError, match="wide rank 1 to be alive"):
        await other.train(samples, LossSettings(kind="cispo"))
    other.close()


def test_both_policies_learn_together_lose_an_engine_and_resume(
    policies: tuple[Any, Any], initial: tuple[Path, Path], ray_with_gpus: Any, tmp_path: Path
) -> None:
    """Four vaults met again and again: success rises, entries are written, and both policies are
    updated.
    """
    for runtime, folder in zip(policies, initial, strict=True):
        asyncio.run(runtime.load(folder))
    settings = (
        "env.train={split: train, worlds: 4}",
        "actor.groups=4",
        "actor.group_size=8",
        "extractor.batch_size=16",
        "run.minutes=null",
        "run.checkpoint_every=0",
        "eval.before=false",
        "eval.after=false",
        "cluster.env_workers=2",
        "cluster.remote_bank=true",
    )
    steps: list[dict[str, Any]] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            steps.append(event)
            if event["step"] == 5:
                ray_with_gpus.kill(policies[0]._engines.handles[0])

    Trainer(
        cluster_experiment(*settings, "run.steps=16"),
        tmp_path / "run",
        observer=watch,
        runtimes=policies,
    ).run()
    assert [event["step"] for event in steps] == list(range(1, 17))
    assert policies[0].restarts >= 1 and sum(event["errors"] for event in steps) == 0
    assert (
        steps[-1]["actor_version"] >= 10
        and steps[-1]["extractor_updates"] >= 2
        and steps[-1]["entries"] > 20
    )
    early, late = (sum(event["reward"] for event in part) / 4 for part in (steps[:4], steps[-4:]))
    assert late > early + 0.15, f"success went from {early:.2f} to {late:.2f}"
    versions = [runtime.version for runtime in policies]

    Trainer(
        cluster_experiment(*settings, "run.steps=18"),
        tmp_path / "run",
        resume=True,
        observer=watch,
        runtimes=policies,
    ).run()
    assert [event["step"] for event in steps[16:]] == [17, 18]
    assert steps[-1]["entries"] >= steps[15]["entries"]
    trained = sum(bool(event["update_tokens"]) for event in steps[16:])
    updates = policies[0].version - versions[0]
    assert updates >= trained and bool(updates) == bool(trained), (
        "the resumed run counts on from the version saved; groups that all win train nothing"
    )
