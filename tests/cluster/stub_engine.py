"""An engine without vLLM: OpenRLHF's actor around a process that does nothing and can be killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any


class EngineDeadError(Exception):
    """Stands for vLLM's."""


def compute(pipe: Any) -> None:
    """Start a worker, as vLLM's engine process does, that does not notice the end of others."""
    pipe.send(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"]).pid)
    time.sleep(1e6)


class RolloutRayActor:
    """Answer requests while not held; after the death of its process calls get no answer, as in
    vLLM 0.29.
    """

    async def __init__(self, **_: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self._core = spawn.Process(target=compute, args=(theirs,), daemon=True)
        self._core.start()
        self._worker: int = await asyncio.to_thread(ours.recv)
        self._free = asyncio.Event()
        self._free.set()
        self.llm = self
        self.dead_error = EngineDeadError("EngineCore encountered an issue")

    @property
    def errored(self) -> bool:
        return not self._core.is_alive()

    def get_num_unfinished_requests(self) -> int:
        return 0

    def pids(self) -> tuple[int, int | None, int]:
        return os.getpid(), self._core.pid, self._worker

    async def _utility(self) -> None:
        if self.errored:
            await asyncio.Event().wait()

    async def generate(self, ids: list[int], params: object) -> Any:
        await self._free.wait()
        if self.errored:
            raise self.dead_error
        return SimpleNamespace(outputs=[ids])

    async def pause_generation(self) -> None:
        await self._utility()
        self._free.clear()

    async def resume_generation(self) -> None:
        await self._utility()
        self._free.set()

    async def reset_prefix_cache(self) -> None:
        await self._utility()

    async def update_weight(self) -> None:
        await asyncio.Event().wait()

    init_process_group = update_weight_cuda_ipc = sleep = wake_up = reset_prefix_cache


def stub_module(ray: Any) -> ModuleType:
    """The module of OpenRLHF's engine actor, with the stub in place of it."""
    module: Any = ModuleType("openrlhf.trainer.ray.vllm_engine")
    module.RolloutRayActor = ray.remote(RolloutRayActor)
    return module
