"""Play FrozenLake as text with abstract symbols (appendix B.1 of Experiential RL)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import MAPS
from pydantic import BaseModel, Field

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
from experiential.errors import ConfigError

_SALT = 0x1CE
_OTHERS = "X√"  # the agent in a hole, the agent on the goal; where four symbols are given


@dataclass(frozen=True)
class Lake:
    """Hold one layout: the goal, the holes, and the start of the agent."""

    size: int
    start: Cell
    goal: Cell
    holes: frozenset[Cell]

    @property
    def content(self) -> str:
        """Return the layout in Gymnasium's letters S, F, H, G, rows separated by ``/``."""
        letters = {**dict.fromkeys(self.holes, "H"), self.start: "S", self.goal: "G"}
        return "/".join(rows_of(self.size, letters, "F"))

    @classmethod
    def parse(cls, rows: Sequence[str]) -> Lake:
        """Read the layout that such letters describe."""
        cells = {(r, c): letter for r, row in enumerate(rows) for c, letter in enumerate(row)}
        where = {letter: [c for c, found in cells.items() if found == letter] for letter in "SHG"}
        return cls(len(rows), where["S"][0], where["G"][0], frozenset(where["H"]))

    def inside(self, cell: Cell) -> bool:
        """Return whether the cell is on the grid."""
        return 0 <= cell[0] < self.size and 0 <= cell[1] < self.size

    def path(self, start: Cell, limit: int | None = None) -> list[str] | None:
        """Return the moves of a shortest safe way to the goal, None if it exceeds ``limit``."""

        def neighbours(cell: Cell) -> Iterator[tuple[str, Cell]]:
            for name, (down, right) in MOVES.items():
                after = (cell[0] + down, cell[1] + right)
                if self.inside(after) and after not in self.holes:
                    yield name, after

        return shortest_path(start, neighbours, lambda cell: cell == self.goal, limit)

    def described(self, agent: Cell) -> str:
        """Say where the goal and the holes beside the agent lie.

        >>> Lake.parse(["SFF", "HFF", "FFG"]).described((0, 0))
        'The goal is 2 down and 2 right. A hole is down.'
        """
        if agent == self.goal:
            return "You are on the goal."
        if agent in self.holes:
            return "You are in a hole."
        (row, column), (end_row, end_column) = agent, self.goal
        steps = (
            (end_row - row, "down"), (row - end_row, "up"),
            (end_column - column, "right"), (column - end_column, "left"),
        )  # fmt: skip
        far = " and ".join(f"{count} {way}" for count, way in steps if count > 0)
        beside = {way: (row + down, column + right) for way, (down, right) in MOVES.items()}
        holes = [way.lower() for way, cell in beside.items() if cell in self.holes]
        traps = f" A hole is {' and '.join(holes)}." if holes else ""
        return f"The goal is {far}.{traps}"


@dataclass(frozen=True)
class LakeRules:
    """Hold the rules of a preset: how layouts are drawn (or the map), the budget, the symbols."""

    sizes: tuple[int, int] = (2, 9)
    frozen: tuple[float, float] = (0.6, 0.85)
    budget: int = 8
    symbols: str = "ABCD"
    rows: tuple[str, ...] = ()
    shortest: int = 0
    dialects: int = 0

    def __post_init__(self) -> None:
        ordered("sizes", self.sizes, 2, 32)
        ordered("frozen", self.frozen, 0.0, 1.0)
        if self.budget > 0:  # else refused below, by the name of the argument
            inside("shortest", self.shortest, 0, self.budget)
        if self.dialects and self.rows:
            raise ConfigError("Expected no dialects with a fixed map, got some; draw layouts")
        distinct(self.symbols, 6 if len(self.symbols) == 6 else 4)
        distinct((self.symbols + _OTHERS)[:6], 6)


LAKES: dict[str, LakeRules] = {
    "erl": LakeRules(),
    "4x4": LakeRules(budget=100, symbols="PGHF", rows=tuple(MAPS["4x4"])),
    "8x8": LakeRules(budget=200, symbols="PGHF", rows=tuple(MAPS["8x8"])),
    "dialects": LakeRules(sizes=(4, 6), shortest=3, dialects=32),
}
"""``erl`` draws layouts as the paper does; ``4x4`` and ``8x8`` are Gymnasium's own, in its letters
(P is the agent); ``dialects`` has 32 worlds, each with meanings of its own for symbols and moves.
"""


