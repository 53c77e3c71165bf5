"""Sokoban: rooms proved solvable, exact push rules, the papers' symbols and messages, and splits
that cannot overlap.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.envs.grid import MOVES
from experiential.envs.sokoban import ROOMS, Room, RoomRules, SokobanEnv, draw_room
from experiential.envs.split import split_of
from experiential.errors import ConfigError

LABELS = (
    "box",
    "boxes",
    "goal",
    "goals",
    "wall",
    "agent",
    "push",
    "pushed",
    "floor",
    "puzzle",
    "sokoban",
)


def room(*rows: str) -> Room:
    """A room from the usual letters ``# . $ * @`` and blank."""
    cells = {(r, c): letter for r, row in enumerate(rows) for c, letter in enumerate(row)}

    def where(letters: str) -> frozenset[tuple[int, int]]:
        return frozenset(cell for cell, letter in cells.items() if letter in letters)

    return Room(len(rows), where("#"), where(".*+"), where("$*"), next(iter(where("@+"))))


def on(*rows: str, **kwargs: Any) -> SokobanEnv:
    """An environment whose present room is these letters."""
    env = SokobanEnv(**kwargs)
    env.reset(seed=0)
    env.room = room(*rows)
    env.state = (env.room.start, env.room.boxes)
    return env


@settings(max_examples=100, deadline=None)
@given(
    index=st.integers(0, 9_999),
    split=st.sampled_from(["train", "eval"]),
    preset=st.sampled_from(list(ROOMS)),
)
def test_every_room_is_walled_solvable_within_the_limit_and_in_its_contents_split(
    index: int, split: Any, preset: str
) -> None:
    rules = ROOMS[preset]
    drawn = draw_room(rules, split, index)
    solution = drawn.solve((drawn.start, drawn.boxes))
    border = {
        cell for cell in product(range(drawn.size), repeat=2) if {0, drawn.size - 1} & set(cell)
    }
    assert rules.sizes[0] <= drawn.size <= rules.sizes[1] and border <= drawn.walls
    assert len(drawn.boxes) == len(drawn.goals) == rules.boxes
    assert len({drawn.start} | drawn.boxes | drawn.goals) == 2 * rules.boxes + 1
    assert drawn.walls.isdisjoint({drawn.start} | drawn.boxes | drawn.goals)
    assert solution is not None and 1 <= len(solution) <= rules.max_solution
    assert split_of(drawn.content) == split


@pytest.mark.parametrize("preset", ["erl", pytest.param("complementary", marks=pytest.mark.slow)])
def test_train_and_eval_share_no_content(preset: str) -> None:
    train = {draw_room(ROOMS[preset], "train", i).content for i in range(500)}
    held_out = {draw_room(ROOMS[preset], "eval", i).content for i in range(100)}
    assert train.isdisjoint(held_out) and len(held_out) > 90


def test_generating_rooms_is_fast() -> None:
    begin = time.process_time()  # what others do on the machine does not count
    for index in range(20_000, 20_100):
        draw_room(ROOMS["erl"], "train", index)
        draw_room(ROOMS["complementary"], "eval", index)
    assert (time.process_time() - begin) / 200 < 0.02


@settings(max_examples=30, deadline=None)
@given(index=st.integers(0, 500))
def test_pruning_dead_cells_never_hides_or_lengthens_a_solution(index: int) -> None:
    drawn = draw_room(ROOMS["complementary"], "train", index)
    solution = drawn.solve((drawn.start, drawn.boxes))
    seen, frontier, depth = {(drawn.start, drawn.boxes)}, {(drawn.start, drawn.boxes)}, 0
    while not any(boxes == drawn.goals for _, boxes in frontier):
        frontier = {
            drawn.after(state, delta) for state in frontier for delta in MOVES.values()
        } - seen
        seen |= frontier
        depth += 1
    assert solution is not None and len(solution) == depth


def test_the_symbols_are_the_papers() -> None:
    env = on("######", "#@ $.#", "#    #", "#  * #", "#    #", "######")
    assert (
        env._grid()
        == "E E E E E E\nE A D B C E\nE D D D D E\nE D D b D E\nE D D D D E\nE E E E E E"
    )  # noqa: SLF001
    env.step("Right")
    assert env.step("Right")[0].splitlines()[1] == "E D D A b E"


def test_the_agent_on_a_goal_has_its_own_symbol() -> None:
    env = on("#####", "#@.$#", "#   #", "#  .#", "#####")
    assert env.step("Right")[0].splitlines()[1] == "E D a B E"


def test_solving_ends_with_reward_one() -> None:
    observation, reward, terminated, truncated, info = on(
        "#####", "#@$.#", "#   #", "#   #", "#####"
    ).step("Right")
    assert observation.endswith("\n\nThe agent solved the puzzle (all boxes on goals).")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_one_of_two_boxes_on_its_goal_is_not_enough() -> None:
    env = on("######", "#@$. #", "#    #", "#  $.#", "#    #", "######")
    assert env.step("Right")[1:3] == (0.0, False)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (("#####", "#@$##", "#.  #", "#   #", "#####"), "a wall behind the box"),
        (("######", "#@$$.#", "#   .#", "#    #", "#    #", "######"), "a box behind the box"),
        (("#####", "#@#$#", "#.  #", "#   #", "#####"), "a wall"),
    ],
)
def test_a_blocked_move_changes_nothing_costs_a_step_and_is_told(
    rows: tuple[str, ...], why: str
) -> None:
    env = on(*rows)
    before = env.state
    observation, _, terminated, truncated, info = env.step("Right")
    assert (
        env.state == before and env.turn == 1 and not (terminated or truncated or info["invalid"])
    ), why
    assert observation.endswith(
        "The agent did not move (likely hit a wall or tried to push into a blocked space)."
    )


