"""Find a way through a MiniHack level by playing copies of the game.

An explorer walks over what it has seen, first with an empty map. When an attempt wins, what it saw
is the map that is really there, and the next attempt starts with that map, so that it goes the
short way. An episode is a function of its seed and its keys, so the keys of a won attempt win the
real game too.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from experiential.envs.minihack.game import Game, Screen
from experiential.envs.minihack.words import DIRECTIONS
from experiential.envs.shortest_path import shortest_path

Cell = tuple[int, int]
Pair = tuple[Cell, Cell]

STEPS: dict[int, Cell] = {
    ord("k"): (0, -1), ord("l"): (1, 0), ord("j"): (0, 1), ord("h"): (-1, 0),
    ord("u"): (1, -1), ord("n"): (1, 1), ord("b"): (-1, 1), ord("y"): (-1, -1),
}  # fmt: skip
_APPLY = ord("a")
_CLOSED = ("wall", "closed door", "boulder", "water", "lava", "stone", "tree", "iron bars", "trap")
_WATER = "water"
_ATTEMPTS = 24
_PATIENCE = 30
"""Moves at random, where nothing better is known, before an attempt is given up."""


def walkthrough(game: Game, seed: int, played: list[int]) -> list[int] | None:
    """Return keys that win the episode of ``seed`` after ``played``, or None.

    Args:
        game: a copy of the game, for the attempts alone.
        seed: of the episode.
        played: keys pressed so far.
    """
    for attempt in range(_ATTEMPTS):
        explorer = Explorer(random.Random(attempt), {})
        keys = explorer.play(game, seed, played)
        if keys is not None:
            again = (
                None
                if explorer.moved_things
                else Explorer(random.Random(attempt), explorer.map).play(game, seed, played)
            )
            return min((found for found in (keys, again) if found is not None), key=len)
    return None


class Explorer:
    """Make one attempt: to the stairs if known, else to the nearest unexplored place.

    Args:
        rng: breaks ties, so that attempts differ.
        known: descriptions of cells seen in an earlier attempt.
    """

    def __init__(self, rng: random.Random, known: dict[Cell, str]) -> None:
        self.map = dict(known)
        self._free = {cell for cell, text in known.items() if _walkable(text)}
        self._rng = rng
        self._visited: set[Cell] = set()
        self._refused: set[tuple[Cell, int]] = set()
        self._filled: set[Cell] = set()
        self._pushes: list[int] = []
        self._aim = ord(".")
        self._patience = _PATIENCE

    @property
    def moved_things(self) -> bool:
        """Return whether the map has changed since the start."""
        return bool(self._filled)

    def play(self, game: Game, seed: int, played: Iterable[int]) -> list[int] | None:
        """Return the keys after ``played`` that won, or None."""
        screen = game.start(seed)
        self._look(screen)
        for key in played:
            screen = game.press(key)
            self._look(screen)
        keys: list[int] = []
        while screen.ending is None and self._patience:
            key = self._choose(screen, game.words.values())
            before = (screen.x, screen.y)
            hurt = screen.hp
            screen = game.press(key)
            keys.append(key)
            if (
                screen.words is None
                and key in STEPS
                and (screen.x, screen.y) == before
                and screen.hp == hurt
            ):
                self._refuse(before, key)
                self._pushes.clear()
            if screen.ending is None:  # the last screen is empty
                self._look(screen)
        return keys if screen.ending == "won" else None

    def _refuse(self, cell: Cell, key: int) -> None:
        """Remember a move without effect, but not for ever: a monster may have stood there."""
        if (cell, key) in self._refused or self._rng.random() < 0.5:
            self._refused.add((cell, key))

    def _look(self, screen: Screen) -> None:
        here = (screen.x, screen.y)
        self._visited.add(here)
        for y, x in zip(*(screen.chars != ord(" ")).nonzero(), strict=True):
            cell = (int(x), int(y))
            text = bytes(screen.descriptions[y, x]).decode("latin-1")
            if cell != here:
                self._learn(cell, text)
        if _WATER in self.map.get(here, "floor") or here not in self.map:
            self._learn(here, "floor")

    def _learn(self, cell: Cell, text: str) -> None:
        if _WATER in self.map.get(cell, "") and _WATER not in text and "boulder" not in text:
            self._filled.add(cell)
        self.map[cell] = text
        (self._free.add if _walkable(text) else self._free.discard)(cell)

    def _choose(self, screen: Screen, keys: Iterable[int]) -> int:
        if screen.words is not None:
            return self._answer(screen.words)
        here = (screen.x, screen.y)
        goals = {cell for cell, text in self.map.items() if "staircase down" in text}
        for targets in (goals, self._frontier()):
            path = self._path(here, targets)
            if path:
                return path[0]
        if _APPLY in keys and (door := self._door(here)) is not None:
            return door
        if (push := self._push(here)) is not None:
            return push
        self._patience = max(0, self._patience - 1)
        return self._rng.choice(list(STEPS))

    def _frontier(self) -> set[Cell]:
        return {
            cell
            for cell in self.map
            if cell not in self._visited
            and cell in self._free
            and any(_moved(cell, step) not in self.map for step in STEPS.values())
        }

    def _path(self, start: Cell, targets: set[Cell]) -> list[int] | None:
        """Return the keys of a shortest way to one of the targets."""
        return (
            shortest_path(start, self._ways, lambda cell: cell in targets and cell != start)
            if targets
            else None
        )

    def _ways(self, cell: Cell) -> Iterator[tuple[int, Cell]]:
        steps = list(STEPS.items())
        self._rng.shuffle(steps)
        for key, step in steps:
            after = _moved(cell, step)
            slanted = bool(step[0] and step[1]) and any(
                "door" in self.map.get(one, "") for one in (cell, after)
            )
            if after in self._free and not slanted and (cell, key) not in self._refused:
                yield key, after

    def _door(self, here: Cell) -> int | None:
        """Unlock a door beside the agent, or go beside one."""
        doors = [cell for cell, text in self.map.items() if "closed door" in text]
        straight = {
            _moved(door, step): (door, key)
            for door in doors
            for key, step in STEPS.items()
            if not (step[0] and step[1])
        }
        if here not in straight:
            path = self._path(here, {cell for cell in straight if cell in self._free})
            return path[0] if path else None
        door = straight[here][0]
        towards = next(key for key, step in STEPS.items() if _moved(here, step) == door)
        if (here, towards) not in self._refused:
            self._refused.add((here, towards))
            return towards  # it may only be closed
        self._aim = towards
        self._refused.discard((here, towards))
        return _APPLY

    def _answer(self, words: dict[str, int]) -> int:
        tool = next(
            (
                key
                for word, key in words.items()
                if "key" in word or "lock pick" in word or "Master" in word
            ),
            None,
        )
        if tool is not None:
            return tool
        if set(DIRECTIONS) <= set(words):
            return self._aim
        return words.get("yes", words["cancel"])

    def _push(self, here: Cell) -> int | None:
        """Return the next key of a shortest way to push one boulder into water."""
        if not self._pushes:
            wet = any(_WATER in text for text in self.map.values())
            boulders = [cell for cell, text in self.map.items() if "boulder" in text] if wet else []
            plans = [
                plan for boulder in boulders if (plan := self._shove(here, boulder)) is not None
            ]
            self._pushes = (
                (min(plans, key=len) if self._rng.random() < 0.5 else self._rng.choice(plans))
                if plans
                else []
            )
            self._patience *= (
                bool(plans) or not wet
            )  # with water before it and no boulder of use, an attempt is lost
        return self._pushes.pop(0) if self._pushes else None

    def _shove(self, here: Cell, boulder: Cell) -> list[int] | None:
        """Return the keys of a shortest way to push ``boulder`` into water."""
        return shortest_path(
            (here, boulder), self._shoves, lambda pair: self._wet(pair[1]) and self._useful(pair[1])
        )

    def _wet(self, cell: Cell) -> bool:
        return _WATER in self.map.get(cell, "")

    def _useful(self, water: Cell) -> bool:
        """Return whether filling this water leads on, beyond water that is filled already."""
        beside = {_moved(water, step) for step in STEPS.values()}
        return not self._filled or not any(cell in self._free for cell in beside - self._filled)

    def _shoves(self, pair: Pair) -> Iterator[tuple[int, Pair]]:
        agent, boulder = pair
        for key, step in (
            STEPS.items() if not self._wet(boulder) else ()
        ):  # a boulder in water stays there
            after = _moved(agent, step)
            if after == boulder:
                pushed = _moved(boulder, step)
                if (pushed in self._free or self._wet(pushed)) and (
                    agent,
                    key,
                ) not in self._refused:
                    yield key, (after, pushed)
            elif after in self._free and (agent, key) not in self._refused:
                yield key, (after, boulder)


def _walkable(text: str) -> bool:
    return not any(word in text for word in _CLOSED)


def _moved(cell: Cell, step: Cell) -> Cell:
    return cell[0] + step[0], cell[1] + step[1]
