"""Keep everything that a bank was ever given in one SQLite file, the journal.

Rows are only ever added, with exceptions that are states and not history: the queue's state column,
counters, the sums behind baselines, and ``meta``; and the rows of an episode are written again when
its outcome becomes known later. Each row has a checksum, which is checked at opening; see
`experiential.bank.storage.checksums`.
"""

from __future__ import annotations

import filecmp
import logging
import os
import re
import shlex
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from experiential.bank.storage import checksums
from experiential.bank.storage.checksums import UNREADABLE, Damage, Row
from experiential.errors import BankError
from experiential.types import new_id

JOURNAL_NAME = "journal.sqlite"
CLOSED = "Expected an open bank, got a closed one; open it again with ExperienceBank(path)"
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


def _add_checksums(connection: sqlite3.Connection) -> list[Damage]:
    for table in checksums.TABLES:
        connection.execute(f"ALTER TABLE {table} ADD COLUMN checksum BLOB")
    connection.execute("ALTER TABLE commits ADD COLUMN chain BLOB")
    connection.execute(
        "CREATE TABLE damaged (tab TEXT, namespace TEXT, id TEXT, what TEXT, time REAL,"
        " content TEXT)"
    )
    found = checksums.check_unsealed(connection)
    checksums.seal(connection)
    return found


def _make_tables(connection: sqlite3.Connection) -> list[Damage]:
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)
    return []


MIGRATIONS: tuple[Callable[[sqlite3.Connection], list[Damage]], ...] = (
    _make_tables,
    _add_checksums,
)
"""What leads from each schema version to the next; a new journal runs through all of them."""
SCHEMA_VERSION = len(MIGRATIONS)
BANK_ID_NAME = "bank.id"
_BANK_ID = ("", "bank")  # namespace and key in ``meta``; no user's namespace is empty
_INDEXES = ("chroma/chroma.sqlite3", "index-*/*", "entries-*.map")
_ID = re.compile("[0-9a-f]{32}")
_NAMED = 5
_log = logging.getLogger(__name__)
T = TypeVar("T")

Attached = tuple[Any, ...]
"""A statement followed by its arguments, to be written at the end of a transaction."""


Opened = tuple[sqlite3.Connection, list[Damage]]
"""A connection, and the damaged rows that were found and set aside when it was opened."""