@lru_cache(maxsize=16_384)
def draw_lake(rules: LakeRules, split: NamedSplit, index: int, attempt: int = 0) -> Lake:
    """Draw layout ``index`` of a split: its content is of the split, its goal within reach.

    Size and share of frozen tiles are drawn once, so that rejection does not favour small or open
    grids; another ``attempt`` draws them anew. Raise ConfigError where the rules admit no layout,
    or so few that none was found.
    """
    if rules.rows:
        return Lake.parse(rules.rows)
    again = [attempt] if attempt else []
    four = rules.dialects > 0
    stream = 2 + NAMED_SPLITS.index(split) if four else int(split == "eval")
    rng = np.random.default_rng([_SALT, stream, index, *again])
    size = int(rng.integers(rules.sizes[0], rules.sizes[1] + 1))
    frozen = float(rng.uniform(*rules.frozen))
    for _ in range(MAX_DRAWS):
        cells = rng.choice(size * size, 2, replace=False)
        start, goal = (divmod(int(cell), size) for cell in cells)
        thawed = np.argwhere(rng.random((size, size)) >= frozen).tolist()
        holes = frozenset((row, column) for row, column in thawed) - {start, goal}
        lake = Lake(size, start, goal, holes)
        if is_of(lake.content, split, four=four):
            way = lake.path(lake.start, rules.budget)
            if way is not None and len(way) >= rules.shortest:
                return lake
    raise ConfigError(
        f"Expected rules that admit layouts of size {size} in split {split}, got {rules}; allow"
        " more frozen tiles or moves"
    )


@lru_cache(maxsize=64)
def _held_out(rules: LakeRules) -> Distinct[Lake]:
    """Return the layouts for evaluation, which are all distinct."""
    return Distinct(lambda index, attempt: draw_lake(rules, "eval", index, attempt))


class _Row(BaseModel):
    """Check a row of ERL's data set: a layout follows from it."""

    seed: int = Field(ge=0)
    size: int = Field(ge=2, le=32)
    p: float = Field(gt=0, le=1)
    """Share of frozen tiles."""


def published_lake(seed: int, size: int, p: float, budget: int) -> Lake:
    """Draw the layout that ERL's generator draws, random number by random number.

    Its test of a way to the goal searches depth first and visits a cell once, by whatever way it
    came there, up to ``budget`` moves and one more. So it refuses some layouts that can be solved,
    and keeps a few (1.4 %) whose shortest way is a move too long.
    """
    rng = np.random.default_rng(seed)
    while True:
        holes = rng.choice(["F", "H"], (size, size), p=[p, 1 - p]) == "H"
        start = goal = (0, 0)
        while start == goal:
            start, goal = ((int(rng.integers(size)), int(rng.integers(size))) for _ in range(2))
        cells: list[list[int]] = np.argwhere(holes).tolist()
        lake = Lake(size, start, goal, frozenset((r, c) for r, c in cells) - {start, goal})
        stack, seen = [(start, 0)], set[Cell]()
        while stack:
            cell, moves = stack.pop()
            if moves > budget or cell in seen:
                continue
            seen.add(cell)
            for name in ("Down", "Right", "Up", "Left"):
                after = (cell[0] + MOVES[name][0], cell[1] + MOVES[name][1])
                if after == goal:
                    return lake
                if lake.inside(after) and after not in lake.holes:
                    stack.append((after, moves + 1))


@lru_cache(maxsize=16_384)
def _published(row: tuple[int, int, float], budget: int) -> Lake:
    return published_lake(*row, budget)


