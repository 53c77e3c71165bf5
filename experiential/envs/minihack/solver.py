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
    """Return keys that win an episode after ``played``, or None; ``game`` is a copy of its game."""
    for attempt in range(_ATTEMPTS):
        explorer = Explorer(random.Random(attempt), {})
        keys = explorer.play(game, seed, played)
        if keys is None:
            continue
        if explorer.filled:  # then what it saw last is not the map at the start
            return keys
        again = Explorer(random.Random(attempt), explorer.map).play(game, seed, played)
        return keys if again is None else min(keys, again, key=len)
    return None


class Explorer:
    """Make one attempt: to the stairs if known, else to the nearest unexplored place.

    Args:
        rng: breaks ties, so that attempts differ.
        known: descriptions of cells seen in an earlier attempt.
    """

    def __init__(self, rng: random.Random, known: dict[Cell, str]) -> None:
        self.map = dict(known)
        self.filled: set[Cell] = set()
        self._free = {cell for cell, text in known.items() if _walkable(text)}
        self._rng = rng
        self._visited: set[Cell] = set()
        self._refused: set[tuple[Cell, int]] = set()
        self._pushes: list[int] = []
        self._aim = ord(".")
        self._patience = _PATIENCE

    def play(self, game: Game, seed: int, played: Iterable[int]) -> list[int] | None:
        """Return the keys after ``played`` that won, or None."""
        screen = game.start(seed)
        self._look(screen)
        for key in played:
            screen = game.press(key)
            self._look(screen)
        keys: list[int] = []
        while screen.ending is None and self._patience:
            here, hp = (screen.x, screen.y), screen.hp
            key = self._choose(here, screen.words, _APPLY in game.words.values())
            screen = game.press(key)
            keys.append(key)
            stayed = (screen.x, screen.y) == here and screen.hp == hp
            if screen.words is None and key in STEPS and stayed:
                # Remember the move, but not for ever: a monster may have stood there.
                if (here, key) in self._refused or self._rng.random() < 0.5:
                    self._refused.add((here, key))
                self._pushes.clear()
            if screen.ending is None:  # the last screen is empty
                self._look(screen)
        return keys if screen.ending == "won" else None

    def _look(self, screen: Screen) -> None:
        here = (screen.x, screen.y)
        self._visited.add(here)
        seen: dict[Cell, str] = {}
        for y, x in zip(*(screen.chars != ord(" ")).nonzero(), strict=True):
            seen[int(x), int(y)] = bytes(screen.descriptions[y, x]).decode("latin-1")
        seen.pop(here, None)  # it shows the agent, not the floor
        if _WATER in self.map.get(here, "floor") or here not in self.map:
            seen[here] = "floor"
        for cell, text in seen.items():
            if _WATER in self.map.get(cell, "") and _WATER not in text and "boulder" not in text:
                self.filled.add(cell)
            self.map[cell] = text
            (self._free.add if _walkable(text) else self._free.discard)(cell)

    def _choose(self, here: Cell, answers: dict[str, int] | None, can_apply: bool) -> int:
        """Return the next key.

        A question is answered by a tool that opens doors, the direction of the door, or yes.
        """
        if answers is not None:
            for word, key in answers.items():
                if "key" in word or "lock pick" in word or "Master" in word:
                    return key
            if set(DIRECTIONS) <= set(answers):
                return self._aim
            return answers.get("yes", answers["cancel"])
        goals = {cell for cell, text in self.map.items() if "staircase down" in text}
        if path := self._path(here, goals):
            return path[0]
        unexplored = {
            cell
            for cell in self.map
            if cell not in self._visited
            and cell in self._free
            and any(_moved(cell, step) not in self.map for step in STEPS.values())
        }
        if path := self._path(here, unexplored):
            return path[0]
        if can_apply and (key := self._unlock(here)) is not None:
            return key
        if (key := self._push(here)) is not None:
            return key
        self._patience = max(0, self._patience - 1)
        return self._rng.choice(list(STEPS))

    def _path(self, start: Cell, targets: set[Cell]) -> list[int] | None:
        """Return the keys of a shortest way to one of the targets."""

        def ways(cell: Cell) -> Iterator[tuple[int, Cell]]:
            steps = list(STEPS.items())
            self._rng.shuffle(steps)
            for key, step in steps:
                after = _moved(cell, step)
                slanted = bool(step[0] and step[1]) and any(
                    "door" in self.map.get(one, "") for one in (cell, after)
                )
                if after in self._free and not slanted and (cell, key) not in self._refused:
                    yield key, after

        if not targets:
            return None
        return shortest_path(start, ways, lambda cell: cell in targets and cell != start)

    def _unlock(self, here: Cell) -> int | None:
        """Unlock a door beside the agent, or go beside one."""
        straight = {
            _moved(door, step): door
            for door, text in self.map.items()
            if "closed door" in text
            for step in STEPS.values()
            if not (step[0] and step[1])
        }
        if here not in straight:
            path = self._path(here, straight.keys() & self._free)
            return path[0] if path else None
        towards = next(key for key, step in STEPS.items() if _moved(here, step) == straight[here])
        if (here, towards) not in self._refused:
            self._refused.add((here, towards))
            return towards  # it may only be closed
        self._aim = towards
        self._refused.discard((here, towards))
        return _APPLY

    def _push(self, here: Cell) -> int | None:
        """Return the next key of a shortest way to push one boulder into water that leads on."""

        def wet(cell: Cell) -> bool:
            return _WATER in self.map.get(cell, "")

        def shoves(pair: Pair) -> Iterator[tuple[int, Pair]]:
            agent, boulder = pair
            if wet(boulder):
                return  # it stays there
            for key, step in STEPS.items():
                if (agent, key) in self._refused:
                    continue
                after = _moved(agent, step)
                beyond = _moved(boulder, step)
                if after != boulder and after in self._free:
                    yield key, (after, boulder)
                elif after == boulder and (beyond in self._free or wet(beyond)):
                    yield key, (after, beyond)

        def useful(pair: Pair) -> bool:
            """Return whether the boulder fills water, beyond water that is filled already."""
            if not wet(pair[1]):
                return False
            beside = {_moved(pair[1], step) for step in STEPS.values()}
            return not self.filled or not any(cell in self._free for cell in beside - self.filled)

        if not self._pushes and any(_WATER in text for text in self.map.values()):
            boulders = [cell for cell, text in self.map.items() if "boulder" in text]
            found = [shortest_path((here, boulder), shoves, useful) for boulder in boulders]
            if plans := [plan for plan in found if plan is not None]:
                shortest = self._rng.random() < 0.5
                self._pushes = min(plans, key=len) if shortest else self._rng.choice(plans)
            else:
                self._patience = 0  # with water ahead and no boulder of use, an attempt is lost
        return self._pushes.pop(0) if self._pushes else None


def _walkable(text: str) -> bool:
    return not any(word in text for word in _CLOSED)


def _moved(cell: Cell, step: Cell) -> Cell:
    return cell[0] + step[0], cell[1] + step[1]
