"""Check a bank folder without changing it: the journal, the index against it, and the queue."""

from __future__ import annotations

import fcntl
import random
import shlex
import shutil
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

from experiential.bank.index.embed import Vector
from experiential.bank.index.follower import Replica
from experiential.bank.index.site import CHROMA, Site, recorded_site
from experiential.bank.index.store import IndexLostError
from experiential.bank.storage.journal import JOURNAL_NAME, Journal
from experiential.bank.storage.lock import LOCK_NAME, described_owner
from experiential.bank.storage.tables import History
from experiential.errors import BankError
from experiential.types import Record

SAMPLE = 256
"""Entries whose vectors are compared."""
_SAME = 1e-4  # of two float32 unit vectors that went through Chroma
_ORPHANS = """
    SELECT COUNT(*) FROM changes c LEFT JOIN versions v
    ON v.namespace = c.namespace AND v.id = c.id AND v.version = c.version
    WHERE c.namespace = ? AND c.version IS NOT NULL AND v.id IS NULL"""
_LOST = """
    SELECT COUNT(*) FROM queue q LEFT JOIN trajectories t
    ON t.namespace = q.namespace AND t.id = q.id
    WHERE q.namespace = ? AND q.state = 'queued' AND t.id IS NULL"""


class Finding(Record):
    """Report one check.

    Attributes:
        what: what was looked at.
        status: "ok", "note" (worth knowing, nothing is broken) or "wrong".
        found: what was found, in words.
        mend: what to do about it; empty when nothing has to be done.
    """

    what: str
    status: Literal["ok", "note", "wrong"]
    found: str
    mend: str = ""


def examine(folder: Path) -> list[Finding]:
    """Check everything in a bank folder, all namespaces."""
    with _writers_kept_out(folder) as owner:
        if owner is None:
            writer = Finding(what="writer", status="ok", found="nobody writes the bank")
        else:
            found = f"{owner} writes the bank; the index is not looked at"
            mend = "close it there to have the index looked at too"
            writer = Finding(what="writer", status="note", found=found, mend=mend)
        return [writer, *_contents(folder, with_index=owner is None)]


@contextmanager
def _writers_kept_out(folder: Path) -> Generator[str | None]:
    """Yield the owner if another process writes, else None."""
    try:
        file = (folder / LOCK_NAME).open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield described_owner(file.read())
            return
        yield None


def _contents(folder: Path, *, with_index: bool) -> Iterator[Finding]:
    restore = f"restore {JOURNAL_NAME} from a backup, or import an exported file into a new bank"
    try:
        journal = Journal.open_copy(folder)
    except (BankError, sqlite3.DatabaseError) as error:
        yield Finding(what="journal", status="wrong", found=str(error), mend=restore)
        return
    try:
        answers = [row[0] for row in journal.rows("PRAGMA integrity_check")]
        if answers != ["ok"]:
            found = f"integrity_check says {'; '.join(answers[:3])}"
            yield Finding(what="journal", status="wrong", found=found, mend=restore)
            return
        yield Finding(what="journal", status="ok", found="integrity_check says ok")
        statement = "SELECT DISTINCT namespace FROM commits ORDER BY namespace"
        for (namespace,) in journal.rows(statement):
            yield from _entries_and_queue(folder, journal, namespace)
            if with_index:
                yield _index(folder, History(journal, namespace), namespace)
    except (sqlite3.DatabaseError, ValueError) as error:
        found = f"cannot be read: {error}"
        yield Finding(what="journal", status="wrong", found=found, mend=restore)
    finally:
        journal.close()


