"""An index store from outside: a small class that the bank follows, rebuilds and does without."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.bank.index import follower, indexed
from experiential.bank.storage.checkup import examine
from experiential.cli import main
from experiential.cli.errors import run_app
from experiential.errors import BankError, ConfigError

MODULE = '''
import json
import numpy as np
from experiential.bank.index.store import Indexed

class Flat:
    """Compare with every vector of one file."""

    away = False
    refused = None

    def __init__(self, folder, name):
        if self.refused:
            raise self.refused
        if self.away:
            raise ConnectionError("away")
        self.file = folder / f"{name}.json"
        known = json.loads(self.file.read_text()) if self.file.exists() else ["", {}]
        self.known_mark, self.rows = known

    def mark(self):
        return self.known_mark

    def __len__(self):
        return len(self.rows)

    def write(self, put, removed, mark):
        if (self.file.parent / "damage").exists():
            raise OSError("no such page")
        for one in put:
            self.rows[one.experience.id] = [one.experience.version, one.vector.tolist()]
        for id in removed:
            self.rows.pop(id, None)
        self.known_mark = mark
        self.file.write_text(json.dumps([mark, self.rows]))

    def search(self, queries, n, where):
        if self.away or (self.file.parent / "damage").exists():
            raise ConnectionError("away")
        scores = queries @ np.array([vector for _, vector in self.rows.values()]).T
        ids = list(self.rows)
        return [
            [Indexed(ids[i], self.rows[ids[i]][0], float(row[i])) for i in np.argsort(-row)[:n]]
            for row in scores
        ]

    def fetch(self, ids):
        known = {id: self.rows[id] for id in ids if id in self.rows}
        return {id: (version, np.array(vector)) for id, (version, vector) in known.items()}

    def clear(self):
        self.known_mark, self.rows = "", {}
        self.file.unlink(missing_ok=True)

    def close(self):
        pass
'''
FLAT = "foreign_store:Flat"


class LargeBank(FolderBank):
    """The store answers from the sixth entry on."""

    RESIDENT_LIMIT = 5


@pytest.fixture
def flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class of the foreign module."""
    (tmp_path / "foreign_store.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(follower, "PAUSES", (0.01, 0.05))
    import foreign_store  # type: ignore[import-not-found]

    yield foreign_store.Flat
    del sys.modules["foreign_store"]


TEXTS = [f"note{i} about door{i}" for i in range(20)]


def found(bank: FolderBank, query: str) -> str:
    return bank.search(query)[0].experience.text


def fill(folder: Path, check: Callable[[LargeBank], None] = lambda bank: None) -> None:
    with LargeBank(folder, embedder="hashing", store=FLAT) as bank:
        bank.add_many(TEXTS)
        bank.flush_index()
        assert bank._state.nearest.is_large and not bank._state.nearest._index.rows
        check(bank)


def test_a_foreign_store_answers_and_is_remembered(flat: Any, tmp_path: Path) -> None:
    fill(tmp_path / "bank")
    with LargeBank(tmp_path / "bank") as bank:
        assert [found(bank, text) for text in TEXTS] == TEXTS
        bank.update(bank.search(TEXTS[3])[0].experience.id, "rewritten since")
        bank.remove(bank.search(TEXTS[4])[0].experience.id)
        assert found(bank, "rewritten since") == "rewritten since"
        assert found(bank, TEXTS[4]) != TEXTS[4]
        lessons = bank.search(TEXTS[7], where={"kind": "lesson"})
        assert lessons[0].experience.text == TEXTS[7], "a filter that the store ignores still holds"
        assert bank.search(TEXTS[7], where={"kind": "insight"}) == []
    assert not (tmp_path / "bank" / "chroma").exists()
    assert all(finding.status == "ok" for finding in examine(tmp_path / "bank"))


def test_namespaces_share_its_folder_and_nothing_else(flat: Any, tmp_path: Path) -> None:
    for namespace, text in (("one", "red"), ("two", "blue")):
        with LargeBank(tmp_path / "bank", namespace=namespace, embedder="hashing", store=FLAT) as b:
            b.add(text)
    assert len(list((tmp_path / "bank").glob("index-foreign_store-Flat/*.json"))) == 2


def test_a_damaged_file_is_set_aside_and_the_store_made_again(flat: Any, tmp_path: Path) -> None:
    fill(tmp_path / "bank")
    [file] = (tmp_path / "bank").glob("index-*/experience-*.json")
    file.write_text("{")
    [wrong] = [finding for finding in examine(tmp_path / "bank") if finding.status == "wrong"]
    assert "cannot be opened" in wrong.found and "bank rebuild" in wrong.mend
    with LargeBank(tmp_path / "bank") as bank:
        bank.flush_index()
        assert [found(bank, text) for text in TEXTS] == TEXTS and bank._state.nearest.is_large
    assert list((tmp_path / "bank").glob("index-*.damaged-*"))
    assert all(finding.status == "ok" for finding in examine(tmp_path / "bank"))


def test_of_folders_set_aside_the_last_is_kept(
    flat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "bank")
    for damage in "{[<":
        [file] = (tmp_path / "bank").glob("index-foreign_store-Flat/experience-*.json")
        file.write_text(damage)
        caplog.clear()
        assert [one.found for one in examine(tmp_path / "bank") if one.status == "wrong"]
        assert not caplog.records, "the doctor sets nothing aside"
        with LargeBank(tmp_path / "bank") as bank:
            bank.flush_index()
        [said] = [record.message for record in caplog.records if "set aside" in record.message]
        assert "\n" not in said
        [aside] = (tmp_path / "bank").glob("index-*.damaged-*")
        assert aside.name in said and (aside / file.name).read_text() == damage


@pytest.mark.parametrize("use", ["close", "search", "rebuild", "follow"])
def test_a_store_that_opens_and_then_fails_is_made_again(
    flat: Any, tmp_path: Path, use: str
) -> None:
    fill(tmp_path / "bank")
    [folder] = (tmp_path / "bank").glob("index-*")
    (folder / "damage").touch()
    with LargeBank(tmp_path / "bank") as bank:
        if use == "search":
            for _ in range(2):
                assert [found(bank, text) for text in TEXTS] == TEXTS
                bank.flush_index()
            assert bank._state.nearest.is_large
        elif use == "rebuild":
            assert bank.rebuild() == len(TEXTS)
        else:
            bank.add("one more")
        if use == "follow":
            assert bank._follower is not None
            bank._follower.wake()
            until = time.monotonic() + 10
            while bank._follower.is_behind() and time.monotonic() < until:
                time.sleep(0.01)
            assert not (folder / "damage").exists()
    assert not (folder / "damage").exists()
    assert all(finding.status == "ok" for finding in examine(tmp_path / "bank"))


@pytest.mark.parametrize("reason", [BankError("not in a fork"), ImportError("no such package")])
def test_a_store_that_cannot_run_here_keeps_its_folder(
    flat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Exception
) -> None:
    fill(tmp_path / "bank")
    [file] = (tmp_path / "bank").glob("index-*/experience-*.json")
    before = file.read_bytes()
    monkeypatch.setattr(flat, "refused", reason)
    with LargeBank(tmp_path / "bank") as bank:
        assert [found(bank, text) for text in TEXTS] == TEXTS
        with pytest.raises(BankError, match=str(reason)):
            bank.flush_index()
    assert file.read_bytes() == before and not list((tmp_path / "bank").glob("*.damaged-*"))


def test_the_bank_answers_from_memory_while_the_store_is_away(
    flat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(bank: LargeBank) -> None:
        monkeypatch.setattr(flat, "away", True)
        assert [found(bank, text) for text in TEXTS] == TEXTS
        assert not bank._state.nearest.is_large
        bank.add("written meanwhile")
        monkeypatch.setattr(flat, "away", False)
        bank.flush_index()
        assert bank._state.nearest.is_large and found(bank, "written meanwhile").endswith("while")

    fill(tmp_path / "bank", lose)


def test_an_exact_bank_has_no_index_at_all(tmp_path: Path) -> None:
    with LargeBank(tmp_path / "bank", embedder="hashing", store="exact") as bank:
        bank.add_many(TEXTS)
    with LargeBank(tmp_path / "bank") as bank:
        bank.flush_index()
        assert bank.rebuild() == 20 and [found(bank, text) for text in TEXTS] == TEXTS
        assert not bank._state.nearest.is_large
    assert not (tmp_path / "bank" / "chroma").exists()
    assert all(finding.status == "ok" for finding in examine(tmp_path / "bank"))
    with LargeBank(tmp_path / "bank", store="chroma") as bank:
        bank.flush_index()
        assert bank._state.nearest.is_large and found(bank, TEXTS[9]) == TEXTS[9]


@pytest.mark.parametrize(
    ("store", "match"),
    [
        ("qdrant://x", "the address of a Chroma server like"),
        ("crhoma", "did you mean 'chroma'"),
        ("no_such_module:Store", "Expected to import 'no_such_module'"),
        ("foreign_store:Falt", "did you mean 'Flat'"),
    ],
)
def test_a_wrong_store_is_refused_before_anything_is_written(
    flat: Any, tmp_path: Path, store: str, match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=match):
        xp.ExperienceBank(tmp_path / "bank", embedder="hashing", store=store)
    fill(tmp_path / "bank")
    command = ["bank", "rebuild", str(tmp_path / "bank"), "--store", store, "--yes"]
    assert run_app(main.app, command) == 2
    assert len(capsys.readouterr().err.splitlines()) <= 3, "a line, perhaps broken by the width"
    with LargeBank(tmp_path / "bank") as bank:
        assert bank.search(TEXTS[0]) and np.isclose(bank.search(TEXTS[0])[0].score, 1.0, atol=1e-3)


def test_a_recent_entry_does_not_take_the_place_of_a_nearer_one_in_the_store(
    flat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is asked for two of three hits; the third is in the store, too."""

    def check(bank: LargeBank) -> None:
        monkeypatch.setattr(indexed, "_MOST", 2)
        bank.add("far away from all of these")
        texts = {hit.experience.text for hit in bank.search("about door", k=3)}
        assert len(texts) == 3 and "far away from all of these" not in texts

    fill(tmp_path / "bank", check)
