"""Run one game of MiniHack, keys in and screens out; no other module touches NLE."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, cast

import gymnasium as gym
import numpy as np

from experiential.envs.make import make
from experiential.envs.minihack.words import action_words, answers, menu_entries
from experiential.errors import ConfigError, MissingExtraError

Array = np.ndarray[Any, Any]
Ending = Literal["won", "lost", "limit"] | None

_KEYS = (
    "chars", "message", "blstats", "screen_descriptions", "inv_strs", "inv_letters",
    "tty_chars", "internal",
)  # fmt: skip
_SPACE, _RETURN = 32, 13
_ASKS, _WAITS = 1, 3  # places in NLE's ``internal``: a question for one key, a wait for a blank
_MENU_END = re.compile(rb"\(end\)|\(\d+ of \d+\)")
_REPEATS = ("MiniHack-MazeWalk-", "MiniHack-KeyRoom-", "MiniHack-River-")
"""Ids whose episodes are the same in a used game as in a new one; others get a new game each."""


@dataclass(frozen=True)
class Screen:
    """Hold the screen after a key; read it before the next key, which overwrites its arrays.

    ``chars`` has shape (21, 79), uint8; ``descriptions`` has the same shape and holds bytes without
    trailing zeros.
    """

    chars: Array
    descriptions: Array
    message: str
    inventory: dict[str, str]
    hp: int
    max_hp: int
    x: int
    y: int
    words: dict[str, int] | None
    """Answers to the question that is open, or None when none is."""
    ending: Ending = None


class Game:
    """Start a MiniHack id with a seed, and play it by keys.

    ``seed`` fixes both random generators of NetHack and the phase of the moon, reseeding is off,
    and where a used game is not known to repeat its episodes each start gets a new one.

    ``prompts=False`` declines NetHack's questions; ``apply`` beside a door unlocks it (KeyRoom's
    shortcut); ``limit`` counts the steps of an episode, None for the id's own.
    """

    def __init__(self, env_id: str, *, prompts: bool = True, limit: int | None = None) -> None:
        self.env_id, self.prompts = env_id, prompts
        self._limit = limit
        self._used = False
        self._open()

    def _open(self) -> None:
        self._closed = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pkg_resources, which MiniHack still uses
            try:
                base: Any = cast("Any", import_module("minihack")).MiniHack
            except ImportError as error:
                raise MissingExtraError(error.name or "minihack", "minihack") from error
            if not self.env_id.startswith("MiniHack-") or self.env_id not in gym.registry:
                raise ConfigError(
                    "Expected env_id to be an id that MiniHack registers, such as"
                    f" MiniHack-River-v0, got {self.env_id!r}"
                )
            options: dict[str, Any] = {"allow_all_yn_questions": True} if self.prompts else {}
            try:
                self._core: Any = make(
                    self.env_id,
                    observation_keys=_KEYS[:6],
                    fix_moon_phase=True,
                    penalty_step=0.0,
                    **options,
                ).unwrapped
            except (SystemExit, TypeError, FileNotFoundError, ImportError) as error:
                raise ConfigError(
                    f"Expected {self.env_id} to start, got: {error}; MiniHack's own documentation"
                    " says what this level needs"
                ) from error
        core = self._core
        self.words = action_words(core.actions)
        if self._limit is not None:
            core._max_episode_steps = self._limit
        self.limit = int(core._max_episode_steps)
        self.stairs = core.reward_manager is None
        core.actions = tuple(range(256))  # so that the index of an action is its key
        self._step: Any = base.step if self.prompts else cast("Any", type(core)).step
        self._at = {name: place for place, name in enumerate(core._observation_keys)}
        self._log: list[str] = []
        self._choosing = False
        self._decline = core._perform_known_steps
        core._perform_known_steps = self._wait_out

    def start(self, seed: int) -> Screen:
        """Begin the episode of a seed."""
        if self._closed or (self._used and not self.env_id.startswith(_REPEATS)):
            self.close()
            self._open()
        self._used = True
        self._log.clear()
        self._core.seed(seed, seed, reseed=False)
        self._core.reset()
        return self._screen(None)

    def press(self, key: int) -> Screen:
        """Press one key; answer the waits of NetHack for a blank, and keep their messages."""
        core = self._core
        self._log.clear()
        self._choosing = self._menu(core.last_observation) is not None
        if self.prompts and self.stairs:
            # The step of MiniHack without reward and without the copies that only rewards need.
            observation, done = core.nethack.step(key)
            if observation[self._at["program_state"]][0] == 1 or not core._allow_all_modes:
                observation, done = core._perform_known_steps(observation, done, exceptions=True)
            core._steps += 1
            core.last_observation = observation
            status = core._get_end_status(observation, done)
            if status and not done:
                core._quit_game(observation, done)
        else:
            status = self._step(core, key)[-1]["end_status"]
        kinds: dict[Any, Ending] = {
            core.StepStatus.RUNNING: None,
            core.StepStatus.TASK_SUCCESSFUL: "won",
            core.StepStatus.ABORTED: "limit",
        }
        return self._screen(kinds.get(status, "lost"))

    def close(self) -> None:
        """Free the game's memory and files; a start opens them again."""
        self._core.close()
        self._closed = True

    def _wait_out(self, observation: Any, done: bool, exceptions: bool = True) -> tuple[Any, bool]:
        """Handle waits as NLE does, but keep each message and leave menus open for an answer."""
        chosen = self._choosing
        while exceptions and not done and observation[self._at["internal"]][_WAITS]:
            if not chosen and self._menu(observation) is not None:
                return observation, done
            self._log.append(_text(observation[self._at["message"]]))
            observation, done = self._core.nethack.step(_RETURN if chosen else _SPACE)
            chosen = False
        return self._decline(observation, done, exceptions)

    def _menu(self, observation: Any) -> dict[str, int] | None:
        """Return the entries of the menu that is open and their keys, or None."""
        if not self.prompts or not observation or not observation[self._at["internal"]][_WAITS]:
            return None
        rows = observation[self._at["tty_chars"]]
        if not _MENU_END.search(rows.tobytes()):
            return None
        return menu_entries(row.tobytes().decode("latin-1") for row in rows)

    def _screen(self, ending: Ending) -> Screen:
        last = self._core.last_observation
        now = {name: last[self._at[name]] for name in _KEYS}
        letters = now["inv_letters"].tobytes().rstrip(b"\0").decode("latin-1")
        items = zip(letters, now["inv_strs"], strict=False)
        inventory = {letter: _text(row) for letter, row in items}
        message = _text(now["message"])
        stats, described = now["blstats"], now["screen_descriptions"]
        words: dict[str, int] | None = None
        if not ending:
            asks = now["internal"][_ASKS]
            words = answers(message, inventory) if asks else self._menu(last)
        return Screen(
            chars=now["chars"],
            descriptions=described.view(f"S{described.shape[-1]}")[..., 0],
            message=" ".join(dict.fromkeys(filter(None, (*self._log, message)))),
            inventory=inventory,
            hp=int(stats[10]),
            max_hp=int(stats[11]),
            x=int(stats[0]),
            y=int(stats[1]),
            words=words,
            ending=ending,
        )


def _text(raw: Array) -> str:
    return raw.tobytes().partition(b"\0")[0].decode("latin-1").strip()