class Journal:
    """Share one connection to the journal among the threads of a bank; statements hold ``lock``.

    Attributes:
        attached: the statement that ends the next transaction of each thread. Whoever takes one
            out must write it.
        before_open: answers statements as long as the copy of ``open_copy`` is not made; None for
            those that it cannot answer, for which the copy is made.
    """

    def __init__(
        self, connect: Callable[[], Opened], on_open: Callable[[], object] | None = None
    ) -> None:
        self.lock = threading.RLock()
        self.attached: dict[int, Attached] = {}
        self._connect = connect
        self._on_open = on_open
        self.before_open: Callable[[str, tuple[Any, ...]], list[Any] | None] | None = None
        self._held: Opened | None = None
        self._open = True
        if on_open is None:
            self._opened()

    @property
    def _connection(self) -> sqlite3.Connection:
        return self._opened()[0]

    @property
    def damage(self) -> list[Damage]:
        """Return the damaged rows that were found, and set aside, when it was opened."""
        return self._opened()[1]

    def _opened(self) -> Opened:
        if self._held is None:
            with self.lock:
                if not self._open:
                    raise BankError(CLOSED)
                if self._held is None:
                    self._held = self._connect()
                    if self._on_open is not None:
                        self._on_open()
        return self._held

    @classmethod
    def open(cls, folder: Path, *, check: bool = True) -> Journal:
        """Open the journal of ``folder`` for writing; make it when there is none.

        Args:
            folder: of the bank.
            check: check all rows, as the first to open the folder does.
        """
        file = folder / JOURNAL_NAME
        if not file.is_file() or not file.stat().st_size:
            refuse_lost(folder)
        connection = _connect(file, folder)
        try:
            # A commit is on the disk before it is acknowledged, and outlives a power cut.
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            damage = _prepare(connection, folder, check=check)
        except BaseException as error:
            connection.close()
            if isinstance(error, UNREADABLE):
                raise unreadable(folder, error) from error
            raise
        return cls(lambda: (connection, damage))

    @classmethod
    def open_copy(cls, folder: Path, on_open: Callable[[], object] | None = None) -> Journal:
        """Open a private copy of the journal, so that reading never touches the bank's own files.

        SQLite would write a ``-shm`` file even for a read-only connection to a database in WAL
        mode. The copy is unlinked at once and vanishes with the connection. It is a consistent
        picture although another process may be writing. Damaged rows are set aside in it.

        With ``on_open`` it is made when the journal is first read, and ``on_open`` called then.
        """
        return cls(partial(_connect_copy, folder), on_open)

    def insert(
        self, table: str, *fields: Any, verb: str = "INSERT"
    ) -> tuple[sqlite3.Cursor, bytes]:
        """Write one row with its checksum, which is returned beside the cursor."""
        columns, stored = checksums.TABLES[table], [checksums.as_stored(one) for one in fields]
        own = checksums.checksum(table, stored)
        statement = f"{verb} INTO {table} ({', '.join(columns)}, checksum)"
        statement += f" VALUES ({'?, ' * len(columns)}?)"
        return self.run(statement, *stored, own), own

    def rows(self, statement: str, *arguments: Any) -> list[Any]:
        """Return all rows of one statement."""
        if self._open and self._held is None and self.before_open is not None:
            found = self.before_open(statement, arguments)
            if found is not None:
                return found
        return self.read(sqlite3.Cursor.fetchall, statement, *arguments)

    def read(self, take: Callable[[sqlite3.Cursor], T], statement: str, *arguments: Any) -> T:
        """Return what ``take`` makes of the rows of one statement, which it may read bit by bit."""
        with self.lock:
            if not self._open:
                raise BankError(CLOSED)
            try:
                return take(self._connection.execute(statement, arguments))
            except sqlite3.DatabaseError as error:
                if type(error) not in (sqlite3.OperationalError, sqlite3.DatabaseError):
                    raise
                raise BankError(
                    f"Expected to read the journal, got {error}; close the bank and run"
                    " experiential bank doctor on its folder"
                ) from error

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

    def restore(self, rows: Mapping[str, Iterable[Row]]) -> None:
        """Write rows taken out of another journal into this one, which is new.

        Positions of changes and queue items are given anew, in the order of the commits and of the
        old positions, because no checksum of a row covers its position.
        """
        ordered = {table: sorted(held, key=_position) for table, held in rows.items()}
        known = {row.fields for row in ordered["changes"]}
        # Each version was made live by a change of its commit; a removal names its entry.
        implied = [(row.fields[0], row.fields[3], *row.fields[1:3]) for row in ordered["versions"]]
        for id, namespace, _, _, cause, ref in (row.fields for row in ordered["commits"]):
            if cause == "remove" and ref is not None:
                implied.append((namespace, id, ref, None))
        ordered["changes"] += [Row("changes", None, row) for row in implied if row not in known]
        ordered["changes"].sort(key=lambda row: row.fields[1])
        with self.transaction():
            for table, held in ordered.items():
                columns = checksums.TABLES[table]
                statement = f"INSERT OR IGNORE INTO {table} ({', '.join(columns)})"
                statement += f" VALUES ({', '.join('?' * len(columns))})"
                for row in held:
                    self._connection.execute(statement, row.fields)
            checksums.restore(self._connection)
            checksums.seal(self._connection)

    def seal(self) -> None:
        """Renew the checksums that are NULL, and the chain.

        To be called at the end of a transaction that changed or deleted rows of the history.
        """
        checksums.seal(self._connection)

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open; SQLite ends one itself when a disk is full."""
        return self._connection.in_transaction

    def backup(self, folder: Path, *, as_new: bool = False) -> None:
        """Write a consistent copy of the journal into another folder, named once complete.

        Args:
            folder: where it goes.
            as_new: the copy is a bank of its own, and gets an id of its own when it is opened.
        """
        part = folder / f"{JOURNAL_NAME}.part"
        part.unlink(missing_ok=True)
        try:
            with closing(sqlite3.connect(part)) as target, self.lock:
                if not self._open:
                    raise BankError(CLOSED)
                self._connection.backup(target)
                if as_new:
                    target.execute("DELETE FROM meta WHERE namespace = ? AND key = ?", _BANK_ID)
                    target.commit()
        except sqlite3.DatabaseError as error:
            raise _explained(error) from error
        os.replace(part, folder / JOURNAL_NAME)
        keep_names(folder)

    def close(self) -> None:
        """Close the connection and fold the write-ahead log into the file."""
        with self.lock:
            if self._open:
                self._open = False
                if self._held is not None:
                    self._held[0].close()


def _position(row: Row) -> tuple[bool, int]:
    return row.rowid is None, row.rowid or 0


def make_folder(folder: Path) -> None:
    """Make the folder of a bank; until a journal is in it, make its name outlive a power cut."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / JOURNAL_NAME).exists():  # from then on SQLite keeps the names inside
        for above in folder.resolve().parents:
            with suppress(OSError):  # a folder that may not be read was not made just now
                keep_names(above)


