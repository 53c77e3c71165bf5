"""Check every row of a journal against its checksum, and set aside the rows that fail.

Each row ends in a checksum of its other columns. Each commit also has a chain value, made from the
one before, its own checksum, and the checksums of the versions and changes that it wrote, so that
rows that are gone show as well. Checksums tell of damage; they are no defence against an attacker,
who can compute them too.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from experiential.errors import BankError
from experiential.types import Experience, Generation, R, Record, Trajectory, Use, read_record

TABLES: dict[str, tuple[str, ...]] = {
    "meta": ("namespace", "key", "value"),
    "commits": ("id", "namespace", "time", "author", "cause", "ref"),
    "versions": ("namespace", "id", "version", "commit_id", "record", "vector", "origins"),
    "changes": ("namespace", "commit_id", "id", "version"),
    "generations": ("namespace", "id", "record"),
    "trajectories": (
        *("namespace", "id", "commit_id", "instance", "grp", "condition"),
        *("success", "reward", "error", "record"),
    ),
    "uses": ("namespace", "id", "trajectory", "experience", "version", "success", "record"),
    "statistics": ("namespace", "id", "retrievals", "uses", "successes"),
    "scores": ("namespace", "task", "episodes", "total"),
    "queue": ("namespace", "id", "state", "attempts", "reason"),
    "receipts": ("namespace", "key", "digest", "commit_id"),
}
"""The columns of each table that its checksum covers. The rowid of a change is in the chain."""
RECORDS: dict[str, type[Record]] = {
    "versions": Experience,
    "generations": Generation,
    "trajectories": Trajectory,
    "uses": Use,
}
UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What is raised for a journal that SQLite cannot read: its messages may quote damaged bytes."""
SIZE = 16
_LINKED = ("versions", "changes")
_Sum = tuple[int, int, bytes]
"""Rowid, commit and checksum of a row that the chain covers."""
_INDEX_ONLY = ("missing from index", "wrong # of entries in index", "non-unique entry in index")
STAND_IN = ("unknown", "damaged")
"""Author and cause of the commit that stands for one whose row was set aside."""


class Damage(NamedTuple):
    """Name one damaged row of a journal."""

    table: str
    namespace: str
    id: str
    what: str

    def __str__(self) -> str:
        return f"{self.table} of {self.namespace!r}: {self.id} {self.what}"


class Row(NamedTuple):
    """Hold the fields of one row that ``TABLES`` names."""

    table: str
    rowid: int | None  # None: unreadable
    fields: tuple[Any, ...]


class _Bad(NamedTuple):
    damage: Damage
    rowid: int | None  # None: the row is missing or whole, and there is nothing to set aside
    fields: Sequence[Any]


def checksum(table: str, fields: Sequence[Any]) -> bytes:
    """Return the checksum of a row: BLAKE2b of its text fields, NUL between, and then its bytes."""
    texts, raw = [table], list[bytes]()
    for field in fields:  # this is most of an opening
        if type(field) is bytes:
            raw.append(field)
        else:
            texts.append(field if type(field) is str else str(field))
    made = blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=SIZE)
    for part in raw:
        made.update(part)
    return made.digest()


def as_stored(value: Any) -> Any:
    """Return a value as SQLite will give it back: NaN is NULL, -0.0 is 0.0, True is 1."""
    if type(value) is float:
        return None if value != value else value + 0.0
    return int(value) if type(value) is bool else value


def link(before: bytes, own: bytes, written: Sequence[bytes], changed: Sequence[bytes]) -> bytes:
    """Return the chain value of a commit; ``changed`` has the position before each checksum."""
    return blake2b(b"".join([before, own, *written, *changed]), digest_size=SIZE).digest()


def at(seq: int) -> bytes:
    """Return the position of a change as it goes into the chain."""
    return seq.to_bytes(8, "big", signed=True)


def parsed(kind: type[R], record: str, id: str = "") -> R:
    """Return a journalled record; one that this version cannot read raises BankError."""
    try:
        return read_record(kind, record)
    except ValueError as error:
        raise BankError(
            f"Expected a record of {kind.__name__} {id}, got {record[:60]!r}, which this version"
            " cannot read; update experiential-rl"
        ) from error


def provide(connection: sqlite3.Connection) -> None:
    """Give a connection the SQL function ``row_checksum(table, field, ...)``."""
    connection.create_function("row_checksum", -1, _row_checksum)


def _row_checksum(table: str, *fields: Any) -> bytes:
    return checksum(table, fields)


