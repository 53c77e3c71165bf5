"""End a run on Ctrl-C: say so at once, let what is under way end, and obey a second one at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

STOPPING = (
    "stopping: waits until the generation or the update under way has ended; Ctrl-C again ends the"
    " process at once"
)


class Interrupts:
    """Cancel a coroutine on the first interrupt; end the process on the second.

    Args:
        say: shows a line of text; called in the signal handler.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._heard = say, False
        self._cancel: Callable[[], object] | None = None

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._heard:  # else a second one still ends the process, which may wait for threads
            signal.signal(signal.SIGINT, self._before)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end.

        Raises:
            KeyboardInterrupt: it was interrupted, and its cleaning up has ended.
        """

        async def cancellable() -> T:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            return await work

        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            if self._heard:
                raise KeyboardInterrupt from None
            raise
        finally:
            self._cancel = None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._heard:
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # the cursor, which a live view hides
            os._exit(130)  # not sys.exit, which waits for threads
        self._heard = True
        self._say(STOPPING)
        if self._cancel is None:  # before and after the work
            raise KeyboardInterrupt
        self._cancel()
