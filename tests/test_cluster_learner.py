"""Ranks of the cluster engine take the step of the local runtime, to rounding, in the same rows.

The driver and the learners are the real ones. In place of DeepSpeed's engine stands one that does
what counts of it: ranks wait for each other at every forward and backward pass, gradients are
averaged over them, and only the last backward pass before a step may be a boundary. tests/cluster
runs DeepSpeed itself.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from experiential.config import ClusterSettings, OptimSettings, PolicyClusterSettings
from experiential.llm.base import SamplingParams
from experiential.llm.transformers import TransformersLLM
from experiential.sync import EventLoopThread
from experiential.training.local import LocalRuntime
from experiential.training.openrlhf import learner as learners
from experiential.training.openrlhf import parts
from experiential.training.openrlhf import runtime as runtimes
from experiential.training.openrlhf.learner import BLANK, Learner, Step
from experiential.training.openrlhf.reservation import Reservation
from experiential.training.openrlhf.runtime import OpenRLHFRuntime
from experiential.training.runtime import LossSettings, Sample, sample_from_generation
from tests.llm_tiny import tiny_random_model

pytestmark = pytest.mark.timeout(120)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["north", "south"]}},
    "required": ["a"],
    "additionalProperties": False,
}
OPTIM = OptimSettings(lr=1e-3, max_grad_norm=1e9, tokens_per_micro_batch=60)


class Ranks:
    """Shared by the engines of one policy: they meet here."""

    def __init__(self, count: int) -> None:
        self.count, self.together = count, threading.Barrier(count, timeout=30)
        self.engines: list[Engine] = []
        self.started = False

    def meet(self) -> None:
        """Wait for the others; not before all have started, since threads share locks."""
        if self.started:
            self.together.wait()


class Engine(torch.nn.Module):
    """In place of DeepSpeed's engine, with ZeRO 3's need for equally many passes."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.module: Any = tiny_random_model()[0]
        self.ranks, self.boundary, self.passes, self.norm = ranks, True, 0, 0.0
        self.wants_step = False
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=OPTIM.lr, weight_decay=OPTIM.weight_decay
        )
        self.gradient = torch.zeros(0)

    def forward(self, **inputs: Any) -> Any:
        self.ranks.meet()
        self.passes += 1
        return self.module(**inputs)

    def set_gradient_accumulation_boundary(self, boundary: bool) -> None:
        self.boundary = boundary

    def backward(self, loss: Any, scale_wrt_gas: bool) -> None:
        assert not scale_wrt_gas, "DeepSpeed would divide by a number of micro-batches of its own"
        assert not self.wants_step, "a backward pass after the last one of a step"
        (loss / self.ranks.count).backward()
        self.ranks.meet()
        self.wants_step = self.boundary

    def step(self) -> None:
        assert self.wants_step, "the last backward pass was no boundary"
        self.wants_step = False
        weights = list(self.module.parameters())
        self.gradient = flat(p.grad for p in weights)
        self.ranks.meet()
        total = torch.stack([e.gradient for e in self.ranks.engines]).sum(0)
        self.ranks.meet()
        self.gradient, self.norm = total, float(total.norm())
        parts = total.split([p.numel() for p in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part.view_as(weight).clone()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def get_global_grad_norm(self) -> float:
        return self.norm


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


class Rank:
    """In place of a Ray handle: each call runs on the rank's own thread."""

    def __init__(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        self.engine, self.learned = engine, list[Sequence[Step]]()
        reference: Any = Engine(engine.ranks)
        self.learner = Learner(
            engine, tiny_random_model()[1], ranks=engine.ranks.count, reference=reference
        )
        self._pool = pool

    def start(self, *_: Any) -> tuple[int, bool]:
        return 1, self.learner.branching

    def learn(self, samples: list[Sample], steps: list[Step], *rest: Any) -> Any:
        self.learned.append(steps)
        return self.learner.learn(samples, steps, *rest)

    def score(self, *arguments: Any) -> Any:
        return self.learner.score(*arguments)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("start", "learn", "score"):
            return found

        def remote(*arguments: Any) -> Any:
            future: Future[Any] = self._pool.submit(found, *arguments)
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=remote)


class Engines:
    """In place of the vLLM engines, of which nothing is asked."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.handles, self.busy = list[Any](), 0.0

    async def start(self) -> None:
        pass


Start = Callable[..., OpenRLHFRuntime]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the policy's runtime on so many ranks."""
    ray: Any = ModuleType("ray")
    errors = ("RayError", "RayActorError", "RayTaskError", "GetTimeoutError")
    kinds = {name: type(name, (Exception,), {}) for name in errors}
    ray.exceptions = SimpleNamespace(**kinds)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(runtimes, "Engines", Engines)
    monkeypatch.setattr(parts, "strategy", lambda *_, **__: None)
    thread, pools = EventLoopThread("cluster"), list[ThreadPoolExecutor]()

    def start(count: int, *, branching: bool = True, **sizes: Any) -> OpenRLHFRuntime:
        ranks = Ranks(count)
        ranks.engines += [Engine(ranks) for _ in range(count)]
        pool = ThreadPoolExecutor(count)
        pools.append(pool)

        def start_ranks(*_: Any, **__: Any) -> Any:
            return SimpleNamespace(_actor_handlers=[Rank(e, pool) for e in ranks.engines])

        monkeypatch.setattr(parts, "start_ranks", start_ranks)
        runtime = OpenRLHFRuntime(
            "tiny",
            tiny_random_model()[1],
            PolicyClusterSettings(gpus_per_node=count, max_length=512, **sizes),
            ClusterSettings(call_timeout=60),
            OPTIM,
            name="actor",
            seed=0,
            reference=True,
            thread=thread,
            reservation=Reservation("the group", "actor"),
        )
        thread.run(runtime.ready())
        ranks.started = True
        if not branching:
            runtime._branching = False
            for rank in runtime._ranks:
                rank.learner._policy.branching = rank.learner._reference.branching = False
        return runtime

    yield start
    thread.close()
    for pool in pools:
        pool.shutdown()


def local(**changes: Any) -> LocalRuntime:
    model, tokenizer = tiny_random_model()
    optim = OPTIM.model_copy(update=changes)
    return LocalRuntime(TransformersLLM(model, tokenizer), optim, reference=True)


async def drawn(runtime: LocalRuntime, groups: int = 2) -> list[Sample]:
    """Free, at a temperature, among choices, and under a schema; of weights and advantages of their
    own, off-policy by a little. The members of a group share a prompt.
    """
    sampling = [
        SamplingParams(max_tokens=7, seed=1),
        SamplingParams(max_tokens=4, temperature=0.6, seed=2),
    ]
    sampling += [
        SamplingParams(choices=("go north", "go south", "wait"), seed=3),
        SamplingParams(json_schema=SCHEMA, max_tokens=40, seed=4),
    ]
    prompts = [[30 + i, 5, 9, *range(40, 52 + 3 * i)] for i in range(groups)]
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


@pytest.mark.parametrize("branching", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["ppo", "cispo", "sft", "reverse_kl", "mixed", "corrected"])
async def test_ranks_together_take_the_step_of_the_local_runtime(
    kind: str, ranks: int, branching: bool, start: Start
) -> None:
    here = local()
    here._packed.branching = branching
    samples = await drawn(here)
    if kind == "mixed":
        kinds: list[str | None] = [None, "sft", "reverse_kl"]
        samples, kind = [replace(s, kind=kinds[i % 3]) for i, s in enumerate(samples)], "ppo"
    loss = LossSettings(kind=kind, low=0.04, high=0.04, kl=0.0 if kind == "sft" else 0.3)
    if kind == "corrected":
        loss = loss.model_copy(update={"kind": "ppo", "correction": "token"})
    stats = await here.train(samples, loss)
    wanted = flat(p.grad for p in here._parameters)

    cluster = start(ranks, branching=branching)
    found = await cluster.train(samples, loss)
    assert wanted.abs().max() > 1e-3
    for rank in cluster._ranks:
        apart = (rank.engine.gradient - wanted).abs().max()
        assert apart < 1e-5 * wanted.abs().max()
    assert found.loss == pytest.approx(stats.loss, rel=1e-5, abs=1e-6)
    assert found.grad_norm == pytest.approx(stats.grad_norm, rel=1e-5)
    assert found.metrics.keys() == stats.metrics.keys()
    for name, value in stats.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5)
    same = ("samples", "tokens", "sequence_tokens", "updates", "version")
    assert all(getattr(found, name) == getattr(stats, name) for name in same)
    passes = {len(step.rows) for rank in cluster._ranks for step in rank.learned[0]}
    assert len(passes) == 1, "every rank makes as many forward passes"
    if ranks <= 2 or not branching:  # as many as groups
        assert found.forwarded_tokens == stats.forwarded_tokens
    else:
        assert stats.forwarded_tokens < found.forwarded_tokens < stats.sequence_tokens / 2


@pytest.mark.parametrize("ranks", [1, 2])
async def test_several_steps_and_epochs_lead_to_the_same_weights(ranks: int, start: Start) -> None:
    """Steps are of the samples that the local runtime draws for them."""
    here, cluster = local(), start(ranks)
    samples = await drawn(here, groups=3)
    loss = LossSettings(kind="cispo", kl=0.1, epochs=2, mini_batches=3, seed=7)
    before = flat(here._parameters)
    stats, found = await here.train(samples, loss), await cluster.train(samples, loss)
    assert found.updates == stats.updates == found.version == cluster.version == 6
    assert found.loss == pytest.approx(stats.loss, rel=1e-3, abs=1e-5)
    assert found.grad_norm == pytest.approx(stats.grad_norm, rel=1e-3)
    after = flat(here._parameters)
    assert (after - before).abs().max() > 1e-3
    for rank in cluster._ranks:
        assert torch.allclose(flat(rank.engine.module.parameters()), after, atol=1e-5)
    scored = [await runtime.score(samples) for runtime in (here, cluster)]
    for mine, theirs in zip(*scored, strict=True):
        assert theirs == pytest.approx(mine, abs=1e-4)


async def test_a_step_takes_at_most_the_configured_batch(start: Start) -> None:
    cluster = start(2, batch_size=3)
    samples = await drawn(local())
    stats = await cluster.train(samples, LossSettings(kind="sft"))
    assert stats.updates == cluster.version == 3
    counts = [
        sum(len(row) for rank in cluster._ranks for row in rank.learned[0][i].rows)
        for i in range(3)
    ]
    assert sorted(counts) == [2, 3, 3]
    assert (await cluster.train([], LossSettings())).updates == 0


async def test_a_rank_without_samples_takes_part_in_every_pass(start: Start) -> None:
    here, cluster = local(), start(2)
    (sample, *_) = await drawn(here)
    loss = LossSettings(kind="ppo", kl=0.3)
    stats, found = await here.train([sample], loss), await cluster.train([sample], loss)
    wanted = flat(p.grad for p in here._parameters)
    for rank in cluster._ranks:
        assert torch.allclose(rank.engine.gradient, wanted, atol=1e-5, rtol=1e-4)
    assert found.forwarded_tokens == stats.forwarded_tokens and found.loss == stats.loss
    assert len({rank.engine.passes for rank in cluster._ranks}) == 1


async def test_scores_are_the_log_probabilities_of_each_sample_in_the_order_given(
    start: Start,
) -> None:
    here, cluster = local(), start(2)
    samples = await drawn(here)
    for mine, theirs in zip(await here.score(samples), await cluster.score(samples), strict=True):
        assert len(mine) >= 1 and theirs == pytest.approx(mine, abs=1e-5)
    assert await cluster.score([]) == []


async def test_logits_a_few_at_a_time_change_neither_loss_nor_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The output layer sees no position that is not trained, and at most three at a time."""
    samples = await drawn(local())
    total = sum(len(s.positions) for s in samples)
    loss = LossSettings(kind="ppo", low=0.04, high=0.04)
    made: list[int] = []
    linear = torch.nn.Linear.forward

    def counted(self: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
        out = linear(self, states)
        if self.out_features == vocabulary:
            made.append(out.numel() // vocabulary)
        return out

    vocabulary = tiny_random_model()[0].config.vocab_size
    found: list[tuple[float, torch.Tensor]] = []
    for tokens in (1000, 3):
        monkeypatch.setattr(learners, "LOGITS", tokens * vocabulary)
        ranks = Ranks(1)
        engine = Engine(ranks)
        ranks.engines.append(engine)
        learner = Learner(engine, tiny_random_model()[1], ranks=1)
        assert learner.branching
        made.clear()
        monkeypatch.setattr(torch.nn.Linear, "forward", counted)
        steps = [Step([range(len(samples)), ()], total)]
        found.append((learner.learn(samples, steps, loss, 0).loss, engine.gradient))
        monkeypatch.setattr(torch.nn.Linear, "forward", linear)
        assert max(made) <= tokens
    (whole, wanted), (parts, gradient) = found
    assert max(made) == 3 and sum(made) > total, "in several pieces, and again going back"
    assert parts == pytest.approx(whole, rel=1e-5) and wanted.abs().max() > 1e-3
    assert torch.allclose(gradient, wanted, atol=1e-5, rtol=1e-5)


def test_a_penalty_without_a_reference_is_refused() -> None:
    learner = Learner(Engine(Ranks(1)), tiny_random_model()[1], ranks=1)
    with pytest.raises(ValueError, match="reference"):
        learner.learn([BLANK], [Step([[0]], 1)], LossSettings(kl=0.1), 0)
