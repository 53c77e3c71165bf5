"""A damaged journal is never wrong in silence, and gives back all that was not damaged."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

import experiential as xp
from benchmarks.journal_damage import run as damaged
from experiential.bank.folder import FolderBank
from experiential.bank.recover import recover
from experiential.bank.storage.checkup import examine
from experiential.bank.storage.mapped import PATTERN
from experiential.errors import BankError
from tests.test_cli_bank import Run, run

OLD = Path(__file__).parent / "fixtures" / "bank-0.1"
__all__ = ["run"]  # the fixture


def changed(folder: Path, statement: str, *arguments: object) -> None:
    """Change a journal behind the library's back."""
    with sqlite3.connect(folder / "journal.sqlite") as connection:
        connection.execute(statement, arguments)
    connection.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing", store="exact") as bank:
        for number in range(4):
            bank.add(f"lesson {number}")
    return tmp_path / "bank"


def test_random_damage_is_never_silent_and_costs_no_undamaged_entry() -> None:
    counts = damaged(60, seed=3)
    assert not [name for name in counts if "SILENT" in name or "RAW" in name]
    assert counts["undamaged entries lost"] == 0 < counts["undamaged entries"]
    assert counts["flip: named, rest served"] > 0 and counts["cut: refused"] > 0


@pytest.mark.slow
def test_hundreds_of_damages_are_never_silent() -> None:
    counts = damaged(300, seed=4)
    assert not [name for name in counts if "SILENT" in name or "RAW" in name]
    assert counts["undamaged entries lost"] == 0


def test_a_changed_text_is_named_set_aside_and_the_rest_served(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with xp.ExperienceBank(folder, read_only=True) as bank:
        lost = next(entry for entry in bank.entries() if entry.text == "lesson 2")
    changed(folder, "UPDATE versions SET record = replace(record, 'lesson 2', 'lesson 9')")
    with (
        caplog.at_level(logging.WARNING),
        xp.ExperienceBank(folder, read_only=True) as bank,
    ):
        assert {entry.text for entry in bank} == {"lesson 0", "lesson 1", "lesson 3"}
        [damage] = bank.damage
    assert (damage.table, damage.namespace) == ("versions", "default")
    assert lost.id in damage.id and lost.id in caplog.text and "recover" in caplog.text
    [journal] = [finding for finding in examine(folder) if finding.what == "journal"]
    assert journal.status == "wrong" and lost.id in journal.found and "recover" in journal.mend
    with xp.ExperienceBank(folder) as bank:  # a writer sets it aside for good
        assert len(bank) == 3 and bank.add("another").version == 1
    with xp.ExperienceBank(folder) as bank:
        assert not bank.damage and len(bank) == 4
    assert lost.id in next(one for one in examine(folder) if one.what == "journal").found


def test_the_default_embedder_is_found_by_its_vectors(tmp_path: Path) -> None:
    with xp.ExperienceBank(tmp_path, store="exact") as bank:
        bank.add("lesson 2", task="a task")
    changed(tmp_path, "DELETE FROM meta WHERE key = 'embedder'")
    with xp.ExperienceBank(tmp_path, read_only=True) as bank:
        assert bank.search("lesson")[0].experience.text == "lesson 2"
        assert "MiniLM" in bank.embedder.id


def test_an_embedder_whose_name_is_lost_is_found_by_its_vectors(
    folder: Path, tmp_path: Path
) -> None:
    changed(folder, "UPDATE meta SET value = 'hashing-257' WHERE key = 'embedder'")
    recover(folder, tmp_path / "new")
    for bank_folder in (folder, tmp_path / "new"):
        with xp.ExperienceBank(bank_folder, read_only=True) as bank:
            assert bank.search("lesson 2")[0].experience.text == "lesson 2"
        with xp.ExperienceBank(bank_folder) as bank:
            bank.add("lesson 4")
        with xp.ExperienceBank(bank_folder, read_only=True) as bank:
            assert bank.embedder.id == "hashing-256"
            assert bank.search("lesson 4")[0].experience.text == "lesson 4"


@pytest.mark.parametrize("mapped_from", [1, 10_000])
def test_a_bank_whose_embedder_nobody_knows_is_read_and_says_what_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped_from: int
) -> None:
    monkeypatch.setattr(FolderBank, "MAPPED_FROM", mapped_from)

    def lengths(texts: list[str]) -> list[list[float]]:
        return [[len(text), 1.0] for text in texts]

    folder, new = tmp_path / "bank", tmp_path / "new"
    with xp.ExperienceBank(folder, embedder=lengths, store="exact") as bank:
        bank.add("a lesson")
    changed(folder, "DELETE FROM meta WHERE key = 'embedder'")
    for file in folder.glob(PATTERN):
        file.unlink()  # it names the embedder
    for read_only in (True, False, True):
        with xp.ExperienceBank(folder, read_only=read_only) as bank:
            assert [entry.text for entry in bank] == ["a lesson"]
            with pytest.raises(BankError, match="pass it as embedder="):
                bank.search("a lesson")
    recover(folder, new, embedder=lengths)
    with xp.ExperienceBank(new, read_only=True, embedder=lengths) as bank:
        assert bank.search("a lesson")[0].experience.text == "a lesson"
    with pytest.raises(BankError, match="'hashing-256'"):
        xp.ExperienceBank(new, embedder="hashing")


