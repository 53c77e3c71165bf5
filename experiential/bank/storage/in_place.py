"""Read what a journal holds beyond a stamp where it lies, without a copy and without a full check.

All that is read is proved: each row by its checksum, and that none is missing by the chain of
commits, which goes on from the value in the stamp. Whatever does not fit, and whatever SQLite says
of the file, is left to `Journal.open_copy`, which checks everything and names what is damaged.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from experiential.bank.storage.checksums import TABLES, UNREADABLE, at, checksum, link, parsed
from experiential.bank.storage.journal import JOURNAL_NAME, SCHEMA_VERSION, Journal, id_beside
from experiential.bank.storage.mapped import Stamp
from experiential.bank.storage.tables import STORED, STORED_ALL, Stored, origins_of
from experiential.errors import BankError
from experiential.types import Experience, Statistics

_BANK_ID = ("", "bank")
_FACTS = ("embedder", "embedder_name", "dimension")
_UNCHAINED = set(TABLES) - {"meta", "commits", "changes", "versions"}
_NAMED = re.compile(r"\b(?:FROM|JOIN)\s+(\w+)\b(?!\()")
_DEFINED = re.compile(r"(\w+)(?: \([\w, ]+\))? AS \(")
T = TypeVar("T")
_STATE = """
    SELECT id, chain, COALESCE((SELECT MAX(seq) FROM changes), 0),
        COALESCE((SELECT MAX(id) FROM commits WHERE namespace = ?), 0)
    FROM commits ORDER BY id DESC LIMIT 1"""


class Since(NamedTuple):
    """Hold what a namespace has beyond a stamp.

    Attributes:
        head: its last commit.
        chain: the last chain value of the journal.
        changed: new versions by entry, in the order of their first change; None: removed.
        statistics: the counters of all entries.
        seq: position of the last change in the journal, of any namespace.
        commits: its later commits, as rows of `LOG`.
        changes: its later changes: commit, entry and version (None: removed).
        merges: rows of `MERGED` for these.
    """

    head: int
    chain: bytes
    changed: dict[str, Stored | None]
    statistics: dict[str, Statistics]
    seq: int
    commits: list[tuple[Any, ...]]
    changes: list[tuple[int, str, int | None]]
    merges: list[tuple[str, int, str]]


class _Unproved(BankError):
    """Say that a row, or the lack of one, is not as its checksum and the chain ask for."""


def read_stamp(journal: Journal, namespace: str) -> Stamp | None:
    """Return the present state of a journal; None where there is no commit."""
    last = journal.rows(_STATE, namespace)  # at once: another namespace may be written meanwhile
    if not last:
        return None
    [(commit, chain, seq, head)] = last
    return Stamp(namespace, commit, chain.hex(), seq, head, _facts(namespace, journal.rows))


def fits(journal: Journal, stamp: Stamp) -> bool:
    """Return whether a stamp is of a state that this journal had."""
    statement = "SELECT lower(hex(chain)) FROM commits WHERE id = ?"
    return (
        journal.value(statement, stamp.commit) == stamp.chain
        and _facts(stamp.namespace, journal.rows) == stamp.facts
    )


def _facts(namespace: str, rows: Callable[..., Iterable[Any]]) -> dict[str, str | None]:
    statement = "SELECT value, checksum FROM meta WHERE namespace = ? AND key = ?"
    found: dict[str, str | None] = {}
    for key in (_BANK_ID, *((namespace, name) for name in _FACTS)):
        found[key[1]] = None
        for value, own in rows(statement, *key):
            if checksum("meta", (*key, value)) != own:
                raise _Unproved
            found[key[1]] = value
    return found


def read_since(folder: Path, stamp: Stamp, *, most: int) -> Since | None:
    """Return what the journal of ``folder`` holds beyond ``stamp``; None where that is unproved.

    It is None, too, where there are more than ``most`` changes, because all is read as fast then.
    No byte of the folder changes. Beside a writer, or after one that was killed, the write-ahead
    log is read too, by SQLite's own locks; else the file alone, which is whole.
    """
    if id_beside(folder) not in ("", stamp.facts["bank"]):
        return None
    return _in_place(folder, lambda connection: _since(connection, stamp, most))


class Unchained:
    """Answer statements from the tables that no chain covers, where the journal lies.

    Each row that a statement reads is compared with its checksum, and SQLite checks the pages of
    each table once: that is all that a full check does for these tables. Single versions, too, are
    read by their key.

    Args:
        folder: of the bank.
        chain: the last chain value of the journal; nothing is answered from a later state.
    """

    def __init__(self, folder: Path, chain: bytes) -> None:
        self._folder = folder
        self._chain = chain
        self._checked: set[str] = set()

    def rows(self, statement: str, arguments: Sequence[Any]) -> list[Any] | None:
        """Return all rows of a statement; None where only a checked copy can tell."""
        tables = set(_NAMED.findall(statement)).difference(_DEFINED.findall(statement))
        is_by_key = statement in (STORED, STORED_ALL)
        if not tables or not (is_by_key or tables <= _UNCHAINED):
            return None
        found = _in_place(
            self._folder,
            lambda connection: self._rows(connection, tables, is_by_key, statement, arguments),
        )
        wanted = len(json.loads(arguments[1])) if statement == STORED_ALL else int(is_by_key)
        # A version that is missing may be damaged.
        return None if found is None or len(found) < wanted else found

    def _rows(
        self,
        connection: sqlite3.Connection,
        tables: set[str],
        is_by_key: bool,
        statement: str,
        arguments: Sequence[Any],
    ) -> list[Any] | None:
        last = connection.execute("SELECT chain FROM commits ORDER BY id DESC LIMIT 1").fetchone()
        if last is None or last[0] != self._chain:
            return None
        connection.create_function("prove", -1, _prove)
        for table in tables:
            if table not in self._checked and not is_by_key:
                if connection.execute(f"PRAGMA integrity_check({table})").fetchone()[0] != "ok":
                    return None
                self._checked.add(table)
            columns = ", ".join(TABLES[table])
            connection.execute(  # in place of the table: every row that is read is proved
                f"CREATE TEMP VIEW {table} AS SELECT rowid AS rowid, {columns} FROM main.{table}"
                f" WHERE prove('{table}', checksum, {columns})"
            )
        return connection.execute(statement, arguments).fetchall()


def _prove(table: str, own: bytes, *fields: Any) -> bool:
    if checksum(table, fields) != own:
        raise _Unproved
    return True


def _in_place(folder: Path, look: Callable[[sqlite3.Connection], T | None]) -> T | None:
    file = folder / JOURNAL_NAME
    try:
        log = Path(f"{file}-wal")
        has_log = log.is_file() and log.stat().st_size > 0
        if Path(f"{file}-journal").exists():
            return None
        before = file.stat()
        how = "mode=ro&readonly_shm=1" if has_log else "immutable=1"
        address = f"{file.resolve().as_uri()}?{how}"
        with closing(
            sqlite3.connect(address, uri=True, isolation_level=None, timeout=5.0)
        ) as connection:
            connection.execute("PRAGMA temp_store=MEMORY")
            connection.execute("BEGIN")
            found = look(connection)
        after = file.stat()
    except (*UNREADABLE, OSError, ValueError, BankError):
        return None
    same = (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    return found if has_log or same else None  # without locks, a writer may have come meanwhile


def _rows(
    connection: sqlite3.Connection, table: str, where: str, arguments: Any = ()
) -> list[tuple[int, tuple[Any, ...], bytes]]:
    """Return rowid, fields and checksum of some rows, which fit."""
    columns = ", ".join(TABLES[table])
    statement = f"SELECT rowid, checksum, {columns} FROM {table} WHERE {where}"
    found: list[tuple[int, tuple[Any, ...], bytes]] = []
    for rowid, own, *fields in connection.execute(statement, arguments):
        if checksum(table, fields) != own:
            raise _Unproved
        found.append((rowid, tuple(fields), own))
    return found


def _since(connection: sqlite3.Connection, stamp: Stamp, most: int) -> Since | None:
    namespace = stamp.namespace
    if connection.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
        return None

    def rows(statement: str, *arguments: Any) -> Iterable[Any]:
        return connection.execute(statement, arguments)

    if _facts(namespace, rows) != stamp.facts:
        return None
    # A page that leads to fewer rows would hide the last ones, which no later commit is chained to.
    last = dict(connection.execute("SELECT name, seq FROM sqlite_sequence").fetchall())
    if last.get("changes", 0) - stamp.seq > most:
        return None
    commits = _rows(connection, "commits", "id >= ? ORDER BY id", (stamp.commit,))
    changes = _rows(connection, "changes", "seq > ? ORDER BY seq", (stamp.seq,))
    if not commits or commits[0][0] != stamp.commit or commits[-1][0] != last.get("commits"):
        return None
    if (changes[-1][0] if changes else stamp.seq) != last.get("changes", 0):
        return None
    changed: dict[str, Stored | None] = {}
    own_changes: list[tuple[int, str, int | None]] = []
    merges: list[tuple[str, int, str]] = []
    written: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
    pointed: defaultdict[int, list[bytes]] = defaultdict(list)
    for seq, (of, commit, id, version), own in changes:
        pointed[commit].append(at(seq) + own)
        stored = None
        if version is not None:
            where = "namespace = ? AND id = ? AND version = ?"
            found = _rows(connection, "versions", where, (of, id, version))
            if not found:
                return None
            rowid, (_, _, _, made, record, vector, origins), proof = found[0]
            written[made][rowid] = proof
            if of == namespace:
                entry = parsed(Experience, record)
                stored = Stored(entry, np.frombuffer(vector, np.float32), origins_of(origins))
                if made == commit and entry.provenance.parents:
                    merges.append((id, version, json.dumps(entry.provenance.parents)))
        if of == namespace:
            changed[id] = stored
            own_changes.append((commit, id, version))
    counts = Counter(commit for commit, _ in {(commit, id) for commit, id, _ in own_changes})
    chains = dict(
        connection.execute("SELECT id, chain FROM commits WHERE id >= ?", (stamp.commit,))
    )
    before = chains[stamp.commit]
    if not isinstance(before, bytes) or before.hex() != stamp.chain:
        return None
    head = stamp.head
    own_commits: list[tuple[Any, ...]] = []
    for id, fields, own in commits[1:]:
        here = written.get(id, {})
        found = link(before, own, [here[row] for row in sorted(here)], pointed.pop(id, []))
        if found != chains[id]:
            return None
        before = found
        if fields[1] == namespace:
            head = id
            own_commits.append((id, *fields[2:], counts.get(id, 0)))
    if pointed:
        return None
    statistics, seq = _statistics(connection, namespace), last.get("changes", 0)
    return Since(head, before, changed, statistics, seq, own_commits, own_changes, merges)


def _statistics(connection: sqlite3.Connection, namespace: str) -> dict[str, Statistics]:
    """Return all counters, which no chain covers: SQLite says whether a row is missing."""
    rows = _rows(connection, "statistics", "namespace = ?", (namespace,))
    said = connection.execute("PRAGMA integrity_check(statistics)").fetchone()[0]
    if said != "ok":
        raise _Unproved
    return {
        id: Statistics(retrievals=retrievals, uses=uses, successes=successes)
        for _, (_, id, retrievals, uses, successes), _ in rows
    }
