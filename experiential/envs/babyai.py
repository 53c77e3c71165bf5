"""Play any level of BabyAI in words, as BabyAI-Text does."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from typing import Any, cast

import gymnasium as gym

from experiential.envs.action_text import parse_action
from experiential.envs.arguments import inside, one_of, positive
from experiential.envs.make import make
from experiential.envs.split import Split
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.errors import ConfigError, require
from experiential.plugins import did_you_mean

ACTIONS: dict[str, int] = {
    "turn left": 0, "turn right": 1, "go forward": 2, "pick up": 3, "drop": 4, "toggle": 5,
}  # fmt: skip
"""BabyAI-Text's words and the numbers of BabyAI's actions."""
UNSOLVED = (
    "BabyAI-KeyInBox-v0", "BabyAI-PutNextS5N2Carrying-v0", "BabyAI-PutNextS6N3Carrying-v0",
    "BabyAI-PutNextS7N4Carrying-v0", "BabyAI-OpenDoorsOrderN2Debug-v0",
    "BabyAI-OpenDoorsOrderN4Debug-v0", "BabyAI-UnlockToUnlock-v0",
)  # fmt: skip
"""Ids that BabyAI's bot does not solve: it says so of the first four, opens doors out of order in
the next two, and wins 19 of the last one's first 50 worlds (on others it plans for ever).
"""

_WORLDS = {"train": 10_000, "eval": 100}
_EVAL = 1_000_000
"""Game seeds from here on belong to the evaluation split."""
_PUSHES = 1_000
"""Subgoals that the bot may push before one action; a plan takes a few."""
_DONE = 6
"""BabyAI's seventh action has no effect: only the step is counted."""
_NONE = "That is no action here."
_LEGAL = f"Reply with one of: {', '.join(ACTIONS)}."


class BabyAIEnv(TextEnv):
    """Carry out a mission in a grid of rooms that the agent sees from its own place.

    The observation names what lies in the field of view, in the sentences of BabyAI-Text: what is
    carried, the walls ahead and to the sides, and the objects with their distance. The mission is
    the task. Reward is BabyAI's own, ``1 - 0.9 * steps / limit`` on success, or 1.0 where
    ``binary``; else 0.0. A text that is no action uses a step and leaves the game as it is.

    An episode is a function of the world, which is the seed of the game, and of the actions.
    `docs/envs/babyai.md` lists the arguments.

    Raises:
        ConfigError: an argument is outside its range, or there is no such id.
        MissingExtraError: minigrid is not installed.
    """

    def __init__(
        self,
        split: Split = "train",
        *,
        env_id: str = "BabyAI-GoToLocal-v0",
        worlds: int | None = None,
        max_steps: int | None = None,
        binary: bool = False,
        render_mode: str | None = None,
    ) -> None:
        one_of("split", split, _WORLDS)
        count = _WORLDS[split] if worlds is None else worlds
        inside("worlds", count, 1, _EVAL)
        positive(max_steps=max_steps)
        require("babyai", "minigrid", "pygame")
        import_module("minigrid")  # registers the ids
        # It prints each layout that it rejects; a command's output would hold those lines.
        vars(import_module("minigrid.envs.babyai.core.roomgrid_level"))["print"] = _say_nothing
        known = [name for name in gym.registry if name.startswith("BabyAI-")]
        if env_id not in known:
            raise ConfigError(
                "Expected env_id to be an id that minigrid registers, such as BabyAI-GoTo-v0, got"
                f" {env_id!r}{did_you_mean(env_id, known)}"
            )
        super().__init__(count, longest=100_000, render_mode=render_mode)
        self.split: Split = split
        self.env_id, self.max_steps, self.binary = env_id, max_steps, binary
        self.name = env_id.removeprefix("BabyAI-").rpartition("-v")[0]
        """The id without ``BabyAI-`` and version."""
        self._game: Any = None

    @property
    def task(self) -> str:
        """Return the mission."""
        return self._game.mission

    def _contents(self) -> Iterable[str]:
        """Yield the level, the seeds and the version that make the games from them."""
        yield f"{self.env_id} {self.split} {self._count} {self.max_steps}"
        yield f"minigrid {version('minigrid')}"

    def _begin(self, world: int) -> tuple[str, Info]:
        self.world = world
        self._seed = world + (_EVAL if self.split == "eval" else 0)
        self._actions: list[int] = []
        self._bot: Any = None
        self._stuck = False
        self._game = self._new_game()
        return f"Mission: {self.task}\n{self._view()}", self._info("")

    def _turn(self, action: str) -> Step:
        word = parse_action(action, ACTIONS)
        played = _DONE if word is None else ACTIONS[word]
        _, earned, terminated, truncated, _ = self._game.step(played)
        self._actions.append(played)
        if self._bot is not None and not terminated:
            self._advise(played)
        success, late = bool(terminated and earned > 0), bool(truncated and not terminated)
        if terminated or late:
            ending = "accomplished" if success else "failed"
            observation = feedback = "No steps are left." if late else f"Mission {ending}."
        else:
            complaint = "" if word is not None else f"{_NONE} "
            observation = self._view(complaint)
            feedback = complaint and complaint + _LEGAL
        reward = float(success) if self.binary else float(earned)
        info = self._info(feedback, success=success, invalid=word is None)
        return observation, reward, bool(terminated), late, info

    def oracle_action(self) -> str:
        """Return the word that BabyAI's bot advises, or any word if the bot has given up."""
        if self.env_id in UNSOLVED:
            raise ConfigError(
                f"Expected an id that BabyAI's bot solves, got {self.env_id}; it solves all but"
                f" {', '.join(UNSOLVED)}"
            )
        if self._bot is None:
            # The bot must see each step from the first on, so it gets the game played again.
            self._game = self._new_game()
            bot = cast("Any", import_module("minigrid.utils.baby_ai_bot")).BabyAIBot
            self._bot = bot(self._game)
            self._bot.stack = _Stack(self._bot.stack)
            self._advise(None)
            for action in self._actions:
                self._game.step(action)
                self._advise(action)
        return next((word for word, one in ACTIONS.items() if one == self._advice), "turn left")

    def _advise(self, played: int | None) -> None:
        """Ask the bot for the next action; ``played`` is the last one, None before the first."""
        if self._stuck:
            return
        self._bot.stack.pushes = 0
        try:
            self._advice: int | None = self._bot.replan(played)
        except Exception:  # it fails in many ways, e.g. once a box that hid a key was opened
            self._advice, self._stuck = None, True

    def _new_game(self) -> Any:
        game: Any = make(self.env_id).unwrapped
        game.reset(seed=self._seed)
        if self.max_steps is not None:
            game.max_steps = self.max_steps  # a reset sets it from the mission
        return game

    def _view(self, complaint: str = "") -> str:
        left = self._game.max_steps - self._game.step_count
        seen = ", ".join(sentences(self._game)) or "You see nothing"
        return f"{seen}.\n{complaint}Steps left: {left}. {_LEGAL}"

    def _info(self, feedback: str, *, success: bool = False, invalid: bool = False) -> Info:
        name = f"babyai-{self.name}-{self.split}-{self.world}"
        return self._report(name, feedback, success=success, invalid=invalid, admissible=ACTIONS)


