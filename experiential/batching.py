"""Merge the calls of concurrent callers into few calls of one function."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from experiential.errors import ExperientialError
from experiential.sync import attempted, resolve_futures, resolve_here

A = TypeVar("A")
R = TypeVar("R")


class BatchInterruptedError(ExperientialError):
    """Say that the thread that handled a batch was interrupted; the items may have been handled."""


class BatchTimeoutError(ExperientialError, TimeoutError):
    """Say that a caller has waited long enough."""


class _Call:
    """Hold the outcomes of one caller's items; the caller waits in a thread or on an event loop."""

    def __init__(self, count: int, future: asyncio.Future[None] | None = None) -> None:
        self.outcomes: list[Any] = [None] * count
        self.missing = count
        self.is_over = not count  # answered, or the caller has given up
        self.leads = False
        self.future = future
        self.woken = threading.Lock()  # the thread waits for it to be released
        self.woken.acquire()

    def results(self) -> list[Any]:
        for outcome in self.outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return self.outcomes


class _Waiting(NamedTuple):
    item: Any
    call: _Call
    place: int
    since: float


class Batcher(Generic[A, R]):
    """Hand items of many callers to one function in batches, in the order of their arrival.

    Whatever comes while a batch is handled goes into the next one. A caller that is interrupted,
    cancelled or times out is skipped if its items are not being handled yet.

    Without workers the first waiting caller leads: it handles all that waits on its own thread, and
    then the next waiting caller leads. A caller alone waits for nobody, and no thread is started.
    With workers, threads of the batcher handle batches, and tasks of any event loop may call, too.

    >>> batcher = Batcher(lambda letters: [letter.upper() for letter in letters])
    >>> batcher.run(["a", "b"])
    ['A', 'B']

    Args:
        handle: returns a result or an error for each item of a batch; what it raises is the error
            of every item.
        finish: a second stage of workers, given the items that are still waited for and what
            ``handle`` returned for them. It runs batch after batch in the order of arrival, while
            other workers handle later batches.
        size: items for which a batch waits.
        wait: seconds after the arrival of the first item after which it waits no longer.
        most: items of one batch at most.
        workers: threads, started when they are needed.
        name: of the threads.
    """

    def __init__(
        self,
        handle: Callable[[list[A]], Sequence[Any]],
        *,
        finish: Callable[[list[A], list[Any]], Sequence[R | Exception]] | None = None,
        size: int = 1,
        wait: float = 0.0,
        most: int | None = None,
        workers: int = 0,
        name: str = "experiential-batch",
    ) -> None:
        if finish is not None and not workers:
            raise ValueError("Expected workers for a second stage, got none; pass workers=")
        self._handle = handle
        self._finish = finish
        self._size = size
        self._wait = wait
        self._most = most
        self._workers = workers
        self._name = name
        self._queue: deque[_Waiting] = deque()
        self._arrived = threading.Condition()
        self._is_gathering = False  # somebody waits for the batch to fill
        self._is_led = False
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed: Exception | None = None
        self._taken = 0
        self._finished = 0
        self._turn = threading.Condition()

    @property
    def waiting(self) -> int:
        """Return the number of items that are not being handled yet."""
        return len(self._queue)

    def run(self, items: Sequence[A], timeout: float | None = None) -> list[R]:
        """Return the result of each item; the calling thread waits, or leads.

        Raises:
            BatchTimeoutError: no results within ``timeout`` seconds.
            Exception: the first error among the items, or the error that ``close`` was given.
        """
        call = _Call(len(items))
        try:
            self._enqueue(call, items)
            while not call.is_over:
                if not call.leads:
                    if not call.woken.acquire(timeout=-1 if timeout is None else timeout):
                        raise BatchTimeoutError(f"Expected an answer within {timeout} s, got none")
                    continue
                # Lead: handle all that waits, whoever asked for it.
                batch: list[_Waiting] = []
                outcomes: Sequence[Any] | Exception = BatchInterruptedError(
                    "Expected this call to be carried out, but the thread that did it was"
                    " interrupted; look whether it has taken effect, then try again"
                )
                try:
                    with self._arrived:
                        batch = self._take()
                    outcomes = attempted(self._handle, [one.item for one in batch]) if batch else ()
                finally:
                    with self._arrived:
                        call.leads = False
                        self._name_leader()
                    self._deliver(batch, outcomes)
        finally:
            self._leave(call)
        return call.results()

    async def arun(self, items: Sequence[A], timeout: float | None = None) -> list[R]:
        """Return the result of each item as ``run`` does; needs workers."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        call = _Call(len(items), future)
        self._enqueue(call, items)
        if not items:
            return []
        alarm = None if timeout is None else loop.call_later(timeout, resolve_here, [future])
        try:
            await future
            if not call.is_over:
                raise BatchTimeoutError(f"Expected an answer within {timeout} s, got none")
        finally:
            self._leave(call)
            if alarm is not None:
                alarm.cancel()
        return call.results()

    def close(self, error: Exception, timeout: float | None = None) -> None:
        """End the threads; whoever still waits, or calls later, gets the error."""
        with self._arrived:
            self._closed = error
            left = [*self._queue]
            self._queue.clear()
            self._arrived.notify_all()
        self._deliver(left, [error] * len(left))
        for thread in self._threads:
            thread.join(timeout)

    def _enqueue(self, call: _Call, items: Sequence[A]) -> None:
        now = time.perf_counter()
        with self._arrived:
            if self._closed is not None:
                raise self._closed
            if not items:
                return
            self._queue.extend(_Waiting(item, call, place, now) for place, item in enumerate(items))
            if not self._workers:
                if not self._is_led:
                    self._is_led = call.leads = True
            elif not self._idle and len(self._threads) < self._workers:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            if not self._is_gathering:
                self._arrived.notify()
            elif len(self._queue) >= self._size:
                self._arrived.notify_all()  # one of them is gathering

    def _leave(self, call: _Call) -> None:
        """Give up a call that is not over: nothing of it is handled any more, and others lead."""
        if call.is_over and not call.leads:
            return
        with self._arrived:
            if not call.is_over:
                call.is_over = True
                self._queue = deque(one for one in self._queue if one.call is not call)
            if call.leads:
                self._name_leader()

    def _name_leader(self) -> None:
        self._is_led = bool(self._queue)
        if self._queue:
            leader = self._queue[0].call
            leader.leads = True
            if leader.woken.locked():
                leader.woken.release()

    def _take(self) -> list[_Waiting]:
        """Wait until a batch is full or its first item has waited; the caller holds the lock."""
        self._is_gathering = True
        until = self._queue[0].since + self._wait
        while (
            len(self._queue) < self._size
            and (left := until - time.perf_counter()) > 0
            and self._closed is None
        ):
            self._arrived.wait(left)
        self._is_gathering = False
        count = len(self._queue) if self._most is None else min(len(self._queue), self._most)
        return [self._queue.popleft() for _ in range(count)]

    def _work(self) -> None:
        while True:
            with self._arrived:
                self._idle += 1
                while self._closed is None and (self._is_gathering or not self._queue):
                    self._arrived.wait()
                self._idle -= 1
                if self._closed is not None:
                    return
                batch = self._take()
                if self._queue:
                    self._arrived.notify()
                number = self._taken
                self._taken += 1
            outcomes: Sequence[Any] | Exception = []
            if batch:
                outcomes = attempted(self._handle, [one.item for one in batch])
            if self._finish is not None:
                with self._turn:
                    while self._finished != number:
                        self._turn.wait()
                    if not isinstance(outcomes, Exception):
                        pairs = zip(batch, outcomes, strict=True)
                        kept = [pair for pair in pairs if not pair[0].call.is_over]
                        batch, outcomes = [one for one, _ in kept], [found for _, found in kept]
                        if kept:
                            items = [one.item for one in batch]
                            outcomes = attempted(self._finish, items, outcomes)
                    self._finished += 1
                    self._turn.notify_all()
            self._deliver(batch, outcomes)

    def _deliver(self, batch: Sequence[_Waiting], outcomes: Sequence[Any] | Exception) -> None:
        """Let callers go on: a thread at once, the tasks of a loop with one wake-up for all."""
        if isinstance(outcomes, Exception):
            outcomes = [outcomes] * len(batch)
        futures: list[asyncio.Future[None]] = []
        with self._arrived:
            for (_, call, place, _), outcome in zip(batch, outcomes, strict=True):
                call.outcomes[place] = outcome
                call.missing -= 1
                if call.missing or call.is_over:
                    continue
                call.is_over = True
                if call.future is not None:
                    futures.append(call.future)
                elif call.woken.locked():
                    call.woken.release()
        if futures:
            resolve_futures(futures)
