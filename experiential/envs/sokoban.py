"""Play Sokoban as text (B.2 of Experiential RL, and C.1 of Complementary RL)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from pydantic import BaseModel, field_validator

from experiential.envs.arguments import distinct, inside, ordered, with_preset
from experiential.envs.grid import (
    MAX_DRAWS,
    MOVES,
    Cell,
    Distinct,
    Event,
    GridEnv,
    Wording,
    rows_of,
)
from experiential.envs.names import NAMED_SPLITS, NamedSplit
from experiential.envs.published import read_layouts
from experiential.envs.shortest_path import shortest_path
from experiential.envs.split import is_of
from experiential.envs.text_env import Info
from experiential.errors import ConfigError

_SALT = 0x50C0
Boxes = frozenset[Cell]
State = tuple[Cell, Boxes]


@dataclass(frozen=True)
class Room:
    """Hold one layout: walls, goals, boxes, and the start of the agent."""

    size: int
    walls: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: Boxes
    start: Cell

    @property
    def content(self) -> str:
        """Return the layout in the usual letters ``# . $ @`` and blank, rows separated by ``/``."""
        letters = {
            **dict.fromkeys(self.walls, "#"),
            **dict.fromkeys(self.goals, "."),
            **dict.fromkeys(self.boxes, "$"),
            self.start: "@",
        }
        return "/".join(rows_of(self.size, letters, " "))

    @cached_property
    def dead(self) -> frozenset[Cell]:
        """Return the free cells from which a lone box cannot be pushed to any goal."""
        cells = {(row, column) for row in range(self.size) for column in range(self.size)}
        free = cells - self.walls
        alive, frontier = set(self.goals), list(self.goals)
        while frontier:
            row, column = frontier.pop()
            for down, right in MOVES.values():
                behind, agent = (row - down, column - right), (row - 2 * down, column - 2 * right)
                if behind not in alive and behind not in self.walls and agent in free:
                    alive.add(behind)
                    frontier.append(behind)
        return frozenset(free - alive)

    def after(self, state: State, delta: Cell) -> State:
        """Return the state after a move; the same state if it is blocked. One box can be pushed."""
        agent, boxes = state
        ahead = (agent[0] + delta[0], agent[1] + delta[1])
        if ahead in self.walls:
            return state
        if ahead not in boxes:
            return ahead, boxes
        beyond = (ahead[0] + delta[0], ahead[1] + delta[1])
        if beyond in self.walls or beyond in boxes:
            return state
        return ahead, (boxes - {ahead}) | {beyond}

    def solve(self, state: State, limit: int | None = None) -> list[str] | None:
        """Return the moves of a shortest solution, or None if it exceeds ``limit``."""

        def neighbours(state: State) -> Iterator[tuple[str, State]]:
            for name, delta in MOVES.items():
                after = self.after(state, delta)
                if after[1].isdisjoint(self.dead):
                    yield name, after

        return shortest_path(state, neighbours, lambda reached: reached[1] == self.goals, limit)


class _Row(BaseModel):
    """Check a row of ERL's data set."""

    layout: list[str]
    """Rows of a square in the letters ``# . $ @`` and blank."""

    @field_validator("layout")
    @classmethod
    def _whole(cls, rows: list[str]) -> list[str]:
        text = "".join(rows)
        square = 3 <= len(rows) <= 32 and all(len(row) == len(rows) for row in rows)
        boxes = text.count("$")
        known = set(text) <= set("#.$@ ") and text.count("@") == 1
        if not (square and known and boxes and boxes == text.count(".")):
            raise ValueError("Input should be a square of # . $ @ and blank, with as many $ as .")
        edge = rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)
        if set(edge) != {"#"}:
            raise ValueError("Input should have walls all around")
        return rows

    def room(self) -> Room:
        """Return the layout as a room."""
        cells = {
            (r, c): letter for r, row in enumerate(self.layout) for c, letter in enumerate(row)
        }
        walls, goals, boxes = (
            frozenset(cell for cell, found in cells.items() if found == letter) for letter in "#.$"
        )
        start = next(cell for cell, found in cells.items() if found == "@")
        return Room(len(self.layout), walls, goals, boxes, start)


