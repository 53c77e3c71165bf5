"""Credit the outcomes of uses to entries, through versions and merges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from experiential.bank.records import EpisodeSummary, UsedIn
from experiential.bank.storage.checksums import parsed
from experiential.bank.storage.journal import Journal
from experiential.types import Condition, Statistics, Trajectory, Use

Ancestor = tuple[str, int]
"""An entry id and a version."""
Seen = tuple[str, int, float]
"""An entry id, a version, and its relevance to the query by which an actor saw it."""
_EPISODES = """
    SELECT id, json_extract(record, '$.task'), success FROM trajectories
    WHERE namespace = ? AND error IS NULL ORDER BY rowid"""
_SEEN = """
    SELECT trajectory, experience, version, json_extract(record, '$.score') FROM uses
    WHERE namespace = ? AND COALESCE(json_extract(record, '$.verdict'), '') <> 'reject'
    ORDER BY rowid"""

_SUMMARIES = """
    SELECT id, json_extract(record, '$.task'), json_extract(record, '$.task_id'), success,
        json_extract(record, '$.score'), reward, condition, json_array_length(record, '$.turns'),
        json_array_length(record, '$.uses'), error
    FROM trajectories WHERE namespace = ? ORDER BY rowid"""
_USED_IN = """
    SELECT u.trajectory, u.version, json_extract(u.record, '$.turn'),
        json_extract(u.record, '$.how'),
        COALESCE(json_extract(u.record, '$.verdict'), '') = 'reject',
        json_extract(t.record, '$.task'), t.success
    FROM uses u JOIN trajectories t ON t.namespace = u.namespace AND t.id = u.trajectory
    WHERE u.namespace = ? AND u.experience = ? ORDER BY u.rowid"""


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


def seen_in(trajectory: Trajectory) -> list[Seen]:
    """Return the uses in which the actor saw an entry: none in a free episode."""
    if trajectory.condition is Condition.FREE:
        return []
    return [
        (use.experience_id, use.experience_version, use.score)
        for use in trajectory.uses
        if use.verdict != "reject"
    ]


@dataclass(frozen=True, eq=False)
class Ledger:
    """Journal outcomes, uses and counters of one namespace, inside ``Journal.transaction``."""

    journal: Journal
    namespace: str

    def compared(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with the baseline of its task, and count its score into the next.

        The baseline is the mean score of the episodes recorded before, of one ``task_id``, or of
        one task in words where there is none. Where the outcome is ``relative``, it is filled in.
        """
        if trajectory.score is None or trajectory.error is not None:
            return trajectory
        task = trajectory.task_id or trajectory.task
        statement = "SELECT episodes, total FROM scores WHERE namespace = ? AND task = ?"
        known = self.journal.rows(statement, self.namespace, task)
        episodes, total = known[0] if known else (0, 0.0)
        after = (episodes + 1, float(total + trajectory.score))
        self.journal.insert("scores", self.namespace, task, *after, verb="INSERT OR REPLACE")
        baseline = total / episodes if episodes else None
        compared = trajectory.model_copy(update={"baseline": baseline})
        if not trajectory.relative:
            return compared
        return compared.model_copy(update={"success": compared.better})

    def record(self, trajectory: Trajectory, commit: int, *, again: bool = False) -> list[Use]:
        """Journal the outcome of a trajectory and every use in it.

        Args:
            trajectory: the episode.
            commit: the commit that says the outcome.
            again: replace what was journalled of it, because its outcome is known only now.

        Returns:
            the uses that are evidence about their entries. There are none in a free episode, in
            one whose outcome is unknown, or in one that failed for a technical cause. A use that
            the actor rejected does not count, because its entry was not in the prompt.
        """
        success = None if trajectory.success is None else int(trajectory.success)
        # A replaced row gets a new number, so that those who read on from the last row see it.
        first, further = ("INSERT OR REPLACE",) * 2 if again else ("INSERT", "INSERT OR IGNORE")
        self.journal.insert(
            "trajectories",
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
            verb=first,
        )
        counted: list[Use] = []
        for use in () if trajectory.condition is Condition.FREE else trajectory.uses:
            is_evidence = (
                trajectory.error is None and use.verdict != "reject" and success is not None
            )
            used = (use.id, trajectory.id, use.experience_id, use.experience_version)
            known = (success if is_evidence else None, use.model_dump_json())
            self.journal.insert("uses", self.namespace, *used, *known, verb=further)
            if is_evidence:
                counted.append(use)
        return counted

    def episodes(self) -> Iterator[tuple[str, bool | None, list[Seen]]]:
        """Yield task, success and uses of each episode without a technical failure, in order."""
        seen: dict[str, list[Seen]] = {}
        for trajectory, *use in self.journal.rows(_SEEN, self.namespace):
            seen.setdefault(trajectory, []).append((use[0], use[1], use[2]))
        for id, task, success in self.journal.rows(_EPISODES, self.namespace):
            yield task, None if success is None else bool(success), seen.get(id, [])

    def is_recorded(self, trajectory: str) -> bool:
        """Return whether this trajectory was journalled before, without parsing its record."""
        statement = "SELECT 1 FROM trajectories WHERE namespace = ? AND id = ?"
        return self.journal.value(statement, self.namespace, trajectory) is not None

    def ids(self) -> list[str]:
        """Return the ids of all journalled trajectories."""
        statement = "SELECT id FROM trajectories WHERE namespace = ?"
        return [row[0] for row in self.journal.rows(statement, self.namespace)]

    def trajectory(self, id: str) -> Trajectory | None:
        """Return one journalled trajectory, or None."""
        statement = "SELECT record FROM trajectories WHERE namespace = ? AND id = ?"
        record = self.journal.value(statement, self.namespace, id)
        return None if record is None else parsed(Trajectory, record, id)

    def summaries(self) -> list[EpisodeSummary]:
        """Return every journalled trajectory without its turns, oldest first."""
        names = ("id", "task", "task_id", "success", "score", "reward", "condition", "turns")
        names = (*names, "uses", "error")
        rows = self.journal.rows(_SUMMARIES, self.namespace)
        return [EpisodeSummary(**dict(zip(names, row, strict=True))) for row in rows]

    def used_in(self, id: str) -> list[UsedIn]:
        """Return every use of an entry, at any version, oldest first."""
        names = ("episode", "version", "turn", "how", "rejected", "task", "success")
        rows = self.journal.rows(_USED_IN, self.namespace, id)
        return [UsedIn(**dict(zip(names, row, strict=True))) for row in rows]

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
            self.journal.insert("statistics", *values, verb="INSERT OR REPLACE")
