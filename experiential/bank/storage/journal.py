"""Keep everything that a bank was ever given in one SQLite file, the journal.

Rows are only ever added, with exceptions that are states and not history: the queue's state column,
counters, the sums behind baselines, and ``meta``; and the rows of an episode are written again when
its outcome becomes known later.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from experiential.errors import BankError

JOURNAL_NAME = "journal.sqlite"
CLOSED = "Expected an open bank, got a closed one; open it again with ExperienceBank(path)"
SCHEMA_VERSION = 1
_CLOCK_TICK_NS = 20_000_000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (namespace TEXT, key TEXT, value TEXT,
    PRIMARY KEY (namespace, key));
CREATE TABLE IF NOT EXISTS commits (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, time REAL NOT NULL,
    author TEXT NOT NULL, cause TEXT NOT NULL, ref TEXT);
CREATE TABLE IF NOT EXISTS versions (
    namespace TEXT, id TEXT, version INTEGER, commit_id INTEGER NOT NULL, record TEXT NOT NULL,
    vector BLOB NOT NULL, origins TEXT NOT NULL, PRIMARY KEY (namespace, id, version));
CREATE TABLE IF NOT EXISTS changes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, commit_id INTEGER NOT NULL,
    id TEXT NOT NULL, version INTEGER);
CREATE INDEX IF NOT EXISTS changes_by_entry ON changes (namespace, id, seq);
CREATE TABLE IF NOT EXISTS generations (namespace TEXT, id TEXT, record TEXT NOT NULL,
    PRIMARY KEY (namespace, id));
CREATE TABLE IF NOT EXISTS trajectories (
    namespace TEXT, id TEXT, commit_id INTEGER NOT NULL, instance TEXT, grp TEXT, condition TEXT,
    success INTEGER, reward REAL, error TEXT, record TEXT NOT NULL, PRIMARY KEY (namespace, id));
CREATE INDEX IF NOT EXISTS trajectories_by_group ON trajectories
    (namespace, grp, condition, error, success);
CREATE TABLE IF NOT EXISTS uses (
    namespace TEXT, id TEXT, trajectory TEXT NOT NULL, experience TEXT NOT NULL,
    version INTEGER NOT NULL, success INTEGER, record TEXT NOT NULL, PRIMARY KEY (namespace, id));
CREATE INDEX IF NOT EXISTS uses_by_version ON uses (namespace, experience, version);
CREATE TABLE IF NOT EXISTS statistics (
    namespace TEXT, id TEXT, retrievals INTEGER NOT NULL, uses INTEGER NOT NULL,
    successes INTEGER NOT NULL, PRIMARY KEY (namespace, id));
CREATE TABLE IF NOT EXISTS scores (
    namespace TEXT, task TEXT, episodes INTEGER NOT NULL, total REAL NOT NULL,
    PRIMARY KEY (namespace, task));
CREATE TABLE IF NOT EXISTS queue (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, id TEXT NOT NULL,
    state TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, reason TEXT, UNIQUE (namespace, id));
CREATE INDEX IF NOT EXISTS queue_by_state ON queue (namespace, state);
CREATE TABLE IF NOT EXISTS receipts (
    namespace TEXT, key TEXT, digest TEXT NOT NULL, commit_id INTEGER NOT NULL,
    PRIMARY KEY (namespace, key));
"""

Attached = tuple[Any, ...]
"""A statement followed by its arguments, to be written at the end of a transaction."""


