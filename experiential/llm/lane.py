"""One thread per compute device: every torch closure of the policies that share a device runs here, by priority."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from experiential.errors import BackendError

T = TypeVar("T")


@dataclass(order=True)
class _Job:
    due: float
    order: int
    priority: int = field(compare=False)
    call: Callable[[], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)


class ComputeLane:
    """Runs closures one at a time on its own thread: lower priority first, first come first served inside one.

    A job of a lower rank that has waited ``patience`` seconds goes next, so that a busy rollout
    (priority 0) cannot starve the background (priority 1); in turn a rollout waits for at most the
    one job that is running. Inside ``foreground()`` the background does not get the moments either
    in which a rollout waits for its environments.

    >>> import asyncio
    >>> lane = ComputeLane("doc")
    >>> asyncio.run(lane.run(lambda: 6 * 7))
    42
    >>> lane.close()

    Attributes:
        busy: seconds spent in closures, per priority.
    """

    def __init__(self, name: str = "compute", *, patience: float = 0.25) -> None:
        if patience <= 0:
            raise ValueError(f"Expected patience to be positive, got {patience}")
        self.busy: dict[int, float] = {}
        self._patience = patience
        self._order = itertools.count()
        self._later: list[_Job] = []
        self._ready: dict[int, deque[_Job]] = {}
        self._condition = threading.Condition()
        self._closed = False
        self._foreground = 0
        self._thread = threading.Thread(target=self._work, name=f"lane-{name}", daemon=True)
        self._thread.start()

    async def run(self, fn: Callable[[], T], *, priority: int = 0) -> T:
        """Run ``fn`` on the lane and return its result; awaitable from any event loop.

        Raises:
            BackendError: the lane is closed, or was closed before ``fn`` started.
        """
        future = self.submit(fn, priority=priority)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed and future.cancelled():
                raise BackendError(
                    "Expected an open compute lane, got one that was closed while work was queued"
                ) from None
            raise

    def submit(self, fn: Callable[[], T], *, priority: int = 0, delay: float = 0.0) -> Future[T]:
        """Queue ``fn``; it becomes runnable ``delay`` seconds from now."""
        future: Future[T] = Future()
        job = _Job(time.monotonic() + delay, next(self._order), priority, fn, future)
        with self._condition:
            if self._closed:
                raise BackendError(
                    "Expected an open compute lane, got a closed one; do not generate after close()"
                )
            if delay > 0:
                heapq.heappush(self._later, job)
            else:
                self._ready.setdefault(priority, deque()).append(job)
            self._condition.notify()
        return future

    @contextlib.contextmanager
    def foreground(self) -> Generator[None]:
        """Keep the lane for priority 0 and lower inside the block; other jobs start only after ``patience`` seconds."""
        self._hold(1)
        try:
            yield
        finally:
            self._hold(-1)

    def _hold(self, change: int) -> None:
        with self._condition:
            self._foreground += change
            self._condition.notify()

    def close(self) -> None:
        """Finish the running closure, cancel the queued ones and end the thread; safe to call twice."""
        with self._condition:
            self._closed = True
            left = [*self._later, *(job for queue in self._ready.values() for job in queue)]
            self._later.clear()
            self._ready.clear()
            self._condition.notify()
        for job in left:
            job.future.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            start = time.perf_counter()
            try:
                result = job.call()
            except (
                BaseException
            ) as error:  # the boundary: whatever went wrong belongs to the caller who waits
                self._spent(job.priority, start)
                job.future.set_exception(error)
            else:
                self._spent(job.priority, start)
                job.future.set_result(result)
            del job

    def _spent(self, priority: int, start: float) -> None:
        self.busy[priority] = self.busy.get(priority, 0.0) + time.perf_counter() - start

    def _next(self) -> _Job | None:
        with self._condition:
            while True:
                now = time.monotonic()
                while self._later and self._later[0].due <= now:
                    job = heapq.heappop(self._later)
                    self._ready.setdefault(job.priority, deque()).append(job)
                wake = self._later[0].due - now if self._later else None
                queues = {priority: queue for priority, queue in self._ready.items() if queue}
                if queues:
                    oldest = min(queues, key=lambda priority: queues[priority][0].due)
                    left = queues[oldest][0].due + self._patience - now
                    if left <= 0:
                        return queues[oldest].popleft()
                    if min(queues) <= 0 or not self._foreground:
                        return queues[min(queues)].popleft()
                    wake = left if wake is None else min(wake, left)
                elif self._closed:
                    return None
                self._condition.wait(wake)
