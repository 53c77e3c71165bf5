"""Run all torch work of one device on one thread, by priority (docs/decisions/003)."""

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
from typing import Any, NamedTuple, TypeVar

from experiential.errors import BackendError

T = TypeVar("T")


class _Job(NamedTuple):
    due: float
    order: int  # unique, so that no two jobs are compared beyond it
    priority: int
    call: Callable[[], Any]
    future: Future[Any]


class DeviceExecutor:
    """Run closures one at a time on a thread of its own: lower priority first, then in order.

    A job that has waited ``patience`` seconds goes next, so that a busy rollout (priority 0) cannot
    starve the background (priority 1). Inside ``foreground()`` the background does not get the
    moments either in which a rollout waits for its environments.

    >>> import asyncio
    >>> executor = DeviceExecutor("doc")
    >>> asyncio.run(executor.run(lambda: 6 * 7))
    42
    >>> executor.close()

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
        self._thread = threading.Thread(target=self._work, name=f"executor-{name}", daemon=True)
        self._thread.start()

    async def run(self, fn: Callable[[], T], *, priority: int = 0) -> T:
        """Run ``fn`` on the executor's thread and return its result, from any event loop."""
        future = self.submit(fn, priority=priority)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # close() cancels queued jobs; to the caller that is a failure, not its own cancellation
            if self._closed and future.cancelled():
                raise BackendError(
                    "Expected an open executor, got one that was closed while work was queued"
                ) from None
            raise

    def submit(self, fn: Callable[[], T], *, priority: int = 0, delay: float = 0.0) -> Future[T]:
        """Queue ``fn``, which becomes runnable ``delay`` seconds from now."""
        future: Future[T] = Future()
        job = _Job(time.monotonic() + delay, next(self._order), priority, fn, future)
        with self._condition:
            if self._closed:
                raise BackendError(
                    "Expected an open executor, got a closed one; do not generate after close()"
                )
            if delay > 0:
                heapq.heappush(self._later, job)
            else:
                self._ready.setdefault(priority, deque()).append(job)
            self._condition.notify()
        return future

    @contextlib.contextmanager
    def foreground(self) -> Generator[None]:
        """Keep the thread for priority 0 and lower; other jobs start only after ``patience``."""
        with self._condition:
            self._foreground += 1
        try:
            yield
        finally:
            with self._condition:
                self._foreground -= 1
                self._condition.notify()

    def close(self) -> None:
        """Finish the running closure, cancel the queued ones, end the thread; safe to repeat."""
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
        import torch  # here, since a program that only names the class need not load it

        # Sharp attention leaves products too small for normal numbers, which a CPU computes many
        # times slower than others: in gradients, most of the time of long rows. The threads that
        # torch starts from here inherit the mode.
        torch.set_flush_denormal(True)
        while True:
            job: _Job | None = None
            with self._condition:
                while job is None:
                    now = time.monotonic()
                    while self._later and self._later[0].due <= now:
                        queue = self._ready.setdefault(self._later[0].priority, deque())
                        queue.append(heapq.heappop(self._later))
                    wake = self._later[0].due - now if self._later else None
                    queues = {priority: queue for priority, queue in self._ready.items() if queue}
                    if queues:
                        oldest = min(queues, key=lambda priority: queues[priority][0].due)
                        left = queues[oldest][0].due + self._patience - now
                        first = oldest if left <= 0 else min(queues)
                        if left <= 0 or first <= 0 or not self._foreground:
                            job = queues[first].popleft()
                            break
                        wake = left if wake is None else min(wake, left)
                    elif self._closed:
                        return
                    self._condition.wait(wake)
            if not job.future.set_running_or_notify_cancel():
                continue
            start = time.perf_counter()
            result, failure = None, None
            try:
                result = job.call()
            except BaseException as error:  # it belongs to the caller who waits, not to this thread
                failure = error
            spent = time.perf_counter() - start
            self.busy[job.priority] = self.busy.get(job.priority, 0.0) + spent
            if failure is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(failure)
            # hold nothing while waiting for the next job: results may be large tensors
            del job, result, failure
