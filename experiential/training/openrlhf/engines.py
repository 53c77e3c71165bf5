"""The vLLM engines of one policy: requests go to the least busy one, and one that dies is started again with the weights of now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiential.errors import BackendError
from experiential.training.openrlhf.parts import EngineSeat, end_engine
from experiential.training.openrlhf.remote import LostActorError, answer, answers


@dataclass(eq=False)
class Engine:
    """One engine and what it is doing.

    Attributes:
        running: requests that it has not answered yet.
        restarts: times that it was started again.
    """

    name: str
    seat: EngineSeat
    running: int = 0
    restarts: int = 0


class Engines:
    """Engines that serve the same weights.

    Args:
        name: of the policy.
        start: starts engine ``i`` and returns at once.
        count: engines.
        call_timeout: seconds that a request may take; an engine that takes longer is held for dead.
        start_timeout: seconds that an engine may take to start.
        restarts: times that each may be started again.
        replaced: awaited after an engine was started again: connects it and gives it the weights of
            now.
        fixed: why an engine that is lost is not started again, for the error; None starts it again.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[int], EngineSeat],
        count: int,
        *,
        call_timeout: float,
        start_timeout: float,
        restarts: int,
        replaced: Callable[[], Awaitable[None]],
        fixed: str | None = None,
    ) -> None:
        self._start, self._replaced, self._restarts, self._fixed = start, replaced, restarts, fixed
        self._call_timeout, self._start_timeout = call_timeout, start_timeout
        self._engines = [Engine(f"{name} engine {i}", start(i)) for i in range(count)]
        self._mending = asyncio.Lock()
        self._serving = asyncio.Event()
        self._serving.set()
        self._busy_since: float | None = None
        self._busy = 0.0

    @property
    def handles(self) -> list[Any]:
        """Ray handles, in order."""
        return [engine.seat.handle for engine in self._engines]

    @property
    def restarts(self) -> int:
        """How often engines were started again."""
        return sum(engine.restarts for engine in self._engines)

    @property
    def busy(self) -> float:
        """Seconds in which at least one request was running."""
        return self._busy + (
            0.0 if self._busy_since is None else time.perf_counter() - self._busy_since
        )

    async def ready(self) -> None:
        """Wait until all engines have started.

        Raises:
            LostActorError: one died or took longer than the start time-out.
        """
        await self._each("get_num_unfinished_requests", self._start_timeout)

    async def generate(self, ids: Sequence[int], params: Any) -> Any:
        """The finished request of one prompt; an engine that is lost is replaced and the request made again.

        Raises:
            BackendError: the engine refused it, or was lost more often than it may be started
                again.
        """
        while True:
            await self._serving.wait()
            engine = min(self._engines, key=lambda e: e.running)
            handle = engine.seat.handle
            self._count(engine, +1)
            try:
                return await answer(
                    handle.generate.remote(list(ids), params), engine.name, self._call_timeout
                )
            except LostActorError as error:
                await self._replace(engine, handle, error)
            finally:
                self._count(engine, -1)

    async def pause(self) -> None:
        """Hold the engines between two tokens; running requests stay where they are."""
        await self._each("pause_generation", self._call_timeout)

    async def resume(self) -> None:
        """Let the engines go on."""
        await self._each("resume_generation", self._call_timeout)

    async def sleep(self) -> None:
        """Move the weights to the machine's memory and forget the cache; no request may be running, vLLM would break it off."""
        await self._each("sleep", self._call_timeout)

    async def wake(self, *parts: Literal["weights", "kv_cache"]) -> None:
        """Give sleeping engines back what is named; they answer once they have both.

        Weights alone are enough to send new ones. An engine with weights alone cannot be put to
            sleep: vLLM takes it for asleep.
        """
        await self._each("wake_up", self._call_timeout, list(parts))
        if "kv_cache" in parts:
            await self._each("reset_prefix_cache", self._call_timeout)

    def close(self) -> None:
        """Kill the engines and free their GPUs."""
        for engine in self._engines:
            end_engine(engine.seat)
        self._engines.clear()

    async def mend(self) -> None:
        """Replace every engine that is dead."""
        for engine in list(self._engines):
            handle = engine.seat.handle
            try:
                await answer(
                    handle.get_num_unfinished_requests.remote(), engine.name, self._call_timeout
                )
            except LostActorError as error:
                await self._replace(engine, handle, error)

    async def _each(self, method: str, seconds: float, *arguments: Any) -> None:
        calls = [getattr(engine.seat.handle, method).remote(*arguments) for engine in self._engines]
        await answers(calls, [engine.name for engine in self._engines], seconds)

    async def _replace(self, engine: Engine, lost: Any, reason: LostActorError) -> None:
        """Start an engine again, unless another request that lost it has done so already."""
        async with self._mending:
            if engine.seat.handle is not lost:
                return
            if self._fixed is not None:
                raise BackendError(f"{reason}; {self._fixed}") from reason
            if engine.restarts >= self._restarts:
                raise BackendError(
                    f"{reason}; it was started again {engine.restarts} times already"
                    " (cluster.restarts)"
                ) from reason
            self._serving.clear()
            try:
                engine.restarts += 1
                end_engine(engine.seat)
                engine.seat = self._start(self._engines.index(engine))
                await self.ready()
                await self._replaced()
            finally:
                self._serving.set()

    def _count(self, engine: Engine, change: int) -> None:
        before = any(e.running for e in self._engines)
        engine.running += change
        after = any(e.running for e in self._engines)
        if after and not before:
            self._busy_since = time.perf_counter()
        elif before and not after and self._busy_since is not None:
            self._busy += time.perf_counter() - self._busy_since
            self._busy_since = None
