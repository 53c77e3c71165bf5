"""Keep the distillation queue in the journal, one row for each submitted trajectory."""

from __future__ import annotations

from experiential.bank.records import DeadLetter
from experiential.bank.storage.journal import Journal


class DistillationQueue:
    """Move items from ``queued`` to ``done`` or ``dead``; see `Queue`.

    The id of an item is the id of its trajectory, which makes submitting twice harmless. Writes
    that belong to a commit happen inside ``Journal.transaction``.
    """

    def __init__(self, journal: Journal, namespace: str) -> None:
        self._journal = journal
        self._namespace = namespace

    def put(self, id: str) -> bool:
        """Queue a trajectory; return False if it was queued before."""
        if self.state(id) is not None:
            return False
        statement = "INSERT INTO queue (namespace, id, state) VALUES (?, ?, 'queued')"
        self._journal.run(statement, self._namespace, id)
        return True

    def state(self, id: str) -> str | None:
        """Return "queued", "done", "dead", or None for an unknown item."""
        statement = "SELECT state FROM queue WHERE namespace = ? AND id = ?"
        return self._journal.value(statement, self._namespace, id)

    def waiting(self) -> list[str]:
        """Return the ids of queued items, oldest first."""
        statement = "SELECT id FROM queue WHERE namespace = ? AND state = 'queued' ORDER BY seq"
        return [row[0] for row in self._journal.rows(statement, self._namespace)]

    def finish(self, id: str) -> bool:
        """Mark an item done; if False is returned, nothing may be written for it."""
        if self.state(id) != "queued":
            return False
        self._set(id, "state = 'done', reason = NULL")
        return True

    def fail(self, id: str, reason: str, *, last: bool) -> int:
        """Count a failed attempt and return the number so far; ``last`` makes a dead letter."""
        with self._journal.transaction():
            state = "dead" if last else "queued"
            self._set(id, "attempts = attempts + 1, state = ?, reason = ?", state, reason)
        return self.attempts(id)

    def attempts(self, id: str) -> int:
        """Return the number of failed attempts."""
        statement = "SELECT attempts FROM queue WHERE namespace = ? AND id = ?"
        return self._journal.value(statement, self._namespace, id) or 0

    def dead_letters(self) -> list[DeadLetter]:
        """Return the items that were given up, oldest first."""
        statement = "SELECT id, attempts, reason FROM queue"
        statement += " WHERE namespace = ? AND state = 'dead' ORDER BY seq"
        rows = self._journal.rows(statement, self._namespace)
        return [DeadLetter(id=row[0], attempts=row[1], reason=row[2] or "") for row in rows]

    def requeue(self, id: str) -> bool:
        """Queue a dead letter again with all its attempts; return False if it is not dead."""
        with self._journal.transaction():
            if self.state(id) != "dead":
                return False
            self._set(id, "attempts = 0, state = 'queued', reason = NULL")
        return True

    def clear(self) -> None:
        """Delete all items."""
        self._journal.run("DELETE FROM queue WHERE namespace = ?", self._namespace)

    def _set(self, id: str, columns: str, *values: str) -> None:
        statement = f"UPDATE queue SET {columns} WHERE namespace = ? AND id = ?"
        self._journal.run(statement, *values, self._namespace, id)
