"""FAISS as the index store of a bank: found again after updates, kills, damage and reopening."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.bank.index import site
from experiential.bank.index.chroma import ChromaStore
from experiential.bank.storage.checkup import examine
from experiential.errors import BankError, MissingExtraError

faiss = pytest.importorskip("faiss", reason="needs the extra faiss")
from experiential.bank.index.graph import FaissStore  # noqa: E402


class Scattered:
    """Embed each text as a random direction of its own, so that the nearest is never in doubt."""

    id = "scattered"

    def __call__(self, texts: list[str]) -> np.ndarray:
        rows = [np.random.default_rng(list(text.encode())).standard_normal(32) for text in texts]
        return np.array([row / np.linalg.norm(row) for row in rows], dtype=np.float32)


TEXTS = [f"note {number}" for number in range(400)]


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store answers from the sixth entry on."""
    monkeypatch.setattr(FaissStore, "pays_from", 5)


def opened(folder: Path) -> FolderBank:
    return FolderBank(folder, embedder=Scattered(), store="faiss")


def found(bank: FolderBank, text: str) -> str:
    return bank.search(text)[0].experience.text


def asks_the_graph(bank: FolderBank) -> bool:
    return bank._state.nearest.is_large and not bank._state.nearest._index.rows


def fill(folder: Path) -> None:
    with opened(folder) as bank:
        bank.add_many(TEXTS)
        bank.flush_index()
        assert asks_the_graph(bank)


def test_a_graph_answers_and_is_read_again(tmp_path: Path) -> None:
    fill(tmp_path)
    files = {file.name for file in tmp_path.glob("index-faiss/*/*")}
    assert files == {"graph.faiss", "rows.json"}
    with FolderBank(tmp_path, embedder=Scattered()) as bank:
        assert asks_the_graph(bank) and [found(bank, text) for text in TEXTS] == TEXTS
        many = bank.search(TEXTS, k=3)
        assert [hits[0].experience.text for hits in many] == TEXTS
        assert all(len(hits) == 3 and hits[0].score > 0.999 for hits in many)
        bank.update(bank.search(TEXTS[3])[0].experience.id, "rewritten")
        bank.remove(bank.search(TEXTS[4])[0].experience.id)
        bank.flush_index()
        assert asks_the_graph(bank) and found(bank, "rewritten") == "rewritten"
        assert bank.search(TEXTS[3])[0].score < 0.9 > bank.search(TEXTS[4])[0].score
        assert bank.search(TEXTS[7], where={"kind": "lesson"})[0].experience.text == TEXTS[7]
    assert not (tmp_path / "chroma").exists()
    assert all(finding.status == "ok" for finding in examine(tmp_path))


def test_old_versions_do_not_pile_up_and_hide_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as bank:
        ids = [entry.id for entry in bank.add_many(TEXTS[:40])]
        for turn in range(5):
            for number, id in enumerate(ids):
                bank.update(id, f"turn {turn} of {number}")
            bank.flush_index()
            texts = [f"turn {turn} of {number}" for number in range(40)]
            assert asks_the_graph(bank) and [found(bank, text) for text in texts] == texts
        assert bank._follower is not None
        store = bank._follower.opened().store
        assert isinstance(store, FaissStore) and len(store) == 40
        assert store._index.ntotal == len(store._items) <= 64 + 2 * 40
        for id in ids:
            bank.remove(id)
        bank.flush_index()
        assert len(store) == 0 and bank.search("turn") == []
        bank.add_many(TEXTS[:10])
        bank.flush_index()
        assert [found(bank, text) for text in TEXTS[:10]] == TEXTS[:10]


def test_what_a_killed_process_had_not_saved_comes_from_the_journal(tmp_path: Path) -> None:
    with opened(tmp_path / "bank") as bank:
        bank.add_many(TEXTS[:200])
        bank.flush_index()
        assert not list((tmp_path / "bank").glob("index-faiss/*/*")), "saved when closed"
        shutil.copytree(tmp_path / "bank", tmp_path / "cut")
    for folder in ("cut", "bank"):
        with FolderBank(tmp_path / folder, embedder=Scattered()) as bank:
            assert [found(bank, text) for text in TEXTS[:200]] == TEXTS[:200]
            bank.flush_index()
            assert asks_the_graph(bank) and found(bank, TEXTS[7]) == TEXTS[7]
        assert all(finding.status == "ok" for finding in examine(tmp_path / folder))


@pytest.mark.parametrize("name", ["graph.faiss", "rows.json"])
@pytest.mark.parametrize("how", ["scrambled", "cut", "deleted"])
def test_a_damaged_file_is_set_aside_and_the_graph_made_again(
    tmp_path: Path, name: str, how: str
) -> None:
    fill(tmp_path)
    [file] = tmp_path.glob(f"index-faiss/*/{name}")
    content = bytearray(file.read_bytes())
    content[100:4196] = np.random.default_rng(0).bytes(4096)
    file.write_bytes(content[: len(content) // 2] if how == "cut" else content)
    if how == "deleted":
        file.unlink()
    with FolderBank(tmp_path, embedder=Scattered()) as bank:
        assert [found(bank, text) for text in TEXTS[:20]] == TEXTS[:20]
        bank.flush_index()
        assert asks_the_graph(bank) and [found(bank, text) for text in TEXTS] == TEXTS
    assert len(list(tmp_path.glob("index-faiss.damaged-*"))) == 1
    assert all(finding.status == "ok" for finding in examine(tmp_path))


def test_searches_beside_a_writer_are_right(tmp_path: Path) -> None:
    fill(tmp_path)
    with FolderBank(tmp_path, embedder=Scattered()) as bank:
        ids = [bank.search(text)[0].experience.id for text in TEXTS[:100]]

        def write() -> None:
            for turn in range(3):
                for id in ids:
                    bank.update(id, f"turn {turn} of {id}")
                bank.flush_index()

        writer = threading.Thread(target=write)
        writer.start()
        while writer.is_alive():
            assert [found(bank, text) for text in TEXTS[300:310]] == TEXTS[300:310]
        writer.join()
        assert found(bank, f"turn 2 of {ids[0]}") == f"turn 2 of {ids[0]}"


def test_a_missing_package_is_named_and_keeps_no_bank_shut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "bank")
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(site, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"experiential-rl\[faiss\]"):
        xp.ExperienceBank(tmp_path / "new", embedder=Scattered(), store="faiss")
    with FolderBank(tmp_path / "bank", embedder=Scattered()) as bank:
        assert [found(bank, text) for text in TEXTS] == TEXTS
        with pytest.raises(BankError, match=r"experiential-rl\[faiss\]"):
            bank.flush_index()
    assert not list((tmp_path / "bank").glob("*.damaged-*"))


def test_each_store_says_from_which_size_it_pays(tmp_path: Path) -> None:
    with FolderBank(tmp_path / "chroma", embedder="hashing") as bank:
        bank.add_many(TEXTS)
        bank.flush_index()
        assert not bank._state.nearest.is_large
        assert bank._state.nearest._limit == ChromaStore.pays_from
    at_a_server = site.Site("http://127.0.0.1:8000", "name", None)
    assert at_a_server.pays_from() == ChromaStore.pays_from > 100_000
