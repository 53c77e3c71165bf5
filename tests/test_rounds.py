"""Rounds: one piece of work at a time, requests answered as one batch."""

from __future__ import annotations

import asyncio
import random
from contextlib import contextmanager
from typing import Any

import pytest

from experiential.errors import BackendError
from experiential.llm.base import LLM, SamplingParams
from experiential.llm.rounds import Rounds
from experiential.llm.transformers import TransformersLLM
from experiential.types import Generation, Message
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
