"""Explain an episode: its uses, its outcome, and the entries written from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from experiential.bank.evidence.credit import Ancestor
from experiential.bank.records import Explanation, Shown
from experiential.types import (
    Experience,
    Generation,
    Statistics,
    Trajectory,
    Uplift,
    Use,
)


class Explainer:
    """Put explanations together from look-ups in a bank.

    Args:
        version: one version of one entry, with its present counters.
        generation: a journalled generation.
        uplift: counts and estimates of an entry version.
    """

    def __init__(
        self,
        version: Callable[[str, int], Experience | None],
        generation: Callable[[str], Generation | None],
        uplift: Callable[[str, int], Uplift],
    ) -> None:
        self._version = version
        self._generation = generation
        self._uplift = uplift

    def explain(self, trajectory: Trajectory, written: Iterable[Ancestor]) -> Explanation:
        """Explain a trajectory from which the entry versions ``written`` were made."""
        return Explanation(
            trajectory=trajectory.id,
            task=trajectory.task,
            condition=trajectory.condition,
            success=trajectory.success,
            reward=trajectory.reward,
            error=trajectory.error,
            shown=tuple(self._shown(use) for use in trajectory.uses),
            written=tuple(entry for one in written if (entry := self._version(*one)) is not None),
        )

    def _shown(self, use: Use) -> Shown:
        entry = self._version(use.experience_id, use.experience_version)
        generation = self._generation(use.refinement) if use.refinement else None
        return Shown(
            id=use.experience_id,
            version=use.experience_version,
            text=None if entry is None else entry.text,
            refined=None if generation is None else generation.text,
            statistics=Statistics() if entry is None else entry.statistics,
            uplift=self._uplift(use.experience_id, use.experience_version),
            **use.model_dump(include={"rank", "score", "propensity", "how", "turn"}),
        )
