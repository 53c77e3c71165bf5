"""Concurrent callers, few calls: who handles what, who gets which error, and who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from experiential.sync import (
    Batcher,
    BatchInterruptedError,
    BatchTimeoutError,
    ending_with_callbacks,
)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


class Recorder:
    """Upper-case letters, and remember the batches; "!" stops a batch until ``go`` is set."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.entered = threading.Event()
        self.go = threading.Event()

    def __call__(self, letters: list[str]) -> list[Any]:
        self.batches.append(letters)
        if "!" in letters:
            self.entered.set()
            assert self.go.wait(60)
        if "interrupt" in letters:
            raise KeyboardInterrupt
        if "down" in letters:
            raise ConnectionError("away")
        return [ValueError(one) if one == "bad" else one.upper() for one in letters]


@pytest.fixture
def record() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.go.set()


def test_a_caller_alone_waits_for_nobody_and_starts_no_thread(record: Recorder) -> None:
    batcher, threads = Batcher[str, str](record), threading.active_count()
    assert [batcher.run(["a"]), batcher.run(["b", "c"]), batcher.run([])] == [["A"], ["B", "C"], []]
    assert record.batches == [["a"], ["b", "c"]] and threading.active_count() == threads


def behind(
    batcher: Batcher[str, str], record: Recorder, pool: ThreadPoolExecutor, *calls: list[str]
) -> list[Any]:
    """Make calls one after the other while a batch is being handled; return their futures."""
    futures = [pool.submit(batcher.run, ["!"])]
    assert record.entered.wait(60)
    waiting = 0
    for call in calls:
        futures.append(pool.submit(batcher.run, call))
        waiting += len(call)
        until(lambda count=waiting: batcher.waiting == count)
    return futures


@pytest.mark.parametrize("workers", [0, 1])
def test_what_comes_while_a_batch_is_handled_is_the_next_one_in_order(
    record: Recorder, workers: int
) -> None:
    batcher = Batcher[str, str](record, workers=workers)
    with ThreadPoolExecutor(8) as pool:
        futures = behind(batcher, record, pool, ["a"], ["b", "c"], ["d"])
        record.go.set()
        assert [f.result(60) for f in futures] == [["!"], ["A"], ["B", "C"], ["D"]]
    assert record.batches == [["!"], ["a", "b", "c", "d"]]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_one_item_reaches_its_caller_and_an_error_of_the_call_everybody(
    record: Recorder, workers: int
) -> None:
    batcher = Batcher[str, str](record, workers=workers)
    with ThreadPoolExecutor(8) as pool:
        futures = behind(batcher, record, pool, ["a"], ["b", "bad"], ["c"])
        record.go.set()
        assert [futures[1].result(60), futures[3].result(60)] == [["A"], ["C"]]
        assert isinstance(futures[2].exception(60), ValueError)
        record.entered.clear()
        record.go.clear()
        futures = behind(batcher, record, pool, ["down"], ["b"])
        record.go.set()
        assert all(isinstance(f.exception(60), ConnectionError) for f in futures[1:])
    assert batcher.run(["after"]) == ["AFTER"]


def test_at_most_so_many_items_are_in_a_batch_and_a_leader_leads_until_it_has_its_own(
    record: Recorder,
) -> None:
    batcher = Batcher[str, str](record, most=2)
    with ThreadPoolExecutor(8) as pool:
        futures = behind(batcher, record, pool, ["a", "b", "c"], ["d", "e"])
        record.go.set()
        assert [f.result(60) for f in futures[1:]] == [["A", "B", "C"], ["D", "E"]]
    assert record.batches == [["!"], ["a", "b"], ["c", "d"], ["e"]]


def test_an_interrupted_leader_leaves_nobody_waiting(record: Recorder) -> None:
    batcher = Batcher[str, str](record)
    with ThreadPoolExecutor(8) as pool:
        futures = behind(batcher, record, pool, ["interrupt"], ["b"])
        record.go.set()
        assert isinstance(futures[1].exception(60), KeyboardInterrupt)
        assert isinstance(futures[2].exception(60), BatchInterruptedError)
    assert batcher.run(["after"]) == ["AFTER"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_caller_that_times_out_is_skipped_and_holds_nobody_up(
    record: Recorder, workers: int
) -> None:
    batcher = Batcher[str, str](record, workers=workers)
    with ThreadPoolExecutor(8) as pool:
        futures = behind(batcher, record, pool)
        with pytest.raises(BatchTimeoutError, match="within 0.01 s"):
            batcher.run(["late"], timeout=0.01)
        futures.append(pool.submit(batcher.run, ["b"]))
        until(lambda: batcher.waiting == 1)
        record.go.set()
        assert [f.result(60) for f in futures] == [["!"], ["B"]]
    assert record.batches == [["!"], ["b"]]


def test_a_batch_starts_when_it_is_full_or_when_the_first_has_waited(record: Recorder) -> None:
    full = Batcher[str, str](record, size=3, wait=60, workers=1)
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(full.run, [["a"], ["b"], ["c"]])] == [["A"], ["B"], ["C"]]
    assert [sorted(batch) for batch in record.batches] == [["a", "b", "c"]]
    short = Batcher[str, str](record, size=3, wait=0.01, workers=1)
    assert short.run(["d"]) == ["D"]


