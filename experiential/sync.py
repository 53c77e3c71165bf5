"""Bridge threads and event loops: a background loop, outcomes as values, weak callbacks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

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


_shared: EventLoopThread | None = None
_lock = threading.Lock()


def shared_loop() -> EventLoopThread:
    """Return the process-wide loop of the synchronous methods."""
    global _shared
    with _lock:
        if _shared is None or _shared.loop.is_closed():
            _shared = EventLoopThread("experiential")
        return _shared


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
    futures: Iterable[asyncio.Future[None] | None], error: Exception | None = None
) -> None:
    """Resolve futures of any event loops from any thread, with one wake-up for each loop."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)
    for future in futures:
        if future is not None:
            by_loop[future.get_loop()].append(future)
    for loop, waiting in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a loop that has closed has nobody waiting
            loop.call_soon_threadsafe(resolve_here, waiting, error)


def resolve_here(futures: Sequence[asyncio.Future[None]], error: Exception | None = None) -> None:
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
