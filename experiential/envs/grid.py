"""What the text grids share: moves, reading an action, search, splits by content, and the turn-keeping of an episode."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Literal, TypeVar

import gymnasium as gym

from experiential.envs.text_space import UnicodeText
from experiential.errors import ConfigError

S = TypeVar("S", bound=Hashable)
Cell = tuple[int, int]
Split = Literal["train", "eval"]
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
"""The same events in words that name no tile: nothing about the symbols can be learnt from the wording."""

EVAL_SHARE = 4
"""One content in this many belongs to the evaluation split."""

MAX_DRAWS = 20_000
"""Candidates tried for one layout before its rules are called impossible."""

_TAGGED = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"```(.*?)```", re.DOTALL)
_EDGES = " \t\r\n.,;:!?\"'`*"


def parse_action(text: str, names: Iterable[str]) -> str | None:
    """The member of ``names`` that ``text`` asks for, or None.

    Read in this order: the last ``<action>…</action>``, the last triple-backtick block, the whole text. Case, blanks and
    punctuation at either end do not count.

    >>> parse_action("Hm. <action>Down</action> no, <action> up. </action>", MOVES)
    'Up'
    >>> parse_action("maybe up", MOVES) is None
    True
    """
    found = _TAGGED.findall(text) or _FENCED.findall(text) or [text]
    word = found[-1].strip(_EDGES).casefold()
    return next((name for name in names if name.casefold() == word), None)


def split_of(content: str) -> Split:
    """The one split that a layout of this content may belong to, by a hash of the content alone."""
    digest = hashlib.sha256(f"experiential split {content}".encode()).digest()
    return "eval" if digest[0] % EVAL_SHARE == 0 else "train"


def shortest_path(
    start: S, neighbours: Callable[[S], Iterable[tuple[str, S]]], done: Callable[[S], bool], limit: int | None = None
) -> list[str] | None:
    """Names of the moves of a shortest path from ``start`` to a state where ``done``; None if there is none within ``limit``."""
    parents: dict[S, tuple[S, str] | None] = {start: None}
    frontier = deque([(start, 0)])
    while frontier:
        state, depth = frontier.popleft()
        if done(state):
            return _walk_back(parents, state)
        if depth == limit:
            continue
        for name, after in neighbours(state):
            if after not in parents:
                parents[after] = (state, name)
                frontier.append((after, depth + 1))
    return None


def _walk_back(parents: dict[S, tuple[S, str] | None], state: S) -> list[str]:
    names: list[str] = []
    while (link := parents[state]) is not None:
        state, name = link
        names.append(name)
    return names[::-1]


def between(name: str, given: Iterable[float], low: float, high: float) -> None:
    """Check that ``given`` is an ordered pair inside [low, high].

    Raises:
        ConfigError: it is not.
    """
    pair = tuple(given)
    if len(pair) != 2 or not low <= pair[0] <= pair[1] <= high:
        raise ConfigError(f"Expected {name} to be an ordered pair within [{low}, {high}], got {pair}")


def distinct(symbols: str, count: int) -> None:
    """Check that ``symbols`` are ``count`` different visible characters.

    Raises:
        ConfigError: they are not.
    """
    if len(symbols) != count or len(set(symbols)) != count or any(symbol.isspace() for symbol in symbols):
        raise ConfigError(f"Expected symbols to be {count} different visible characters, got {symbols!r}")


class GridEnv(gym.Env[str, str], ABC):
    """Turn-keeping of a text grid: which layout, the step budget, feedback and ``info``.

    A subclass holds the state and says what a move does. The observation is the grid, one row a line, symbols separated by
    blanks, then the feedback on the last move; rules and meanings of symbols are never told. A spent budget truncates the
    episode. Every reading failure and every move without effect costs one step.

    Args:
        name: start of ``info["task_id"]`` and ``info["instance"]``.
        split: ``train`` or ``eval``; which split a layout may belong to is decided by its content.
        layouts: how many layouts this split has.
        budget: moves allowed.
        symbols: the symbols shown, in the order of the task's wording.
        wording: what each event is called.
        feedback: True for the wording of the source paper, ``"neutral"`` for one that names no tile, False for none in
            the observation (``info["feedback"]`` still has the paper's).
        render_mode: ``ansi`` or None.

    Raises:
        ConfigError: an argument is outside its range.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(
        self,
        name: str,
        split: Split,
        layouts: int,
        budget: int,
        *,
        symbols: str,
        wording: dict[Event, str],
        feedback: Wording,
        render_mode: str | None,
    ) -> None:
        if split not in ("train", "eval"):
            raise ConfigError(f"Expected split to be train or eval, got {split!r}")
        if layouts < 1 or budget < 1:
            raise ConfigError(f"Expected layouts and budget to be positive, got {layouts} and {budget}")
        if feedback not in (True, False, "neutral"):
            raise ConfigError(f"Expected feedback to be true, false or 'neutral', got {feedback!r}")
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"Expected render_mode to be ansi or None, got {render_mode!r}")
        self.split: Split = split
        self.layouts, self.budget, self.render_mode = layouts, budget, render_mode
        self.observation_space = UnicodeText(max_length=4096)
        self.action_space = UnicodeText(max_length=4096)
        self._name, self._symbols = name, symbols
        self._wording = NEUTRAL if feedback == "neutral" else wording
        self._show_feedback = bool(feedback)
        self._over = True

    @property
    def worlds(self) -> list[int]:
        """Indices that ``reset(options={"world": i})`` and ``{"layout": i}`` accept."""
        return list(range(self.layouts))

    @property
    def task(self) -> str:
        """What is asked, in words; the meaning of the symbols is for the agent to find out."""
        return f"Win on a grid of the symbols {' '.join(self._symbols)} within {self.budget} moves ({', '.join(MOVES)})."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode on the layout named by the option ``layout`` (or ``world``), else on one drawn by the seed.

        Raises:
            ConfigError: there is no such layout.
        """
        super().reset(seed=seed)
        options = options or {}
        drawn = int(self.np_random.integers(self.layouts))
        self.layout = int(options.get("layout", options.get("world", drawn)))
        if not 0 <= self.layout < self.layouts:
            raise ConfigError(f"Expected layout between 0 and {self.layouts - 1}, got {self.layout}")
        self._load(self.layout)
        self.turn, self._over = 0, False
        return self._view(""), self._info("", success=False, invalid=False)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make one move: Up, Down, Left or Right, bare or in ``<action>…</action>``.

        Raises:
            gymnasium.error.ResetNeeded: the episode is over or was never begun.
        """
        if self._over:
            raise gym.error.ResetNeeded("Expected reset() before this step: the episode is over or was never begun")
        name = parse_action(action, MOVES)
        moved = name is not None and self._move(MOVES[name])
        self.turn += 1
        event = self._event(moved)
        self._over = event in ("won", "lost", "limit")
        feedback, success = self._wording[event], event == "won"
        info = self._info(feedback, success=success, invalid=name is None)
        return self._view(feedback), float(success), event in ("won", "lost"), event == "limit", info

    def render(self) -> str | None:  # type: ignore[override]  # Gymnasium types frames; text is one
        """The grid as text."""
        return self._grid() if self.render_mode == "ansi" else None

    def oracle_action(self) -> str:
        """First move of a shortest solution from here; any move where nothing can be won any more."""
        plan = self.plan()
        return plan[0] if plan else next(iter(MOVES))

    def _event(self, moved: bool) -> Event:
        ending = self._ending()
        if ending is not None:
            return ending
        if self.turn >= self.budget:
            return "limit"
        return "moved" if moved else "blocked"

    def _view(self, feedback: str) -> str:
        return f"{self._grid()}\n\n{feedback}" if feedback and self._show_feedback else self._grid()

    def _info(self, feedback: str, *, success: bool, invalid: bool) -> dict[str, Any]:
        instance = f"{self._name}-{self.split}-{self.layout}"
        return {
            "task": self.task,
            "task_id": instance,
            "instance": instance,
            "admissible": list(MOVES),
            "success": success,
            "invalid": invalid,
            "feedback": feedback,
        }

    @abstractmethod
    def plan(self) -> list[str] | None:
        """A shortest list of moves that wins from here, or None."""

    @abstractmethod
    def _load(self, index: int) -> None:
        """Set the state to the start of a layout."""

    @abstractmethod
    def _move(self, delta: Cell) -> bool:
        """Apply a move; whether anything changed."""

    @abstractmethod
    def _ending(self) -> Literal["won", "lost"] | None:
        """How the state ends the episode, if it does."""

    @abstractmethod
    def _grid(self) -> str:
        """The state as rows of symbols."""