def test_boxes_are_never_pulled() -> None:
    env = on("######", "#    #", "#$@  #", "#   .#", "#    #", "######")
    _, boxes = env.state
    observation = env.step("Right")[0]
    assert env.state == ((2, 3), boxes)
    assert observation.endswith("The agent moved or pushed a box; puzzle not solved yet.")


def test_the_budget_truncates() -> None:
    env = on("#####", "#@$.#", "#   #", "#   #", "#####")
    steps = [env.step("Left") for _ in range(8)]
    assert [step[3] for step in steps] == [False] * 7 + [True] and not any(
        step[2] for step in steps
    )
    assert steps[-1][0].endswith("\n\nHit the max step limit")


def test_a_box_that_can_reach_no_goal_is_a_deadlock_and_on_a_corner_goal_is_not() -> None:
    env = on("######", "#    #", "#  $@#", "#    #", "#   .#", "######")
    assert not env.step("Left")[4]["deadlock"], "a cell off every wall"
    env = on("######", "#    #", "# $@ #", "#    #", "#  . #", "######")
    assert env.step("Left")[4]["deadlock"] and env.plan() is None, "along a wall without a goal"
    env = on("######", "# $@ #", "#    #", "#.   #", "#    #", "######")
    info = env.step("Left")[4]
    assert info["deadlock"] and env.plan() is None and env.oracle_action() in MOVES, "in a corner"
    env = on("######", "#.$@ #", "#    #", "#  $.#", "#    #", "######")
    assert not env.step("Left")[4]["deadlock"]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    preset=st.sampled_from(list(ROOMS)),
    actions=st.lists(st.sampled_from(list(MOVES)), max_size=30),
)
def test_transitions_keep_walls_and_the_number_of_boxes_and_push_at_most_one(
    seed: int, preset: str, actions: list[str]
) -> None:
    env = SokobanEnv(preset=preset)
    env.reset(seed=seed)
    for action in actions:
        (row, column), boxes = env.state
        _, reward, terminated, truncated, info = env.step(action)
        agent, after = env.state
        down, right = MOVES[env.dialect.direction(action)]
        assert agent in {(row, column), (row + down, column + right)}
        assert (
            len(after) == len(boxes)
            and after.isdisjoint(env.room.walls)
            and agent not in after
            and agent not in env.room.walls
        )
        assert len(after - boxes) <= 1
        if after != boxes:
            assert boxes - after == {agent} and after - boxes == {
                (agent[0] + down, agent[1] + right)
            }
        assert (
            reward == float(terminated) == float(info["success"]) == float(after == env.room.goals)
        )
        if terminated or truncated:
            break


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_deadlock_is_never_solvable(seed: int) -> None:
    env = SokobanEnv(preset="complementary")
    env.reset(seed=seed)
    for action in ["Up", "Left", "Down", "Right"] * 7:
        if env.step(action)[2]:
            break
        if env.deadlock:
            state, boxes = env.state, env.state[1]
            reached, frontier = {state}, {state}
            while frontier:
                frontier = {
                    env.room.after(s, delta) for s in frontier for delta in MOVES.values()
                } - reached
                reached |= frontier
            assert all(found != env.room.goals for _, found in reached), boxes
            break


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), feedback=st.sampled_from(["neutral", False]))
def test_without_the_papers_messages_no_observation_and_no_task_names_a_tile(
    seed: int, feedback: Any
) -> None:
    env = SokobanEnv(feedback=feedback)
    observation, info = env.reset(seed=seed)
    seen, done = [observation, info["task"]], False
    while not done:
        observation, _, terminated, truncated, info = env.step("Right")
        seen += [observation, info["task"]]
        done = terminated or truncated
    words = {word.strip("().;,") for text in seen for word in text.lower().split()}
    assert words.isdisjoint(LABELS)


def test_the_complementary_preset_is_the_papers_room() -> None:
    env = SokobanEnv("eval", preset="complementary")
    observation, info = env.reset(seed=0)
    grid = observation.split("\n\n")[0].replace("\n", " ").split(" ")
    assert len(grid) == 36 and env.budget == 30
    assert (
        grid.count("@") == 1
        and grid.count("A") == 2
        and grid.count("C") == 2
        and set(grid) <= set("@+A*CW.")
    )
    assert info["task"] != SokobanEnv().task


def test_a_layout_depends_on_its_index_only() -> None:
    first, info = SokobanEnv().reset(seed=1, options={"layout": 7})
    second, again = SokobanEnv().reset(seed=2, options={"world": 7})
    assert first == second and info == again and info["instance"] == "sokoban-train-7"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "test"}, "split to be one of train, eval"),
        ({"sizes": (3, 8)}, "sizes to be an ordered pair"),
        ({"boxes": 0}, "1 to 4 boxes"),
        ({"boxes": 2, "sizes": (4, 4)}, "hold 2 boxes"),
        ({"walls": 0.9}, "walls to be an ordered pair"),
        ({"symbols": "AaBbCE"}, "7 different visible characters"),
        ({"symbols": "AaBbCE "}, "7 different visible characters"),
        ({"budget": 0}, "positive"),
        ({"preset": "classic"}, "preset to be one of"),
    ],
)
def test_a_wrong_argument_says_what_was_expected(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SokobanEnv(**kwargs)


def test_rules_without_rooms_say_so_instead_of_searching_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("experiential.envs.sokoban.MAX_DRAWS", 20)
    monkeypatch.setattr(Room, "solve", lambda self, state, limit=None: None)
    with pytest.raises(ConfigError, match="Expected rules that admit rooms"):
        draw_room(RoomRules(), "train", 123_456)
