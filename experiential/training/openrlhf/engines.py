"""Serve one policy from vLLM engines: balance conversations, start a lost engine again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from experiential.training.openrlhf.supervisor import Incarnation, LostActorError, Supervisor

SESSIONS = 10_000
"""Conversations whose engine is remembered; the one that was silent longest is forgotten first."""


class Engine(Supervisor):
    """Supervise one engine.

    Attributes:
        running: number of its requests without an answer yet.
        connected: the actor that the ranks are connected with and that has their weights.
    """

    running = 0
    connected: Incarnation | None = None


class Engines:
    """Balance conversations among engines that serve the same weights.

    The requests of a session go to one engine, whose prefix cache holds what came before; a new
    session, and a request without one, goes to the least busy engine. An engine that takes longer
    than ``cluster.call_timeout`` for a request counts as dead.

    Args:
        engines: started when they are needed.
        reconnect: awaited after an engine was started again: connects it and sends it the weights
            of now.
    """

    def __init__(self, engines: list[Engine], reconnect: Callable[[], Awaitable[None]]) -> None:
        self.engines, self._reconnect = engines, reconnect
        self._mending = asyncio.Lock()
        self._sessions: dict[str, Engine] = {}  # least recently asked first
        self._first = 0
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

    async def generate(self, ids: Sequence[int], params: Any, session: str | None = None) -> Any:
        """Return vLLM's output for one prompt, drawn again if its engine is lost.

        The session of a lost engine then goes to the least busy one.

        Raises:
            BackendError: the engine refused it, or was lost more often than it may be started
                again.
        """
        while True:
            await self.connect()
            engine = self._engine_of(session)
            actor = engine.current
            if not any(e.running for e in self.engines):
                self._busy_since = time.perf_counter()
            engine.running += 1
            try:
                found = await engine.ask(actor, "generate", list(ids), params)
                return found.outputs[0]
            except LostActorError as error:
                engine.lose(actor, error.reason)
                self._sessions = {s: e for s, e in self._sessions.items() if e is not engine}
            finally:
                engine.running -= 1
                if not any(e.running for e in self.engines):
                    self._busy += time.perf_counter() - self._busy_since

    def _engine_of(self, session: str | None) -> Engine:
        """Return the engine that a session is on, or the least busy one, ties in turn."""
        engine = None if session is None else self._sessions.pop(session, None)
        if engine is None:
            order = self.engines[self._first :] + self.engines[: self._first]
            self._first = (self._first + 1) % len(self.engines)
            engine = min(order, key=lambda e: e.running)
        if session is not None:
            self._sessions[session] = engine
            if len(self._sessions) > SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        return engine

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
