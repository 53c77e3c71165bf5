"""Read and write the journal's tables of one namespace: its history, queue and receipts."""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time
from array import array
from bisect import insort
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from experiential.bank.evidence.credit import Ancestor
from experiential.bank.evidence.uplift import ALWAYS, LAST_SEQ, MERGED
from experiential.bank.records import (
    LEASE_SECONDS,
    Changed,
    Commit,
    DeadLetter,
    Difference,
    LogEntry,
)
from experiential.bank.storage.checksums import at, checksum, link, parsed
from experiential.bank.storage.journal import Journal
from experiential.bank.text import checked_text
from experiential.errors import BankError
from experiential.types import Experience, Generation


class Stored(NamedTuple):
    """Hold one journalled entry version and the task instances that its text was made from."""

    experience: Experience
    vector: npt.NDArray[np.float32]
    origins: frozenset[str]


class Live:
    """Hold one live entry and the task instances that its text was made from.

    A record of the journal is parsed when ``experience`` is first asked for, so that opening a bank
    parses none.
    """

    __slots__ = ("_record", "experience", "origins")
    experience: Experience

    def __init__(self, entry: Experience | str, origins: frozenset[str]) -> None:
        self._record = ""
        if isinstance(entry, str):
            self._record = entry
        else:
            self.experience = entry
        self.origins = origins

    def __getattr__(self, name: str) -> Any:
        if name != "experience":
            raise AttributeError(name)
        if record := self._record:  # else another thread has just parsed it
            self.experience = parsed(Experience, record)
            self._record = ""
        return self.experience

    @property
    def record(self) -> str:
        """Return the record, as the journal has it or would have it."""
        return self._record or record_of(self.experience)

    @property
    def proposed(self) -> bool:
        """Return whether the entry waits for approval; few records need parsing for that."""
        return (not self._record or _PROPOSED in self._record) and self.experience.proposed


@dataclass(frozen=True, slots=True)
class LiveEntries:
    """Hold the live entries at one commit, oldest first.

    Attributes:
        ids: of the entries.
        entries: the same in full.
        vectors: of the entries, float32, then rows that are free for more, so that the first write
            need not copy them; no rows where they were not asked for.
    """

    ids: Sequence[str] = ()
    entries: Sequence[Live] = ()
    vectors: npt.NDArray[np.float32] = field(
        default_factory=lambda: np.zeros((0, 0), dtype=np.float32)
    )

    def __len__(self) -> int:
        return len(self.ids)

    def table(self) -> dict[str, Live]:
        """Return the entries by id."""
        return dict(zip(self.ids, self.entries, strict=True))


