"""Measure what a memory is worth in worlds that last: scripted players, by visit.

    python -m benchmarks.memory_headroom [--only vault-no-note ...] [--worlds 120]
        [--results benchmarks/results/memory_headroom.json]

A world is visited several times, each visit with another seed. A player sees the observation and
the transcripts that its memory holds: none, the last visit's, the last three, or all. What they say
is used as well as it can be, so that a row bounds what an agent with this memory can reach.

* ``vault-no-note``: an open lever is drawn among those that no remembered visit ruled out.
  ``sweep`` instead goes on in the alphabet where the last visit stopped: with an order agreed on
  beforehand, the last transcript stands for all earlier ones.
* ``vault-law``, ``vault-law-no-note``: a bank is filled on the training split and only read on the
  evaluation split. Its transcripts are found by the first word of the name (which the law goes by),
  or by the second (which says nothing).
* ``frozenlake-dialects``, ``sokoban-dialects``: the player keeps the dialects that agree with all
  it remembers and with this visit so far, and goes the shortest way under a likeliest one of them.
  ``chance`` draws its moves blindly.
* ``alfworld-homes``: the plan of a made household is known but for the place of the object, which
  is searched for, first where a remembered visit saw such an object. Turns are counted on the
  problem, without TextWorld. Needs the extra ``alfworld``.
* ``alfworld-scenes``: the same in ALFWorld's own scenes, whose games place objects anew. A visit
  that drew the very game of an earlier one does not remember it. ``likely`` looks first where such
  objects are most often in the scenes of train, which weights can learn; it joins this with what it
  saw in one simple way, so that its rows are no bounds. Needs ``ALFWORLD_DATA``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from experiential.envs.alfworld.games import Game, House, default_folder, houses_of, open_games
from experiential.envs.alfworld.household import made_houses
from experiential.envs.dialect import DIRECTIONS, Dialect
from experiential.envs.frozen_lake import FrozenLakeEnv, Lake
from experiential.envs.sokoban import Room, SokobanEnv
from experiential.envs.text_env import Info, TextEnv
from experiential.envs.vault import VaultEnv

RESULTS = Path("benchmarks/results/memory_headroom.json")


@dataclass(frozen=True)
class Turn:
    """Hold one turn: what was seen, what was done, what came of it."""

    observation: str
    action: str
    after: str
    info: Info


Transcript = list[Turn]
Player = Callable[[str, Info, Sequence[Transcript], Transcript], str]
"""Choose an action from observation, info, the remembered visits and this visit so far."""
Key = Callable[[str], str]
"""Return under which key the visits of a task are remembered."""
Memory = defaultdict[str, list[Transcript]]


def visit(
    env: TextEnv, world: int, seed: int, player: Player, past: Sequence[Transcript]
) -> Transcript:
    """Play an episode of a world and return its turns."""
    observation, info = env.reset(seed=seed, options={"world": world})
    now: Transcript = []
    over = False
    while not over:
        action = player(observation, info, past, now)
        after, _, terminated, truncated, info = env.step(action)
        now.append(Turn(observation, action, after, info))
        observation, over = after, terminated or truncated
    return now


def play(
    env: TextEnv,
    player: Player,
    visits: int,
    *,
    seed: int = 0,
    window: int | None = None,
    key: Key = str,
    memory: Memory | None = None,
    write: bool = True,
) -> np.ndarray:
    """Visit every world several times; return success, bool, shape (worlds, visits).

    Args:
        env: the environment; world ``w`` is met on visit ``v`` with a seed of its own.
        player: chooses the actions.
        visits: visits to each world.
        seed: of the whole series.
        window: how many of the latest transcripts under a task's key are remembered; None for all.
        key: by what transcripts are found; by default the task in words.
        memory: the bank that is read; None begins with an empty one.
        write: whether visits are added to the bank.
    """
    bank = Memory(list) if memory is None else memory
    won = np.zeros((len(env.worlds), visits), bool)
    for number in range(visits):
        for world in env.worlds:
            episode = int(np.random.SeedSequence([seed, world, number]).generate_state(1)[0])
            env.reset(seed=episode, options={"world": world})
            found = bank[key(env.task)]
            past = (
                found[len(found) - window :] if window else found[: None if window is None else 0]
            )
            turns = visit(env, world, episode, player, past)
            won[world, number] = turns[-1].info["success"]
            if write:
                found.append(turns)
    return won


def after_failures(won: np.ndarray) -> list[float | None]:
    """Return the success rate of each visit among worlds whose earlier visits all failed."""
    failed = np.cumsum(won, axis=1) - won == 0
    counts = failed.sum(axis=0)
    return [float(won[failed[:, v], v].mean()) if counts[v] else None for v in range(won.shape[1])]


def lever_player(seed: int = 0, sweep: bool = False) -> Player:
    """Return a player of Vault that pulls the lever known as live, else one not yet ruled out."""
    rng = np.random.default_rng(seed)

    def act(observation: str, info: Info, past: Sequence[Transcript], now: Transcript) -> str:
        turns = [turn for transcript in (*past, now) for turn in transcript]
        live = [turn.action for turn in turns if turn.info["success"]]
        noted = [re.findall(r"(\w+) was live", turn.after) for turn in turns]
        live += [f"pull {lever}" for levers in noted for lever in levers]
        order = sorted(info["admissible"])
        pulled = [turn.action for turn in turns if turn.action in order]
        tried = {turn.action for turn in now}
        if live and live[-1] in order and live[-1] not in tried:
            return live[-1]
        if sweep:
            return order[(order.index(pulled[-1]) + 1) % len(order)] if pulled else order[0]
        untried = [lever for lever in order if lever not in tried]
        return str(rng.choice([lever for lever in untried if lever not in pulled] or untried))

    return act


MEMORIES: dict[str, tuple[int | None, bool]] = {
    "none": (0, False),
    "last visit": (1, False),
    "last three visits": (3, False),
    "last visit, sweep": (1, True),
    "all visits": (None, False),
}
"""Window and sweep of each player of ``vault-no-note``."""


def vault_no_note(worlds: int, seeds: int = 8) -> dict[str, Any]:
    """Measure Vault without the clerk's note, over as many visits as the ideal player needs."""
    found: dict[str, Any] = {}
    for name, (window, sweep) in MEMORIES.items():
        env = VaultEnv(split="eval", worlds=worlds, note=False)
        visits = env.levers // env.tries
        runs = [
            play(env, lever_player(seed, sweep), visits, seed=seed, window=window)
            for seed in range(seeds)
        ]
        won = np.concatenate(runs)
        found[name] = {"success": won.mean(axis=0).tolist(), "after_failures": after_failures(won)}
    return found


