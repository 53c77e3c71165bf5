"""MiniHack in words: what is shown, what can be said, exact replay, and a solver that wins."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

import experiential.envs as envs
from experiential.envs.minihack.env import PRESETS, MiniHackEnv, window
from experiential.envs.minihack.game import Game
from experiential.envs.minihack.solver import STEPS, Explorer, walkthrough
from experiential.envs.minihack.words import CANCEL, DIRECTIONS, answers, menu_entries, spoken
from experiential.errors import ConfigError, MissingExtraError


class TestWords:
    """The language between the agent and NetHack; needs no NetHack."""

    @pytest.mark.parametrize(
        ("question", "words"),
        [
            ("Unlock it? [yn] (n)", ["yes", "no", "cancel"]),
            ("There is a sack here, loot it? [ynq] (q)", ["yes", "no", "quit", "cancel"]),
            (
                "What do you want to wield? [- a-c or ?*]",
                ["a - a dagger", "b - a sack", "nothing", "cancel"],
            ),
            ("What do you want to zap? [f or ?*]", ["f - a wand", "cancel"]),
            ("What do you want to read? [y or ?*]", ["y - a scroll", "cancel"]),
            ("Where?", ["yes", "no", "cancel"]),
        ],
    )
    def test_answers_are_what_the_brackets_offer(self, question: str, words: list[str]) -> None:
        assert (
            list(
                answers(question, {"a": "a dagger", "b": "a sack", "f": "a wand", "y": "a scroll"})
            )
            == words
        )

    def test_a_direction_is_asked_for_in_words(self) -> None:
        words = answers("In what direction?", {})
        assert (
            set(DIRECTIONS) < set(words)
            and words["northwest"] == ord("y")
            and words["down"] == ord(">")
            and words["cancel"] == 27
        )

    def test_a_menu_offers_its_entries(self) -> None:
        lines = [
            "   Pick up what?",
            "",
            "   Weapons",
            "   a - a dagger",
            "   b + 2 darts   ",
            "   (end)",
        ]
        assert menu_entries(lines) == {"a - a dagger": 97, "b - 2 darts": 98} | CANCEL

    def test_an_item_can_be_called_by_letter_or_by_name(self) -> None:
        assert spoken({"a - a key": 97, "cancel": 27}) == {
            "a - a key": 97,
            "a": 97,
            "a key": 97,
            "cancel": 27,
        }

    @given(st.text(max_size=60), st.dictionaries(st.sampled_from("abcXYZ"), st.text(max_size=8)))
    def test_any_question_can_at_least_be_cancelled(
        self, question: str, inventory: dict[str, str]
    ) -> None:
        words = answers(question, inventory)
        assert words["cancel"] == 27 and all(0 < key < 256 for key in words.values())


def test_without_the_package_the_error_names_the_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "minihack", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'experiential-rl\[minihack\]'"):
        MiniHackEnv()


class Played:
    """Tests that play; skipped as a class where MiniHack is not installed."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("minihack")


def wander(env: gym.Env[Any, Any], seed: int, turns: int = 40) -> list[tuple[Any, ...]]:
    """An episode of random admissible words, the same words for the same seed."""
    rng = random.Random(seed)
    log: list[tuple[Any, ...]] = [env.reset(seed=seed)]
    while len(log) <= turns and not (len(log) > 1 and (log[-1][2] or log[-1][3])):
        log.append(env.step(rng.choice(log[-1][-1]["admissible"])))
    return log


def solve(env: gym.Env[Any, Any], seed: int) -> list[tuple[Any, ...]]:
    """An episode of the oracle."""
    agent = envs.oracle(env)
    log: list[tuple[Any, ...]] = [env.reset(seed=seed)]
    while len(log) < 2 or not (log[-1][2] or log[-1][3]):
        log.append(env.step(agent(log[-1][0], log[-1][-1])))
    return log


