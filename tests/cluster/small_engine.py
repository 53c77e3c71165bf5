"""An engine without vLLM that really generates, for runs in which vLLM's start would take minutes.

Like vLLM's, it is an actor above a process that computes, which gets new weights from rank 0
through gloo; after the death of that process ``generate`` fails and other calls get no answer. With
EXPERIENTIAL_SMALL_ENGINE=1, `tests/cluster/shim` puts it in place of OpenRLHF's module.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import ray

from tests.cluster.stub_engine import EngineDeadError

GROUP_S = 60.0
"""Time in which processes must meet to exchange weights."""
create_vllm_engines = batch_vllm_engine_call = None
"""What OpenRLHF's package imports and nothing here uses."""


def join_group(address: str, port: int, rank: int, world_size: int) -> Any:
    """Join a group of gloo beside the default one, with torch alone."""
    from torch.distributed import PrefixStore, ProcessGroupGloo, rendezvous

    where, wait = f"tcp://{address}:{port}", timedelta(seconds=GROUP_S)
    store, rank, size = next(rendezvous(where, rank, world_size, timeout=wait))
    return ProcessGroupGloo(PrefixStore(where, store), rank, size, wait)


def receive(group: Any, tensor: Any, root: int = 0) -> None:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([tensor], options).wait()


def compute(pipe: Any, model: str, seed: int) -> None:
    """Answer ``(number, method, arguments)`` by ``(number, result)`` until the pipe ends."""
    import torch

    torch.set_num_threads(1)
    from experiential.llm.transformers import TransformersLLM

    llm = TransformersLLM(model, dtype="float32")
    torch.manual_seed(seed)
    parameters = dict(llm.model.named_parameters())
    groups: list[Any] = []

    async def generate(ids: list[int], sampling: Any) -> Any:
        return await llm.generate(ids, sampling)

    async def init_process_group(
        address: str, port: int, offset: int, size: int, *_: Any, **__: Any
    ) -> None:
        groups[:] = [await asyncio.to_thread(join_group, address, port, offset, size)]

    async def update_weight(name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        weight = torch.empty(shape, dtype=dtype)
        await asyncio.to_thread(receive, groups[0], weight)

        def write() -> None:
            if name in parameters:  # a tied head has none of its own
                parameters[name].data.copy_(weight)
            llm.weights_changed(llm.version)

        await llm.executor.run(write)

    async def reset_prefix_cache() -> None:
        await llm.executor.run(llm.forget)

    methods = {one.__name__: one for one in (generate, init_process_group, update_weight)}
    methods["reset_prefix_cache"] = reset_prefix_cache
    loop = asyncio.new_event_loop()

    async def serve(number: int, method: str, arguments: Any, named: Any) -> None:
        try:
            result: Any = await methods[method](*arguments, **named)
        except Exception as error:  # noqa: BLE001  (for the caller)
            result = error
        pipe.send((number, result))

    def read() -> None:
        while True:
            try:
                asked = pipe.recv()
            except EOFError:
                os._exit(0)
            asyncio.run_coroutine_threadsafe(serve(*asked), loop)

    pipe.send((-1, None))
    threading.Thread(target=read, daemon=True).start()
    loop.run_forever()


class RolloutRayActor:
    """Has the methods of OpenRLHF's that are used here."""

    async def __init__(self, model: str, seed: int, **_: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._core = spawn.Process(target=compute, args=(theirs, model, seed), daemon=True)
        self._core.start()
        theirs.close()
        self._loop, self._numbers = asyncio.get_running_loop(), count()
        self._calls: dict[int, asyncio.Future[Any]] = {-1: self._loop.create_future()}
        self._free = asyncio.Event()
        self._free.set()
        self.llm, self.errored = self, False
        self.dead_error = EngineDeadError("EngineCore encountered an issue")
        threading.Thread(target=self._read, daemon=True).start()
        await self._calls[-1]

    def _read(self) -> None:
        while True:
            try:
                number, result = self._pipe.recv()
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._died)
                return
            self._loop.call_soon_threadsafe(self._answer, number, result)

    def _answer(self, number: int, result: Any) -> None:
        call = self._calls.pop(number)
        if call.cancelled():
            return
        if isinstance(result, Exception):
            call.set_exception(result)
        else:
            call.set_result(result)

    def _died(self) -> None:
        self.errored = True
        for number in [*self._calls]:
            if number == -1 or number in self._generating:
                self._answer(number, self.dead_error)

    @property
    def _generating(self) -> set[int]:
        return self.__dict__.setdefault("_asked", set())

    async def _ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        number = next(self._numbers)
        self._calls[number] = self._loop.create_future()
        if method == "generate":
            self._generating.add(number)
        try:
            if self.errored:
                raise BrokenPipeError
            self._pipe.send((number, method, arguments, named))
        except OSError:
            if method == "generate":
                raise self.dead_error from None
        try:
            return await self._calls[number]
        finally:
            self._generating.discard(number)

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def generate(self, ids: list[int], sampling: Any) -> Any:
        await self._free.wait()
        return SimpleNamespace(outputs=[await self._ask("generate", ids, sampling)])

    async def pause_generation(self) -> None:
        await self._ask("reset_prefix_cache")
        self._free.clear()

    async def resume_generation(self) -> None:
        self._free.set()
        await self._ask("reset_prefix_cache")

    async def reset_prefix_cache(self) -> None:
        await self._ask("reset_prefix_cache")

    async def init_process_group(self, *arguments: Any, **named: Any) -> None:
        await self._ask("init_process_group", *arguments, **named)

    async def update_weight(self, *arguments: Any, **named: Any) -> None:
        await self._ask("update_weight", *arguments, **named)

    update_weight_cuda_ipc = sleep = wake_up = reset_prefix_cache


RolloutRayActor = ray.remote(RolloutRayActor)  # type: ignore[assignment,misc]
