"""Turns on what all share: never two sides at once, nobody waits for ever, and whoever gives up is
forgotten.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.training.openrlhf.time_slicing import SharedGpus, Tenant, TimeSlicer

pytestmark = pytest.mark.timeout(60)
LONG = 1e9


@dataclass
class World:
    """What happened, in order, and who is inside; the clock stands still unless it is moved."""

    term: float = 0.0
    now: float = 0.0
    log: list[str] = field(default_factory=list[str])
    inside: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    change: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.slicer = TimeSlicer[str](self._change, seconds=self.term, clock=lambda: self.now)
        self.ready: str | None = None
        self.changing = False

    async def _change(self, side: str) -> None:
        assert not self.inside, "somebody was inside while the side changed"
        self.ready, self.changing = None, True
        await asyncio.sleep(0)
        self.changing = False
        self.change(side)
        self.log.append(f"to {side}")
        self.ready = side

    async def stay(
        self, side: str, leave: asyncio.Event | int, *, alone: bool = False, who: str = ""
    ) -> None:
        """Take a turn, and stay until told, or for some rounds of the loop."""
        async with self.slicer.slot(side, exclusive=alone):
            self.enter(side, alone)
            self.log.append(who or side)
            try:
                if isinstance(leave, asyncio.Event):
                    await leave.wait()
                else:
                    await rounds(leave)
            finally:
                self.inside.remove((side, alone))

    def enter(self, side: str, alone: bool) -> None:
        assert self.ready == side, f"{side} came in while things were made ready for {self.ready}"
        assert all(other == side and not others_alone for other, others_alone in self.inside), (
            f"{side} met {self.inside}"
        )
        assert not (alone and self.inside), f"{side} was to be alone, met {self.inside}"
        self.inside.append((side, alone))


async def rounds(n: int = 10) -> None:
    """Let all that can go on do so."""
    for _ in range(n):
        await asyncio.sleep(0)


async def finish(*tasks: asyncio.Task[None]) -> None:
    """Rounds of the loop until all tasks are done; a deadlock fails after many."""
    for _ in range(2000):
        if all(task.done() for task in tasks):
            break
        await asyncio.sleep(0)
    assert all(task.done() for task in tasks), "somebody waits for ever"
    for task in tasks:
        with suppress(asyncio.CancelledError):
            task.result()


async def test_many_of_a_side_are_inside_at_once_and_the_other_side_waits_until_all_have_left() -> (
    None
):
    world, first, second = World(), asyncio.Event(), asyncio.Event()
    requests = [asyncio.create_task(world.stay("generate", leave)) for leave in (first, second)]
    await rounds()
    training = asyncio.create_task(world.stay("train", 1, alone=True))
    await rounds()
    assert world.inside == [("generate", False)] * 2
    first.set()
    await rounds()
    assert "train" not in world.log
    second.set()
    await finish(training, *requests)
    assert world.log == ["to generate", "generate", "generate", "to train", "train"]


async def test_who_wants_to_be_alone_is_alone_also_among_its_own_side() -> None:
    world = World()
    await finish(*(asyncio.create_task(world.stay("train", 3, alone=i != 1)) for i in range(3)))
    assert world.log.count("train") == 3


async def test_after_the_term_newcomers_wait_behind_who_waits_already() -> None:
    world, leave = World(term=5.0, now=100.0), asyncio.Event()
    running = asyncio.create_task(world.stay("generate", leave, who="first"))
    await rounds()
    training = asyncio.create_task(world.stay("train", 1, alone=True))
    world.now += 4.9
    early = asyncio.create_task(world.stay("generate", leave, who="early"))
    await rounds()
    world.now += 0.2
    late = asyncio.create_task(world.stay("generate", 1, who="late"))
    await rounds()
    assert world.log == ["to generate", "first", "early"]
    leave.set()
    await finish(running, early, training, late)
    assert world.log[3:] == ["to train", "train", "to generate", "late"]


async def test_within_the_term_newcomers_do_not_hold_a_turn_that_nobody_uses() -> None:
    world = World(term=LONG)
    training = asyncio.create_task(world.stay("generate", 1))
    waiting = asyncio.create_task(world.stay("train", 1, alone=True))
    await rounds()
    late = asyncio.create_task(world.stay("generate", 1))
    await finish(training, waiting, late)
    assert world.log == ["to generate", "generate", "to train", "train", "to generate", "generate"]


async def test_all_who_wait_for_a_side_come_in_with_the_first_of_them() -> None:
    world, leave = World(), asyncio.Event()
    training = asyncio.create_task(world.stay("train", leave, alone=True))
    await rounds()
    others = [
        asyncio.create_task(world.stay(side, 2))
        for side in ("actor", "extractor", "actor", "extractor")
    ]
    await rounds()
    leave.set()
    await finish(training, *others)
    assert world.log[2:] == ["to actor", "actor", "actor", "to extractor", "extractor", "extractor"]


@pytest.mark.parametrize("stream_alone", [False, True])
async def test_a_stream_of_requests_that_never_ends_keeps_nobody_out(stream_alone: bool) -> None:
    world, over = World(), asyncio.Event()

    async def stream() -> None:
        while not over.is_set():
            await world.stay("generate", 3, alone=stream_alone)

    streams = [asyncio.create_task(stream()) for _ in range(4)]
    await rounds()
    for side in ("train actor", "distil", "train extractor") * 3:
        await finish(asyncio.create_task(world.stay(side, 2, alone=side != "distil")))
    over.set()
    await finish(*streams)


async def test_who_gives_up_waiting_is_forgotten_and_no_longer_in_the_way() -> None:
    world, leave = World(), asyncio.Event()
    running = asyncio.create_task(world.stay("generate", leave))
    await rounds()
    training = asyncio.create_task(world.stay("train", 1, alone=True))
    await rounds()
    late = asyncio.create_task(world.stay("generate", leave, who="late"))
    await rounds()
    assert "late" not in world.log
    training.cancel()
    await rounds()
    assert world.log == [
        "to generate",
        "generate",
        "late",
    ], "nobody else waits: the newcomer is let in"
    leave.set()
    await finish(running, late, training)


@pytest.mark.parametrize("after", range(6))
async def test_a_turn_may_be_given_up_at_any_moment(after: int) -> None:
    """Before the change, during it, in the round in which it is given, and inside."""
    world = World()
    one = asyncio.create_task(world.stay("train", 3, alone=True))
    await rounds(after)
    one.cancel()
    other = asyncio.create_task(world.stay("generate", 1))
    await finish(one, other)
    assert world.log[-1] == "generate" and not world.inside


async def test_who_gives_up_in_the_round_in_which_the_change_ends_does_not_stop_the_next() -> None:
    changed, unheard = asyncio.Event(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unheard.append(what))

    async def change(_: str) -> None:
        await changed.wait()

    slicer = TimeSlicer[str](change)

    async def stay() -> None:
        async with slicer.slot("train", exclusive=True):
            pass

    one = asyncio.create_task(stay())
    await rounds()
    changed.set()
    one.cancel()
    other = asyncio.create_task(stay())
    await finish(one, other)
    gc.collect()  # what failed in a task that nobody waits for is told when it is collected
    assert one.cancelled() and not other.cancelled() and not unheard


async def test_a_change_that_fails_is_raised_where_it_was_asked_for_and_tried_again_later() -> None:
    world, broken = World(), {"train"}

    def change(side: str) -> None:
        if side in broken:
            raise RuntimeError(f"{side} does not wake")

    world.change = change
    failing = [asyncio.create_task(world.stay("train", 1)) for _ in range(2)]
    other = asyncio.create_task(world.stay("generate", 1))
    await finish(other)
    for task in failing:
        with pytest.raises(RuntimeError, match="train does not wake"):
            await task
    broken.clear()
    await finish(asyncio.create_task(world.stay("train", 1)))
    assert world.log == ["to generate", "generate", "to train", "train"]


async def test_an_error_inside_ends_the_turn() -> None:
    world = World()
    with pytest.raises(ValueError, match="of mine"):
        async with world.slicer.slot("train", exclusive=True):
            raise ValueError("of mine")
    await finish(asyncio.create_task(world.stay("generate", 1)))


@dataclass(frozen=True)
class Visit:
    """One turn in a random schedule: when it is asked for, how long it lasts, and when it is given
    up, in rounds of the loop.
    """

    side: str
    alone: bool
    asked: int
    lasts: int
    given_up: int | None


VISITS = st.builds(
    Visit,
    side=st.sampled_from(["generate a", "generate b", "train a", "train b"]),
    alone=st.booleans(),
    asked=st.integers(0, 30),
    lasts=st.integers(0, 6),
    given_up=st.none() | st.integers(0, 12),
)


class Schedule:
    """Plays visits, some of whose changes fail, and counts the changes that each waits through."""

    def __init__(self, visits: list[Visit], failures: set[int], term: float) -> None:
        self.world, self.visits, self.failures, self.changes = World(term=term), visits, failures, 0
        self.world.change = self.change
        self.waiting = self.served = self.failed = self.given_up = 0

    def change(self, _: str) -> None:
        self.changes += 1
        if self.changes in self.failures:
            raise RuntimeError("does not wake")

    async def visit(self, visit: Visit) -> None:
        world = self.world
        ahead, before = (
            self.waiting + len(world.inside) + world.changing,
            self.changes,
        )  # a change may be for who has given up
        self.waiting += 1
        waits = True
        try:
            async with world.slicer.slot(visit.side, exclusive=visit.alone):
                self.waiting, waits = self.waiting - 1, False
                assert self.changes - before <= ahead + 1, (
                    "more turns of others than there were others before"
                )
                world.enter(visit.side, visit.alone)
                try:
                    await rounds(visit.lasts)
                    self.served += 1
                finally:
                    world.inside.remove((visit.side, visit.alone))
        except RuntimeError:
            self.failed += 1
        except asyncio.CancelledError:
            self.given_up += 1
        finally:
            self.waiting -= waits

    async def play(self) -> None:
        tasks: list[tuple[Visit, asyncio.Task[None]]] = []
        for now in range(45):
            self.world.now = float(now)
            tasks += [
                (v, asyncio.create_task(self.visit(v))) for v in self.visits if v.asked == now
            ]
            for visit, task in tasks:
                if visit.given_up is not None and visit.asked + visit.given_up + 1 == now:
                    task.cancel()
            await asyncio.sleep(0)
        await finish(*(task for _, task in tasks))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(VISITS, max_size=16),
    st.sets(st.integers(1, 12), max_size=3),
    st.sampled_from([0.0, 4.0, LONG]),
)
def test_in_any_schedule_sides_never_meet_and_all_finish(
    visits: list[Visit], failures: set[int], term: float
) -> None:
    schedule = Schedule(visits, failures, term)
    asyncio.run(schedule.play())
    assert schedule.served + schedule.failed + schedule.given_up == len(visits)
    assert schedule.failed == 0 or schedule.failures, (
        "only changes that failed were told as failures"
    )
    if not failures and all(visit.given_up is None for visit in visits):
        assert schedule.served == len(visits)
    assert not schedule.world.inside and schedule.waiting == 0


class Bed:
    """Somebody who may sleep or be awake; one of several of whom one may be awake."""

    def __init__(self, name: str, others: list[Bed], log: list[str]) -> None:
        self.name, self.others, self.log, self.awake, self.broken = name, others, log, False, False
        self.side = Tenant(self.wake, self.sleep)
        others.append(self)

    async def wake(self) -> None:
        await asyncio.sleep(0)
        assert not any(bed.awake for bed in self.others if bed is not self)
        self.awake = True
        self.log.append(f"{self.name} wakes")
        if self.broken:
            raise RuntimeError("half awake")

    async def sleep(self) -> None:
        await asyncio.sleep(0)
        self.awake = False
        self.log.append(f"{self.name} sleeps")


async def test_one_is_woken_after_the_other_sleeps_and_stays_awake_until_another_wants_to_be() -> (
    None
):
    log: list[str] = []
    beds: list[Bed] = []
    engines, ranks = Bed("engines", beds, log), Bed("ranks", beds, log)
    gpus = SharedGpus()
    for _ in range(2):
        async with gpus.slicer.slot(engines.side, exclusive=False):
            assert engines.awake
    async with gpus.slicer.slot(ranks.side, exclusive=True):
        assert ranks.awake and not engines.awake
    async with gpus.slicer.slot(ranks.side, exclusive=True):
        pass
    assert log == ["engines wakes", "engines sleeps", "ranks wakes"]
    async with gpus.sending(engines.side):
        assert not ranks.awake, "everybody sleeps, the block wakes what it needs"
        await engines.wake()
    async with gpus.slicer.slot(engines.side, exclusive=False):
        assert engines.awake
    assert log[3:] == ["ranks sleeps", "engines wakes"], "they are known to be awake"


async def test_who_could_not_be_woken_whole_is_woken_again_or_put_to_sleep_before_another() -> None:
    log: list[str] = []
    beds: list[Bed] = []
    engines, ranks = Bed("engines", beds, log), Bed("ranks", beds, log)
    gpus = SharedGpus()
    engines.broken = True
    with pytest.raises(RuntimeError, match="half awake"):
        async with gpus.slicer.slot(engines.side, exclusive=False):
            raise AssertionError("let in")
    async with gpus.slicer.slot(ranks.side, exclusive=True):
        pass
    assert log == ["engines wakes", "engines sleeps", "ranks wakes"]
    with pytest.raises(ValueError, match="no answer"):
        async with gpus.sending(engines.side):
            raise ValueError("no answer")
    engines.broken = False
    async with gpus.slicer.slot(engines.side, exclusive=False):
        pass
    assert log[3:] == ["ranks sleeps", "engines wakes"]
