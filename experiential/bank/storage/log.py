"""Read the log of a bank: its commits, their changes, and the difference of two states."""

from __future__ import annotations

from collections.abc import Iterable

from experiential.bank.evidence.credit import Ancestor
from experiential.bank.records import Changed, Difference, LogEntry
from experiential.bank.storage.journal import Journal
from experiential.types import Experience


class Log:
    """Read the commits of one namespace with their changes."""

    def __init__(self, journal: Journal, namespace: str) -> None:
        self._journal = journal
        self._namespace = namespace

    def commits(self) -> list[LogEntry]:
        """Return every commit, oldest first."""
        rows = self._journal.rows(
            "SELECT c.id, c.time, c.author, c.cause, c.ref, COALESCE(n.changes, 0) FROM commits c"
            " LEFT JOIN (SELECT commit_id, COUNT(DISTINCT id) AS changes FROM changes WHERE"
            " namespace = ?1 GROUP BY commit_id) n ON n.commit_id = c.id WHERE c.namespace = ?1"
            " ORDER BY c.id",
            self._namespace,
        )
        names = ("id", "time", "author", "cause", "ref", "changes")
        return [LogEntry(**dict(zip(names, row, strict=True))) for row in rows]

    def of(self, id: str) -> list[LogEntry]:
        """Return the commits that changed one entry, oldest first, with the version after each."""
        rows = self._journal.rows(
            "SELECT commit_id, version FROM changes WHERE namespace = ? AND id = ? ORDER BY seq",
            self._namespace,
            id,
        )
        versions = {row[0]: row[1] for row in rows}
        return [
            commit.model_copy(update={"version": versions[commit.id]})
            for commit in self.commits()
            if commit.id in versions
        ]

    def written_from(self, trajectory: str) -> list[Ancestor]:
        """Return (id, version) of all that was distilled from a trajectory, in order."""
        rows = self._journal.rows(
            "SELECT n.id, n.version FROM commits c JOIN changes n ON n.commit_id = c.id AND"
            " n.namespace = c.namespace WHERE c.namespace = ? AND c.cause = 'trajectory' AND c.ref"
            " = ? AND n.version IS NOT NULL ORDER BY n.seq",
            self._namespace,
            trajectory,
        )
        return [(row[0], row[1]) for row in rows]


def difference(before: Iterable[Experience], after: Iterable[Experience]) -> Difference:
    """Return the entries added, removed and changed between two states; counters do not count."""
    old, new = {entry.id: entry for entry in before}, {entry.id: entry for entry in after}
    both = [(old[id], entry) for id, entry in new.items() if id in old]
    return Difference(
        added=tuple(entry for id, entry in new.items() if id not in old),
        removed=tuple(entry for id, entry in old.items() if id not in new),
        changed=tuple(Changed(old=a, new=b) for a, b in both if a.version != b.version),
    )
