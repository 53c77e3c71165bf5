"""What a disk holds after a power cut, and a bank that loses nothing acknowledged by one."""

from __future__ import annotations

import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.power_cuts import is_found, run, run_purges
from benchmarks.power_disk import (
    FATES,
    Change,
    Disk,
    File,
    Folder,
    Recording,
    Rename,
    Resize,
    Said,
    Sync,
    Write,
    put,
    record,
)
from experiential import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.errors import ConfigError

SQLITE = """
import os, sqlite3, sys
journal = sqlite3.connect(sys.argv[1] + "/journal.sqlite", isolation_level=None)
journal.execute("PRAGMA journal_mode=WAL")
journal.execute(f"PRAGMA synchronous={sys.argv[2]}")
journal.execute("CREATE TABLE lessons (number INTEGER)")
for number in range(40):
    journal.execute("INSERT INTO lessons VALUES (?)", (number,))
    os.write(1, b"%d" % number)
"""

BANK = """
import os, sys
from experiential import ExperienceBank
bank = ExperienceBank(sys.argv[1] + "/new/bank", embedder="hashing", store="exact")
bank.add("The red door needs the brass key.")
os.write(1, b"added")
bank.fork(sys.argv[1] + "/copies/fork").close()
os.write(1, b"forked")
"""


@pytest.fixture
def strace(tmp_path: Path) -> None:
    """Skip where nothing can be recorded."""
    (tmp_path / "nothing").mkdir()
    try:
        record([sys.executable, "-c", ""], tmp_path / "nothing", tmp_path)
    except ConfigError as error:
        pytest.skip(str(error))


def left(
    changes: list[Change], *, root: Folder | None = None, ordered: bool = True, lying: bool = False
) -> list[dict[str, bytes | None]]:
    """What many cuts after the last of these changes leave."""
    disk = Disk(Recording(root or Folder(), changes), ordered=ordered, lying=lying)
    disk.advance(len(changes))
    return [disk.left(random.Random(seed), fate) for seed in range(60) for fate in FATES]


def test_what_was_synced_is_always_there_and_the_rest_torn_at_sectors() -> None:
    file = File(b"a" * 2048, 2048)
    root = Folder({"file": file})
    changes: list[Change] = [Write(file, 0, b"b" * 512), Sync(file, 1), Write(file, 0, b"c" * 1100)]
    seen = {found["file"] for found in left(changes, root=root)}
    old, new = b"b" * 512 + b"a" * 1536, b"c" * 1100 + b"a" * 948
    assert {old, new} < seen
    assert old[:512] + new[512:1024] + old[1024:] in seen, "sectors are not kept one by one"
    for content in seen:
        assert content is not None and len(content) == 2048
        for start in range(0, 2048, 512):
            part = slice(start, start + 512)
            assert content[part] in (old[part], new[part])
    assert b"a" * 2048 in {found["file"] for found in left(changes, root=root, lying=True)}


def test_a_sync_covers_what_was_written_before_it_began() -> None:
    file = File()
    changes: list[Change] = [Rename(((root := Folder(), "file", file),)), Write(file, 0, b"early")]
    changes += [Write(file, 5, b"late"), Sync(file, 2), Sync(root, 2)]
    assert {found["file"][:5] for found in left(changes, root=root) if found["file"]} == {b"early"}
    assert any(found["file"] == b"early" for found in left(changes, root=root))


def test_a_longer_or_shorter_file_has_one_of_its_sizes() -> None:
    file = File(b"x" * 1000, 1000)
    changes: list[Change] = [Resize(file, 0), Write(file, 0, b"y" * 600), Write(file, 600, b"z")]
    sizes = {len(found["file"] or b"") for found in left(changes, root=Folder({"file": file}))}
    assert sizes == {1000, 0, 600, 601}


