"""Run training commands that fail at a chosen moment, many of them from one warm process.

    python -m tests.inject_failure CASES.json

Each case is a command line of ``experiential-train``, the kind of its failure and the moment: the
number of calls of the package that the step to fail makes before. Every case runs in a fork that
ends as a program does, so that an abort while Python shuts down is seen. Exit codes are printed.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import experiential
from experiential import sync
from experiential.cli.errors import run_app
from experiential.cli.train import app
from experiential.envs.vault import VaultEnv
from experiential.errors import BankError
from experiential.training.local import LocalRuntime
from experiential.training.trainer import Trainer

ROOT = str(Path(experiential.__file__).parent)
AT_ONCE = 2
HANGS = 300.0
"""Seconds after which a case has hung: its stacks are printed to its log, and it ends."""


def fail(kind: str) -> None:
    """Raise what a failure of this kind raises, or interrupt this process."""
    if kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif kind == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")
    elif kind == "bank":
        raise BankError("Expected to write the journal, got: database or disk is full")
    elif kind == "memory":
        raise MemoryError("cannot allocate 9 GB")
    elif kind == "gpu-memory":
        raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")
    else:
        raise RuntimeError("the vault fell through the floor")


def inject(kind: str, moment: int) -> None:
    """Make the first step from now on fail after ``moment`` calls."""
    calls = 0

    def late() -> bool:
        nonlocal calls
        calls += 1
        return calls > moment

    if kind == "environment":
        plain_env = VaultEnv.step

        def env_step(self: VaultEnv, action: str) -> Any:
            if late():
                fail(kind)
            return plain_env(self, action)

        VaultEnv.step = env_step
        return
    if kind == "callback":  # of the trainer's event loop, which only logs what it raises
        plain_resolve: Any = sync._resolve  # pyright: ignore[reportPrivateUsage]

        def resolve(*arguments: Any) -> None:
            if threading.current_thread() is threading.main_thread() and late():
                sync._resolve = plain_resolve  # pyright: ignore[reportPrivateUsage]
                fail("disk")
            plain_resolve(*arguments)

        sync._resolve = resolve  # pyright: ignore[reportPrivateUsage]
        return
    if kind == "gpu-memory":
        plain_loss: Any = LocalRuntime._loss  # pyright: ignore[reportPrivateUsage]

        def loss(*arguments: Any, **options: Any) -> Any:
            if late():
                fail(kind)
            return plain_loss(*arguments, **options)

        LocalRuntime._loss = loss  # pyright: ignore[reportPrivateUsage]
        return
    plain_step: Any = Trainer._step  # pyright: ignore[reportPrivateUsage]

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # Where a coroutine goes on, what a hook raises would skip the coroutine's own handlers.
        begins = event == "call" and frame.f_lineno == code.co_firstlineno
        if begins and code.co_filename.startswith(ROOT) and late():
            sys.setprofile(None)
            fail(kind)

    async def step(self: Trainer, number: int) -> None:
        sys.setprofile(hook)  # of this thread alone: the event loop's
        try:
            await plain_step(self, number)
        finally:
            sys.setprofile(None)

    Trainer._step = step  # pyright: ignore[reportPrivateUsage]


def run_case(case: dict[str, Any]) -> int:
    """Run one case with its output in ``case["log"]``; return its exit code."""
    for stream, name in ((1, "out"), (2, "err")):
        target = os.open(f"{case['log']}.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(target, stream)
    # A shell that starts the tests in the background has them ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.dump_traceback_later(HANGS, exit=True)
    if case["kind"] is not None:
        inject(case["kind"], case["moment"])
    return run_app(app, case["argv"])


def main() -> int:
    """Run all cases, a few at once; return the exit code of one in its fork, print all here."""
    cases: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    running: dict[int, int] = {}
    codes: list[int | None] = [None] * len(cases)

    def wait() -> None:
        process, status = os.wait()
        codes[running.pop(process)] = os.waitstatus_to_exitcode(status)

    for index, case in enumerate(cases):
        while len(running) >= AT_ONCE:
            wait()
        process = os.fork()
        if not process:
            return run_case(case)
        running[process] = index
    while running:
        wait()
    print(json.dumps(codes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
