"""Cut the power of a bank that is being written, and count what is lost. Needs Linux and strace.

    python -m benchmarks.power_cuts [--cuts 1000] [--purges 200] [--seed 1]
        [--results benchmarks/results/power_cuts.json]

A writer (`tests/crash_writer.py`) works on a bank: adds, updates, distils, merges, evicts, rolls
back, forks, rebuilds the index, closes. All that it asks of the disk is recorded
(`benchmarks/power_disk.py`), and so is each promise that the bank made to it. At random moments of
the recording the power is cut, and what the disk may hold then becomes a new folder: all that was
synced, and of the rest nothing, everything, everything up to some moment, or sectors and names by
chance. Half of the cuts are on a disk on which any sync keeps all names that are older, half on
one that keeps a name only when its folder is synced. That folder

* opens, read-only and for writing, unless the bank had not been opened for the first time;
* holds every acknowledged entry, submission, distillation and fork;
* holds a beginning of the commits that the writer made, each whole;
* finds an entry by its text, takes another, and has nothing wrong for ``experiential bank doctor``.

Some writers go on from what a cut left, so that recovering is cut, too. As a control, further cuts
are on a disk whose syncs do nothing: if they lost nothing, the simulation would be blind.

Further cuts follow an acknowledged ``experiential bank purge``, of a bank that was closed and of
one whose writer was killed. No file may then hold the text that was erased.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.power_disk import FATES, Disk, Recording, Said, Sync, Write, put, record
from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import EntryKey, HashingEmbedder, embed_entries
from experiential.bank.storage.checkup import examine
from experiential.bank.storage.journal import JOURNAL_NAME
from experiential.errors import BankError, ConfigError
from experiential.types import Experience

CUTS_OF_A_WRITER = 50
LIVES = 4
"""Writers of one bank, one after the other."""
STEPS = 15
"""Actions of a writer."""
NAMED = 3
"""Faults of one cut that are named."""
EMBEDDER = HashingEmbedder()
ROUNDING = 1e-3
"""Of a similarity that an index gives."""
ERASED = "hunter2"
PURGE = f"""
import sys
from experiential.cli.errors import run_app
from experiential.cli.main import app
sys.exit(run_app(app, ["bank", "purge", sys.argv[1], "--text", "{ERASED}", "--yes"]))
"""


class Promises:
    """Hold what writers were told is durable."""

    def __init__(self) -> None:
        self.is_open = False
        self.head = 0
        self.versions: dict[tuple[str, int], str] = {}
        self.submitted: set[str] = set()
        self.distilled: set[str] = set()
        self.forks: set[str] = set()

    def note(self, line: str) -> None:
        """Add one line of a writer's output."""
        said: dict[str, Any] = json.loads(line)
        match said["kind"]:
            case "open":
                self.is_open = True
            case "state":
                self.head = said["head"]
            case "written":
                self.versions |= {(id, version): text for id, version, text in said["entries"]}
            case "submitted":
                self.submitted.update(said["ids"])
            case "distilled":
                self.distilled.add(said["id"])
            case "forked":
                self.forks.add(Path(said["folder"]).name)
            case other:
                raise ValueError(f"Expected a known promise, got {other!r}")


def content(entry: Experience) -> dict[str, Any]:
    """Return what a commit holds of an entry; counters are those of now."""
    return entry.model_dump(exclude={"statistics"})


def faults(home: Path, promises: Promises, final: Path, whole: FolderBank) -> list[str]:
    """Return what is wrong with the bank that a cut left, after opening it and writing to it.

    Args:
        home: folder in which the cut left the folder ``bank``, and forks beside it.
        promises: made before the cut.
        final: the same folder when the writer had ended, without a cut.
        whole: its bank, open.
    """
    folder, found = home / "bank", list[str]()
    try:
        try:
            FolderBank(folder, read_only=True).close()
        except BankError:
            if promises.is_open:
                raise
        with FolderBank(folder, embedder=EMBEDDER) as bank:
            found += [*broken_promises(bank, promises), *differences(bank, whole)]
            bank.flush_index()
            added = bank.add("written after the cut")
            found += [
                f"lost: a search for the text of {entry.id} does not find it"
                for entry in [*bank][-3:]
                if not is_found(bank, entry)
            ]
        for check in examine(folder):
            if check.status == "wrong":
                found.append(f"doctor: {check.what}: {check.found}")
        with FolderBank(folder, read_only=True) as bank:
            if bank.get(added.id) is None:
                found.append("lost: what was written after the cut")
        for journal in home.glob(f"fork-*/{JOURNAL_NAME}"):
            name = journal.parent.name
            with (
                FolderBank(home / name, read_only=True) as fork,
                FolderBank(final / name, read_only=True) as copied,
            ):
                if name in promises.forks and [*map(content, fork)] != [*map(content, copied)]:
                    found.append(f"half: the entries of {name}")
        lacking = [name for name in promises.forks if not (home / name / JOURNAL_NAME).exists()]
        found += [f"lost: the bank {name}" for name in lacking]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  (a panic of Chroma is no Exception)
        found.append(f"unopenable: {type(error).__name__}: {error}")
    return found


