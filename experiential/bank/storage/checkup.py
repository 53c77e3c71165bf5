"""Check a bank folder without changing it: the journal, the index against it, and the queue."""

from __future__ import annotations

import fcntl
import json
import random
import shlex
import shutil
import sqlite3
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

from experiential.bank.index.follower import Replica
from experiential.bank.index.site import CHROMA, Site, recorded_site
from experiential.bank.index.store import IndexLostError
from experiential.bank.index.vectors import Vector
from experiential.bank.storage.history import History
from experiential.bank.storage.journal import JOURNAL_NAME, Journal
from experiential.bank.storage.lock import LOCK_NAME
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
    restore = f"restore {JOURNAL_NAME} from a backup, or import an exported file into a new bank"
    with _held(folder) as owner:
        findings = [_lock(folder, owner)]
        try:
            journal = Journal.open_copy(folder)
        except (BankError, sqlite3.DatabaseError) as error:
            return [
                *findings,
                Finding(what="journal", status="wrong", found=str(error), mend=restore),
            ]
        try:
            findings.extend(_journal(journal, restore))
            if findings[-1].status != "wrong":
                for namespace in namespaces(journal):
                    findings.extend(_namespace(folder, journal, namespace, owner is not None))
        except (sqlite3.DatabaseError, ValueError) as error:
            findings.append(
                Finding(
                    what="journal", status="wrong", found=f"cannot be read: {error}", mend=restore
                )
            )
        finally:
            journal.close()
        return findings


def namespaces(journal: Journal) -> list[str]:
    """Return every namespace that was ever written, by name."""
    return [
        row[0] for row in journal.rows("SELECT DISTINCT namespace FROM commits ORDER BY namespace")
    ]


@contextmanager
def _held(folder: Path) -> Generator[str | None]:
    """Keep writers out meanwhile; yield the owner if another process writes, else None."""
    try:
        file = (folder / LOCK_NAME).open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield _owner(file.read())
            return
        yield None


def _owner(content: bytes) -> str:
    try:
        owner = json.loads(content)
        return f"process {owner['pid']} on {owner['host']} since {owner['time']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _lock(folder: Path, owner: str | None) -> Finding:
    if owner is None:
        return Finding(what="writer", status="ok", found="nobody writes the bank")
    mend = "close it there to have the index looked at too"
    return Finding(
        what="writer",
        status="note",
        found=f"{owner} writes the bank; the index is not looked at",
        mend=mend,
    )


def _journal(journal: Journal, restore: str) -> Iterator[Finding]:
    answers = [row[0] for row in journal.rows("PRAGMA integrity_check")]
    whole = answers == ["ok"]
    found = "integrity_check says ok" if whole else f"integrity_check says {'; '.join(answers[:3])}"
    yield Finding(
        what="journal",
        status="ok" if whole else "wrong",
        found=found,
        mend="" if whole else restore,
    )


def _namespace(
    folder: Path, journal: Journal, namespace: str, is_written: bool
) -> Iterator[Finding]:
    history = History(journal, namespace)
    yield _entries(journal, history, namespace)
    yield from _queue(folder, journal, namespace)
    if is_written:
        return
    rebuild = (
        f"experiential bank rebuild {shlex.quote(str(folder))} --namespace {shlex.quote(namespace)}"
    )
    yield _index(folder, history, namespace, rebuild)


def _entries(journal: Journal, history: History, namespace: str) -> Finding:
    orphans = journal.value(_ORPHANS, namespace)
    count, head = history.live_count(), history.head()
    if orphans:
        mend = "experiential bank history, then experiential bank rollback to a commit before"
        found = f"{orphans} changes name a version that the journal lacks"
        return Finding(what=f"{namespace}: entries", status="wrong", found=found, mend=mend)
    return Finding(
        what=f"{namespace}: entries", status="ok", found=f"{count} entries at commit {head}"
    )


def _queue(folder: Path, journal: Journal, namespace: str) -> Iterator[Finding]:
    counts = dict(
        journal.rows(
            "SELECT state, COUNT(*) FROM queue WHERE namespace = ? GROUP BY state", namespace
        )
    )
    lost = journal.value(_LOST, namespace)
    found = f"{counts.get('queued', 0)} queued, {counts.get('done', 0)} done"
    if lost:
        mend = (
            f"open {folder} with an ExperienceManager: each becomes a dead letter with its reason"
        )
        yield Finding(
            what=f"{namespace}: queue",
            status="wrong",
            found=f"{found}, {lost} without a recorded trajectory",
            mend=mend,
        )
    else:
        yield Finding(what=f"{namespace}: queue", status="ok", found=found)
    if dead := counts.get("dead", 0):
        mend = "ExperienceManager.dead_letters() has the reasons, requeue(id) tries one again"
        yield Finding(
            what=f"{namespace}: dead letters",
            status="note",
            found=f"{dead} trajectories were given up",
            mend=mend,
        )


def _index(folder: Path, history: History, namespace: str, rebuild: str) -> Finding:
    name = f"{namespace}: index"
    site = recorded_site(folder, namespace, history)
    if site is None or not history.last_seq():
        found = "nothing to index" if site is not None else "all entries are in memory"
        return Finding(what=name, status="ok", found=found)
    whole = f"{history.live_count()} entries at position {history.last_seq()}, as in the journal"
    if site.folder is None:
        try:
            wrong = _opened_disagreement(site, history)
        except IndexLostError as error:
            mend = (
                f"start it (chroma run), or have the index in the folder again: {rebuild} --store"
                f" {CHROMA}"
            )
            return Finding(what=name, status="wrong", found=str(error), mend=mend)
        whole, wrong = f"at {site.store}: {whole}", wrong and f"at {site.store}: {wrong}"
    elif not site.folder.is_dir():
        wrong = f"the folder {site.folder.name} is missing"
    else:
        with TemporaryDirectory(prefix="experiential-doctor-") as scratch:
            # A copy, because opening a store may change its files.
            copy = Path(scratch) / site.folder.name
            shutil.copytree(site.folder, copy)
            try:
                wrong = _opened_disagreement(site._replace(folder=copy), history)
            except IndexLostError as error:
                wrong = f"the index cannot be read: {error}"
            if any(Path(scratch).glob(f"{copy.name}.damaged-*")):
                wrong = "the folder of the index cannot be opened"
    return Finding(
        what=name,
        status="wrong" if wrong else "ok",
        found=wrong or whole,
        mend=rebuild if wrong else "",
    )


def _opened_disagreement(site: Site, history: History) -> str:
    index = Replica(site)
    try:
        return _disagreement(index, history)
    finally:
        index.close()


def _disagreement(index: Replica, history: History) -> str:
    """Describe how the index differs from the journal; empty if it does not."""
    last, head, live = history.last_seq(), index.head, history.live(history.head())
    if head != last:
        return f"the index is at position {head}, the journal at {last}"
    if len(index) != len(live):
        return f"the index holds {len(index)} entries, the journal {len(live)}"
    sample = {
        stored.experience.id: stored
        for stored in random.Random(0).sample(live, min(SAMPLE, len(live)))
    }
    held: Mapping[str, tuple[int, Vector]]
    held = index.fetch(list(sample)) if sample else {}
    bad = [
        id
        for id, stored in sample.items()
        if id not in held
        or held[id][0] != stored.experience.version
        or not np.allclose(held[id][1], stored.vector, atol=_SAME)
    ]
    return (
        f"{len(bad)} of {len(sample)} entries compared have another version or vector, the first is"
        f" {bad[0]}"
        if bad
        else ""
    )
