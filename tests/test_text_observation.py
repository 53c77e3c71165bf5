"""Text from any Gymnasium environment, and the space that holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

import experiential as xp
from experiential.envs import check_text_env
from experiential.wrappers import ExperienceWrapper, TextObservation, UnicodeText
from experiential.wrappers.text_observation import describe, plain_text, spoken_action
from tests.wrapper_worlds import CorridorEnv, CountingManager

MOVES = ["left", "down", "right", "up"]


class BufferEnv(gym.Env[Any, Any]):
    """Overwrites one observation buffer and one info array at every step, as game engines do."""

    def __init__(
        self, space: spaces.Space[Any] | None = None, action_space: spaces.Space[Any] | None = None
    ) -> None:
        self.observation_space = space or spaces.Box(0, 9, (3,), np.int64)
        self.action_space = action_space or spaces.Discrete(2, start=5)
        self.buffer = np.zeros(3, dtype=np.int64)
        self.taken: list[Any] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.buffer[:] = 0
        return self.buffer, {"raw": self.buffer, "nested": {"raw": [self.buffer]}}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        self.buffer += 1
        return (
            self.buffer,
            1.0,
            False,
            False,
            {"raw": self.buffer, "nested": {"raw": [self.buffer]}},
        )


def frozen_lake(**kwargs: Any) -> gym.Env[Any, Any]:
    return gym.make("FrozenLake-v1", is_slippery=False, **kwargs)


@given(st.text(max_size=64))
def test_unicode_text_contains_every_string_up_to_its_limit(text: str) -> None:
    assert text in UnicodeText(64)
    assert (text in UnicodeText(8)) == (len(text) <= 8)


def test_unicode_text_refuses_what_is_no_string_and_bad_arguments() -> None:
    assert 3 not in UnicodeText() and None not in UnicodeText() and b"x" not in UnicodeText()
    with pytest.raises(ValueError, match="Expected max_length to be positive, got 0"):
        UnicodeText(0)
    with pytest.raises(ValueError, match="at most 2 characters"):
        UnicodeText(2, samples=["abc"])
    with pytest.raises(ValueError, match="Expected no mask"):
        UnicodeText().sample(mask=4)  # type: ignore[arg-type]


def test_unicode_text_samples_repeat_with_the_seed_and_are_members() -> None:
    one, other = UnicodeText(5, seed=3), UnicodeText(5, seed=3)
    drawn = [one.sample() for _ in range(20)]
    assert drawn == [other.sample() for _ in range(20)] and len(set(drawn)) > 10
    assert all(text in one and text.isprintable() for text in drawn)
    assert repr(UnicodeText(5)) == "UnicodeText(5)" and UnicodeText(5) == one != UnicodeText(6)


@pytest.mark.parametrize(
    "make",
    [SyncVectorEnv, lambda fns: AsyncVectorEnv(fns, shared_memory=False)],
    ids=["sync", "async"],
)
def test_unicode_text_crosses_vector_environments_unharmed(make: Any) -> None:
    envs = make([CorridorEnv] * 2)
    observations, _ = envs.reset(seed=[1, 2])
    assert (
        all(text.startswith("Cell 0 of a") for text in observations)
        and observations in envs.observation_space
    )
    observations, *_ = envs.step(("go", "stay"))
    assert [text[:6] for text in observations] == ["Cell 1", "Cell 0"]
    envs.close()


@pytest.mark.parametrize("actions", [None, MOVES, {"east": 2, "south": 1}])
@pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version")
def test_wrapped_environment_passes_gymnasiums_checker(actions: Any) -> None:
    check_env(TextObservation(frozen_lake(), actions=actions), skip_render_check=True)


def test_ansi_rendering_is_plain_text_with_highlights_in_brackets() -> None:
    env = TextObservation(frozen_lake(render_mode="ansi"), actions=MOVES)
    observation, _ = env.reset(seed=0)
    assert "[S]FFF" in observation and "\x1b" not in observation
    assert "S[F]FF" in env.step("right")[0]
    assert plain_text("\x1b[2J\x1b[31mwarm\x1b[0m tea") == "[warm] tea"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(7), "7"),
        (np.float32(0.25), "0.25"),
        (np.array([1.0, 2.5]), "1, 2.5"),
        (np.array([[1, 2], [3, 4]]), "1 2\n3 4"),
        (np.array([], dtype=np.float32), "empty"),
        (np.array(["a", "b"]), "a, b"),
        (np.zeros((4, 4, 3), np.uint8), "array of shape (4, 4, 3), uint8, from 0 to 0"),
        ((1, "two", True), "1: 1\n2: two\n3: yes"),
        ({"at": np.array([0, 1]), "map": np.eye(2, dtype=int)}, "at: 0, 1\nmap:\n  1 0\n  0 1"),
        ("as it is", "as it is"),
        (None, "None"),
    ],
)
def test_observations_of_every_kind_are_readable(value: Any, text: str) -> None:
    assert describe(value) == text


@given(st.data())
def test_any_sample_of_any_space_is_described(data: st.DataObject) -> None:
    space = data.draw(
        st.sampled_from(
            [
                spaces.Dict({"a": spaces.Box(-1, 1, (2, 2)), "b": spaces.Discrete(3)}),
                spaces.Tuple((spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3]), UnicodeText(4))),
                spaces.Sequence(spaces.Discrete(4)),
                spaces.Box(0, 255, (5, 5, 3), np.uint8),
                spaces.OneOf((spaces.Discrete(2), spaces.Box(0, 1, ()))),
            ]
        )
    )
    space.seed(data.draw(st.integers(0, 1000)))
    assert isinstance(describe(space.sample()), str)


def test_render_gets_copies_and_info_arrays_are_copied() -> None:
    kept: list[Any] = []
    env = TextObservation(
        BufferEnv(),
        render=lambda observation, info: (
            kept.append((observation, info["raw"])) or f"at {observation}"
        ),
    )
    first, info_first = env.reset()
    second, *_, info_second = env.step("5")
    assert (first, second) == ("at [0 0 0]", "at [1 1 1]")
    assert info_first["raw"].tolist() == kept[0][0].tolist() == kept[0][1].tolist() == [0, 0, 0]
    assert info_first["nested"]["raw"][0].tolist() == [0, 0, 0] and info_second["raw"].tolist() == [
        1,
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ("right", "right"),
        ("  RIGHT \n", "right"),
        ("I go up? No.\nRight.", "right"),
        ("<action>up</action> or better <ACTION> Right </Action> then", "right"),
        ("`right`", "right"),
        ("turn right", None),
        ("", None),
        ("<action></action>", None),
    ],
)
def test_the_last_tag_or_the_last_line_is_the_action(said: str, taken: str | None) -> None:
    env = TextObservation(BufferEnv(action_space=spaces.Discrete(4)), actions=MOVES)
    env.reset()
    *_, info = env.step(said)
    assert env.unwrapped.taken == ([MOVES.index(taken)] if taken else [])  # type: ignore[attr-defined]
    assert info["invalid"] == (taken is None)


@given(st.text(max_size=50), st.sampled_from(MOVES))
def test_a_tagged_action_is_found_after_any_text(noise: str, move: str) -> None:
    assert spoken_action(f"{noise}<action>{move}</action>") == move


def test_discrete_numbers_start_where_the_space_starts_and_mappings_reach_any_space() -> None:
    env = TextObservation(BufferEnv())
    assert env.reset()[1]["admissible"] == ["5", "6"] and env.action_space.sample() in ("5", "6")
    env.step("6")
    push = np.array([0.5], dtype=np.float32)
    box = TextObservation(BufferEnv(action_space=spaces.Box(0, 1, (1,))), actions={"push": push})
    box.reset()
    box.step("Push")
    assert env.unwrapped.taken == [6] and box.unwrapped.taken == [push]  # type: ignore[attr-defined]


def test_an_invalid_action_uses_a_turn_without_stepping() -> None:
    env = TextObservation(BufferEnv(), actions=["on", "off"], max_turns=3)
    env.reset()
    observation, reward, terminated, truncated, info = env.step("fly")
    assert observation == "0, 0, 0\n'fly' is not a legal action. Legal actions: on, off." and info[
        "admissible"
    ] == ["on", "off"]
    assert (reward, terminated, truncated, info["invalid"]) == (0.0, False, False, True)
    observation, reward, *_, info = env.step("on")
    assert (observation, reward, info["invalid"]) == ("1, 1, 1", 1.0, False)
    assert env.step("fly")[3] and env.unwrapped.taken == [5]  # type: ignore[attr-defined]


def test_only_invalid_actions_still_end_at_the_limit_of_the_specification() -> None:
    env = TextObservation(frozen_lake(max_episode_steps=4), actions=MOVES)
    env.reset()
    assert [env.step("fly")[3] for _ in range(4)] == [False, False, False, True]


def test_task_is_the_instruction_else_the_environments_own_else_its_id() -> None:
    assert TextObservation(frozen_lake(), instruction="Cross.").reset()[1]["task"] == "Cross."
    assert TextObservation(frozen_lake()).reset()[1]["task"] == "FrozenLake-v1"
    env = TextObservation(CorridorEnv())
    assert env.reset()[1]["task"] == "Cross the corridor." and env.step("<action>go</action>")[
        0
    ].startswith("Cell 1")


@pytest.mark.parametrize(
    ("space", "actions", "error", "match"),
    [
        (spaces.Box(0, 1, (1,)), None, TypeError, "actions as a mapping"),
        (spaces.Discrete(3), ["a"], ValueError, "Expected 3 action names"),
        (spaces.Discrete(2), ["a", "A"], ValueError, "differ by more than case"),
        (spaces.Discrete(2), {"a": 7}, ValueError, "others for the names"),
        (spaces.Discrete(2), {}, ValueError, "Expected actions of"),
    ],
)
def test_unusable_action_names_are_refused_at_once(
    space: Any, actions: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        TextObservation(BufferEnv(action_space=space), actions=actions)
    with pytest.raises(ValueError, match="max_turns to be positive"):
        TextObservation(BufferEnv(), max_turns=0)


def test_the_specification_rebuilds_the_wrapper() -> None:
    env = gym.make(TextObservation(frozen_lake(), actions=MOVES, instruction="Cross.").spec)
    assert env.reset(seed=0)[1]["task"] == "Cross." and env.step("down")[0] == "4"


def test_a_wrapped_environment_keeps_the_conventions_of_the_bundled_ones() -> None:
    lake = TextObservation(frozen_lake(render_mode="ansi"), actions=MOVES, success=1)
    assert check_text_env(lake) == []
    assert (
        check_text_env(
            TextObservation(
                gym.make("CartPole-v1"),
                actions=["left", "right"],
                instruction="Balance.",
                success=475,
            )
        )
        == []
    )


def test_success_is_the_environments_word_or_a_return_and_never_guessed() -> None:
    env = TextObservation(frozen_lake(), actions=MOVES, success=1)
    env.reset(seed=0)
    way = ("down", "down", "right", "right", "down", "right")
    assert [env.step(move)[4]["success"] for move in way] == [False] * 5 + [True]
    env.reset(seed=0)
    assert [env.step(move)[4]["success"] for move in ("right", "down")] == [False, False]
    untold = TextObservation(frozen_lake(), actions=MOVES)
    assert "success" not in untold.reset(seed=0)[1]
    assert not any("success" in untold.step(move)[4] for move in way)
    with pytest.raises(ValueError, match="give it to the wrapper that records"):
        TextObservation(frozen_lake(), success="better")


def test_a_score_is_recorded_by_the_wrapper_outside_and_decides_success(tmp_path: Path) -> None:
    env = TextObservation(
        frozen_lake(), actions=MOVES, score=lambda run: -len(run.turns), success=-2
    )
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        wrapped = ExperienceWrapper(env, bank)
        for moves, success in ((("right", "down"), True), (("down", "fly", "right"), False)):
            wrapped.reset(seed=0)
            *_, last = [wrapped.step(move) for move in moves]
            assert last[2] and last[4]["score"] == -len(moves)
            run = bank.trajectory(last[4]["trajectory_id"])
            assert run is not None and (run.score, run.success) == (-len(moves), success)
        other = ExperienceWrapper(env, bank, score=lambda run: 7.0)  # its own rule comes first
        other.reset(seed=0)
        *_, last = [other.step(move) for move in ("right", "down")]
        run = bank.trajectory(last[4]["trajectory_id"])
        assert run is not None and run.score == 7.0
    broken = TextObservation(frozen_lake(), actions=MOVES, score=lambda run: float("nan"))
    broken.reset(seed=0)
    broken.step("right")
    with pytest.raises(ValueError, match="finite"):
        broken.step("down")


class OddWord(gym.Wrapper[Any, Any, Any, Any]):
    """Says who won instead of whether the player did."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        *step, info = super().step(action)
        return (*step, info | {"won": "nobody"})


