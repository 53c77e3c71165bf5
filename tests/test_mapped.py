"""Readers map a file of the entries that a writer left; they answer as the journal does."""

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import experiential as xp
from experiential.bank import folder as folder_module
from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.records import Asked, Duplicates
from experiential.bank.search.where import Scope, Where
from experiential.bank.storage import checkup, erase, journal, mapped, tables
from experiential.bank.storage.journal import BANK_ID_NAME, JOURNAL_NAME
from experiential.bank.storage.mapped import Mapped, mapped_file
from experiential.errors import BankError
from tests.test_history_cost import made


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Let banks of any size have the file."""
    monkeypatch.setattr(FolderBank, "MAPPED_FROM", 1)


@pytest.fixture
def copies(monkeypatch):
    """Return the folders whose journals were copied since."""
    seen, true = [], journal._connect_copy
    monkeypatch.setattr(journal, "_connect_copy", lambda one: seen.append(one) or true(one))
    return seen


def place(folder, namespace="default"):
    return mapped_file(folder, namespace)


def shown(bank):
    """Return all that a bank answers without its journal."""
    entries = list(bank.entries())
    queries = ["lesson 3 1", "better 7"]
    options = [{}, {"hybrid": 0.5}, {"where": {"kind": "lesson"}}, {"exclude_instance": "i1"}]
    rows = [row for one in options for row in bank.search(queries, k=999, **one)]
    # All, because entries written alike score alike.
    hits = [{hit.experience.id: round(hit.score, 5) for hit in row} for row in rows]
    return entries, len(bank), bank.head, [bank.get(entry.id) for entry in entries], hits


def history(bank):
    commits = [0, *(one.id for one in bank.commits())]
    views = [bank.at(commit) for commit in commits]
    found = [
        {hit.experience.id: round(hit.score, 5) for hit in view.search("lesson", k=999)}
        for view in views
    ]
    return commits, [list(view.entries()) for view in views], found, bank.diff(0, bank.head)


def without(folder, to):
    """Return a copy of a bank's folder without what is derived."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("entries-*", "chroma", "*-shm"))
    return to


def distilled(bank, text, id, **more):
    parsed = xp.parse_operations(f'<answer>[{{"op": "add", "text": "{text}"}}]</answer>')
    of = xp.Trajectory(id=id, task="t", success=True, instance=more.pop("instance", ""))
    return bank.apply(xp.Distillation(parsed=parsed), trajectory=of, shown=[], **more)


@pytest.mark.parametrize("seed", range(6))
def test_a_reader_of_the_file_answers_as_one_of_the_journal(tmp_path, monkeypatch, copies, seed):
    monkeypatch.setattr(folder_module, "_FEW", 10**6)  # the file is not renewed: much was written
    draw, bank = random.Random(seed), tmp_path / "bank"
    with made(bank, seed) as writer:  # enough entries that what comes later is few changes
        writer.add_many([f"lesson among many {n}" for n in range(60)])
        distilled(writer, "lesson with an origin", "e1", instance="i1")
        distilled(writer, "proposed lesson", "e2", review=True)
        writer.note_retrievals([draw.choice(list(writer.entries())).id])
    stamped = Mapped(place(bank)).stamp
    with ExperienceBank(bank) as writer:
        for number in range(12):
            ids = [entry.id for entry in writer.entries()]
            match draw.choice("aurpb"):
                case "a":
                    writer.add_many([f"lesson late {number}", f"lesson later {number}"])
                case "u":
                    writer.update(draw.choice(ids), f"better late {number}")
                case "r":
                    writer.remove(draw.choice(ids))
                case "p":
                    distilled(writer, f"lesson p {number}", f"p{number}", instance="i1")
                case _:
                    writer.rollback(
                        draw.randrange(max(stamped.head, writer.head - 4), writer.head + 1)
                    )
        use = xp.Use(experience_id=next(writer.entries()).id, experience_version=1)
        writer.submit(xp.Trajectory(id="used", task="t", success=True, uses=(use,)))
    assert Mapped(place(bank)).stamp == stamped
    with ExperienceBank(without(bank, tmp_path / "plain"), read_only=True) as plain:
        wanted, past = shown(plain), history(plain)
    copies.clear()
    with ExperienceBank(bank, read_only=True) as reader:
        assert shown(reader) == wanted
        assert not copies
        assert history(reader) == past
        assert shown(reader) == wanted