class Journal:
    """Share one connection to the journal among the threads of a bank; statements hold ``lock``.

    Attributes:
        attached: the statement that ends the next transaction of each thread. Whoever takes one
            out must write it.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.lock = threading.RLock()
        self._connection = connection
        self._open = True
        self.attached: dict[int, Attached] = {}

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """Open the journal of ``folder`` for writing; make it when there is none."""
        connection = _connect(folder / JOURNAL_NAME, folder)
        # A commit is on the disk before it is acknowledged, and outlives a power cut.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(
            f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
        )
        return cls(connection)

    @classmethod
    def open_copy(cls, folder: Path) -> Journal:
        """Open a private copy of the journal, so that reading never touches the bank's own files.

        SQLite would write a ``-shm`` file even for a read-only connection to a database in WAL
        mode. The copy is unlinked at once and vanishes with the connection. It is a consistent
        picture although another process may be writing.
        """
        with tempfile.TemporaryDirectory(prefix="experiential-bank-") as scratch:
            copy = Path(scratch) / JOURNAL_NAME
            _copy_stable(folder / JOURNAL_NAME, copy)
            connection = _connect(copy, folder)
            connection.execute("PRAGMA journal_mode=DELETE")
            connection.execute("PRAGMA temp_store=MEMORY")
            connection.execute("PRAGMA query_only=ON")
        return cls(connection)

    def rows(self, statement: str, *arguments: Any) -> list[Any]:
        """Return all rows of one statement."""
        with self.lock:
            if not self._open:
                raise BankError(CLOSED)
            return self._connection.execute(statement, arguments).fetchall()

    def value(self, statement: str, *arguments: Any) -> Any:
        """Return the first column of the first row, or None."""
        found = self.rows(statement, *arguments)
        return found[0][0] if found else None

    def run(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        """Run one statement that writes; the cursor has ``lastrowid`` and ``rowcount``."""
        with self.lock:
            if not self._open:
                raise BankError(CLOSED)
            try:
                return self._connection.execute(statement, arguments)
            except sqlite3.DatabaseError as error:
                raise _explained(error) from error

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Make all statements inside durable together when the block ends, or none."""
        with self.lock:
            if not self._open:
                raise BankError(CLOSED)
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                if (note := self.attached.pop(threading.get_ident(), None)) is not None:
                    self.run(*note)
                self._connection.execute("COMMIT")
            except sqlite3.DatabaseError as error:
                raise _explained(error) from error
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open; SQLite ends one itself when a disk is full."""
        return self._connection.in_transaction

    def backup(self, folder: Path) -> None:
        """Write a consistent copy of the journal into another folder, named once complete."""
        part = folder / f"{JOURNAL_NAME}.part"
        part.unlink(missing_ok=True)
        try:
            with closing(sqlite3.connect(part)) as target, self.lock:
                if not self._open:
                    raise BankError(CLOSED)
                self._connection.backup(target)
        except sqlite3.DatabaseError as error:
            raise _explained(error) from error
        os.replace(part, folder / JOURNAL_NAME)
        descriptor = os.open(folder, os.O_RDONLY)  # the new name is to survive a power cut
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the connection and fold the write-ahead log into the file."""
        with self.lock:
            if self._open:
                self._open = False
                self._connection.close()


def _explained(error: sqlite3.DatabaseError) -> Exception:
    """Return the error to raise for a failed write; errors of the disk are explained."""
    if type(error) not in (sqlite3.OperationalError, sqlite3.DatabaseError):
        return error
    return BankError(
        f"Expected to write the journal, got {error} ({error.sqlite_errorname}); nothing of this"
        " write was kept: make room on its disk or see what ails it, then write again"
    )


def _connect(file: Path, folder: Path) -> sqlite3.Connection:
    """Connect to the journal of a folder, or to a copy of it in ``file``."""
    connection = sqlite3.connect(file, timeout=30.0, isolation_level=None, check_same_thread=False)
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        connection.close()
        raise BankError(
            f"Expected a readable journal in {str(folder)!r}, got {error}; restore the file"
            f" {JOURNAL_NAME}"
        ) from error
    if found > SCHEMA_VERSION:
        connection.close()
        raise BankError(
            f"Expected a journal of schema {SCHEMA_VERSION} or older, got {found}; update"
            " experiential-rl"
        )
    return connection


def _copy_stable(source: Path, target: Path) -> None:
    """Copy a database and its write-ahead log; repeat if a live writer made a checkpoint meanwhile.

    Frames appended to the log while it is copied do no harm: SQLite ignores an incomplete tail by
    its checksums.
    """

    def fingerprint() -> tuple[tuple[int, int], bytes]:
        # It changes when the database file is written, or when its log starts anew.
        status = source.stat()
        try:
            with log.open("rb") as file:
                header = file.read(32)
        except FileNotFoundError:
            header = b""
        return (status.st_mtime_ns, status.st_size), header

    log, log_copy = Path(f"{source}-wal"), Path(f"{target}-wal")
    for attempt in range(50):
        before = fingerprint()
        if time.time_ns() - before[0][0] < _CLOCK_TICK_NS:
            # A second write within one tick of the file clock would not show.
            time.sleep(_CLOCK_TICK_NS / 1e9)
            continue
        shutil.copyfile(source, target)
        log_copy.unlink(missing_ok=True)
        if before[1]:
            try:
                shutil.copyfile(log, log_copy)
            except FileNotFoundError:
                continue
        if before == fingerprint():
            return
        time.sleep(0.01 * (attempt + 1))
    raise BankError(
        f"Expected a quiet moment to copy {str(source)!r}, but its writer never paused; try again"
    )
