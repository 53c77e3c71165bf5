"""Credit the outcomes of uses to entries, through versions and merges."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from experiential.bank.storage.journal import Journal
from experiential.types import Condition, Statistics, Trajectory, Use

Ancestor = tuple[str, int]
"""An entry id and a version."""


def lineage(
    id: str, version: int, parents: Callable[[str, int], Iterable[Ancestor]]
) -> list[Ancestor]:
    """Return every (id, version) credited for a use: itself, then all it was merged from.

    >>> family = {("c", 1): [("a", 2), ("b", 1)], ("a", 2): [("z", 1)]}
    >>> lineage("c", 1, lambda id, version: family.get((id, version), []))
    [('c', 1), ('a', 2), ('b', 1), ('z', 1)]
    """
    found: dict[Ancestor, None] = {(id, version): None}
    waiting: list[Ancestor] = [(id, version)]
    for ancestor in waiting:
        fresh = [parent for parent in parents(*ancestor) if parent not in found]
        found.update(dict.fromkeys(fresh))
        waiting.extend(dict.fromkeys(fresh))
    return list(found)


def total(statistics: Iterable[Statistics]) -> Statistics:
    """Sum counters; a merged entry starts from them."""
    known = list(statistics)
    return Statistics(
        retrievals=sum(s.retrievals for s in known),
        uses=sum(s.uses for s in known),
        successes=sum(s.successes for s in known),
    )


@dataclass(frozen=True, eq=False)
class Ledger:
    """Journal outcomes, uses and counters of one namespace, inside ``Journal.transaction``."""

    journal: Journal
    namespace: str

    def record(self, trajectory: Trajectory, commit: int) -> list[Use]:
        """Journal the outcome of a trajectory and every use in it.

        Returns:
            the uses that are evidence about their entries. There are none in a free episode, in
            one whose outcome is unknown, or in one that failed for a technical cause. A use that
            the actor rejected does not count, because its entry was not in the prompt.
        """
        success = None if trajectory.success is None else int(trajectory.success)
        self.journal.run(
            "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            self.namespace,
            trajectory.id,
            commit,
            trajectory.instance,
            trajectory.group,
            trajectory.condition.value,
            success,
            trajectory.reward,
            trajectory.error,
            trajectory.model_dump_json(),
        )
        counted: list[Use] = []
        for use in () if trajectory.condition is Condition.FREE else trajectory.uses:
            is_evidence = (
                trajectory.error is None and use.verdict != "reject" and success is not None
            )
            used = (use.id, trajectory.id, use.experience_id, use.experience_version)
            known = (success if is_evidence else None, use.model_dump_json())
            statement = "INSERT OR IGNORE INTO uses VALUES (?, ?, ?, ?, ?, ?, ?)"
            self.journal.run(statement, self.namespace, *used, *known)
            if is_evidence:
                counted.append(use)
        return counted

    def is_recorded(self, trajectory: str) -> bool:
        """Return whether this trajectory was journalled before, without parsing its record."""
        statement = "SELECT 1 FROM trajectories WHERE namespace = ? AND id = ?"
        return self.journal.value(statement, self.namespace, trajectory) is not None

    def trajectory(self, id: str) -> Trajectory | None:
        """Return one journalled trajectory, or None."""
        statement = "SELECT record FROM trajectories WHERE namespace = ? AND id = ?"
        record = self.journal.value(statement, self.namespace, id)
        return None if record is None else Trajectory.model_validate_json(record)

    def outcomes(self, id: str, version: int) -> list[int]:
        """Return 1 or 0 for every use of an entry version that has an outcome, oldest first."""
        statement = (
            "SELECT success FROM uses WHERE namespace = ? AND experience = ? AND version = ? AND"
            " success IS NOT NULL ORDER BY rowid"
        )
        return [row[0] for row in self.journal.rows(statement, self.namespace, id, version)]

    def statistics(self) -> dict[str, Statistics]:
        """Return the counters of every entry that has any."""
        statement = "SELECT id, retrievals, uses, successes FROM statistics WHERE namespace = ?"
        return {
            id: Statistics(retrievals=retrievals, uses=uses, successes=successes)
            for id, retrievals, uses, successes in self.journal.rows(statement, self.namespace)
        }

    def save(self, statistics: dict[str, Statistics]) -> None:
        """Write counters."""
        for id, known in statistics.items():
            values = (self.namespace, id, known.retrievals, known.uses, known.successes)
            self.journal.run("INSERT OR REPLACE INTO statistics VALUES (?, ?, ?, ?, ?)", *values)