def test_a_row_that_is_gone_shows_in_the_chain_of_commits(folder: Path) -> None:
    changed(folder, "DELETE FROM versions WHERE commit_id = 2")
    with xp.ExperienceBank(folder, read_only=True) as bank:
        [damage] = bank.damage
        assert (damage.table, damage.id) == ("commits", "2") and len(bank) == 3


def test_a_lost_change_is_written_again_from_its_version(folder: Path) -> None:
    changed(folder, "UPDATE changes SET id = 'nobody' WHERE seq = 2")
    with xp.ExperienceBank(folder) as bank:
        assert [entry.text for entry in bank] == [f"lesson {number}" for number in range(4)]
        assert [one.table for one in bank.damage] == ["changes"]
    with xp.ExperienceBank(folder) as bank:
        assert not bank.damage and len(bank) == 4


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_bank_without_its_journal_is_refused_and_comes_back_from_index_and_export(
    folder: Path, tmp_path: Path, is_empty: bool
) -> None:
    with xp.ExperienceBank(folder, store="chroma") as bank:
        known = {entry.id: entry.text for entry in bank}
        bank.export(tmp_path / "saved.jsonl")
        late = bank.add("after the export")
        known[late.id] = late.text
    (folder / "journal.sqlite").unlink()
    if is_empty:
        (folder / "journal.sqlite").touch()
    for options in ({}, {"read_only": True}):
        with pytest.raises(BankError) as refused:
            xp.ExperienceBank(folder, **options)
        assert "\n" not in str(refused.value) and "bank recover" in str(refused.value)
    (folder / "bank.id").unlink()
    with pytest.raises(BankError, match="bank recover"):  # the index is there still
        xp.ExperienceBank(folder)
    found = recover(folder, tmp_path / "new", export=tmp_path / "saved.jsonl", embedder="hashing")
    entries = next(one for one in found if one.what == "entries")
    assert (entries.export, entries.index, entries.lost) == (4, 1, 0)
    with xp.ExperienceBank(tmp_path / "new", embedder="hashing") as bank:
        assert {entry.id: entry.text for entry in bank} == known


def test_the_journal_of_another_bank_is_refused(folder: Path, tmp_path: Path) -> None:
    with xp.ExperienceBank(folder) as bank, bank.fork(tmp_path / "fork") as fork:
        assert len(fork) == 4  # a fork is a bank of its own
    shutil.copyfile(tmp_path / "fork" / "journal.sqlite", folder / "journal.sqlite")
    for options in ({}, {"read_only": True}):
        with pytest.raises(BankError, match="that of bank .* recover"):
            xp.ExperienceBank(folder, **options)