def read_all_text(connection: sqlite3.Connection) -> None:
    """Let a connection read text that is not UTF-8, with surrogates in place of wrong bytes."""
    connection.text_factory = _lenient


def _lenient(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def seal(connection: sqlite3.Connection) -> None:
    """Write the checksum of each row that has none, and every chain value, in a transaction.

    To be called after rows of the history were changed or deleted on purpose (their checksums set
    to NULL).
    """
    for table, columns in TABLES.items():
        if table != "commits":
            fields = ", ".join(columns)
            connection.execute(
                f"UPDATE {table} SET checksum = row_checksum('{table}', {fields})"
                " WHERE checksum IS NULL"
            )
    connection.execute(
        "UPDATE commits SET checksum = row_checksum('commits', id, namespace, time, author, cause,"
        " ref) WHERE checksum IS NULL"
    )
    written, changed = (
        connection.execute(f"SELECT rowid, commit_id, checksum FROM {table} ORDER BY rowid")
        for table in _LINKED
    )
    links = [
        (chain, commit) for commit, _, chain in _links(connection, written, changed, anew=True)
    ]
    connection.executemany("UPDATE commits SET chain = ? WHERE id = ?", links)


def _links(
    connection: sqlite3.Connection,
    versions: Iterable[_Sum],
    changes: Iterable[_Sum],
    *,
    anew: bool = False,
) -> Iterator[tuple[int, bytes | None, bytes]]:
    """Yield each commit with its stored chain value and the one that its rows ask for.

    Each goes on from the stored value before, so that only the commit shows at which a chain
    breaks; ``anew``, from the one that the rows ask for.
    """
    written: defaultdict[int, list[bytes]] = defaultdict(list)
    for _, commit, own in versions:
        written[commit].append(_bytes(own))
    changed: defaultdict[int, list[bytes]] = defaultdict(list)
    for seq, commit, own in changes:
        changed[commit].append(at(seq) + _bytes(own))
    before, last = b"", 0
    for commit, own, stored in connection.execute(
        "SELECT id, checksum, chain FROM commits ORDER BY id"
    ).fetchall():
        # Rows of commits that are missing altogether count for the next one.
        here = range(last + 1, commit + 1)
        found = link(
            before,
            _bytes(own),
            [one for id in here for one in written.pop(id, ())],
            [one for id in here for one in changed.pop(id, ())],
        )
        yield commit, stored, found
        before, last = found if anew else _bytes(stored), commit


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b""


def check(connection: sqlite3.Connection) -> list[Damage]:
    """Check a whole journal, set damaged rows aside, and return what was found.

    Args:
        connection: to a journal of the current schema, inside a transaction.

    Raises:
        sqlite3.DatabaseError, UnicodeDecodeError: SQLite cannot read the journal, see `UNREADABLE`.
    """
    found = _mend_indexes(connection)
    bad: list[_Bad] = []
    sums: dict[str, list[_Sum]] = {table: [] for table in _LINKED}
    for table, columns in TABLES.items():
        kept, commit = sums.get(table), columns.index("commit_id") if table in sums else 0
        for rowid, stored, *fields in _rows(connection, table):
            if checksum(table, fields) != stored:
                bad.append(
                    _Bad(_named(table, rowid, fields, "differs from its checksum"), rowid, fields)
                )
            if kept is not None:  # else they would be read a second time
                kept.append((rowid, fields[commit], stored))
    for id, stored, known in _links(connection, sums["versions"], sums["changes"]):
        if stored != known and not any(
            one.rowid == id for one in bad if one.damage[0] == "commits"
        ):
            what = "lacks rows that it wrote, or has others"
            bad.append(_Bad(Damage("commits", _namespace(connection, id), str(id), what), None, ()))
    found += [one.damage for one in bad]
    if bad:
        _set_aside(connection, bad)
    return found


def check_unsealed(connection: sqlite3.Connection) -> list[Damage]:
    """Check a journal of before there were checksums by its records, as `check` does."""
    found = _mend_indexes(connection)
    bad: list[_Bad] = []
    for table, kind in RECORDS.items():
        place = TABLES[table].index("record")
        for rowid, _, *fields in _rows(connection, table):
            try:
                read_record(kind, fields[place])
            except (ValueError, TypeError):
                bad.append(_Bad(_named(table, rowid, fields, "is no record"), rowid, fields))
    found += [one.damage for one in bad]
    if bad:
        _set_aside(connection, bad)
    return found


def _mend_indexes(connection: sqlite3.Connection) -> list[Damage]:
    """Let SQLite check its pages; make its indexes again where only they are damaged."""

    def answers() -> list[str]:
        said = [row[0] for row in connection.execute("PRAGMA integrity_check")]
        lines = [line for text in said for line in text.splitlines()]
        return [line for line in lines if not line.startswith("***")]

    said = answers()
    if said == ["ok"]:
        return []
    if all(any(part in line for part in _INDEX_ONLY) for line in said):
        connection.execute("REINDEX")
        if answers() == ["ok"]:
            return [Damage("indexes", "", "", f"were made again, SQLite said: {said[0]}")]
    raise sqlite3.DatabaseError(f"{len(said)} problems by integrity_check: {'; '.join(said[:3])}")


def _rows(connection: sqlite3.Connection, table: str) -> Iterator[Any]:
    """Yield rowid, checksum and fields of each row; text that is no UTF-8 has surrogates."""
    statement = f"SELECT rowid, checksum, {', '.join(TABLES[table])} FROM {table} ORDER BY rowid"
    last = -(2**63)
    try:
        for row in connection.execute(statement):
            yield row
            last = row[0]
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
        read_all_text(connection)
        try:
            yield from [row for row in connection.execute(statement) if row[0] > last]
        finally:
            connection.text_factory = str


def _named(table: str, rowid: int, fields: Sequence[Any], what: str) -> Damage:
    known = dict(zip(TABLES[table], fields, strict=True))
    if table == "changes":
        name = f"position {rowid} ({known['id']!r})"
    elif table == "commits":
        name = str(rowid)
    else:
        name = str(known.get("id", known.get("key", known.get("task"))))
        name += f" version {known['version']}" if table == "versions" else ""
    return Damage(table, _shown(known["namespace"]), _shown(name), what)


def _shown(text: object) -> str:
    return ascii(str(text))[1:-1][:80]


def _namespace(connection: sqlite3.Connection, commit: int) -> str:
    found = connection.execute("SELECT namespace FROM commits WHERE id = ?", (commit,)).fetchone()
    return found[0]


def _set_aside(connection: sqlite3.Connection, bad: Sequence[_Bad]) -> None:
    """Move damaged rows into the table ``damaged``, and seal what is left."""
    now = time.time()
    for (table, namespace, id, what), rowid, fields in bad:
        held = [field.hex() if isinstance(field, bytes) else field for field in fields]
        connection.execute(
            "INSERT INTO damaged VALUES (?, ?, ?, ?, ?, ?)",
            (table, namespace, id, what, now, json.dumps(held)),
        )
        if rowid is not None:
            connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (rowid,))
    restore(connection)
    seal(connection)


