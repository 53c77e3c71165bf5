"""Check a bank folder without changing it: the journal, the index against it, and the queue."""

from __future__ import annotations

import fcntl
import random
import shlex
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

from experiential.bank.index.embed import Vector
from experiential.bank.index.follower import Replica
from experiential.bank.index.lexical import content_words
from experiential.bank.index.site import CHROMA, Site, recorded_site
from experiential.bank.index.store import IndexLostError
from experiential.bank.operations import subject
from experiential.bank.storage.checksums import Damage
from experiential.bank.storage.in_place import fits
from experiential.bank.storage.journal import JOURNAL_NAME, Journal
from experiential.bank.storage.lock import LOCK_NAME, described_owner
from experiential.bank.storage.mapped import Mapped, mapped_file
from experiential.bank.storage.tables import DistillationQueue, History
from experiential.errors import BankError
from experiential.types import Experience, Record

SAMPLE = 256
"""Entries whose vectors are compared."""
_NAMED = 10
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
    writer = Finding(what="writer", status="ok", found="nobody writes the bank")
    with ExitStack() as kept:
        if (folder / LOCK_NAME).exists():
            lock = kept.enter_context((folder / LOCK_NAME).open("rb"))
            try:  # while the folder is looked at, no writer comes
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = described_owner(lock.read())
                found = f"{owner} writes the bank; the index is not looked at"
                mend = "close it there to have the index looked at too"
                writer = Finding(what="writer", status="note", found=found, mend=mend)
        return [writer, *_contents(folder, with_index=writer.status == "ok")]


def _contents(folder: Path, *, with_index: bool) -> Iterator[Finding]:
    restore = f"restore {JOURNAL_NAME} from a backup, or save what is undamaged: experiential bank"
    restore += f" recover {shlex.quote(str(folder))} --to NEW"
    try:
        journal = Journal.open_copy(folder)
    except (BankError, sqlite3.DatabaseError) as error:
        yield _found("journal", str(error), restore)
        return
    try:
        statement = "SELECT tab, namespace, id, what FROM damaged ORDER BY rowid"
        damaged = [str(Damage(*row)) for row in journal.rows(statement)]
        damaged += [str(one) for one in journal.damage if str(one) not in damaged]
        if damaged:
            more = f" and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
            found = f"{len(damaged)} damaged rows are left out: {'; '.join(damaged[:_NAMED])}{more}"
            yield _found("journal", found, restore)
        else:
            yield _found("journal", "integrity_check says ok, all rows have their checksums")
        statement = "SELECT DISTINCT namespace FROM commits ORDER BY namespace"
        for (namespace,) in journal.rows(statement):
            history = History(journal, namespace)
            found = f"{history.live_count()} entries at commit {history.head()}"
            mend = ""
            if orphans := journal.value(_ORPHANS, namespace):
                found = f"{orphans} changes name a version that the journal lacks"
                mend = "experiential bank history, then experiential bank rollback to a commit"
                mend += " before"
            yield _found(f"{namespace}: entries", found, mend)
            if misfiled := _misfiled(
                [live.experience for live in history.live(history.head()).entries]
            ):
                entry, task = misfiled[0]
                found = f"{len(misfiled)} entries name another task than their own, the first is"
                found = f"{found} {entry.id}: {task}"
                mend = (
                    f"experiential bank show {shlex.quote(str(folder))} {entry.id}; export, correct"
                )
                what, mend = f"{namespace}: tasks", f"{mend} and import into a new bank to mend all"
                yield Finding(what=what, status="note", found=found, mend=mend)
            counts = DistillationQueue(journal, namespace).counts()
            found = f"{counts['queued']} queued, {counts['done']} done"
            mend = ""
            if lost := journal.value(_LOST, namespace):
                found = f"{found}, {lost} without a recorded trajectory"
                mend = f"open {folder} with an ExperienceManager: each becomes a dead letter with"
                mend += " its reason"
            yield _found(f"{namespace}: queue", found, mend)
            if counts["queued"] and not lost:
                found = f"{counts['queued']} episodes wait to be distilled"
                mend = f"experiential distil {shlex.quote(str(folder))} --model NAME"
                yield Finding(what=f"{namespace}: waiting", status="note", found=found, mend=mend)
            if dead := counts["dead"]:
                found = f"{dead} trajectories were given up"
                mend = "experiential bank dead-letters has the reasons, requeue tries them again"
                what = f"{namespace}: dead letters"
                yield Finding(what=what, status="note", found=found, mend=mend)
            if (file := mapped_file(folder, namespace)).exists():
                yield _mapped(file, journal)
            if with_index:
                yield _index(folder, history, namespace)
    except (sqlite3.DatabaseError, ValueError) as error:
        yield _found("journal", f"cannot be read: {error}", restore)
    finally:
        journal.close()


