"""Declare what an episode asks of a manager, and stand in for one where there is no bank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from experiential.types import Answer, Hit, Trajectory


class ManagerLike(Protocol):
    """Declare the part of ``ExperienceManager`` that episodes call, with its keyword options.

    The option ``where`` is passed only by episodes that have a filter.
    """

    search: Callable[..., list[Hit]]
    asearch: Callable[..., Any]  # a coroutine; takes lists of queries, too
    submit: Callable[..., str | None]  # takes a trajectory; judge= and distil=False
    ask: Callable[..., Answer]
    plays_free: Callable[[str], bool]
    close: Callable[..., None]


class AsyncManagerLike(ManagerLike, Protocol):
    """Declare what ``async with`` and the coroutines of an episode call beside ``asearch``."""

    asubmit: Callable[..., Any]
    aask: Callable[..., Any]


class NoBank:
    """Replace the manager where there is no bank: find nothing, keep nothing."""

    def search(self, query: Any, **options: Any) -> Any:
        """Return no hits."""
        return [] if isinstance(query, str) else [[] for _ in query]

    async def asearch(self, query: Any, **options: Any) -> Any:
        """Return no hits."""
        return self.search(query)

    def submit(self, trajectory: Trajectory, **options: Any) -> str | None:
        """Return at once; nothing is queued."""
        return None

    def ask(self, query: str, **options: Any) -> Answer:
        """Return an empty answer."""
        return Answer()

    def plays_free(self, task: str) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing; there is nothing to close."""
