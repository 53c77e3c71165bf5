"""Many small requests for embeddings made into few large ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence


class Gatherer:
    """Hands texts to a blocking function in as few calls as possible: while one call runs, what is asked for meanwhile gathers.

    Lives on one event loop. An error of a call reaches everybody who waits for it, and nobody else.

    >>> async def five() -> list[list[str]]:
    ...     calls: list[list[str]] = []
    ...     gather = Gatherer(calls.append)
    ...     await asyncio.gather(*(gather([letter]) for letter in "abcde"))
    ...     return calls
    >>> asyncio.run(five())
    [['a', 'b', 'c', 'd', 'e']]
    """

    def __init__(self, work: Callable[[list[str]], object]) -> None:
        self._work = work
        self._texts: list[str] = []
        self._next: asyncio.Task[None] | None = None
        self._last: asyncio.Task[None] | None = None

    async def __call__(self, texts: Sequence[str]) -> None:
        """Wait until a call that had these texts has ended."""
        if not texts:
            return
        self._texts.extend(texts)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._flush(self._last))
        await asyncio.shield(self._next)

    async def _flush(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        texts, self._texts = list(dict.fromkeys(self._texts)), []
        self._last, self._next = self._next, None
        await asyncio.to_thread(self._work, texts)
