"""Logits a few at a time under DeepSpeed's ZeRO 3, where a rank has the head's weights only while
the head computes.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from experiential.training.runtime import Sample

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
RANKS = 2
SAMPLES = [  # one for each rank; the second has nothing to learn from
    Sample(
        tokens=tuple(range(5, 25)),
        positions=tuple(range(4, 20)),
        logprobs=(-1.0,) * 16,
        advantages=(1.0,) * 16,
        temperature=0.7,
    ),
    Sample(tokens=(0, 0), positions=(), logprobs=(), advantages=()),
]


def rank_main(rank: int, port: int, queue: Any) -> None:
    """Report the largest difference of gradients between ZeRO 3 in pieces and plain torch."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_grad

    from experiential.training.openrlhf import learner as learners
    from tests.llm_tiny import tiny_random_model

    deepspeed.init_distributed("gloo")
    plain, _ = tiny_random_model()
    model, tokenizer = tiny_random_model()
    vocabulary = model.config.vocab_size
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        },
    )
    trainer: Any = SimpleNamespace(
        actor=SimpleNamespace(model=engine), tokenizer=tokenizer, training_step=None
    )
    anything: Any = None
    learner = learners.Learner(
        trainer, fit=anything, append=anything, make_experience=anything, accumulated=1
    )
    sample = SAMPLES[rank]
    sequences = torch.tensor([sample.tokens])
    places = torch.tensor(sample.positions, dtype=torch.long)
    logits = plain(sequences).logits[0, places - 1].float() / sample.temperature
    wanted = torch.log_softmax(logits, 1).gather(1, sequences[0, places][:, None])[:, 0]
    (wanted.square().sum() / RANKS).backward()

    learners.LOGITS = 3 * vocabulary
    found = learner._logprobs(engine, sequences, torch.ones_like(sequences), [sample])
    engine.backward(found.square().sum())
    apart, largest = float((found - wanted).abs().sum()), 0.0
    for mine, (name, parameter) in zip(plain.parameters(), model.named_parameters(), strict=True):
        total = torch.zeros_like(mine) if mine.grad is None else mine.grad
        torch.distributed.all_reduce(total)
        gradient = safe_get_full_grad(parameter)
        assert gradient is not None and gradient.shape == total.shape, name
        largest = max(largest, float(total.abs().max()))
        apart = max(apart, float((gradient - total).abs().max()))
    queue.put((apart, largest))


def test_gradients_in_pieces_are_those_of_plain_torch() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [context.Process(target=rank_main, args=(i, port, queue)) for i in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)
        assert process.exitcode == 0
    for _ in processes:
        apart, largest = queue.get(timeout=60)
        assert largest > 1e-2 and apart < 1e-5 * max(1.0, largest), (apart, largest)
