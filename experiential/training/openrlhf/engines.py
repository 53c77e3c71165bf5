"""Serve one policy from vLLM engines: the least busy one answers, a lost one is started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from experiential.training.openrlhf.supervisor import Incarnation, LostActorError, Supervisor


class Engine(Supervisor):
    """Supervise one engine.

    Attributes:
        running: number of its requests without an answer yet.
        connected: the actor that the ranks are connected with and that has their weights.
    """

    running = 0
    connected: Incarnation | None = None


class Engines:
    """Balance requests among engines that serve the same weights.

    An engine that takes longer than ``cluster.call_timeout`` for a request counts as dead.

    Args:
        engines: started when they are needed.
        reconnect: awaited after an engine was started again: connects it and sends it the weights
            of now.
    """

    def __init__(self, engines: list[Engine], reconnect: Callable[[], Awaitable[None]]) -> None:
        self.engines, self._reconnect = engines, reconnect
        self._mending = asyncio.Lock()
        self._busy, self._busy_since = 0.0, 0.0

    @property
    def handles(self) -> list[Any]:
        """Return the Ray handles, in order."""
        return [engine.current.handle for engine in self.engines]

    @property
    def busy(self) -> float:
        """Return the seconds in which at least one request was running."""
        running = any(engine.running for engine in self.engines)
        return self._busy + (time.perf_counter() - self._busy_since if running else 0.0)

    async def connect(self, *, first: bool = False) -> None:
        """Start engines that are lost and give them the weights of now; requests wait meanwhile.

        ``first`` only waits until all have started, since the ranks connect when they start.

        Raises:
            LostActorError: one died or took longer than the start time-out.
        """
        async with self._mending:
            if any(engine.connected is not engine.current for engine in self.engines):
                actors = await asyncio.gather(*(engine.started() for engine in self.engines))
                if not first:
                    await self._reconnect()
                for engine, actor in zip(self.engines, actors, strict=True):
                    engine.connected = actor

    async def generate(self, ids: Sequence[int], params: Any) -> Any:
        """Return vLLM's output for one prompt, drawn again elsewhere if its engine is lost.

        Raises:
            BackendError: the engine refused it, or was lost more often than it may be started
                again.
        """
        while True:
            await self.connect()
            engine = min(self.engines, key=lambda e: e.running)
            actor = engine.current
            if not any(e.running for e in self.engines):
                self._busy_since = time.perf_counter()
            engine.running += 1
            try:
                found = await engine.ask(actor, "generate", list(ids), params)
                return found.outputs[0]
            except LostActorError as error:
                engine.lose(actor, error.reason)
            finally:
                engine.running -= 1
                if not any(e.running for e in self.engines):
                    self._busy += time.perf_counter() - self._busy_since

    async def mend(self) -> None:
        """Start every engine again that is dead."""
        for engine in self.engines:
            actor = engine.current
            try:
                await engine.ask(actor, "get_num_unfinished_requests")
            except LostActorError as error:
                engine.lose(actor, error.reason)
        await self.connect()

    async def each(self, method: str, *arguments: Any) -> None:
        """Call a method of OpenRLHF's engine actor in all engines at once.

        ``pause_generation`` holds them between two tokens, and running requests stay where they
        are. ``sleep`` moves the weights to the machine's memory and drops the cache; no request may
        be running, because vLLM would abort it.
        """

        async def ask(engine: Engine) -> None:
            await engine.ask(engine.current, method, *arguments)

        await asyncio.gather(*map(ask, self.engines))

    async def wake(self, *parts: Literal["weights", "kv_cache"]) -> None:
        """Give sleeping engines back the parts named; they answer once they have both.

        Weights alone are enough to receive new ones. An engine with weights alone cannot be put to
        sleep, because vLLM believes that it sleeps.
        """
        await self.each("wake_up", list(parts))
        if "kv_cache" in parts:
            await self.each("reset_prefix_cache")
