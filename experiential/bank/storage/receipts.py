"""Remember which requests were carried out: a row beside each write, in its transaction."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

from experiential.bank.storage.journal import Journal

_NOTE = """
    INSERT INTO receipts
    SELECT ?1, ?2, ?3, COALESCE(MAX(id), 0) FROM commits WHERE namespace = ?1"""
_WRITTEN = """
    SELECT id, version FROM changes
    WHERE namespace = ? AND commit_id = ? AND version IS NOT NULL ORDER BY seq"""
_REMOVED = """
    SELECT n.id, (SELECT o.version FROM changes o
        WHERE o.namespace = n.namespace AND o.id = n.id AND o.seq < n.seq
        ORDER BY o.seq DESC LIMIT 1)
    FROM changes n WHERE n.namespace = ? AND n.commit_id = ? AND n.version IS NULL ORDER BY n.seq"""


class Receipt(NamedTuple):
    """Hold the digest of a request that was carried out, and the commit that it made."""

    digest: str
    commit: int


class Receipts:
    """Keep the keys of the served writes of one namespace.

    The row is written by the transaction that writes the commit, so after a crash there are both or
    none.
    """

    def __init__(self, journal: Journal, namespace: str) -> None:
        self._journal = journal
        self._namespace = namespace

    def find(self, key: str) -> Receipt | None:
        """Return the receipt of a key, or None if no write had it."""
        statement = "SELECT digest, commit_id FROM receipts WHERE namespace = ? AND key = ?"
        rows = self._journal.rows(statement, self._namespace, key)
        return Receipt(*rows[0]) if rows else None

    def noting(self, key: str, digest: str) -> AbstractContextManager[None]:
        """Write the receipt of ``key`` in the next transaction of this thread."""
        return self._journal.attach(_NOTE, self._namespace, key, digest)

    def written(self, commit: int) -> list[tuple[str, int]]:
        """Return (id, version) of everything that a commit wrote, in the order of writing."""
        return [tuple(row) for row in self._journal.rows(_WRITTEN, self._namespace, commit)]

    def removed(self, commit: int) -> list[tuple[str, int]]:
        """Return (id, last version) of every entry that a commit removed, in order."""
        return [tuple(row) for row in self._journal.rows(_REMOVED, self._namespace, commit)]
