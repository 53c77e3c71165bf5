"""Serve one policy from vLLM engines: balance conversations, start a lost engine again."""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import FIRST_COMPLETED as FIRST
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from experiential.errors import BackendError
from experiential.sync import awaited
from experiential.training.openrlhf.supervisor import Incarnation, LostActorError, Supervisor

_log = logging.getLogger(__name__)
SESSIONS = 10_000
"""Conversations whose engine is remembered; the one that was silent longest is forgotten first."""


class Engine(Supervisor):
    """Supervise one engine.

    Attributes:
        running: number of its requests without an answer yet.
        fresh: the actor that got the weights of the ranks, lately or before they began.
    """

    running = 0
    fresh: Incarnation | None = None

    @property
    def present(self) -> Incarnation | None:
        """Return the actor that has started and was not lost; None if there is none."""
        actor = self._current
        return actor if actor is not None and actor.started else None

    @property
    def serving(self) -> Incarnation | None:
        """Return the present actor if it has the weights of the ranks, else None."""
        return self.present if self.present is self.fresh else None


class Engines:
    """Balance conversations among engines that serve the same weights.

    The requests of a session go to one engine, whose prefix cache holds what came before; a new
    session, and a request without one, goes to the least busy engine. An engine that takes longer
    than ``cluster.call_timeout`` for a request counts as dead.

    A lost engine is started again while the others serve, and serves after it got the weights of
    now. One that cannot be started again is done without, as long as another is left.

    Args:
        engines: all are started by `start`.
        reconnect: awaited after an engine was started again: gives the weights of now to all that
            are `present`.
        together: the engines share GPUs, and none goes on without the others.

    Attributes:
        connected: the actors that the ranks send weights to.
    """

    def __init__(
        self,
        engines: list[Engine],
        reconnect: Callable[[], Awaitable[object]],
        *,
        together: bool = False,
    ) -> None:
        self.engines, self._reconnect, self._together = engines, reconnect, together
        self.connected: list[Incarnation] = []
        self._returning = dict[Engine, asyncio.Task[None]]()
        self._sessions: dict[str, Engine] = {}  # least recently asked first
        self._first = 0
        self._busy, self._busy_since = 0.0, 0.0

    @property
    def handles(self) -> list[Any]:
        """Return the Ray handles, in order."""
        return [engine.current.handle for engine in self.engines]

    @property
    def returning(self) -> list[asyncio.Task[None]]:
        """Return the tasks that start lost engines again."""
        return list(self._returning.values())

    @property
    def busy(self) -> float:
        """Return the seconds in which at least one request was running."""
        running = any(engine.running for engine in self.engines)
        return self._busy + (time.perf_counter() - self._busy_since if running else 0.0)

    async def start(self) -> None:
        """Wait until all engines have started; the ranks connect with them when they start.

        Raises:
            LostActorError: one died or took longer than the start time-out.
        """
        actors = await asyncio.gather(*(engine.started() for engine in self.engines))
        for engine, actor in zip(self.engines, actors, strict=True):
            engine.fresh = actor
        self.connected = actors

    def close(self) -> None:
        """End all engines; may be called from any thread, and twice."""
        for engine in self.engines:
            engine.close()
        for task in self.returning:
            with suppress(RuntimeError):  # their loop was closed before
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def generate(self, ids: Sequence[int], params: Any, session: str | None = None) -> Any:
        """Return vLLM's output for one prompt, drawn again if its engine is lost.

        The session of a lost engine then goes to the least busy one.

        Raises:
            BackendError: the engine refused it, or no engine is left.
        """
        while True:
            engine = self._engine_of(session, await self._serving())
            actor = engine.current
            if not any(e.running for e in self.engines):
                self._busy_since = time.perf_counter()
            engine.running += 1
            try:
                found = await engine.ask(actor, "generate", list(ids), params)
                return found.outputs[0]
            except LostActorError as error:
                self._lose(engine, actor, error)
            finally:
                engine.running -= 1
                if not any(e.running for e in self.engines):
                    self._busy += time.perf_counter() - self._busy_since

    async def _serving(self) -> list[Engine]:
        """Return the engines that answer requests; wait for a restart while there is none."""
        while True:
            if self._together:
                _ = self.handles  # raises if one is lost
            if found := [engine for engine in self.engines if engine.serving]:
                return found
            await self._restarted()

    def _engine_of(self, session: str | None, serving: list[Engine]) -> Engine:
        """Return the engine that a session is on, or the least busy one, ties in turn."""
        engine = None if session is None else self._sessions.pop(session, None)
        if engine not in serving:
            order = self.engines[self._first :] + self.engines[: self._first]
            self._first = (self._first + 1) % len(self.engines)
            engine = min((e for e in order if e in serving), key=lambda e: e.running)
        if session is not None:
            self._sessions[session] = engine
            if len(self._sessions) > SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        return engine

    def _lose(self, engine: Engine, actor: Incarnation, error: LostActorError) -> None:
        """Note that an actor was lost, and start the next one while the others serve."""
        engine.lose(actor, error.reason)
        self._return(engine)

    def _return(self, engine: Engine) -> None:
        async def start() -> None:
            while engine.alive and engine.serving is None:
                with suppress(BackendError):  # noted by the supervisor; its restarts are counted
                    await engine.started()
                if engine.present is not None:
                    await self._reconnect()

        def ended(task: asyncio.Task[None]) -> None:
            del self._returning[engine]
            if not task.cancelled() and (error := task.exception()):
                _log.warning("%s was started again and not connected: %s", engine.name, error)

        if engine.alive and engine not in self._returning:
            self._returning[engine] = asyncio.get_running_loop().create_task(start())
            self._returning[engine].add_done_callback(ended)

    async def _restarted(self) -> None:
        """Wait until one engine was started again and got the weights, or has failed to.

        Raises:
            LostActorError: none is left.
            BackendError: the ranks could not send it their weights.
        """
        for engine in self.engines:
            self._return(engine)
        if not self._returning:
            _ = self.handles  # raises and says why the first is lost
        done, _ = await asyncio.wait(self.returning, return_when=FIRST)
        for task in done:
            task.result()

    async def pause(self) -> list[Incarnation]:
        """Hold all engines that have started between two tokens; return their actors.

        Waits for a restart while there is none. Running requests stay where they are. An engine
        that has died is found out here, because vLLM's own process must answer.

        Raises:
            LostActorError: none is left.
        """
        while not (held := await self._asked("pause_generation")):
            starts = [awaited(engine.started()) for engine in self.engines if engine.alive]
            if not starts:
                _ = self.handles  # raises and says why the first is lost
            await asyncio.wait(map(asyncio.ensure_future, starts), return_when=FIRST)
        return held

    async def resume(self) -> None:
        """Let all engines go on that have started."""
        await self._asked("resume_generation")

    def note_weights(self, actors: list[Incarnation]) -> None:
        """Note that these actors have got the weights of the ranks."""
        for engine in self.engines:
            if engine.present in actors:
                engine.fresh = engine.present

    async def _asked(self, method: str) -> list[Incarnation]:
        """Call a method in all engines that have started; return the actors that answered."""

        async def ask(engine: Engine) -> Incarnation | None:
            if actor := engine.present:
                try:
                    await engine.ask(actor, method)
                except LostActorError as error:
                    self._lose(engine, actor, error)
                    return None
            return actor

        return [actor for actor in await asyncio.gather(*map(ask, self.engines)) if actor]

    async def each(self, method: str, *arguments: Any) -> None:
        """Call a method of OpenRLHF's engine actor in all engines at once; none may be lost.

        ``sleep`` moves the weights to the machine's memory and drops the cache; no request may be
        running, because vLLM would abort it.
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
