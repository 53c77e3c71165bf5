"""Ctrl-C: real processes that are sent SIGINT."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiential.training.metrics import read_events
from tests.llm_tiny import tiny_random_llama, tiny_tokenizer

BUSY = """
import asyncio, sys, time
from experiential.cli.interrupt import Interrupts

async def work():
    print("begun", flush=True)
    try:
        await asyncio.to_thread(time.sleep, float(sys.argv[1]))
    finally:
        print("cleaned up", flush=True)

try:
    with Interrupts(lambda text: print(text, flush=True)) as interrupts:
        interrupts.run(work())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


LARGE = """
import atexit, time
from experiential.cli import errors

app = errors.new_app("Fill the memory with objects, as torch does.")
kept = []

@app.command()
def fill() -> int:
    print("begun", flush=True)
    begin = time.monotonic()
    for _ in range(2_000_000):
        kept.append(own := [])
        own.append(own)
    print(time.monotonic() - begin, flush=True)
    return 3

atexit.register(lambda: print("exit handlers have run", flush=True))
errors.run_process(app)
"""


def test_the_first_interrupt_is_answered_at_once_and_lets_the_work_end() -> None:
    with begun(sys.executable, "-c", BUSY, "3") as process:
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert "stopping: " in line(process)
        assert time.monotonic() - sent < 1
        assert line(process) == "cleaned up\n" and line(process) == "interrupted\n"


def test_the_second_interrupt_ends_the_process_at_once() -> None:
    with begun(sys.executable, "-c", BUSY, "60") as process:
        process.send_signal(signal.SIGINT)
        assert "stopping: " in line(process)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert time.monotonic() - sent < 1


def test_a_command_ends_when_it_has_said_its_last_word() -> None:
    with begun(sys.executable, "-c", LARGE) as process:
        made = float(line(process))
        begin = time.monotonic()
        assert line(process) == "exit handlers have run\n"
        assert process.wait(timeout=60) == 3
        assert time.monotonic() - begin < made / 4


@pytest.mark.slow
def test_an_interrupted_run_says_what_was_saved_and_its_command_goes_on(tmp_path: Path) -> None:
    """Interrupted before its first checkpoint, begun again by the command it printed, interrupted
    after the checkpoint, and gone on with.
    """
    model, run = tmp_path / "model", tmp_path / "my run"
    tiny_random_llama().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    settings = f"model.name={model} model.prompts=brief bank.embedder=hashing actor.groups=2"
    settings += " actor.group_size=2 eval.before=false eval.after=false run.steps=400"
    settings += " run.minutes=null run.checkpoint_every=20"
    command = ["--output", str(run), "--plain", *settings.split()]
    said = interrupted(command, after="step 2/400")
    assert "no checkpoint was saved yet; begin again with: " in said
    command = shlex.split(said.partition("begin again with: ")[2].partition("\n")[0])[1:]
    assert command == ["--resume", "--output", str(run)]
    said = interrupted(command, after="step 21/400")
    assert "begins again at step 0" in said and "step 1/400" in said
    assert "saved is the checkpoint of step 20; go on with: experiential-train --resume" in said
    events = read_events(run / "metrics.jsonl")
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "steps of the first attempt have stayed"
    assert (events[-1]["event"], events[-1]["reason"]) == ("end", "interrupted")
    said = interrupted(command, after="step 22/400")
    assert "going on after step 20 of 400" in said and "step 20/400" not in said


def interrupted(arguments: list[str], after: str) -> str:
    """Train until a line with ``after`` comes, interrupt, and return what was printed."""
    with begun(sys.executable, "-m", "experiential.cli.train", *arguments, wait=after) as process:
        seen = process.seen  # type: ignore[attr-defined]
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        while "stopping: " not in seen[-1]:
            seen.append(line(process))
        assert time.monotonic() - sent < 1
        rest = process.stdout.read() if process.stdout else ""
        assert process.wait(timeout=60) == 130, rest
    return "".join(seen) + rest


class begun(subprocess.Popen[str]):
    """A process that has printed its first line, or the one that holds ``wait``."""

    def __init__(self, *command: str, wait: str = "begun") -> None:
        out = subprocess.PIPE
        super().__init__(command, stdout=out, stderr=subprocess.STDOUT, text=True)
        self.seen = [line(self)]
        while wait not in self.seen[-1]:
            self.seen.append(line(self))


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, "the process has ended"
    return text