def first_word(task: str) -> str:
    """Return the first word of the vault's name."""
    return task.split()[-2]


def second_word(task: str) -> str:
    """Return the second word of the vault's name."""
    return task.split()[-1]


def law_transfer(key: Key, worlds: int, note: bool, visits: int = 2) -> float:
    """Return success on a first visit to evaluation vaults with the read-only bank of training."""
    bank = Memory(list)
    train = VaultEnv(split="train", worlds=160, note=note, law="first")
    held_out = VaultEnv(split="eval", worlds=worlds, note=note, law="first")
    play(train, lever_player(), visits, key=key, memory=bank)
    return float(play(held_out, lever_player(), 1, key=key, memory=bank, write=False).mean())


def vault_law(worlds: int, note: bool = True) -> dict[str, Any]:
    """Measure Vault under its law, with 160 training vaults visited twice."""
    env = VaultEnv(split="eval", worlds=worlds, note=note, law="first")
    return {
        "none": float(play(env, lever_player(), 8, window=0).mean()),
        "by second word": law_transfer(second_word, worlds, note),
        "by first word": law_transfer(first_word, worlds, note),
    }


def read_lake(rows: list[str], symbols: str) -> tuple[Lake, float] | None:
    """Return the lake of a first grid under some symbols, and the log of how likely its tiles are.

    None if it is no lake under them.
    """
    text = "".join(rows)
    if text.count(symbols[0]) != 1 or text.count(symbols[1]) != 1:
        return None
    letters = str.maketrans(symbols, "SGHF")
    holes, safe = text.count(symbols[2]), text.count(symbols[3])
    return Lake.parse([row.translate(letters) for row in rows]), float(
        holes * np.log(0.27) + safe * np.log(0.73)
    )


