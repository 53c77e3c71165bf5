"""Rollouts ahead of training: in order, as far ahead as allowed, and never across a pause."""

from __future__ import annotations

import asyncio

import pytest

from experiential.training.trainer import RolloutsAhead


class Player:
    """Plays a step until it is let go, and keeps what was begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.playing = 0
        self.free = asyncio.Event()
        self.free.set()

    async def play(self, step: int) -> str:
        self.begun.append(step)
        self.playing += 1
        assert self.playing == 1, "one step at a time: all share the environments"
        try:
            await self.free.wait()
            await asyncio.sleep(0)
        finally:
            self.playing -= 1
        return f"step {step}"


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ahead", [0, 1, 3])
async def test_steps_come_in_order_and_at_most_so_many_are_begun_beyond_the_one_taken(
    ahead: int,
) -> None:
    player = Player()
    rollouts = RolloutsAhead(player.play, ahead)
    for step in range(5):
        assert await rollouts.take(step, 100) == f"step {step}"
        await settle()
        assert player.begun == list(range(step + 1 + ahead))
    await rollouts.close()


async def test_nothing_is_played_beyond_a_pause_before_it_is_over() -> None:
    player = Player()
    rollouts = RolloutsAhead(player.play, 2)
    await rollouts.take(0, 2)
    await settle()
    assert player.begun == [0, 1]
    await rollouts.take(1, 2)
    await settle()
    assert player.begun == [0, 1], "a checkpoint is made now"
    assert await rollouts.take(2, 4) == "step 2"


async def test_closing_ends_what_is_played() -> None:
    player = Player()
    rollouts = RolloutsAhead(player.play, 2)
    await rollouts.take(0, 100)
    player.free.clear()
    await settle()
    assert player.playing == 1
    await rollouts.close()
    assert player.playing == 0 and player.begun == [0, 1]


async def test_a_step_that_fails_fails_for_the_one_who_takes_it() -> None:
    async def play(step: int) -> int:
        if step == 1:
            raise ValueError("broken")
        return step

    rollouts = RolloutsAhead(play, 1)
    assert await rollouts.take(0, 9) == 0
    await settle()
    with pytest.raises(ValueError, match="broken"):
        await rollouts.take(1, 9)
    await rollouts.close()