@dataclass(frozen=True)
class RoomRules:
    """Hold the rules of a preset: how rooms are drawn, the budget, the symbols."""

    sizes: tuple[int, int] = (6, 8)
    boxes: int = 1
    walls: float = 0.0
    max_solution: int = 8
    budget: int = 8
    symbols: str = "AaBbCED"
    shortest: int = 0
    dialects: int = 0

    def __post_init__(self) -> None:
        ordered("sizes", self.sizes, 4, 16)
        ordered("walls", (self.walls, self.walls), 0.0, 0.5)
        distinct(self.symbols, 7)
        if not 1 <= self.boxes <= 4 or self.max_solution < 1:
            got = f"{self.boxes} and {self.max_solution}"
            raise ConfigError(f"Expected 1 to 4 boxes and a positive max_solution, got {got}")
        inside("shortest", self.shortest, 0, self.max_solution)
        if 2 * self.boxes >= (self.sizes[0] - 2) ** 2:
            raise ConfigError(
                f"Expected rooms that hold {self.boxes} boxes, their goals and the agent, got sizes"
                f" {self.sizes}"
            )


ROOMS: dict[str, RoomRules] = {
    "erl": RoomRules(),
    "complementary": RoomRules(
        sizes=(6, 6), boxes=2, walls=0.1, max_solution=30, budget=30, symbols="@+A*CW."
    ),
    "dialects": RoomRules(symbols="ABCDEFG", shortest=3, dialects=32),
}
"""``erl``: one box, open rooms, abstract symbols. ``complementary``: 6 by 6, two boxes, some inner
walls, 30 moves, and that paper's symbols; those of an agent and of a box on a target, which it does
not name, are Sokoban's usual ones. ``dialects`` has 32 worlds, each with meanings of its own for
symbols and moves; its rooms are as ERL's.
"""


@lru_cache(maxsize=16_384)
def draw_room(rules: RoomRules, split: NamedSplit, index: int, attempt: int = 0) -> Room:
    """Draw room ``index`` of a split: its content is of the split, and it can be solved.

    The size is drawn once, so that rejection does not favour small rooms; another ``attempt`` draws
    it anew. Raise ConfigError where the rules admit no room, or so few that none was found.
    """
    again = [attempt] if attempt else []
    four = rules.dialects > 0
    stream = 2 + NAMED_SPLITS.index(split) if four else int(split == "eval")
    rng = np.random.default_rng([_SALT, stream, index, *again])
    size = int(rng.integers(rules.sizes[0], rules.sizes[1] + 1))
    limit = min(rules.max_solution, rules.budget)
    inner = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    edge = {(row, column) for row in range(size) for column in range(size)}.difference(inner)
    for _ in range(MAX_DRAWS):
        draws = rng.random(len(inner)).tolist() if rules.walls else [1.0] * len(inner)
        free = [cell for cell, draw in zip(inner, draws, strict=True) if draw >= rules.walls]
        if len(free) <= 2 * rules.boxes:
            continue
        picks: list[int] = rng.choice(len(free), 2 * rules.boxes + 1, replace=False).tolist()
        *chosen, start = [free[pick] for pick in picks]
        goals, boxes = frozenset(chosen[: rules.boxes]), frozenset(chosen[rules.boxes :])
        room = Room(size, frozenset(edge.union(inner).difference(free)), goals, boxes, start)
        # Cheap tests first: every box goes at least to its nearest goal, the agent beside a box.
        least = sum(_to_nearest(box, goals) for box in boxes) + _to_nearest(start, boxes) - 1
        if least <= limit and is_of(room.content, split, four=four) and boxes.isdisjoint(room.dead):
            way = room.solve((start, boxes), limit)
            if way is not None and len(way) >= rules.shortest:
                return room
    raise ConfigError(
        f"Expected rules that admit rooms of size {size} in split {split}, got {rules}; allow more"
        " moves or fewer walls"
    )


def _to_nearest(cell: Cell, others: Boxes) -> int:
    return min(abs(cell[0] - row) + abs(cell[1] - column) for row, column in others)


@lru_cache(maxsize=64)
def _held_out(rules: RoomRules) -> Distinct[Room]:
    """Return the rooms for evaluation, which are all distinct."""
    return Distinct(lambda index, attempt: draw_room(rules, "eval", index, attempt))


