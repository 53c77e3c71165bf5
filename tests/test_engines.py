"""Which engine answers, without Ray: engines are stubs with a prefix cache."""

from __future__ import annotations

import asyncio
import random
import sys
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from experiential.config import ClusterSettings
from experiential.training.openrlhf import engines as module
from experiential.training.openrlhf.engines import Engine, Engines
from experiential.training.openrlhf.supervisor import Incarnation

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
    """Engines that answer after a while, and count the tokens that were not cached."""

    def __init__(self, count: int) -> None:
        self.prefilled, self.asked = 0, [0] * count
        self.began, self._random = [0] * count, random.Random(0)
        self.deaf: set[int] = set()  # their next answer is that they have died
        cluster = ClusterSettings(call_timeout=20.0)
        made = [Engine(f"engine {i}", lambda i=i: self._begin(i), cluster) for i in range(count)]
        self.engines = Engines(made, self._reconnect)

    async def _reconnect(self) -> None:
        pass

    def _begin(self, number: int) -> Incarnation:
        self.began[number] += 1
        cache: set[int] = set()
        begun: Future[Any] = Future()
        begun.set_result("ready")

        def generate(ids: list[int], _: object) -> Any:
            self.asked[number] += 1
            answer: Future[Any] = Future()
            if number in self.deaf:
                self.deaf.remove(number)
                answer.set_exception(RayActorError("the process is gone"))
                return SimpleNamespace(future=lambda: answer)
            chain, known, whole = 0, True, len(ids) // BLOCK
            for i in range(whole):
                chain = hash((chain, *ids[i * BLOCK : (i + 1) * BLOCK]))
                known = known and chain in cache
                self.prefilled += 0 if known else BLOCK
                cache.add(chain)
            loop = asyncio.get_running_loop()
            out = SimpleNamespace(outputs=[number])
            loop.call_later(self._random.uniform(0.0, 0.004), answer.set_result, out)
            return SimpleNamespace(future=lambda: answer)

        handle = SimpleNamespace(generate=SimpleNamespace(remote=generate))
        return Incarnation(handle, SimpleNamespace(future=lambda: begun), lambda: None)


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
        stubs = StubEngines(count)
        await play(stubs, sessions=sessions)
        prefilled[count, sessions] = stubs.prefilled
        assert min(stubs.asked) > 0.7 * sum(stubs.asked) / count, "all engines work"
    assert prefilled[8, True] <= 1.1 * prefilled[1, True]
    assert prefilled[8, False] > 2 * prefilled[1, True]


async def test_a_conversation_goes_on_when_its_engine_is_lost() -> None:
    stubs = StubEngines(4)
    await asyncio.gather(*(stubs.engines.generate([i], None, str(i)) for i in range(4)))
    home = await stubs.engines.generate([0], None, "0")
    stubs.deaf.add(home)
    found = [await stubs.engines.generate([0], None, "0") for _ in range(3)]
    assert len(set(found)) == 1 and stubs.began[home] == 2 and sum(stubs.began) == 5


async def test_requests_without_a_session_go_to_the_least_busy_engine() -> None:
    stubs = StubEngines(3)
    await asyncio.gather(*(stubs.engines.generate([i], None) for i in range(12)))
    assert stubs.asked == [4, 4, 4]
    for i in range(6):  # nothing runs: in turn
        await stubs.engines.generate([i], None)
    assert stubs.asked == [6, 6, 6]


async def test_the_longest_silent_conversation_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SESSIONS", 2)
    stubs = StubEngines(3)
    homes = [await stubs.engines.generate([0], None, name) for name in "abacb"]
    assert homes[0] == homes[2] and homes[1] != homes[4], "c took the place of b, and not of a"
    assert len(stubs.engines._sessions) == 2
