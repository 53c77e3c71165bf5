"""Play ALFWorld's household tasks in text: real games, or generated ones on the same domain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast, get_args

import gymnasium as gym

from experiential.envs.action_text import parse_action
from experiential.envs.alfworld.games import (
    FILES,
    TASK_TYPES,
    Entry,
    Game,
    House,
    default_folder,
    houses_of,
    open_games,
)
from experiential.envs.alfworld.household import KINDS, Law, made_games, made_houses
from experiential.envs.alfworld.player import Player
from experiential.envs.arguments import inside, one_of, positive, with_preset
from experiential.envs.names import NamedSplit
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.errors import ConfigError, EnvError, require

Split = Literal["train", "dev", "eval", "valid_train", "valid_seen", "valid_unseen"]

MADE = {"train": 600, "eval": 150}
"""Made games where none are asked for."""
PRESETS: dict[str, dict[str, Any]] = {"complementary": {"turns": 40, "failure": -1.0}}
"""Settings of papers: Complementary RL, C.1 and C.2."""
USUAL = {"turns": 50, "failure": 0.0}
"""The horizon and the reward of ALFWorld itself."""
_BANNER = "-= Welcome to TextWorld, ALFRED! =-"


class ALFWorldEnv(TextEnv):
    """Do a household task in a room that is described in words.

    Each step is one of the commands in ``info["admissible"]``; anything else changes nothing, uses
    the turn up and is answered with the legal commands. The episode ends when the task is done,
    and is truncated after ``turns``: 50 as in ALFWorld, 40 or 30 in the papers.

    A world is a game, or with ``households`` a household, whose games the seed draws: what is kept
    where lasts, goal and objects present change.

    A game runs in a worker process that is replaced after ``recycle`` games, since TextWorld keeps
    some 4.5 MB of every game. Call ``close()``; a worker also ends with its environment and with
    this process. `docs/envs/alfworld.md` lists the arguments.

    Raises:
        ConfigError: an argument is outside its range, or the data cannot be used.
        MissingExtraError: alfworld is not installed.
    """

    presets = PRESETS

    def __init__(
        self,
        split: Split = "train",
        *,
        data: str | None = None,
        games: int | None = None,
        households: int | None = None,
        skip: int = 0,
        task_types: Sequence[str] | None = None,
        goal_in_task: bool = True,
        turns: int | None = None,
        failure: float | None = None,
        show_actions: bool = True,
        recycle: int = 50,
        timeout: float = 120.0,
        in_process: bool = False,
        cached: bool = True,
        generation: int = 0,
        law: Law | None = None,
        objects: int = KINDS,
        preset: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        chosen = with_preset(preset, PRESETS, USUAL, turns=turns, failure=failure)
        one_of("split", split, FILES if households is None else ("train", "dev", "eval"))
        if isinstance(task_types, str) or not set(task_types or ()) <= set(TASK_TYPES):
            raise ConfigError(
                f"Expected task_types to be a list of {', '.join(TASK_TYPES)}, got {task_types!r}"
            )
        if not goal_in_task and households is None:
            raise ConfigError(
                "Expected goal_in_task=False with households alone, whose name is then the task,"
                " got no households"
            )
        one_of("law", law, (None, *get_args(Law)))
        folder = data if data is not None else default_folder()
        for name, given in (("law", law), ("objects", objects != KINDS)):
            if given and (households is None or folder not in (None, "made")):
                raise ConfigError(
                    f"Expected {name} with made households alone, got households={households} of"
                    f' {folder or "made games"}; give households= and data="made"'
                )
        inside("objects", objects, 2, KINDS)
        if games is not None and households is not None:
            raise ConfigError("Expected games or households, got both; leave one of them out")
        if skip and households is None:
            raise ConfigError("Expected skip only with households, got it without")
        inside("skip", skip, 0, math.inf)
        positive(
            games=games,
            households=households,
            turns=chosen["turns"],
            recycle=recycle,
            timeout=timeout,
        )
        require("alfworld", "alfworld", "textworld", "fast_downward")
        self.split, self.turns, self.failure = split, chosen["turns"], float(chosen["failure"])
        self.show_actions, self.goal_in_task = show_actions, goal_in_task
        kinds = tuple(task_types or ())
        self._source = (split, folder, games, kinds, households, skip, law, objects, generation)
        self._playing = (recycle, timeout, in_process, cached)
        self._open()
        super().__init__(len(self._houses or self._entries), render_mode=render_mode)
        self._game: Game | None = None
        self._house = ""
        self._live = False
        self._commands: list[str] = []

    @property
    def game(self) -> Game:
        """Return the game that is being played; ResetNeeded if none was begun."""
        if self._game is None:
            raise gym.error.ResetNeeded("Expected reset() before this, got no game yet")
        return self._game

    @property
    def task(self) -> str:
        """Return the goal in words, with the household where there are such, or that alone."""
        if not self.goal_in_task:
            return f"Do what is asked in {self._house}."
        return f"In {self._house}: {self.game.goal}" if self._house else self.game.goal

    def _begin(self, world: int) -> tuple[str, Info]:
        self._live = False
        if self._houses:
            self._house = self._houses[world].name
            self._game = self._houses[world].draw(self.np_random)
        else:
            self._game = self._entries[world].load()
        self._commands, self._used = [], 0
        self._state = self._player.start(self._game.data)
        self._live = True
        observation = self._state["feedback"].replace(_BANNER, "").strip()
        if self._house:
            observation = f"You are in {self._house}. {observation}"
        if self.show_actions:
            observation += f"\n{self._legal()}"
        return observation, self._info("")

    def _turn(self, action: str) -> Step:
        command = parse_action(" ".join(action.split()), self._state["admissible"])
        self._used += 1
        if command is None:
            observation = feedback = f"Nothing happens: that is no action here. {self._legal()}"
        else:
            self._catch_up()
            self._state = self._player.ask("step", command=command)
            self._commands.append(command)
            observation = feedback = str(self._state["feedback"])
        won = bool(self._state["won"])
        spent = not won and self._used >= self.turns
        if command is not None and self.show_actions and not (won or spent):
            observation += f"\n{self._legal()}"
        reward = 1.0 if won else self.failure if spent else 0.0
        return observation, reward, won, spent, self._info(feedback, invalid=command is None)

    def _contents(self) -> Iterable[str]:
        """Yield the ids of the games, which are ALFWorld's own, or those of made ones."""
        yield f"{self._name} {self._source[-1]}"
        yield from (entry.id for entry in self._entries)
        yield from (f"{house.name} {house.contents}" for house in self._houses)

    def close(self) -> None:
        """End the worker process; a reset starts another."""
        self._player.close()
        self._live, self._over = False, True

    def oracle_action(self) -> str:
        """Return the next command of the walkthrough, or of the planner off its way."""
        done, known = len(self._commands), self.game.walkthrough
        if done < len(known) and known[:done] == tuple(self._commands):
            return known[done]
        self._catch_up()
        plan: list[str] = self._player.ask("plan")["plan"]
        if not plan:
            raise EnvError(
                f"Expected a way to win {self.game.id} from here, got none of the planner"
            )
        return plan[0]

    def _catch_up(self) -> None:
        """Replay the episode where no game runs: in a copied environment."""
        if not self._live:
            self._player.start(self.game.data)
            self._live = True
            for command in self._commands:
                self._player.ask("step", command=command)

    def _legal(self) -> str:
        return f"Actions: {'; '.join(self._state['admissible'])}."

    def _info(self, feedback: str, *, invalid: bool = False) -> Info:
        won, admissible = bool(self._state["won"]), self._state["admissible"]
        name = f"{self._name}-{self.game.id}"
        instance = ""
        if self._house:
            name = f"{self._name}-{self._house}"
            instance = f"{name}#{self.game.id}"
        info = self._report(
            name,
            feedback,
            success=won,
            invalid=invalid,
            admissible=admissible,
            instance=instance,
        )
        return info | {"task_type": self.game.task_type}

    def __getstate__(self) -> dict[str, Any]:
        state = {
            key: value for key, value in vars(self).items() if key not in ("_entries", "_houses")
        }
        return state | {"_player": None, "_live": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def _open(self) -> None:
        self._player = Player(*self._playing)
        split, data, number, kinds, households, skip, law, objects, generation = self._source
        self._entries: Sequence[Entry] = ()
        self._houses: tuple[House, ...] = ()
        made = data is None or data == "made"
        if households is not None:
            kind = f"law-{law}-homes" if law else "homes"
            kind = kind if objects == KINDS else f"{objects}-object-{kind}"
            self._name = f"alfworld-{'made-' if made else ''}{kind}-{split}"
            if data is None or made:
                named = cast("NamedSplit", split)
                houses = made_houses(named, skip + households, kinds, generation, law, objects)
            else:  # the scenes of valid_seen are those of train
                houses = houses_of(open_games(data, "train"), split, kinds)
            self._houses = houses[skip : skip + households]
            if len(self._houses) < households:
                raise ConfigError(
                    f"Expected households and skip to be at most {len(houses)} together in split"
                    f" {split}, got {households} and {skip}"
                )
            return
        if data is None or made:
            if split not in ("train", "eval"):
                raise ConfigError(
                    f"Expected split train or eval of made games, got {split!r}; give data= or set"
                    " ALFWORLD_DATA for files"
                )
            number = number or MADE[split]
            entries = made_games(split, number * 6 if kinds else number, generation)
            self._name = f"alfworld-made-{split}"
        else:
            entries, self._name = open_games(data, split), f"alfworld-{FILES[split]}"
        chosen = [entry for entry in entries if not kinds or entry.task_type in kinds]
        self._entries = chosen[:number]
        if not self._entries:
            raise ConfigError(
                f"Expected games of type {', '.join(kinds)} in split {split} of {data}, got none"
            )