class SokobanEnv(GridEnv):
    """Push every box of a text grid onto a goal; symbols are not explained.

    The agent pushes one box at a time and never pulls. Reward is 1.0 when all boxes stand on goals,
    else 0.0; the spent budget truncates. Every room is proved solvable by search and belongs to the
    split that its content decides, so train and eval never share one. ``info["deadlock"]`` is for
    analyses, not for the agent: it says that a box stands where no goal can be reached any more.

    Caveat: the paper's messages speak of boxes, goals and walls; ``feedback="neutral"`` keeps such
    words from the agent. `docs/envs/sokoban.md` lists the arguments.

    >>> env = SokobanEnv()
    >>> observation, info = env.reset(options={"layout": 0})
    >>> while not info["success"]:
    ...     observation, reward, *_, info = env.step(env.oracle_action())
    >>> reward
    1.0
    """

    name = "sokoban"
    wording = {
        "won": "The agent solved the puzzle (all boxes on goals).",
        "limit": "Hit the max step limit",
        "moved": "The agent moved or pushed a box; puzzle not solved yet.",
        "blocked": (
            "The agent did not move (likely hit a wall or tried to push into a blocked space)."
        ),
    }
    roles = (
        "is the agent",
        "is the agent on a goal",
        "is a box",
        "is a box on a goal",
        "is a goal",
        "is a wall",
        "is floor",
    )
    aim = "Clear the room"
    presets = {name: asdict(rules) for name, rules in ROOMS.items()}

    def __init__(
        self,
        split: NamedSplit = "train",
        *,
        data: str | None = None,
        sizes: tuple[int, int] | None = None,
        boxes: int | None = None,
        walls: float | None = None,
        max_solution: int | None = None,
        budget: int | None = None,
        symbols: str | None = None,
        layouts: int | None = None,
        shortest: int | None = None,
        dialects: int | None = None,
        legend: bool = False,
        skip: int = 0,
        named: bool = False,
        feedback: Wording = True,
        preset: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "sizes": None if sizes is None else tuple(sizes), "boxes": boxes, "walls": walls,
            "max_solution": max_solution, "budget": budget, "symbols": symbols,
            "shortest": shortest, "dialects": dialects,
        }  # fmt: skip
        self.rules = rules = RoomRules(**with_preset(preset or "erl", self.presets, {}, **given))
        self._rooms: list[Room] = []
        if data is not None:
            drawn = dict(
                sizes=sizes, boxes=boxes, walls=walls, max_solution=max_solution,
                shortest=shortest, dialects=rules.dialects or None,
            )  # fmt: skip
            rows = read_layouts(data, split, _Row, layouts, **drawn)
            self._rooms = [row.room() for row in rows]
            self.name, self._digested = "sokoban-published", len(rows)
        count = len(self._rooms) or layouts
        super().__init__(
            split,
            count,
            rules.budget,
            rules.symbols,
            feedback,
            render_mode,
            rules.dialects,
            legend,
            skip=skip,
            named=named,
        )

    @property
    def deadlock(self) -> bool:
        """Return whether a box stands in a place from which no goal can be reached.

        Boxes that block each other are not seen; ``plan() is None`` is exact, and searches.
        """
        return not self.state[1].isdisjoint(self.room.dead)

    def _solve(self) -> list[str] | None:
        """Return a shortest solution from here, or None (a box is stuck)."""
        return None if self.deadlock else self.room.solve(self.state)

    def _layout(self, world: int) -> Room:
        if self._rooms:
            return self._rooms[world]
        if self.split == "eval" and not self.rules.dialects:
            return _held_out(self.rules)[world]
        return draw_room(self.rules, self.split, world)

    def _place(self, layout: Room) -> None:
        self.room = layout
        self.state: State = (layout.start, layout.boxes)

    def _move(self, delta: Cell) -> Event:
        before, self.state = self.state, self.room.after(self.state, delta)
        if self.state == before:
            return "blocked"
        return "won" if self.state[1] == self.room.goals else "moved"

    def _info(self, feedback: str, *, success: bool = False, invalid: bool = False) -> Info:
        info = super()._info(feedback, success=success, invalid=invalid)
        return info | {"deadlock": self.deadlock}

    def _tiles(self) -> tuple[int, dict[Cell, str], str]:
        agent, agent_on, box, box_on, goal, wall, floor = self.dialect.symbols
        room, (place, boxes) = self.room, self.state
        tiles = {**dict.fromkeys(room.walls, wall), **dict.fromkeys(room.goals, goal)}
        tiles |= {cell: box_on if cell in room.goals else box for cell in boxes}
        tiles[place] = agent_on if place in room.goals else agent
        return room.size, tiles, floor
