"""Run TextWorld games in a worker process that is replaced after some games, or in this one."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from importlib.util import find_spec
from typing import Any, Protocol, cast

from experiential.errors import EnvError, MissingExtraError
from experiential.sync import attempted

Reply = dict[str, Any]


class Player(Protocol):
    """Play one game at a time."""

    def start(self, game: dict[str, str]) -> Reply:
        """Load and begin a game."""
        ...

    def step(self, command: str) -> Reply:
        """Play a command."""
        ...

    def plan(self) -> list[str]:
        """Return the planner's commands from here to the goal; empty if there are none."""
        ...

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        ...


def check_installed() -> None:
    """Check that the package of the games is there, without importing it.

    Raises:
        MissingExtraError: it is not.
    """
    for package in ("alfworld", "textworld", "fast_downward"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "alfworld")


class LocalPlayer:
    """Play games in this process, for debugging: each game leaks some 4.5 MB of memory.

    Args:
        cached: keep translated problems on disk.
    """

    def __init__(self, *, cached: bool = True) -> None:
        from experiential.envs.alfworld.worker import GameHost

        self._host = GameHost(cached=cached)

    def start(self, game: dict[str, str]) -> Reply:
        """Load and begin a game.

        Raises:
            EnvError: TextWorld cannot load it.
        """
        outcome = attempted(lambda: self._host.start(game))
        if isinstance(outcome, Exception):
            raise EnvError(
                f"Expected a game that TextWorld can play, got {type(outcome).__name__}: {outcome}"
            ) from outcome
        return outcome

    def step(self, command: str) -> Reply:
        """Play a command."""
        return self._host.step(command)

    def plan(self) -> list[str]:
        """Return the planner's commands from here to the goal; empty if there are none."""
        return cast("list[str]", self._host.plan()["plan"])

    def close(self) -> None:
        """Let go of the game."""
        self._host.close()


class WorkerPlayer:
    """Play games in a worker process, which is replaced after ``recycle`` games.

    The process ends when its input does, so it goes with this object and with this process, however
    that ends.

    Args:
        recycle: games per process.
        timeout: seconds to wait for an answer.
        cached: keep translated problems on disk.
    """

    def __init__(self, *, recycle: int = 50, timeout: float = 120.0, cached: bool = True) -> None:
        self._recycle, self._timeout, self._cached = recycle, timeout, cached
        self._process: subprocess.Popen[bytes] | None = None
        self._games = 0
        self._end: weakref.finalize[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id of the worker, or None."""
        return self._process.pid if self._process else None

    def start(self, game: dict[str, str]) -> Reply:
        """Load and begin a game, in a new process where the present one has played its share.

        Raises:
            EnvError: TextWorld cannot load the game, or the process died or gave no answer.
        """
        if self._process is not None and self._games >= self._recycle:
            self.close()
        if self._process is None:
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            cache = [] if self._cached else ["--no-cache"]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "experiential.envs.alfworld.worker", *cache],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": paths},
            )
            self._games = 0
            self._end = weakref.finalize(self, _ended, self._process)
        self._games += 1
        return self._asked({"do": "start", "game": game})

    def step(self, command: str) -> Reply:
        """Play a command.

        Raises:
            EnvError: the process died or gave no answer; the next game runs in a new one.
        """
        return self._asked({"do": "step", "command": command})

    def plan(self) -> list[str]:
        """Return the planner's commands from here to the goal; empty if there are none.

        Raises:
            EnvError: as for ``step``.
        """
        return cast("list[str]", self._asked({"do": "plan"})["plan"])

    def close(self) -> None:
        """End the process and wait until it is gone."""
        if self._end is not None:
            self._end()
        self._process, self._end = None, None

    def _asked(self, request: dict[str, Any]) -> Reply:
        process = self._process
        if process is None or process.stdin is None:
            raise EnvError(
                "Expected a game that was begun, got none: call reset() first", lost=True
            )
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = _line(process, self._timeout)
        except (OSError, TimeoutError) as error:
            self.close()
            ended = (
                f"exit status {process.returncode}"
                if not isinstance(error, TimeoutError)
                else str(error)
            )
            raise EnvError(
                f"Expected an answer of the process that plays ALFWorld, got none ({ended});"
                " reset() starts another, in_process=True shows what is wrong",
                lost=True,
            ) from error
        reply = cast(Reply, json.loads(line))
        if "error" in reply:
            raise EnvError(f"Expected a game that TextWorld can play, got {reply['error']}")
        return reply


def _line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
    """Read one line of output."""
    assert process.stdout is not None
    found, deadline, handle = bytearray(), time.monotonic() + timeout, process.stdout.fileno()
    with selectors.DefaultSelector() as ready:
        ready.register(handle, selectors.EVENT_READ)
        while not found.endswith(b"\n"):
            if not ready.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no answer in {timeout:g} seconds")
            piece = os.read(handle, 1 << 16)
            if not piece:
                raise BrokenPipeError("the process ended")
            found += piece
    return bytes(found)


def _ended(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            attempted(pipe.close)
    process.kill()
    process.wait()