def restore(connection: sqlite3.Connection) -> int:
    """Write again what follows from other rows; return the number of changes restored.

    Each version was made live by a change of the same commit. Each change is part of a commit, for
    which another stands in when its row is gone.
    """
    lacking = connection.execute(
        "SELECT v.namespace, v.commit_id, v.id, v.version FROM versions v LEFT JOIN changes c"
        " ON c.namespace = v.namespace AND c.id = v.id AND c.commit_id = v.commit_id"
        " AND c.version = v.version WHERE c.seq IS NULL ORDER BY v.commit_id, v.rowid"
    ).fetchall()
    if lacking:
        # Positions that are free now, each with the commits between which it lies.
        known = connection.execute("SELECT seq, commit_id FROM changes ORDER BY seq").fetchall()
        last = connection.execute(
            "SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'changes'"
        ).fetchone()[0]
        free: list[tuple[int, int, int]] = []
        seq, before = 0, 0
        for position, commit in [*known, (max(last, seq) + len(lacking) + 1, 2**62)]:
            free += [(one, before, commit) for one in range(seq + 1, position)]
            seq, before = position, commit
        for row in lacking:
            place = next((one for one in free if one[1] <= row[1] <= one[2]), None)
            if place is not None:
                free.remove(place)
                connection.execute(
                    "INSERT INTO changes (seq, namespace, commit_id, id, version)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (place[0], *row),
                )
    connection.execute(
        "INSERT INTO commits (id, namespace, time, author, cause)"
        " SELECT w.commit_id, MIN(w.namespace), COALESCE((SELECT time FROM commits o"
        " WHERE o.id < w.commit_id ORDER BY o.id DESC LIMIT 1), 0), ?, ?"
        " FROM (SELECT namespace, commit_id FROM changes"
        " UNION SELECT namespace, commit_id FROM trajectories) w"
        " LEFT JOIN commits c ON c.id = w.commit_id WHERE c.id IS NULL GROUP BY w.commit_id",
        STAND_IN,
    )
    return len(lacking)