def _entries_and_queue(folder: Path, journal: Journal, namespace: str) -> Iterator[Finding]:
    history, what = History(journal, namespace), f"{namespace}: entries"
    orphans = journal.value(_ORPHANS, namespace)
    found = f"{history.live_count()} entries at commit {history.head()}"
    if orphans:
        found = f"{orphans} changes name a version that the journal lacks"
        mend = "experiential bank history, then experiential bank rollback to a commit before"
        yield Finding(what=what, status="wrong", found=found, mend=mend)
    else:
        yield Finding(what=what, status="ok", found=found)
    what, lost = f"{namespace}: queue", journal.value(_LOST, namespace)
    statement = "SELECT state, COUNT(*) FROM queue WHERE namespace = ? GROUP BY state"
    counts = dict(journal.rows(statement, namespace))
    found = f"{counts.get('queued', 0)} queued, {counts.get('done', 0)} done"
    if lost:
        found = f"{found}, {lost} without a recorded trajectory"
        mend = (
            f"open {folder} with an ExperienceManager: each becomes a dead letter with its reason"
        )
        yield Finding(what=what, status="wrong", found=found, mend=mend)
    else:
        yield Finding(what=what, status="ok", found=found)
    if dead := counts.get("dead", 0):
        what, found = f"{namespace}: dead letters", f"{dead} trajectories were given up"
        mend = "ExperienceManager.dead_letters() has the reasons, requeue(id) tries one again"
        yield Finding(what=what, status="note", found=found, mend=mend)


def _index(folder: Path, history: History, namespace: str) -> Finding:
    what, site = f"{namespace}: index", recorded_site(folder, namespace, history)
    if site is None:
        return Finding(what=what, status="ok", found="all entries are in memory")
    if not history.last_seq():
        return Finding(what=what, status="ok", found="nothing to index")
    rebuild = (
        f"experiential bank rebuild {shlex.quote(str(folder))} --namespace {shlex.quote(namespace)}"
    )
    whole = f"{history.live_count()} entries at position {history.last_seq()}, as in the journal"
    if site.folder is None:
        try:
            wrong = _disagreement(site, history)
        except IndexLostError as error:
            mend = f"start it (chroma run), or have the index in the folder again: {rebuild}"
            mend += f" --store {CHROMA}"
            return Finding(what=what, status="wrong", found=str(error), mend=mend)
        whole, wrong = f"at {site.store}: {whole}", wrong and f"at {site.store}: {wrong}"
    elif not site.folder.is_dir():
        wrong = f"the folder {site.folder.name} is missing"
    else:
        with TemporaryDirectory(prefix="experiential-doctor-") as scratch:
            # A copy, because opening a store may change its files.
            copy = Path(scratch) / site.folder.name
            shutil.copytree(site.folder, copy)
            try:
                wrong = _disagreement(site._replace(folder=copy), history)
            except IndexLostError as error:
                wrong = f"the index cannot be read: {error}"
            if any(Path(scratch).glob(f"{copy.name}.damaged-*")):
                wrong = "the folder of the index cannot be opened"
    if wrong:
        return Finding(what=what, status="wrong", found=wrong, mend=rebuild)
    return Finding(what=what, status="ok", found=whole)


def _disagreement(site: Site, history: History) -> str:
    """Describe how an index differs from the journal; empty if it does not."""
    last, live = history.last_seq(), history.live(history.head())
    index = Replica(site)
    try:
        if (head := index.head) != last:
            return f"the index is at position {head}, the journal at {last}"
        if len(index) != len(live):
            return f"the index holds {len(index)} entries, the journal {len(live)}"
        sample = random.Random(0).sample(live, min(SAMPLE, len(live)))
        ids = [stored.experience.id for stored in sample]
        held = index.fetch(ids) if ids else dict[str, tuple[int, Vector]]()
    finally:
        index.close()
    bad: list[str] = []
    for entry, vector, _ in sample:
        version, indexed = held.get(entry.id, (None, vector))
        if version != entry.version or not np.allclose(indexed, vector, atol=_SAME):
            bad.append(entry.id)
    if not bad:
        return ""
    found = f"{len(bad)} of {len(sample)} entries compared have another version or vector"
    return f"{found}, the first is {bad[0]}"