def keep_names(folder: Path) -> None:
    """Make the names in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    except UNREADABLE as error:
        connection.close()
        raise unreadable(folder, error) from error
    if found > SCHEMA_VERSION:
        connection.close()
        raise BankError(
            f"Expected a journal of schema {SCHEMA_VERSION} or older, got {found}; update"
            " experiential-rl, or where no later version wrote it: experiential bank recover"
            f" {shlex.quote(str(folder))} --to NEW"
        )
    checksums.provide(connection)
    return connection


def _connect_copy(folder: Path) -> Opened:
    with tempfile.TemporaryDirectory(prefix="experiential-bank-") as scratch:
        copy = Path(scratch) / JOURNAL_NAME
        copy_stable(folder / JOURNAL_NAME, copy)
        if not copy.stat().st_size:
            raise unreadable(folder, "an empty file")
        connection = _connect(copy, folder)
        try:
            connection.execute("PRAGMA journal_mode=DELETE")
            connection.execute("PRAGMA journal_mode=MEMORY")
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute("PRAGMA temp_store=MEMORY")
            damage = _prepare(connection, folder, is_copy=True)
            connection.execute("PRAGMA query_only=ON")
        except BaseException as error:
            connection.close()
            if isinstance(error, UNREADABLE):
                raise unreadable(folder, error) from error
            raise
    return connection, damage


def unreadable(folder: Path, found: object) -> BankError:
    """Return the error for a folder whose journal cannot be used as it is."""
    place, found = shlex.quote(str(folder)), ascii(str(found))[1:-1]
    return BankError(
        f"Expected a readable journal in {str(folder)!r}, got {found}; restore {JOURNAL_NAME} from"
        f" a backup, or save what is undamaged: experiential bank recover {place} --to NEW"
    )


def refuse_lost(folder: Path) -> None:
    """Raise BankError for a folder whose journal is gone: beside a bank's id or a full index."""
    beside = [name for name in (BANK_ID_NAME, *_INDEXES) if any(folder.glob(name))]
    if beside:
        state = "an empty one" if (folder / JOURNAL_NAME).is_file() else "none"
        names = {file.relative_to(folder).parts[0] for name in beside for file in folder.glob(name)}
        raise unreadable(folder, f"{state} beside {', '.join(sorted(names))}")


