"""Which engine answers, without Ray: engines are stubs with a prefix cache."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from experiential.config import ClusterSettings
from experiential.training.openrlhf import engines as module
from experiential.training.openrlhf.engines import Engine, Engines
from experiential.training.openrlhf.supervisor import Incarnation, LostActorError

SHARED, PROMPT, TURN, BLOCK = 64, 192, 128, 16
"""Tokens of all prompts' beginning, of an episode's prompt, of a turn, and of a cached block."""


class RayError(Exception):
    """Stands for Ray's."""


class RayActorError(RayError):
    """Stands for Ray's."""


class RayTaskError(RayError):
    """Stands for Ray's."""


@pytest.fixture(autouse=True)
def stub_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    stub: Any = ModuleType("ray")
    stub.exceptions = SimpleNamespace(
        RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError
    )
    monkeypatch.setitem(sys.modules, "ray", stub)


class StubEngines:
    """Engines that answer after a while, and count the tokens that were not cached.

    Attributes:
        prefilled: tokens that were not cached.
        asked: requests to each engine.
        began: starts of each engine.
        deaf: engines whose next answer, to whatever call, is that they have died.
        silent: engines that do not start again.
        broken: engines that cannot be started again.
        paused: actors that are held.
        sent: actors that each `_reconnect` has sent the weights to.
    """

    def __init__(self, count: int, *, restarts: int = 2) -> None:
        self.prefilled, self.asked = 0, [0] * count
        self.began, self._random = [0] * count, random.Random(0)
        self.deaf, self.silent, self.broken = set[int](), set[int](), set[int]()
        self.paused, self.sent = list[Incarnation](), list[list[Incarnation]]()
        cluster = ClusterSettings(call_timeout=20.0, restarts=restarts)
        made = [Engine(f"engine {i}", lambda i=i: self._begin(i), cluster) for i in range(count)]
        self.engines = Engines(made, self._reconnect)

    async def _reconnect(self) -> None:
        self.sent.append(await self.engines.pause())
        self.engines.note_weights(self.sent[-1])
        await self.engines.resume()

    def _begin(self, number: int) -> Incarnation:
        self.began[number] += 1
        cache: set[int] = set()
        begun: Future[Any] = Future()
        if self.began[number] > 1 and number in self.broken:
            begun.set_exception(RayActorError("no GPU is left"))
        elif self.began[number] == 1 or number not in self.silent:
            begun.set_result("ready")

        def call(work: Callable[[Future[Any]], object]) -> Any:
            answer: Future[Any] = Future()
            if number in self.deaf:
                self.deaf.remove(number)
                answer.set_exception(RayActorError("the process is gone"))
            else:
                work(answer)
            return SimpleNamespace(future=lambda: answer)

        def prefill(ids: list[int], answer: Future[Any]) -> None:
            chain, known, whole = 0, True, len(ids) // BLOCK
            for i in range(whole):
                chain = hash((chain, *ids[i * BLOCK : (i + 1) * BLOCK]))
                known = known and chain in cache
                self.prefilled += 0 if known else BLOCK
                cache.add(chain)
            out = SimpleNamespace(outputs=[number])
            loop = asyncio.get_running_loop()
            loop.call_later(self._random.uniform(0.0, 0.004), answer.set_result, out)

        def generate(ids: list[int], _: object) -> Any:
            self.asked[number] += 1
            return call(lambda answer: prefill(ids, answer))

        def pause() -> Any:
            self.paused.append(actor)
            return call(lambda answer: answer.set_result(None))

        def resume() -> Any:
            self.paused = [one for one in self.paused if one is not actor]
            return call(lambda answer: answer.set_result(None))

        handle = SimpleNamespace(
            generate=SimpleNamespace(remote=generate),
            pause_generation=SimpleNamespace(remote=pause),
            resume_generation=SimpleNamespace(remote=resume),
        )
        actor = Incarnation(handle, SimpleNamespace(future=lambda: begun), lambda: None)
        return actor


async def started(count: int, **options: int) -> StubEngines:
    stubs = StubEngines(count, **options)
    await stubs.engines.start()
    return stubs


async def play(stubs: StubEngines, *, sessions: bool, episodes: int = 64, turns: int = 10) -> None:
    """Play episodes at once; the prompt of each turn continues that of the turn before."""
    start = random.Random(1)

    async def episode(number: int) -> None:
        ids = [*range(SHARED), *(10_000 * number + i for i in range(PROMPT - SHARED))]
        for turn in range(turns):
            await stubs.engines.generate(ids, None, str(number) if sessions else None)
            ids += (10_000 * number + 1_000 * (turn + 1) + i for i in range(TURN))
            await asyncio.sleep(start.uniform(0.0, 0.004))  # the environment's step

    await asyncio.gather(*map(episode, range(episodes)))


