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
from experiential.envs.alfworld.caches import GrammarCache, TranslationCache
from experiential.sync import attempted

Reply = dict[str, Any]


class GameHost:
    """Play games of the PDDL kind with TextWorld, which translates and parses through caches.

    Args:
        cached: keep translated problems on disk.
    """

    def __init__(self, *, cached: bool = True) -> None:
        try:
            version = metadata.version("fast-downward-textworld")
        except metadata.PackageNotFoundError:
            version = "unknown"
        planner: Any = import_module("fast_downward")
        known = planner.pddl2sas
        translate = known.translate if isinstance(known, TranslationCache) else known
        atom = import_module("fast_downward.translate.pddl.conditions").Atom
        folder = cache_folder("alfworld") if cached else None
        planner.pddl2sas = TranslationCache(translate, version, atom, folder)
        logic: Any = import_module("textworld.envs.pddl.logic")
        if not isinstance(logic._parse_and_convert, GrammarCache):
            rules = logic.ContextSensitiveGrammar.parse
            logic._parse_and_convert = GrammarCache(logic._parse_and_convert, rules)
        self._env: Any = None
        self._game: dict[str, str] = {}

    def answer(self, request: dict[str, Any]) -> Reply:
        """Begin a game, play a command, or plan, as ``request["do"]`` says.

        * ``start``: load and begin ``game`` (``pddl_domain``, ``grammar``, ``pddl_problem``);
        * ``step``: play ``command``; one that is not admissible changes nothing;
        * ``plan``: return the planner's commands from here to the goal; empty if there are none.
        """
        if request["do"] == "plan":
            inner = self._env.unwrapped
            plan = inner._pddl_state.replan(inner._entity_infos)
            return {"plan": [" ".join(command.split()) for command in plan]}
        if request["do"] == "step":
            state = self._env.step(request["command"])[0]
        else:
            game = request["game"]
            if self._env is None or self._game != game:
                self.close()
                # The player shows names such as "desk 1" in place of those of the PDDL problem.
                names = import_module("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
                asked = import_module("textworld").EnvInfos(won=True, admissible_commands=True)
                env = names(import_module("textworld.envs.pddl").PddlEnv(asked), shuffle=False)
                env.load(game)
                self._env, self._game = env, game
            state = self._env.reset()
        admissible = list(state["admissible_commands"])
        return {"feedback": state["feedback"], "admissible": admissible, "won": bool(state["won"])}

    def close(self) -> None:
        """Let go of the game; TextWorld keeps some 4.5 MB of it."""
        if self._env is not None:
            self._env.close()
            self._env = None


def serve() -> None:
    """Answer requests until the input ends; what native code prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    cached = "--no-cache" not in sys.argv[1:]
    host: GameHost | None = None
    for line in sys.stdin:
        host = host or GameHost(cached=cached)
        reply = attempted(partial(host.answer, json.loads(line)))
        if isinstance(reply, Exception):
            reply = {"error": f"{type(reply).__name__}: {reply}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve()
