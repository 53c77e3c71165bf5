"""Play any id of MiniHack in words."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib.metadata import version
from typing import Any

from experiential.envs.action_text import parse_action
from experiential.envs.arguments import inside, one_of, positive
from experiential.envs.minihack.game import Game, Screen
from experiential.envs.minihack.solver import walkthrough
from experiential.envs.minihack.words import spoken
from experiential.envs.split import Split
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.errors import ConfigError

PRESETS: dict[str, str] = {
    "room": "MiniHack-Room-Ultimate-5x5-v0",
    "maze": "MiniHack-MazeWalk-9x9-v0",
    "keyroom": "MiniHack-KeyRoom-Dark-S5-v0",
    "river": "MiniHack-River-Narrow-v0",
}
"""Short names of the four levels that the papers play."""

_CLOSING = {"won": "You reached the goal.", "lost": "You lost.", "limit": "No steps are left."}
SOLVED = (
    "MiniHack-Room-", "MiniHack-MazeWalk-", "MiniHack-KeyRoom-", "MiniHack-Corridor-",
    "MiniHack-River-Narrow-",
)  # fmt: skip
"""Starts of the ids that the oracle is meant for."""

_NONE = "That is no action here."
_WORLDS = {"train": 10_000, "eval": 100}
_EVAL = 1_000_000
"""Game seeds from here on belong to the evaluation split."""
_LISTED = 24
"""Words of an action set that the text lists; of more it also says how many there are."""


class MiniHackEnv(TextEnv):
    """Play a MiniHack level by words.

    The observation is the map around the agent, a legend, NetHack's messages, hit points, position,
    inventory and the words that can be said now. Where NetHack asks a question (which item, which
    direction, yes or no, an entry of a menu), the answers are the words of that turn. Reward is 1.0
    when the level's goal is reached, else 0.0. A word that is not known uses a turn and leaves the
    game as it is. The episode is truncated at the step limit of the id.

    An episode is a function of the world, which is the seed of the game, and of the words said.
    `docs/envs/minihack.md` lists the arguments.

    Raises:
        ConfigError: an argument is outside its range, or there is no such id.
        MissingExtraError: minihack or nle is not installed.
    """

    presets = {name: {"env_id": env_id} for name, env_id in PRESETS.items()}

    def __init__(
        self,
        split: Split = "train",
        *,
        preset: str | None = None,
        env_id: str | None = None,
        worlds: int | None = None,
        crop: tuple[int, int] | None = (9, 9),
        prompts: bool = True,
        max_steps: int | None = None,
        instruction: str = "",
        render_mode: str | None = None,
    ) -> None:
        one_of("split", split, _WORLDS)
        if preset is not None and (preset not in PRESETS or env_id is not None):
            raise ConfigError(
                f"Expected preset to be one of {', '.join(PRESETS)} and no env_id beside it, got"
                f" {preset!r} and {env_id!r}"
            )
        count = _WORLDS[split] if worlds is None else worlds
        inside("worlds", count, 1, _EVAL)
        positive(max_steps=max_steps)
        super().__init__(count, longest=100_000, render_mode=render_mode)
        self.split: Split = split
        self.env_id = env_id or PRESETS[preset or "room"]
        self.name = self.env_id.removeprefix("MiniHack-").rpartition("-v")[0]
        """The id without ``MiniHack-`` and version."""
        sides: Any = (crop, crop) if isinstance(crop, int) else crop
        sides = None if sides is None else tuple(sides)
        if sides is not None and (
            len(sides) != 2 or not all(isinstance(n, int) and n > 0 and n % 2 for n in sides)
        ):
            raise ConfigError(
                "Expected crop to be a pair of odd positive numbers (rows, columns) or None, got"
                f" {crop!r}"
            )
        self.crop: tuple[int, int] | None = sides
        self.prompts, self.max_steps, self._instruction = prompts, max_steps, instruction
        self._new_game = partial(Game, self.env_id, prompts=prompts, limit=max_steps)
        self._game = self._new_game()
        self._copy: Game | None = None
        self._keys: list[int] = []
        self._plan: list[int] = []
        self._planned: list[int] | None = None

    @property
    def task(self) -> str:
        """Return the task in words."""
        known = "Reach the staircase down" if self._game.stairs else "Complete the task"
        return self._instruction or f"{known} of {self.name}."

    def _begin(self, world: int) -> tuple[str, Info]:
        self.world, self.turn = world, 0
        self._keys = []
        self._planned = None
        self._seed = world + (_EVAL if self.split == "eval" else 0)
        self._screen: Screen = self._game.start(self._seed)
        return f"{self.task}\n{self._view()}", self._info(self._screen.message)

    def _turn(self, action: str) -> Step:
        ways = spoken(self._words())
        word = parse_action(action, ways)
        self.turn += 1
        if word is not None:
            self._keys.append(ways[word])
            self._screen = self._game.press(ways[word])
        ending = self._screen.ending
        late = ending == "limit" or (ending is None and self.turn >= self._game.limit)
        feedback = self._screen.message if word is not None else f"{_NONE} {self._legal()}"
        if late or ending is not None:
            observation = f"{self._screen.message}\n{_CLOSING[ending or 'limit']}".strip()
        else:
            observation = self._view("" if word is not None else _NONE)
        success = ending == "won"
        info = self._info(feedback, success=success, invalid=word is None)
        return observation, float(success), ending is not None and not late, late, info

    def oracle_action(self) -> str:
        """Return the next word of a way that wins, or any word if none was found."""
        if not self.env_id.startswith(SOLVED):
            raise ConfigError(
                f"Expected an id that the solver knows ({', '.join(SOLVED)}), got {self.env_id}"
            )
        keys, planned = self._keys, self._planned
        if planned is None or [*planned, *self._plan][: len(keys)] != keys:
            self._copy = self._copy or self._new_game()
            planned = self._planned = list(keys)
            self._plan = walkthrough(self._copy, self._seed, planned) or []
        done = len(keys) - len(planned)
        words = self._words()
        wanted = self._plan[done] if done < len(self._plan) else None
        return next((word for word, key in words.items() if key == wanted), next(iter(words)))

    def _contents(self) -> Iterable[str]:
        """Yield the level, the seeds and the versions that make the games from them."""
        yield f"{self.env_id} {self.split} {self._count}"
        yield from (f"{name} {version(name)}" for name in ("minihack", "nle"))

    def close(self) -> None:
        """Free the games; a reset opens them again."""
        for game in (self._game, self._copy):
            if game is not None:
                game.close()
        self._over = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_game": None, "_copy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._game = self._new_game()
        if not self._over:
            self._game.start(self._seed)
            for key in self._keys:
                self._game.press(key)

    def _words(self) -> dict[str, int]:
        return self._screen.words if self._screen.words is not None else self._game.words

    def _legal(self) -> str:
        words = list(self._words())
        more = f", ... ({len(words)} words)" if len(words) > _LISTED else ""
        return f"Reply with one of: {', '.join(words[:_LISTED])}{more}."

    def _view(self, complaint: str = "") -> str:
        screen, (rows, legend) = self._screen, window(self._screen, self.crop)
        held = "; ".join(f"{letter} - {name}" for letter, name in screen.inventory.items())
        place = f"HP: {screen.hp}/{screen.max_hp}. Position: x {screen.x}, y {screen.y}."
        lines = [
            "Map:",
            *rows,
            f"Legend: {legend}.",
            f"Message: {self._screen.message or 'none'}",
            f"{place} Inventory: {held or 'nothing'}.",
            f"{complaint} Steps left: {self._game.limit - self.turn}. {self._legal()}".lstrip(),
        ]
        return "\n".join(lines)

    def _info(self, feedback: str, *, success: bool = False, invalid: bool = False) -> Info:
        name = f"minihack-{self.name}-{self.split}-{self.world}"
        words = self._words()
        return self._report(name, feedback, success=success, invalid=invalid, admissible=words)


def window(screen: Screen, crop: tuple[int, int] | None) -> tuple[list[str], str]:
    """Return the rows of the map around the agent, and the legend of their symbols.

    What lies outside the map is blank. With ``crop`` None the whole map is shown without empty
    rows.
    """
    height, width = crop or screen.chars.shape
    top, left = (screen.y - height // 2, screen.x - width // 2) if crop else (0, 0)
    bottom, right = top + height, left + width
    part = (slice(max(0, top), max(0, bottom)), slice(max(0, left), max(0, right)))
    chars, before = screen.chars[part], " " * max(0, -left)
    seen = [(before + row.tobytes().decode("latin-1")).rstrip() for row in chars]
    rows = [""] * max(0, -top) + seen
    rows = rows + [""] * (height - len(rows)) if crop else [row for row in rows if row]
    drawn = chars != 32
    pairs = set(zip(chars[drawn].tolist(), screen.descriptions[part][drawn].tolist(), strict=True))
    meant = sorted((chr(char), text.decode("latin-1")) for char, text in pairs)
    told = (f"{char} {'you' if 'called Agent' in text else text}" for char, text in meant)
    return rows, "; ".join(told)
