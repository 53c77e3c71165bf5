"""Checkpoints of DeepSpeed alone: every rank writes its share, and others read the whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from experiential.training.openrlhf.rank_state import (
    INDEX,
    BackgroundWriter,
    load_state,
    save_state,
    write_index,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def rank_main(
    rank: int, ranks: int, port: int, stage: int, before: Path | None, after: Path, queue: Any
) -> None:
    """Read a state and save it in the background of two steps, or save after two steps.

    Every rank trains on the same data.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = torch.nn.Sequential(*layers).to(torch.bfloat16)
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    writer = BackgroundWriter()
    if before is not None:
        load_state(engine, before)
        writer.begin(engine, after, rank=rank, ranks=ranks)
    for seed in range(2):
        torch.manual_seed(seed)
        engine.backward(engine(torch.randn(4, 64, dtype=torch.bfloat16)).float().square().sum())
        engine.step()
    if before is None:
        part: Any = save_state(engine, after, rank=rank, ranks=ranks)
    else:
        while (part := writer.part()) is None:
            time.sleep(0.01)
    queue.put((rank, part))


def run(ranks: int, stage: int, before: Path | None, after: Path) -> dict[str, Any]:
    """Return the tensors that ``ranks`` processes saved into ``after``, and the index."""
    from safetensors.torch import load_file

    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        context.Process(target=rank_main, args=(i, ranks, port, stage, before, after, queue))
        for i in range(ranks)
    ]
    for process in processes:
        process.start()
    parts = dict(queue.get(timeout=900) for _ in processes)
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    write_index(after, [parts[i] for i in range(ranks)], {"version": 2})
    files = {file.name: load_file(file) for file in after.glob("*.safetensors")}
    index = json.loads((after / INDEX).read_text())
    tensors = {name: files[file][name] for name, file in index["places"].items()}
    assert sum(map(len, files.values())) == len(tensors) == 3 * 12, "each tensor is written once"
    return {"files": files, "tensors": tensors, "index": index}


def test_two_ranks_write_half_each_and_one_reads_the_same(tmp_path: Path) -> None:
    import torch

    two = run(2, 3, None, tmp_path / "zero-3")
    written = {
        rank: sum(
            tensor.nbytes
            for file, tensors in two["files"].items()
            if file.startswith(f"state-{rank:05d}")
            for tensor in tensors.values()
        )
        for rank in range(2)
    }
    assert sum(written.values()) == 3 * 6 * (64 * 64 + 64) * 4
    assert max(written.values()) < 0.6 * sum(written.values()), written
    assert two["index"]["steps"] == 2 and two["index"]["version"] == 2
    one = run(1, 2, tmp_path / "zero-3", tmp_path / "zero-2")
    for name, tensor in two["tensors"].items():
        assert tensor.dtype == torch.float32 and tensor.any(), name
        assert torch.equal(tensor, one["tensors"][name]), name
    assert one["index"]["steps"] == 2
