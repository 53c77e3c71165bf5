"""FrozenLake: layouts as the ERL paper draws them, its transitions, its messages, and splits that
cannot overlap.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
from gymnasium.envs.toy_text.frozen_lake import MAPS
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.envs.frozen_lake import LAKES, FrozenLakeEnv, Lake, LakeRules, draw_lake
from experiential.envs.grid import MOVES
from experiential.envs.split import split_of
from experiential.errors import ConfigError

ERL = LAKES["erl"]
LABELS = ("goal", "hole", "frozen", "ice", "wall", "agent", "lake", "start", "safe", "tile")


def on(rows: list[str], **kwargs: Any) -> FrozenLakeEnv:
    """An environment whose present layout is these letters."""
    env = FrozenLakeEnv(**kwargs)
    env.reset(seed=0)
    env.lake = Lake.parse(rows)
    env.agent = env.lake.start
    return env


@settings(max_examples=150, deadline=None)
@given(index=st.integers(0, 9_999), split=st.sampled_from(["train", "eval"]))
def test_every_layout_is_in_range_solvable_within_the_budget_and_in_its_contents_split(
    index: int, split: Any
) -> None:
    lake = draw_lake(ERL, split, index)
    path = lake.path(lake.start)
    assert 2 <= lake.size <= 9 and lake.start != lake.goal
    assert path is not None and 1 <= len(path) <= 8
    assert split_of(lake.content) == split
    assert {lake.start, lake.goal}.isdisjoint(lake.holes)
    assert Lake.parse(lake.content.split("/")) == lake


def test_train_and_eval_share_no_content() -> None:
    train = {draw_lake(ERL, "train", i).content for i in range(3_000)}
    held_out = {draw_lake(ERL, "eval", i).content for i in range(100)}
    assert train.isdisjoint(held_out)
    assert len(held_out) > 85


def test_sizes_are_uniform_though_large_grids_are_rejected_more_often() -> None:
    sizes = collections.Counter(draw_lake(ERL, "train", i).size for i in range(2_000))
    assert set(sizes) == set(range(2, 10))
    assert all(190 < count < 310 for count in sizes.values()), sizes


def test_the_default_split_sizes_are_the_papers() -> None:
    assert len(FrozenLakeEnv("train").worlds) == 10_000 and len(FrozenLakeEnv("eval").worlds) == 100


def test_a_layout_depends_on_its_index_only() -> None:
    first, info = FrozenLakeEnv().reset(seed=1, options={"layout": 42})
    second, again = FrozenLakeEnv().reset(seed=99, options={"layout": 42})
    assert (
        first == second
        and info == again
        and info["instance"] == info["task_id"] == "frozenlake-train-42"
    )


def test_the_symbols_are_the_papers() -> None:
    env = on(["FFHF", "SFFH", "FHFF", "FFGF"])
    env.step("jump")
    assert env.render() is None and env.step("Up")[0] == "A D C D\nD D D C\nD C D D\nD D B D"


def test_reaching_the_goal_ends_with_reward_one() -> None:
    observation, reward, terminated, truncated, info = on(["SG", "HF"]).step("Right")
    assert observation == "D √\nC D\n\nThe agent reached the goal"
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_entering_a_hole_ends_with_reward_zero() -> None:
    observation, reward, terminated, truncated, info = on(["SG", "HF"]).step("down")
    assert observation == "D B\nX D\n\nThe agent fell into the hole"
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


@pytest.mark.parametrize(
    ("action", "invalid"), [("Left", False), ("Up", False), ("swim", True), ("", True)]
)
def test_the_edge_and_nonsense_change_nothing_cost_a_step_and_are_told_alike(
    action: str, invalid: bool
) -> None:
    env = on(["SF", "HG"])
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation == "A D\nC B\n\nNo valid actions were recorded."
    assert (reward, terminated, truncated, info["invalid"], env.turn) == (
        0.0,
        False,
        False,
        invalid,
        1,
    )


def test_a_plain_move_has_no_message() -> None:
    observation, *_, info = on(["SF", "HG"]).step("Right")
    assert observation == "D A\nC B" and info["feedback"] == ""


def test_the_budget_truncates_and_a_goal_on_the_last_move_still_counts() -> None:
    env = on(["SF", "HG"])
    for _ in range(7):
        assert not env.step("Left")[3]
    observation, reward, terminated, truncated, _ = env.step("Right")
    assert observation.endswith("\n\nHit the max step limit") and (
        reward,
        terminated,
        truncated,
    ) == (0.0, False, True)
    env = on(["SF", "HG"])
    for action in ["Left"] * 6 + ["Right"]:
        env.step(action)
    assert env.step("Down")[1:4] == (1.0, True, False)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    actions=st.lists(st.sampled_from([*MOVES, "?"]), min_size=8, max_size=8),
)
def test_transitions_move_one_cell_or_none_and_end_only_at_hole_goal_or_budget(
    seed: int, actions: list[str]
) -> None:
    env = FrozenLakeEnv()
    env.reset(seed=seed)
    for turn, action in enumerate(actions, start=1):
        before = env.agent
        _, reward, terminated, truncated, info = env.step(action)
        row, column = before
        down, right = MOVES.get(action, (0, 0))
        target = (row + down, column + right)
        assert env.agent == (target if env.lake.inside(target) else before)
        assert reward == float(env.agent == env.lake.goal) == float(info["success"])
        assert terminated == (env.agent in env.lake.holes | {env.lake.goal})
        assert truncated == (not terminated and turn == 8)
        if terminated or truncated:
            break


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), feedback=st.sampled_from(["neutral", False]))
def test_without_the_papers_messages_no_observation_and_no_task_names_a_tile(
    seed: int, feedback: Any
) -> None:
    env = FrozenLakeEnv(feedback=feedback)
    observation, info = env.reset(seed=seed)
    seen = [observation, info["task"]]
    done = False
    while not done:
        observation, _, terminated, truncated, info = env.step("Right")
        seen += [observation, info["task"]]
        done = terminated or truncated
    assert not [word for text in seen for word in LABELS if word in text.lower().split()]


def test_the_first_observation_is_the_bare_grid_and_hidden_feedback_is_still_in_info() -> None:
    env = on(["SG", "HF"], feedback=False)
    observation, *_, info = env.step("Right")
    assert observation == "D √\nC D" and info["feedback"] == "The agent reached the goal"


def test_symbols_are_a_parameter_of_four_or_six() -> None:
    assert on(["SG", "HF"], symbols="wxyz").step("Down")[0].startswith("z x\nX z")
    assert on(["SG", "HF"], symbols="wxyzuv").step("Right")[0].startswith("z v\ny z")
    assert "symbols w x y z " in FrozenLakeEnv(symbols="wxyz").task


def test_the_fixed_presets_are_gymnasiums_maps() -> None:
    for name in ("4x4", "8x8"):
        env = FrozenLakeEnv(preset=name)
        observation, _ = env.reset(seed=0)
        assert [row.replace(" ", "") for row in observation.split("\n")] == [
            row.replace("S", "P") for row in MAPS[name]
        ]
        assert env.worlds == [0] and env.plan() is not None


def test_the_oracle_has_an_answer_even_where_nothing_can_be_won() -> None:
    env = on(["SG", "HF"])
    env.step("Down")
    assert env.plan() is None and env.oracle_action() in MOVES


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "test"}, "split to be one of train, eval"),
        ({"sizes": (1, 4)}, "sizes to be an ordered pair"),
        ({"sizes": (5, 4)}, "sizes to be an ordered pair"),
        ({"frozen": (0.5, 1.5)}, "frozen to be an ordered pair"),
        ({"symbols": "ABC"}, "4 different visible characters"),
        ({"symbols": "ABBD"}, "4 different visible characters"),
        ({"symbols": "ABCX"}, "6 different visible characters"),
        ({"budget": 0}, "positive"),
        ({"layouts": 0}, "positive"),
        ({"feedback": "loud"}, "feedback to be"),
        ({"preset": "5x5"}, "preset to be one of"),
        ({"render_mode": "human"}, "render_mode to be"),
    ],
)
def test_a_wrong_argument_says_what_was_expected(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrozenLakeEnv(**kwargs)


def test_rules_without_layouts_say_so_instead_of_searching_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("experiential.envs.frozen_lake.MAX_DRAWS", 50)
    monkeypatch.setattr(Lake, "path", lambda self, start, limit=None: None)
    with pytest.raises(ConfigError, match="Expected rules that admit layouts"):
        draw_lake(LakeRules(sizes=(3, 3)), "train", 123_456)
