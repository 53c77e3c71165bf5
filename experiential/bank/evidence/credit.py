"""Who earns the outcome of a use: statistics of entries, uses by version, and lineage through merges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from experiential.bank.storage.journal import Journal
from experiential.types import Condition, Statistics, Trajectory, Use

Ancestor = tuple[str, int]
"""An entry id and a version."""


def lineage(
    id: str, version: int, parents: Callable[[str, int], Iterable[Ancestor]]
) -> list[Ancestor]:
    """Every (id, version) that earns the outcome of a use of this version: itself, then all it was merged from, each once.

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
    """The summed counts, which a merged entry starts from."""
    known = list(statistics)
    return Statistics(
        retrievals=sum(s.retrievals for s in known),
        uses=sum(s.uses for s in known),
        successes=sum(s.successes for s in known),
    )


def counted_uses(trajectory: Trajectory) -> tuple[Use, ...]:
    """The uses that say something about an entry.

    None of a free episode, none of an episode that failed for a technical cause, and none that the
    actor rejected: it was not shown.
    """
    if trajectory.condition is Condition.FREE or trajectory.error is not None:
        return ()
    return tuple(use for use in trajectory.uses if use.verdict != "reject")


class Ledger:
    """Outcomes, uses and counters of one namespace in the journal; writes must happen inside ``Journal.transaction``."""

    def __init__(self, journal: Journal, namespace: str) -> None:
        self._journal = journal
        self._namespace = namespace

    def record(self, trajectory: Trajectory, commit: int) -> None:
        """Journal the outcome of a trajectory and every use in it."""
        self._journal.run(
            "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            self._namespace,
            trajectory.id,
            commit,
            trajectory.instance,
            trajectory.group,
            trajectory.condition.value,
            int(trajectory.success),
            trajectory.reward,
            trajectory.error,
            trajectory.model_dump_json(),
        )
        success = None if trajectory.error is not None else int(trajectory.success)
        for use in () if trajectory.condition is Condition.FREE else trajectory.uses:
            known = (
                None if use.verdict == "reject" else success
            )  # it was not shown: the outcome says nothing of it
            values = (
                self._namespace,
                use.id,
                trajectory.id,
                use.experience_id,
                use.experience_version,
                known,
                use.model_dump_json(),
            )
            self._journal.run("INSERT OR IGNORE INTO uses VALUES (?, ?, ?, ?, ?, ?, ?)", *values)

    def is_recorded(self, trajectory: str) -> bool:
        """Whether this trajectory was journalled before."""
        statement = "SELECT 1 FROM trajectories WHERE namespace = ? AND id = ?"
        return self._journal.value(statement, self._namespace, trajectory) is not None

    def trajectory(self, id: str) -> Trajectory | None:
        """One journalled trajectory."""
        record = self._journal.value(
            "SELECT record FROM trajectories WHERE namespace = ? AND id = ?", self._namespace, id
        )
        return None if record is None else Trajectory.model_validate_json(record)

    def outcomes(self, id: str, version: int) -> list[int]:
        """1 or 0 for every use of one entry version whose episode ended properly, oldest first."""
        statement = (
            "SELECT success FROM uses WHERE namespace = ? AND experience = ? AND version = ? AND"
            " success IS NOT NULL ORDER BY rowid"
        )
        return [row[0] for row in self._journal.rows(statement, self._namespace, id, version)]

    def statistics(self) -> dict[str, Statistics]:
        """The counters of every entry that has any."""
        statement = "SELECT id, retrievals, uses, successes FROM statistics WHERE namespace = ?"
        return {
            row[0]: _statistics(row[1:]) for row in self._journal.rows(statement, self._namespace)
        }

    def save(self, statistics: dict[str, Statistics]) -> None:
        """Write counters."""
        for id, known in statistics.items():
            values = (self._namespace, id, known.retrievals, known.uses, known.successes)
            self._journal.run("INSERT OR REPLACE INTO statistics VALUES (?, ?, ?, ?, ?)", *values)


def _statistics(row: Sequence[int]) -> Statistics:
    return Statistics(retrievals=row[0], uses=row[1], successes=row[2])
