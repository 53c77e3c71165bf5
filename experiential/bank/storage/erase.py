"""Erase what a person asks for from a bank folder, prove it, and give back room.

The folder must have no other writer. Whoever adds a table with texts to the journal, or a file with
texts to the folder, adds it here: `prove` finds what was forgotten.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiential.bank.storage.journal import Journal, keep_names
from experiential.bank.storage.lock import WriterLock
from experiential.bank.storage.mapped import PATTERN
from experiential.bank.storage.tables import History
from experiential.errors import BankError

_CLAIM = "\0maintenance"
"""Name under which the folder's lock is held; no namespace of a user has it."""
_CHUNK = 8 * 2**20
_FROM_IT = """
    SELECT DISTINCT json_extract(v.record, '$.provenance.generation') FROM versions v
    WHERE v.namespace = ?1 AND (
        v.id IN (SELECT value FROM json_each(?2))
        OR json_extract(v.record, '$.provenance.trajectory') IN (SELECT value FROM json_each(?3))
        OR EXISTS (SELECT 1 FROM json_each(v.record, '$.provenance.parents') p
            WHERE json_extract(p.value, '$[0]') IN (SELECT value FROM json_each(?2))))
    UNION SELECT json_extract(record, '$.refinement') FROM uses WHERE namespace = ?1 AND (
        experience IN (SELECT value FROM json_each(?2))
        OR trajectory IN (SELECT value FROM json_each(?3)))"""
"""Generations whose prompts or responses hold the entries (?2) or the trajectories (?3)."""


@dataclass(frozen=True)
class Doomed:
    """Name what is to be erased of one namespace.

    Attributes:
        texts: of all versions of the entries, and the text asked for: none may be left.
        others: entries that hold one of the texts and are not to be erased.
    """

    entries: list[str] = field(default_factory=list[str])
    trajectories: list[str] = field(default_factory=list[str])
    generations: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    others: list[str] = field(default_factory=list[str])


def namespaces(journal: Journal) -> list[str]:
    """Return the namespaces that were ever written."""
    return [row[0] for row in journal.rows("SELECT DISTINCT namespace FROM commits ORDER BY 1")]


def entries(journal: Journal, namespace: str) -> list[str]:
    """Return the ids of the entries that a namespace has or had."""
    statement = "SELECT DISTINCT id FROM versions WHERE namespace = ?"
    return [row[0] for row in journal.rows(statement, namespace)]


@contextmanager
def exclusive(folder: Path) -> Generator[Journal]:
    """Open the journal of a folder that no other process writes."""
    lock = WriterLock(folder, _CLAIM)
    try:
        journal = Journal.open(folder)
        try:
            yield journal
        finally:
            journal.close()
    finally:
        lock.release()


def find(
    journal: Journal,
    namespace: str,
    *,
    id: str | None = None,
    task: str | None = None,
    instance: str | None = None,
    text: str | None = None,
) -> Doomed:
    """Return what has to go for one entry, or for all of a task, an instance, or with a text.

    Raises:
        BankError: there is nothing of the kind.
    """
    entries: set[str] = set()
    trajectories: set[str] = set()

    def ids(statement: str, *arguments: Any) -> set[str]:
        return {row[0] for row in journal.rows(statement, namespace, *arguments)} - {None}

    versions = "SELECT id FROM versions WHERE namespace = ? AND "
    episodes = "SELECT id FROM trajectories WHERE namespace = ? AND "
    if id is not None:
        entries = ids(f"{versions} id = ?", id)
    elif task is not None:
        entries = ids(f"{versions} json_extract(record, '$.task') = ?", task)
        trajectories = ids(f"{episodes} json_extract(record, '$.task') = ?", task)
        trajectories |= ids(f"{episodes} json_extract(record, '$.task_id') = ?", task)
    elif instance is not None:
        is_origin = "EXISTS (SELECT 1 FROM json_each(origins) WHERE value = ?)"
        entries = ids(f"{versions} {is_origin}", instance)
        trajectories = ids(f"{episodes} instance = ?", instance)
    texts: set[str] = set() if text is None else {text}
    if text is not None:
        entries = holding(journal, "versions", namespace, texts)
    chosen = json.dumps(sorted(entries))
    among = "(SELECT value FROM json_each(?))"
    said = "SELECT json_extract(record, '$.text') FROM versions WHERE namespace = ? AND id IN"
    texts |= ids(f"{said} {among}", chosen)
    made_of = "json_extract(record, '$.provenance.trajectory')"
    trajectories |= ids(
        f"SELECT {made_of} FROM versions WHERE namespace = ? AND id IN {among}", chosen
    )
    trajectories |= holding(journal, "trajectories", namespace, texts)
    shown = ids(
        f"SELECT trajectory FROM uses WHERE namespace = ? AND experience IN {among}", chosen
    )
    generations = {
        row[0]
        for row in journal.rows(
            _FROM_IT, namespace, chosen, json.dumps(sorted(trajectories | shown))
        )
    } - {None}
    generations |= holding(journal, "generations", namespace, texts)
    if not (entries or trajectories or generations):
        raise BankError("Expected something to purge, got nothing of the kind in this namespace")
    return Doomed(
        sorted(entries),
        sorted(trajectories),
        sorted(generations),
        sorted(texts),
        sorted(holding(journal, "versions", namespace, texts) - entries),
    )


