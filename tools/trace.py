"""Count what one call passes through: distinct functions and files of the package, on all threads.

    python -m tools.trace            # one training step, and the last step of an episode
    python -m tools.trace --files    # with the functions of each file

Counted are the functions and methods of ``experiential`` that Python's profiler sees called while
the call runs. Lambdas and comprehensions belong to the function around them.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gymnasium as gym

import experiential as xp

ROOT = str(Path(xp.__file__).parent)


class Trace:
    """Code objects and threads seen while it is active."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.threads: set[int] = set()
        self._active = False

    def hook(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call (the hook of a profiler)."""
        code = frame.f_code
        if self._active and event == "call" and code.co_filename.startswith(ROOT):
            self.threads.add(threading.get_ident())
            if not code.co_name.startswith("<"):
                self.codes.add(code)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread and every thread that starts inside the block."""
        sys.setprofile(self.hook)
        threading.setprofile(self.hook)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count the calls inside the block."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def files(self) -> dict[str, list[str]]:
        """Return the names of the functions of each file."""
        found: dict[str, list[str]] = collections.defaultdict(list)
        for code in self.codes:
            found[code.co_filename[len(ROOT) + 1 :]].append(code.co_name)
        return {name: sorted(found[name]) for name in sorted(found)}


def training_step() -> Trace:
    """Trace the third step of ``complementary`` on the tiny model, at the recipe's own settings."""
    from experiential.training.trainer import Trainer

    overrides = ["run.steps=4", "run.minutes=30", "run.checkpoint_every=0", "run.drain=true"]
    overrides += ["eval.before=false", "eval.after=false", "actor.groups=4"]
    experiment = xp.load_experiment("complementary", overrides)
    trace, step = Trace(), Trainer._step

    async def watched(self: Trainer, number: int, *rest: Any) -> Any:
        if number != 2:
            return await step(self, number, *rest)
        with trace.active():
            return await step(self, number, *rest)

    Trainer._step = watched  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder, trace.installed():
            Trainer(experiment, Path(folder)).run()
    finally:
        Trainer._step = step  # type: ignore[method-assign]
    return trace


def last_step() -> Trace:
    """Trace the last step of an episode and its distillation, awaited; an entry was retrieved."""
    from experiential.bank.manager import ExperienceManager

    llm = xp.ScriptedLLM(['[{"op": "add", "text": "Pull the red lever."}]'])
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder, trace.installed():
        bank = xp.ExperienceBank(folder, embedder="hashing")
        manager = ExperienceManager(bank, xp.ExtractorAgent(llm))
        env = xp.ExperienceWrapper(gym.make("experiential/Vault-v0"), manager)
        _, info = env.reset(seed=3)
        bank.add("The lever is never the first.", task=info["task"])
        env.reset(seed=3)
        action = env.unwrapped.oracle_action()
        with trace.active():
            env.step(action)
            manager.drain()
        assert len(bank) == 2, "the episode was not distilled"
        manager.close()
        bank.close()
    return trace


CALLS: dict[str, Callable[[], Trace]] = {
    "one Trainer._step": training_step,
    "last step of an episode with distillation": last_step,
}


def main() -> None:
    """Print the count of each call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="print the functions of each file")
    options = parser.parse_args()
    for name, call in CALLS.items():
        trace = call()
        files = trace.files()
        counts = (
            f"{len(trace.codes)} functions in {len(files)} files on {len(trace.threads)} threads"
        )
        print(f"{name}: {counts}")
        for file, functions in files.items() if options.files else ():
            print(f"  {len(functions):3} {file}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
