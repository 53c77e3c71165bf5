"""Read ALFWorld's games from a download or from a packed folder."""

from __future__ import annotations

import json
import lzma
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from experiential.envs.names import digest_of
from experiential.errors import ConfigError

TaskType = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
TASK_TYPES: tuple[TaskType, ...] = get_args(TaskType)
"""In the order in which ALFWorld numbers them from 1."""
FILES = {
    "train": "train", "eval": "valid_seen", "valid_train": "valid_train",
    "valid_seen": "valid_seen", "valid_unseen": "valid_unseen",
}  # fmt: skip
"""Split to the name that ALFWorld's files give it."""
_UNKNOWN = "UNKNOWN GOAL."
_GOAL = re.compile(r"Your task is to: (.*?)\"")
_SOLVABLE = re.compile(rb'"solvable"\s*:\s*true')


@dataclass(frozen=True)
class Game:
    """Hold one game, with commands that win it if any are known."""

    id: str
    task_type: str
    goal: str
    walkthrough: tuple[str, ...]
    data: dict[str, str]
    """``pddl_domain``, ``grammar`` and ``pddl_problem``, as TextWorld takes them."""


@dataclass(frozen=True)
class Entry:
    """Hold a game that is read when it is played."""

    id: str
    task_type: str
    load: Callable[[], Game]


@dataclass(frozen=True)
class House:
    """Hold a household that lasts, in which games are drawn."""

    name: str
    """What tasks call it, such as ``house 301``."""
    contents: str
    """All that its games follow from."""
    draw: Callable[[np.random.Generator], Game]


def houses_of(
    entries: Iterable[Entry], split: str, kinds: Collection[str] = ()
) -> tuple[House, ...]:
    """Return the scenes of a split as households, whose games are drawn evenly.

    The scenes of each of ALFRED's four kinds of rooms are dealt out: five of nine to train, two
    each to dev and eval. ``kinds`` are the types of task that are played, all if empty: a scene is
    in the same split whatever they are, and left out where it has no such game.
    """
    scenes: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        scenes[entry.id.partition("/")[0].rpartition("-")[2]].append(entry)
    rooms: dict[int, list[str]] = defaultdict(list)
    for scene in sorted(scenes, key=lambda scene: digest_of(f"household:{scene}")):
        rooms[int(scene) // 100].append(scene)
    share = {"train": range(5), "dev": range(5, 7), "eval": range(7, 9)}[split]
    places = [
        (place, room, scene)
        for room, listed in rooms.items()
        for place, scene in enumerate(listed)
        if place % 9 in share
    ]

    def house(scene: str, games: list[Entry]) -> House:
        ids = " ".join(entry.id for entry in games)

        def draw(rng: np.random.Generator) -> Game:
            return games[int(rng.integers(len(games)))].load()

        return House(f"house {scene}", ids, draw)

    played = {
        scene: sorted(
            (entry for entry in scenes[scene] if not kinds or entry.task_type in kinds),
            key=lambda entry: entry.id,
        )
        for _, _, scene in sorted(places)
    }
    return tuple(house(scene, games) for scene, games in played.items() if games)


def open_games(data: str | Path, split: str) -> tuple[Entry, ...]:
    """Return the games of a download or a packed folder (``common.json``), ordered by name."""
    folder, name = Path(os.path.expandvars(data)).expanduser(), FILES[split]
    if (folder / "common.json").is_file():
        path = folder / f"{name}.jsonl.xz"
        if not path.is_file():
            raise ConfigError(
                f"Expected {path.name} in {folder} for split {split!r}, got no such file; run"
                " alfworld-download, which has all splits, and set ALFWORLD_DATA to its folder"
            )
        return _packed(folder, path, path.stat().st_mtime_ns)
    for root in (folder / "json_2.1.1" / name, folder / name):
        if root.is_dir():
            return _downloaded(root)
    raise ConfigError(
        f"Expected {folder / 'json_2.1.1' / name} (as alfworld-download writes it) or"
        f" {folder / 'common.json'}, got neither; run alfworld-download, set ALFWORLD_DATA to"
        " its folder, or leave both out for made games"
    )


@lru_cache(maxsize=8)
def _downloaded(root: Path) -> tuple[Entry, ...]:
    """Return the games that ALFWorld plays: solvable, without slices and movable receptacles."""
    found: list[Entry] = []
    for path in root.glob("*/*/game.tw-pddl"):
        name = f"{path.parent.parent.name}/{path.parent.name}"
        if "movable" not in name and "Sliced" not in name and _SOLVABLE.search(_bytes(path)):
            found.append(Entry(name, name.split("-", 1)[0], partial(read_game, path, name)))
    if not found:
        raise ConfigError(
            f"Expected solvable games (task/trial/game.tw-pddl) below {root}, got none; run"
            " alfworld-download"
        )
    return tuple(sorted(found, key=lambda entry: entry.id))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"Expected a readable game, got {path}: {error}") from error