def read_room(rows: list[str], symbols: str) -> tuple[Room, float] | None:
    """Return the room of a first grid under some symbols, as ``read_lake`` does; all as likely."""
    agent, agent_on, box, box_on, goal, wall, _ = symbols
    text, edge = "".join(rows), rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)
    if set(edge) != {wall} or agent_on in text or box_on in text:
        return None
    if text.count(agent) != 1 or text.count(box) != text.count(goal) or box not in text:
        return None
    cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    walls, goals, boxes, starts = (
        frozenset(cell for cell, found in cells.items() if found == one)
        for one in (wall, goal, box, agent)
    )
    return Room(len(rows), walls, goals, boxes, next(iter(starts))), 0.0


class Deducer:
    """Play a grid by the dialects that explain everything seen.

    Args:
        env: an environment of the same preset, on which dialects are tried.
        read: reads a first grid under some symbols.
        seed: decides between dialects that are equally likely.
    """

    def __init__(
        self, env: FrozenLakeEnv | SokobanEnv, read: Callable[..., Any], seed: int = 0
    ) -> None:
        self.env, self.read, self.rng = env, read, np.random.default_rng(seed)
        boards: list[tuple[str, ...]] = list(permutations(env.dialect.symbols))
        self.boards = ["".join(board) for board in boards]
        self.moves: list[tuple[str, ...]] = list(permutations(DIRECTIONS))
        env.reset(seed=0)

    def explained(self, dialects: Sequence[Dialect], grid: str, turns: Transcript) -> list[Any]:
        """Return the dialects under which this visit comes about, each with how likely it is."""
        rows, found = ["".join(row.split()) for row in grid.split("\n")], list[Any]()
        for dialect in dialects:
            start = self.read(rows, dialect.symbols)
            if start is None:
                continue
            self.env.dialect = dialect
            self.env.begin_on(start[0])
            if all(self.env.step(turn.action)[0] == turn.after for turn in turns):
                found.append((dialect, start[1]))
        return found

    def remembered(self, past: Sequence[Transcript]) -> list[Dialect]:
        """Return the dialects that explain all remembered visits."""
        firsts = [visit[0].observation for visit in past]
        boards = self.boards
        for grid in firsts:
            rows = ["".join(row.split()) for row in grid.split("\n")]
            boards = [board for board in boards if self.read(rows, board) is not None]
        dialects = [Dialect("", board, moves) for board in boards for moves in self.moves]
        for grid, visit in zip(firsts, past, strict=True):
            dialects = [one for one, _ in self.explained(dialects, grid, visit)]
        return dialects

    def __call__(
        self, observation: str, info: Info, past: Sequence[Transcript], now: Transcript
    ) -> str:
        """Return the next word of a shortest way under a likeliest dialect."""
        grid = now[0].observation if now else observation
        if not now:
            rows = ["".join(row.split()) for row in grid.split("\n")]
            boards = {board for board in self.boards if self.read(rows, board) is not None}
            self.open = [one for one in self.remembered(past) if one.symbols in boards]
        found = self.explained(self.open, grid, now)
        self.open = [one for one, _ in found]
        best = max(weight for _, weight in found)
        likeliest = [dialect for dialect, weight in found if weight == best]
        dialect = likeliest[int(self.rng.integers(len(likeliest)))]
        self.explained([dialect], grid, now)  # puts the board where this visit stands
        plan = self.env.plan()
        return plan[0] if plan else DIRECTIONS[int(self.rng.integers(4))]


def blind(seed: int = 0) -> Player:
    """Return a player that draws from the admissible actions."""
    rng = np.random.default_rng(seed)
    return lambda observation, info, past, now: str(rng.choice(info["admissible"]))


