"""Take what is undamaged out of a bank into a new one."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import Embedder
from experiential.bank.index.follower import Replica
from experiential.bank.index.site import CHROMA, folder_site
from experiential.bank.index.store import IndexLostError
from experiential.bank.storage import bundle, pages
from experiential.bank.storage.checksums import (
    RECORDS,
    TABLES,
    UNREADABLE,
    Row,
    checksum,
    read_all_text,
)
from experiential.bank.storage.journal import (
    JOURNAL_NAME,
    Journal,
    copy_stable,
    make_folder,
    new_folder,
)
from experiential.errors import BankError
from experiential.types import Experience, Record, read_record

_STATES = ("meta", "statistics", "scores", "queue")
"""Tables whose rows are written over: an old copy on a free page must not come back."""
_KEYS = {"commits": (0,), "versions": (0, 1, 2)}
"""Columns that tell the rows of a table apart; the first two where it is not named here."""
_OF_THE_FOLDER = ("bank", "chroma_home", "chroma_id", "store", "chroma")
_NAMED = 5
_EMPTY = """
    SELECT id FROM commits WHERE cause IN ('add', 'update', 'approve', 'remove')
    AND id NOT IN (SELECT commit_id FROM changes)
    AND NOT EXISTS (SELECT 1 FROM commits WHERE cause = 'purge')"""
"""Commits that changed entries, and of which no change is left."""
_Rows = dict[tuple[Any, ...], Row]


class Recovered(Record):
    """Report what was recovered of one kind.

    Attributes:
        namespace: whose entries; empty for what is counted over the whole bank.
        what: "entries", or a table of the journal.
        journal, index, export: how many came from there.
        lost: how many are known to be lost.
        names: the first of the lost ones.
    """

    namespace: str
    what: str
    journal: int = 0
    index: int = 0
    export: int = 0
    lost: int = 0
    names: tuple[str, ...] = ()


def recover(
    folder: Path,
    to: Path,
    *,
    export: Path | None = None,
    namespace: str = "default",
    embedder: Embedder | str | None = None,
) -> list[Recovered]:
    """Write a new bank with all that is undamaged in another, which is not changed.

    Args:
        folder: the damaged bank.
        to: a folder without a bank.
        export: a file that `Bank.export` wrote, for entries that the journal has lost.
        namespace: of the exported entries, and of those in the index when there is no journal.
        embedder: needed where the journal no longer names it, or names a callable.

    Raises:
        BankError: ``to`` holds a bank, ``export`` is not an export file, there is nothing to
            recover from, or ``embedder`` is not the one that the journal names. Nothing is then
            written to ``to``.
    """
    if (to / JOURNAL_NAME).exists():
        raise BankError(f"Expected a folder without a bank to recover into, got {str(to)!r}")
    if not any((folder / name).exists() for name in (JOURNAL_NAME, CHROMA)):
        raise BankError(f"Expected a folder with a journal or an index, got {str(folder)!r}")
    exported = [] if export is None else bundle.read(export)
    with TemporaryDirectory(prefix="experiential-recover-") as scratch:
        copy, new = Path(scratch) / JOURNAL_NAME, Path(scratch) / "new"
        if (folder / JOURNAL_NAME).is_file():
            copy_stable(folder / JOURNAL_NAME, copy)
        found, bad = _rows(copy)
        copy.unlink(missing_ok=True)
        make_folder(new)
        with closing(Journal.open(new)) as journal:
            lost = _put_back(journal, found, bad)
            states = {
                one: _last_states(journal, one)
                for one in {namespace, *(row.fields[0] for row in found["versions"].values())}
            }
        if (folder / CHROMA).is_dir():
            shutil.copytree(folder / CHROMA, Path(scratch) / CHROMA)
        report: list[Recovered] = []
        for one, (live, gone) in sorted(states.items()):
            given = exported if one == namespace else []
            indexed = _indexed(Path(scratch), one)
            missing = {id: version for id, (version, is_whole) in live.items() if not is_whole}
            whole = len(live) - len(missing)
            report.append(
                _entries(new, one, embedder, whole, missing, {*live, *gone}, given, indexed)
            )
        # As a whole or not at all, whatever ends this program before.
        with closing(Journal.open(new)) as journal:
            journal.backup(new_folder(to))
    for table in TABLES:
        if table not in ("versions", "meta"):
            counted = {"journal": len(found[table]), "lost": len(lost[table])}
            names = tuple(lost[table][:_NAMED])
            report.append(Recovered(namespace="", what=table, **counted, names=names))
    return report


def _rows(copy: Path) -> tuple[dict[str, _Rows], dict[str, set[tuple[Any, ...]]]]:
    """Return the whole rows of each table, and the keys of rows that are damaged."""
    found: dict[str, _Rows] = {table: {} for table in TABLES}
    for row in pages.rows(copy):  # before SQLite opens the copy, and folds its log in
        key, known = _key(row), found[row.table].get(_key(row))
        if known is None or (row.rowid or 0) > (known.rowid or 0):
            found[row.table][key] = row
    bad: dict[str, set[tuple[Any, ...]]] = {table: set() for table in TABLES}
    with suppress(*UNREADABLE), closing(sqlite3.connect(copy)) as connection:
        read_all_text(connection)
        for table in TABLES:
            read, is_whole = _read(connection, table)
            good = {_key(row): row for row, is_good in read if is_good}
            bad[table] = {_key(row) for row, is_good in read if not is_good}
            if table in _STATES and is_whole:
                found[table] = good
            else:
                found[table] |= good
            bad[table] -= found[table].keys()
    return found, bad


def _key(row: Row) -> tuple[Any, ...]:
    if row.table == "changes":
        return row.fields
    return tuple(row.fields[place] for place in _KEYS.get(row.table, (0, 1)))


def _read(connection: sqlite3.Connection, table: str) -> tuple[list[tuple[Row, bool]], bool]:
    """Return the rows that SQLite reads, each with whether it is good, and whether that is all."""
    columns = TABLES[table]
    read: dict[int, tuple[Row, bool]] = {}
    is_whole = True
    for order in ("ASC", "DESC"):  # from both ends up to the damage
        try:
            known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            own = "checksum" if "checksum" in known else "NULL"
            statement = f"SELECT rowid, {own}, {', '.join(columns)} FROM {table}"
            for rowid, stored, *fields in connection.execute(f"{statement} ORDER BY rowid {order}"):
                row = Row(table, rowid, tuple(fields))
                if own == "checksum":
                    is_good = checksum(table, fields) == stored
                else:
                    is_good = _is_record(row)
                read[rowid] = row, is_good
            break
        except UNREADABLE:
            is_whole = False
    return [read[rowid] for rowid in sorted(read)], is_whole


def _is_record(row: Row) -> bool:
    """Return whether a row of before there were checksums can be what was written."""
    named = zip(TABLES[row.table], row.fields, strict=True)
    if not all(isinstance(value, int) for name, value in named if name == "commit_id"):
        return False
    if row.table in RECORDS:
        with suppress(ValueError, TypeError):
            read_record(RECORDS[row.table], row.fields[TABLES[row.table].index("record")])
            return True
        return False
    try:
        "".join(field for field in row.fields if isinstance(field, str)).encode()
    except UnicodeEncodeError:
        return False
    return row.fields[0] is not None


def _put_back(
    journal: Journal, found: dict[str, _Rows], bad: dict[str, set[tuple[Any, ...]]]
) -> dict[str, list[str]]:
    """Write rows into a new journal; return the names of what is lost, as far as others tell."""
    kept = {
        table: [
            row
            for row in rows.values()
            if table != "meta"
            or row.fields[1] not in _OF_THE_FOLDER
            and not row.fields[1].startswith("indexed")
        ]
        for table, rows in found.items()
    }
    journal.restore(kept)
    lost = {table: [str(key[-1]) for key in keys] for table, keys in bad.items()}
    commits = {key[0] for key in found["commits"]}
    last = journal.value("SELECT COALESCE(MAX(id), 0) FROM commits")
    lost["commits"] = [str(id) for id in range(1, last + 1) if id not in commits]
    # The journal wrote again the changes that made versions live; others took entries out.
    whole = set(journal.rows("SELECT namespace, commit_id, id, version FROM changes"))
    lost["changes"] = [f"{id!r} at commit {commit}" for _, commit, id, _ in bad["changes"] - whole]
    lost["changes"] += [f"commit {row[0]}" for row in journal.rows(_EMPTY)]
    statement = "SELECT c.ref FROM commits c LEFT JOIN trajectories t ON t.namespace = c.namespace"
    statement += " AND t.id = c.ref WHERE c.cause = 'record' AND c.ref IS NOT NULL AND t.id IS NULL"
    lost["trajectories"] += [row[0] for row in journal.rows(statement)]
    return lost


def _last_states(journal: Journal, namespace: str) -> tuple[dict[str, tuple[int, bool]], set[str]]:
    """Return the version of each live entry and whether it is whole, and the removed entries."""
    statement = """
        SELECT c.id, c.version, v.id IS NOT NULL FROM changes c
        LEFT JOIN versions v ON v.namespace = c.namespace AND v.id = c.id AND v.version = c.version
        WHERE c.seq IN (SELECT MAX(seq) FROM changes WHERE namespace = ? GROUP BY id)"""
    rows = journal.rows(statement, namespace)
    live = {id: (version, bool(whole)) for id, version, whole in rows if version is not None}
    return live, {id for id, version, _ in rows if version is None}


def _indexed(scratch: Path, namespace: str) -> list[Experience]:
    """Return the entries in a copy of a bank's Chroma folder, as far as it can be read."""
    from experiential.bank.index.chroma import ChromaStore

    site = folder_site(scratch, namespace)
    if not (scratch / CHROMA).is_dir():
        return []
    with suppress(IndexLostError):
        replica = Replica(site)
        try:
            if isinstance(replica.store, ChromaStore):
                with replica.answering():
                    return replica.store.entries()
        finally:
            replica.close()
    return []