class TestEpisodes(Played):
    """What an episode shows and promises."""

    @pytest.mark.parametrize("preset", PRESETS)
    def test_gymnasiums_checker_and_ours_find_nothing_to_object_to(self, preset: str) -> None:
        env = gym.make("experiential/MiniHack-v0", preset=preset)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env.unwrapped, skip_render_check=True)
        assert envs.check_text_env(env) == []

    def test_the_map_is_what_nethack_drew_around_the_agent(self) -> None:
        env = MiniHackEnv(preset="river", crop=(5, 7))
        observation, _ = env.reset(seed=0)
        screen = env._screen
        assert (
            chr(screen.chars[screen.y, screen.x]) == "@"
            and f"x {screen.x}, y {screen.y}" in observation
        )
        rows = observation.splitlines()[2:7]
        for down, row in enumerate(rows):
            drawn = bytes(screen.chars[screen.y - 2 + down, screen.x - 3 : screen.x + 4]).decode()
            assert row == drawn.rstrip()
        assert (
            rows[2][3] == "@"
            and "@ you" in observation
            and f"HP: {screen.hp}/{screen.max_hp}" in observation
        )

    def test_the_legend_says_what_each_symbol_in_sight_is(self) -> None:
        rows, legend = window(MiniHackEnv(preset="river").unwrapped._game.start(3), None)  # type: ignore[attr-defined]
        symbols = {symbol for row in rows for symbol in row} - {" "}
        assert (
            symbols == {part[0] for part in legend.split("; ")}
            and "` a boulder" in legend
            and ". floor of a room" in legend
        )

    def test_the_window_stays_whole_at_the_edge_of_the_map(self) -> None:
        screen = MiniHackEnv(preset="maze")._game.start(0)
        for corner in ((0, 0), (78, 20)):
            moved = type(screen)(**(screen.__dict__ | {"x": corner[0], "y": corner[1]}))
            assert len(window(moved, (9, 9))[0]) == 9

    def test_an_unknown_word_uses_a_turn_and_leaves_the_game(self) -> None:
        env = MiniHackEnv(preset="maze", max_steps=3)
        env.reset(seed=1)
        before = env._screen
        observation, reward, terminated, truncated, info = env.step("I would rather dance.")
        assert (reward, terminated, truncated, info["invalid"], env._screen) == (
            0.0,
            False,
            False,
            True,
            before,
        )
        assert "Reply with one of: north, east" in observation and "Steps left: 2" in observation
        env.step("dance")
        assert env.step("dance")[3]
        with pytest.raises(gym.error.ResetNeeded):
            env.step("north")

    def test_the_limit_is_the_ids_own(self) -> None:
        limits = {preset: MiniHackEnv(preset=preset)._game.limit for preset in PRESETS}
        assert limits == {"room": 100, "maze": 200, "keyroom": 200, "river": 350}

    def test_at_the_limit_the_episode_is_truncated_and_not_won(self) -> None:
        env = MiniHackEnv(preset="keyroom", max_steps=4)
        env.reset(seed=2)
        steps = [env.step("pickup") for _ in range(4)]
        assert [step[2:4] for step in steps] == [(False, False)] * 3 + [
            (False, True)
        ] and not steps[-1][4]["success"]

    def test_splits_share_no_game(self) -> None:
        envs_ = MiniHackEnv("train"), MiniHackEnv("eval")
        first, second = (
            {env._seed for world in (0, 99) if env.reset(options={"world": world})} for env in envs_
        )
        assert len(first | second) == 4
        with pytest.raises(ConfigError, match="world between 0 and 99, got 100"):
            MiniHackEnv("eval").reset(options={"world": 100})

    def test_ids_are_a_function_of_the_world(self) -> None:
        env = MiniHackEnv(preset="maze", split="eval")
        assert {env.reset(seed=seed, options={"world": 4})[1]["task_id"] for seed in (0, 1)} == {
            "minihack-MazeWalk-9x9-eval-4"
        }

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"preset": "rum"},
            {"preset": "room", "env_id": "MiniHack-River-v0"},
            {"env_id": "CartPole-v1"},
            {"env_id": "MiniHack-Nowhere-v0"},
            {"crop": (4, 9)},
            {"crop": (9,)},
            {"worlds": 0},
            {"max_steps": 0},
            {"render_mode": "human"},
            {"split": "test"},
        ],
    )
    def test_bad_arguments_are_refused(self, kwargs: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="Expected"):
            MiniHackEnv(**kwargs)


class TestReplay(Played):
    """An episode is a function of its seed and its words."""

    @pytest.mark.parametrize(
        "preset", [pytest.param("room", marks=pytest.mark.slow), "maze", "keyroom", "river"]
    )
    def test_twenty_of_twenty_seeds_replay_identically_in_used_environments(
        self, preset: str
    ) -> None:
        first, second = MiniHackEnv(preset=preset), MiniHackEnv(preset=preset)
        forward = {seed: wander(first, seed) for seed in range(20)}
        backward = {seed: wander(second, seed) for seed in reversed(range(20))}
        assert sum(forward[seed] == backward[seed] for seed in range(20)) == 20
        assert len({log[0][0] for log in forward.values()}) > 10

    @pytest.mark.parametrize("preset", ["room", "keyroom"])
    def test_a_pickled_environment_continues_its_episode(self, preset: str) -> None:
        env = MiniHackEnv(preset=preset)
        env.reset(seed=5)
        for word in ("north", "nonsense"):
            assert not env.step(word)[2]
        twin = pickle.loads(pickle.dumps(env))
        assert env.step("nonsense") == twin.step("nonsense") and env.step("south") == twin.step(
            "south"
        )
        assert env.reset() == twin.reset()


