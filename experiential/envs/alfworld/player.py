"""Run TextWorld games in a worker process that is replaced after some games, or in this one."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from typing import Any, cast

from experiential.envs.alfworld.worker import GameHost, Reply
from experiential.errors import EnvError
from experiential.sync import attempted


class Player:
    """Play one game at a time, in a worker process which is replaced after ``recycle`` games.

    The process ends when its input does, so it goes with this object and with this process, however
    that ends.

    Args:
        recycle: games per process.
        timeout: seconds to wait for an answer.
        in_process: play in this process, for debugging: each game leaks some 4.5 MB of memory.
        cached: keep translated problems on disk.
    """

    def __init__(
        self,
        *,
        recycle: int = 50,
        timeout: float = 120.0,
        in_process: bool = False,
        cached: bool = True,
    ) -> None:
        self._recycle, self._timeout, self._cached = recycle, timeout, cached
        self._in_process = in_process
        self._host: GameHost | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._games = 0
        self._end: weakref.finalize[Any, Any] | None = None

    def start(self, game: dict[str, str]) -> Reply:
        """Load and begin a game, in a new process where the present one has played its share.

        Raises:
            EnvError: TextWorld cannot load the game, or the process died or gave no answer.
        """
        if self._in_process:
            self._host = self._host or GameHost(cached=self._cached)
            return self.ask("start", game=game)
        if self.process is not None and self._games >= self._recycle:
            self.close()
        if self.process is None:
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            cache = [] if self._cached else ["--no-cache"]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "experiential.envs.alfworld.worker", *cache],
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

        Raises:
            EnvError: the process died or gave no answer, and the next game runs in a new one; or
                TextWorld failed.
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
            raise EnvError(
                "Expected a game that was begun, got none: call reset() first", lost=True
            )
        line, output = b"", process.stdout.fileno()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            deadline = time.monotonic() + self._timeout
            with selectors.DefaultSelector() as ready:
                ready.register(output, selectors.EVENT_READ)
                while not line.endswith(b"\n"):
                    if not ready.select(max(0.0, deadline - time.monotonic())):
                        raise TimeoutError(f"no answer in {self._timeout:g} seconds")
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
