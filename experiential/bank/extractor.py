"""Define what a manager needs of an extractor agent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

from experiential.errors import ConfigError
from experiential.types import Distillation, Experience, Generation, Trajectory

LaterJudge = Callable[[Experience, Experience], Awaitable[bool]]
"""A judge that is awaited: ``ExtractorAgent.ajudge`` is one."""


class Extractor(Protocol):
    """Distil, refine and merge experience: what a manager needs of an extractor agent."""

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


class Judging(Protocol):
    """Judge whether two entries teach the same, as ``ExtractorAgent`` does."""

    async def ajudge(self, a: Experience, b: Experience) -> bool:
        """Return whether the two, the older first, teach the same."""
        ...


def judge_of(extractor: object) -> LaterJudge:
    """Return the method by which an extractor judges.

    Raises:
        ConfigError: it cannot be asked.
    """
    ask = getattr(extractor, "ajudge", None)
    if ask is None:
        raise ConfigError(
            "Expected an extractor with ajudge(a, b) to deduplicate, got"
            f" {type(extractor).__name__}; see Judging"
        )
    return cast("Judging", extractor).ajudge