def asked(bank, draw):
    """Return what a bank says of its past, and of states near its own."""
    commits = bank.commits()
    heads = [0, *(one.id for one in commits)]
    pairs = [(draw.choice(heads), draw.choice(heads)) for _ in range(30)]
    ids = bank.ids()
    entries = [id for id in ids if bank.version(id, 1) is not None]
    near = [bank.at(head) for head in heads[-6:]]
    hits = [[dict(row) for row in ranking(one, ["lesson late", "lesson"], 999)] for one in near]
    return (
        [commits, bank.history(), bank.commits(), [bank.history(id) for id in entries]],
        [bank.diff(a, b) for a, b in pairs],
        [bank.uplift(id) for id in entries],
        [[entry.id for entry in one.entries()] for one in near],
        hits,
        bank.why("used").written,
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_history_is_that_of_the_journal_and_read_without_a_copy(
    tmp_path, monkeypatch, copies, seed
):
    monkeypatch.setattr(folder_module, "_FEW", 10**6)
    draw, bank = random.Random(seed), tmp_path / "bank"
    with made(bank, seed) as writer:
        writer.add_many([f"lesson among many {n}" for n in range(90)])
        alike = writer.add_many(["red red door", "red door red"])
        writer.merge_duplicates([Duplicates(survivor=alike[0], merged=(alike[1],))])
    with ExperienceBank(bank, embedder="hashing", namespace="other") as other:
        other.add("elsewhere")
    with ExperienceBank(bank) as writer:
        gone = [entry.id for entry in writer.entries()][:3]
        for id in gone:
            writer.remove(id)
        alike = writer.add_many(["blue blue door", "blue door blue"])
        writer.merge_duplicates([Duplicates(survivor=alike[0], merged=(alike[1],))])
        use = xp.Use(experience_id=alike[0].id, experience_version=1)
        writer.submit(xp.Trajectory(id="used", task="t", success=True, uses=(use,)))
        distilled(writer, "lesson late", "used")
        for number in range(6):
            ids = [entry.id for entry in writer.entries()]
            match draw.choice("aur"):
                case "a":
                    writer.add_many([f"lesson late {number}"] * 2)
                case "u":
                    writer.update(draw.choice(ids), "lesson late")
                case _:
                    writer.remove(draw.choice(ids[-9:]))
            if number == 3:
                writer.rollback(writer.head - 3)
    with ExperienceBank(without(bank, tmp_path / "plain"), read_only=True) as plain:
        wanted = asked(plain, random.Random(seed))
    assert any(one.uses or one.lineage for one in wanted[2])
    copies.clear()
    with ExperienceBank(bank, read_only=True) as reader:
        assert asked(reader, random.Random(seed)) == wanted and not copies
        assert not reader.damage and copies
        assert asked(reader, random.Random(seed)) == wanted


@pytest.mark.parametrize("spoil", ["nothing", "a vector", "a record", "a later commit"])
def test_a_writer_reads_its_entries_from_a_file_of_just_its_state(tmp_path, monkeypatch, spoil):
    with made(tmp_path / "bank", 1) as bank:
        distilled(bank, "lesson with an origin", "e1", instance="i1")
        distilled(bank, "proposed lesson", "e2", review=True)
    with ExperienceBank(without(tmp_path / "bank", tmp_path / "plain"), read_only=True) as plain:
        wanted = shown(plain)
    if spoil == "a later commit":
        with ExperienceBank(tmp_path / "bank", embedder="hashing", namespace="other") as other:
            other.add("elsewhere")
    elif spoil != "nothing":
        begin, _, _ = Mapped(place(tmp_path / "bank"))._sections[
            "vectors" if spoil == "a vector" else "records"
        ]
        with place(tmp_path / "bank").open("r+b") as stream:
            stream.seek(begin + 3)
            stream.write(b"?")
    read, true = [], tables.History.live
    monkeypatch.setattr(
        tables.History, "live", lambda *args, **more: read.append(args) or true(*args, **more)
    )
    with ExperienceBank(tmp_path / "bank") as writer:
        assert bool(read) == (spoil != "nothing")
        assert shown(writer) == wanted
        added = writer.add("one more lesson")
        assert writer.search("one more lesson")[0].experience.id == added.id


def test_a_damaged_part_of_the_past_is_answered_from_the_journal(tmp_path, copies):
    with made(tmp_path, 1, commits=80) as bank:
        wanted = [bank.history(), [bank.diff(one.id - 1, one.id) for one in bank.commits()]]
    raw, copied = place(tmp_path).read_bytes(), 0
    names = ("gone", "commits", "commits_ends", "commit_ids", "commit_change_ends")
    names += ("change_entries", "change_versions", "entry_changes", "entry_change_ends")
    for name in names:
        begin, end, _ = Mapped(place(tmp_path))._sections[name]
        for spot in (begin, (begin + end) // 2, end - 1):
            data = bytearray(raw)
            data[spot] ^= 1
            place(tmp_path).write_bytes(data)
            copies.clear()
            with ExperienceBank(tmp_path, read_only=True) as bank:
                found = [bank.history(), [bank.diff(of.id - 1, of.id) for of in bank.commits()]]
                assert found == wanted
            copied += bool(copies)
            place(tmp_path).write_bytes(raw)
    assert copied == 3 * len(names)


def test_opening_searching_and_listing_leave_the_journal_alone(tmp_path, copies):
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        bank.add_many([f"lesson {n}" for n in range(300)])
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
    with ExperienceBank(tmp_path, read_only=True) as bank:
        assert len(bank) == len(list(bank.entries())) == 300
        [hit] = bank.search("lesson 7")
        assert hit.experience.text == "lesson 7" and bank.get(hit.experience.id)
        assert bank.get("nobody") is None and not copies
        assert len(bank.commits()) == 1 and len(bank.history()) == 1 and not copies
        assert not bank.damage and len(bank.history()) == 1 and len(copies) == 1
    after = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
    assert after == before


def test_a_small_bank_has_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(FolderBank, "MAPPED_FROM", 3)
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        ids = [bank.add(f"lesson {n}").id for n in range(3)]
    assert place(tmp_path).exists()
    with ExperienceBank(tmp_path) as bank:
        bank.remove(ids[0])
    assert not place(tmp_path).exists()


def test_a_file_is_renewed_when_it_is_old(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "_FEW", 5)
    for number, is_new in enumerate([True, False, False, True]):
        with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
            bank.add_many([f"{number} {n}" for n in range(2)])
        assert (Mapped(place(tmp_path)).stamp.head == number + 1) == is_new


@pytest.mark.parametrize("what", ["flip", "zero", "cut", "grow"])
def test_a_damaged_file_is_never_read(tmp_path, what, monkeypatch):
    monkeypatch.setattr(mapped, "_BLOCK", 512)  # so that most blocks are whole
    with made(tmp_path / "bank", 1) as bank:
        distilled(bank, "lesson with an origin", "e1", instance="i1")
    with ExperienceBank(tmp_path / "bank", read_only=True) as bank:
        wanted = shown(bank)
    file, draw = place(tmp_path / "bank"), random.Random(0)
    raw = file.read_bytes()
    noticed = 0
    for _ in range(40):
        spot = draw.randrange(len(raw))
        data = bytearray(raw)
        match what:
            case "flip":
                data[spot] ^= 1 << draw.randrange(8)
            case "zero":
                data[spot : spot + 700] = bytes(len(data[spot : spot + 700]))
            case "cut":
                del data[spot:]
            case _:
                data += bytes(draw.randrange(1, 99))
        file.write_bytes(data)
        with ExperienceBank(tmp_path / "bank", read_only=True) as bank:
            assert shown(bank) == wanted
        try:
            Mapped(file).check()
        except BankError:
            noticed += 1
            assert [one.status for one in found(tmp_path / "bank")] == ["wrong"]
    assert noticed >= 30  # a zero may be one already


@pytest.mark.parametrize("name", ["order", "ids", "ids_ends", "gone", "entry_changes"])
def test_damage_found_while_later_changes_are_shown_is_answered_from_the_journal(
    tmp_path, monkeypatch, copies, name
):
    monkeypatch.setattr(folder_module, "_FEW", 10**6)
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        ids = [entry.id for entry in bank.add_many([f"lesson {n}" for n in range(30)])]
        bank.remove(ids[4])
    with ExperienceBank(tmp_path) as bank:
        bank.update(ids[7], "better")
        bank.rollback(1)  # the removed one comes back
    begin, end, _ = Mapped(place(tmp_path))._sections[name]
    with place(tmp_path).open("r+b") as stream:
        stream.seek(begin)
        stream.write(bytes(end - begin))
    with ExperienceBank(tmp_path, read_only=True) as bank:
        assert [entry.id for entry in bank.entries()] == ids and copies
        assert bank.search("lesson 7")[0].experience.id == ids[7]


def found(folder):
    return [one for one in checkup.examine(folder) if one.what.startswith("entries-")]


def test_doctor_says_whether_the_file_is_used(tmp_path):
    with made(tmp_path, 1) as bank:
        first = bank.head
    assert [one.status for one in found(tmp_path)] == ["ok"]
    raw = place(tmp_path).read_bytes()
    with ExperienceBank(tmp_path) as bank:
        bank.remove(next(bank.entries()).id)
    with erase.exclusive(tmp_path) as of:  # the history is another one now
        erase.erase(of, "default", erase.find(of, "default", id=erase.entries(of, "default")[0]))
    place(tmp_path).write_bytes(raw)
    assert [one.status for one in found(tmp_path)] == ["note"] and first


def test_a_file_of_another_state_or_bank_or_namespace_is_not_used(tmp_path, copies):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        with ExperienceBank(folder, embedder="hashing", store="exact") as bank:
            bank.add(f"of {folder.name}")
        with ExperienceBank(folder, embedder="hashing", store="exact", namespace="other") as bank:
            bank.add(f"of the other of {folder.name}")
    backup = (one / JOURNAL_NAME).read_bytes()
    swaps = [(place(two), place(one)), (place(one, "other"), place(one))]
    own = place(one).read_bytes()
    for source, target in swaps:
        target.write_bytes(source.read_bytes())
        with ExperienceBank(one, read_only=True) as bank:
            assert [entry.text for entry in bank.entries()] == ["of one"]
    place(one).write_bytes(own)
    copies.clear()
    with ExperienceBank(one, read_only=True) as bank:  # that of the other's commit is older
        assert [entry.text for entry in bank.entries()] == ["of one"] and not copies
    with ExperienceBank(one) as bank:
        bank.add("later")
        place(one).unlink()
    (one / JOURNAL_NAME).write_bytes(backup)  # now the file is of a later state than the journal
    with ExperienceBank(one, read_only=True) as bank:
        assert [entry.text for entry in bank.entries()] == ["of one"] and copies == [one]
    with ExperienceBank(one) as bank:
        bank.add("instead")
    with ExperienceBank(one, read_only=True) as bank:
        assert [entry.text for entry in bank.entries()] == ["of one", "instead"]


def test_the_journal_of_another_bank_is_refused_with_its_file(tmp_path):
    for name in ("one", "two"):
        with ExperienceBank(tmp_path / name, embedder="hashing", store="exact") as bank:
            bank.add(f"of {name}")
    for file in (JOURNAL_NAME, place(tmp_path / "one").name):
        shutil.copy(tmp_path / "two" / file, tmp_path / "one" / file)
    with pytest.raises(BankError, match=BANK_ID_NAME):
        ExperienceBank(tmp_path / "one", read_only=True)
    (tmp_path / "one" / BANK_ID_NAME).unlink()
    (tmp_path / "one" / JOURNAL_NAME).unlink()
    with pytest.raises(BankError, match=r"none beside .*\.map"):
        ExperienceBank(tmp_path / "one")


def test_a_damage_that_shows_later_is_answered_from_the_journal(tmp_path):
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        ids = [entry.id for entry in bank.add_many([f"lesson {n}" for n in range(400)])]
    begin, end, _ = Mapped(place(tmp_path))._sections["records"]
    raw = place(tmp_path).read_bytes()
    asks = {
        begin: lambda bank: bank.get(ids[0]).text,
        end - 1: lambda bank: list(bank.entries())[0].text,
        begin + 1: lambda bank: bank.search("lesson 0")[0].experience.text,
        100: lambda bank: bank.search("lesson 0")[0].experience.text,
    }
    for spot, ask in asks.items():
        with ExperienceBank(tmp_path, read_only=True) as bank:
            with place(tmp_path).open("r+b") as stream:
                stream.seek(spot)
                stream.write(bytes([raw[spot] ^ 1]))
            assert ask(bank) == "lesson 0" and len(bank) == 400
        place(tmp_path).write_bytes(raw)


def test_a_damaged_journal_is_named_when_it_is_first_read(tmp_path):
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        bank.add_many(["first lesson", "second lesson"])
    raw = (tmp_path / JOURNAL_NAME).read_bytes()
    assert raw.count(b"first lesson") == 1
    (tmp_path / JOURNAL_NAME).write_bytes(raw.replace(b"first lesson", b"first lessen"))
    with ExperienceBank(tmp_path, read_only=True) as bank:
        assert [entry.text for entry in bank.entries()] == ["first lesson", "second lesson"]
        assert "differs from its checksum" in str(bank.damage[0])
        assert [entry.text for entry in bank.entries()] == ["second lesson"]  # as a writer has it


def test_a_damaged_row_beyond_the_file_is_named_at_opening(tmp_path):
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        bank.add("first lesson")
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        bank.add_many(["later one", "later two"])
    raw = (tmp_path / JOURNAL_NAME).read_bytes()
    (tmp_path / JOURNAL_NAME).write_bytes(raw.replace(b"later one", b"later 0ne"))
    with ExperienceBank(tmp_path, read_only=True) as bank:
        assert [entry.text for entry in bank.entries()] == ["first lesson", "later two"]
        assert bank.damage


def test_a_reader_sees_what_an_open_or_killed_writer_acknowledged(tmp_path, copies):
    folder = tmp_path / "bank"
    with ExperienceBank(folder, embedder="hashing", store="exact") as bank:
        bank.add_many([f"lesson {n}" for n in range(9)])
    with ExperienceBank(folder) as writer:
        writer.add("second")
        before = {file.name for file in folder.iterdir()}
        with ExperienceBank(folder, read_only=True) as reader:
            assert [entry.text for entry in reader.entries()][8:] == ["lesson 8", "second"]
            writer.add("third")
            assert len(reader) == 10 and not copies
            assert before == {file.name for file in folder.iterdir()}
            assert len(reader.commits()) == 2 and len(reader) == 10 and not copies
            assert not reader.damage and len(reader.commits()) == 3  # it goes on with the copy
            assert len(reader) == 11
    code = """
        import os, signal, sys
        from experiential.bank.folder import FolderBank
        FolderBank.MAPPED_FROM = 1
        bank = FolderBank(sys.argv[1])
        bank.add("fourth")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL and (folder / f"{JOURNAL_NAME}-wal").stat().st_size
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.iterdir()}
    copies.clear()
    with ExperienceBank(folder, read_only=True) as reader:
        assert len(reader) == 12 and reader.search("fourth")[0].experience.text == "fourth"
        assert not copies
    after = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.iterdir()}
    assert before == after


def test_a_kill_while_the_file_is_written_leaves_the_old_one(tmp_path):
    folder = tmp_path / "bank"
    with ExperienceBank(folder, embedder="hashing", store="exact") as bank:
        bank.add("first")
    old = place(folder).read_bytes()
    code = """
        import os, signal, sys
        from experiential.bank import folder
        from experiential.bank.storage import mapped
        folder._FEW = 0
        folder.FolderBank.MAPPED_FROM = 1
        bank = folder.FolderBank(sys.argv[1])
        bank.add("second")
        mapped.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        bank.close()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    part = folder / f"{place(folder).name}.part"
    assert place(folder).read_bytes() == old and part.exists()
    with ExperienceBank(folder, read_only=True) as bank:
        assert [entry.text for entry in bank.entries()] == ["first", "second"]
    erase.drop_mapped(folder)
    assert not part.exists() and not place(folder).exists()


def test_a_full_disk_costs_the_file_alone(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapped.os, "fsync", full)
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        bank.add("first")
    assert "No space left" in caplog.text and not place(tmp_path).exists()
    with ExperienceBank(tmp_path, read_only=True) as bank:
        assert len(bank) == 1


def test_readers_beside_a_writer_that_comes_and_goes_see_whole_commits(tmp_path):
    code = """
        import sys
        from experiential.bank import folder
        folder._FEW = 3
        folder.FolderBank.MAPPED_FROM = 1
        number = 0
        while True:
            with folder.FolderBank(sys.argv[1], embedder="hashing", store="exact") as bank:
                for _ in range(3):
                    bank.add_many([f"{number} a", f"{number} b"])
                    print(number, flush=True)
                    number += 1
    """
    script, folder = tmp_path / "writer.py", tmp_path / "bank"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, str(script), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(25):
            seen = int(process.stdout.readline())
            with ExperienceBank(folder, read_only=True) as reader:
                texts = [entry.text for entry in reader.entries()]
                hits = reader.search(f"{seen} a", k=len(texts))
                assert {hit.experience.text for hit in hits} == set(texts)
            assert len(texts) >= 2 * (seen + 1)
            assert texts == [f"{i} {x}" for i in range(len(texts) // 2) for x in "ab"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_entries_above_the_store_are_mapped_too(tmp_path, monkeypatch):
    monkeypatch.setattr(FolderBank, "RESIDENT_LIMIT", 5)
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        bank.add_many([f"lesson {n}" for n in range(20)])
        bank.flush_index()
        assert bank._state.nearest.is_large
    assert len(Mapped(place(tmp_path))) == 20
    with ExperienceBank(tmp_path, read_only=True) as bank:
        assert [bank.search(f"lesson {n}")[0].experience.text for n in (0, 19)] == [
            "lesson 0",
            "lesson 19",
        ]


def played(bank, number, use):
    used = (xp.Use(experience_id=use.id, experience_version=use.version),)
    bank.submit(xp.Trajectory(id=f"e{number}", task="t", success=number % 2 == 0, uses=used))


def told(bank):
    """Return what a bank answers from the tables that no chain covers."""
    entries = list(bank.entries())
    asked = [Asked(id=one.id, version=one.version, query="lesson") for one in entries[:5]]
    return (
        bank.standings(asked),
        bank.queue.counts(),
        bank.episodes(),
        bank.trajectory("e1"),
        [bank.used_in(one.id) for one in entries[:5]],
        sorted(bank.ids()),
        bank.version(entries[0].id, 1),
    )


@pytest.fixture
def episodes(tmp_path):
    """Return a folder with episodes, an entry that was rewritten and one that was removed."""
    with ExperienceBank(tmp_path / "bank", embedder="hashing", store="exact") as bank:
        entries = bank.add_many([f"lesson {n}" for n in range(20)])
        for number in range(30):
            played(bank, number, entries[number % 5])
        bank.update(entries[0].id, "better")
        bank.remove(entries[19].id)
    return tmp_path / "bank"


def test_evidence_and_ids_are_read_without_a_copy(episodes, tmp_path, copies):
    with ExperienceBank(without(episodes, tmp_path / "plain"), read_only=True) as plain:
        wanted = told(plain)
    copies.clear()
    with ExperienceBank(episodes, read_only=True) as reader:
        assert told(reader) == wanted and not copies
        with ExperienceBank(episodes) as writer:  # from now on there is another state
            played(writer, 31, next(writer.entries()))
        assert len(reader.episodes()) == 31 and copies == [episodes]
    with pytest.raises(BankError, match="closed"):
        reader.episodes()


@pytest.mark.parametrize("table", ["uses", "trajectories", "queue", "versions"])
def test_a_damaged_row_is_named_by_what_reads_it(episodes, table):
    connection = sqlite3.connect(episodes / JOURNAL_NAME)
    column = {"queue": "attempts", "versions": "commit_id"}.get(table, "success")
    place = "rowid = (SELECT MIN(rowid) FROM main." + table + ")"
    with connection:
        connection.execute(f"UPDATE {table} SET {column} = 7 WHERE {place}")
    connection.close()
    with ExperienceBank(episodes, read_only=True) as reader:
        found = told(reader)
        assert table in {one.table for one in reader.damage}
        assert told(reader) == found  # all of it as the checked copy has it


def test_pages_that_hide_rows_are_noticed(episodes, copies):
    with ExperienceBank(episodes, read_only=True) as reader:
        wanted = reader.episodes()
    connection = sqlite3.connect(episodes / JOURNAL_NAME)
    statement = "SELECT rootpage FROM sqlite_master WHERE name = 'trajectories'"
    page = connection.execute(statement).fetchone()[0]
    connection.close()
    raw = bytearray((episodes / JOURNAL_NAME).read_bytes())
    count = (page - 1) * 4096 + 3  # of the cells, or of the pages below
    raw[count : count + 2] = (int.from_bytes(raw[count : count + 2], "big") - 1).to_bytes(2, "big")
    (episodes / JOURNAL_NAME).write_bytes(raw)
    with ExperienceBank(episodes, read_only=True) as reader:
        assert len(reader) == 19
        with pytest.raises(BankError, match="recover"):
            reader.episodes()
    assert wanted and copies


def ranking(bank, queries, n, **scope):
    rows = bank.nearest(queries, n, [Scope(**scope)] * len(queries))
    return [[(hit.item.id, round(hit.score, 5)) for hit in row] for row in rows]


def by_colour(texts):
    """One number other than 0 in each entry, so that no processor rounds a product otherwise."""
    found = np.array([["red" in text, "blue" in text, text == "key"] for text in texts], np.float32)
    found[:, 0] += found[:, 2]
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def test_entries_that_score_alike_stand_in_one_order_whoever_reads_them(tmp_path):
    """Those written alike since the file too, and where only some of the ties are wanted."""
    folder = tmp_path / "bank"
    alike = [xp.Experience(text="red key", kind=f"k{n}") for n in range(40)]
    with ExperienceBank(folder, embedder=by_colour, store="exact") as bank:
        bank.import_entries(alike, "a test")
    with ExperienceBank(folder, embedder=by_colour) as bank:
        for place in (30, 3, 17):  # in another order than that in which they were added
            bank.update(alike[place].id, f"blue key {place}")
            bank.update(alike[place].id, "red key")
        bank.remove(alike[5].id)
        bank.import_entries([xp.Experience(text="red key", kind="late")], "a test")
    queries = ["red key", "key", "red"] * 5
    with (
        ExperienceBank(folder, embedder=by_colour, read_only=True) as reader,
        ExperienceBank(
            without(folder, tmp_path / "plain"), embedder=by_colour, read_only=True
        ) as plain,
    ):
        assert isinstance(reader._state.entries, mapped.MappedEntries)
        for n in (1, 2, 4, 18, 31, 39, 99):
            assert ranking(reader, queries, n) == ranking(plain, queries, n)
            kinds = Where({"kind": [f"k{place}" for place in range(2, 32)]})
            assert ranking(reader, queries, n, where=kinds) == ranking(
                plain, queries, n, where=kinds
            )
        [row] = reader.nearest(["red key"], 5, [Scope()])
        assert [hit.item.kind for hit in row] == ["k0", "k1", "k2", "k3", "k4"]
        assert row[3].item.version == 3


def test_a_reader_parses_the_entries_that_it_chooses_among_and_no_other(tmp_path, monkeypatch):
    parsed, true = [], tables.parsed
    monkeypatch.setattr(tables, "parsed", lambda *given: parsed.append(given) or true(*given))
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        bank.add_many([f"push the lever {n}" for n in range(40)])
    with ExperienceBank(tmp_path) as bank:
        bank.add("pull the rope")
    with (
        ExperienceBank(tmp_path, read_only=True) as bank,
        ExperienceManager(bank, retrieval={"strategy": "nearest", "floor": -1.0}) as manager,
    ):
        parsed.clear()  # the entry above the file was read
        [hit] = manager.search("push the lever 7")
        assert hit.experience.text == "push the lever 7" and len(parsed) == 1


def test_damage_of_an_entry_that_nobody_has_looked_at_is_answered_from_the_journal(tmp_path):
    """A search compares the checksums of all that it finds, and reads what is looked at later."""
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        entries = bank.add_many([f"lesson {n} " + "x" * 1900 for n in range(90)])
    begin, _, _ = Mapped(place(tmp_path))._sections["records"]
    with ExperienceBank(tmp_path, read_only=True) as bank:
        with place(tmp_path).open("r+b") as stream:
            stream.seek(begin + 66 * 2100)
            stream.write(b"?")
        [row] = bank.nearest(["lesson 0"], 90, [Scope()])
        assert not isinstance(bank._state.entries, mapped.MappedEntries)
        assert {hit.item.id: hit.item.text for hit in row} == {of.id: of.text for of in entries}


@pytest.mark.parametrize("ask", ["standings", "standings_near"])
def test_standings_of_a_damaged_file_are_those_of_the_journal(tmp_path, ask):
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        entries = bank.add_many([f"lesson {n}" for n in range(300)])
        played(bank, 1, entries[0])
        wanted = bank.standings_near("lesson", [(one, 0.9) for one in entries])
    begin, end, _ = Mapped(place(tmp_path))._sections["records"]
    with ExperienceBank(tmp_path, read_only=True) as bank:
        with place(tmp_path).open("r+b") as stream:
            stream.seek((begin + end) // 2)
            stream.write(b"?")
        asked = [Asked(id=one.id, version=1, relevance=0.9, query="lesson") for one in entries]
        if ask == "standings":
            found = [one.model_copy(update={"age": 0}) for one in bank.standings(asked)]
        else:
            found = bank.standings_near("lesson", [(one, 0.9) for one in entries])
        assert found == wanted and not isinstance(bank._state.entries, mapped.MappedEntries)
