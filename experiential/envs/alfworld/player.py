"""Play TextWorld games in a worker process that is replaced after some games, or in this one.

Run as ``python -m experiential.envs.alfworld.player`` this module is the worker: it answers each
line of JSON with one, and ends when its input does, so that it never outlives its starter.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any, cast

from experiential.cache import cache_folder
from experiential.envs.alfworld.caches import GrammarCache, TranslationCache, speed_up_grammar
from experiential.errors import EnvError
from experiential.sync import attempted

Reply = dict[str, Any]


@dataclass(eq=False)
class Player:
    """Play one game at a time, in a worker process which is replaced after ``recycle`` games.

    The process ends when its input does, so it goes with this object and with this process, however
    that ends.

    ``timeout`` is in seconds for an answer; ``cached`` keeps translated problems on disk;
    ``in_process`` plays in this process, for debugging: each game leaks some 4.5 MB of memory.
    """

    recycle: int
    timeout: float
    in_process: bool
    cached: bool
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _host: GameHost | None = field(default=None, init=False)
    _games: int = field(default=0, init=False)
    _end: weakref.finalize[Any, Any] | None = field(default=None, init=False)

    def start(self, game: dict[str, str]) -> Reply:
        """Load and begin a game, in a new process where the present one has played its share."""
        if self.in_process:
            self._host = self._host or GameHost(cached=self.cached)
            return self.ask("start", game=game)
        if self.process is not None and self._games >= self.recycle:
            self.close()
        if self.process is None:
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            cache = [] if self.cached else ["--no-cache"]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "experiential.envs.alfworld.player", *cache],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": paths},
            )
            self._games = 0
            self._end = weakref.finalize(self, _end_process, self.process)
        self._games += 1
        return self.ask("start", game=game)

    def ask(self, do: str, **what: Any) -> Reply:
        """Return the answer to a request of ``GameHost.answer`` about the game that was begun.

        Raise EnvError if TextWorld fails, or if the process dies or gives no answer; the next game
        then runs in a new one.
        """
        request = {"do": do, **what}
        host, process = self._host, self.process
        if host is not None:
            try:
                return host.answer(request)
            except Exception as error:
                got = f"{type(error).__name__}: {error}"
                raise EnvError(f"Expected a game that TextWorld can play, got {got}") from error
        if process is None or process.stdin is None or process.stdout is None:
            expected = "Expected a game that was begun"
            raise EnvError(f"{expected}, got none: call reset() first", lost=True)
        line, output = b"", process.stdout.fileno()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            deadline = time.monotonic() + self.timeout
            with selectors.DefaultSelector() as ready:
                ready.register(output, selectors.EVENT_READ)
                while not line.endswith(b"\n"):
                    if not ready.select(max(0.0, deadline - time.monotonic())):
                        raise TimeoutError(f"no answer in {self.timeout:g} seconds")
                    piece = os.read(output, 1 << 16)
                    if not piece:
                        raise BrokenPipeError("the process ended")
                    line += piece
        except OSError as error:
            self.close()
            timed_out = isinstance(error, TimeoutError)
            ended = str(error) if timed_out else f"exit status {process.returncode}"
            raise EnvError(
                f"Expected an answer of the process that plays ALFWorld, got none ({ended});"
                " reset() starts another, in_process=True shows what is wrong",
                lost=True,
            ) from error
        reply = cast(Reply, json.loads(line))
        if "error" in reply:
            raise EnvError(f"Expected a game that TextWorld can play, got {reply['error']}")
        return reply

    def close(self) -> None:
        """End the process and wait until it is gone; a second call does nothing."""
        if self._host is not None:
            self._host.close()
        if self._end is not None:
            self._end()
        self._host, self.process, self._end = None, None, None


def _end_process(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            attempted(pipe.close)
    process.kill()
    process.wait()


class GameHost:
    """Play games of the PDDL kind with TextWorld, which translates and parses through caches."""

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
        speed_up_grammar(import_module("textworld.envs.pddl.textgen"))
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
        reply = attempted(host.answer, json.loads(line))
        if isinstance(reply, Exception):
            reply = {"error": f"{type(reply).__name__}: {reply}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve()