class _Stack(list[Any]):
    """Hold the subgoals of BabyAI's bot, which on some layouts would push new ones for ever."""

    pushes = 0

    def append(self, subgoal: Any) -> None:
        self.pushes += 1
        if self.pushes > _PUSHES:
            raise RecursionError(f"Expected a plan within {_PUSHES} subgoals, got none")
        super().append(subgoal)


def sentences(game: Any) -> list[str]:
    """Return what the agent of a minigrid game carries and sees, in BabyAI-Text's sentences.

    First what it carries, then the walls ahead, left and right that nothing hides, then the objects
    in the field of view, column by column from the left and from the far end of each. Words and
    order are those of Carta et al. (2023), ``You see a open red door`` included.
    """
    grid, visible = game.gen_obs_grid()
    width, ahead = grid.width, grid.height - 1  # the agent stands in the middle of the last row
    own = width // 2
    cells = {
        (x, y): grid.get(x, y)
        for x in range(width)
        for y in range(grid.height)
        if visible[x, y] and grid.get(x, y) is not None and (x, y) != (own, ahead)
    }
    said = [f"You carry a {game.carrying.color} {game.carrying.type}"] if game.carrying else []
    rays = (
        [(own, y) for y in range(ahead - 1, -1, -1)],
        [(x, ahead) for x in range(own - 1, -1, -1)],
        [(x, ahead) for x in range(own + 1, width)],
    )
    for ray in rays:
        first = next((cell for cell in ray if cell in cells), None)
        if first is not None and cells[first].type == "wall":
            said.append(f"You see a wall {_distance(first[0] - own, ahead - first[1])}")
    for (x, y), thing in cells.items():
        if thing.type != "wall":
            state = ""
            if thing.type == "door":
                state = "open " if thing.is_open else "locked " if thing.is_locked else "closed "
            said.append(
                f"You see a {state}{thing.color} {thing.type} {_distance(x - own, ahead - y)}"
            )
    return said


def _say_nothing(*_: object) -> None:
    pass


def _distance(right: int, forward: int) -> str:
    """Return a distance in words.

    >>> _distance(-1, 2), _distance(0, 1)
    ('1 step left and 2 steps forward', '1 step forward')
    """
    ways = (abs(right), "left" if right < 0 else "right"), (forward, "forward")
    return " and ".join(
        f"{count} step{'s' if count > 1 else ''} {way}" for count, way in ways if count
    )