def dialects(
    make: type[FrozenLakeEnv] | type[SokobanEnv], read: Callable[..., Any], worlds: int
) -> dict[str, Any]:
    """Measure success by visit, four visits to each dialect of the evaluation split."""
    count = min(worlds, 120)
    windows = {"none": 0, "last visit": 1, "all visits": None}

    def env() -> FrozenLakeEnv | SokobanEnv:
        return make("eval", preset="dialects", dialects=count)

    found = {
        name: play(env(), Deducer(env(), read), 4, window=window).mean(axis=0).tolist()
        for name, window in windows.items()
    }
    return {"chance": play(env(), blind(), 4, window=0).mean(axis=0).tolist(), **found}


@dataclass(frozen=True)
class Search:
    """Hold what a made game of ALFWorld asks of a searcher.

    Attributes:
        turns: of the plan that knows where the object is.
        sought: kind of the object.
        at: the places where one is.
        costs: turns that a look into each place takes.
        contents: kinds of objects in each place.
    """

    turns: int
    sought: str
    at: frozenset[str]
    costs: dict[str, int]
    contents: dict[str, set[str]]

    @classmethod
    def of(cls, game: Game) -> Search:
        """Read it from plan and problem."""
        problem = game.data["pddl_problem"]
        take = next(one for one in game.walkthrough if one.startswith("take "))
        thing, place = take.removeprefix("take ").split(" from ")
        openable = set(re.findall(r"\(openable (\S+)\)", problem))
        places: list[str] = re.findall(r"^(\S+) - receptacle$", problem, re.MULTILINE)
        kinds: list[tuple[str, str]] = re.findall(r"\(inReceptacle (\w+?)_bar_\S+ (\S+)\)", problem)
        contents = {
            _named(one): {kind.lower() for kind, at in kinds if at == one} for one in places
        }
        costs = {_named(one): 1 + (one in openable) for one in places}
        return cls(len(game.walkthrough), thing.split()[0], frozenset({place}), costs, contents)

    @classmethod
    def of_scene(cls, game: Game) -> Search:
        """Read it from a game of ALFWorld's own that asks for one object to be brought to a place.

        A place goes by its name in the problem, which all games of a scene share. Places of the
        kind that the object is brought to are left out.
        """
        problem = game.data["pddl_problem"]
        sought, _, goal = game.id.partition("/")[0].split("-")[1:4]
        openable = set(re.findall(r"\(openable (\S+)\)", problem))
        places = re.findall(r"^\s*(\S+) - receptacle$", problem, re.MULTILINE)
        contents: dict[str, set[str]] = {one: set() for one in places if _type(one) != goal}
        for kind, place in re.findall(r"\(inReceptacle (\w+?)_bar_\S+ (\S+)\)", problem):
            if place in contents:
                contents[place].add(kind)
        costs = {place: 1 + (place in openable) for place in contents}
        at = (place for place, kinds in contents.items() if sought in kinds)
        return cls(len(game.walkthrough), sought, frozenset(at), costs, contents)


def _named(place: str) -> str:
    kind, number, *basin = place.split("_bar_")
    return f"{kind.lower()}{'basin' if basin else ''} {99 - int(number)}"


def _type(place: str) -> str:
    return place.partition("_bar_")[0]


Prior = Callable[[str, str], float]


def _chance(prior: Prior | None, kind: str, place: str, looks: Sequence[bool]) -> float:
    """Return how likely a place holds a kind, after what remembered looks into it found."""
    if prior is None:  # the last look counts; a place never looked into lies between
        return float(looks[-1]) if looks else 0.5
    return (prior(kind, place) + sum(looks)) / (1 + len(looks))