def roomy(count: int, dimension: int) -> npt.NDArray[np.float32]:
    """Return rows for this many vectors, and some that are free for more."""
    return np.empty((count + count // 8 + 64, dimension), dtype=np.float32)


class Past(NamedTuple):
    """Hold the commits of a namespace, and its changes in their order.

    Attributes:
        commits: rows of `LOG`.
        change_commits: the commit of each change.
        change_entries: the number of the entry of each change.
        change_versions: the version that each made the live one, 0 for a removal.
        merges: rows of `MERGED`.
    """

    commits: Sequence[tuple[Any, ...]]
    change_commits: npt.NDArray[np.int64]
    change_entries: npt.NDArray[np.uint32]
    change_versions: npt.NDArray[np.uint32]
    merges: Sequence[tuple[Any, ...]]


_PROPOSED = '"proposed":true'  # as `History.write` spells it
_AT_ONCE = 1024
_POINTED = "SELECT id, version FROM changes WHERE namespace = ? AND commit_id <= ? ORDER BY seq"
# Positions grow with commits, so only changes since the earlier commit are looked at. The + keeps
# SQLite from an index over all entries.
STORED = """
    SELECT record, vector, origins FROM versions WHERE namespace = ? AND id = ? AND version = ?"""
STORED_ALL = """
    SELECT v.id, v.version, v.record, v.vector, v.origins FROM json_each(?2) k
    CROSS JOIN versions v ON v.namespace = ?1 AND v.id = json_extract(k.value, '$[0]')
        AND v.version = json_extract(k.value, '$[1]')"""
TOUCHED = """
    WITH bounds AS (SELECT
        COALESCE((SELECT seq FROM changes WHERE +namespace = ?1 AND commit_id <= ?2
            ORDER BY seq DESC LIMIT 1), 0) AS low,
        COALESCE((SELECT seq FROM changes WHERE +namespace = ?1 AND commit_id <= ?3
            ORDER BY seq DESC LIMIT 1), 0) AS high)
    SELECT t.id,
        (SELECT version FROM changes WHERE namespace = ?1 AND id = t.id
            AND seq <= (SELECT low FROM bounds)
            ORDER BY seq DESC LIMIT 1),
        (SELECT version FROM changes WHERE namespace = ?1 AND id = t.id
            AND seq <= (SELECT high FROM bounds)
            ORDER BY seq DESC LIMIT 1)
    FROM (SELECT DISTINCT id FROM changes
        WHERE +namespace = ?1 AND seq > (SELECT low FROM bounds)
        AND seq <= (SELECT high FROM bounds)) t
    ORDER BY (SELECT MIN(seq) FROM changes WHERE namespace = ?1 AND id = t.id)"""
_LIVE_COUNT = """
    SELECT COUNT(*) FROM changes c
    JOIN (SELECT MAX(seq) AS seq FROM changes WHERE namespace = ? GROUP BY id) m ON c.seq = m.seq
    WHERE c.version IS NOT NULL"""
_CHANGES_AFTER = """
    SELECT c.seq, c.id, v.record, v.vector, v.origins FROM changes c
    LEFT JOIN versions v ON v.namespace = c.namespace AND v.id = c.id AND v.version = c.version
    WHERE c.namespace = ? AND c.seq > ? ORDER BY c.seq LIMIT ?"""
COMMITS = """
    SELECT id, time, author, cause, ref FROM commits WHERE namespace = ? AND id > ? ORDER BY id"""
HAS_COMMIT = "SELECT 1 FROM commits WHERE namespace = ? AND id = ?"
LAST_VERSION = "SELECT MAX(version) FROM versions WHERE namespace = ? AND id = ?"
LOG = """
    SELECT c.id, c.time, c.author, c.cause, c.ref, COALESCE(n.changes, 0) FROM commits c
    LEFT JOIN (SELECT commit_id, COUNT(DISTINCT id) AS changes FROM changes
        WHERE namespace = ?1 GROUP BY commit_id) n ON n.commit_id = c.id
    WHERE c.namespace = ?1 ORDER BY c.id"""
# Of several changes of one commit, MAX(seq) chooses the last, and with it the version.
LOG_OF = """
    SELECT c.id, c.time, c.author, c.cause, c.ref, n.changes, o.version FROM commits c
    JOIN (SELECT commit_id, version, MAX(seq) FROM changes
        WHERE namespace = ?1 AND id = ?2 GROUP BY commit_id) o ON o.commit_id = c.id
    JOIN (SELECT commit_id, COUNT(DISTINCT id) AS changes FROM changes
        WHERE namespace = ?1 GROUP BY commit_id) n ON n.commit_id = c.id
    WHERE c.namespace = ?1 ORDER BY c.id"""
WRITTEN_FROM = """
    SELECT n.id, n.version FROM commits c
    JOIN changes n ON n.commit_id = c.id AND n.namespace = c.namespace
    WHERE c.namespace = ? AND c.cause = 'trajectory' AND c.ref = ? AND n.version IS NOT NULL
    ORDER BY n.seq"""
_NOTE = """
    INSERT INTO receipts (namespace, key, digest, commit_id, checksum)
    SELECT ?1, ?2, ?3, made, row_checksum('receipts', ?1, ?2, ?3, made)
    FROM (SELECT COALESCE(MAX(id), 0) AS made FROM commits WHERE namespace = ?1)"""
_WRITTEN = """
    SELECT id, version FROM changes
    WHERE namespace = ? AND commit_id = ? AND version IS NOT NULL ORDER BY seq"""
_REMOVED = """
    SELECT n.id, (SELECT o.version FROM changes o
        WHERE o.namespace = n.namespace AND o.id = n.id AND o.seq < n.seq
        ORDER BY o.seq DESC LIMIT 1)
    FROM changes n WHERE n.namespace = ? AND n.commit_id = ? AND n.version IS NULL ORDER BY n.seq"""


@dataclass(frozen=True, slots=True)
class History:
    """Read and write the history of one namespace; writes need a ``Journal.transaction``."""

    _journal: Journal
    _namespace: str
    # Of the open commit: its row, and the checksums of the versions and changes that it wrote.
    _own: list[Any] = field(default_factory=list[Any])
    _written: list[bytes] = field(default_factory=list[bytes])
    _changed: list[bytes] = field(default_factory=list[bytes])

    def begin(self, author: str, cause: str, ref: str | None) -> int:
        """Open a commit and return its id; `seal` ends it."""
        statement = (
            "INSERT INTO commits (namespace, time, author, cause, ref) VALUES (?, ?, ?, ?, ?)"
        )
        row = (self._namespace, time.time(), author, cause, ref)
        commit = self._journal.run(statement, *row).lastrowid or 0
        self._own[:], self._written[:], self._changed[:] = (commit, *row), (), ()
        return commit

    def seal(self) -> None:
        """End the open commit: write its checksum, and chain it to the one before."""
        commit, own = self._own[0], checksum("commits", self._own)
        statement = "SELECT chain FROM commits WHERE id < ? ORDER BY id DESC LIMIT 1"
        chain = link(
            self._journal.value(statement, commit) or b"", own, self._written, self._changed
        )
        statement = "UPDATE commits SET checksum = ?, chain = ? WHERE id = ?"
        self._journal.run(statement, own, chain, commit)

    def write(self, stored: Stored, commit: int) -> None:
        """Add one immutable entry version."""
        experience, vector, origins = stored
        record = record_of(experience)
        known = (experience.id, experience.version, commit, record)
        written = (vector.tobytes(), json.dumps(sorted(origins)))
        _, own = self._journal.insert("versions", self._namespace, *known, *written)
        self._written.append(own)

    def point(self, id: str, version: int | None, commit: int) -> int:
        """Set the live version of an entry (None removes it); return the position of the change."""
        cursor, own = self._journal.insert("changes", self._namespace, commit, id, version)
        seq = cursor.lastrowid or 0
        self._changed.append(at(seq) + own)
        return seq

    def live(self, commit: int, *, most_vectors: float = math.inf) -> LiveEntries:
        """Return all entries as they stood after ``commit``, oldest first.

        The vectors of more than ``most_vectors`` entries are left out.
        """
        # An entry keeps the place of its first change, and gets the version of its last.
        pointed = dict(self._journal.rows(_POINTED, self._namespace, commit))
        wanted = [id for id, version in pointed.items() if version is not None]
        places = {id: place for place, id in enumerate(wanted)}
        has_vectors = len(wanted) <= most_vectors
        entries: list[Live | None] = [None] * len(wanted)

        def take(cursor: sqlite3.Cursor) -> npt.NDArray[np.float32]:
            vectors = np.zeros((0, 0), dtype=np.float32)
            while block := cursor.fetchmany(_AT_ONCE):
                found = [row for row in block if pointed.get(row[0]) == row[1]]
                rows = [places[row[0]] for row in found]
                for place, (_, _, record, origins, _) in zip(rows, found, strict=True):
                    entries[place] = Live(record, origins_of(origins))
                if not has_vectors or not found:
                    continue
                raw = [row[4] for row in found]
                if not len(vectors):
                    vectors = roomy(len(wanted), len(raw[0]) // 4)
                if {len(one) for one in raw} != {vectors.shape[1] * 4}:
                    raise BankError(
                        "Expected vectors of one length in the journal, got several; restore it"
                        " from a backup"
                    )
                vectors[rows] = np.frombuffer(b"".join(raw), np.float32).reshape(len(raw), -1)
            return vectors

        # Most of a file is read faster in its own order than by an index.
        last = self._journal.value("SELECT MAX(rowid) FROM versions") or 0
        order = "NOT INDEXED" if 4 * len(wanted) > last else ""
        columns = f"id, version, record, origins, {'vector' if has_vectors else 'NULL'}"
        statement = f"SELECT {columns} FROM versions {order} WHERE namespace = ?"
        vectors = self._journal.read(take, statement, self._namespace)
        held = [one for one in entries if one is not None]
        ids = [id for id, one in zip(wanted, entries, strict=True) if one is not None]
        if len(held) < len(entries):  # damaged versions were set aside
            if len(held) <= most_vectors < len(entries):
                return self.live(commit)
            if held and has_vectors:
                vectors = vectors[: len(entries)][[one is not None for one in entries]]
        return LiveEntries(ids, held, vectors)

    def touched(self, a: int, b: int) -> list[tuple[str, int | None, int | None]]:
        """Return the entries changed after commit ``a`` and up to ``b``, oldest first.

        Each with its live version at ``a`` and at ``b``, None where it had none.
        """
        return self._journal.rows(TOUCHED, self._namespace, a, b)

    def in_order(self, ids: Iterable[str], more: Iterable[str]) -> list[str]:
        """Return ids that are in the order of `live`, and more of them put in their places."""
        statement = "SELECT MIN(seq) FROM changes WHERE namespace = ? AND id = ?"

        def first(id: str) -> int:
            return self._journal.value(statement, self._namespace, id) or 0

        found = list(ids)
        for id in more:
            insort(found, id, key=first)
        return found

    def live_count(self) -> int:
        """Return the number of live entries."""
        return self._journal.value(_LIVE_COUNT, self._namespace)

    def stored(self, id: str, version: int) -> Stored | None:
        """Return one version of one entry, live or not."""
        rows = self._journal.rows(STORED, self._namespace, id, version)
        return _stored(rows[0]) if rows else None

    def stored_all(
        self, keys: Iterable[tuple[str, int]]
    ) -> Iterator[tuple[tuple[str, int], Stored]]:
        """Yield entry versions, many of them by one statement, with id and version."""
        waiting = list(dict.fromkeys(keys))
        for start in range(0, len(waiting), _AT_ONCE):
            asked = json.dumps(waiting[start : start + _AT_ONCE])
            for id, version, *rest in self._journal.rows(STORED_ALL, self._namespace, asked):
                yield (id, version), _stored(rest)

    def entry_ids(self) -> list[str]:
        """Return the ids of all entries there ever were."""
        statement = "SELECT DISTINCT id FROM changes WHERE namespace = ?"
        return [row[0] for row in self._journal.rows(statement, self._namespace)]

    def last_version(self, id: str) -> int:
        """Return the highest version that an entry ever had; 0 if it never existed."""
        return self._journal.value(LAST_VERSION, self._namespace, id) or 0

    def is_empty(self) -> bool:
        """Return whether this namespace never held an entry."""
        statement = "SELECT 1 FROM versions WHERE namespace = ? LIMIT 1"
        return self._journal.value(statement, self._namespace) is None

    def head(self) -> int:
        """Return the id of the last commit; 0 if there is none."""
        statement = "SELECT MAX(id) FROM commits WHERE namespace = ?"
        return self._journal.value(statement, self._namespace) or 0

    def has_commit(self, commit: int) -> bool:
        """Return whether ``commit`` belongs to this namespace; 0, before the first, does."""
        # asked even for 0: a reader that has to copy its journal does, before its state is used
        return self._journal.value(HAS_COMMIT, self._namespace, commit) is not None or commit == 0

    def last_seq(self) -> int:
        """Return the position of the last change, for followers of the journal."""
        statement = "SELECT MAX(seq) FROM changes WHERE namespace = ?"
        return self._journal.value(statement, self._namespace) or 0

    def stamp(self, seq: int) -> str:
        """Return a mark that differs from that of the same position in another journal."""
        statement = "SELECT n.id || ' ' || c.time FROM changes n JOIN commits c"
        statement += " ON c.id = n.commit_id WHERE n.namespace = ? AND n.seq = ?"
        return self._journal.value(statement, self._namespace, seq) or ""

    def changes_after(self, seq: int, limit: int) -> list[tuple[int, str, Stored | None]]:
        """Return the next changes: position, entry id and new version (None if removed)."""
        rows = self._journal.rows(_CHANGES_AFTER, self._namespace, seq, limit)
        return [(row[0], row[1], None if row[2] is None else _stored(row[2:])) for row in rows]

    def keep_generation(self, generation: Generation) -> None:
        """Journal one generation, once."""
        row = (self._namespace, generation.id, generation.model_dump_json())
        self._journal.insert("generations", *row, verb="INSERT OR IGNORE")

    def generation(self, id: str) -> Generation | None:
        """Return one journalled generation."""
        statement = "SELECT record FROM generations WHERE namespace = ? AND id = ?"
        record = self._journal.value(statement, self._namespace, id)
        return None if record is None else parsed(Generation, record, id)

    def meta(self, key: str) -> str | None:
        """Return one recorded fact about this namespace."""
        statement = "SELECT value FROM meta WHERE namespace = ? AND key = ?"
        return self._journal.value(statement, self._namespace, key)

    def set_meta(self, key: str, value: str) -> None:
        """Record one fact about this namespace."""
        self._journal.insert("meta", self._namespace, key, value, verb="INSERT OR REPLACE")

    def commits(self, after: int = 0) -> list[Commit]:
        """Return every commit after one, oldest first."""
        names = ("id", "time", "author", "cause", "ref")
        rows = self._journal.rows(COMMITS, self._namespace, after)
        return [Commit(**dict(zip(names, row, strict=True))) for row in rows]

    def log(self, id: str | None = None) -> list[LogEntry]:
        """Return every commit, or those that changed one entry with its version after each."""
        names = ("id", "time", "author", "cause", "ref", "changes", "version")
        if id is None:
            rows, names = self._journal.rows(LOG, self._namespace), names[:-1]
        else:
            rows = self._journal.rows(LOG_OF, self._namespace, id)
        return [LogEntry(**dict(zip(names, row, strict=True))) for row in rows]

    def past(self, numbers: Mapping[str, int]) -> Past:
        """Return all commits and changes, for a mapped file.

        Args:
            numbers: of all entries that there ever were.
        """
        entries, versions, commits = array("I"), array("I"), array("q")

        def take(cursor: sqlite3.Cursor) -> None:
            for commit, id, version in cursor:
                commits.append(commit)
                entries.append(numbers[id])
                versions.append(version or 0)

        statement = "SELECT commit_id, id, version FROM changes WHERE namespace = ? ORDER BY seq"
        self._journal.read(take, statement, self._namespace)
        rows = self._journal.rows(LOG, self._namespace)
        bounds = (0, self._journal.value(LAST_SEQ), self._namespace, ALWAYS)
        merges = self._journal.rows(MERGED, *bounds)
        return Past(rows, np.array(commits), np.array(entries), np.array(versions), merges)

    def ids(self) -> list[str]:
        """Return the ids of all entries there ever were, and of the journalled trajectories."""
        statement = "SELECT DISTINCT id FROM versions WHERE namespace = ?1 UNION"
        statement += " SELECT id FROM trajectories WHERE namespace = ?1"
        return [row[0] for row in self._journal.rows(statement, self._namespace)]

    def written_from(self, trajectory: str) -> list[Ancestor]:
        """Return (id, version) of all that was distilled from a trajectory, in order."""
        return [tuple(row) for row in self._journal.rows(WRITTEN_FROM, self._namespace, trajectory)]


def _stored(row: Any) -> Stored:
    vector = np.frombuffer(row[1], dtype=np.float32)
    return Stored(parsed(Experience, row[0]), vector, origins_of(row[2]))


def record_of(entry: Experience) -> str:
    """Return an entry version as the journal has it, without counters."""
    return entry.model_dump_json(exclude={"statistics"})


def origins_of(text: str) -> frozenset[str]:
    """Return the task instances that a journalled version was made from."""
    return frozenset[str]() if text == "[]" else frozenset(json.loads(text))


def difference(before: Iterable[Experience], after: Iterable[Experience]) -> Difference:
    """Return the entries added, removed and changed between two states; counters do not count."""
    old, new = {entry.id: entry for entry in before}, {entry.id: entry for entry in after}
    both = [(old[id], entry) for id, entry in new.items() if id in old]
    return Difference(
        added=tuple(entry for id, entry in new.items() if id not in old),
        removed=tuple(entry for id, entry in old.items() if id not in new),
        changed=tuple(Changed(old=a, new=b) for a, b in both if a.version != b.version),
    )


@dataclass(frozen=True, slots=True)
class DistillationQueue:
    """Move items from ``queued`` to ``done`` or ``dead``; see `Queue`.

    The id of an item is the id of its trajectory, which makes submitting twice harmless. Writes
    that belong to a commit happen inside ``Journal.transaction``.
    """

    _journal: Journal
    _namespace: str
    # Who works on an item, and until when by the clock of this process. In memory: the process
    # that writes the folder is the only one to ask, and `finish` lets one result in.
    _leases: dict[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])

    def put(self, id: str, holder: str = "") -> bool:
        """Queue a trajectory, leased by ``holder``; return False if it was queued before."""
        if self.state(id) is not None:  # an insert that does nothing still writes to the disk
            return False
        self._journal.insert("queue", self._namespace, id, "queued", 0, None)
        if holder:
            self._leases[id] = (holder, time.monotonic() + LEASE_SECONDS)
        return True

    def lease(
        self,
        holder: str,
        most: int,
        *,
        keep: Sequence[str] = (),
        seconds: float = LEASE_SECONDS,
    ) -> list[str]:
        """Give a distiller up to ``most`` further items to work on; see `Queue.lease`."""
        checked_text(holder, "holder")
        if most < 0 or seconds <= 0:
            raise ValueError(f"Expected most >= 0 and seconds > 0, got {most} and {seconds}")
        with self._journal.lock:
            leases, now = self._leases, time.monotonic()
            for id in [id for id, (_, until) in leases.items() if until <= now]:
                del leases[id]
            for id in keep:
                if leases.get(id, (holder,))[0] == holder:
                    leases[id] = (holder, now + seconds)
            if not most:
                return []
            statement = "SELECT id FROM queue WHERE namespace = ? AND state = 'queued'"
            statement += " ORDER BY seq LIMIT ?"
            rows = self._journal.rows(statement, self._namespace, most + len(leases))
            free = [row[0] for row in rows if row[0] not in leases][:most]
            leases.update(dict.fromkeys(free, (holder, now + seconds)))
            return free

    def release(self, holder: str, id: str | None = None) -> None:
        """Give back one item that a distiller holds, or all of them."""
        with self._journal.lock:
            held = [one for one, (who, _) in self._leases.items() if who == holder]
            for one in held if id is None else {id}.intersection(held):
                del self._leases[one]

    def counts(self) -> dict[str, int]:
        """Return the number of items in each state: "queued", "done" and "dead"."""
        statement = "SELECT state, COUNT(*) FROM queue WHERE namespace = ? GROUP BY state"
        found = dict(self._journal.rows(statement, self._namespace))
        return {state: found.get(state, 0) for state in ("queued", "done", "dead")}

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
        self._leases.pop(id, None)
        statement = "UPDATE queue SET state = 'done', reason = NULL, checksum ="
        statement += " row_checksum('queue', namespace, id, 'done', attempts, NULL)"
        statement += " WHERE namespace = ? AND id = ? AND state = 'queued'"
        return self._journal.run(statement, self._namespace, id).rowcount > 0

    def fail(self, id: str, reason: str, *, last: bool) -> int:
        """Count a failed attempt of a queued item; see `Queue.fail`."""
        with self._journal.transaction():
            statement = "UPDATE queue SET attempts = attempts + 1, state = ?1, reason = ?2,"
            statement += " checksum = row_checksum('queue', namespace, id, ?1, attempts + 1, ?2)"
            statement += " WHERE namespace = ?3 AND id = ?4 AND state = 'queued'"
            state = "dead" if last else "queued"
            if last:
                self._leases.pop(id, None)
            self._journal.run(statement, state, reason, self._namespace, id)
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
            statement = "UPDATE queue SET attempts = 0, state = 'queued', reason = NULL,"
            statement += " checksum = row_checksum('queue', namespace, id, 'queued', 0, NULL)"
            statement += " WHERE namespace = ? AND id = ? AND state = 'dead'"
            return self._journal.run(statement, self._namespace, id).rowcount > 0

    def clear(self) -> None:
        """Delete all items."""
        self._journal.run("DELETE FROM queue WHERE namespace = ?", self._namespace)


class Receipt(NamedTuple):
    """Hold the digest of a request that was carried out, and the commit that it made."""

    digest: str
    commit: int


@dataclass(frozen=True, slots=True)
class Receipts:
    """Keep the keys of the served writes of one namespace.

    The row is written by the transaction that writes the commit, so after a crash there are both or
    none.
    """

    _journal: Journal
    _namespace: str

    def find(self, key: str) -> Receipt | None:
        """Return the receipt of a key, or None if no write had it."""
        statement = "SELECT digest, commit_id FROM receipts WHERE namespace = ? AND key = ?"
        rows = self._journal.rows(statement, self._namespace, key)
        return Receipt(*rows[0]) if rows else None

    @contextmanager
    def noting(self, key: str, digest: str) -> Generator[None]:
        """Write the receipt of ``key`` in the next transaction of this thread."""
        thread, attached = threading.get_ident(), self._journal.attached
        attached[thread] = (_NOTE, self._namespace, key, digest)
        try:
            yield
        finally:
            attached.pop(thread, None)

    def written(self, commit: int) -> list[tuple[str, int]]:
        """Return (id, version) of everything that a commit wrote, in the order of writing."""
        return [tuple(row) for row in self._journal.rows(_WRITTEN, self._namespace, commit)]

    def removed(self, commit: int) -> list[tuple[str, int]]:
        """Return (id, last version) of every entry that a commit removed, in order."""
        return [tuple(row) for row in self._journal.rows(_REMOVED, self._namespace, commit)]
