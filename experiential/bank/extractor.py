"""Define what a manager needs of an extractor agent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from experiential.types import Distillation, Experience, Generation, Trajectory

LaterJudge = Callable[[Experience, Experience], Awaitable[bool]]
"""A judge that is awaited: ``ExtractorAgent.ajudge`` is one."""


class Extractor(Protocol):
    """Distil, refine and merge experience: what a manager needs of an extractor agent.

    One that also has ``async ajudge(a, b) -> bool``, whether two entries teach the same (the older
    first), can deduplicate; one with ``async aoutcome(trajectory) -> Judgement`` judges episodes
    that carry a rubric and whose own judge is in another process.
    """

    @property
    def version(self) -> int:
        """Return the number of optimiser steps that the weights have seen."""
        ...

    async def adistill(self, trajectory: Trajectory, shown: Sequence[Experience]) -> Distillation:
        """Say what a trajectory teaches beyond the entries that were shown in it."""
        ...

    async def arefine(self, query: str, experience: Experience) -> tuple[str, Generation | None]:
        """Fit an entry to a question."""
        ...

    async def amerge(self, experiences: Sequence[Experience]) -> Distillation:
        """Say which of these entries to keep, merge or discard."""
        ...
