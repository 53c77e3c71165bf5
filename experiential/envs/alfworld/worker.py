"""Play TextWorld games, in this process or for requests on standard input.

Run as ``python -m experiential.envs.alfworld.worker`` it answers each line of JSON with one, and
ends when its input does, so that it never outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from importlib import import_module, metadata
from typing import Any

from experiential.cache import cache_folder
from experiential.envs.alfworld.grammar import GrammarCache
from experiential.envs.alfworld.translation import TranslationCache
from experiential.sync import attempted

Reply = dict[str, Any]


class GameHost:
    """Play games of the PDDL kind with TextWorld.

    Args:
        cached: keep translated problems on disk.
    """

    def __init__(self, *, cached: bool = True) -> None:
        install_cache(cached=cached)
        self._env: Any = None
        self._game: dict[str, str] = {}

    def start(self, game: dict[str, str]) -> Reply:
        """Load and begin a game (``pddl_domain``, ``grammar``, ``pddl_problem``)."""
        if self._env is None or self._game != game:
            self.close()
            # The player shows names such as "desk 1" in place of those of the PDDL problem.
            names = import_module("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
            asked = import_module("textworld").EnvInfos(won=True, admissible_commands=True)
            env = names(import_module("textworld.envs.pddl").PddlEnv(asked), shuffle=False)
            env.load(game)
            self._env, self._game = env, game
        return _reply(self._env.reset())

    def step(self, command: str) -> Reply:
        """Play a command; one that is not admissible changes nothing."""
        return _reply(self._env.step(command)[0])

    def plan(self) -> Reply:
        """Return the planner's commands from here to the goal; empty if there are none."""
        inner = self._env.unwrapped
        return {
            "plan": [
                " ".join(command.split())
                for command in inner._pddl_state.replan(inner._entity_infos)
            ]
        }

    def close(self) -> None:
        """Let go of the game; TextWorld keeps some 4.5 MB of it."""
        if self._env is not None:
            self._env.close()
            self._env = None


def _reply(state: Any) -> Reply:
    return {
        "feedback": state["feedback"],
        "admissible": list(state["admissible_commands"]),
        "won": bool(state["won"]),
    }


def install_cache(*, cached: bool) -> None:
    """Let TextWorld translate and parse through caches, with the same results."""
    planner: Any = import_module("fast_downward")
    known = planner.pddl2sas
    translate = known.translate if isinstance(known, TranslationCache) else known
    atom = import_module("fast_downward.translate.pddl.conditions").Atom
    planner.pddl2sas = TranslationCache(
        translate, _version(), atom, cache_folder("alfworld") if cached else None
    )
    logic: Any = import_module("textworld.envs.pddl.logic")
    if not isinstance(logic._parse_and_convert, GrammarCache):
        logic._parse_and_convert = GrammarCache(
            logic._parse_and_convert, logic.ContextSensitiveGrammar.parse
        )


def _version() -> str:
    try:
        return metadata.version("fast-downward-textworld")
    except metadata.PackageNotFoundError:
        return "unknown"


def _answer(host: GameHost, request: dict[str, Any]) -> Reply:
    if request["do"] == "start":
        return host.start(request["game"])
    return host.step(request["command"]) if request["do"] == "step" else host.plan()


def serve() -> None:
    """Answer requests until the input ends; what native code prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    cached = "--no-cache" not in sys.argv[1:]
    host: GameHost | None = None
    for line in sys.stdin:
        host = host or GameHost(cached=cached)
        outcome = attempted(partial(_answer, host, json.loads(line)))
        reply = (
            {"error": f"{type(outcome).__name__}: {outcome}"}
            if isinstance(outcome, Exception)
            else outcome
        )
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve()
