"""ALFWorld: made households on its own domain, real games where there are any, worker processes,
the cache of translations.
"""

from __future__ import annotations

import json
import lzma
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import psutil
import pytest
from gymnasium.utils.env_checker import check_env

from benchmarks import alfworld as benchmark
from experiential.cache import cache_folder
from experiential.envs.alfworld.caches import TranslationCache
from experiential.envs.alfworld.games import TASK_TYPES, default_folder, open_games
from experiential.envs.alfworld.household import KITCHEN, made_games, make_game
from experiential.envs.split import split_of
from experiential.errors import ConfigError, EnvError

pytest.importorskip("alfworld", reason="needs alfworld: pip install 'experiential-rl[alfworld]'")
pytest.importorskip(
    "fast_downward", reason="needs fast-downward-textworld: pip install 'experiential-rl[alfworld]'"
)

from experiential.envs.alfworld.env import (
    ALFWorldEnv,
)  # noqa: E402  (after the check that it can be used)

ROW = {
    "id": "pick_and_place_simple-Mug/trial_1",
    "goal": "put a mug in desk.",
    "walkthrough": ["look"],
    "problem": "(define)",
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPERIENTIAL_CACHE", str(folder))
        patch.setenv("HOME", str(folder))
        patch.delenv("ALFWORLD_DATA", raising=False)
        yield folder


@pytest.fixture(scope="module")
def env() -> Iterator[ALFWorldEnv]:
    """One environment, with one worker, for all tests that need no other."""
    one = ALFWorldEnv(games=6)
    yield one
    one.close()


@pytest.mark.parametrize(
    "task_type", [0, *(pytest.param(kind, marks=pytest.mark.slow) for kind in range(1, 6))]
)
def test_the_plan_of_a_made_household_wins_it_in_the_game(env: ALFWorldEnv, task_type: int) -> None:
    observation, info = env.reset(options={"world": task_type})
    assert (
        info["task_type"] == TASK_TYPES[task_type]
        and f"Your task is to: {info['task']}" in observation
    )
    for command in env.game.walkthrough[:-1]:
        assert command == env.oracle_action() and command in info["admissible"]
        _, reward, done, truncated, info = env.step(command)
        assert (reward, done, truncated, info["success"], info["invalid"]) == (
            0.0,
            False,
            False,
            False,
            False,
        )
    _, reward, done, truncated, info = env.step(env.oracle_action())
    assert (reward, done, truncated, info["success"]) == (1.0, True, False, True)
    with pytest.raises(gym.error.ResetNeeded):
        env.step("look")


def test_nonsense_uses_a_turn_changes_nothing_and_says_what_is_legal(env: ALFWorldEnv) -> None:
    _, info = env.reset(options={"world": 0})
    for action in ("", "I would rather not.", "<action>dance</action>", "\ud800", "x" * 10_000_000):
        observation, reward, done, truncated, after = env.step(action)
        assert after["invalid"] and not done and not truncated and reward == 0.0
        assert "Nothing happens" in after["feedback"] and "go to" in observation
        assert after["admissible"] == info["admissible"]
    assert not env.step("<action>LOOK</action>")[-1]["invalid"]


@pytest.mark.slow
def test_another_way_is_led_back_by_the_planner(env: ALFWorldEnv) -> None:
    _, info = env.reset(options={"world": 2})
    away = next(
        name
        for name in info["admissible"]
        if name.startswith("go to") and name != env.game.walkthrough[0]
    )
    env.step(away)
    for _ in range(12):
        _, _, done, _, info = env.step(env.oracle_action())
        if done:
            break
    assert info["success"]


@pytest.mark.slow
def test_a_pickled_environment_continues_its_episode(env: ALFWorldEnv) -> None:
    env.reset(seed=5, options={"world": 1})
    env.step(env.oracle_action())
    twin = pickle.loads(pickle.dumps(env))
    try:
        action = env.oracle_action()
        assert twin.oracle_action() == action and env.step(action) == twin.step(action)
        assert env.reset()[1]["task_id"] == twin.reset()[1]["task_id"]
    finally:
        twin.close()


@pytest.mark.slow
def test_gymnasiums_checker_finds_nothing_to_object_to(env: ALFWorldEnv) -> None:
    check_env(env, skip_render_check=True)


def test_the_preset_is_the_papers_setting_and_an_argument_goes_before_it() -> None:
    env = ALFWorldEnv(games=1, preset="complementary")
    assert (env.turns, env.failure) == (40, -1.0)
    other = ALFWorldEnv(games=1, preset="complementary", turns=10)
    assert (other.turns, other.failure) == (10, -1.0)


def test_an_episode_of_refused_actions_ends_after_fifty_turns() -> None:
    env = ALFWorldEnv(games=1)
    try:
        env.reset(seed=0)
        ends = [env.step("I would rather not.")[2:4] for _ in range(50)]
        assert ends == [(False, False)] * 49 + [(False, True)]
    finally:
        env.close()


def test_spent_turns_truncate_with_the_reward_of_failure() -> None:
    env = ALFWorldEnv(games=1, turns=2, failure=-1.0, show_actions=False, render_mode="ansi")
    try:
        observation, _ = env.reset(seed=0)
        assert observation == env.render() and "Actions:" not in observation
        assert env.step("look")[1:4] == (0.0, False, False)
        assert env.step("look")[1:4] == (-1.0, False, True)
    finally:
        env.close()


@pytest.mark.slow
def test_a_dead_worker_is_a_clear_error_and_the_next_reset_starts_another() -> None:
    env = ALFWorldEnv(games=1)
    try:
        env.reset(seed=0)
        first = env._player.process.pid  # type: ignore[union-attr]
        os.kill(first, 9)
        with pytest.raises(EnvError, match="process that plays ALFWorld") as caught:
            env.step("look")
        assert caught.value.lost
        with pytest.raises(gym.error.ResetNeeded):
            env.step("look")
        assert env.reset(seed=0)[1]["task"] and env._player.process.pid != first  # type: ignore[union-attr]
    finally:
        env.close()


@pytest.mark.slow
def test_workers_are_replaced_after_their_share_and_none_stays() -> None:
    env = ALFWorldEnv(games=2, recycle=2)
    pids: list[int] = []
    for _ in range(3):
        env.reset(options={"world": 0})
        pids.append(env._player.process.pid)  # type: ignore[union-attr]
    assert pids[0] == pids[1] != pids[2] and not psutil.pid_exists(pids[0])
    env.close()
    env.close()
    assert not psutil.pid_exists(pids[2])


@pytest.mark.slow
def test_a_worker_ends_with_the_process_that_started_it() -> None:
    code = (
        "import os\nfrom experiential.envs.alfworld.env import ALFWorldEnv\nenv ="
        " ALFWorldEnv(games=1)\nenv.reset(seed=0)\nprint(env._player.process.pid,"
        " flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )
    worker = int(done.stdout)
    deadline = time.monotonic() + 60
    while (
        psutil.pid_exists(worker)
        and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


def test_a_game_that_cannot_be_played_is_an_error_of_that_game_only(tmp_path: Path) -> None:
    _pack(tmp_path, [ROW])
    env = ALFWorldEnv(data=str(tmp_path))
    try:
        for _ in range(2):
            with pytest.raises(EnvError, match="Expected a game that TextWorld can play"):
                env.reset(seed=0)
    finally:
        env.close()


def test_no_walkthrough_goes_where_the_agent_is() -> None:
    """Such a command is not admissible: an oracle that follows the walkthrough would wait there for
    ever.
    """
    for split in ("train", "eval"):
        for entry in made_games(split, 300):
            goes = [command for command in entry.load().walkthrough if command.startswith("go to ")]
            assert all(one != other for one, other in pairwise(goes)), entry.id


@pytest.mark.slow
@pytest.mark.parametrize("world", [21, 56, 76])
def test_what_lies_where_it_is_heated_cleaned_or_cooled_is_treated_there(world: int) -> None:
    env = ALFWorldEnv(data="made")
    try:
        _, info = env.reset(seed=0, options={"world": world})
        for _ in env.game.walkthrough:
            assert not info["success"]
            *_, info = env.step(env.oracle_action())
            assert not info["invalid"]
        assert info["success"]
    finally:
        env.close()


def test_made_games_repeat_and_their_splits_share_none() -> None:
    train, test = ([entry.load() for entry in made_games(split, 40)] for split in ("train", "eval"))
    assert train == [entry.load() for entry in made_games("train", 40)]
    for split, games in (("train", train), ("eval", test)):
        assert all(split_of(game.data["pddl_problem"]) == split for game in games)
    assert len({game.data["pddl_problem"] for game in train + test}) == 80
    assert {game.task_type for game in test} == set(TASK_TYPES)
    assert make_game("train", 3, TASK_TYPES[3], 1) != make_game("train", 3, TASK_TYPES[3], 0)
    assert set(KITCHEN.narrow) <= set(KITCHEN.places)


def test_task_types_can_be_chosen() -> None:
    env = ALFWorldEnv(games=4, task_types=["look_at_obj_in_light"])
    assert len(env.worlds) == 4 and {entry.task_type for entry in env._entries} == {
        "look_at_obj_in_light"
    }


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"split": "test"}, "split to be one of train, eval"),
        ({"split": "valid_unseen"}, "give data="),
        ({"task_types": ["cook"]}, "task_types to be a list of pick_and_place_simple"),
        ({"task_types": "cook"}, "task_types to be a list"),
        ({"games": 0}, "games to be positive"),
        ({"recycle": 0}, "recycle to be positive"),
        ({"render_mode": "human"}, "render_mode"),
        ({"data": "nowhere"}, "run alfworld-download"),
    ],
)
def test_wrong_arguments_are_refused(kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match="Expected") as caught:
        ALFWorldEnv(**kwargs)
    assert told in str(caught.value)