def test_batches_finish_in_the_order_in_which_they_came_and_without_those_who_left() -> None:
    first = threading.Event()
    finished: list[list[int]] = []
    handled: list[list[int]] = []

    def handle(numbers: list[int]) -> list[int]:
        handled.append(numbers)
        if 1 in numbers:
            assert first.wait(60)
        return [10 * number for number in numbers]

    def finish(numbers: list[int], found: list[int]) -> list[str]:
        finished.append(numbers)
        return [f"{number}: {tens}" for number, tens in zip(numbers, found, strict=True)]

    batcher = Batcher[int, str](handle, finish=finish, workers=2)
    with ThreadPoolExecutor(3) as pool:
        slow = pool.submit(batcher.run, [1])
        until(lambda: handled == [[1]])
        with pytest.raises(BatchTimeoutError):
            batcher.run([2], timeout=0.01)  # handled already, and waits for its turn
        quick = pool.submit(batcher.run, [3])
        assert finished == []
        first.set()
        assert [slow.result(60), quick.result(60)] == [["1: 10"], ["3: 30"]]
    assert finished == [[1], [3]]


async def test_tasks_of_a_loop_share_a_batch_and_a_cancelled_one_is_skipped(
    record: Recorder,
) -> None:
    batcher = Batcher[str, str](record, workers=1)
    stopped = asyncio.create_task(batcher.arun(["!"]))
    await asyncio.to_thread(record.entered.wait, 60)
    tasks = [asyncio.create_task(batcher.arun([letter])) for letter in "abc"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    with pytest.raises(BatchTimeoutError):
        await batcher.arun(["late"], timeout=0.01)
    record.go.set()
    answers = await asyncio.gather(stopped, *tasks, return_exceptions=True)
    assert answers[:2] == [["!"], ["A"]] and answers[3] == ["C"]
    assert isinstance(answers[2], asyncio.CancelledError)
    assert record.batches == [["!"], ["a", "c"]] and await batcher.arun([]) == []
    batcher.close(RuntimeError("closed"))


async def test_an_answer_that_is_there_at_once_is_not_lost(
    record: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = Batcher[str, str](record, workers=1)
    enqueue: Any = batcher._enqueue  # pyright: ignore[reportPrivateUsage]

    def late(call: Any, items: list[str]) -> None:
        enqueue(call, items)
        until(lambda: call.is_over)  # the worker is faster than the caller

    monkeypatch.setattr(batcher, "_enqueue", late)
    assert await batcher.arun(["a"]) == ["A"]
    batcher.close(RuntimeError("closed"))


def test_a_second_stage_needs_workers(record: Recorder) -> None:
    with pytest.raises(ValueError, match="workers"):
        Batcher[str, str](record, finish=lambda letters, found: found)


def test_closing_ends_the_threads_and_lets_those_who_wait_go(record: Recorder) -> None:
    batcher = Batcher[str, str](record, workers=1, name="to-be-closed")
    with ThreadPoolExecutor(3) as pool:
        futures = behind(batcher, record, pool, ["a"])
        closing = pool.submit(batcher.close, RuntimeError("closed"))
        assert isinstance(futures[1].exception(60), RuntimeError)
        record.go.set()
        closing.result(60)
        assert futures[0].result(60) == ["!"]
    with pytest.raises(RuntimeError, match="closed"):
        batcher.run(["b"])
    assert not any(thread.name.startswith("to-be-closed") for thread in threading.enumerate())


async def test_an_error_of_a_callback_ends_who_would_wait_for_it_for_ever() -> None:
    def broken() -> None:
        raise OSError("disk full")

    async def wait() -> None:
        asyncio.get_running_loop().call_soon(broken)
        await asyncio.Event().wait()

    async def wait_and_forget() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await wait()

    for waiter in (wait, wait_and_forget):
        with pytest.raises(OSError, match="disk full"):
            await asyncio.wait_for(ending_with_callbacks(waiter()), 30)
    assert asyncio.get_running_loop().get_exception_handler() is None