def holding(journal: Journal, table: str, namespace: str, texts: Iterable[str]) -> set[str]:
    """Return the ids of versions, trajectories or generations that hold one of these texts."""
    found = set[str]()
    for form in {form for text in texts for form in written_forms(text)}:
        statement = f"SELECT id FROM {table} WHERE namespace = ? AND instr(record, ?) > 0"
        found |= {row[0] for row in journal.rows(statement, namespace, form)}
    return found


def written_forms(text: str) -> set[str]:
    """Return the ways in which files hold a text: as it is, and as JSON writes it."""
    return {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}


def erase(journal: Journal, namespace: str, doomed: Doomed, author: str = "") -> int:
    """Erase it from the journal, and compact that; return the commit that says so.

    The commit names its time and ``author``, by default the user of this process, and not what was
    erased.
    """
    entries, trajectories = json.dumps(doomed.entries), json.dumps(doomed.trajectories)
    among = "IN (SELECT value FROM json_each(?))"
    receipts = f"""DELETE FROM receipts WHERE namespace = ? AND commit_id IN (
        SELECT commit_id FROM changes WHERE namespace = ? AND id {among}
        UNION SELECT commit_id FROM trajectories WHERE namespace = ? AND id {among})"""
    journal.rows("PRAGMA secure_delete=ON")
    with journal.transaction():
        journal.run(receipts, *(namespace, namespace, entries, namespace, trajectories))
        for table, column, ids in (
            ("versions", "id", entries),
            ("changes", "id", entries),
            ("statistics", "id", entries),
            ("uses", "experience", entries),
            ("uses", "trajectory", trajectories),
            ("trajectories", "id", trajectories),
            ("queue", "id", trajectories),
            ("generations", "id", json.dumps(doomed.generations)),
        ):
            statement = f"DELETE FROM {table} WHERE namespace = ? AND {column} {among}"
            journal.run(statement, namespace, ids)
        gone = json.dumps([*doomed.entries, *doomed.trajectories])
        unname = "UPDATE commits SET ref = NULL, checksum = NULL WHERE namespace = ? AND ref"
        journal.run(f"{unname} {among}", namespace, gone)
        for form in {form for text in doomed.texts for form in written_forms(text)}:
            for statement in (
                "UPDATE commits SET ref = NULL, checksum = NULL"
                " WHERE namespace = ? AND instr(ref, ?) > 0",
                "UPDATE queue SET reason = NULL, checksum = NULL"
                " WHERE namespace = ? AND instr(reason, ?) > 0",
                "DELETE FROM scores WHERE namespace = ? AND instr(task, ?) > 0",
            ):
                journal.run(statement, namespace, form)
        # The index is made again when a namespace is opened next, see `drop_index`.
        journal.run("DELETE FROM meta WHERE key = 'indexed' OR key LIKE 'indexed %'")
        journal.run("DELETE FROM damaged")  # what was set aside may hold the texts, in any form
        commit = History(journal, namespace).begin(author or _user(), "purge", None)
        journal.seal()
    vacuum(journal)
    return commit


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have users without a name
        return f"user {os.getuid()}"


def vacuum(journal: Journal) -> None:
    """Write the journal anew, without free pages and without a write-ahead log."""
    journal.rows("PRAGMA secure_delete=ON")
    journal.rows("PRAGMA wal_checkpoint(TRUNCATE)")  # what was deleted is overwritten on the disk
    journal.run("VACUUM")
    journal.rows("PRAGMA wal_checkpoint(TRUNCATE)")