def _pack(folder: Path, rows: list[Any], grammar: str = "Your task is to: UNKNOWN GOAL.") -> None:
    (folder / "common.json").write_text(json.dumps({"pddl_domain": "(define)", "grammar": grammar}))
    with lzma.open(folder / "train.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("field", ["id", "goal", "problem"])
def test_a_packed_row_without_a_field_is_named(tmp_path: Path, field: str) -> None:
    _pack(tmp_path, [ROW, {key: value for key, value in ROW.items() if key != field}])
    with pytest.raises(
        ConfigError, match=f"field {field} of .*train.jsonl.xz, line 2, got no such field"
    ):
        ALFWorldEnv(data=str(tmp_path))


def test_damaged_packed_files_are_named(tmp_path: Path) -> None:
    _pack(tmp_path, [ROW], grammar="no goal")
    with pytest.raises(ConfigError, match="UNKNOWN GOAL.*common.json"):
        ALFWorldEnv(data=str(tmp_path))
    _pack(tmp_path, [ROW | {"walkthrough": [3]}])
    with pytest.raises(ConfigError, match="field walkthrough of .*line 1"):
        ALFWorldEnv(data=str(tmp_path))
    (tmp_path / "train.jsonl.xz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="compressed by xz in .*train.jsonl.xz"):
        ALFWorldEnv(data=str(tmp_path))
    with pytest.raises(ConfigError, match="valid_seen.jsonl.xz"):
        ALFWorldEnv("eval", data=str(tmp_path))


def test_data_may_name_an_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pack(tmp_path, [ROW])
    monkeypatch.setenv("MY_GAMES", str(tmp_path))
    with closing(ALFWorldEnv(data="$MY_GAMES")) as env:
        assert env.worlds == [0]
    monkeypatch.delenv("MY_GAMES")
    with pytest.raises(ConfigError, match="MY_GAMES.*run alfworld-download"):
        ALFWorldEnv(data="$MY_GAMES")


def _download(
    folder: Path, name: str, known: Any, task_type: str = "pick_two_obj_and_place"
) -> Path:
    """A trial as alfworld-download lays it out."""
    trial = folder / "json_2.1.1" / "train" / name / "trial_1"
    trial.mkdir(parents=True)
    (trial / "traj_data.json").write_text(json.dumps({"task_type": task_type}))
    (trial / "game.tw-pddl").write_text(json.dumps(known))
    return trial / "game.tw-pddl"


@pytest.mark.slow
def test_the_download_can_be_played_and_unsolvable_games_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_game("train", 5, "pick_two_obj_and_place")
    known = made.data | {"walkthrough": list(made.walkthrough), "solvable": True}
    _download(tmp_path, "pick_two_obj_and_place-Mug-None-Desk-1", known)
    _download(tmp_path, "pick_two_obj_and_place-Mug-None-Desk-2", known | {"solvable": False})
    _download(tmp_path, "pick_and_place_with_movable_recep-Mug-Pan-Desk-3", known)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    env = ALFWorldEnv()
    try:
        _, info = env.reset(seed=0)
        assert env.worlds == [0] and (info["task"], info["task_type"]) == (
            made.goal,
            "pick_two_obj_and_place",
        )
        assert info["task_id"] == "alfworld-train-pick_two_obj_and_place-Mug-None-Desk-1/trial_1"
        for command in made.walkthrough:
            info = env.step(command)[-1]
        assert info["success"]
    finally:
        env.close()


@pytest.mark.parametrize("field", ["pddl_domain", "grammar", "pddl_problem"])
def test_a_damaged_game_file_is_named(tmp_path: Path, field: str) -> None:
    game = {
        "pddl_domain": "x",
        "grammar": 'Your task is to: go."',
        "pddl_problem": "x",
        "solvable": True,
    }
    path = _download(
        tmp_path,
        "pick_two_obj_and_place-Mug-None-Desk-1",
        {key: text for key, text in game.items() if key != field},
    )
    (entry,) = open_games(tmp_path, "train")
    with pytest.raises(ConfigError, match=f"field {field} of .*game.tw-pddl"):
        entry.load()
    path.write_bytes(b'{"solvable": true, "cut')
    with pytest.raises(ConfigError, match=r"JSON object in .*game.tw-pddl"):
        entry.load()
    path.write_text(json.dumps(game | {"grammar": "no goal"}))
    with pytest.raises(ConfigError, match=r"Your task is to.*game.tw-pddl"):
        entry.load()


def test_a_translation_is_made_once_and_damaged_files_are_made_again(tmp_path: Path) -> None:
    calls: list[tuple[str, bool]] = []

    def translate(domain: str, problem: str, verbose: bool, optimize: bool) -> tuple[Any, str]:
        calls.append((problem, optimize))
        action = SimpleNamespace(
            name="go", parameters=[SimpleNamespace(name="?a", type_name="agent")]
        )
        kinds = [SimpleNamespace(name="agent", supertype_names=["object"])]
        cost = SimpleNamespace(fluent="total-cost")
        atoms = [SimpleNamespace(predicate="at", args=("a", "b")), cost]
        return (
            SimpleNamespace(
                actions=[action],
                types=kinds,
                objects=[SimpleNamespace(name="a", type_name="agent")],
                init=atoms,
            ),
            f"sas {problem}",
        )

    def cache(version: str = "1") -> TranslationCache:
        return TranslationCache(
            translate, version, lambda predicate, args: (predicate, args), tmp_path
        )

    first = cache()("domain", "p", optimize=True)
    again = cache()("domain", "p", optimize=True)
    assert calls == [("p", True)] and again[1] == "sas p" == first[1] and again[0] == first[0]
    assert (
        again[0].init == [("at", ["a", "b"])]
        and again[0].actions[0].parameters[0].type_name == "agent"
    )
    cache()("domain", "p")
    cache("2")("domain", "p")
    cache()("domain", "q")
    assert len(calls) == 4
    for path in tmp_path.rglob("*.z"):
        path.write_bytes(b"damaged")
    assert cache()("domain", "p", optimize=True)[1] == "sas p" and len(calls) == 5
    assert cache()("domain", "p", optimize=True)[1] == "sas p" and len(calls) == 5
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".z"]


def test_the_folder_that_alfworld_itself_names_counts_only_with_games(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = own_cache / ".cache" / "alfworld"
    monkeypatch.setenv("ALFWORLD_DATA", str(usual))
    assert default_folder() is None
    monkeypatch.setenv("ALFWORLD_DATA", str(own_cache))
    assert default_folder() == str(own_cache)


def test_the_cache_stands_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    assert cache_folder("alfworld") == own_cache / "alfworld"
    monkeypatch.delenv("EXPERIENTIAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("alfworld") == tmp_path / "experiential" / "alfworld"


def _real() -> str:
    folder = os.environ.get("EXPERIENTIAL_DATA")
    if not folder or not (Path(folder) / "alfworld" / "common.json").exists():
        pytest.skip(
            "needs ALFWorld's games: set EXPERIENTIAL_DATA to a folder with alfworld/common.json"
        )
    return str(Path(folder) / "alfworld")


@pytest.mark.slow
def test_a_real_game_is_won_by_its_walkthrough() -> None:
    env = ALFWorldEnv("eval", data=_real())
    try:
        assert len(env.worlds) == 140 and {entry.task_type for entry in env._entries} == set(
            TASK_TYPES
        )
        _, info = env.reset(options={"world": 60})
        for _ in env.game.walkthrough[:-1]:
            assert env.oracle_action() in info["admissible"] and not info["success"]
            info = env.step(env.oracle_action())[-1]
        _, reward, done, _, info = env.step(env.oracle_action())
        assert reward == 1.0 and done and info["success"]
    finally:
        env.close()


@pytest.mark.slow
def test_a_grammar_is_parsed_as_textworld_does_and_tells_its_own_goal() -> None:
    from importlib import import_module

    from experiential.envs.alfworld.caches import GrammarCache

    logic: Any = import_module("textworld.envs.pddl.logic")
    parse = logic._parse_and_convert
    cache = GrammarCache(getattr(parse, "parse", parse), logic.ContextSensitiveGrammar.parse)
    texts = [make_game("train", i, kind).data["grammar"] for i, kind in enumerate(TASK_TYPES[:2])]
    for text in (*texts, texts[0]):
        (actions, grammar), (expected, whole) = (
            cache(text, rule_name="pddlStart"),
            cache.parse(text, rule_name="pddlStart"),
        )
        assert actions.keys() == expected.keys() and repr(dict(grammar._rules)) == repr(
            dict(whole._rules)
        )
    assert len(cache._known) == 1


@pytest.mark.slow
@pytest.mark.parametrize("source", ["made", "real"])
def test_sped_up_games_answer_the_same_in_every_character(source: str) -> None:
    """Walkthroughs and drawn commands, beside a process in which TextWorld is as it comes."""
    data = None if source == "made" else _real()
    if data is None:
        games = [entry.load() for entry in made_games("eval", 2)]
    else:
        games = [open_games(data, "valid_seen")[place].load() for place in (3, 70)]
    answers: dict[bool, list[Any]] = {}
    for is_fast in (True, False):
        with ProcessPoolExecutor(
            1, get_context("spawn"), initializer=benchmark.begin, initargs=(is_fast,)
        ) as pool:
            played = [pool.submit(benchmark.play, game, 1).result() for game in games]
        assert all(one["won"] and one["sped_up"] == is_fast for one in played)
        answers[is_fast] = [(one["digest"], one["steps"]) for one in played]
    assert answers[True] == answers[False]


@pytest.mark.slow
def test_the_same_game_again_starts_afresh(env: ALFWorldEnv) -> None:
    first = env.reset(options={"world": 4})
    for command in env.game.walkthrough:
        env.step(command)
    assert env.reset(options={"world": 4}) == first and not first[1]["success"]