def test_a_name_is_kept_by_the_sync_of_its_folder_or_of_anything_later() -> None:
    root, below, file = Folder(), Folder(), File()
    changes: list[Change] = [Rename(((root, "bank", below),)), Rename(((below, "file", file),))]
    changes += [Write(file, 0, b"kept"), Sync(file, 3), Sync(below, 3)]
    assert all(found == {"bank": None, "bank/file": b"kept"} for found in left(changes, root=root))
    strict = left(changes, root=root, ordered=False)
    assert {} in strict, "without a sync of the folder above, the whole folder may be gone"
    strict = left([*changes, Sync(root, 5)], root=root, ordered=False)
    assert all(found == {"bank": None, "bank/file": b"kept"} for found in strict)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_rename_happens_or_does_not(ordered: bool) -> None:
    new, old = File(b"new", 3), File(b"old", 3)
    root = Folder({"part": new, "file": old})
    changes: list[Change] = [Rename(((root, "part", None), (root, "file", new)))]
    seen = left(changes, root=root, ordered=ordered)
    before, after = {"file": b"old", "part": b"new"}, {"file": b"new"}
    assert before in seen and after in seen and all(one in (before, after) for one in seen)


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(("synchronous", "is_safe"), [("FULL", True), ("OFF", False)])
def test_sqlite_loses_what_it_acknowledged_only_if_it_does_not_sync(
    tmp_path: Path, synchronous: str, is_safe: bool
) -> None:
    (home := tmp_path / "home").mkdir()
    recording = record([sys.executable, "-c", SQLITE, str(home), synchronous], home, tmp_path)
    assert sum(isinstance(change, Said) for change in recording.changes) == 40
    assert any(isinstance(change, Sync) for change in recording.changes)
    disk, draw, told, lost = Disk(recording, ordered=False), random.Random(0), list[str](), 0
    for number, at in enumerate(range(0, len(recording.changes), 5)):
        told += disk.advance(at)
        put(disk.left(draw, draw.choice(FATES)), image := tmp_path / str(number))
        try:
            journal = sqlite3.connect(image / "journal.sqlite")
            rows = [row for (row,) in journal.execute("SELECT number FROM lessons ORDER BY number")]
            journal.close()
        except sqlite3.DatabaseError:
            rows = []
        lost += rows != list(range(len(rows))) or len(rows) < len(told)
    assert (lost == 0) == is_safe


@pytest.mark.usefixtures("strace")
def test_new_folders_of_a_bank_and_a_fork_are_kept_where_only_their_own_sync_does(
    tmp_path: Path,
) -> None:
    (home := tmp_path / "home").mkdir()
    recording = record([sys.executable, "-c", BANK, str(home)], home, tmp_path)
    said = [at for at, change in enumerate(recording.changes) if isinstance(change, Said)]
    disk = Disk(recording, ordered=False)
    for name, at in zip(("new/bank", "copies/fork"), said, strict=True):
        disk.advance(at + 1)
        put(disk.left(random.Random(0), "nothing"), tmp_path / f"cut-{at}")
        with ExperienceBank(tmp_path / f"cut-{at}" / name, read_only=True) as bank:
            assert [entry.text for entry in bank] == ["The red door needs the brass key."]


def test_a_journal_without_its_tables_is_an_empty_bank(tmp_path: Path) -> None:
    """As a power cut while a bank is made leaves it."""
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as journal:
        journal.execute("PRAGMA journal_mode=WAL")
    with ExperienceBank(tmp_path, embedder="hashing", read_only=True) as bank:
        assert len(bank) == 0
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        assert bank.add("written after the cut").version == 1


def test_an_entry_is_looked_for_where_its_vector_is(tmp_path: Path) -> None:
    with FolderBank(tmp_path, embedder="hashing") as bank:
        bank.add("The oven is hot.")
        far = bank.add("981e + b117 + cb8c", task="t")
        [score] = [hit.score for hit in bank.search(far.text, k=2) if hit.experience.id == far.id]
        assert score < 0.1, "the hashes of its words no longer meet those of its task"
        assert all(is_found(bank, entry) for entry in bank)
        assert not is_found(bank, far.model_copy(update={"id": "another"}))
        assert not is_found(bank, far.model_copy(update={"task": None}))


@pytest.mark.usefixtures("strace")
def test_a_power_cut_after_a_purge_brings_no_text_back() -> None:
    found = run_purges(80, seed=7)
    assert found["faults"] == [] and found["counts"]["cuts"] == 80
    assert found["counts"]["control with the text"] > 0, "lost syncs kept the erasing"


@pytest.mark.usefixtures("strace")
def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        record([sys.executable, "-c", "1 / 0"], home, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("strace")
def test_power_cuts_lose_nothing_acknowledged_of_a_bank(tmp_path: Path) -> None:
    found = run(60, seed=7, keep=tmp_path)
    assert found["faults"] == []
    assert found["counts"]["whole"] == found["counts"]["cuts"] == 60
    assert found["counts"]["syncs"] > 0 < found["counts"]["promises"]
    assert found["control"]["whole"] < found["control"]["cuts"], "lost syncs lost nothing"