def drop_mapped(folder: Path) -> None:
    """Remove the entries that readers map for good, those half written as well."""
    for file in folder.glob(PATTERN):
        file.unlink()
    keep_names(folder)


def drop_index(folder: Path) -> None:
    """Remove the index stores of a folder for good; an opened bank makes its own again."""
    for pattern in ("chroma", "chroma.damaged-*", "index-*"):
        for place in folder.glob(pattern):
            shutil.rmtree(place)
    keep_names(folder)  # else a power cut brings them back


@dataclass(frozen=True)
class Proof:
    """Say what a search of all bytes of a folder found.

    Attributes:
        files: that were read.
        bytes: of them.
        found: files that hold one of the texts, with the number of places.
    """

    files: int
    bytes: int
    found: Mapping[str, int]


def prove(folder: Path, texts: Sequence[str]) -> Proof:
    """Search every file of a folder for texts, as UTF-8 and as JSON escapes them."""
    forms = sorted({form.encode() for text in texts for form in written_forms(text)})
    overlap = max(map(len, forms), default=1) - 1
    files, total, found = 0, 0, dict[str, int]()
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or file.is_symlink():
            continue
        files, count, kept = files + 1, 0, b""
        with file.open("rb") as stream:
            while part := stream.read(_CHUNK):
                total += len(part)
                whole = kept + part
                for form in forms:
                    # what ends in the kept bytes was counted with the part before
                    count += whole.count(form) - kept.count(form)
                kept = whole[-overlap:] if overlap else b""
        if count:
            found[str(file.relative_to(folder))] = count
    return Proof(files, total, found)


_LINKED = """
    SELECT json_extract(record, '$.provenance.trajectory') FROM versions WHERE namespace = ?1
    UNION SELECT id FROM queue WHERE namespace = ?1 AND state <> 'done'"""
_OLD = """
    SELECT t.id, t.record FROM trajectories t JOIN commits c ON c.id = t.commit_id
    WHERE t.namespace = ?1 AND c.time < ?2 AND json_array_length(t.record, '$.turns') > 0"""
_NAMED = """
    SELECT json_extract(record, '$.provenance.generation') FROM versions WHERE namespace = ?1
    UNION SELECT json_extract(record, '$.refinement') FROM uses WHERE namespace = ?1"""
_LAST_OLD = """
    SELECT MAX(g.rowid) FROM generations g
    JOIN versions v ON json_extract(v.record, '$.provenance.generation') = g.id
    JOIN commits c ON c.id = v.commit_id
    WHERE g.namespace = ?1 AND v.namespace = ?1 AND c.time < ?2"""


def forget_old(journal: Journal, seconds: float) -> dict[str, int]:
    """Drop what is older and explains no entry: turns of trajectories, and generations.

    Kept are trajectories that an entry, living or removed, was made from, or that wait to be
    distilled, and generations that wrote an entry or refined one for a use. Of other trajectories
    the outcome and the uses stay, which are evidence. Generations have no time: older are those
    journalled before one that is.
    """
    before, counts = time.time() - seconds, {"turns of trajectories": 0, "generations": 0}
    journal.rows("PRAGMA secure_delete=ON")
    with journal.transaction():
        for namespace in namespaces(journal):
            linked = {row[0] for row in journal.rows(_LINKED, namespace)}
            for id, record in journal.rows(_OLD, namespace, before):
                if id in linked:
                    continue
                fields = json.loads(record) | {"turns": []}
                statement = "UPDATE trajectories SET record = ?, checksum = NULL"
                statement += " WHERE namespace = ? AND id = ?"
                journal.run(statement, json.dumps(fields, ensure_ascii=False), namespace, id)
                counts["turns of trajectories"] += 1
            last = journal.value(_LAST_OLD, namespace, before)
            named = json.dumps([row[0] for row in journal.rows(_NAMED, namespace) if row[0]])
            statement = "DELETE FROM generations WHERE namespace = ? AND rowid < ?"
            statement += " AND id NOT IN (SELECT value FROM json_each(?))"
            counts["generations"] += journal.run(statement, namespace, last or 0, named).rowcount
        journal.seal()
    return counts
