"""What a change of a large bank costs follows the change; the answers are those of whole states."""

import random

import pytest

import experiential as xp
from experiential.bank.bank import ExperienceBank
from experiential.bank.storage import tables
from experiential.bank.storage.tables import difference
from experiential.errors import BankError


def made(folder, seed, commits=25):
    """Return a bank with a random history: adds, rewrites, removals and rollbacks."""
    draw = random.Random(seed)
    bank = ExperienceBank(folder, embedder="hashing")
    for number in range(commits):
        ids = [entry.id for entry in bank.entries()]
        what = draw.choice(["add", "update", "remove", "rollback", "update", "remove"])
        if what == "add" or len(ids) < 3:
            bank.add_many([f"lesson {number} {one}" for one in range(3)])
        elif what == "update":
            bank.update(draw.choice(ids), f"better {number}")
        elif what == "remove":
            bank.remove(draw.choice(ids))
        else:
            bank.rollback(draw.randrange(bank.head + 1))
    return bank


@pytest.mark.parametrize("seed", range(4))
def test_a_difference_is_that_of_the_whole_states(tmp_path, seed):
    with made(tmp_path, seed) as bank:
        bank.note_retrievals([entry.id for entry in bank.entries()])
        heads = [0, *(commit.id for commit in bank.commits())]
        draw = random.Random(seed)
        for a, b in [(draw.choice(heads), draw.choice(heads)) for _ in range(60)]:
            assert bank.diff(a, b) == difference(bank.at(a).entries(), bank.at(b).entries())
        with pytest.raises(BankError, match="commit id"):
            bank.diff(0, bank.head + 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_rollback_restores_the_entries_in_their_order(tmp_path, seed):
    with made(tmp_path / "bank", seed) as bank:
        for commit in random.Random(seed).sample([one.id for one in bank.commits()], 8):
            wanted = list(bank.at(commit).entries())
            said = bank.rollback(commit)
            assert (said.cause, said.ref, said.id) == ("rollback", str(commit), bank.head)
            assert list(bank.entries()) == wanted
            with ExperienceBank(tmp_path / "bank", read_only=True) as again:
                assert list(again.entries()) == wanted


def test_a_small_change_of_a_large_bank_parses_only_what_changed(tmp_path, monkeypatch):
    with xp.ExperienceBank(tmp_path, embedder="hashing") as bank:
        ids = [entry.id for entry in bank.add_many([f"lesson {n}" for n in range(300)])]
        head = bank.head
        bank.update(ids[7], "better")
        bank.remove(ids[8])
        parsed, true = [], tables.parsed

        def counted(kind, record, id=""):
            parsed.append(id)
            return true(kind, record, id)

        monkeypatch.setattr(tables, "parsed", counted)
        found = bank.diff(head, bank.head)
        assert [entry.id for entry in found.removed] == [ids[8]]
        assert [pair.new.text for pair in found.changed] == ["better"]
        bank.rollback(head)
        assert len(parsed) < 10 and bank.get(ids[7]).text == "lesson 7"