def _prepare(
    connection: sqlite3.Connection, folder: Path, *, check: bool = True, is_copy: bool = False
) -> list[Damage]:
    """Bring a journal to the current schema, check it, and compare its id with the folder's."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        is_new = not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        if is_new:
            refuse_lost(folder)
        damage: list[Damage] = []
        if 0 < found < SCHEMA_VERSION:
            _make_tables(connection)  # an old journal may lack the newest tables
        if found < SCHEMA_VERSION:
            for migrate in MIGRATIONS[found:]:
                damage += migrate(connection)
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        if check and not is_new:
            damage += checksums.check(connection)
        id = _identify(connection, folder)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    # Only now, so that a kill between the two leaves no folder that is refused.
    if not is_copy and id != id_beside(folder):
        part = folder / f"{BANK_ID_NAME}.part"
        part.write_text(f"{id}\n", encoding="ascii")
        os.replace(part, folder / BANK_ID_NAME)
    if damage:
        more = f" and {len(damage) - _NAMED} more" if len(damage) > _NAMED else ""
        _log.warning(
            "The journal in %s is damaged and %s: %s%s; the rest is served. To get back what can"
            " be: experiential bank recover %s --to NEW",
            folder,
            "what is damaged is left out" if is_copy else "what is damaged was set aside",
            "; ".join(str(one) for one in damage[:_NAMED]),
            more,
            shlex.quote(str(folder)),
        )
    return damage


def id_beside(folder: Path) -> str:
    """Return the id in the folder's file; empty where the file is missing or damaged."""
    try:
        found = (folder / BANK_ID_NAME).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return found if _ID.fullmatch(found) else ""


def _identify(connection: sqlite3.Connection, folder: Path) -> str:
    """Return the id of the bank, recorded in its journal; refuse the journal of another bank."""
    statement = "SELECT value FROM meta WHERE namespace = ? AND key = ?"
    found, beside = connection.execute(statement, _BANK_ID).fetchone(), id_beside(folder)
    if not found:
        row = (*_BANK_ID, beside or new_id())
        connection.execute(
            "INSERT INTO meta (namespace, key, value, checksum) VALUES (?, ?, ?, ?)",
            (*row, checksums.checksum("meta", row)),
        )
        return row[-1]
    if beside and found[0] != beside:
        raise unreadable(folder, f"that of bank {found[0]}, where {BANK_ID_NAME} says {beside}")
    return found[0]


def checked_folder(path: object) -> Path:
    """Return a folder name as a path; refuse an address, a file, and any other value."""
    if isinstance(path, str) and "://" in path:
        raise BankError(
            f"Expected a folder, got the address {path!r}; only ExperienceBank takes one, with"
            " http:// or https://"
        )
    text = str(path)
    if not isinstance(path, (str, os.PathLike)) or not text:
        raise ValueError(f"Expected path to be a folder name, got {path!r}")
    folder = Path(os.fspath(path)).expanduser()  # pyright: ignore[reportUnknownArgumentType]
    if folder.exists() and not folder.is_dir():
        raise BankError(f"Expected a folder, got the file {str(folder)!r}; choose another path")
    return folder


def new_folder(path: str | os.PathLike[str]) -> Path:
    """Make the folder of a bank that is to be; refuse one that holds a bank."""
    folder = checked_folder(path)
    if (folder / JOURNAL_NAME).exists():
        raise BankError(
            f"Expected a folder without a bank, got {str(folder)!r}; choose another or remove it"
        )
    make_folder(folder)
    return folder


def is_copy(source: Path, target: Path) -> bool:
    """Return whether two files hold the same bytes, whatever their dates say."""
    filecmp.clear_cache()  # it goes by dates
    return filecmp.cmp(source, target, shallow=False)


def copy_stable(source: Path, target: Path) -> None:
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
        # A second write within one tick of the file clock would not show in the date. A file dated
        # in the future, when the clock was set back, would get another date.
        just_written = 0 <= time.time_ns() - before[0][0] < _CLOCK_TICK_NS
        shutil.copyfile(source, target)
        log_copy.unlink(missing_ok=True)
        if before[1]:
            try:
                shutil.copyfile(log, log_copy)
            except FileNotFoundError:
                continue
        same = not just_written or is_copy(source, target)
        if same and before == fingerprint():
            return
        time.sleep(0.01 * (attempt + 1))
    raise BankError(
        f"Expected a quiet moment to copy {str(source)!r}, but its writer never paused; try again"
    )
