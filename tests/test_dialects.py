"""Dialects of grids: meanings last for a world, the seed draws the layout, splits are disjoint."""

from __future__ import annotations

import pickle
import re
from typing import Any

import gymnasium as gym
import pytest

from benchmarks.memory_headroom import Deducer, blind, play, read_lake, read_room
from experiential.envs import check_text_env
from experiential.envs.dialect import dialects_of
from experiential.envs.frozen_lake import FrozenLakeEnv
from experiential.envs.grid import MOVES
from experiential.envs.names import NAMED_SPLITS
from experiential.envs.sokoban import SokobanEnv
from experiential.errors import ConfigError
from experiential.evaluation.arms import world_of

GRIDS = (FrozenLakeEnv, SokobanEnv)
Grid = FrozenLakeEnv | SokobanEnv
both = pytest.mark.parametrize("kind", GRIDS)


def dialects(kind: Any, split: str = "train", **arguments: Any) -> Grid:
    return kind(split, preset="dialects", **arguments)


@both
def test_splits_share_no_name_and_no_pair_of_permutations(kind: Any) -> None:
    symbols = kind("train", preset="dialects").rules.symbols
    found = [one for split in NAMED_SPLITS for one in dialects_of(split, symbols)]
    assert len(found) >= 4 * 120
    assert len({one.name for one in found}) == len(found)
    assert len({(one.symbols, one.directions) for one in found}) == len(found)
    for one in found:
        assert sorted(one.symbols) == sorted(symbols) and sorted(one.directions) == sorted(MOVES)


@both
def test_layouts_of_the_splits_differ_and_need_three_moves_or_more(kind: Any) -> None:
    seen: dict[str, set[str]] = {}
    for split in NAMED_SPLITS:
        env = dialects(kind, split)
        for seed in range(60):
            env.reset(seed=seed)
            plan, layout = env.plan(), env._layout(env.layout)
            assert plan is not None and 3 <= len(plan) <= env.budget
            assert env.rules.sizes[0] <= layout.size <= env.rules.sizes[1]
            seen.setdefault(split, set()).add(layout.content)
    assert all(len(contents) > 55 for contents in seen.values())
    assert len(set.union(*seen.values())) == sum(map(len, seen.values()))


@both
def test_what_is_held_out_without_dialects_is_held_out_with_them(kind: Any) -> None:
    plain = {kind("eval", preset="erl")._layout(number).content for number in range(100)}
    for split in ("train", "corpus"):
        env = dialects(kind, split)
        assert plain.isdisjoint(env._layout(number).content for number in range(100))


@both
def test_a_world_is_a_dialect_and_the_seed_draws_the_layout(kind: Any) -> None:
    """The guard against leaks hides an instance, so what a visit taught reaches the next one."""
    env = dialects(kind, "eval")
    infos = [env.reset(seed=seed, options={"world": 5})[1] for seed in range(8)]
    assert {info["task"] for info in infos} == {f"{env.aim} in the dialect of {env.dialect.name}."}
    assert {info["task_id"] for info in infos} == {world_of(info["instance"]) for info in infos}
    assert len({info["instance"] for info in infos}) == 8
    again = env.reset(seed=3, options={"world": 5})[1]
    assert again["instance"] == infos[3]["instance"]
    assert len({env.reset(seed=0, options={"world": w})[1]["task"] for w in env.worlds}) == 32
    chosen = env.reset(options={"world": 2, "layout": 77})[1]["instance"]
    assert chosen.endswith(f"{env.dialects[2].name}#77")


@both
def test_symbols_and_words_mean_what_the_dialect_says(kind: Any) -> None:
    """The same layout in two dialects is the same board in other symbols and words."""
    env = dialects(kind)
    plain = kind(preset="dialects", symbols=env.rules.symbols)
    for world in range(12):
        grid, info = env.reset(seed=1, options={"world": world, "layout": 9})
        dialect, way = env.dialect, env._solve()
        assert way is not None and info["admissible"] == list(MOVES)
        roles = str.maketrans(dialect.symbols, plain.rules.symbols)
        again, _ = plain.reset(seed=1, options={"world": 0, "layout": 9})
        own = str.maketrans(plain.dialect.symbols, plain.rules.symbols)
        assert grid.translate(roles) == again.translate(own)
        assert env.plan() == [dialect.word(direction) for direction in way]
        assert [dialect.direction(word) for word in env.plan() or []] == way
        for word in env.plan() or []:
            *_, info = env.step(word)
        assert info["success"]


