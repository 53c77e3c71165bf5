"""Run concurrent work so that no clock decides what it does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from experiential.llm.base import LLM, Prompt, SamplingParams
from experiential.sync import cancel_tasks
from experiential.types import Generation

T = TypeVar("T")


class _Asked(NamedTuple):
    place: int  # of the work that asks
    answer: asyncio.Future[Generation]
    prompt: Prompt
    sampling: SamplingParams | None


@dataclass
class _Run:
    asked: list[_Asked] = field(default_factory=list[_Asked])
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


_WORK: ContextVar[tuple[_Run | None, int]] = ContextVar("run and place", default=(None, 0))


class Rounds(LLM):
    """Let concurrent work go on in rounds, so that equal runs do equal things.

    Which requests a model answers as one batch decides the last bits of its log-probabilities, and
    whoever reads or writes a bank first decides what the next one finds. Both depend on the clock
    where work runs concurrently. ``run`` lets one piece of work go on at a time, in order, until it
    asks the model or ends, and then has all requests answered as one batch.

    Outside ``run``, requests are answered one at a time in the order in which they come. Runs
    take turns.

    Caveat: environments and bank calls of different episodes no longer overlap, and a round takes
    as long as its longest answer.

    >>> from experiential.llm.scripted import ScriptedLLM
    >>> rounds, said = Rounds(ScriptedLLM(lambda messages: messages[-1]["content"].upper())), []
    >>> async def work(name: str) -> str:
    ...     said.append(f"{name} asks")
    ...     answer = await rounds.generate([{"role": "user", "content": name}])
    ...     said.append(f"{name} ends")
    ...     return answer.text
    >>> asyncio.run(rounds.run([work("a"), work("b")], most=2))
    ['A', 'B']
    >>> said
    ['a asks', 'b asks', 'a ends', 'b ends']

    Args:
        llm: answers.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.name, self.tokenizer = llm, llm.name, llm.tokenizer
        self.supports_choices = llm.supports_choices
        self._run: _Run | None = None
        self._alone, self._turn = asyncio.Lock(), asyncio.Lock()

    @property
    def version(self) -> int:  # type: ignore[override]  # a live value here, a default in the base
        """Return the optimiser steps that the weights have seen."""
        return self.llm.version

    @property
    def supports_tools(self) -> bool:  # type: ignore[override]  # likewise
        """Return whether responses can call tools."""
        return self.llm.supports_tools

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response, with the other requests of the round."""
        mine, place = _WORK.get()
        if (run := self._run) is None or run is not mine:
            async with self._alone:
                return await self.llm.generate(prompt, sampling)
        answer = asyncio.get_running_loop().create_future()
        run.asked.append(_Asked(place, answer, prompt, sampling))
        run.stopped.set()
        return await answer

    async def run(self, work: Sequence[Coroutine[Any, Any, T]], *, most: int) -> list[T]:
        """Run coroutines, at most ``most`` begun at a time; return their results in order.

        What one of them raises ends all others.
        """
        try:
            async with self._turn:
                return await self._ran(work, most)
        finally:
            for one in work:
                one.close()  # what never began

    async def _ran(self, work: Sequence[Coroutine[Any, Any, T]], most: int) -> list[T]:
        run, left = _Run(), deque(enumerate(work))
        tasks: list[asyncio.Task[T]] = []
        self._run = run

        async def placed(place: int, one: Coroutine[Any, Any, T]) -> T:
            _WORK.set((run, place))
            return await one

        async def stopped() -> None:
            """Wait until the piece of work that goes on has asked or ended."""
            await run.stopped.wait()
            run.stopped.clear()
            for task in tasks:
                if task.done():
                    task.result()

        try:
            while left or not all(task.done() for task in tasks):
                asked, run.asked = run.asked, []
                answers = await self._answers(asked)
                for place in dict.fromkeys(one.place for one in asked):
                    for one, answer in zip(asked, answers, strict=True):
                        if one.place != place or one.answer.done():
                            continue
                        if isinstance(answer, BaseException):
                            one.answer.set_exception(answer)
                        else:
                            one.answer.set_result(answer)
                    asks = any(one.place == place for one in run.asked)
                    if not asks and not tasks[place].done():  # as work does that gave up waiting
                        await stopped()
                while left and sum(not task.done() for task in tasks) < most:
                    tasks.append(asyncio.create_task(placed(*left.popleft())))
                    tasks[-1].add_done_callback(lambda _: run.stopped.set())
                    await stopped()
                if not run.asked and not left and not all(task.done() for task in tasks):
                    await stopped()  # work that asked several things at once, and has not ended
            return [task.result() for task in tasks]
        finally:
            self._run = None
            await cancel_tasks(tasks)

    async def _answers(self, asked: Sequence[_Asked]) -> list[Generation | BaseException]:
        """Have all requests answered as one batch; return an answer or error for each."""
        with self.llm.together():
            answers = [
                asyncio.ensure_future(self.llm.generate(one.prompt, one.sampling)) for one in asked
            ]
            await asyncio.sleep(0)  # each of them queues its request
        return await asyncio.gather(*answers, return_exceptions=True)

    def together(self) -> AbstractContextManager[None]:
        """Start what is asked for in the block when it ends."""
        return self.llm.together()

    def close(self) -> None:
        """Close the backend."""
        self.llm.close()