@pytest.mark.parametrize("rule", [1, lambda run: run.reward > 0])
def test_an_odd_word_of_the_environment_is_not_read_where_a_rule_is_given(rule: Any) -> None:
    env = TextObservation(OddWord(frozen_lake()), actions=MOVES, success=rule, max_turns=2)
    env.reset(seed=0)
    env.step("down")
    assert env.step("down")[4]["success"] is False
    unruled = TextObservation(OddWord(frozen_lake()), actions=MOVES)
    unruled.reset(seed=0)
    with pytest.raises(TypeError, match=r"info\['won'\] to be True, False or None.*success="):
        unruled.step("down")


def test_a_function_reads_the_whole_episode_and_comes_before_the_environments_word() -> None:
    seen: list[xp.Trajectory] = []

    def walked_down(run: xp.Trajectory) -> bool | None:
        seen.append(run)
        return None if run.turns[0].invalid else run.turns[0].action == "down"

    env = TextObservation(frozen_lake(), actions=MOVES, success=walked_down, max_turns=2)
    for first, said in (("down", True), ("right", False), ("fly", None)):
        env.reset(seed=0)
        assert "success" not in env.step(first)[4] and len(seen) == 0
        *_, truncated, info = env.step("left")
        assert truncated and info.get("success") is said
        run = seen.pop()
        assert [turn.action for turn in run.turns] == [first, "left"]
        assert run.turns[0].feedback == run.turns[1].observation or run.turns[0].invalid