def _mapped(file: Path, journal: Journal) -> Finding:
    """Check the entries that readers map."""
    try:
        mapped = Mapped(file)
        mapped.check()
        is_old = not fits(journal, mapped.stamp)
    except IndexLostError as error:
        mend = f"delete {shlex.quote(str(file))}: readers read the journal until a writer renews it"
        return Finding(what=file.name, status="wrong", found=str(error), mend=mend)
    found = f"{len(mapped)} entries at commit {mapped.stamp.head}, all blocks have their checksums"
    if is_old:
        found, mend = "is not of this journal, readers read that", "open the bank for writing once"
        return Finding(what=file.name, status="note", found=found, mend=mend)
    return Finding(what=file.name, status="ok", found=found)


def _misfiled(entries: Sequence[Experience]) -> list[tuple[Experience, str]]:
    """Return the entries whose text is about another task of the bank than their own, and which."""
    tasks = {entry.task for entry in entries if entry.task is not None}
    words = {task: content_words(task) for task in tasks}
    counts = Counter(word for held in words.values() for word in held)
    # Only words that one task alone has can tell tasks apart, and they are looked up.
    owners = {word: task for task, held in words.items() for word in held if counts[word] == 1}
    found: list[tuple[Experience, str]] = []
    for entry in entries:
        named = {owners[word] for word in content_words(entry.text) if word in owners}
        others = (task for task in sorted(named) if subject(entry.text, entry.task, task) == task)
        if (other := next(others, entry.task)) != entry.task and other is not None:
            found.append((entry, other))
    return found


def _found(what: str, found: str, mend: str = "") -> Finding:
    """Return a finding that is wrong when there is something to mend."""
    return Finding(what=what, status="wrong" if mend else "ok", found=found, mend=mend)


def _index(folder: Path, history: History, namespace: str) -> Finding:
    """Compare an index with the journal; a folder that is not there yet is no fault."""
    what = f"{namespace}: index"
    site = recorded_site(folder, namespace, history)
    if site is None:
        return _found(what, "all entries are in memory")
    if not history.last_seq():
        return _found(what, "nothing to index")
    rebuild = (
        f"experiential bank rebuild {shlex.quote(str(folder))} --namespace {shlex.quote(namespace)}"
    )
    whole = f"{history.live_count()} entries at position {history.last_seq()}, as in the journal"
    if site.folder is None:
        try:
            wrong = _disagreement(site, history)
        except IndexLostError as error:
            mend = f"start it (chroma run), or have the index in the folder again: {rebuild}"
            return _found(what, str(error), f"{mend} --store {CHROMA}")
        whole, wrong = f"at {site.store}: {whole}", wrong and f"at {site.store}: {wrong}"
    elif not site.folder.is_dir():
        # As `purge` and `backup` leave it.
        found = f"there is no folder {site.folder.name}; the next writer makes it"
        return Finding(what=what, status="note", found=found, mend=f"to have it now: {rebuild}")
    else:
        with TemporaryDirectory(prefix="experiential-doctor-") as scratch:
            # A copy, because opening a store may change its files.
            copy = Path(scratch) / site.folder.name
            shutil.copytree(site.folder, copy)
            try:
                wrong = _disagreement(site._replace(folder=copy), history)
            except IndexLostError as error:
                reason = " ".join(str(error.__cause__ or error).split())
                wrong = f"the folder of the index cannot be opened or read: {reason}"
    return _found(what, wrong, rebuild) if wrong else _found(what, whole)


def _disagreement(site: Site, history: History) -> str:
    """Describe how an index differs from the journal; empty if it does not."""
    last, live = history.last_seq(), history.live(history.head())
    index = Replica(site)
    try:
        if (head := index.head) != last:
            return f"the index is at position {head}, the journal at {last}"
        if len(index) != len(live):
            return f"the index holds {len(index)} entries, the journal {len(live)}"
        sample = random.Random(0).sample(range(len(live)), min(SAMPLE, len(live)))
        ids = [live.ids[place] for place in sample]
        held: Mapping[str, tuple[int, Vector]] = {}
        if ids:
            with index.answering():
                held = index.store.fetch(ids)
    finally:
        index.close()
    bad: list[str] = []
    for place in sample:
        entry, vector = live.entries[place].experience, live.vectors[place]
        version, indexed = held.get(entry.id, (None, vector))
        if version != entry.version or not np.allclose(indexed, vector, atol=_SAME):
            bad.append(entry.id)
    if not bad:
        return ""
    found = f"{len(bad)} of {len(sample)} entries compared have another version or vector"
    return f"{found}, the first is {bad[0]}"