def test_a_journal_without_its_first_page_is_refused_in_one_line_and_recovered(
    tmp_path: Path, folder: Path
) -> None:
    file = folder / "journal.sqlite"
    file.write_bytes(bytes(4096) + file.read_bytes()[4096:])
    for options in ({}, {"read_only": True}):
        with pytest.raises(BankError, match="experiential bank recover") as refused:
            xp.ExperienceBank(folder, **options)
        assert "\n" not in str(refused.value)
    assert recover(folder, tmp_path / "new", embedder="hashing")[0].lost == 0
    with xp.ExperienceBank(tmp_path / "new", embedder="hashing") as bank:
        assert {entry.text for entry in bank} == {f"lesson {number}" for number in range(4)}
    with pytest.raises(BankError, match="without a bank"):
        recover(folder, tmp_path / "new")


@pytest.mark.parametrize("part", [b"origins TEXT", b"TABLE versions", b"meta (name"])
def test_a_schema_that_is_no_text_is_refused_in_one_line_and_recovered(
    tmp_path: Path, folder: Path, part: bytes
) -> None:
    file = folder / "journal.sqlite"
    raw = file.read_bytes()
    assert raw.count(part) == 1
    file.write_bytes(raw.replace(part, b"\xf5" + part[1:]))
    for options in ({}, {"read_only": True}):
        with pytest.raises(BankError, match="experiential bank recover") as refused:
            xp.ExperienceBank(folder, **options)
        assert "\n" not in str(refused.value)
    recover(folder, tmp_path / "new", embedder="hashing")
    with xp.ExperienceBank(tmp_path / "new", embedder="hashing") as bank:
        assert {entry.text for entry in bank} == {f"lesson {number}" for number in range(4)}


@pytest.mark.parametrize("is_page_lost", [True, False])
def test_changes_whose_positions_are_lost_are_put_back_in_order(
    tmp_path: Path, is_page_lost: bool
) -> None:
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing", store="exact") as bank:
        ids = [bank.add(f"lesson {number}").id for number in range(90)]
        for id in ids[:3]:
            bank.remove(id)
        known = {entry.id: entry.text for entry in bank}
    file = tmp_path / "bank" / "journal.sqlite"
    raw = bytearray(file.read_bytes())
    # A change: lengths, 7 bytes of types, and then namespace, commit, id.
    place = raw.index(b"default" + bytes([80]) + ids[79].encode()) - 7
    raw[place - 2 : place] = bytes(2)
    if is_page_lost:
        place = raw.index(b"default" + bytes([10]) + ids[9].encode()) // 4096 * 4096
        raw[place : place + 4096] = bytes(4096)
    file.write_bytes(raw)
    with pytest.raises(BankError, match="recover"):
        xp.ExperienceBank(tmp_path / "bank")
    report = recover(tmp_path / "bank", tmp_path / "new")
    assert not any(one.lost for one in report)
    with xp.ExperienceBank(tmp_path / "new") as bank:
        assert {entry.id: entry.text for entry in bank} == known
        assert [commit.id for commit in bank.commits()] == list(range(1, 94))
        bank.rollback(90)
        assert [entry.id for entry in bank.entries()] == ids