def search(
    houses: Sequence[House],
    visits: int,
    window: int | None,
    seed: int,
    *,
    read: Callable[[Game], Search] = Search.of,
    prior: Prior | None = None,
) -> np.ndarray:
    """Return the turns of each visit to each household, int, shape (households, visits).

    The searcher knows the plan but for the place of the object. It looks first where a remembered
    visit saw one of its kind, then anywhere that no remembered visit looked, then elsewhere. With a
    ``prior``, the chance that such a place holds such a kind, it looks first where the kind is
    likeliest: the mean of the prior and of what each remembered look found. The visits of one and
    the same game are not remembered by each other.
    """
    turns = np.zeros((len(houses), visits), int)
    for number, house in enumerate(houses):
        rng = np.random.default_rng([seed, number])
        past: list[tuple[str, dict[str, set[str]]]] = []
        for visit_number in range(visits):
            drawn = house.draw(rng)
            game = read(drawn)
            others = [looked for id, looked in past if id != drawn.id]
            kept = others if window is None else others[max(len(others) - window, 0) :]
            looks: dict[str, list[bool]] = defaultdict(list)
            for looked in kept:
                for place, kinds in looked.items():
                    looks[place].append(game.sought in kinds)
            chances = {
                place: _chance(prior, game.sought, place, looks[place]) for place in game.costs
            }
            order = [str(place) for place in rng.permutation(list(game.costs))]
            order.sort(key=chances.__getitem__, reverse=True)
            looked = order[: 1 + min(order.index(place) for place in game.at)]
            wasted = sum(game.costs[place] for place in looked[:-1])
            turns[number, visit_number] = game.turns + wasted
            past.append((drawn.id, {place: game.contents[place] for place in looked}))
    return turns


def alfworld_homes(worlds: int, seeds: int = 4, limit: int = 12) -> dict[str, Any]:
    """Measure success within 12 turns, and mean turns, by visit to made households."""
    houses = made_houses("eval", worlds)
    found: dict[str, Any] = {}
    for name, window in {
        "none": 0,
        "last visit": 1,
        "last three visits": 3,
        "all visits": None,
    }.items():
        turns = np.concatenate([search(houses, 8, window, seed) for seed in range(seeds)])
        success = (turns <= limit).mean(axis=0).tolist()
        found[name] = {"success": success, "turns": turns.mean(axis=0).tolist()}
    return found


def alfworld_scenes(worlds: int, seeds: int = 4, limit: int = 12) -> dict[str, Any]:
    """Measure the same in ALFWorld's own scenes, with and without what train scenes make likely."""
    folder = default_folder()
    if folder is None:
        raise SystemExit("Expected ALFWorld's games, got none: export ALFWORLD_DATA=FOLDER")
    entries = open_games(folder, "train")
    kinds = ("pick_and_place_simple",)
    rng = np.random.default_rng(0)
    held: dict[tuple[str, str], float] = defaultdict(float)
    for house in houses_of(entries, "train", kinds):
        game = Search.of_scene(house.draw(rng))
        number = Counter(map(_type, game.costs))
        for place, found in game.contents.items():
            for kind in found:
                held[kind, _type(place)] += 1 / number[_type(place)]
    houses = houses_of(entries, "eval", kinds)[:worlds]
    rows: dict[str, Any] = {"houses": len(houses)}
    priors: dict[str, Prior | None] = {
        "": None,
        ", likely": lambda kind, place: held[kind, _type(place)],
    }
    for ending, prior in priors.items():
        for name, window in {"none": 0, "last visit": 1, "all visits": None}.items():
            made = [
                search(houses, 8, window, seed, read=Search.of_scene, prior=prior)
                for seed in range(seeds)
            ]
            turns = np.concatenate(made)
            success = (turns <= limit).mean(axis=0).tolist()
            rows[name + ending] = {"success": success, "turns": turns.mean(axis=0).tolist()}
    return rows


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "vault-no-note": vault_no_note,
    "vault-law": vault_law,
    "vault-law-no-note": lambda worlds: vault_law(worlds, note=False),
    "frozenlake-dialects": lambda worlds: dialects(FrozenLakeEnv, read_lake, worlds),
    "alfworld-homes": alfworld_homes,
    "alfworld-scenes": alfworld_scenes,
    "sokoban-dialects": lambda worlds: dialects(SokobanEnv, read_room, worlds),
}


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--worlds", type=int, default=120)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: dict[str, Any] = (
        json.loads(options.results.read_text()) if options.results.exists() else {}
    )
    for name in options.only:
        rows[name] = {"worlds": options.worlds, "rows": PARTS[name](options.worlds)}
        print(name, json.dumps(rows[name]), flush=True)
        options.results.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
