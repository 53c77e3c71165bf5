"""Opening a bank reads its entries without parsing them; what is read later is the same."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

import experiential as xp
from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.storage import tables
from experiential.bank.storage.checksums import checksum
from experiential.bank.storage.journal import JOURNAL_NAME
from experiential.bank.storage.tables import Live
from experiential.errors import BankError
from experiential.types import Experience
from tests.test_history_cost import made


@pytest.fixture
def parsed(monkeypatch):
    """Return the list of records that were parsed since."""
    seen, true = [], tables.parsed

    def counted(kind, record, id=""):
        seen.append(record)
        return true(kind, record, id)

    monkeypatch.setattr(tables, "parsed", counted)
    return seen


@pytest.mark.parametrize("read_only", [True, False])
def test_opening_parses_no_entry_and_a_search_parses_its_hits(tmp_path, parsed, read_only):
    with xp.ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        bank.add_many([f"lesson {n}" for n in range(300)])
    with xp.ExperienceBank(tmp_path, read_only=read_only) as bank:
        assert len(bank) == 300 and not parsed
        assert bank.search("lesson 7", k=3)[0].experience.text == "lesson 7"
        assert len(parsed) == 3
        if not read_only:
            bank.add("lesson 300")
        assert len(parsed) == 3
        assert len(list(bank.entries())) == 300 + (not read_only)
        assert len(parsed) == 300


@pytest.mark.parametrize("seed", range(4))
def test_a_bank_opened_again_answers_as_before(tmp_path, seed):

    def found(bank):  # all, because entries written alike score alike, in the order of writing
        rows = bank.search(["lesson 3 1", "better 7", "lesson 12"], k=99)
        return [{hit.experience.id: round(hit.score, 5) for hit in row} for row in rows]

    with made(tmp_path, seed) as bank:
        bank.add("tagged", metadata={"proposed": True, "tags": ["red"]})
        commits = [0, *(one.id for one in bank.commits())]
        entries, hits = list(bank.entries()), found(bank)
        states = [list(bank.at(commit).entries()) for commit in commits]
    with ExperienceBank(tmp_path, read_only=True) as again:
        assert found(again) == hits
        assert [hit.experience.text for hit in again.search("x", where={"tags": "red"})] == [
            "tagged"
        ]
        assert list(again.entries()) == entries
        assert [list(again.at(commit).entries()) for commit in commits] == states
        middle = again.at(commits[len(commits) // 2])
        assert {hit.experience.id for hit in middle.search("lesson", k=99)} == {
            one.id for one in middle.entries()
        }


def distilled(bank, text, id, *, review=False):
    """Let an extractor write one text for the task "t"; return the entries written."""
    found = xp.parse_operations(f'<answer>[{{"op": "add", "text": "{text}"}}]</answer>')
    of = xp.Trajectory(id=id, task="t", success=True)
    return bank.apply(xp.Distillation(parsed=found), trajectory=of, shown=[], review=review)


def test_no_search_finds_a_proposal_after_opening(tmp_path):
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        bank.add_many(["red door", "blue door", "green door"])
        [proposal] = distilled(bank, "black door", "e1", review=True)
    for read_only in (True, False):
        with ExperienceBank(tmp_path, read_only=read_only) as bank:
            found = {hit.experience.text for hit in bank.search("door", k=9)}
            assert found == {"red door", "blue door", "green door"}
    with ExperienceBank(tmp_path) as bank:
        bank.approve(proposal.id)
        assert len(bank.search("door", k=9)) == 4


def test_a_text_written_before_opening_is_not_written_twice(tmp_path):
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        [first] = distilled(bank, "Push.", "e1")
        other = bank.add("Pull.", task="t")
    with ExperienceBank(tmp_path) as bank:
        bank.update(other.id, "Turn.")  # before anybody asks for an equal entry
        [again] = distilled(bank, "Push.", "e2")
        assert (again.id, again.provenance.said) == (first.id, 2)
        [turned] = distilled(bank, "Turn.", "e3")
        assert turned.id == other.id
        [pulled] = distilled(bank, "Pull.", "e4")
        assert pulled.id not in (first.id, other.id) and len(bank) == 3


def test_a_search_parses_the_entries_that_it_chooses_among_and_no_other(tmp_path, parsed):
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        bank.add_many([f"push the lever {n}" for n in range(40)])
    parsed.clear()  # the index was written
    with (
        ExperienceBank(tmp_path, embedder="hashing") as bank,
        ExperienceManager(bank, retrieval={"strategy": "nearest", "floor": -1.0}) as manager,
    ):
        [hit] = manager.search("push the lever 7")
        assert hit.experience.text == "push the lever 7" and len(parsed) == 1


def test_two_threads_may_ask_for_an_entry_at_once(monkeypatch):
    entry = Experience(text="Push.", task="t")
    together, true = Barrier(2, timeout=10), tables.parsed

    def parsed(kind, record, id=""):
        together.wait()  # until the other thread parses the same record
        return true(kind, record, id)

    monkeypatch.setattr(tables, "parsed", parsed)
    live = Live(entry.model_dump_json(), frozenset())
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(lambda: live.experience) for _ in range(2)]
        assert [one.result() for one in asked] == [entry, entry]


def test_a_bank_whose_store_answers_leaves_the_vectors_in_the_journal(tmp_path, monkeypatch):
    monkeypatch.setattr(FolderBank, "RESIDENT_LIMIT", 5)
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        bank.add_many([f"lesson {n}" for n in range(20)])
        bank.flush_index()
        hits = bank.search("lesson 7", k=3)
        history = bank._history
        for most, has_vectors in ((5, False), (20, True)):
            found = history.live(bank.head, most_vectors=most)
            assert (len(found), len(found.vectors) >= 20) == (20, has_vectors)
    shapes, true = [], tables.History.live
    monkeypatch.setattr(
        tables.History,
        "live",
        lambda *args, **kwargs: shapes.append(found := true(*args, **kwargs)) or found,
    )
    with ExperienceBank(tmp_path) as bank:
        assert [len(found.vectors) for found in shapes] == [0]
        found = bank.search("lesson 7", k=3)
        assert [hit.experience for hit in found] == [hit.experience for hit in hits]


def test_damaged_versions_are_left_out_with_their_vectors(tmp_path):
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        entries = bank.add_many([f"lesson {n}" for n in range(6)])
    with sqlite3.connect(tmp_path / JOURNAL_NAME) as connection:
        connection.execute(
            "UPDATE versions SET origins = '[1]' WHERE id IN (?, ?)", (entries[0].id, entries[3].id)
        )
    connection.close()
    with ExperienceBank(tmp_path, read_only=True) as bank:
        kept = [entry for number, entry in enumerate(entries) if number not in (0, 3)]
        assert [entry.id for entry in bank.entries()] == [entry.id for entry in kept]
        for entry in kept:
            [hit] = bank.search(entry.text)
            assert hit.experience.id == entry.id and hit.score > 0.999
        # More are named than there are, and those that there are may be held.
        assert len(bank._history.live(bank.head, most_vectors=5).vectors) == 4


def test_a_bank_whose_versions_are_all_damaged_opens_empty(tmp_path):
    with ExperienceBank(tmp_path, embedder="hashing", store="exact") as bank:
        bank.add_many(["Push.", "Pull."])
    with sqlite3.connect(tmp_path / JOURNAL_NAME) as connection:
        connection.execute("UPDATE versions SET origins = '[1]'")
    connection.close()
    with ExperienceBank(tmp_path) as bank:
        assert len(bank.damage) >= 2 and not len(bank) and not bank.search("Push.")
        bank.add("Turn.")
        assert len(bank.search("Push.", k=3)) == 1


def test_vectors_of_two_lengths_are_refused_in_one_line(tmp_path):
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        ids = [entry.id for entry in bank.add_many(["Push.", "Pull.", "Turn."])]
    with sqlite3.connect(tmp_path / JOURNAL_NAME) as connection:
        for id, count in zip(ids, (200, 312, 256), strict=True):  # 768 in all, as before
            row = connection.execute(
                "SELECT namespace, id, version, commit_id, record, vector, origins FROM versions"
                " WHERE id = ?",
                (id,),
            ).fetchone()
            vector = np.zeros(count, dtype=np.float32).tobytes()
            own = checksum("versions", (*row[:5], vector, row[6]))
            connection.execute(
                "UPDATE versions SET vector = ?, checksum = ? WHERE id = ?", (vector, own, id)
            )
        connection.execute("UPDATE commits SET chain = NULL")
    connection.close()
    with pytest.raises(BankError, match="vectors of one length"):
        ExperienceBank(tmp_path, read_only=True)
