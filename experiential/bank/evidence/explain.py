"""Explain an episode: its uses, its outcome, and the entries written from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from experiential.bank.evidence.credit import Ancestor
from experiential.bank.records import Explanation, Shown
from experiential.types import Experience, Generation, Statistics, Trajectory, Uplift


def explain(
    trajectory: Trajectory,
    written: Iterable[Ancestor],
    version: Callable[[str, int], Experience | None],
    generation: Callable[[str], Generation | None],
    uplift: Callable[[str, int], Uplift],
) -> Explanation:
    """Explain a trajectory by what a bank knows of it.

    Args:
        trajectory: the episode.
        written: versions of entries that were made from it.
        version: returns one version of one entry, with its present counters.
        generation: returns a journalled generation.
        uplift: returns counts and estimates of an entry version.
    """
    shown: list[Shown] = []
    for use in trajectory.uses:
        id, at = use.experience_id, use.experience_version
        entry = version(id, at)
        refined = generation(use.refinement) if use.refinement else None
        shown.append(
            Shown(
                id=id,
                version=at,
                text=None if entry is None else entry.text,
                refined=None if refined is None else refined.text,
                statistics=Statistics() if entry is None else entry.statistics,
                uplift=uplift(id, at),
                **use.model_dump(include={"rank", "score", "propensity", "how", "turn"}),
            )
        )
    return Explanation(
        trajectory=trajectory.id,
        task=trajectory.task,
        condition=trajectory.condition,
        success=trajectory.success,
        reward=trajectory.reward,
        error=trajectory.error,
        shown=tuple(shown),
        written=tuple(entry for one in written if (entry := version(*one)) is not None),
    )
