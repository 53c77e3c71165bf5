"""BabyAI in words: BabyAI-Text's sentences, BabyAI's rewards, and its bot as the oracle."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib import import_module
from typing import Any, cast

import pytest

pytest.importorskip("minigrid", reason="needs the extra babyai")

from experiential.envs import check_text_env
from experiential.envs.babyai import ACTIONS, UNSOLVED, BabyAIEnv, sentences
from experiential.errors import ConfigError

LEVELS = ("GoToLocal", "PickupLoc", "PutNextLocal", "UnlockLocal", "GoToSeqS5R2", "Open")


def play(env: BabyAIEnv, world: int) -> list[tuple[Any, ...]]:
    """Every step of an episode by the oracle."""
    env.reset(options={"world": world})
    steps = [env.step(env.oracle_action())]
    while not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(env.oracle_action()))
    return steps


def room(*things: tuple[str, str, int, int], carrying: Any = None, **door: bool) -> Any:
    """An empty room of 9 x 9 cells; the agent in its middle looks up, and things stand at x, y."""
    objects: Any = import_module("minigrid.core.world_object")
    game: Any = BabyAIEnv(env_id="BabyAI-OneRoomS8-v0")
    game.reset(seed=0)
    game = game._game
    game.grid = type(game.grid)(9, 9)
    game.grid.wall_rect(0, 0, 9, 9)
    game.agent_pos, game.agent_dir, game.carrying = (4, 4), 3, carrying
    for kind, colour, x, y in things:
        made = getattr(objects, kind)(colour, **(door if kind == "Door" else {}))
        game.grid.set(x, y, made)
    return game


def test_the_sentences_are_those_of_babyai_text() -> None:
    game = room(("Ball", "red", 3, 2), ("Key", "blue", 4, 1), ("Box", "grey", 6, 4))
    assert sentences(game) == [
        "You see a red ball 1 step left and 2 steps forward",
        "You see a blue key 3 steps forward",
        "You see a grey box 2 steps right",
    ]


def test_a_wall_is_named_in_a_straight_line_unless_something_stands_before_it() -> None:
    assert sentences(room()) == ["You see a wall 4 steps forward"]  # 3 cells are seen to each side
    game = room()
    game.agent_pos = (1, 1)
    assert sentences(game) == ["You see a wall 1 step forward", "You see a wall 1 step left"]
    hidden = room(("Ball", "green", 4, 2))
    assert sentences(hidden) == ["You see a green ball 2 steps forward"]


@pytest.mark.parametrize(
    ("door", "word"), [({"is_open": True}, "open"), ({}, "closed"), ({"is_locked": True}, "locked")]
)
def test_doors_have_a_state_and_what_is_carried_comes_first(
    door: dict[str, bool], word: str
) -> None:
    key = cast("Any", import_module("minigrid.core.world_object")).Key("purple")
    assert sentences(room(("Door", "red", 4, 3), carrying=key, **door)) == [
        "You carry a purple key",
        f"You see a {word} red door 1 step forward",
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_the_bot_wins_and_the_reward_is_babyais(level: str) -> None:
    env = BabyAIEnv("eval", env_id=f"BabyAI-{level}-v0")
    for world in range(5):
        steps = play(env, world)
        limit = env._game.max_steps
        assert steps[-1][1] == pytest.approx(1 - 0.9 * len(steps) / limit)
        assert steps[-1][2] and not steps[-1][3] and steps[-1][4]["success"]
        assert all(step[1] == 0.0 for step in steps[:-1])


def test_a_binary_reward_is_one() -> None:
    assert play(BabyAIEnv(binary=True), 3)[-1][1] == 1.0


@pytest.mark.parametrize("env_id", UNSOLVED)
def test_levels_beyond_the_bot_are_refused_by_the_oracle_and_can_be_played(env_id: str) -> None:
    env = BabyAIEnv(env_id=env_id)
    assert check_text_env(env) == []
    with pytest.raises(ConfigError, match=f"solves, got {env_id}"):
        env.oracle_action()


def test_a_mission_done_in_the_wrong_order_fails() -> None:
    env = BabyAIEnv(env_id="BabyAI-OpenDoorsOrderN4Debug-v0")
    env.reset(options={"world": 0})
    bot: Any = import_module("minigrid.utils.baby_ai_bot")
    adviser, step = bot.BabyAIBot(env._game), None
    while step is None or not (step[2] or step[3]):  # the bot opens another door on the way
        word = list(ACTIONS)[int(adviser.replan())]
        step = env.step(word)
    assert step[0] == "Mission failed." and step[1:4] == (0.0, True, False)
    assert not step[4]["success"]


def test_the_limit_truncates_and_counts_texts_that_are_no_action() -> None:
    env = BabyAIEnv(max_steps=3)
    first, info = env.reset(seed=0)
    assert first.startswith(f"Mission: {info['task']}\n") and "Steps left: 3." in first
    shown, _, _, _, info = env.step("dance")
    assert info["invalid"] and "no action here. Steps left: 2." in shown
    assert info["feedback"].endswith("Reply with one of: " + ", ".join(ACTIONS) + ".")
    env.step("turn left")
    shown, reward, terminated, truncated, info = env.step("turn left")
    assert (shown, reward, terminated, truncated) == ("No steps are left.", 0.0, False, True)


@pytest.mark.parametrize("level", LEVELS)
def test_an_episode_depends_on_its_world_alone(level: str) -> None:
    used = BabyAIEnv(env_id=f"BabyAI-{level}-v0")
    forward = [play(used, world) for world in range(4)]
    again = [play(used, world) for world in reversed(range(4))][::-1]
    new = [play(BabyAIEnv(env_id=f"BabyAI-{level}-v0"), world) for world in range(4)]
    assert forward == again == new


def test_the_oracle_can_be_asked_in_the_middle_and_after_pickling() -> None:
    env = BabyAIEnv(env_id="BabyAI-GoToSeqS5R2-v0")
    env.reset(seed=1)
    for word in ("turn left", "go forward", "dance", "turn right"):
        env.step(word)
    twin = pickle.loads(pickle.dumps(env))
    ended = False
    while not ended:
        step = env.step(env.oracle_action())
        assert twin.step(twin.oracle_action()) == step
        ended = step[2] or step[3]
    assert step[4]["success"]


def test_the_digest_knows_levels_splits_and_limits_apart() -> None:
    given: list[dict[str, Any]] = [
        {}, {"split": "eval", "worlds": 10_000}, {"env_id": "BabyAI-GoTo-v0"}, {"max_steps": 9},
    ]  # fmt: skip
    digests = [BabyAIEnv(**one).digest() for one in given]
    assert len(set(digests)) == 4 and digests[0] == BabyAIEnv().digest()


def test_an_unknown_id_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'BabyAI-GoToLocal-v0'"):
        BabyAIEnv(env_id="BabyAI-GotoLocal-v0")


def test_rejected_layouts_are_not_printed() -> None:
    code = (
        "from experiential.envs.babyai import BabyAIEnv\n"
        "env = BabyAIEnv(env_id='BabyAI-PutNextLocal-v0')\n"
        "for world in range(60): env.reset(options={'world': world})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
