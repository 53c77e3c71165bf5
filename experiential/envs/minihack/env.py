"""Play any id of MiniHack in words."""

from __future__ import annotations

from typing import Any

from experiential.envs.action_text import parse_action
from experiential.envs.arguments import inside, one_of, positive
from experiential.envs.minihack.game import Game, Screen
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

_CLOSING = {
    "won": "You reached the goal.",
    "lost": "You lost.",
    "limit": "No steps are left.",
}
SOLVED = (
    "MiniHack-Room-",
    "MiniHack-MazeWalk-",
    "MiniHack-KeyRoom-",
    "MiniHack-Corridor-",
    "MiniHack-River-Narrow-",
)
"""Starts of the ids that the oracle is meant for."""

_NONE = "That is no action here."
_WORLDS = {"train": 10_000, "eval": 100}
_EVAL = 1_000_000
"""Game seeds from here on belong to the evaluation split."""
_LISTED = 24
"""Words of an action set that the text lists; of more it lists so many and says how many there are.
"""


class MiniHackEnv(TextEnv):
    """Play a MiniHack level by words.

    The observation is the map around the agent, a legend, NetHack's messages, hit points, position,
    inventory and the words that can be said now. Where NetHack asks a question (which item, which
    direction, yes or no, an entry of a menu), the answers are the words of that turn. Reward is 1.0
    when the level's goal is reached, else 0.0. A word that is not known uses a turn and leaves the
    game as it is. The episode is truncated at the step limit of the id.

    An episode is a function of the world, which is the seed of the game, and of the words said.

    Args:
        split: ``train`` or ``eval``; their game seeds are disjoint.
        preset: ``room``, ``maze``, ``keyroom`` or ``river``.
        env_id: any id that MiniHack registers, instead of a preset.
        worlds: how many game seeds; by default 10,000 in train and 100 in eval.
        crop: rows and columns of the map around the agent, odd; None for the whole map.
        prompts: answer NetHack's questions; False declines them as MiniHack's navigation levels do,
            and lets ``apply`` beside a locked door do all of KeyRoom's unlocking.
        max_steps: turns of an episode; None for the limit of the id.
        instruction: the task in words; by default to reach the stairs, or to complete the
            task of that name.
        render_mode: ``ansi`` or None.

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
        self.crop = _checked(crop)
        self.prompts, self.max_steps, self._instruction = prompts, max_steps, instruction
        self._game = self._new_game()
        self._copy: Game | None = None
        self._keys: list[int] = []
        self._plan: list[int] = []
        self._planned: list[int] | None = None

    @property
    def name(self) -> str:
        """Return the id without ``MiniHack-`` and version."""
        return self.env_id.removeprefix("MiniHack-").rpartition("-v")[0]

    @property
    def task(self) -> str:
        """Return the task in words."""
        known = "Reach the staircase down" if self._game.stairs else "Complete the task"
        return self._instruction or f"{known} of {self.name}."

    def _begin(self, world: int) -> tuple[str, Info]:
        self.world, self.turn = world, 0
        self._keys = []
        self._planned = None
        self._screen: Screen = self._game.start(self._seed)
        return f"{self.task}\n{self._view()}", self._info(self._said())

    def _turn(self, action: str) -> Step:
        """Say a word: an action of the id, or an answer where NetHack asks."""
        key = self._key(action)
        self.turn += 1
        if key is not None:
            self._keys.append(key)
            self._screen = self._game.press(key)
        ending = self._screen.ending
        success = ending == "won"
        late = ending == "limit" or (ending is None and self.turn >= self._game.limit)
        feedback = self._said() if key is not None else f"{_NONE} {self._legal()}"
        observation = (
            f"{self._said()}\n{_CLOSING[ending or 'limit']}".strip()
            if late or ending is not None
            else self._view("" if key is not None else _NONE)
        )
        info = self._info(feedback, success=success, invalid=key is None)
        return observation, float(success), ending is not None and not late, late, info

    def oracle_action(self) -> str:
        """Return the next word of a way that wins, or any word if none was found.

        Raises:
            ConfigError: there is no solver for this id.
        """
        from experiential.envs.minihack.solver import walkthrough

        if not self.env_id.startswith(SOLVED):
            raise ConfigError(
                f"Expected an id that the solver knows ({', '.join(SOLVED)}), got {self.env_id}"
            )
        if (
            self._planned is None
            or self._keys[: len(self._planned)] != self._planned
            or self._plan[: len(self._keys) - len(self._planned)]
            != self._keys[len(self._planned) :]
        ):
            self._copy = self._copy or self._new_game()
            self._planned = list(self._keys)
            self._plan = walkthrough(self._copy, self._seed, self._planned) or []
        done = len(self._keys) - len(self._planned)
        words = self._words()
        wanted = self._plan[done] if done < len(self._plan) else None
        return next((word for word, key in words.items() if key == wanted), next(iter(words)))

    def close(self) -> None:
        """Free the games."""
        for game in (self._game, self._copy):
            if game is not None:
                game.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return all state but the games, which are replayed on unpickling."""
        return {**self.__dict__, "_game": None, "_copy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._game = self._new_game()
        if not self._over:
            self._game.start(self._seed)
            for key in self._keys:
                self._game.press(key)

    @property
    def _seed(self) -> int:
        return self.world + (_EVAL if self.split == "eval" else 0)

    def _new_game(self) -> Game:
        return Game(self.env_id, prompts=self.prompts, limit=self.max_steps)

    def _words(self) -> dict[str, int]:
        return self._screen.words if self._screen.words is not None else self._game.words

    def _key(self, action: str) -> int | None:
        ways = spoken(self._words())
        word = parse_action(action, ways)
        return None if word is None else ways[word]

    def _legal(self) -> str:
        words = list(self._words())
        more = f", ... ({len(words)} words)" if len(words) > _LISTED else ""
        return f"Reply with one of: {', '.join(words[:_LISTED])}{more}."

    def _said(self) -> str:
        return " ".join(self._screen.messages)

    def _view(self, complaint: str = "") -> str:
        screen = self._screen
        rows, legend = window(screen, self.crop)
        held = (
            "; ".join(f"{letter} - {name}" for letter, name in screen.inventory.items())
            or "nothing"
        )
        lines = [
            "Map:",
            *rows,
            f"Legend: {legend}.",
            f"Message: {self._said() or 'none'}",
            (
                f"HP: {screen.hp}/{screen.max_hp}. Position: x {screen.x}, y {screen.y}. Inventory:"
                f" {held}."
            ),
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
    height, width = screen.chars.shape
    if crop is None:
        top, bottom, left, right = 0, height, 0, width
        above, before = 0, 0
    else:
        top, left = screen.y - crop[0] // 2, screen.x - crop[1] // 2
        bottom, right = top + crop[0], left + crop[1]
        above, before = max(0, -top), max(0, -left)
    part = (slice(max(0, top), max(0, bottom)), slice(max(0, left), max(0, right)))
    chars = screen.chars[part]
    text, side = chars.tobytes().decode("latin-1"), chars.shape[1]
    rows = [
        (" " * before + text[start : start + side]).rstrip()
        for start in range(0, len(text), side or 1)
    ]
    if crop is None:
        rows = [row for row in rows if row]
    else:
        rows = [""] * above + rows
        rows += [""] * (crop[0] - len(rows))
    drawn = chars != 32
    pairs = set(zip(chars[drawn].tolist(), screen.descriptions[part][drawn].tolist(), strict=True))
    meant = sorted((chr(char), text.decode("latin-1")) for char, text in pairs)
    return rows, "; ".join(
        f"{char} {'you' if 'called Agent' in text else text}" for char, text in meant
    )


def _checked(crop: Any) -> tuple[int, int] | None:
    if crop is None:
        return None
    sides: Any = (crop, crop) if isinstance(crop, int) else tuple(crop)
    if len(sides) != 2 or any(
        not isinstance(side, int) or side < 1 or side % 2 == 0 for side in sides
    ):
        raise ConfigError(
            "Expected crop to be a pair of odd positive numbers (rows, columns) or None, got"
            f" {crop!r}"
        )
    return sides