@both
def test_the_legend_is_shown_on_request_only_and_is_true(kind: Any) -> None:
    hidden, shown = dialects(kind, "eval"), dialects(kind, "eval", legend=True)
    for world in range(6):
        first, _ = hidden.reset(seed=world, options={"world": world})
        told, _ = shown.reset(seed=world, options={"world": world})
        legend, _, grid = told.partition("\n\n")
        assert "Legend" not in first and grid == first
        for symbol, role in zip(hidden.dialect.symbols, hidden.roles, strict=True):
            assert f"{symbol} {role}" in legend
        moves = dict(re.findall(r"(\w+) moves (\w+)", legend))
        assert moves == {word: hidden.dialect.direction(word).lower() for word in MOVES}
        word = shown.oracle_action()
        assert shown.step(word)[0] == f"{legend}\n\n{hidden.step(word)[0]}"
    assert hidden.digest() != shown.digest()


def test_a_described_lake_says_where_the_goal_and_the_holes_beside_lie_and_where_a_word_led() -> (
    None
):
    lake = dialects(FrozenLakeEnv, "dev", words_only=True, described=True)
    grid = dialects(FrozenLakeEnv, "dev", words_only=True)
    assert lake.digest() != grid.digest()
    said: set[str] = set()
    for seed in range(40):
        seen, _ = lake.reset(seed=seed)
        grid.reset(seed=seed)
        assert isinstance(lake, FrozenLakeEnv) and isinstance(grid, FrozenLakeEnv)
        done = False
        while not done:
            goal = dict.fromkeys(("up", "down", "left", "right"), 0)
            sentence, _, holes = seen.partition("\n")[0].partition(".")
            goal |= {way: int(n) for n, way in re.findall(r"(\d) (\w+)", sentence)}
            (row, column), (down, right) = lake.agent, lake.lake.goal
            assert (row + goal["down"] - goal["up"], column + goal["right"] - goal["left"]) == (
                down,
                right,
            )
            beside = {
                name.lower()
                for name, (dy, dx) in MOVES.items()
                if (row + dy, column + dx) in lake.lake.holes
            }
            assert set(re.findall("up|down|left|right", holes)) == beside
            word = list(MOVES)[int(lake.np_random.integers(4))]
            seen, reward, over, cut, info = lake.step(word)
            shown = grid.step(word)
            assert (reward, over, cut) == shown[1:4]
            led = re.match(r"You (moved|cannot move) (\w+)\.", info["feedback"])
            assert led is not None and seen.endswith(info["feedback"])
            assert led[2] == lake.dialect.direction(word).lower()
            assert (led[1] == "moved") == (lake.agent != (row, column))
            said.add(info["feedback"].partition(". ")[2])
            done = over or cut
    assert {"The agent reached the goal", "The agent fell into the hole"} <= said


def test_a_described_lake_has_the_words_in_its_legend_and_tells_no_move_of_other_text() -> None:
    lake = dialects(FrozenLakeEnv, words_only=True, described=True, legend=True)
    seen, _ = lake.reset(seed=0)
    assert re.fullmatch(r"Legend: Up moves \w+, Down moves \w+, Left .*\.", seen.split("\n")[0])
    assert lake.step("jump")[4]["feedback"] == "No valid actions were recorded."
    quiet = dialects(FrozenLakeEnv, words_only=True, described=True, feedback=False)
    quiet.reset(seed=0)
    seen, *_, info = quiet.step("Up")
    assert info["feedback"] and info["feedback"] not in seen


def test_words_only_leaves_the_symbols_and_deals_all_moves_to_every_split() -> None:
    names, moves = list[str](), list[set[tuple[str, ...]]]()
    for split in NAMED_SPLITS:
        env = FrozenLakeEnv(split, preset="dialects", dialects=96, words_only=True)
        assert {one.symbols for one in env.dialects} == {"ABCD"}
        names += [one.name for one in env.dialects]
        moves.append({one.directions for one in env.dialects})
        whole = FrozenLakeEnv(split, preset="dialects")
        infos = [each.reset(seed=1)[1] for each in (env, whole)]
        assert infos[0]["task_id"] != infos[1]["task_id"] and env.digest() != whole.digest()
        while (plan := env.plan()) and not env.step(plan[0])[4]["success"]:
            pass
        assert env.agent == env.lake.goal
    assert len(set(names)) == len(names) == 4 * 96
    assert [len(found) for found in moves] == [24] * 4
    with pytest.raises(ConfigError, match="words_only only with dialects"):
        FrozenLakeEnv(words_only=True)


@both
def test_runs_can_have_dialects_of_their_own(kind: Any) -> None:
    def names(**given: Any) -> list[str]:
        return [one.name for one in dialects(kind, "dev", **given).dialects]

    assert names(dialects=2, skip=2) + names(dialects=1, skip=4) == names(dialects=5)[2:]
    with pytest.raises(ConfigError, match="Expected dialects of split dev between 1 and 1, got 2"):
        names(dialects=2, skip=119)
    with pytest.raises(ConfigError, match="Expected skip between 0 and 119, got -1"):
        names(dialects=2, skip=-1)
    with pytest.raises(ConfigError, match="skip only with dialects"):
        kind(skip=1)


