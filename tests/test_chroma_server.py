"""Chroma as a server given by its address: a real one, that goes and comes back."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.bank.index import follower
from experiential.bank.index.chroma import TOKEN_VARIABLE
from experiential.bank.index.site import checked_store
from experiential.bank.index.store import IndexLostError
from experiential.cli import main
from experiential.cli.errors import run_app


class Server:
    """A Chroma server over one folder, on one port of this machine; it may be killed and started
    again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run it, and wait until it answers."""
        command = [
            str(Path(sysconfig.get_path("scripts")) / "chroma"),
            "run",
            "--path",
            str(self.folder),
        ]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        quiet = {**os.environ, "ANONYMIZED_TELEMETRY": "False", "CHROMA_TELEMETRY": "0"}
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=quiet,
            cwd=self.folder.parent,
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/api/v2/heartbeat", timeout=5).status_code == 200:
                    return
            assert self._process.poll() is None, "chroma run ended"
            time.sleep(0.02)
        raise AssertionError("chroma run does not answer")

    def kill(self) -> None:
        """As a power cut would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def collections(self) -> dict[str, int]:
        """What it holds: the number of entries by collection."""
        import chromadb

        client = chromadb.HttpClient(host="127.0.0.1", port=self.port)
        try:
            return {one.name: one.count() for one in client.list_collections()}
        finally:
            client.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("chroma-server") / "data")
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(kept: Server) -> Server:
    """A server that runs, with nothing in it."""
    kept.kill()
    shutil.rmtree(kept.folder, ignore_errors=True)
    kept.start()
    return kept


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "bank"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again soon; no test counts on how soon."""
    monkeypatch.setattr(follower, "PAUSES", (0.01, 0.05))


def spread(texts: list[str]) -> Any:
    """Vectors far from each other. Chroma's graph leaves some of many alike ones out, and that is
    not what is tested here.
    """
    return np.stack(
        [np.random.default_rng(zlib.crc32(text.encode())).normal(size=64) for text in texts]
    )


class SmallBank(FolderBank):
    """All of it in memory."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, embedder=spread, **options)


class LargeBank(SmallBank):
    """Chroma answers from the 21st entry on."""

    RESIDENT_LIMIT = 20


TEXTS = [f"note{i} about door{i}" for i in range(60)]


