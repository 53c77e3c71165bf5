"""Packed rows under DeepSpeed itself, on two ranks: the step of the local runtime at every ZeRO
stage. A rank of ZeRO 3 has the weights of a layer only while it computes, and ranks that make
different numbers of passes would wait for each other without end.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import traceback
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from experiential.config import OptimSettings
from experiential.training.runtime import LossSettings, Sample

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
RANKS, LIMIT = 2, 60
LOSS = LossSettings(kind="cispo", low=0.04, high=0.04, kl=0.3)


@dataclass
class Case:
    """What both sides train, and how; ``softcap`` is a model whose rows cannot branch."""

    stage: int
    softcap: bool = False
    checkpointing: bool = False


CASES = [Case(1), Case(2), Case(3), Case(3, checkpointing=True), Case(3, softcap=True), Case(3)]


def build(case: Case) -> tuple[Any, Any]:
    from tests.llm_tiny import tiny_random_model

    model, tokenizer = tiny_random_model()
    if case.softcap:
        for layer in model.model.layers:  # what another attention function is asked for, as Gemma's
            layer.self_attn.forward = partial(layer.self_attn.forward, softcap=50.0)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, tokenizer


def drawn() -> list[Sample]:
    """Three groups, whose members share a prompt, with responses of different lengths."""
    samples: list[Sample] = []
    for group in range(3):
        prompt = tuple(3 + (7 * i + group) % 300 for i in range(20))
        for k in range(3):
            length = 4 + 5 * k
            response = tuple(5 + (31 * i + 11 * k + group) % 300 for i in range(length))
            samples.append(
                Sample(
                    tokens=prompt + response,
                    positions=tuple(range(20, 20 + length)),
                    logprobs=(-5.9,) * length,
                    advantages=((-1.0) ** k * (1 + group),) * length,
                    weight=0.05 * (1 + k),
                    temperature=0.7,
                    policy_version=-1,
                )
            )
    return samples


def measure(rank: int, case: Case) -> dict[str, float]:
    """Return by how much the step on ranks differs from the local one."""
    import deepspeed
    import torch

    from experiential.llm.transformers import TransformersLLM
    from experiential.training.local import LocalRuntime
    from experiential.training.openrlhf import learner as learners
    from experiential.training.packing import deal

    model, tokenizer = build(case)
    optim = OptimSettings(lr=1e-9, max_grad_norm=1e9, tokens_per_micro_batch=LIMIT)
    local = LocalRuntime(TransformersLLM(model, tokenizer), optim, reference=True)
    scored = asyncio.run(local.score(drawn()))
    samples = [
        replace(s, logprobs=tuple(x + 0.05 * (-1) ** i for i, x in enumerate(values)))
        for s, values in zip(drawn(), scored, strict=True)
    ]
    stats = asyncio.run(local.train(samples, LOSS))
    wanted = [p.grad.clone() for p in model.parameters()]

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    trained, fixed = build(case)[0], build(case)[0]
    before = [p.detach().clone() for p in trained.parameters()]
    engine, *_ = deepspeed.initialize(
        model=trained, optimizer=torch.optim.SGD(trained.parameters(), lr=1.0), config=config
    )
    frozen = {**config, "zero_optimization": {"stage": 3 if case.stage == 3 else 0}}
    reference, *_ = deepspeed.initialize(model=fixed, config=frozen)
    reference.eval()
    learners.LOGITS = 3 * 384
    learner = learners.Learner(engine, tokenizer, ranks=RANKS, reference=reference)
    branching = learner.branching
    dealt = deal(samples, RANKS, limit=LIMIT, branching=branching)
    found = learner.score(samples, [chosen for each in dealt for chosen in each if chosen])
    pairs = zip(found, scored, strict=True)
    score = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    total = sum(len(s.positions) for s in samples)
    rows = [*(each[rank] for each in dealt), ()]  # the last one is empty on both
    result = learner.learn(samples, [learners.Step(rows, total)], LOSS, 0)
    changes: list[torch.Tensor] = []
    for was, now in zip(before, trained.parameters(), strict=True):
        # one by one: of several that it gathers, DeepSpeed waits for the last alone
        with deepspeed.zero.GatheredParameters([now], enabled=case.stage == 3):
            changes.append(was - now.detach())
    sums = torch.tensor([result.loss, float(result.forwarded_tokens)])
    torch.distributed.all_reduce(sums)
    return {
        "branching": branching,
        "largest": max(float(w.abs().max()) for w in wanted),
        "apart": max(float((c - w).abs().max()) for c, w in zip(changes, wanted, strict=True)),
        "loss": abs(float(sums[0]) - stats.loss),
        "norm": abs(result.grad_norm / stats.grad_norm - 1),
        "score": score,
        "forwarded": float(sums[1]) / stats.forwarded_tokens,
        "sequences": stats.sequence_tokens / stats.forwarded_tokens,
    }


def rank_main(rank: int, port: int, queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed

    deepspeed.init_distributed("gloo")
    try:
        queue.put([measure(rank, case) for case in CASES])
    except BaseException:  # the other rank waits for this one
        queue.put(traceback.format_exc())


def test_ranks_of_every_zero_stage_take_the_step_of_the_local_runtime() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [context.Process(target=rank_main, args=(i, port, queue)) for i in range(RANKS)]
    for process in processes:
        process.start()
    results: list[Any] = []
    try:
        for _ in processes:
            results.append(queue.get(timeout=900))
            assert not isinstance(results[-1], str), results[-1]
        for process in processes:
            process.join(300)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    for found in results:
        for case, one in zip(CASES, found, strict=True):
            assert one["branching"] == (not case.softcap), case
            assert one["largest"] > 1e-2 and one["apart"] < 1e-5 * one["largest"], (case, one)
            assert one["loss"] < 1e-5 and one["norm"] < 1e-5 and one["score"] < 1e-4, (case, one)
            assert 1 <= one["forwarded"] < (1.01 if case.softcap else 1.3), (case, one)
