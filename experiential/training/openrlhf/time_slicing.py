"""Share GPUs by time-slicing: one tenant uses them at a time, the others sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from experiential.sync import awaited

K = TypeVar("K")

SLICE_S = 30.0  # a guess; nothing was measured


@dataclass(eq=False)
class _Request(Generic[K]):
    tenant: K
    exclusive: bool
    admitted: asyncio.Future[None]


class TimeSlicer(Generic[K]):
    """Schedule requests of several tenants, of which one is served at any time, on one event loop.

    The oldest request decides which tenant is next, and all requests of that tenant are admitted
    with it, unless it is exclusive. While others wait, newcomers of the tenant that is served are
    admitted for ``seconds`` from the start of its slice, and only while one of its requests still
    runs. So a request waits at most for the slices of those who came before it: each ``seconds``
    and the work that was under way then.

    No request runs while the tenant changes. A switch that fails is raised in the requests it was
    made for; the next one is tried all the same.

    Args:
        switch: awaited before each slice with its tenant, also where that tenant had the last one.
        seconds: see above.
        clock: current time in seconds.
    """

    def __init__(
        self,
        switch: Callable[[K], Awaitable[None]],
        *,
        seconds: float = SLICE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prepare, self._seconds, self._clock = switch, seconds, clock
        self._waiting: list[_Request[K]] = []
        self._running: list[_Request[K]] = []
        self._switching: asyncio.Task[None] | None = None
        self._began = 0.0

    @asynccontextmanager
    async def slot(self, tenant: K, *, exclusive: bool) -> AsyncGenerator[None]:
        """Hold a place in a slice of ``tenant`` until the block ends; may be cancelled at any time.

        An ``exclusive`` request runs without others of its tenant. An error of the switch to this
        tenant is raised.
        """
        request = _Request(tenant, exclusive, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._advance()
        try:
            await request.admitted
            yield
        finally:  # it has run, or it was cancelled while it waited
            for requests in (self._waiting, self._running):
                if request in requests:
                    requests.remove(request)
            self._advance()

    def _advance(self) -> None:
        if self._switching is not None or not self._waiting:
            return
        if not self._running:
            loop = asyncio.get_running_loop()
            self._switching = loop.create_task(self._switch(self._waiting[0]))
        elif not (first := self._running[0]).exclusive:
            others = any(r.exclusive or r.tenant != first.tenant for r in self._waiting)
            if not others or self._clock() - self._began < self._seconds:
                self._admit(first, None)

    async def _switch(self, first: _Request[K]) -> None:
        outcome = await awaited(self._prepare(first.tenant))
        self._switching = None
        self._began = self._clock()
        if first in self._waiting:  # else it was cancelled meanwhile
            self._admit(first, outcome if isinstance(outcome, Exception) else None)
        self._advance()

    def _admit(self, first: _Request[K], error: Exception | None) -> None:
        """Admit ``first`` where it waits, and all that may share its slice; raise any error."""
        for request in self._waiting.copy():
            shares = request.tenant == first.tenant and not (request.exclusive or first.exclusive)
            if request is not first and not shares:
                continue
            self._waiting.remove(request)
            if request.admitted.done():  # cancelled: it is about to leave
                continue
            if error is None:
                self._running.append(request)
                request.admitted.set_result(None)
            else:
                request.admitted.set_exception(error)


@dataclass(frozen=True, eq=False)
class Tenant:
    """Wake and put to sleep the engines or the ranks of one policy.

    ``wake`` is awaited again if it failed, and ``sleep`` is also awaited where waking failed.
    """

    wake: Callable[[], Awaitable[object]]
    sleep: Callable[[], Awaitable[object]]


class SharedGpus:
    """Let engines and ranks of both policies use the GPUs of one node in slices.

    All sleep at first, and at most one tenant is awake. The last one stays awake until another
    needs the GPUs: engines that generate between two updates are woken once.

    Attributes:
        slicer: its slots are for as many requests to engines as come, and for ranks exclusive.
    """

    def __init__(self) -> None:
        self.slicer = TimeSlicer[Tenant | None](self._switch)
        self._awake: Tenant | None = None
        self._whole = True

    @asynccontextmanager
    async def sending(self, engines: Tenant) -> AsyncGenerator[None]:
        """Hold a slot in which all sleep at first and the block wakes ``engines`` part by part."""
        async with self.slicer.slot(None, exclusive=True):
            self._awake, self._whole = engines, False
            yield
            self._whole = True

    async def _switch(self, tenant: Tenant | None) -> None:
        if tenant is self._awake and self._whole:
            return
        if self._awake is not None and self._awake is not tenant:
            await self._awake.sleep()
            self._awake, self._whole = None, True
        if tenant is not None:
            self._awake, self._whole = tenant, False
            await tenant.wake()
            self._whole = True
