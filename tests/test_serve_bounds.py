"""A bank server with bounds: who may call it, for how much, and what a flood does to the others."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import experiential as xp
from benchmarks.flood import run as flood
from experiential.bank.http.client import RemoteBank
from experiential.bank.http.limits import Limits
from experiential.bank.protocol import Bank
from tests.test_serve import cutting, serving, texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "bank"


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def raw(url: str, data: bytes) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port_of(url)), timeout=20)
    line.sendall(data)
    return line


def ends(line: socket.socket) -> bytes:
    """What a server says on a line until it hangs up."""
    said = b""
    with suppress(ConnectionResetError):
        while part := line.recv(65536):
            said += part
    return said


# Who may call


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421),
        ("evil.example:{port}", 421),
        ("127.0.0.1.evil.example", 421),
        ("10.1.2.3", 421),
        ("", 421),
        ("localhost:{port}", 200),
        ("[::1]:{port}", 200),
        ("LOCALHOST", 200),
        ("bank.lan", 200),
    ],
)
def test_only_the_servers_own_names_are_answered(folder: Path, host: str, status: int) -> None:
    """A page that makes its own name lead to 127.0.0.1 cannot read the bank."""
    with serving(folder, embedder="hashing", hosts=["bank.lan"]) as url:
        headers = {"Host": host.format(port=port_of(url))}
        answer = httpx.get(f"{url}/v1/health", headers=headers)
        assert answer.status_code == status
        assert httpx.post(f"{url}/v1/info", json={}, headers=headers).status_code == status


def test_the_command_makes_a_token_and_says_it_once(folder: Path) -> None:
    command = [sys.executable, "-m", "experiential.cli.main", "serve", str(folder)]
    command += ["--port", "0", "--embedder", "hashing"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            said, _, token = process.stdout.readline().strip().partition("EXPERIENTIAL_TOKEN=")
            assert said == "clients need: export " and len(token) >= 32
            assert httpx.get(f"{url}/v1/health").status_code == 401
            with xp.ExperienceBank(url, token=token) as bank:
                bank.add("let in")
                assert texts(bank) == ["let in"]
        finally:
            process.kill()


def test_error_pages_name_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "secret-place" / "bank"
    with (
        serving(folder, embedder="hashing") as url,
        xp.ExperienceBank(folder, namespace="taken", embedder="hashing"),
    ):
        locked = httpx.post(f"{url}/v1/info?namespace=taken", json={})
        assert locked.status_code == 423
        assert "…/bank" in locked.json()["error"]["message"]
        lease = {"holder": "me", "most": 10**30}
        failed = httpx.post(f"{url}/v1/queue_lease", json=lease)
        assert failed.status_code == 500 and "OverflowError" in failed.text
        for answer in (locked, failed, httpx.get(f"{url}/nothing"), httpx.get(f"{url}/v1/add")):
            assert "secret-place" not in answer.text and "Traceback" not in answer.text


# For how much


def test_k_and_queries_are_bounded(folder: Path) -> None:
    limits = Limits(queries=10, hits=40)
    with serving(folder, embedder="hashing", limits=limits) as url:
        with xp.ExperienceBank(url) as bank:
            bank.add_many([f"entry {i}" for i in range(30)])
            assert len(bank.search("entry", k=2_000_000_000)) == 30

        def status(name: str, **body: Any) -> int:
            return httpx.post(f"{url}/v1/{name}", json=body).status_code

        assert status("search", queries=["a"] * 10, k=4) == 200
        assert status("search", queries=["a"] * 10, k=5) == 422
        assert status("search", queries=["a"] * 11) == 422
        assert status("nearest", queries=["a"] * 2, n=10**12, exclude=[None] * 2) == 422
        assert status("embed", texts=["a"] * 11) == 422
        assert status("search", queries=["a" * 2**20]) == 413


def test_a_client_asks_for_many_queries_in_parts(folder: Path) -> None:
    with serving(folder, embedder="hashing") as url, xp.ExperienceBank(url) as bank:
        bank.add_many(["a red door", "a blue door"])
        queries = ["red", "blue", "long " * 500] * 700
        rows = bank.search(queries, k=1)
        assert [row[0].experience.text for row in rows[:2]] == ["a red door", "a blue door"]
        first, last = ([row[0] for row in some] for some in (rows[:3], rows[-3:]))
        assert len(rows) == 2100
        assert [hit.experience for hit in first] == [hit.experience for hit in last]
        # products of other sizes round otherwise on some processors
        assert [hit.score for hit in first] == pytest.approx([hit.score for hit in last], abs=1e-6)
        assert bank.embedder(queries).shape[0] == 2100


def test_in_process_no_k_takes_memory_beyond_the_entries(folder: Path) -> None:
    with xp.ExperienceBank(folder, embedder="hashing") as bank:
        bank.add_many([f"entry {i}" for i in range(50)])
        for hybrid in (0.0, 0.5):
            bank.search("entry", k=1, hybrid=hybrid)
            tracemalloc.start()
            assert len(bank.search(["entry", "other"], k=10**9, hybrid=hybrid)[0]) == 50
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 10 * 2**20
        assert len(bank.at(bank.head).search("entry", k=10**9)) == 50


def test_no_further_namespace_is_made_beyond_the_limit(folder: Path) -> None:
    with serving(folder, embedder="hashing", limits=Limits(namespaces=3)) as url:
        for name in "abc":
            xp.ExperienceBank(url, namespace=name).close()
        with pytest.raises(xp.BankError, match="--max-namespaces"):
            xp.ExperienceBank(url, namespace="d")
        xp.ExperienceBank(url, namespace="c").close()
        assert httpx.get(f"{url}/v1/health").json()["namespaces"] == ["a", "b", "c"]


def test_above_the_rate_a_client_waits_and_loses_nothing(folder: Path) -> None:
    with (
        serving(folder, embedder="hashing", limits=Limits(rate=2)) as url,
        xp.ExperienceBank(url) as bank,
    ):
        with httpx.Client() as client:
            answers = [client.get(f"{url}/v1/health") for _ in range(12)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and all(int(one.headers["retry-after"]) >= 1 for one in refused)
        bank.add("came through")
        assert texts(bank) == ["came through"]


def test_wrong_tokens_use_up_their_own_rate(folder: Path) -> None:
    with serving(folder, embedder="hashing", token="t", limits=Limits(rate=1)) as url:
        with httpx.Client() as client:
            statuses = {client.get(f"{url}/v1/health").status_code for _ in range(8)}
        assert statuses == {401, 429}
        right = {"Authorization": "Bearer t"}
        assert httpx.get(f"{url}/v1/health", headers=right).status_code == 200


def test_half_a_body_has_its_time_and_its_bytes(folder: Path) -> None:
    limits = Limits(body_seconds=0.5, in_flight=2**20)
    head = b"POST /v1/add HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n"
    with serving(folder, embedder="hashing", limits=limits) as url:
        began = time.monotonic()
        said = ends(raw(url, head + b" " * 1000))
        assert b" 408 " in said and 0.4 < time.monotonic() - began < 10
        lines = [raw(url, head + b" " * 900_000) for _ in range(3)]
        assert sorted(said[9:12] for said in map(ends, lines)) == [b"408", b"503", b"503"]
        with xp.ExperienceBank(url) as bank:
            bank.add("small ones pass")


def test_half_a_head_has_its_time(folder: Path) -> None:
    with serving(folder, embedder="hashing", limits=Limits(header_seconds=0.5)) as url:
        for start in (b"", b"GET / HTTP/1.1\r\nHost: lo", b"GET / HTTP/1.1\r\n" + b"a" * 100_000):
            began = time.monotonic()
            ends(raw(url, start))
            assert time.monotonic() - began < 10
        whole = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        line = raw(url, whole)
        assert line.recv(1000)
        line.sendall(whole[:20])  # the second request on a line, too
        assert ends(line) == b""


def test_connections_that_ask_nothing_make_room(folder: Path) -> None:
    with serving(folder, embedder="hashing", limits=Limits(connections=8)) as url:
        bank = xp.ExperienceBank(url)
        bank.add("before")
        lines = [raw(url, b"GET / HTTP/1.1\r\n") for _ in range(40)]
        began = time.monotonic()
        bank.add("meanwhile")
        assert time.monotonic() - began < 5
        assert texts(bank) == ["before", "meanwhile"]
        for line in lines:
            line.close()


# A write under a key


@pytest.fixture(params=["folder", "server"])
def anywhere(request: pytest.FixtureRequest, folder: Path) -> Iterator[Bank]:
    if request.param == "folder":
        with xp.ExperienceBank(folder, embedder="hashing") as bank:
            yield bank
    else:
        with serving(folder, embedder="hashing") as url, xp.ExperienceBank(url) as bank:
            yield bank


def test_a_write_repeated_under_its_key_is_made_once(anywhere: Bank, tmp_path: Path) -> None:
    bank = anywhere
    first = bank.add("one", key="k1")
    doomed = bank.add("gone soon")
    brought = xp.Experience(text="brought")
    writes: list[Callable[[], Any]] = [
        lambda: bank.add("one", key="k1"),
        lambda: bank.add_many(["two", "three"], key="k2"),
        lambda: bank.update(first.id, "one, again", key="k3"),
        lambda: bank.remove(doomed.id, key="k4"),
        lambda: bank.import_entries([brought], "a file", key="k5"),
        lambda: bank.rollback(2, key="k6"),
    ]
    done = [write() for write in writes]
    head = bank.head
    assert [write() for write in writes] == done
    assert bank.head == head and done[0] == first
    with pytest.raises(ValueError, match="another"):
        bank.add("another text", key="k1")
    with pytest.raises(ValueError, match="key"):
        bank.add("x", key=" a ")


def test_a_key_is_known_after_a_restart_wherever_the_bank_is_opened(folder: Path) -> None:
    with serving(folder, embedder="hashing") as url, xp.ExperienceBank(url) as bank:
        first = bank.add("one", task="t", key="k")
    with xp.ExperienceBank(folder) as bank:
        assert bank.add("one", task="t", key="k") == first
        assert len(bank) == 1


def test_an_error_says_that_the_write_may_have_been_made(folder: Path) -> None:
    with serving(folder, embedder="hashing") as url:
        with cutting(port_of(url)) as (proxy, _):
            lost = RemoteBank(proxy, patience=2.0)  # the second connection is let through
            connection: Any = lost._connection  # pyright: ignore[reportPrivateUsage]
            connection._patience = 0.0
            with pytest.raises(xp.BankError, match=r"may have been made.*key='(\w+)'") as error:
                lost.add("once")
        key = str(error.value).split("key='")[1].split("'")[0]
        with xp.ExperienceBank(url) as bank:
            bank.add("once", key=key)
            assert texts(bank) == ["once"]


def test_clients_wait_half_a_minute_by_default(folder: Path) -> None:
    with serving(folder, embedder="hashing") as url:
        bank = xp.ExperienceBank(url)
        bank.add("before")

    def again() -> None:
        time.sleep(1.5)
        with serving(folder, port=port_of(url)):
            done.wait(30)

    done = threading.Event()
    thread = threading.Thread(target=again)
    thread.start()
    bank.add("after")
    assert texts(bank) == ["before", "after"]
    done.set()
    thread.join()


# A flood


def test_a_flood_is_bounded_and_leaves_the_others_served() -> None:
    """Seven kinds of abuse at once, most of them with the token; `benchmarks.flood` has times."""
    found = flood(quiet=0.5, seconds=4.0)
    sent = found["sent"]
    assert found["flood s"] < 60 and found["honest requests"] > 0
    assert found["memory MiB"][1] <= 2 * found["memory MiB"][0], found
    assert found["recovery ms"] < 10_000, found
    # "cut": the flood gave up waiting, or its connection made room
    assert set(sent["big k"]) <= {"422", "429", "503", "cut"}
    assert set(sent["many queries"]) <= {"413", "429", "503", "cut"}
    assert set(sent["wrong host"]) <= {"421", "429", "cut"}
    assert set(sent["no token"]) <= {"401", "429", "cut"}
    assert found["namespaces"] <= 100