async def test_conversations_stay_where_their_turns_are_cached() -> None:
    prefilled = dict[tuple[int, bool], int]()
    for count, sessions in ((1, True), (8, True), (8, False)):
        stubs = await started(count)
        await play(stubs, sessions=sessions)
        prefilled[count, sessions] = stubs.prefilled
        assert min(stubs.asked) > 0.7 * sum(stubs.asked) / count, "all engines work"
    assert prefilled[8, True] <= 1.1 * prefilled[1, True]
    assert prefilled[8, False] > 2 * prefilled[1, True]


async def test_a_conversation_goes_on_when_its_engine_is_lost() -> None:
    stubs = await started(4)
    await asyncio.gather(*(stubs.engines.generate([i], None, str(i)) for i in range(4)))
    home = await stubs.engines.generate([0], None, "0")
    stubs.deaf.add(home)
    found = [await stubs.engines.generate([0], None, "0") for _ in range(3)]
    assert len(set(found)) == 1 and stubs.began[home] == 2 and sum(stubs.began) == 5


async def test_requests_without_a_session_go_to_the_least_busy_engine() -> None:
    stubs = await started(3)
    await asyncio.gather(*(stubs.engines.generate([i], None) for i in range(12)))
    assert stubs.asked == [4, 4, 4]
    for i in range(6):  # nothing runs: in turn
        await stubs.engines.generate([i], None)
    assert stubs.asked == [6, 6, 6]


async def test_the_longest_silent_conversation_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SESSIONS", 2)
    stubs = await started(3)
    homes = [await stubs.engines.generate([0], None, name) for name in "abacb"]
    assert homes[0] == homes[2] and homes[1] != homes[4], "c took the place of b, and not of a"
    assert len(stubs.engines._sessions) == 2


# What is lost


async def test_the_others_answer_while_a_lost_engine_does_not_start_again() -> None:
    """As after the loss of a node: no GPU is free for it."""
    stubs = await started(2)
    stubs.deaf.add(0)
    stubs.silent.add(0)
    assert await stubs.engines.generate([0], None) == 1
    found = await asyncio.gather(*(stubs.engines.generate([i], None) for i in range(8)))
    assert found == [1] * 8 and stubs.began == [2, 1]
    assert await stubs.engines.pause() == [stubs.engines.engines[1].current]
    await stubs.engines.resume()
    assert not stubs.paused and await stubs.engines.generate([9], None) == 1
    stubs.engines.close()


async def test_a_lost_engine_answers_again_once_it_has_the_weights() -> None:
    stubs = await started(2)
    stubs.deaf.add(0)
    await asyncio.gather(*(stubs.engines.generate([i], None) for i in range(4)))
    for _ in range(100):
        await asyncio.sleep(0)
    assert stubs.sent == [[engine.current for engine in stubs.engines.engines]]
    found = await asyncio.gather(*(stubs.engines.generate([i], None) for i in range(4)))
    assert sorted(found) == [0, 0, 1, 1] and not stubs.paused


async def test_an_engine_that_has_died_unnoticed_is_found_when_it_is_to_be_held() -> None:
    stubs = await started(2)
    stubs.deaf.add(1)
    lost = stubs.engines.engines[1].current
    held = await stubs.engines.pause()
    assert held == [stubs.engines.engines[0].current] and lost.ended
    assert stubs.engines.engines[1].restarts == 1


async def test_the_only_engine_is_waited_for_when_it_has_died_unnoticed() -> None:
    stubs = await started(1)
    stubs.deaf.add(0)
    assert await stubs.engines.pause() == [stubs.engines.engines[0].current]
    assert stubs.began == [2]


async def test_engines_are_done_without_when_no_restart_is_left_and_the_last_is_named() -> None:
    stubs = await started(2, restarts=1)
    stubs.broken |= {0, 1}
    stubs.deaf.add(0)
    for i in range(4):
        assert await stubs.engines.generate([i], None) == 1
    assert stubs.began[0] == 2 and not stubs.engines.engines[0].alive
    stubs.deaf.add(1)
    for call in (stubs.engines.generate([9], None), stubs.engines.pause()):
        with pytest.raises(LostActorError, match="no GPU is left; no restart is left of 1"):
            await asyncio.wait_for(call, 20.0)