def is_found(bank: FolderBank, entry: Experience) -> bool:
    """Return whether a search for an entry's text finds it, as near as the two vectors are.

    Beside a task they may be at any distance: a random word may share its hashes with the task.
    """
    key = EntryKey(entry.text, entry.task)
    vector = embed_entries(lambda texts: EMBEDDER([*texts]), [key])[key]
    cosine = float(EMBEDDER([entry.text])[0] @ vector)
    scores = [
        hit.score for hit in bank.search(entry.text, k=len(bank)) if hit.experience.id == entry.id
    ]
    return scores != [] and abs(scores[0] - cosine) < ROUNDING


def broken_promises(bank: FolderBank, promises: Promises) -> list[str]:
    """Return what was promised and is not there."""
    found: list[str] = []
    if bank.head < promises.head:
        found.append(f"lost: the bank is at commit {bank.head}, {promises.head} was acknowledged")
    for (id, version), text in promises.versions.items():
        entry = bank.version(id, version)
        if entry is None or entry.text != text:
            found.append(f"lost: version {version} of {id}")
    for id in promises.submitted:
        if bank.queue.state(id) not in ("queued", "done") or bank.trajectory(id) is None:
            found.append(f"lost: the submitted trajectory {id}")
    for id in promises.distilled:
        if bank.queue.state(id) != "done":
            found.append(f"lost: that {id} was distilled")
    return found


def differences(bank: FolderBank, whole: FolderBank) -> list[str]:
    """Return how a bank differs from the same one at the same commit, in a folder that is whole."""
    commits = bank.commits()
    if commits != whole.commits()[: len(commits)]:
        return [f"half: the {len(commits)} commits are not the first that were made"]
    found: list[str] = []
    if [*map(content, bank)] != [*map(content, whole.at(bank.head).entries())]:
        found.append(f"half: entries differ from those of commit {bank.head}")
    for commit in commits:
        ref = commit.ref if commit.cause == "record" else None
        if ref is not None and bank.trajectory(ref) != whole.trajectory(ref):
            found.append(f"half: the trajectory {ref}")
    return found


class Cut(NamedTuple):
    """Hold what a cut left, and what was promised before."""

    name: str
    fate: str
    files: dict[str, bytes | None]
    promises: Promises


def cut(
    recording: Recording,
    promises: Promises,
    count: int,
    draw: random.Random,
    *,
    ordered: bool = True,
    lying: bool = False,
) -> Iterator[Cut]:
    """Yield so many cuts, in order of time.

    Half of them are just after a promise. Of a bank that is made, a fourth are before the first
    promise. The others are anywhere.
    """
    end = len(recording.changes)
    after = [at + 1 for at in range(end) if isinstance(recording.changes[at], Said)]
    first = end if promises.is_open else after[0]
    times = [
        draw.choice(after) if number % 2 else draw.randrange(end if number % 4 else first)
        for number in range(count)
    ]
    disk, told = Disk(recording, ordered=ordered, lying=lying), deepcopy(promises)
    for at in sorted(times):
        for line in disk.advance(at):
            told.note(line)
        [fate] = draw.choices(FATES, weights=(2, 1, 1, 4))
        name = f"{'any sync' if ordered else 'own sync'}, {fate}, at {at}"
        yield Cut(name, fate, disk.left(draw, fate), deepcopy(told))


