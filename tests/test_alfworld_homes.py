"""Households that last: what is kept where stays, goals change, splits share no household."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from benchmarks.memory_headroom import Search, search
from experiential.envs.alfworld.games import (
    Entry,
    Game,
    House,
    default_folder,
    houses_of,
    open_games,
)
from experiential.envs.alfworld.household import (
    BEDROOM,
    KITCHEN,
    draw_home,
    draw_visit,
    made_houses,
    task_types,
)
from experiential.evaluation.arms import world_of

SPLITS = ("train", "dev", "eval")


def scene_entries() -> list[Entry]:
    """Three games in each of ALFRED's 27 scenes of four kinds of rooms."""
    scenes = [room + number for room in (1, 201, 301, 401) for number in range(27)]
    ids = [f"pick-Mug-None-Desk-{scene}/trial_{n}" for scene in scenes for n in range(3)]
    return [Entry(one, "pick", partial(Game, one, "pick", "put.", (), {})) for one in ids]


def test_scenes_are_dealt_out_to_the_splits_by_kind_of_room() -> None:
    found = {split: [one.name for one in houses_of(scene_entries(), split)] for split in SPLITS}
    assert {split: len(names) for split, names in found.items()} == {
        "train": 60,
        "dev": 24,
        "eval": 24,
    }
    assert len({name for names in found.values() for name in names}) == 108
    for split, each in (("train", 15), ("dev", 6), ("eval", 6)):
        assert set(Counter(int(n.split()[1]) // 100 for n in found[split]).values()) == {each}
    assert {int(name.split()[1]) // 100 for name in found["eval"][:4]} == {0, 2, 3, 4}


def test_a_scene_stays_in_its_split_whatever_tasks_are_played() -> None:
    entries = scene_entries()
    heated = {entries[number].id.partition("/")[0] for number in (3, 30, 60)}
    entries = [
        replace(one, task_type="heat") if one.id.partition("/")[0] in heated else one
        for one in entries
    ]
    counts = Counter[str]()
    for split in SPLITS:
        every, picks, heats = (
            {house.name for house in houses_of(entries, split, kinds)}
            for kinds in ([], ["pick"], ["heat"])
        )
        assert picks | heats == every and not picks & heats
        counts += Counter(picks=len(picks), heats=len(heats))
    assert counts == {"picks": 105, "heats": 3}


def test_a_scene_draws_its_own_games_only() -> None:
    house = houses_of(scene_entries(), "dev")[3]
    rng, scene = np.random.default_rng(0), house.name.split()[1]
    drawn = {house.draw(rng).id for _ in range(40)}
    assert len(drawn) == 3 and all(f"-{scene}/" in one for one in drawn)


@pytest.mark.parametrize("room", [KITCHEN, BEDROOM])
def test_objects_are_where_they_are_kept_and_the_task_is_not_done_yet(room: Any) -> None:
    for number in range(30):
        home = draw_home(Random(number), room)
        assert len(home.kept) == 10 + (room is BEDROOM)
        for task_type in home.task_types:
            visit = draw_visit(Random(number), home, task_type)
            assert all(place == home.kept[thing.kind] for thing, place in visit.where.items())
            assert home.kept[visit.target].kind != visit.goal_place
            count = sum(thing.kind == visit.target for thing in visit.where)
            assert count >= 1 + (task_type == "pick_two_obj_and_place")
            assert visit.plan() and visit.words


def test_rooms_admit_the_tasks_that_they_have_stations_for() -> None:
    assert len(task_types(KITCHEN)) == 5
    assert task_types(BEDROOM) == [
        "pick_and_place_simple",
        "look_at_obj_in_light",
        "pick_two_obj_and_place",
    ]


def test_made_households_of_the_splits_share_nothing() -> None:
    houses = {split: made_houses(split, 100) for split in SPLITS}  # type: ignore[arg-type]
    every = [house for listed in houses.values() for house in listed]
    assert len({house.name for house in every}) == 300
    assert len({house.contents for house in every}) == 300
    heat = made_houses("dev", 20, ["pick_heat_then_place_in_recep"])
    assert all("'Desk" not in house.contents for house in heat)


def test_under_a_law_names_that_begin_alike_keep_their_objects_alike_in_every_split() -> None:
    kept: dict[str, set[str]] = {}
    for split in SPLITS:
        houses = made_houses(split, 100, law="first")  # type: ignore[arg-type]
        free = made_houses(split, 100)  # type: ignore[arg-type]
        assert [one.name for one in houses] == [one.name for one in free]
        for one in houses:
            first = one.name.removeprefix("the house of ").split()[0]
            kept.setdefault(first, set()).add(one.contents)
    assert len(kept) == 32 and {len(found) for found in kept.values()} == {1}
    assert len(set.union(*kept.values())) == 32


def test_houses_of_a_street_are_alike_and_share_no_number() -> None:
    names: set[str] = set()
    for split in SPLITS:
        streets = made_houses(split, 100, law="street")  # type: ignore[arg-type]
        firsts = made_houses(split, 100, law="first")  # type: ignore[arg-type]
        assert [one.contents for one in streets] == [one.contents for one in firsts]
        for one, other in zip(streets, firsts, strict=True):
            *begin, number = one.name.split()
            assert begin == other.name.split()[:4] and 100 <= int(number) <= 999
        names |= {one.name for one in streets}
    assert len(names) == 300


@pytest.mark.parametrize("room", [KITCHEN, BEDROOM])
def test_with_few_kinds_of_objects_every_visit_has_all(room: Any) -> None:
    for number in range(30):
        home = draw_home(Random(number), room, objects=3)
        assert len(home.kept) == 3 + (room is BEDROOM)
        for task_type in home.task_types:
            visit = draw_visit(Random(number), home, task_type)
            assert {thing.kind for thing in visit.where} - {"DeskLamp"} == set(home.kept) - {
                "DeskLamp"
            }
            assert visit.target in home.wanted(task_type) and visit.plan()


def test_a_household_with_few_kinds_can_do_a_task_of_those_asked_for() -> None:
    """In a kitchen with two kinds of objects often none can be heated, so that others are drawn."""
    heat = "pick_heat_then_place_in_recep"
    drawn = [draw_home(Random(number), KITCHEN, objects=2) for number in range(60)]
    assert any(heat not in home.task_types for home in drawn)
    houses = made_houses("eval", 60, [heat], objects=2)
    assert all(house.contents.startswith(f"(0, ['{heat}'], ") for house in houses)


def needs_alfworld() -> None:
    for package in ("alfworld", "fast_downward"):
        pytest.importorskip(package, reason="needs pip install 'experiential-rl[alfworld]'")


def test_who_remembers_a_household_finds_things_in_fewer_turns() -> None:
    """A searcher with fixed seeds, so the figures are always the same."""
    needs_alfworld()
    houses = made_houses("eval", 60)
    forgets, last, every = (search(houses, 8, window, 0) for window in (0, 1, None))
    assert every[:, 7].mean() < last[:, 7].mean() - 1 < forgets[:, 7].mean() - 2
    assert (every[:, 0] == forgets[:, 0]).all()
    game = Search.of(houses[0].draw(np.random.default_rng(0)))
    (at,) = game.at
    assert game.sought in game.contents[at] and game.costs[at] in (1, 2)


SCENE = """
        Bed_bar_1 - receptacle
        Desk_bar_2 - receptacle
        Safe_bar_3 - receptacle
        (openable Safe_bar_3)
        (inReceptacle Book_bar_9 Safe_bar_3)
        (inReceptacle Book_bar_7 Bed_bar_1)
        (inReceptacle Pen_bar_8 Desk_bar_2)
"""


def scene_game(number: int) -> Game:
    """A book is to be brought to the bed, from the safe."""
    name = f"pick_and_place_simple-Book-None-Bed-301/trial_{number}"
    data = {"pddl_problem": SCENE}
    way = ("go to safe 1", "open safe 1", "take book 1 from safe 1", "go to bed 1", "move book 1")
    return Game(name, "pick_and_place_simple", "put a book in bed", way, data)


def test_a_searcher_in_a_scene_goes_by_the_usual_places_and_by_what_it_saw() -> None:
    game = Search.of_scene(scene_game(0))
    assert (game.sought, game.at) == ("Book", {"Safe_bar_3"})
    assert game.costs == {"Desk_bar_2": 1, "Safe_bar_3": 2}  # who looks on the bed has won nothing
    number = iter(range(99))
    new = [House("house 301", "", lambda rng: scene_game(next(number)))]
    same = [House("house 301", "", lambda rng: scene_game(0))]

    def turns(houses: list[House], window: int | None, usual: dict[str, float]) -> list[int]:
        prior = (lambda kind, place: usual[place]) if usual else None
        return search(houses, 4, window, 0, read=Search.of_scene, prior=prior)[0].tolist()

    right, wrong = {"Desk_bar_2": 0.2, "Safe_bar_3": 0.5}, {"Desk_bar_2": 0.9, "Safe_bar_3": 0.2}
    assert turns(new, 0, right) == turns(new, None, right) == [5, 5, 5, 5]
    assert turns(new, 0, wrong) == [6, 6, 6, 6]  # the desk is in vain
    # After a look into both, the desk's .9 becomes (.9 + 0) / 2, and the safe's .2 (.2 + 1) / 2.
    assert turns(new, None, wrong) == [6, 5, 5, 5]
    assert turns(same, None, wrong) == [6, 6, 6, 6]  # the same game is not remembered


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_alfworld()
    monkeypatch.setenv("EXPERIENTIAL_CACHE", str(tmp_path))


@pytest.mark.usefixtures("cache")
def test_a_world_is_a_household_and_the_seed_draws_the_game() -> None:
    from experiential.envs.alfworld.env import ALFWorldEnv

    env = ALFWorldEnv("dev", data="made", households=2)
    infos: list[dict[str, Any]] = []
    first = name = ""
    for seed in (0, 1, 0):
        observation, info = env.reset(seed=seed, options={"world": 1})
        infos.append(info)
        first = observation if len(infos) == 1 else first
        name = info["task"].removeprefix("In ").split(":")[0]
        assert observation.startswith(f"You are in {name}. ")
        assert info["task"].endswith(env.game.goal)
        assert info["task_id"] == world_of(info["instance"]) == f"alfworld-made-homes-dev-{name}"
    assert infos[0] == infos[2] and infos[0]["instance"] != infos[1]["instance"]
    only = ALFWorldEnv("dev", data="made", households=2, goal_in_task=False)
    told, named = only.reset(seed=0, options={"world": 1})
    assert told == first and named["task"] == f"Do what is asked in {name}."
    assert (named["task_id"], named["instance"]) == (infos[0]["task_id"], infos[0]["instance"])
    only.close()
    twin = pickle.loads(pickle.dumps(env))
    assert twin.task == env.task and twin.oracle_action() == env.oracle_action()
    while not info["success"]:
        *_, done, truncated, info = env.step(env.oracle_action())
        assert done == info["success"] and not truncated
    assert env.digest() != ALFWorldEnv("eval", data="made", households=2).digest()
    ruled = ALFWorldEnv("dev", data="made", households=2, law="first")
    assert ruled.digest() != env.digest()
    info = ruled.reset(seed=0, options={"world": 1})[1]
    assert info["task_id"] == f"alfworld-made-law-first-homes-dev-{name}"
    ruled.close()
    few = ALFWorldEnv("dev", data="made", households=2, law="first", objects=4)
    info = few.reset(seed=0, options={"world": 1})[1]
    assert info["task_id"] == f"alfworld-made-4-object-law-first-homes-dev-{name}"
    few.close()
    later = ALFWorldEnv("dev", data="made", households=1, skip=1)
    assert later.reset(seed=0)[1]["task_id"] == infos[0]["task_id"] and later.worlds == [0]
    later.close()
    env.close()
    twin.close()


@pytest.mark.usefixtures("cache")
def test_games_without_households_stay_as_they_were_and_wrong_arguments_are_refused() -> None:
    """The digests were taken before there were households."""
    from experiential.envs.alfworld.env import ALFWorldEnv

    digests = [ALFWorldEnv(split, data="made").digest() for split in ("train", "eval")]  # type: ignore[arg-type]
    assert digests == ["e688bd43bafc", "8603e309e443"]
    wrong: list[dict[str, Any]] = [
        {"households": 121, "split": "dev"},
        {"households": 0},
        {"households": 3, "games": 3},
        {"households": 2, "skip": 119, "split": "dev"},
        {"households": 2, "skip": -1},
        {"skip": 1},
        {"households": 3, "split": "valid_seen"},
        {"split": "dev"},
        {"goal_in_task": False},
        {"law": "first"},
        {"objects": 4},
        {"objects": 1, "households": 3},
        {"objects": 11, "households": 3},
        {"objects": 4, "households": 3, "data": "$ALFWORLD_DATA"},
        {"law": "last", "households": 3},
        {"law": "first", "households": 3, "data": "$ALFWORLD_DATA"},
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="Expected"):
            ALFWorldEnv(**{"data": "made", **arguments})


def test_real_scenes_of_the_splits_are_disjoint() -> None:
    folder = default_folder()
    if folder is None:
        pytest.skip("needs real data: set ALFWORLD_DATA")
    entries = open_games(folder, "train")
    found = {split: {one.name for one in houses_of(entries, split)} for split in SPLITS}
    assert all(len(names) >= 20 for names in found.values())
    assert len(set.union(*found.values())) == sum(map(len, found.values()))
