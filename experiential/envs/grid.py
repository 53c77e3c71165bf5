"""Define the moves and the rules of an episode that text grids share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any, Generic, Literal, Protocol, TypeVar

from experiential.envs.action_text import parse_action
from experiential.envs.arguments import inside, one_of, positive
from experiential.envs.dialect import DIRECTIONS, Dialect, dialects_of
from experiential.envs.names import NAMED_SPLITS, NamedSplit
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.errors import ConfigError

Cell = tuple[int, int]
Event = Literal["won", "lost", "limit", "moved", "blocked"]
Wording = bool | Literal["neutral"]

MOVES: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
NEUTRAL: dict[Event, str] = {
    "won": "The episode was won",
    "lost": "The episode was lost",
    "limit": "Hit the max step limit",
    "moved": "",
    "blocked": "Nothing changed.",
}
"""The same events in words that name no tile, so that they teach nothing about the symbols."""
MAX_DRAWS = 20_000
"""Candidates tried for one layout before its rules are called impossible."""


_TRIES = 50


class Layout(Protocol):
    """Describe a grid by its content."""

    @property
    def content(self) -> str:
        """Return the layout as text; equal layouts have equal texts."""
        ...


L = TypeVar("L", bound=Layout)


class Distinct(Generic[L]):
    """Draw layouts that differ from each other, by index.

    A layout that was drawn before is drawn again, up to 50 times: rules that admit fewer layouts
    than are asked for repeat them.

    Args:
        draw: draws the layout of an index and a number of the attempt, from 0.
    """

    def __init__(self, draw: Callable[[int, int], L]) -> None:
        self._draw, self._lock = draw, Lock()  # rollouts play in threads
        self._found: list[L] = []
        self._seen: set[str] = set()

    def __getitem__(self, index: int) -> L:
        with self._lock:
            while len(self._found) <= index:
                number = len(self._found)
                drawn = (self._draw(number, attempt) for attempt in range(_TRIES))
                new = next((one for one in drawn if one.content not in self._seen), None)
                self._found.append(new or self._draw(number, 0))
                self._seen.add(self._found[-1].content)
            return self._found[index]


def rows_of(size: int, letters: Mapping[Cell, str], usual: str) -> list[str]:
    """Return a square grid row by row: the letter of each cell, ``usual`` where it has none."""
    sides = range(size)
    return ["".join(letters.get((row, column), usual) for column in sides) for row in sides]


class GridEnv(TextEnv):
    """Keep the layout, the step budget, the feedback and ``info`` of a text grid.

    A subclass holds the state and says what a move does. The observation is the grid, one row a
    line, symbols separated by blanks, then the feedback on the last move; rules and meanings of
    symbols are never explained. A spent budget truncates the episode. Every reading failure and
    every move without effect costs one step.

    With ``dialects`` a world is a dialect, and the seed draws the layout; without, a world is a
    layout.

    A subclass passes the moves allowed (``budget``), the symbols shown, one for each of its
    ``roles``, and the number of layouts; the other arguments are the user's.
    """

    name: str
    """Start of ``info["task_id"]`` and ``info["instance"]``."""
    wording: dict[Event, str]
    """What the paper calls each event."""
    roles: tuple[str, ...]
    """What the symbols stand for, in their order."""
    aim: str
    """What is asked in a dialect, in few words, so that its name tells tasks apart."""
    _digested = 100

    def __init__(
        self,
        split: NamedSplit,
        layouts: int | None,
        budget: int,
        symbols: str,
        feedback: Wording,
        render_mode: str | None,
        dialects: int = 0,
        legend: bool = False,
        words_only: bool = False,
        law: Literal["first"] | None = None,
        skip: int = 0,
        named: bool = False,
    ) -> None:
        one_of("split", split, NAMED_SPLITS if dialects else ("train", "eval"))
        one_of("feedback", feedback, (True, False, "neutral"))
        needing = {"legend": legend, "words_only": words_only, "skip": skip, "named": named}
        for name, given in needing.items():
            if given and not dialects:
                raise ConfigError(f"Expected {name} only with dialects, got it without")
        one_of("law", law, (None, "first"))
        if law and not words_only:
            raise ConfigError("Expected law only with words_only, got it without")
        if layouts is None:
            layouts = 10_000 if dialects or split == "train" else 100
        positive(layouts=layouts, budget=budget)
        self.dialects = (Dialect("", symbols),)
        if dialects:
            known = dialects_of(split, symbols, words_only, law)
            inside("skip", skip, 0, len(known) - 1)
            inside(f"dialects of split {split}", dialects, 1, len(known) - skip)
            self.dialects = known[skip : skip + dialects]
        worlds = dialects or layouts
        super().__init__(worlds, longest=4096, longest_action=4096, render_mode=render_mode)
        self.split: NamedSplit = split
        self.layouts, self.budget, self.legend, self.named = layouts, budget, legend, named
        self._kind = ("words" if words_only else "dialects") + (f"-law-{law}" if law else "")
        self._feedback = feedback
        self.dialect = self.dialects[0]

    @property
    def task(self) -> str:
        """Return the task in words; the agent must find out what the symbols mean."""
        if self.dialect.name:
            return f"{self.aim} in the dialect of {self.dialect.name}."
        symbols, moves = " ".join(self.dialect.symbols), ", ".join(MOVES)
        return f"Win on a grid of the symbols {symbols} within {self.budget} moves ({moves})."

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, Info]:
        """Start an episode on the layout of option ``layout`` or ``world``, else on a drawn one.

        With dialects ``world`` is the dialect and ``layout`` the layout, each drawn if not given.
        """
        given = options or {}
        if "layout" in given and not self.dialect.name:
            given = {**given, "world": given["layout"]}
        return super().reset(seed=seed, options=given)

    def begin_on(self, layout: Any) -> None:
        """Begin an episode on a given layout in the present dialect, to look ahead or to compare.

        It has the number and the instance of the last reset; the next reset begins another.
        """
        self._place(layout)
        self.turn, self._over = 0, False

    def render(self) -> str | None:
        """Return the grid as text."""
        return self._grid() if self.render_mode == "ansi" else None

    def _contents(self) -> Iterable[str]:
        """Yield the budget and the layouts; of drawn ones 100, which the others follow from."""
        yield f"{self.name} {self.split} {self.layouts} {self.budget}"
        if self.dialect.name:
            yield f"legend={self.legend}"
            if self.named:
                yield "named"
            yield from map(repr, self.dialects)
        numbers = range(min(self.layouts, self._digested))
        yield from (self._layout(number).content for number in numbers)

    def _begin(self, world: int) -> tuple[str, Info]:
        self.layout, self.turn = world, 0
        if self.dialect.name:
            self.dialect = self.dialects[world]
            drawn = int(self.np_random.integers(self.layouts))
            self.layout = int(self._reset_options.get("layout", drawn))
            inside("layout", self.layout, 0, self.layouts - 1)
        self._place(self._layout(self.layout))
        observation = f"{self.task}\n{self._observed()}" if self.named else self._observed()
        return observation, self._info("")

    def _turn(self, action: str) -> Step:
        """Make one move: Up, Down, Left or Right, bare or in ``<action>…</action>``."""
        name = parse_action(action, MOVES)
        event: Event = "blocked"
        direction = None if name is None else self.dialect.direction(name)
        if direction is not None:
            event = self._move(MOVES[direction])
        changed = event != "blocked"
        self.turn += 1
        over = event in ("won", "lost")
        if not over and self.turn >= self.budget:
            event = "limit"
        feedback, success = self._message(event, direction, changed), event == "won"
        observation = self._observed()
        if feedback and self._feedback:
            observation += f"\n\n{feedback}"
        info = self._info(feedback, success=success, invalid=name is None)
        return observation, float(success), over, event == "limit", info

    def oracle_action(self) -> str:
        """Return the first move of a shortest solution from here; any move if all is lost."""
        plan = self.plan()
        return plan[0] if plan else next(iter(MOVES))

    def _info(self, feedback: str, *, success: bool = False, invalid: bool = False) -> Info:
        name, instance = f"{self.name}-{self.split}-{self.layout}", ""
        if self.dialect.name:
            name = f"{self.name}-{self._kind}-{self.split}-{self.dialect.name}"
            instance = f"{name}#{self.layout}"
        return self._report(
            name,
            feedback,
            success=success,
            invalid=invalid,
            admissible=MOVES,
            instance=instance,
        )

    def _observed(self) -> str:
        """Return what is seen of the layout, below the legend where one is shown."""
        if not self.legend:
            return self._view()
        moves = [f"{word} moves {self.dialect.direction(word).lower()}" for word in DIRECTIONS]
        meanings = [*self._meanings(), ", ".join(moves)]
        return f"Legend: {'; '.join(meanings)}.\n\n{self._view()}"

    def _meanings(self) -> list[str]:
        """Return what the legend says before the moves."""
        roles = zip(self.dialect.symbols, self.roles, strict=True)
        return [", ".join(f"{symbol} {role}" for symbol, role in roles)]

    def _view(self) -> str:
        """Return what the agent sees of the layout."""
        return self._grid()

    def _message(self, event: Event, direction: str | None, changed: bool) -> str:
        """Return the feedback on a move into a direction, or on text that names none."""
        return (NEUTRAL if self._feedback == "neutral" else self.wording)[event]

    def _grid(self) -> str:
        rows = rows_of(*self._tiles())
        return "\n".join(" ".join(row) for row in rows)

    @abstractmethod
    def _layout(self, world: int) -> Layout:
        """Return the layout of a number."""

    @abstractmethod
    def _place(self, layout: Any) -> None:
        """Begin on a layout."""

    def plan(self) -> list[str] | None:
        """Return a shortest list of moves that wins from here, in the words to play, or None."""
        way = self._solve()
        return None if way is None else [self.dialect.word(direction) for direction in way]

    @abstractmethod
    def _solve(self) -> list[str] | None:
        """Return the directions of a shortest way to win from here, or None."""

    @abstractmethod
    def _move(self, delta: Cell) -> Event:
        """Apply a move; return ``won``, ``lost``, ``moved``, or ``blocked`` if nothing changed."""

    @abstractmethod
    def _tiles(self) -> tuple[int, dict[Cell, str], str]:
        """Return the side of the grid, the symbol of each cell that is not floor, and the floor."""