def test_a_judge_is_waited_for_at_the_last_step_and_may_fail() -> None:
    llm = xp.ScriptedLLM(['{"reason": "It is there.", "verdict": "yes"}', "I do not know."])
    judge = xp.Judge(llm, "The goal was reached.")
    env = TextObservation(frozen_lake(), actions=MOVES, success=judge, max_turns=1)
    env.reset(seed=0)
    assert env.step("down")[4]["success"] is True
    env.reset(seed=0)
    assert "success" not in env.step("down")[4]
    assert "down" in llm.calls[0][1]["content"]


class MissionEnv(gym.Env[Any, int]):
    """Names what to do in its observation, as BabyAI does, or under another key."""

    observation_space = gym.spaces.Dict({"n": gym.spaces.Discrete(9)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, key: str = "mission") -> None:
        self.key = key

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return {"n": 1, self.key: f"go to ball {seed}"}, {}


@pytest.mark.parametrize("key", ["mission", "goal", "instruction"])
def test_a_mission_in_the_observation_is_the_task(key: str) -> None:
    env = TextObservation(MissionEnv(key))
    assert [env.reset(seed=seed)[1]["task"] for seed in (1, 2)] == ["go to ball 1", "go to ball 2"]
    named = TextObservation(MissionEnv(key), instruction=lambda observation, info: observation["n"])
    assert named.reset(seed=1)[1]["task"] == "1"
    assert TextObservation(MissionEnv("other")).reset(seed=1)[1]["task"] == "MissionEnv"


def test_the_instance_is_the_id_with_the_seed_and_the_count_of_resets_since() -> None:
    env = TextObservation(frozen_lake())
    told = [env.reset(seed=seed)[1] for seed in (4, None, 4)]
    assert [info["instance"] for info in told] == [
        "FrozenLake-v1#4",
        "FrozenLake-v1#4+1",
        "FrozenLake-v1#4",
    ]
    assert {info["task_id"] for info in told} == {"FrozenLake-v1"}


def test_reading_ten_megabytes_of_open_tags_is_no_work() -> None:
    assert spoken_action("<action>" * 1_250_000) == "<action>" * 1_250_000
    assert spoken_action("<action>left</action>" + "<action>" * 1_250_000) == "left"


def test_a_nested_tag_gives_its_inside() -> None:
    assert spoken_action("<action>I would <action> left </ACTION> or so</action>") == "left"


def test_shared_memory_is_refused_for_text_and_never_gives_zeros() -> None:
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv([CorridorEnv] * 2, shared_memory=True)


FOREIGN: list[tuple[str, list[int], float, bool]] = [
    # id, actions, the return that counts as won, whether these actions win
    ("CliffWalking-v1", [0, *[1] * 11, 2], -13, True),
    ("CliffWalking-v1", [1] * 3 + [0] * 3, -13, False),
    ("FrozenLake-v1", [1, 1, 2, 2, 1, 2], 1, True),
    ("FrozenLake-v1", [2, 1], 1, False),
    ("CartPole-v1", [0] * 12, 475, False),
    ("MountainCar-v0", [0] * 200, -199, False),
]


@pytest.mark.parametrize(("id", "actions", "won_at", "wins"), FOREIGN)
def test_games_of_gymnasium_are_unknown_or_right_and_one_argument_says_it(
    id: str, actions: list[int], won_at: float, wins: bool
) -> None:
    def played(**options: Any) -> bool | None:
        options["max_turns"] = len(actions)
        made = gym.make(id, **({"is_slippery": False} if id == "FrozenLake-v1" else {}))
        env = ExperienceWrapper(TextObservation(made, **options), CountingManager())
        env.reset(seed=0)
        for action in actions:
            *_, terminated, truncated, _ = env.step(str(action))
            if terminated or truncated:
                break
        assert env.last_trajectory is not None
        return env.last_trajectory.success

    assert played(success=won_at) is wins
    assert played() in (None, wins)


def test_about_half_of_the_best_taxi_games_lie_below_its_reward_threshold() -> None:
    env = gym.make("Taxi-v3")
    table, value = env.unwrapped.P, np.zeros(500)  # type: ignore[attr-defined]
    for _ in range(60):  # the longest best game is shorter
        value = np.array(
            [
                max(
                    sum(p * (r + (0 if done else value[after])) for p, after, r, done in outcomes)
                    for outcomes in table[state].values()
                )
                for state in range(500)
            ]
        )
    assert env.spec is not None and env.spec.reward_threshold == 8
    best = np.array([value[env.reset(seed=seed)[0]] for seed in range(1000)])
    assert round(float(np.mean(best < 8)), 2) == 0.48
