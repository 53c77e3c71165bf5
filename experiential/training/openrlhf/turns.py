"""Who may use GPUs that all share: one side at a time, the others asleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from experiential.sync import awaited

K = TypeVar("K")

TERM_S = 30.0
"""How long a turn lets newcomers of its own side in while another side waits: a guess, nothing was
measured.
"""


@dataclass(eq=False)
class _Ticket(Generic[K]):
    """Somebody who waits for a turn."""

    side: K
    alone: bool
    admitted: asyncio.Future[None]


class Turns(Generic[K]):
    """Turns of several sides, of which one is inside at any time; used on one event loop.

    Whoever waits longest is next, and with him all who wait for the same side, unless he wants to
    be alone. While others wait, newcomers of the side that is inside are let in for ``term``
    seconds from the start of its turn, and only while somebody of it is still inside. So a side
    waits at most for the turns of those who came before it: each a term and what it still had to
    finish.

    Nobody is inside while the side changes. A change that fails is told to those it was made for;
    the next one is tried all the same.

    Args:
        change: awaited before each turn with the side whose turn it is, also where that side had
            the last one.
        term: seconds.
        clock: seconds that have passed.
    """

    def __init__(
        self,
        change: Callable[[K], Awaitable[None]],
        *,
        term: float = TERM_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prepare, self._term, self._clock = change, term, clock
        self._waiting: list[_Ticket[K]] = []
        self._inside: list[_Ticket[K]] = []
        self._changing: asyncio.Task[None] | None = None
        self._began = 0.0

    @asynccontextmanager
    async def take(self, side: K, *, alone: bool) -> AsyncGenerator[None]:
        """A turn, from when it is given until the block ends; may be cancelled at any time.

        Args:
            side: for whom.
            alone: without others of the same side.

        Raises:
            Exception: what the change to this side raised.
        """
        ticket = _Ticket(side, alone, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        self._advance()
        try:
            await ticket.admitted
            yield
        finally:
            self._leave(ticket)

    def _leave(self, ticket: _Ticket[K]) -> None:
        """Of whoever was inside, and of whoever gave up waiting."""
        for places in (self._waiting, self._inside):
            if ticket in places:
                places.remove(ticket)
        self._advance()

    def _advance(self) -> None:
        if self._changing is not None or not self._waiting:
            return
        if not self._inside:
            self._changing = asyncio.get_running_loop().create_task(self._change(self._waiting[0]))
        elif not self._inside[0].alone:
            self._let_newcomers_in(self._inside[0].side)

    def _let_newcomers_in(self, side: K) -> None:
        same = [t for t in self._waiting if t.side == side and not t.alone]
        if len(same) == len(self._waiting) or self._clock() - self._began < self._term:
            self._admit(same, None)

    async def _change(self, first: _Ticket[K]) -> None:
        found = await awaited(self._prepare(first.side))
        self._changing = None
        self._began = self._clock()
        if first in self._waiting:
            group = (
                [first]
                if first.alone
                else [t for t in self._waiting if t.side == first.side and not t.alone]
            )
            self._admit(group, found if isinstance(found, Exception) else None)
        self._advance()

    def _admit(self, tickets: list[_Ticket[K]], error: Exception | None) -> None:
        for ticket in tickets:
            self._waiting.remove(ticket)
            if ticket.admitted.done():  # cancelled: it is about to leave
                continue
            if error is not None:
                ticket.admitted.set_exception(error)
                continue
            self._inside.append(ticket)
            ticket.admitted.set_result(None)


@dataclass(frozen=True, eq=False)
class Sleeper:
    """Engines or ranks of one policy.

    Attributes:
        name: for people.
        wake: gives them the GPUs; awaited again if it failed.
        sleep: takes the GPUs from them; also awaited where waking failed.
    """

    name: str
    wake: Callable[[], Awaitable[object]]
    sleep: Callable[[], Awaitable[object]]


class SharedGpus:
    """GPUs of one node that engines and ranks of both policies use in turns. Everybody sleeps at first, and at most one is awake.

    Whoever had the last turn stays awake until another wants one: engines that generate between two
    updates are woken once.

    Args:
        group: Ray's placement group of these GPUs.
        term: see `Turns`.
    """

    def __init__(self, group: object, *, term: float = TERM_S) -> None:
        self.group = group
        self._turns = Turns[Sleeper | None](self._change, term=term)
        self._awake: Sleeper | None = None
        self._whole = True
        self._policies: set[str] = set()

    def join(self, policy: str) -> None:
        """A policy uses these GPUs from now on."""
        self._policies.add(policy)

    def leave(self, policy: str) -> bool:
        """A policy is done with them; whether it was the last one."""
        was = policy in self._policies
        self._policies.discard(policy)
        return was and not self._policies

    def generating(self, engines: Sleeper) -> AbstractAsyncContextManager[None]:
        """A turn of engines; as many at once as there are requests."""
        return self._turns.take(engines, alone=False)

    def training(self, ranks: Sleeper) -> AbstractAsyncContextManager[None]:
        """A turn of ranks, alone."""
        return self._turns.take(ranks, alone=True)

    @asynccontextmanager
    async def sending(self, engines: Sleeper) -> AsyncGenerator[None]:
        """A turn that begins with everybody asleep, in whose block ``engines`` are woken part by part; they are awake after it."""
        async with self._turns.take(None, alone=True):
            self._awake, self._whole = engines, False
            yield
            self._whole = True

    async def _change(self, side: Sleeper | None) -> None:
        if side is self._awake and self._whole:
            return
        if self._awake is not None and self._awake is not side:
            await self._awake.sleep()
            self._awake, self._whole = None, True
        if side is not None:
            self._awake, self._whole = side, False
            await side.wake()
            self._whole = True