class TestPrompts(Played):
    """NetHack's questions, answered by words."""

    def test_apply_asks_which_item_and_in_which_direction(self) -> None:
        env = MiniHackEnv(preset="keyroom")
        env.reset(seed=0)
        observation, *_, info = env.step("apply")
        assert "What do you want to use or apply?" in observation
        assert (
            "e - an uncursed lock pick" in info["admissible"] and "north" not in info["admissible"]
        )
        assert env.step("north")[4]["invalid"]
        *_, info = env.step("<action>an uncursed lock pick</action>")
        assert info["feedback"] == "In what direction?" and "southwest" in info["admissible"]
        *_, info = env.step("cancel")
        assert not info["invalid"] and info["admissible"][:2] == ["north", "east"]

    def test_a_menu_of_things_to_pick_up_stays_open_for_an_answer(self) -> None:
        level = pytest.importorskip("minihack").LevelGenerator(w=5, h=5)
        level.set_start_pos((2, 2))
        for name, kind in (("apple", "%"), ("dagger", ")")):
            level.add_object(name, kind, place=(2, 2))
        game = Game("MiniHack-KeyRoom-Fixed-S5-v0")
        game._core.update(level.get_des())
        game.start(0)
        words = game.press(ord(",")).words
        assert words is not None and set(words) == {"a - a dagger", "b - an apple", "cancel"}
        screen = game.press(words["b - an apple"])
        assert screen.words is None and "an apple" in screen.inventory.values()

    def test_prompts_can_be_declined_as_navigation_levels_do(self) -> None:
        env = MiniHackEnv(preset="keyroom", prompts=False)
        env.reset(seed=0)
        assert env.step("apply")[4]["admissible"][0] == "north"

    def test_a_level_with_all_commands_has_words_for_them(self) -> None:
        env = MiniHackEnv(env_id="MiniHack-Wear-v0")
        _, info = env.reset(seed=0)
        assert {"north", "far north", "kick", "open", "wear", "zap", "search"} <= set(
            info["admissible"]
        )
        assert info["task"] == "Complete the task of Wear."

    @pytest.mark.parametrize(
        "level",
        ["MiniHack-Eat-v0", "MiniHack-Zap-v0", "MiniHack-Quest-Easy-v0", "MiniHack-Corridor-R2-v0"],
    )
    def test_other_levels_survive_random_words(self, level: str) -> None:
        env = MiniHackEnv(env_id=level, crop=None)
        for seed in range(3):
            log = wander(env, seed, 60)
            assert all(not entry[-1]["invalid"] for entry in log) and all(entry[0] for entry in log)


class TestOracle(Played):
    """The solver."""

    @pytest.mark.parametrize(("preset", "seeds"), [("room", 6), ("maze", 20), ("keyroom", 4)])
    def test_it_wins(self, preset: str, seeds: int) -> None:
        env = gym.make("experiential/MiniHack-v0", preset=preset)
        for seed in range(seeds):
            log = solve(env, seed)
            assert log[-1][1] == 1.0 and log[-1][4]["success"] and log[-1][2], (seed, log[-1])
            assert not any(entry[-1]["invalid"] or entry[-1]["success"] for entry in log[:-1])

    @pytest.mark.slow
    def test_it_crosses_the_river(self) -> None:
        env = gym.make("experiential/MiniHack-v0", preset="river")
        assert [solve(env, seed)[-1][1] for seed in range(2)] == [1.0] * 2

    def test_it_finds_a_way_again_after_moves_of_others(self) -> None:
        env = MiniHackEnv(preset="maze")
        log = wander(env, 3, 12)
        agent: Callable[..., str] = envs.oracle(env)
        while not (len(log[-1]) > 2 and (log[-1][2] or log[-1][3])):
            log.append(env.step(agent(log[-1][0], log[-1][-1])))
        assert log[-1][1] == 1.0

    def test_the_second_attempt_knows_the_map_and_is_no_longer(self) -> None:
        game = Game(PRESETS["maze"])
        for seed in range(5):
            explored = Explorer(random.Random(0), {}).play(game, seed, [])
            best = walkthrough(game, seed, [])
            assert explored and best and len(best) <= len(explored) and set(best) <= set(STEPS)

    def test_levels_without_a_solver_say_so(self) -> None:
        env = MiniHackEnv(env_id="MiniHack-Eat-v0")
        env.reset(seed=0)
        with pytest.raises(ConfigError, match="solver knows"):
            env.oracle_action()
