"""Find the cause of a failure in an error or in the log of a Ray worker, and name the remedy."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
LOG_LINES = 20
"""Lines of a worker's log that are shown."""
_LOG_BYTES = 200_000
_LONGEST = 300
_READ_S = 20.0
_GUESSES = " Some common causes include"
_RAISED = re.compile(r"(?:^|[\s|)\]])((?:\w+\.)*\w*(?:Error|Exception|OutOfMemory): \S.*)$")
_PREFIX = re.compile(r"^\((?:\w+ )?pid=[^)]*\)\s*")
_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"Free memory on device .* is less than desired",
        "another process holds memory of this GPU: end it (nvidia-smi lists it), or lower"
        " cluster.*.gpu_memory",
    ),
    (
        r"No available memory for the cache blocks|KV cache is needed, which is larger",
        "raise cluster.*.gpu_memory or tensor_parallel, or lower cluster.*.max_length",
    ),
    (
        r"out of memory|OutOfMemory",
        "for ranks lower cluster.*.micro_batch_size or max_length, or set"
        " gradient_checkpointing=true, zero_stage=3 or offload_optimizer=true; for engines lower"
        " cluster.*.gpu_memory or vllm={max_num_seqs: N}; another job on the GPU takes memory too"
        " (nvidia-smi)",
    ),
    (
        r"There is no module or parameter named|were not initialized from checkpoint",
        "the model folder and its config.json do not fit together: save the model again with"
        " transformers' save_pretrained",
    ),
    (
        r"MissingCUDA|CUDA_HOME does not exist|CUDAMismatch|Unable to JIT load",
        "DeepSpeed compiles its optimiser at its first use: install nvcc of the CUDA version of"
        " torch and ninja, and set CUDA_HOME before ray start",
    ),
    (
        r"/dev/shm|No space left on device",
        "give /dev/shm more room: mount -o remount,size=16G /dev/shm, or --shm-size=16g of the"
        " container",
    ),
    (
        r"no socket interface found|Unable to find (?:address|interface) for",
        "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that connects the nodes"
        " (ip -brief address) before ray start, or unset them",
    ),
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        "another process took the port between its choice and its use: start again",
    ),
    (
        r"NCCL error|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError",
        "start Ray with NCCL_DEBUG=INFO and look at the log for the first NCCL WARN; often"
        " NCCL_SOCKET_IFNAME names the wrong interface, or /dev/shm is small",
    ),
)
"""Pattern in an error or a log, and what to do; the first that fits counts."""


def shorten(error: BaseException | str) -> str:
    r"""Return Ray's message in one line of at most 300 characters, without ids and guessed causes.

    A traceback is reduced to its last line, and a longer message loses its middle.

    >>> shorten(ValueError("The actor died.\n\tclass_name: Host\nIt was killed by `ray.kill`."))
    'The actor died. It was killed by `ray.kill`.'
    >>> shorten("ray::Engine() (pid=7)\n  File 'a.py', line 1\n    start()\nValueError: no room")
    'ValueError: no room'
    """
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
    lines = [line for line in lines if line]
    text = find_cause(lines[-1:]) if len(lines) > 1 else ""
    if not text:
        text = " ".join(lines).partition(_GUESSES)[0]
    text = text or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:100]} … {text[-_LONGEST + 100 :]}"


def find_cause(lines: Sequence[str]) -> str:
    """Return the first raised exception among the lines of a log; empty without one.

    The first counts: vLLM's engine process names the reason, and the processes above it only say
    that it failed.
    """
    for line in lines:
        if found := _RAISED.search(_PREFIX.sub("", line.rstrip())):
            return found[1]
    return ""


def remedy(text: str) -> str:
    """Return what to do about a known failure; empty where it is not known."""
    return next((advice for pattern, advice in _REMEDIES if re.search(pattern, text)), "")


def excerpt(lines: Sequence[str], cause: str) -> list[str]:
    """Return the lines of a log that lead to its cause, and the last ones; `LOG_LINES` in all."""
    at = next((i for i, line in enumerate(lines) if cause and cause in line), None)
    before, after = LOG_LINES * 3 // 4, LOG_LINES // 4
    if at is None or at >= len(lines) - after:
        return [*lines[-LOG_LINES:]]
    return [*lines[max(0, at + 1 - before) : at + 1], "...", *lines[1 - after :]]


def read_log(pid: int) -> tuple[str, list[str]]:
    """Return where the log of a Ray worker of this node lies, and its last lines with text.

    What its processes printed comes before what they wrote to stderr: vLLM prints the reason of a
    failure, and only that it failed reaches stderr.
    """
    worker: Any = import_module("ray._private.worker")
    place = Path(worker._global_node.get_logs_dir_path()) / f"worker-*-{pid}"
    lines: list[str] = []
    for file in (*glob.glob(f"{place}.out"), *glob.glob(f"{place}.err")):
        with open(file, "rb") as opened:
            opened.seek(max(0, os.path.getsize(file) - _LOG_BYTES))
            text = opened.read().decode("utf-8", "replace")
        lines += [line for line in text.splitlines() if line.strip()]
    return f"{place}.out and .err", lines


def log_of(actor: str) -> tuple[str, list[str]]:
    """Return where the log of an actor lies, and its last lines; nothing if its node is lost.

    It blocks for some seconds. ``actor`` is its id.
    """
    ray: Any = import_module("ray")
    state: Any = import_module("ray._private.state")
    strategies: Any = import_module("ray.util.scheduling_strategies")
    try:
        info = state.actors(actor)
        node, pid = info["Address"], int(info["Pid"])
        near = strategies.NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(read_log).options(scheduling_strategy=near)
        file, lines = ray.get(task.remote(pid), timeout=_READ_S)
    except Exception as error:  # noqa: BLE001  (the caller has an error to report already)
        _log.warning("the log of actor %s was not read: %s", actor, error)
        return "", []
    return f"{node['IPAddress']}:{file}", lines