class FrozenLakeEnv(GridEnv):
    """Reach the goal of a text grid without entering a hole; symbols are not explained.

    Moves are deterministic. Reward is 1.0 on the goal, else 0.0; a hole or the goal terminates, the
    spent budget truncates. A drawn layout can be solved within the budget and belongs to the split
    that its content decides, so train and eval never share one; published layouts (``data``) are
    as they are. Drawn layouts for evaluation are all distinct; for training small grids repeat:
    there are not many of them. `docs/envs/frozen_lake.md` lists the arguments.

    >>> env = FrozenLakeEnv(preset="4x4")
    >>> print(env.reset(seed=0)[0])
    P F F F
    F H F H
    F F F H
    H F F G
    >>> env.step("<action>up</action>")[4]["feedback"]
    'No valid actions were recorded.'
    """

    name = "frozenlake"
    wording = {
        "won": "The agent reached the goal",
        "lost": "The agent fell into the hole",
        "limit": "Hit the max step limit",
        "moved": "",
        "blocked": "No valid actions were recorded.",
    }
    roles = ("is the agent", "is the goal", "is a hole", "is safe")
    aim = "Cross the ice"
    presets = {name: asdict(rules) for name, rules in LAKES.items()}

    def __init__(
        self,
        split: NamedSplit = "train",
        *,
        data: str | None = None,
        sizes: tuple[int, int] | None = None,
        frozen: tuple[float, float] | None = None,
        budget: int | None = None,
        symbols: str | None = None,
        layouts: int | None = None,
        shortest: int | None = None,
        dialects: int | None = None,
        legend: bool = False,
        words_only: bool = False,
        described: bool = False,
        law: Literal["first"] | None = None,
        skip: int = 0,
        named: bool = False,
        feedback: Wording = True,
        preset: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        sides = None if sizes is None else tuple(sizes)
        shares = None if frozen is None else tuple(frozen)
        given: dict[str, Any] = {
            "sizes": sides, "frozen": shares, "budget": budget, "symbols": symbols,
            "shortest": shortest, "dialects": dialects,
        }  # fmt: skip
        if described and not words_only:
            raise ConfigError("Expected described only with words_only, got it without")
        self.described = described
        self.rules = rules = LakeRules(**with_preset(preset or "erl", self.presets, {}, **given))
        self._rows: list[tuple[int, int, float]] = []
        if data is not None:
            if rules.rows:
                raise ConfigError(f"Expected no data with the fixed map {preset}, got {data!r}")
            drawn = dict(
                sizes=sizes, frozen=frozen, shortest=shortest, dialects=rules.dialects or None
            )
            rows = read_layouts(data, split, _Row, layouts, **drawn)
            self._rows = [(row.seed, row.size, row.p) for row in rows]
            self.name, self._digested = "frozenlake-published", len(rows)
        count = 1 if rules.rows else len(self._rows) or layouts
        super().__init__(
            split,
            count,
            rules.budget,
            rules.symbols[:4],
            feedback,
            render_mode,
            rules.dialects,
            legend,
            words_only,
            law,
            skip,
            named,
        )

    def _contents(self) -> Iterator[str]:
        """Yield also whether the lake is described, if it is."""
        yield from super()._contents()
        if self.described:
            yield "described"

    def _solve(self) -> list[str] | None:
        """Return a shortest way from here to the goal, or None (the agent is in a hole)."""
        return None if self.agent in self.lake.holes else self.lake.path(self.agent)

    def _layout(self, world: int) -> Lake:
        if self._rows:
            return _published(self._rows[world], self.budget)
        if self.split == "eval" and not self.rules.rows and not self.rules.dialects:
            return _held_out(self.rules)[world]
        return draw_lake(self.rules, self.split, world)

    def _place(self, layout: Lake) -> None:
        self.lake, self.agent = layout, layout.start

    @property
    def symbols(self) -> str:
        """Return the symbols shown: agent, goal, hole, safe tile, agent in a hole, on the goal."""
        return (self.dialect.symbols + self.rules.symbols[4:] + _OTHERS)[:6]

    def _move(self, delta: Cell) -> Event:
        after = (self.agent[0] + delta[0], self.agent[1] + delta[1])
        if not self.lake.inside(after):
            return "blocked"
        self.agent = after
        if after == self.lake.goal:
            return "won"
        return "lost" if after in self.lake.holes else "moved"

    def _meanings(self) -> list[str]:
        return [] if self.described else super()._meanings()

    def _view(self) -> str:
        """Return the grid, or sentences in its place."""
        return self.lake.described(self.agent) if self.described else self._grid()

    def _message(self, event: Event, direction: str | None, changed: bool) -> str:
        said = super()._message(event, direction, changed)
        if not self.described or direction is None:
            return said
        went = f"You {'moved' if changed else 'cannot move'} {direction.lower()}."
        return went if event in ("moved", "blocked") else f"{went} {said}"

    def _tiles(self) -> tuple[int, dict[Cell, str], str]:
        agent, goal, hole, frozen, fallen, arrived = self.symbols
        tiles = {**dict.fromkeys(self.lake.holes, hole), self.lake.goal: goal}
        tiles[self.agent] = {hole: fallen, goal: arrived}.get(tiles.get(self.agent, ""), agent)
        return self.lake.size, tiles, frozen