def _entries(
    to: Path,
    namespace: str,
    embedder: Embedder | str | None,
    whole: int,
    missing: dict[str, int],
    known: set[str],
    exported: Sequence[Experience],
    indexed: Sequence[Experience],
) -> Recovered:
    """Add the entries that the journal has lost from the export and the index."""

    def wanted(entries: Iterable[Experience], exact: bool) -> dict[str, Experience]:
        return {
            one.id: one
            for one in entries
            if (missing.get(one.id) == one.version if exact else True)
            and (one.id in missing or one.id not in known)
        }

    # The version that was lost, then an earlier one; of the same, the export's has all fields.
    sources = {"export": exported, "index": indexed}
    chosen: dict[str, tuple[str, Experience]] = {}
    for exact in (True, False):
        for name, entries in sources.items():
            for id, one in wanted(entries, exact).items():
                chosen.setdefault(id, (name, one))
    added = {name: [one for source, one in chosen.values() if source == name] for name in sources}
    if chosen or embedder is not None:
        with FolderBank(to, namespace=namespace, embedder=embedder) as bank:
            for name in sources:
                file = to / f"{name}.jsonl"
                try:
                    bundle.write(file, added[name], namespace, bank.embedder.id)
                    bank.import_(file)
                finally:
                    file.unlink(missing_ok=True)
    lost = [f"{id} version {version}" for id, version in missing.items() if id not in chosen]
    return Recovered(
        namespace=namespace,
        what="entries",
        journal=whole,
        index=len(added["index"]),
        export=len(added["export"]),
        lost=len(lost),
        names=tuple(lost[:_NAMED]),
    )