def test_a_bank_of_version_0_1_opens_reads_writes_and_gets_checksums(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    texts = [
        "The red door needs the brass key.",
        "Light the lamp before you enter the cellar.",
        "Look under the mat.",
    ]
    before = (tmp_path / "old" / "journal.sqlite").read_bytes()
    with xp.ExperienceBank(tmp_path / "old", read_only=True) as bank:
        assert [entry.text for entry in bank] == texts and not bank.damage
    assert (tmp_path / "old" / "journal.sqlite").read_bytes() == before
    with xp.ExperienceBank(tmp_path / "old") as bank:
        assert [entry.text for entry in bank] == texts and bank.trajectory("t1") is not None
        assert [entry.version for entry in bank] == [1, 2, 1] and bank.queue.waiting() == ["t2"]
        texts.append(bank.add("Written by this version.").text)
    with xp.ExperienceBank(tmp_path / "old", namespace="other") as bank:
        assert [entry.text for entry in bank] == ["Another namespace."]
    findings = {finding.what: finding.status for finding in examine(tmp_path / "old")}
    assert findings["journal"] == findings["default: entries"] == "ok"  # its index is not there
    changed(tmp_path / "old", "UPDATE versions SET vector = zeroblob(1024) WHERE commit_id = 1")
    with xp.ExperienceBank(tmp_path / "old") as bank:
        assert [entry.text for entry in bank] == texts[1:] and len(bank.damage) == 1


def test_a_damaged_bank_of_version_0_1_opens_without_the_record_that_is_none(
    tmp_path: Path,
) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    changed(tmp_path / "old", "UPDATE versions SET record = '{' WHERE commit_id = 1")
    with xp.ExperienceBank(tmp_path / "old") as bank:
        assert len(bank) == 2 and "is no record" in str(bank.damage[0])


def test_a_field_of_a_later_version_is_ignored_and_kept(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    later = "json_set(record, '$.colour', 'red', '$.provenance.weather', json('{\"wind\": 3}'))"
    changed(tmp_path / "old", f"UPDATE versions SET record = {later}")
    with xp.ExperienceBank(tmp_path / "old") as bank:
        assert len(bank) == 3 and not bank.damage
        bank.fork(tmp_path / "fork").close()
    with sqlite3.connect(tmp_path / "fork" / "journal.sqlite") as connection:
        found = connection.execute("SELECT record FROM versions").fetchall()
    connection.close()
    assert {json.loads(record)["colour"] for (record,) in found} == {"red"}


def test_a_journal_dated_in_the_future_is_read(folder: Path) -> None:
    ahead = time.time() + 3600
    os.utime(folder / "journal.sqlite", (ahead, ahead))
    with xp.ExperienceBank(folder, read_only=True) as bank:
        assert len(bank) == 4
    assert not [finding for finding in examine(folder) if finding.status == "wrong"]


@pytest.mark.parametrize("place", [4096, 600_000, "cut", "deleted"])
def test_a_scrambled_database_of_chroma_is_set_aside_and_made_again(
    tmp_path: Path, place: int | str
) -> None:
    with xp.ExperienceBank(tmp_path, embedder="hashing") as bank:
        bank.add_many([f"lesson {number}" for number in range(300)])
    file = tmp_path / "chroma" / "chroma.sqlite3"
    raw = bytearray(file.read_bytes())
    if isinstance(place, int):
        raw[place : place + 4096] = random.Random(place).randbytes(4096)
    file.write_bytes(raw[: len(raw) // 2] if place == "cut" else raw)
    if place == "deleted":
        file.unlink()
    [index] = [one for one in examine(tmp_path) if one.status == "wrong"]
    assert index.what == "default: index" and "rebuild" in index.mend
    with xp.ExperienceBank(tmp_path) as bank:
        bank.add("one more")
        assert bank.search("lesson 7")[0].experience.text == "lesson 7"
    with xp.ExperienceBank(tmp_path) as bank:
        assert bank.rebuild() == 301
    assert not [finding for finding in examine(tmp_path) if finding.status == "wrong"]


def test_recover_on_the_command_line(run: Run, folder: Path, tmp_path: Path) -> None:
    file = folder / "journal.sqlite"
    file.write_bytes(bytes(4096) + file.read_bytes()[4096:])
    code, _, error = run("ls", folder)
    assert code in (1, 2) and "experiential bank recover" in error and error.count("\n") == 1
    assert run("recover", folder, "--to", tmp_path / "new", "--embedder", "hashing")[0] == 0
    assert run("ls", tmp_path / "new", "--json")[1].count('"text": "lesson') == 4
    assert run("recover", folder, "--to", tmp_path / "new")[0] == 2


def test_a_refused_recovery_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    def lengths(texts: list[str]) -> list[list[float]]:
        return [[len(text), 1.0] for text in texts]

    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    for to in (tmp_path / "new", used):
        with pytest.raises(BankError, match="hashing-256"):  # which the journal names
            recover(folder, to, embedder=lengths)
    assert not (tmp_path / "new").exists()
    assert [file.name for file in used.iterdir()] == ["notes.txt"]
    assert recover(folder, used)[0].journal == 4