def run(cuts: int, seed: int = 1, *, keep: Path | None = None) -> dict[str, Any]:
    """Cut so many times, and a tenth as often in the control; return the counts.

    Args:
        cuts: on disks that keep what was synced.
        seed: of the writers, the moments and what is left.
        keep: a folder for what cuts left that is at fault.
    """
    draw, counts, control = random.Random(seed), Counter[str](), Counter[str]()
    named: list[str] = []
    after: Cut | None = None  # what the next writer goes on from
    with tempfile.TemporaryDirectory(prefix="experiential-cuts-", ignore_cleanup_errors=True) as to:
        while counts["cuts"] < cuts:
            home = Path(to) / f"home-{counts['writers']}"
            before = None if counts["writers"] % LIVES == 0 else after
            put(before.files if before else {}, home)
            promises = before.promises if before else Promises()
            counts["writers"] += 1
            command = [sys.executable, "-m", "tests.crash_writer", str(home / "bank")]
            recording = record([*command, str(draw.randrange(1 << 30)), str(STEPS)], home, Path(to))
            for kind, name in ((Write, "writes"), (Sync, "syncs"), (Said, "promises")):
                counts[name] += sum(isinstance(change, kind) for change in recording.changes)
            count = min(CUTS_OF_A_WRITER, cuts - counts["cuts"])
            chosen, after = draw.randrange(count), None
            with FolderBank(home / "bank", read_only=True) as whole:
                honest = chain(
                    cut(recording, promises, (count + 1) // 2, draw, ordered=True),
                    cut(recording, promises, count // 2, draw, ordered=False),
                )
                for number, one in enumerate(honest):
                    image = Path(to) / f"cut-{counts['cuts']}"
                    put(one.files, image)
                    found = faults(image, one.promises, home, whole)
                    counts.update({fault.partition(":")[0] for fault in found} or {"whole"})
                    counts.update(("cuts", f"left {one.fate}"))
                    counts["before the first opening ended"] += not one.promises.is_open
                    aside = any(image.glob("bank/chroma.damaged-*"))
                    counts["an index set aside by this cut or an earlier one"] += aside
                    if found:
                        said = [f"{one.name}: {fault}" for fault in found[:NAMED]]
                        print(*said, sep="\n", flush=True)
                        named += said
                        if keep is not None:
                            put(one.files, keep / image.name)
                    elif number >= chosen and after is None:
                        after = one
                    shutil.rmtree(image)
                for one in cut(recording, promises, (count + 9) // 10, draw, lying=True):
                    image = Path(to) / f"control-{control['cuts']}"
                    put(one.files, image)
                    found = faults(image, one.promises, home, whole)
                    control.update({fault.partition(":")[0] for fault in found} or {"whole"})
                    control["cuts"] += 1
                    shutil.rmtree(image)
            shutil.rmtree(home)
            bad = counts["cuts"] - counts["whole"]
            print(f"{counts['cuts']} of {cuts} cuts, {bad} with faults", flush=True)
    return {"seed": seed, "counts": counts, "control": control, "faults": named}


class _Mapped(FolderBank):
    """Leave the file that readers map, too."""

    MAPPED_FROM = 1


def run_purges(cuts: int, seed: int = 1) -> dict[str, Any]:
    """Cut so many times after a purge, and a tenth as often in the control; return the counts."""
    draw, found = random.Random(seed), Counter[str]()
    named: set[str] = set()
    with tempfile.TemporaryDirectory(
        prefix="experiential-purge-", ignore_cleanup_errors=True
    ) as to:
        for state in ("closed", "killed"):
            made, home = Path(to) / f"made-{state}", Path(to) / state / "bank"
            with _Mapped(made, embedder="hashing") as bank:
                bank.add_many([f"lesson {number}" for number in range(100)])
                bank.add(f"The code is {ERASED}.")
                bank.flush_index()
                if state == "killed":
                    shutil.copytree(made, home)
            if state == "closed":
                shutil.copytree(made, home)
            recording = record([sys.executable, "-c", PURGE, str(home)], home.parent, Path(to))
            for number in range(cuts // 2 + (cuts + 19) // 20):
                lying = number >= cuts // 2
                disk = Disk(recording, ordered=number % 2 == 0, lying=lying)
                disk.advance(len(recording.changes))
                [fate] = draw.choices(FATES, weights=(2, 1, 1, 4))
                files = disk.left(draw, fate)
                holding = [
                    name for name, content in files.items() if ERASED.encode() in (content or b"")
                ]
                kind = "control" if lying else "cuts"
                found.update((kind, f"{kind} with the text") if holding else (kind,))
                if not lying:
                    named.update(f"{state}: {name}" for name in holding)
    return {"counts": found, "faults": sorted(named)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cuts", type=int, default=1_000)
    parser.add_argument("--purges", type=int, default=200, help="cuts after a purge")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/power_cuts.json"))
    parser.add_argument("--keep", type=Path, help="folder for what cuts left that is at fault")
    options = parser.parse_args()
    logging.getLogger("experiential").setLevel(logging.ERROR)
    try:
        found = run(options.cuts, options.seed, keep=options.keep)
        found["purges"] = run_purges(options.purges, options.seed)
    except ConfigError as error:
        parser.error(str(error))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    is_blind = found["control"].get("whole") == found["control"]["cuts"]
    if found["faults"] or found["purges"]["faults"] or is_blind:
        sys.exit(1)


if __name__ == "__main__":
    main()
