"""Bridge threads and event loops: a background loop, outcomes as values, one call for many."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from experiential.errors import ExperientialError

A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")


class EventLoopThread:
    """Run an asyncio event loop in a daemon thread.

    >>> async def double(x: int) -> int:
    ...     return 2 * x
    >>> loop = EventLoopThread("doc")
    >>> loop.run(double(21))
    42
    >>> loop.close()
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop from another thread and wait for its result.

        After ``timeout`` seconds without one, it is cancelled and TimeoutError raised.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "Expected a call from outside the event loop, got one from inside; await the"
                " a-prefixed coroutine instead"
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and join its thread."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def cancel_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended; drop their results and errors."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def ending_with_callbacks(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and cancel it when a callback of its event loop raises; raise that error.

    asyncio only logs the error of a callback, and whoever waits for the callback waits for ever.
    """
    loop = asyncio.get_running_loop()
    task, before = loop.create_task(work), loop.get_exception_handler()
    errors: list[Exception] = []

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception):
            errors.append(error)
            task.cancel()
        elif before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
    try:
        result = await task
    except asyncio.CancelledError:
        if errors:
            raise errors[0] from None
        raise
    finally:
        loop.set_exception_handler(before)
    if errors:  # the coroutine took the cancellation for its own affair
        raise errors[0]
    return result


_shared: EventLoopThread | None = None
_lock = threading.Lock()


def shared_loop() -> EventLoopThread:
    """Return the process-wide loop of the synchronous methods."""
    global _shared
    with _lock:
        if _shared is None or _shared.loop.is_closed():
            _shared = EventLoopThread("experiential")
        return _shared


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from synchronous code, even on the shared loop's own thread."""
    shared = shared_loop()
    try:
        nested = asyncio.get_running_loop() is shared.loop
    except RuntimeError:
        nested = False
    if not nested:
        return shared.run(coroutine)
    loop = EventLoopThread("experiential-nested")
    try:
        return loop.run(coroutine)
    finally:
        loop.close()


def _forget_in_child() -> None:
    global _shared, _lock
    _shared, _lock = None, threading.Lock()  # a fork has the loop, but not its thread


os.register_at_fork(after_in_child=_forget_in_child)


def attempted(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Exception:
    """Return the result of a call, or the exception that it raised."""
    try:
        return work(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (the caller decides)
        return error


async def awaited(work: Awaitable[T]) -> T | Exception:
    """Return the result of an awaitable, or the exception that it raised."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001  (the caller decides)
        return error


def resolve_futures(
    futures: Iterable[asyncio.Future[None]], error: Exception | None = None
) -> None:
    """Resolve futures of any event loops from any thread, with one wake-up for each loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)
    for future in futures:
        by_loop[future.get_loop()].append(future)
    for loop, waiting in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a loop that has closed has nobody waiting
            loop.call_soon_threadsafe(_resolve, waiting, error)


def _resolve(futures: Sequence[asyncio.Future[None]], error: Exception | None) -> None:
    """Resolve futures on their own event loop; those that are done stay as they are."""
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Return a bound method that does not keep its object alive, and then does nothing."""
    known = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (alive := known()) is not None:
            alive(*args, **kwargs)

    return call


class BatchInterruptedError(ExperientialError):
    """Say that the thread that handled a batch was interrupted; the items may have been handled."""


class BatchTimeoutError(ExperientialError, TimeoutError):
    """Say that a caller has waited long enough."""


@dataclass(eq=False, slots=True)
class _Call:
    """Hold the outcomes of one caller's items; the caller waits in a thread or on an event loop."""

    outcomes: list[Any]
    missing: int
    future: asyncio.Future[None] | None = None
    woken: threading.Lock | None = None  # a thread waits for its release
    is_over: bool = False  # answered, or the caller has given up
    leads: bool = False

    def wake(self) -> None:
        """Let the thread that waits go on."""
        if self.woken is not None and self.woken.locked():
            self.woken.release()

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
        size: items for which a batch of workers waits.
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
        if not workers and (finish is not None or size > 1):
            raise ValueError(
                "Expected workers for a second stage or a size to wait for, got none; pass workers="
            )
        self._handle = handle
        self._finish = finish
        self._size = size
        self._wait = wait
        self._most = sys.maxsize if most is None else most
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
        call = _Call([None] * len(items), len(items), woken=(woken := threading.Lock()))
        woken.acquire()
        try:
            self._enqueue(call, items)
            while not call.is_over:
                if not call.leads:
                    if not woken.acquire(timeout=-1 if timeout is None else timeout):
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
                        count = min(len(self._queue), self._most)
                        batch = [self._queue.popleft() for _ in range(count)]
                    outcomes = attempted(self._handle, [one.item for one in batch]) if batch else ()
                finally:
                    self._deliver(batch, outcomes, leader=call)
        except BaseException:
            self._leave(call)
            raise
        return call.results()

    async def arun(self, items: Sequence[A], timeout: float | None = None) -> list[R]:
        """Return the result of each item as ``run`` does; needs workers."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        call = _Call([None] * len(items), len(items), future)
        self._enqueue(call, items)
        if not items:
            return []
        # Cheaper than ``asyncio.timeout``: nobody is cancelled, the future is resolved too early.
        late = None if timeout is None else loop.call_later(timeout, _resolve, (future,), None)
        try:
            await future
            if not call.is_over:
                raise BatchTimeoutError(f"Expected an answer within {timeout} s, got none")
        except BaseException:
            self._leave(call)
            raise
        finally:
            if late is not None:
                late.cancel()
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
                call.is_over = True
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
        with self._arrived:
            if not call.is_over:
                call.is_over = True
                self._queue = deque(one for one in self._queue if one.call is not call)
            self._deliver((), (), leader=call)

    def _work(self) -> None:
        while True:
            with self._arrived:
                self._idle += 1
                while self._closed is None and (self._is_gathering or not self._queue):
                    self._arrived.wait()
                self._idle -= 1
                if self._closed is not None:
                    return
                # Wait until the batch is full or its first item has waited.
                self._is_gathering = True
                until = self._queue[0].since + self._wait
                while (
                    len(self._queue) < self._size
                    and (left := until - time.perf_counter()) > 0
                    and self._closed is None
                ):
                    self._arrived.wait(left)
                self._is_gathering = False
                count = min(len(self._queue), self._most)
                batch = [self._queue.popleft() for _ in range(count)]
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

    def _deliver(
        self,
        batch: Sequence[_Waiting],
        outcomes: Sequence[Any] | Exception,
        leader: _Call | None = None,
    ) -> None:
        """Let callers go on: a thread at once, the tasks of a loop with one wake-up for all.

        Instead of the ``leader``, the first of those who still wait leads then.
        """
        if isinstance(outcomes, Exception):
            outcomes = [outcomes] * len(batch)
        futures: list[asyncio.Future[None]] = []
        with self._arrived:
            if leader is not None and leader.leads:
                leader.leads, self._is_led = False, bool(self._queue)
                if self._queue:
                    following = self._queue[0].call
                    following.leads = True
                    following.wake()
            for (_, call, place, _), outcome in zip(batch, outcomes, strict=True):
                call.outcomes[place] = outcome
                call.missing -= 1
                if call.missing or call.is_over:
                    continue
                call.is_over = True
                if call.future is not None:
                    futures.append(call.future)
                else:
                    call.wake()
        if futures:
            resolve_futures(futures)