def read_game(path: Path, name: str) -> Game:
    """Read a game of the download, with its ``traj_data.json`` if there is one."""
    game = _fields(_bytes(path), str(path), "pddl_domain", "grammar", "pddl_problem")
    walkthrough: tuple[str, ...] = game.pop("walkthrough")
    goal = _GOAL.search(game["grammar"])
    if goal is None:
        raise ConfigError(f"Expected 'Your task is to: ...' in field grammar of {path}, got none")
    task_type, beside = name.split("-", 1)[0], path.with_name("traj_data.json")
    if beside.is_file():
        task_type = _fields(_bytes(beside), str(beside), "task_type")["task_type"]
    return Game(name, task_type, goal.group(1), walkthrough, game)


@lru_cache(maxsize=4)
def _packed(folder: Path, path: Path, stamp: int) -> tuple[Entry, ...]:
    """Read the games of a packed folder; ``common.json`` holds the parts that they share."""
    source = str(folder / "common.json")
    common = _fields(_bytes(folder / "common.json"), source, "pddl_domain", "grammar")
    if _UNKNOWN not in common["grammar"]:
        raise ConfigError(f"Expected {_UNKNOWN!r} in field grammar of {source}, got none")
    entries: list[Entry] = []
    try:
        with lzma.open(path) as file:
            for number, line in enumerate(filter(bytes.strip, file), 1):
                row = _fields(line, f"{path}, line {number}", "id", "goal", "problem")
                problem = zlib.compress(row.pop("problem").encode(), 6)
                load = partial(_unpacked, common, row, problem)
                entries.append(Entry(row["id"], row["id"].split("-", 1)[0], load))
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ConfigError(
            f"Expected lines of JSON compressed by xz in {path}, got {error}"
        ) from error
    return tuple(entries)


def _unpacked(common: dict[str, Any], row: dict[str, Any], problem: bytes) -> Game:
    data = {
        "pddl_domain": common["pddl_domain"],
        "grammar": with_goal(common["grammar"], row["goal"]),
        "pddl_problem": zlib.decompress(problem).decode(),
    }
    task_type = row["id"].split("-", 1)[0]
    return Game(row["id"], task_type, row["goal"], row["walkthrough"], data)


def with_goal(grammar: str, goal: str) -> str:
    """Return a grammar that states this goal."""
    return grammar.replace(_UNKNOWN, json.dumps(goal)[1:-1])


def _fields(text: bytes, place: str, *names: str) -> dict[str, Any]:
    """Return texts of a JSON object by name, and its walkthrough, where it has one."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"Expected a JSON object in {place}, got {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"Expected a JSON object in {place}, got {type(found).__name__}")
    known = cast("dict[str, Any]", found)
    for name in names:
        value = known.get(name)
        if not isinstance(value, str) or not value.strip():
            got = type(value).__name__ if name in known else "no such field"
            raise ConfigError(f"Expected a text in field {name} of {place}, got {got}")
    value: Any = known.get("walkthrough") or []
    commands = cast("list[Any]", value) if isinstance(value, list) else [None]
    if not all(isinstance(one, str) for one in commands):
        raise ConfigError(
            f"Expected a list of commands in field walkthrough of {place}, got {value!r}"
        )
    return {name: known[name] for name in names} | {"walkthrough": tuple(commands)}


def default_folder() -> str | None:
    """Return the folder of ``ALFWORLD_DATA``, else ``~/.cache/alfworld`` if it holds games.

    Importing alfworld sets the variable to that folder, whether it holds games or not, so only
    another one counts as asked for.
    """
    usual = Path("~/.cache/alfworld").expanduser()
    named = Path(os.environ.get("ALFWORLD_DATA") or usual).expanduser()
    return str(named) if named != usual or (usual / "json_2.1.1").is_dir() else None
