"""Rounds: one piece of work at a time, requests answered as one batch."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.errors import BackendError, BudgetError
from experiential.llm.base import LLM, SamplingParams
from experiential.llm.rounds import Rounds
from experiential.llm.transformers import TransformersLLM
from experiential.types import Distillation, Generation, Message, Trajectory
from tests.llm_tiny import tiny_random_model


class Recorder(LLM):
    """Note what is asked together; answers come back in any order."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self._held = False

    @contextmanager
    def together(self) -> Any:
        self._held = True
        self.batches.append([])
        yield
        self._held = False

    async def generate(self, prompt: Any, sampling: SamplingParams | None = None) -> Generation:
        text = prompt[0]["content"]
        if self._held:
            self.batches[-1].append(text)
        await asyncio.sleep(random.random() / 1000)
        if text == "fail":
            raise BackendError("no answer")
        return Generation(text=text.upper())


def ask(llm: LLM, text: str) -> Any:
    return llm.generate([Message(role="user", content=text)])


async def test_work_alternates_in_order_and_begins_when_there_is_room() -> None:
    llm, done = Recorder(), []
    rounds = Rounds(llm)

    async def work(name: str, times: int) -> str:
        for i in range(times):
            await asyncio.to_thread(done.append, f"{name}{i}")
            await ask(rounds, f"{name}{i}")
            await asyncio.sleep(random.random() / 1000)
        return name

    assert await rounds.run([work("a", 1), work("b", 3), work("c", 2)], most=2) == ["a", "b", "c"]
    assert done == ["a0", "b0", "b1", "c0", "b2", "c1"]
    assert [b for b in llm.batches if b] == [["a0", "b0"], ["b1", "c0"], ["b2", "c1"]]
    assert (await ask(rounds, "after")).text == "AFTER"  # outside a run, too


async def test_several_questions_at_once_and_work_that_asks_nothing() -> None:
    rounds = Rounds(Recorder())

    async def many() -> list[str]:
        answers = await asyncio.gather(*(ask(rounds, text) for text in ("a", "b")))
        return [one.text for one in answers]

    async def none() -> list[str]:
        return []

    assert await rounds.run([none(), many(), none()], most=3) == [[], ["A", "B"], []]
    assert await rounds.run([none(), none()], most=1) == [[], []]
    nothing: list[Any] = []
    assert await rounds.run(nothing, most=1) == []


async def test_a_failure_is_of_the_work_that_asked_and_what_it_raises_ends_the_others() -> None:
    rounds, ended = Rounds(Recorder()), []

    async def bears(text: str) -> str:
        try:
            return (await ask(rounds, text)).text
        except BackendError as error:
            return str(error)

    assert await rounds.run([bears("x"), bears("fail")], most=2) == ["X", "no answer"]

    async def other() -> None:
        try:
            await ask(rounds, "x")
            await ask(rounds, "y")
        finally:
            ended.append("other")

    with pytest.raises(BackendError, match="no answer"):
        await rounds.run([other(), ask(rounds, "fail"), other()], most=2)
    assert ended == ["other"]  # the third never began


async def test_requests_made_together_are_one_batch_however_slowly_they_come() -> None:
    """The engine waits 0 seconds for more, so only the block can make one batch of them."""
    model, tokenizer = tiny_random_model()
    llm = TransformersLLM(model, tokenizer, batch_wait=0.0)
    sampling = SamplingParams(max_tokens=1, seed=0)
    with llm.together():
        asked = []
        for text in ("Go.", "A longer question about the door?", "Stop."):
            asked.append(
                asyncio.ensure_future(llm.generate([Message(role="user", content=text)], sampling))
            )
            await asyncio.sleep(0.05)
        assert llm.stats.forwards == 0
    await asyncio.gather(*asked)
    assert llm.stats.forwards == 1
    llm.close()


async def test_work_that_gives_up_waiting_stops_nobody() -> None:
    """Each asks once and is cancelled by its own time-out before the answer comes."""

    class Slow(LLM):
        async def generate(self, prompt: Any, sampling: SamplingParams | None = None) -> Generation:
            await asyncio.sleep(0.2)
            return Generation(text=prompt[0]["content"])

    rounds = Rounds(Slow())

    async def impatient() -> str:
        try:
            return (await asyncio.wait_for(ask(rounds, "x"), 0.01)).text
        except TimeoutError:
            return "late"

    work = rounds.run([impatient(), impatient(), ask(rounds, "y")], most=3)
    late, too, answer = await asyncio.wait_for(work, 30)
    assert (late, too, answer.text) == ("late", "late", "y")

    async def stubborn() -> str:
        return await impatient() + (await ask(rounds, "again")).text

    both = rounds.run([stubborn(), stubborn()], most=2)
    assert await asyncio.wait_for(both, 30) == ["lateagain", "lateagain"]


async def test_who_asks_from_outside_a_run_is_answered_alone_and_runs_take_turns() -> None:
    rounds, begun = Rounds(Recorder()), asyncio.Event()

    async def work(text: str) -> str:
        begun.set()
        await asyncio.sleep(0.05)
        return (await ask(rounds, text)).text

    async def outside() -> str:
        await begun.wait()
        return (await ask(rounds, "outside")).text

    runs = [rounds.run([work(name)], most=1) for name in ("a", "b")]
    assert await asyncio.wait_for(asyncio.gather(outside(), *runs), 30) == ["OUTSIDE", ["A"], ["B"]]


async def test_a_run_that_is_cancelled_leaves_no_work_behind(recwarn: Any) -> None:
    rounds, ended = Rounds(Recorder()), []

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    going = asyncio.create_task(rounds.run([work("a"), work("b")], most=1))
    waiting = asyncio.create_task(rounds.run([work("c")], most=1))
    await asyncio.sleep(0.01)
    for task in (waiting, going):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gc.collect()
    assert ended == ["a"] and not recwarn.list  # such as "coroutine was never awaited"
    assert await rounds.run([ask(rounds, "d")], most=1)


@pytest.fixture
def bank(tmp_path: Path) -> Any:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


class Obedient:
    """Distil by asking nobody; wait, or fail, on demand."""

    version = 0

    def __init__(self, error: Exception | None = None, wait: float = 0.0) -> None:
        self.error, self.wait = error, wait

    async def adistill(self, trajectory: Any, shown: Any) -> Distillation:
        await asyncio.sleep(self.wait)
        if self.error is not None:
            raise self.error
        return Distillation()


def managed(bank: Any, extractor: Obedient) -> ExperienceManager:
    manager = ExperienceManager(bank, cast("Any", extractor), rounds=Rounds(Recorder()))
    for i in range(3):
        manager.submit(Trajectory(id=f"t{i}", task="open the door", success=True))
    return manager


def test_a_drain_that_ends_early_leaves_the_queue_to_the_next_one(bank: Any, caplog: Any) -> None:
    extractor = Obedient(wait=30.0)
    with managed(bank, extractor) as manager:
        manager.pause()
        with pytest.raises(TimeoutError, match="3 items are left"):
            manager.drain(0.1)
        manager.resume()
        with pytest.raises(TimeoutError, match="3 items are left"):
            manager.drain(0.5)
        assert manager.stats()["running"] == 0
        extractor.wait = 0.0
        manager.drain(30)
        assert manager.stats()["distilled"] == 3
    gc.collect()
    assert not caplog.records  # such as "exception was never retrieved"


def test_a_spent_budget_ends_the_drain(bank: Any) -> None:
    extractor = Obedient(BudgetError("no more"))
    with managed(bank, extractor) as manager, pytest.raises(BudgetError, match="3 episodes are"):
        manager.drain(30)
