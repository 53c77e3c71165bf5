"""DeviceExecutor: one thread, priorities, patience, any event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from experiential.errors import BackendError
from experiential.llm.executor import DeviceExecutor


@pytest.fixture
def executor():
    executor = DeviceExecutor("test", patience=30.0)
    yield executor
    executor.close()


def hold(executor: DeviceExecutor) -> threading.Event:
    """Occupy the executor until the event is set."""
    started, release = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        release.wait(10)

    executor.submit(wait, priority=0)
    assert started.wait(10)
    return release


def test_lower_priority_first_and_fifo_within(executor: DeviceExecutor):
    release, order = hold(executor), []
    futures = [
        executor.submit(lambda i=i: order.append(i), priority=p)
        for i, p in enumerate([1, 0, 1, 0, 2])
    ]
    release.set()
    for future in futures:
        future.result(10)
    assert order == [1, 3, 0, 2, 4]


def test_patience_bounds_the_wait_of_the_background():
    """A background job is served though the rollout always has another step ready."""
    executor, stop = DeviceExecutor("p", patience=0.05), threading.Event()

    def step() -> None:
        time.sleep(0.005)
        if not stop.is_set():
            executor.submit(step, priority=0)

    executor.submit(step, priority=0)
    executor.submit(lambda: None, priority=1).result(5)
    stop.set()
    executor.close()


async def test_runs_on_one_thread_returns_results_and_raises(executor: DeviceExecutor):
    names = await asyncio.gather(
        *(executor.run(lambda: threading.current_thread().name) for _ in range(5))
    )
    assert set(names) == {"executor-test"}
    with pytest.raises(KeyError):
        await executor.run(lambda: {}["missing"])
    assert await executor.run(lambda: 3) == 3


def test_awaitable_from_any_event_loop(executor: DeviceExecutor):
    results = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(asyncio.run(executor.run(lambda: i))))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2, 3]


async def test_busy_seconds_are_counted_per_priority(executor: DeviceExecutor):
    await executor.run(lambda: time.sleep(0.02), priority=1)
    await executor.run(lambda: None, priority=0)
    assert executor.busy[1] >= 0.02 > executor.busy[0]


def test_delayed_jobs_do_not_hold_up_ready_ones(executor: DeviceExecutor):
    order = []
    late = executor.submit(lambda: order.append("late"), delay=0.05)
    executor.submit(lambda: order.append("now")).result(5)
    late.result(5)
    assert order == ["now", "late"]


async def test_close_cancels_what_is_queued():
    executor = DeviceExecutor("c")
    release = hold(executor)
    waiting = asyncio.create_task(executor.run(lambda: None))
    await asyncio.sleep(0.01)
    threading.Timer(0.05, release.set).start()
    await asyncio.to_thread(executor.close)
    with pytest.raises(BackendError, match="closed"):
        await waiting
    with pytest.raises(BackendError, match="closed"):
        await executor.run(lambda: None)
    executor.close()


def test_inside_foreground_the_background_waits_even_for_an_idle_executor(executor: DeviceExecutor):
    order: list[str] = []
    with executor.foreground():
        late = executor.submit(lambda: order.append("background"), priority=1)
        executor.submit(lambda: order.append("rollout")).result(5)
        time.sleep(0.05)
        assert order == ["rollout"] and not late.done()
    late.result(5)
    assert order == ["rollout", "background"]


def test_the_background_outwaits_a_foreground_that_lasts_longer_than_patience():
    executor = DeviceExecutor("p", patience=0.05)
    with executor.foreground():
        begin = time.monotonic()
        executor.submit(lambda: None, priority=1).result(5)
        assert time.monotonic() - begin >= 0.05
    executor.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_numbers_too_small_for_normal_ones_are_zero_on_all_its_threads(threads: int) -> None:
    """They would take most of the time of attention's gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    executor = DeviceExecutor("small")

    def count() -> int:
        return int((torch.full((1 << 20,), 1e-30) * 1e-10).count_nonzero())

    try:
        assert executor.submit(count).result(30) == 0
    finally:
        executor.close()
        torch.set_num_threads(before)
    assert count() == 1 << 20  # here as before
