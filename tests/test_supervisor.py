"""The supervisor of Ray actors, without Ray: calls are futures that a test settles."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.config import ClusterSettings
from experiential.errors import BankError
from experiential.sync import EventLoopThread
from experiential.training.openrlhf import supervisor
from experiential.training.openrlhf.bank_actor import ActorBank, BankActor
from experiential.training.openrlhf.supervisor import (
    FailedCallError,
    Incarnation,
    LostActorError,
    SilentActorError,
    Supervisor,
    answers,
)


class RayError(Exception):
    """Stands for Ray's."""


class RayActorError(RayError):
    """Stands for Ray's."""


class RayTaskError(RayError):
    """Stands for Ray's: brings the exception of the method along."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"ray::Host.step()\n  a traceback\n{cause}")
        self.cause = cause


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    stub: Any = ModuleType("ray")
    stub.exceptions = SimpleNamespace(
        RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError
    )
    monkeypatch.setitem(sys.modules, "ray", stub)


class World:
    """Starts actors; ``outcomes`` are what their calls end with, in order: none never ends."""

    def __init__(self, **settings: Any) -> None:
        self.outcomes: list[Any] = []
        self.begun: list[Incarnation] = []
        self.killed: list[int] = []
        cluster = ClusterSettings(**{"restarts": 2, "call_timeout": 5.0} | settings)
        self.actor = Supervisor("worker 0", self.begin, cluster)

    def call(self) -> Any:
        future: Future[Any] = Future()
        outcome = self.outcomes.pop(0) if self.outcomes else "fine"
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        elif outcome is not None:
            future.set_result(outcome)
        return SimpleNamespace(future=lambda: future)

    def begin(self) -> Incarnation:
        number = len(self.begun)
        handle = SimpleNamespace(work=SimpleNamespace(remote=lambda *_: self.call()))
        self.begun.append(Incarnation(handle, self.call(), lambda: self.killed.append(number)))
        return self.begun[-1]


async def test_an_actor_starts_when_it_is_asked_for_and_only_once() -> None:
    world = World()
    assert not world.begun and world.actor.alive
    life = await world.actor.started()
    assert life is await world.actor.started() is world.actor.current
    assert (life.result, len(world.begun)) == ("fine", 1)
    assert await world.actor.ask(life, "work", 1) == "fine"


async def test_a_dead_actor_is_named_and_the_next_life_begins_when_it_is_needed() -> None:
    world = World()
    life = await world.actor.started()
    world.outcomes = [RayActorError("The actor died.\n\tclass_name: Host\nOut of memory.")]
    with pytest.raises(LostActorError, match=r"worker 0 to be alive, but it died: The actor died."):
        await world.actor.ask(life, "work")
    assert (world.killed, len(world.begun)) == ([0], 1)
    with pytest.raises(LostActorError, match="Out of memory"):
        await world.actor.ask(life, "work")
    assert await world.actor.started() is not life
    assert world.actor.failures == ["worker 0 died: The actor died. Out of memory."]
    assert world.actor.restarts == 1


async def test_what_a_method_raises_is_no_death() -> None:
    world = World()
    life = await world.actor.started()
    world.outcomes = [RayTaskError(ValueError("no such door"))]
    with pytest.raises(FailedCallError, match="got: ValueError: no such door") as caught:
        await world.actor.ask(life, "work")
    assert isinstance(caught.value.cause, ValueError)
    assert await world.actor.ask(life, "work") == "fine" and not world.killed


async def test_an_engine_whose_process_died_inside_a_living_actor_is_dead() -> None:
    world = World()
    life = await world.actor.started()
    EngineDeadError = type("EngineDeadError", (Exception,), {})
    world.outcomes = [RayTaskError(EngineDeadError("EngineCore encountered an issue"))]
    with pytest.raises(LostActorError, match="died: EngineDeadError"):
        await world.actor.ask(life, "work")
    assert world.killed == [0]


async def test_the_caller_decides_whether_an_actor_that_gives_no_answer_is_lost() -> None:
    world = World()
    life = await world.actor.started()
    world.outcomes = [None]
    with pytest.raises(SilentActorError, match=r"no answer within 0.01 s; raise cluster.call_tim"):
        await world.actor.ask(life, "work", seconds=0.01)
    assert not world.killed and not world.actor.failures
    world.actor.lose(life, "hangs")
    world.actor.lose(life, "hangs, and somebody else noticed it too")
    assert (world.killed, world.actor.failures) == ([0], ["worker 0 hangs"])


async def test_an_actor_that_does_not_start_is_lost() -> None:
    world = World(start_timeout=0.01)
    world.outcomes = [None, RayTaskError(OSError("port taken"))]
    with pytest.raises(LostActorError, match="no answer within 0.01 s"):
        await world.actor.started()
    with pytest.raises(FailedCallError, match="port taken"):
        await world.actor.started()
    assert world.actor.failures[1] == "worker 0 did not start: OSError: port taken"
    await world.actor.started()
    assert world.killed == [0, 1]


@pytest.mark.parametrize("restarts", [0, 2])
async def test_after_the_last_restart_the_reason_is_told(restarts: int) -> None:
    world = World(restarts=restarts)
    for i in range(restarts + 1):
        world.actor.lose(await world.actor.started(), f"died: cause {i}")
    assert not world.actor.alive and world.actor.restarts == restarts
    with pytest.raises(
        LostActorError, match=rf"died: cause {restarts}; no restart is left of {restarts}"
    ):
        await world.actor.started()


async def test_an_actor_that_may_not_be_started_again_says_why() -> None:
    world = World()
    actor = Supervisor("engine 0", world.begin, ClusterSettings(), fixed="engines share GPUs")
    actor.lose(actor.current, "died: out of memory")
    with pytest.raises(LostActorError, match="out of memory; engines share GPUs"):
        await actor.started()
    assert actor.restarts == 0


async def test_stopping_lets_the_actor_finish_and_starts_nothing() -> None:
    never, world = World(), World()
    await never.actor.stop("work", 1.0)
    assert not never.begun
    life = await world.actor.started()
    world.outcomes = [None]
    await world.actor.stop("work", 0.01)
    await world.actor.stop("work", 0.01)
    assert world.killed == [0] and not world.actor.failures
    for call in (world.actor.started(), world.actor.ask(life, "work")):
        with pytest.raises(LostActorError, match="was closed"):
            await call


async def test_a_failed_watch_of_a_living_bank_is_begun_again_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(restarts=0)
    bank: Any = object.__new__(BankActor)
    bank.supervisor, bank.cluster, bank.token = world.actor, ClusterSettings(), "secret"
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: True, raising=False)
    world.outcomes = [("127.0.0.1", 1, 0), RayTaskError(ValueError("odd")), RayActorError("gone")]
    actor = await bank.started()
    actor.handle.until_ended = actor.handle.work
    await bank._watch()
    assert (world.killed, world.outcomes) == ([0], [])
    assert world.actor.failures == ["bank actor on 127.0.0.1 died: gone"]


async def test_a_partner_that_died_is_named_and_not_the_one_whose_call_failed_for_it() -> None:
    calls: list[Future[Any]] = [Future() for _ in range(3)]
    references = [SimpleNamespace(future=lambda call=call: call) for call in calls]
    asked = asyncio.ensure_future(answers(references, ["rank 0", "rank 1", "rank 2"], 60.0))
    await asyncio.sleep(0)
    calls[0].set_exception(RayTaskError(RuntimeError("Connection closed by peer")))
    await asyncio.sleep(0.05)
    assert not asked.done()
    calls[2].set_exception(RayActorError("The actor died."))
    with pytest.raises(LostActorError, match="rank 2 to be alive"):
        await asked


async def test_a_call_that_failed_is_named_when_no_partner_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "_NOTICED_S", 0.05)
    calls: list[Future[Any]] = [Future() for _ in range(2)]
    references = [SimpleNamespace(future=lambda call=call: call) for call in calls]
    calls[0].set_exception(RayTaskError(ValueError("no such row")))
    with pytest.raises(FailedCallError, match="rank 0 .*no such row"):
        await answers(references, ["rank 0", "rank 1"], 60.0)


def test_a_fork_begins_again_when_the_banks_actor_dies_in_it(tmp_path: Path) -> None:
    """Half a copy is removed; a folder that was there before is the caller's and stays."""
    asked: list[str] = []

    async def started() -> str:
        return "actor"

    async def ask(_: str, method: str, namespace: str, path: str, queue: bool) -> None:
        asked.append(method)
        folder = Path(path)
        if len(asked) < 3:
            folder.mkdir(exist_ok=True)
            (folder / "half").touch()
            raise LostActorError("bank actor", "died: killed")
        ExperienceBank(folder, embedder="hashing").close()

    bank: Any = ActorBank.__new__(ActorBank)
    bank._actor = SimpleNamespace(
        loop=EventLoopThread("test"),
        started=started,
        supervisor=SimpleNamespace(ask=ask, alive=True, failures=[]),
    )
    bank.namespace = "default"
    (tmp_path / "there").mkdir()
    with pytest.raises(BankError, match="bank actor to be alive, but it died"):
        bank.fork(tmp_path / "there")
    asked.clear()
    bank.fork(tmp_path / "copy").close()
    assert len(asked) == 3 and not (tmp_path / "copy" / "half").exists()
    assert (tmp_path / "there" / "half").exists()
    bank._actor.loop.close()
