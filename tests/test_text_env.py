"""The base of the text environments: turn-keeping, and the checks of arguments."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

from experiential.envs.arguments import distinct, inside, one_of, ordered, positive
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.errors import ConfigError, EnvError


class Fragile(TextEnv):
    """Plays on until it is told to fail; world 2 cannot be begun."""

    task = "Do not break it."

    def _begin(self, world: int) -> tuple[str, Info]:
        if world == 2:
            raise EnvError("no such place")
        self.world = world
        return f"world {world}", self._report(f"fragile-{world}")

    def _turn(self, action: str) -> Step:
        if action == "break":
            raise EnvError("broken")
        won = action == "win"
        return (
            f"did {action}",
            float(won),
            won,
            action == "tire",
            self._report(f"fragile-{self.world}", success=won),
        )


def test_a_world_is_picked_by_the_option_else_by_the_seed() -> None:
    env = Fragile(worlds=2, render_mode="ansi")
    assert env.worlds == [0, 1]
    assert (
        env.reset(options={"world": 1})[1]["task_id"] == "fragile-1" and env.render() == "world 1"
    )
    assert {env.reset(seed=seed)[0] for seed in range(20)} == {"world 0", "world 1"}
    assert env.reset(seed=3) == env.reset(seed=3)
    with pytest.raises(ConfigError, match="Expected world between 0 and 1, got 2"):
        env.reset(options={"world": 2})


def test_info_says_what_is_asked_and_how_it_went() -> None:
    env = Fragile(worlds=1)
    expected = {
        "task": env.task,
        "task_id": "fragile-0",
        "instance": "fragile-0",
        "success": False,
        "invalid": False,
        "feedback": "",
    }
    assert env.reset(seed=0)[1] == expected
    assert env.step("win")[1:] == (1.0, True, False, expected | {"success": True})


@pytest.mark.parametrize("last", ["win", "tire", "break"])
def test_no_step_is_taken_where_no_episode_runs(last: str) -> None:
    env = Fragile(worlds=3, render_mode="ansi")
    with pytest.raises(gym.error.ResetNeeded):
        env.step("go on")
    env.reset(options={"world": 0})
    assert env.step("go on")[0] == env.render() == "did go on"
    if last == "break":
        with pytest.raises(EnvError):
            env.step(last)
    else:
        env.step(last)
    with pytest.raises(gym.error.ResetNeeded):
        env.step("go on")
    assert env.reset(options={"world": 1})[0] == "world 1"


def test_an_episode_that_could_not_be_begun_does_not_run() -> None:
    env = Fragile(worlds=3)
    env.reset(options={"world": 0})
    with pytest.raises(EnvError):
        env.reset(options={"world": 2})
    with pytest.raises(gym.error.ResetNeeded):
        env.step("go on")


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (
            lambda: one_of("split", ["train"], {"train": 1}),
            r"split to be one of train, got \['train'\]",
        ),
        (
            lambda: one_of("render_mode", "human", (None, "ansi")),
            "render_mode to be one of None, ansi, got 'human'",
        ),
        (lambda: positive(turns=3, seconds=0.0), "seconds to be positive, got 0.0"),
        (lambda: inside("levers", 1, 2, 16), "levers between 2 and 16, got 1"),
        (
            lambda: ordered("sizes", (5, 4), 2, 9),
            r"sizes to be an ordered pair within \[2, 9\], got \(5, 4\)",
        ),
        (lambda: ordered("sizes", (5,), 2, 9), "ordered pair"),
        (lambda: distinct("AA", 2), "2 different visible characters, got 'AA'"),
        (lambda: Fragile(1, render_mode="human"), "render_mode"),
    ],
)
def test_wrong_arguments_are_told(check: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"Expected .*{said}"):
        check()


def test_right_arguments_pass() -> None:
    one_of("split", "train", ["train", "eval"])
    positive(turns=1, seconds=None)
    inside("levers", 2, 2, 2)
    ordered("sizes", [2, 2], 2, 9)
    distinct("AB", 2)
