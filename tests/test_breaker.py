"""Distillation while the extractor's service is out: it pauses, loses nothing and goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiential.agents.extractor import ExtractorAgent
from experiential.bank.bank import ExperienceBank
from experiential.bank.breaker import CircuitBreaker, outage_of
from experiential.bank.manager import ExperienceManager
from experiential.bank.protocol import Bank
from experiential.errors import BackendError, BudgetError
from experiential.llm.openai import OpenAILLM
from experiential.types import Add, Distillation, ParsedOperations, Trajectory
from tests.chat_server import Server, completion
from tests.test_manager import wait_until

LESSON = completion('<answer>[{"op": "add", "text": "Say go."}]</answer>')
OK: tuple[int, Any, dict[str, str], float] = (200, LESSON, {}, 0.0)
QUOTA = {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[Bank]:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def hosted(server: Server, **options: Any) -> ExtractorAgent:
    llm = OpenAILLM("m", base_url=server.url, max_retries=0, timeout=5, **options)
    return ExtractorAgent(llm)


def played(count: int) -> list[Trajectory]:
    return [Trajectory(id=f"t{i}", task=f"open door {i}", success=True) for i in range(count)]


@pytest.mark.parametrize(
    ("status", "body"),
    [(429, "slow down"), (503, "busy"), (500, "broken"), (401, "wrong key"), (429, QUOTA)],
)
def test_an_outage_pauses_distillation_and_costs_no_item_a_retry(
    server: Server, bank: Bank, caplog: pytest.LogCaptureFixture, status: int, body: Any
) -> None:
    server.replies = [(status, body, {}, 0.0)]
    options: dict[str, Any] = {"distill_workers": 2, "retries": 0, "backoff": 0.02}
    with caplog.at_level(logging.INFO), ExperienceManager(bank, hosted(server), **options) as m:
        for one in played(6):
            m.submit(one)
        wait_until(lambda: m.stats()["pauses"] >= 2)
        stats = m.stats()
        assert (stats["dead"], stats["failed"], stats["distilled"]) == (0, 0, 0)
        assert str(status) in stats["outage"] and stats["waiting"] == 6
        server.replies = [OK]
        wait_until(lambda: m.stats()["distilled"] == 6)
        assert m.stats()["outage"] is None and len(bank) > 0
    words = [one.getMessage() for one in caplog.records if one.name.endswith("breaker")]
    warned = [one for one in caplog.records if one.name.endswith("breaker") and one.levelno > 20]
    assert len(warned) == 1 and "Distillation pauses until" in warned[0].getMessage()
    assert words[-1] == "Distillation goes on"


def test_a_refused_connection_pauses_and_one_request_at_a_time_tries_again(
    server: Server, bank: Bank
) -> None:
    server.replies = [(503, "busy", {}, 0.05)]
    with ExperienceManager(bank, hosted(server), distill_workers=4, backoff=0.05) as manager:
        for one in played(8):
            manager.submit(one)
        wait_until(lambda: manager.stats()["pauses"] >= 2)
        server.peak = 0
        wait_until(lambda: manager.stats()["pauses"] >= 3)
        assert server.peak <= 1 and len(server.requests) <= 12
    assert bank.queue.counts()["queued"] == 8
    gone = OpenAILLM("m", base_url="http://127.0.0.1:9/v1", max_retries=0)
    with ExperienceManager(bank, ExtractorAgent(gone), backoff=0.02) as manager:
        wait_until(lambda: manager.stats()["pauses"] >= 2)
        assert "ConnectError" in manager.stats()["outage"] and manager.stats()["dead"] == 0


def test_a_bad_answer_still_counts_against_its_item_alone(server: Server, bank: Bank) -> None:
    server.replies = [(200, completion(""), {}, 0.0)]
    options: dict[str, Any] = {"distill_workers": 1, "retries": 0, "backoff": 0.001}
    with ExperienceManager(bank, hosted(server), **options) as manager:
        for one in played(5):
            manager.submit(one)
        manager.drain(20)
        assert manager.stats()["dead"] == 5 and manager.stats()["pauses"] == 0


def test_an_item_that_breaks_the_server_is_given_up_while_others_are_distilled(bank: Bank) -> None:
    class Choosy:
        version = 0

        async def adistill(self, trajectory: Trajectory, shown: Any) -> Distillation:
            if trajectory.id == "t0":
                raise BackendError("got 500: this one is poison", outage="passing")
            operations = (Add(text=f"lesson of {trajectory.id}"),)
            return Distillation(parsed=ParsedOperations(operations=operations))

        async def arefine(self, query: str, experience: Any) -> Any: ...

        async def amerge(self, experiences: Any) -> Any: ...

    with ExperienceManager(bank, Choosy(), backoff=0.001, retries=1) as manager:
        for number, one in enumerate(played(30)):
            manager.submit(one)
            if number:
                time.sleep(0.02)
        wait_until(lambda: manager.stats()["distilled"] == 29)
        wait_until(lambda: manager.stats()["dead"] == 1)
        manager.drain(20)
        assert [one.id for one in manager.dead_letters()] == ["t0"]


def test_drain_does_not_wait_for_a_key_that_stays_refused(server: Server, bank: Bank) -> None:
    server.replies = [(401, "Incorrect API key", {}, 0.0)]
    with ExperienceManager(bank, hosted(server), backoff=0.005) as manager:
        manager.submit(played(1)[0])
        with pytest.raises(BackendError, match=r"Incorrect API key; 1 episodes are not distilled"):
            manager.drain()
        assert bank.queue.counts() == {"queued": 1, "done": 0, "dead": 0}


def test_a_spent_budget_ends_distillation_and_keeps_the_queue(
    server: Server, bank: Bank, caplog: pytest.LogCaptureFixture
) -> None:
    server.replies = [OK]
    spender = hosted(server, max_total_tokens=22)  # two replies
    nearest: dict[str, Any] = {"retrieval": {"strategy": "diverse"}, "distill_workers": 1}
    with ExperienceManager(bank, spender, backoff=0.001, **nearest) as manager:
        for one in played(5):
            manager.submit(one)
        with pytest.raises(BudgetError, match=r"max_total_tokens=22.*3 episodes .* stay queued"):
            manager.drain()
        assert len(server.requests) == 2
        stats = manager.stats()
        assert (stats["distilled"], stats["waiting"], stats["dead"]) == (2, 3, 0)
        entry = next(iter(bank.entries()))
        assert manager.ask("open door 0").text == entry.text  # as it is: no request is made
        begin = time.monotonic()
        manager.close(drain=30)
        assert time.monotonic() - begin < 10
    assert any("3 finished episodes are not distilled" in one.message for one in caplog.records)
    assert [one.getMessage() for one in caplog.records if "ends here" in one.getMessage()]
    with ExperienceManager(bank, hosted(server)) as manager:
        manager.drain(20)
        assert manager.stats()["distilled"] == 3


def test_close_stays_within_its_time_during_a_pause(server: Server, bank: Bank) -> None:
    server.replies = [(503, "busy", {}, 0.0)]
    manager = ExperienceManager(bank, hosted(server), backoff=10.0)
    for one in played(4):
        manager.submit(one)
    wait_until(lambda: manager.stats()["pauses"] == 1)
    begin = time.monotonic()
    manager.close(drain=0.3)
    assert time.monotonic() - begin < 3 and bank.queue.counts()["queued"] == 4


def test_submit_never_waits_for_a_service_that_is_out(server: Server, bank: Bank) -> None:
    server.replies = [(503, "busy", {}, 0.0)]
    with ExperienceManager(bank, hosted(server), queue_size=4, backoff=1.0) as manager:
        for one in played(12):
            manager.submit(one)
        assert manager.stats()["waiting"] == 12


async def test_pauses_grow_and_are_bounded_and_jittered(monkeypatch: pytest.MonkeyPatch) -> None:
    breaker = CircuitBreaker("Work", threshold=2, first=20.0, longest=50.0, patience=100.0)
    now, waited = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        waited.append(seconds)

    with monkeypatch.context() as patched:  # a clock that only pauses move
        clock = SimpleNamespace(**vars(time) | {"monotonic": lambda: now})
        patched.setattr("experiential.bank.breaker.time", clock)
        patched.setattr(asyncio, "sleep", sleep)
        for failures in range(1, 8):
            with pytest.raises(BackendError):
                async with breaker.turn():
                    raise BackendError("busy", outage="passing")
            assert len(waited) == max(0, failures - 2)
            assert breaker.hopeless() is None or failures > 4
        assert str(breaker.hopeless()) == "busy" and breaker.pauses == 6
        async with breaker.turn():
            pass
        assert breaker.error is None and breaker.hopeless() is None
    waited.pop()  # that of the turn that went well
    for pause, longest in zip(waited, (20, 40, 50, 50, 50), strict=True):
        assert longest / 2 <= pause <= longest
    assert len({pause / 50 for pause in waited[2:]}) == 3, "the same at every time"
    with pytest.raises(TimeoutError):  # cancelled in its turn, it leaves the turn to others
        async with asyncio.timeout(0.01), breaker.turn():
            await asyncio.sleep(1)
    async with asyncio.timeout(1), breaker.turn():
        pass


def test_errors_of_other_clients_are_told_apart() -> None:
    class Other(Exception):
        def __init__(self, status_code: int) -> None:
            self.status_code = status_code

    assert [outage_of(Other(one)) for one in (401, 429, 503, 400)] == [
        "lasting",
        "passing",
        "passing",
        None,
    ]
    assert outage_of(ConnectionRefusedError()) == "passing"
    assert outage_of(BudgetError("spent")) is outage_of(ValueError()) is outage_of(None) is None