@both
def test_a_named_dialect_stands_before_the_first_observation_alone(kind: Any) -> None:
    named, plain = dialects(kind, named=True), dialects(kind)
    (seen, info), (bare, _) = named.reset(seed=3), plain.reset(seed=3)
    assert seen == f"{info['task']}\n{bare}" and named.dialect.name in seen
    assert named.step("Up")[0] == plain.step("Up")[0]
    assert named.digest() != plain.digest()
    with pytest.raises(ConfigError, match="named only with dialects"):
        kind(named=True)


def test_under_a_law_names_that_begin_alike_have_the_same_words_in_every_split() -> None:
    by_word: dict[str, set[tuple[str, ...]]] = {}
    for split in NAMED_SPLITS:
        env = FrozenLakeEnv(split, preset="dialects", dialects=96, words_only=True, law="first")
        free = FrozenLakeEnv(split, preset="dialects", dialects=96, words_only=True)
        assert [one.name for one in env.dialects] == [one.name for one in free.dialects]
        for one in env.dialects:
            by_word.setdefault(one.name.split()[0], set()).add(one.directions)
        assert env.reset(seed=1)[1]["task_id"].startswith(f"frozenlake-words-law-first-{split}-")
        assert env.digest() != free.digest()
        while (plan := env.plan()) and not env.step(plan[0])[4]["success"]:
            pass
        assert env.agent == env.lake.goal
    assert len(by_word) == 32 and {len(found) for found in by_word.values()} == {1}
    assert len(set.union(*by_word.values())) == 24
    with pytest.raises(ConfigError, match="law only with words_only"):
        FrozenLakeEnv(preset="dialects", law="first")


@both
@pytest.mark.parametrize("legend", [True, False])
@pytest.mark.parametrize("split", NAMED_SPLITS)
def test_the_checker_finds_nothing_and_a_pickle_goes_on(
    kind: Any, legend: bool, split: str
) -> None:
    env = dialects(kind, split, legend=legend)
    env.reset(seed=4)
    twin = pickle.loads(pickle.dumps(env))
    assert twin.step("Up")[0] == env.step("Up")[0]
    name = f"experiential/{kind.__name__.removesuffix('Env')}-v0"
    made = gym.make(name, disable_env_checker=True, preset="dialects", split=split, legend=legend)
    assert check_text_env(made) == []


def test_layouts_without_dialects_stay_as_they_were() -> None:
    """The digests were taken before there were dialects."""
    before = {
        (FrozenLakeEnv, "train"): "6e38dcef446c", (FrozenLakeEnv, "eval"): "f3b37debb845",
        (SokobanEnv, "train"): "7b5940aec41f", (SokobanEnv, "eval"): "abd695c73167",
    }  # fmt: skip
    assert {key: key[0](key[1]).digest() for key in before} == before


@pytest.mark.parametrize(
    "arguments",
    [
        {"legend": True},
        {"described": True, "preset": "dialects"},
        {"split": "dev"},
        {"preset": "dialects", "dialects": 121, "split": "dev"},
        {"preset": "dialects", "dialects": -1},
        {"preset": "dialects", "shortest": 9},
        {"preset": "dialects", "data": "lakes.jsonl"},
        {"preset": "4x4", "dialects": 2},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        FrozenLakeEnv(**arguments)
    with pytest.raises(ValueError, match="Expected layout between 0 and 9999, got 10000"):
        dialects(SokobanEnv).reset(options={"layout": 10_000})


def test_who_remembers_the_dialect_crosses_every_lake_and_who_does_not_stalls() -> None:
    """Scripted players with fixed seeds, so the figures are always the same."""
    count = 24
    lakes = [dialects(FrozenLakeEnv, "eval", dialects=count) for _ in range(6)]
    remembers = play(lakes[0], Deducer(lakes[1], read_lake), 4)
    forgets = play(lakes[2], Deducer(lakes[3], read_lake), 4, window=0)
    chance = play(lakes[4], blind(), 4)
    assert remembers[:, 3].all() and remembers[:, 1:].mean() > 0.9
    assert 0.3 < forgets.mean() < 0.75 and chance.mean() < 0.1
    assert remembers[:, 0].mean() < 0.75


def test_visits_to_rooms_tell_their_dialect() -> None:
    rooms = [dialects(SokobanEnv, "eval", dialects=4) for _ in range(2)]
    won = play(rooms[0], Deducer(rooms[1], read_room), 4)
    assert won[:, 0].mean() <= 0.5 and won[:, 3].all()
