"""One writer, many users: a bank over real HTTP, its drop-in client, and what is left after the
server is killed.
"""

from __future__ import annotations

import concurrent.futures
import copy
import json
import os
import pickle
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import experiential as xp
from experiential.bank.http import wire
from experiential.bank.http.client import RemoteBank
from experiential.bank.http.limits import Limits, server_config
from experiential.bank.http.served import LONGEST_PAGE, Page
from experiential.bank.http.service import create_app
from experiential.bank.protocol import Bank
from experiential.cli import main
from experiential.cli.errors import run_app
from experiential.cli.serve import is_loopback
from experiential.types import Use
from tests.wrapper_worlds import CorridorEnv

InProcess = Callable[..., tuple[int, str]]


@contextmanager
def serving(source: Any, port: int = 0, **options: Any) -> Iterator[str]:
    """The address of an application that serves ``source`` from a thread of this process."""
    app = create_app(source, **options)
    listener = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(server_config(app, options.get("limits") or Limits()))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        app.state.namespaces.close()


@contextmanager
def serve_command(
    folder: Path, *arguments: str, port: int = 0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address."""
    command = [
        sys.executable,
        "-m",
        "experiential.cli.main",
        "serve",
        str(folder),
        "--port",
        str(port),
        "--embedder",
        "hashing",
        *(() if "--token" in arguments else ("--no-token",)),
        *arguments,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("serving http://"), line + process.stderr.read()
        yield process, line.split()[1]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "bank"


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    with serving(folder, embedder="hashing") as url:
        yield url


@pytest.fixture
def bank(url: str) -> Iterator[Bank]:
    with xp.ExperienceBank(url) as bank:
        yield bank


def texts(bank: Any) -> list[str]:
    return [entry.text for entry in bank.entries()]


def trajectory(entry: xp.Experience | None = None, **values: Any) -> xp.Trajectory:
    uses = () if entry is None else (Use(experience_id=entry.id, experience_version=entry.version),)
    return xp.Trajectory(
        task="open the door",
        instance="door#1",
        turns=(xp.Turn(observation="a door", action="pull"),),
        uses=uses,
        **values,
    )


# The drop-in client; tests/test_remote_same.py compares it with a folder, method by method


@pytest.mark.parametrize("value", [5, None, ["a"]])
def test_wrong_types_are_refused_before_anything_is_sent(bank: Bank, value: Any) -> None:
    for call in (
        lambda: bank.add(value),
        lambda: bank.add("x", task=5),
        lambda: bank.get(value),
        lambda: bank.add_many([value]),
    ):
        with pytest.raises(ValueError, match="Expected"):
            call()
    assert len(bank) == 0


def test_a_client_does_not_touch_the_queue_of_all(bank: Bank) -> None:
    assert not {"clear", "put", "finish"} & set(dir(bank.queue))


def test_namespaces_do_not_meet_and_names_may_be_anything(url: str, folder: Path) -> None:
    names = ["default", "a/b", "ä ö?&#", "x" * 200]
    banks = [xp.ExperienceBank(url, namespace=name) for name in names]
    for bank in banks:
        bank.add(f"of {bank.namespace}")
    for bank in banks:
        assert texts(bank) == [f"of {bank.namespace}"] and [
            hit.experience.text for hit in bank.search("of", k=9)
        ] == texts(bank)
    assert httpx.get(f"{url}/v1/health").json() == {"status": "ok", "namespaces": sorted(names)}
    with pytest.raises(ValueError, match="namespace"):
        xp.ExperienceBank(url, namespace=" ")


def test_read_only_keeps_its_picture_and_refuses_writes(bank: Bank, url: str) -> None:
    entry = bank.add("first")
    with xp.ExperienceBank(url, read_only=True) as picture:
        bank.update(entry.id, "second")
        bank.add("third")
        assert (
            texts(picture) == ["first"]
            and len(picture) == 1
            and picture.get(entry.id).text == "first"
        )
        assert picture.head < bank.head and len(picture.commits()) == 1
        assert [hit.experience.text for hit in picture.search("third", k=5)] == ["first"]
        for write in (
            lambda: picture.add("x"),
            lambda: picture.submit(trajectory()),
            lambda: picture.note_retrievals(["x"]),
        ):
            with pytest.raises(xp.ReadOnlyBankError):
                write()
        with pytest.raises(xp.BankError, match="commit id"):
            picture.at(bank.head)
    assert texts(bank) == ["second", "third"]


def test_another_embedder_than_the_servers_is_refused(url: str) -> None:
    xp.ExperienceBank(url, embedder="hashing").close()
    with pytest.raises(xp.BankError, match="hashing-256"):
        xp.ExperienceBank(url, embedder=xp.HashingEmbedder(64))


def test_a_listing_shows_one_moment_over_all_its_pages(url: str, bank: Bank) -> None:
    entries = bank.add_many([f"entry {i}" for i in range(25)])
    page = _post(url, "entries", {"limit": 10})
    bank.remove(entries[0].id)
    bank.add_many(["later"] * 3)
    second = _post(url, "entries", {"limit": 10, "cursor": page["cursor"]})
    third = _post(url, "entries", {"limit": 10, "cursor": second["cursor"]})
    assert [e["text"] for p in (page, second, third) for e in p["entries"]] == [
        f"entry {i}" for i in range(25)
    ]
    assert third["cursor"] is None
    with pytest.raises(xp.BankError, match="list again"):
        list(bank._following(Page(entries=[], cursor="gone.10")))


def test_a_bank_of_more_than_one_page_is_listed_whole(bank: Bank) -> None:
    wanted = [f"entry {i}" for i in range(LONGEST_PAGE + 5)]
    bank.add_many(wanted)
    assert texts(bank) == wanted == texts(bank.at(bank.head))


def test_a_client_survives_pickling_and_a_fork(bank: Bank) -> None:
    bank.add("before")
    with pickle.loads(pickle.dumps(bank)) as other, copy.copy(bank) as third:
        assert texts(other) == texts(third) == ["before"] and other.namespace == bank.namespace
    child = os.fork()
    if child == 0:
        code = 1
        try:
            bank.add("of the child")
            code = 0
        finally:
            os._exit(code)
    bank.add("of the parent")
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(texts(bank)) == ["before", "of the child", "of the parent"]


def test_a_closed_client_says_so(bank: Bank) -> None:
    bank.close()
    bank.close()
    assert bank.closed
    with pytest.raises(xp.BankError, match="got a closed one"):
        bank.add("x")


def test_banks_that_are_open_already_can_be_served_and_stay_open(folder: Path) -> None:
    with (
        xp.ExperienceBank(folder, embedder="hashing") as one,
        xp.ExperienceBank(folder, namespace="two", embedder="hashing") as two,
    ):
        with (
            serving([one, two]) as url,
            xp.ExperienceBank(url) as client,
            xp.ExperienceBank(url, namespace="two") as other,
        ):
            client.add("for one")
            other.add("for two")
            with pytest.raises(xp.BankError, match="'default', 'two'"):
                xp.ExperienceBank(url, namespace="three")
        assert texts(one) == ["for one"] and texts(two) == ["for two"]
        one.add("still open")
    with pytest.raises(ValueError, match="different namespaces"):
        create_app([])


# Wrappers and managers


def test_the_wrapper_retrieves_from_a_server_and_submits_to_it(url: str, bank: Bank) -> None:
    entry = bank.add("Cross the corridor: say go.", task="Cross the corridor.")
    env = xp.ExperienceWrapper(CorridorEnv(), xp.ExperienceBank(url))
    _, info = env.reset(seed=3)
    assert [hit["id"] for hit in info["experience"]] == [entry.id]
    env.step("go")
    *_, done, _, _ = env.step("go")
    assert done
    assert bank.outcomes(entry.id, 1) == [1]
    assert bank.get(entry.id).statistics == xp.Statistics(retrievals=1, uses=1, successes=1)
    env.close()


def test_a_manager_with_an_extractor_distils_through_a_server(
    url: str, bank: Bank, folder: Path
) -> None:
    bank.add("Doors open outward.", task="open the door")
    say = xp.ScriptedLLM(['<answer>[{"op": "add", "text": "Pull the door."}]</answer>'])
    with xp.ExperienceManager(xp.ExperienceBank(url), xp.ExtractorAgent(say)) as manager:
        assert [hit.experience.text for hit in manager.search("open the door")] == [
            "Doors open outward."
        ]
        assert manager.ask("open the door?").hit is not None
        ended = trajectory(success=True)
        assert manager.submit(ended) == ended.id
        manager.drain(timeout=30)
        assert manager.stats()["distilled"] == 1 and manager.stats()["entries"] == 2
    assert texts(bank) == ["Doors open outward.", "Pull the door."]
    assert list(bank)[1].provenance.span is not None
    assert bank.queue.state(ended.id) == "done"


def test_a_manager_over_a_server_shows_what_outcomes_proved(url: str, bank: Bank) -> None:
    proven, new = bank.add_many(
        ["Pull the red door.", "Pull the red door hard."], task="open the red door"
    )
    scores = {hit.experience.id: hit.score for hit in bank.search("open the red door", k=2)}
    with xp.ExperienceManager(xp.ExperienceBank(url)) as manager:
        for _ in range(6):
            for entry, success in ((proven, True), (new, False)):
                used = {"experience_id": entry.id, "experience_version": 1}
                uses = (Use(**used, score=scores[entry.id]),)
                bank.record(xp.Trajectory(task="open the red door", uses=uses, success=success))
            bank.record(xp.Trajectory(task="open the red door", success=False))
        shown = {manager.search("open the red door")[0].experience.id for _ in range(20)}
        assert shown == {proven.id}


def test_what_is_set_at_the_server_is_not_taken_by_a_client(url: str, bank: Bank) -> None:
    with pytest.raises(xp.BankError, match="at the server"):
        xp.ExperienceManager(bank, text_limit=10)
    assert bank.redacted == {}
    bank.add("the token is sk-" + "a1B2c3D4" * 5)
    assert sum(bank.redacted.values()) == 1 and "a1B2c3D4" not in texts(bank)[0]


def test_what_a_client_submits_waits_at_the_server_for_an_extractor(
    url: str, bank: Bank, folder: Path
) -> None:
    ended = trajectory()
    assert bank.submit(ended) and not bank.submit(ended)
    assert bank.queue.waiting() == [ended.id] and bank.trajectory(ended.id) == ended


# The door


def _post(url: str, name: str, body: Any, **headers: str) -> Any:
    response = httpx.post(f"{url}/v1/{name}", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def test_without_the_token_nothing_is_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EXPERIENTIAL_TOKEN", raising=False)
    with serving(folder, token="s3cret", embedder="hashing") as url:
        for header in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret"},
            {"Authorization": "Bearer s3cret2"},
        ):
            for path in ("/v1/health", "/docs", "/openapi.json", "/nothing"):
                answer = httpx.get(url + path, headers=header)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert (
                httpx.post(f"{url}/v1/add", json={"text": "x"}, headers=header).status_code == 401
            )
        with pytest.raises(xp.BankError, match="EXPERIENTIAL_TOKEN"):
            xp.ExperienceBank(url)
        with RemoteBank(url, token="s3cret") as bank:
            bank.add("let in")
        monkeypatch.setenv("EXPERIENTIAL_TOKEN", "s3cret")
        with xp.ExperienceBank(url) as bank:
            assert texts(bank) == ["let in"]


def test_a_long_body_is_refused_however_it_comes(folder: Path) -> None:
    with (
        serving(folder, limits=Limits(body=2000), embedder="hashing") as url,
        xp.ExperienceBank(url) as bank,
    ):
        bank.add("x" * 1000)
        with pytest.raises(xp.BankError, match="at most 2000 bytes"):
            bank.add("x" * 2000)
        chunks = (b"x" * 500 for _ in range(10))
        assert (
            httpx.post(
                f"{url}/v1/add", content=chunks, headers={"content-type": "application/json"}
            ).status_code
            == 413
        )
        assert httpx.post(f"{url}/v1/add", content=b"[" * 5000).status_code == 413
        assert len(bank) == 1


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("add", {"text": 5}),
        ("add", {"text": "x", "colour": "red"}),
        ("add", []),
        ("get", {}),
        ("search", {"queries": "x"}),
        ("at", {"commit": "1"}),
    ],
)
def test_a_malformed_body_is_named(url: str, name: str, body: Any) -> None:
    answer = httpx.post(f"{url}/v1/{name}", json=body)
    assert answer.status_code == 422 and answer.json()["error"]["message"].startswith(
        "Expected a request as described at /docs"
    )


def test_a_body_that_no_form_of_a_web_page_may_send_is_needed(url: str) -> None:
    """A page in a browser may post text/plain anywhere without asking; JSON it may not."""
    answer = httpx.post(
        f"{url}/v1/add", content=b'{"text": "x"}', headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 422


def test_all_operations_are_described(url: str) -> None:
    described = httpx.get(f"{url}/openapi.json").json()
    operations = {f"/v1/{name}" for name in wire.OPERATIONS}
    assert set(described["paths"]) == operations | {"/v1/health", wire.BACKUP}
    assert described["paths"]["/v1/add"]["post"]["requestBody"]["required"] is True


def test_another_server_at_the_address_is_noticed(tmp_path: Path) -> None:
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever).start()
        with pytest.raises(xp.BankError, match="check the address"):
            xp.ExperienceBank(f"http://127.0.0.1:{other.server_address[1]}")
        other.shutdown()


@pytest.mark.parametrize("address", ["http://", "http://[", "http://host:port"])
def test_an_unreadable_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="Expected an address"):
        xp.ExperienceBank(address)


# Each write once


TWIN = "f" * 32
WRITES: list[tuple[str, Callable[[xp.Experience], dict[str, Any]]]] = [
    ("add", lambda e: {"text": "new"}),
    ("add_many", lambda e: {"texts": ["new", "newer"], "task": "t"}),
    ("update", lambda e: {"id": e.id, "text": "changed"}),
    ("remove", lambda e: {"id": e.id}),
    ("rollback", lambda e: {"commit": 0}),
    ("import", lambda e: {"entries": [{"text": "brought"}, {"text": "along"}], "ref": "file"}),
    ("record", lambda e: {"trajectory": json.loads(trajectory(e).model_dump_json())}),
    ("submit", lambda e: {"trajectory": json.loads(trajectory(e).model_dump_json())}),
    (
        "apply",
        lambda e: {
            "distillation": {
                "parsed": {"operations": [{"op": "add", "text": "a"}, {"op": "add", "text": "b"}]}
            },
            "spans": [[0, 1], None],
            "shown": [],
            "trajectory": json.loads(trajectory().model_dump_json()),
        },
    ),
    ("prune", lambda e: {"score": 0.6, "min_uses": 0}),
    ("evict", lambda e: {"cap": 0, "policy": "random"}),
    ("deduplicate", lambda e: {"threshold": 0.99}),
    (
        "merge_duplicates",
        lambda e: {
            "groups": [[{"id": e.id, "version": 1}, {"id": TWIN, "version": 1}]],
            "ref": "mine",
        },
    ),
    ("note_retrievals", lambda e: {"ids": [e.id]}),
]


@pytest.mark.parametrize(("name", "make"), WRITES, ids=[name for name, _ in WRITES])
def test_a_key_is_carried_out_once_and_answers_the_same_again(
    folder: Path, name: str, make: Callable[[xp.Experience], Any]
) -> None:
    """The same server, then one started over the same folder."""
    with serving(folder, embedder="hashing") as url, xp.ExperienceBank(url) as bank:
        body = make(bank.add("there before"))
        bank.import_entries([xp.Experience(id=TWIN, text="There before!")], "a file")
        first = _post(url, name, body, **{"Idempotency-Key": "k1"})
        head, listed = bank.head, list(bank)
        assert _post(url, name, body, **{"Idempotency-Key": "k1"}) == first
        assert bank.head == head and list(bank) == listed
    if name == "note_retrievals":  # its counts and its keys live in memory until a commit
        return
    with serving(folder) as url, xp.ExperienceBank(url) as bank:
        assert _post(url, name, body, **{"Idempotency-Key": "k1"}) == first
        assert bank.head == head and list(bank) == listed


def test_a_key_is_for_one_request_and_one_namespace(url: str, bank: Bank) -> None:
    _post(url, "add", {"text": "one"}, **{"Idempotency-Key": "k"})
    answer = httpx.post(f"{url}/v1/add", json={"text": "two"}, headers={"Idempotency-Key": "k"})
    assert (
        answer.status_code == 422 and "which another one had" in answer.json()["error"]["message"]
    )
    _post(url, "add?namespace=other", {"text": "two"}, **{"Idempotency-Key": "k"})
    _post(url, "add", {"text": "free"})
    _post(url, "add", {"text": "free"})
    assert texts(bank) == ["one", "free", "free"]


def test_a_write_that_failed_leaves_no_receipt(url: str, bank: Bank) -> None:
    body, key = {"id": "later", "text": "x"}, {"Idempotency-Key": "k"}
    assert httpx.post(f"{url}/v1/update", json=body, headers=key).status_code == 409
    _post(url, "import", {"entries": [{"id": "later", "text": "now it is there"}], "ref": "f"})
    assert _post(url, "update", body, **key)["version"] == 2
    bank.add("not under that key")
    assert _post(url, "update", body, **key)["version"] == 2


def test_a_receipt_is_in_the_transaction_of_its_write(folder: Path) -> None:
    """The second write cannot leave its receipt, so it is not made either, in memory or on the
    disk.
    """
    with xp.ExperienceBank(folder, embedder="hashing") as bank:
        with bank.receipts.noting("k", "digest"):
            entry = bank.add("one")
        with pytest.raises(sqlite3.IntegrityError), bank.receipts.noting("k", "digest"):
            bank.add("two")
        assert texts(bank) == ["one"] and bank.receipts.find("k") == ("digest", bank.head)
        assert bank.receipts.written(bank.head) == [(entry.id, 1)]
        with bank.receipts.noting("unused", "digest"):
            pass
        bank.add("three")
        assert bank.receipts.find("unused") is None
    with xp.ExperienceBank(folder) as bank:
        assert texts(bank) == ["one", "three"]


def test_one_key_asked_by_many_at_once_is_one_write(url: str, bank: Bank) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda _: _post(url, "add", {"text": "only one"}, **{"Idempotency-Key": "k"}),
                range(32),
            )
        )
    assert len(bank) == 1 and len({answer["id"] for answer in answers}) == 1


# The server goes and comes


def test_a_lost_server_is_named_and_the_same_client_goes_on_when_it_is_back(folder: Path) -> None:
    with serving(folder, embedder="hashing") as url:
        bank = xp.ExperienceBank(url, patience=0.1)
        bank.add("before")
    with pytest.raises(xp.BankError, match=f"{url}.*experiential serve"):
        bank.add("lost")
    with pytest.raises(xp.BankError, match=f"{url}.*experiential serve"):
        xp.ExperienceBank(url, patience=0.0)
    with serving(folder, port=int(url.rsplit(":", 1)[1])):
        bank.add("after")
        assert texts(bank) == ["before", "after"]
    bank.close()


def test_an_answer_lost_on_the_way_is_asked_for_again_with_the_same_key(
    url: str, bank: Bank
) -> None:
    """Carry each first request through, then cut the line instead of answering."""
    with cutting(int(url.rsplit(":", 1)[1])) as (proxy, cuts), xp.ExperienceBank(proxy) as through:
        for i in range(10):
            through.add(f"entry {i}")
        assert len(cuts) == 11  # each add, and the opening
    assert texts(bank) == [f"entry {i}" for i in range(10)]


def test_patience_begins_when_the_line_is_lost(url: str, bank: Bank) -> None:
    port = int(url.rsplit(":", 1)[1])
    with (
        cutting(port, after=0.6) as (proxy, cuts),
        xp.ExperienceBank(proxy, patience=0.3) as through,
    ):
        through.add("slow, then lost")
        assert len(cuts) == 2
    assert texts(bank) == ["slow, then lost"]


@contextmanager
def cutting(port: int, after: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that drops the answer to every second connection, ``after`` so many seconds; a
    client's second attempt comes on a new one.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    cuts: list[bytes] = []

    def carry() -> None:
        for number in range(10**6):
            try:
                caller, _ = listener.accept()
            except OSError:
                return
            with caller, socket.create_connection(("127.0.0.1", port)) as server:
                request = _whole_message(caller)
                server.sendall(request.replace(b"keep-alive", b"close"))
                answer = _whole_message(server)
                if number % 2:
                    caller.sendall(answer.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
                else:
                    time.sleep(after)
                    cuts.append(request)

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", cuts
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _whole_message(line: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += line.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(row.split(b":")[1])
        for row in head.lower().split(b"\r\n")
        if row.startswith(b"content-length")
    )
    while len(body) < length:
        body += line.recv(65536)
    return head + b"\r\n\r\n" + body


def test_killed_nothing_acknowledged_is_lost_and_nothing_is_written_twice(folder: Path) -> None:
    """Writers go on over a SIGKILL and a restart of the server; their keys make each text appear
    once.
    """
    acknowledged: list[xp.Experience] = []
    with serve_command(folder) as (process, url):

        def write(number: int) -> None:
            with RemoteBank(url, patience=60.0) as bank:
                for i in range(40):
                    acknowledged.append(bank.add(f"{number}: {i}"))

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            writers = [pool.submit(write, number) for number in range(4)]
            while len(acknowledged) < 40:
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert len(acknowledged) < 160
            before = list(acknowledged)
            with serve_command(folder, port=int(url.rsplit(":", 1)[1])) as (again, _):
                for writer in writers:
                    writer.result(timeout=60)
                again.send_signal(signal.SIGTERM)
                assert again.wait(timeout=30) == 0
    with xp.ExperienceBank(folder) as bank:
        assert sorted(texts(bank)) == sorted(
            f"{number}: {i}" for number in range(4) for i in range(40)
        )
        assert all(bank.get(entry.id) == entry for entry in [*before, *acknowledged])


# The command


def test_the_command_says_where_it_serves_what_and_stops_cleanly(
    folder: Path, in_process: InProcess
) -> None:
    with xp.ExperienceBank(folder, namespace="maths", embedder="hashing") as local:
        local.add("there before")
    with serve_command(folder) as (process, url):
        with xp.ExperienceBank(url, namespace="maths") as bank:
            assert texts(bank) == ["there before"]
            bank.add("and now")
        with pytest.raises(xp.BankLockedError, match=f"process {process.pid} on"):
            xp.ExperienceBank(folder, namespace="untouched")
        with xp.ExperienceBank(folder, namespace="maths", read_only=True) as picture:
            assert len(picture) == 2
        code, error = in_process("serve", folder, "--port", "0")
        assert code == 2 and str(process.pid) in error
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None and process.stderr.read() == ""
    assert (
        not (folder / "journal.sqlite-wal").exists()
        and (folder / "writer.lock").read_bytes() == b""
    )
    with xp.ExperienceBank(folder, namespace="maths") as local:
        assert texts(local) == ["there before", "and now"]


@pytest.fixture
def in_process(capsys: pytest.CaptureFixture[str]) -> InProcess:
    def call(*arguments: object) -> tuple[int, str]:
        code = run_app(main.app, [str(argument) for argument in arguments])
        return code, capsys.readouterr().err

    return call


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no-such-host.invalid"])
def test_an_open_address_without_a_token_is_refused(
    folder: Path, host: str, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EXPERIENTIAL_TOKEN", raising=False)
    code, error = in_process("serve", folder, "--host", host, "--no-token")
    assert code == 2 and "--no-token" in error and error.count("\n") == 1
    assert not folder.exists()


def test_an_open_address_with_a_token_is_served(folder: Path) -> None:
    with serve_command(
        folder, "--host", "0.0.0.0", "--token", "s3cret", "--namespace", "a", "--namespace", "b"
    ) as (_, url):
        assert url.startswith("http://0.0.0.0:")
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/health").status_code == 401
        with RemoteBank(url, token="s3cret", namespace="b") as bank:
            bank.add("x")
        with pytest.raises(xp.BankError, match="'a', 'b'"):
            RemoteBank(url, token="s3cret", namespace="default")


def test_user_errors_are_one_line(folder: Path, tmp_path: Path, in_process: InProcess) -> None:
    (tmp_path / "file").write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, error = in_process("serve", folder, "--port", taken.getsockname()[1])
        assert code == 2 and "free port" in error and error.count("\n") == 1
    assert in_process("serve", folder, "--token", "")[0] == 2
    code, error = in_process("serve", tmp_path / "file", "--port", "0")
    assert code != 0 and "got the file" in error


def test_which_addresses_are_this_machine_alone() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [
        True
    ] * 4
    assert [
        is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "", "no-such-host.invalid")
    ] == [False] * 5


def test_neither_server_nor_client_is_loaded_before_it_is_used() -> None:
    code = (
        "import sys, experiential as xp, experiential.cli.main; xp.ExperienceBank;"
        " print({'fastapi', 'uvicorn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