def found(bank: Any, query: str, k: int = 1) -> list[str]:
    return [hit.experience.text for hit in bank.search(query, k=k)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


# While it is there


def test_vectors_go_to_the_server_and_the_journal_stays(server: Server, folder: Path) -> None:
    with LargeBank(folder, store=server.url) as bank:
        entries = bank.add_many(TEXTS)
        bank.flush_index()
        assert bank._state.nearest.is_large and len(bank._state.nearest._index.rows) == 0, (
            "the server answers, and nothing is held here"
        )
        assert found(bank, TEXTS[31]) == [TEXTS[31]]
        bank.update(entries[31].id, "something else entirely")
        bank.remove(entries[32].id)
        assert found(bank, "something else entirely") == ["something else entirely"]
        assert TEXTS[32] not in found(bank, TEXTS[32], k=10)
        bank.flush_index()
        assert (
            found(bank, "something else entirely") == ["something else entirely"]
            and len(found(bank, "note", k=10)) == 10
        )
    assert list(server.collections().values()) == [59]
    assert not (folder / "chroma").exists()


def test_banks_and_namespaces_have_collections_of_their_own(server: Server, tmp_path: Path) -> None:
    for path, namespace, count in (
        ("one", "default", 1),
        ("one", "other", 2),
        ("two", "default", 3),
    ):
        with SmallBank(tmp_path / path, namespace=namespace, store=server.url) as bank:
            bank.add_many(TEXTS[:count])
    assert sorted(server.collections().values()) == [1, 2, 3]


def test_the_bank_remembers_its_server_until_it_is_told_another_place(
    server: Server, folder: Path
) -> None:
    with SmallBank(folder, store=server.url) as bank:
        bank.add("one")
    with SmallBank(folder) as bank:
        bank.add("two")
    assert list(server.collections().values()) == [2] and not (folder / "chroma").exists()
    with SmallBank(folder, store="chroma") as bank:
        bank.add("three")
    with SmallBank(folder) as bank:
        assert bank.rebuild() == 3
    assert list(server.collections().values()) == [2] and (folder / "chroma").is_dir()
    with SmallBank(folder, store=f"{server.url}/") as bank:
        bank.flush_index()
    assert list(server.collections().values()) == [3]


def test_a_copy_of_the_folder_does_not_write_into_the_collection_of_the_original(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    with LargeBank(folder, store=server.url) as bank:
        bank.add_many(TEXTS)
        with bank.fork(tmp_path / "fork") as fork:
            fork.add("of the fork")
    shutil.copytree(folder, tmp_path / "copy")
    with LargeBank(tmp_path / "copy") as copy, LargeBank(folder) as bank:
        copy.add("of the copy")
        bank.add("of the original")
        bank.remove(next(iter(bank)).id)
        copy.flush_index()
        bank.flush_index()
        assert found(copy, "of the copy") == ["of the copy"] and found(copy, "of the original") != [
            "of the original"
        ]
        assert (
            found(bank, "of the original") == ["of the original"]
            and len(found(bank, "note", k=50)) == 50
        )
    assert sorted(server.collections().values()) == [60, 61]
    assert (tmp_path / "fork" / "chroma").is_dir()


@pytest.mark.parametrize("restored_over", [True, False])
def test_a_restored_journal_is_not_taken_for_the_one_that_was_indexed(
    server: Server, folder: Path, restored_over: bool
) -> None:
    """The collection is ahead at first; what is written next brings the journal past it, with other
    entries at the same positions.
    """
    with LargeBank(folder, store=server.url) as bank:
        bank.add_many(TEXTS[:30])
    backup = (folder / "journal.sqlite").read_bytes()
    with LargeBank(folder) as bank:
        bank.add_many(["lost with the disk"] * 10)
    if not restored_over:
        (folder / "journal.sqlite").unlink()
    (folder / "journal.sqlite").write_bytes(backup)
    server.kill()
    with LargeBank(folder) as bank:
        bank.add_many(TEXTS[30:])
    server.start()
    with LargeBank(folder) as bank:
        bank.flush_index()
        assert bank._state.nearest.is_large
        assert [found(bank, text) for text in TEXTS] == [[text] for text in TEXTS]
        assert found(bank, "lost with the disk") != ["lost with the disk"]


def test_rebuild_makes_the_collection_again(server: Server, folder: Path) -> None:
    with LargeBank(folder, store=server.url) as bank:
        bank.add_many(TEXTS)
        bank.flush_index()
        bank._follower.opened().store._collection.delete(ids=[next(iter(bank)).id])
        assert found(bank, TEXTS[0]) != [TEXTS[0]]
        assert bank.rebuild() == 60 and found(bank, TEXTS[0]) == [TEXTS[0]]
    assert list(server.collections().values()) == [60]


# While it is gone, and after


def test_a_small_bank_goes_on_without_the_server_and_the_server_catches_up(
    server: Server, folder: Path
) -> None:
    with SmallBank(folder, store=server.url) as bank:
        bank.add("before")
        bank.flush_index()
        server.kill()
        bank.add_many(TEXTS)
        assert found(bank, TEXTS[40]) == [TEXTS[40]]
        with pytest.raises(IndexLostError, match=f"at {server.url} to answer"):
            bank.flush_index()
        server.start()
        bank.flush_index()
        assert list(server.collections().values()) == [61]


def test_a_small_bank_is_opened_and_closed_while_the_server_is_gone(
    server: Server, folder: Path
) -> None:
    server.kill()
    with SmallBank(folder, store=server.url) as bank:
        bank.add("while it was gone")
    with SmallBank(folder) as bank:
        assert found(bank, "while it was gone") == ["while it was gone"]
        server.start()
        until(lambda: list(server.collections().values()) == [1])


def test_a_large_bank_answers_from_memory_until_the_server_is_back(
    server: Server, folder: Path
) -> None:
    with LargeBank(folder, store=server.url) as bank:
        entries = bank.add_many(TEXTS)
        bank.flush_index()
        server.kill()
        assert [found(bank, text) for text in TEXTS] == [[text] for text in TEXTS]
        bank.update(entries[3].id, "rewritten meanwhile")
        bank.remove(entries[4].id)
        bank.add("new meanwhile")
        assert found(bank, "rewritten meanwhile") == ["rewritten meanwhile"] and TEXTS[
            4
        ] not in found(bank, TEXTS[4], k=60)
        assert not bank._state.nearest.is_large
        server.start()
        until(lambda: bank._state.nearest.is_large)  # of itself, without a write or a call
        assert found(bank, "new meanwhile") == ["new meanwhile"] and found(bank, TEXTS[31]) == [
            TEXTS[31]
        ]
        assert len(bank._state.nearest._index.rows) == 0
    assert list(server.collections().values()) == [60]


def test_a_large_bank_is_opened_while_the_server_is_gone(server: Server, folder: Path) -> None:
    with LargeBank(folder, store=server.url) as bank:
        bank.add_many(TEXTS)
    server.kill()
    with LargeBank(folder) as bank:
        assert [found(bank, text) for text in TEXTS] == [[text] for text in TEXTS]
        bank.add("while it was gone")
    with LargeBank(folder) as bank:
        assert found(bank, "while it was gone") == ["while it was gone"] and found(
            bank, TEXTS[5]
        ) == [TEXTS[5]]


def test_a_server_that_comes_back_empty_is_filled_again(server: Server, folder: Path) -> None:
    with LargeBank(folder, store=server.url) as bank:
        bank.add_many(TEXTS)
        bank.flush_index()
        server.kill()
        shutil.rmtree(server.folder)
        server.start()
        assert [found(bank, text) for text in TEXTS] == [[text] for text in TEXTS]
        until(lambda: bank._state.nearest.is_large)
        assert [found(bank, text) for text in TEXTS] == [[text] for text in TEXTS]
    server.kill()
    shutil.rmtree(server.folder)
    server.start()
    with LargeBank(folder) as bank:
        assert [found(bank, text) for text in TEXTS] == [[text] for text in TEXTS]
        bank.flush_index()
    assert list(server.collections().values()) == [60]


@pytest.mark.slow
def test_searches_and_writes_never_fail_while_the_server_goes_and_comes(
    server: Server, folder: Path
) -> None:
    """Threads search for what is known to be there, and write, over three losses of the server."""
    wrong: list[str] = []
    done = threading.Event()
    with LargeBank(folder, store=server.url) as bank:
        bank.add_many(TEXTS)
        bank.flush_index()

        def work(number: int) -> None:
            count = 0
            while not done.is_set():
                count += 1
                text = f"thread{number} wrote{count}"
                try:
                    bank.add(text)
                    wrong.extend(
                        wanted
                        for wanted in (text, TEXTS[count % 60])
                        if found(bank, wanted) != [wanted]
                    )
                except Exception as error:  # noqa: BLE001  (told below)
                    wrong.append(repr(error))
                    return

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            server.kill()
            until(lambda: not bank._state.nearest.is_large)
            server.start()
            until(lambda: bank._state.nearest.is_large)
        done.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        bank.flush_index()
        assert list(server.collections().values()) == [len(bank)]


def test_writes_do_not_wait_for_a_server_that_never_answers(folder: Path) -> None:
    """A server that takes connections and says nothing; it is still silent when all has been
    written and found.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        bank = LargeBank(folder, store=address)
        bank.add_many(
            [f"entry {i}" for i in range(2 * follower.BATCH)]
        )  # enough to wake the follower
        bank.add("and one more")
        assert found(bank, "and one more") == ["and one more"]
        assert bank._follower.failure is None or isinstance(bank._follower.failure, IndexLostError)
    bank.close()
    with SmallBank(folder, read_only=True) as reader:
        assert len(reader) == 2 * follower.BATCH + 1


# How it is asked for


def test_the_token_of_the_environment_is_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A door that lets nobody in remembers what it was shown."""
    shown: list[tuple[str | None, str | None]] = []

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append((self.headers["Authorization"], self.headers["X-Chroma-Token"]))
            self.send_error(401)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as door:
        thread = threading.Thread(target=door.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{door.server_address[1]}"
        for token in (None, "s3cret"):
            (
                monkeypatch.setenv(TOKEN_VARIABLE, token)
                if token
                else monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
            )
            with SmallBank(folder, store=url) as bank:
                bank.add("x")
                with pytest.raises(IndexLostError, match="401"):
                    bank.flush_index()
        door.shutdown()
        thread.join()
    assert set(shown) == {(None, None), ("Bearer s3cret", "s3cret")}


@pytest.mark.parametrize(
    "address",
    [
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://host:0",
        "http://host:port",
        "http://host/path",
        "",
    ],
)
def test_an_address_that_cannot_be_one_is_refused_at_once(folder: Path, address: str) -> None:
    with pytest.raises(ValueError, match="the address of a Chroma server like"):
        SmallBank(folder, store=address)
    with SmallBank(folder) as bank:  # the folder was given back, and nothing is remembered
        bank.add("x")
    assert (folder / "chroma").is_dir()


def test_good_addresses() -> None:
    assert checked_store("http://localhost/") == "http://localhost"
    assert checked_store("https://chroma.example:443") == "https://chroma.example:443"


def test_the_command_moves_the_index_and_the_doctor_looks_at_it_there(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with xp.ExperienceBank(folder, embedder="hashing") as bank:
        bank.add_many(TEXTS[:3])
    assert run_app(main.app, ["bank", "rebuild", str(folder), "--store", server.url, "--yes"]) == 0
    assert list(server.collections().values()) == [3]
    capsys.readouterr()
    assert run_app(main.app, ["bank", "doctor", str(folder)]) == 0
    assert server.url in " ".join(capsys.readouterr().out.split())
    server.kill()
    assert run_app(main.app, ["bank", "doctor", str(folder)]) == 1
    assert "chroma run" in capsys.readouterr().out
