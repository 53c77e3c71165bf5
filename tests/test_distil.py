"""A fleet: workers without an extractor submit, and distillers take what they submit, live.

The workers, the bank server and the distillers are processes; the model is a chat-completion
server in this one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.cli.errors import run_app
from experiential.cli.main import app
from tests.chat_server import Server, completion
from tests.test_serve import serve_command, serving, trajectory

LESSON = '<answer>[{"op": "add", "text": "Pull the door, do not push."}]</answer>'
WORKER = """
import sys
import experiential as xp
from tests.wrapper_worlds import CorridorEnv

with xp.ExperienceBank(sys.argv[1]) as bank:
    env = xp.ExperienceWrapper(CorridorEnv(), bank)
    for _ in range(int(sys.argv[2])):
        env.reset()
        over = False
        while not over:
            _, _, terminated, truncated, _ = env.step("go")
            over = terminated or truncated
    env.close()
"""


@pytest.fixture
def model() -> Iterator[Server]:
    server = Server()
    server.replies = [(200, completion(LESSON), {}, 0.0)]
    yield server
    server.close()


@contextmanager
def distil(bank: object, model: Server, *arguments: str) -> Generator[subprocess.Popen[str]]:
    """A running `experiential distil`; what it prints is read from its ``stdout``."""
    command = [sys.executable, "-m", "experiential.cli.main", "distil", str(bank), "--model", "m"]
    command += ["--base-url", model.url, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def fleet(url: str, workers: int, episodes: int) -> None:
    """Let worker processes play and submit; return when all have ended."""
    command = [sys.executable, "-c", WORKER, url, str(episodes)]
    playing = [subprocess.Popen(command) for _ in range(workers)]
    assert [process.wait(timeout=300) for process in playing] == [0] * workers


def ended(process: subprocess.Popen[str], number: int = 0) -> tuple[int, list[str], str]:
    """Exit code, lines and errors of a distiller, sent a signal first if there is one."""
    if number:
        process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out.splitlines(), errors


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def distillations(folder: Path) -> Counter[str]:
    """How many commits were made from each trajectory."""
    with xp.ExperienceBank(folder, read_only=True) as bank:
        assert bank.queue.waiting() == []
        return Counter(one.ref or "" for one in bank.commits() if one.cause == "trajectory")


def test_four_workers_and_one_distiller_leave_no_episode_out(tmp_path: Path, model: Server) -> None:
    with distil(tmp_path, model, "--port", "0", "--embedder", "hashing", "--no-token") as distiller:
        assert distiller.stdout is not None
        url = distiller.stdout.readline().split()[1]
        fleet(url, workers=4, episodes=5)
        with xp.ExperienceBank(url) as bank:
            wait_until(lambda: bank.queue.counts() == {"queued": 0, "done": 20, "dead": 0})
        code, lines, errors = ended(distiller, signal.SIGTERM)
    assert (code, errors) == (0, "")
    assert len(lines) == 21 and "20 distilled, 1 entries written: Cross" in lines[19]
    assert lines[20].startswith("20 distilled, 20 entries written, 0 given up; 0 wait")
    assert sorted(distillations(tmp_path).values()) == [1] * 20


def test_what_is_distilled_under_review_waits_for_approval(tmp_path: Path, model: Server) -> None:
    with FolderBank(tmp_path, embedder="hashing") as bank:
        bank.submit(trajectory())
    with distil(tmp_path, model, "--until-empty", "--review") as distiller:
        assert ended(distiller)[0] == 0
    with xp.ExperienceBank(tmp_path) as bank, xp.ExperienceManager(bank) as manager:
        [entry] = bank
        assert manager.search(entry.text) == []
        bank.approve(entry.id)
        assert [hit.experience.id for hit in manager.search(entry.text)] == [entry.id]


def test_a_killed_distiller_is_started_again_and_does_nothing_twice(
    tmp_path: Path, model: Server
) -> None:
    with FolderBank(tmp_path, embedder="hashing") as bank:
        bank.submit_many([trajectory() for _ in range(12)])
    quick = (200, completion(LESSON), {}, 0.0)
    model.replies = [quick] * 6 + [(200, completion(LESSON), {}, 60.0)]
    with distil(tmp_path, model, "--port", "0", "--workers", "2") as distiller:
        wait_until(lambda: len(model.requests) == 8)  # two of them in work
        distiller.send_signal(signal.SIGKILL)
        distiller.wait(timeout=30)
    with FolderBank(tmp_path, read_only=True) as bank:
        left = bank.queue.counts()["queued"]
        assert 0 < left < 12
    model.replies = [quick]
    with distil(tmp_path, model, "--until-empty") as again:
        code, lines, _ = ended(again)
    assert code == 0 and lines[-1].startswith(f"{left} distilled")
    done = distillations(tmp_path)
    assert len(done) == 12 and set(done.values()) == {1}


def test_what_is_in_work_at_the_end_is_finished_and_the_rest_is_left(
    tmp_path: Path, model: Server
) -> None:
    with serving(tmp_path, embedder="hashing") as url, xp.ExperienceBank(url) as bank:
        model.replies = [(200, completion(LESSON), {}, 1.0)]
        with distil(url, model, "--workers", "2") as distiller:
            wait_until(lambda: bool(model.requests))  # the question whether it is there
            bank.submit_many([trajectory() for _ in range(40)])
            wait_until(lambda: model.active == 2 and len(model.requests) > 2)
            code, lines, _ = ended(distiller, signal.SIGINT)
        done = bank.queue.counts()["done"]
        assert code == 0 and 2 <= done < 40
        assert lines[-1].startswith(f"{done} distilled") and f"{40 - done} wait" in lines[-1]
        assert len(bank.queue.lease("another", 99)) == 40 - done, "it holds nothing any more"


def test_what_is_given_up_is_told_and_is_the_exit_code(tmp_path: Path, model: Server) -> None:
    with FolderBank(tmp_path, embedder="hashing") as bank:
        bank.submit(trajectory())
    model.replies = [(200, completion("yes"), {}, 0.0)]
    model.replies += [(400, {"error": {"message": "no such deployment"}}, {}, 0.0)]
    with distil(tmp_path, model, "--once") as distiller:
        code, lines, errors = ended(distiller)
    assert code == 1 and "1 given up; 0 wait" in lines[-1]
    assert "no such deployment" in errors and "dead-letters" in errors
    with FolderBank(tmp_path, read_only=True) as bank:
        assert [letter.attempts for letter in bank.queue.dead_letters()] == [3]


@pytest.mark.slow
def test_a_large_fleet_survives_the_death_of_a_distiller_and_of_the_server(
    tmp_path: Path, model: Server
) -> None:
    model.replies = [(200, completion(LESSON), {}, 0.2)]
    with (
        serve_command(tmp_path) as (server, url),
        distil(url, model) as first,
        distil(url, model, "--workers", "4") as second,
    ):
        fleet(url, workers=4, episodes=50)
        first.send_signal(signal.SIGKILL)  # with up to eight episodes in work
        server.send_signal(signal.SIGKILL)
        server.wait(timeout=30)
        port = int(url.rsplit(":", 1)[1])
        with (
            serve_command(tmp_path, port=port),
            distil(url, model) as third,
            xp.ExperienceBank(url, patience=60) as bank,
        ):
            finished = {"queued": 0, "done": 200, "dead": 0}
            wait_until(lambda: bank.queue.counts() == finished, seconds=300)
            for distiller in (second, third):
                code, lines, _ = ended(distiller, signal.SIGTERM)
                assert code == 0 and "0 given up; 0 wait" in lines[-1]
    done = distillations(tmp_path)
    assert len(done) == 200 and set(done.values()) == {1}


def test_the_command_wants_a_model_and_a_bank_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, word in (
        ([str(tmp_path)], "--model"),
        ([str(tmp_path / "none"), "--backend", "scripted", "--once"], "journal.sqlite"),
        (["http://127.0.0.1:9", "--backend", "scripted"], "experiential serve"),
        ([str(tmp_path), "--backend", "scripted", "--host", "0.0.0.0", "--no-token"], "token"),
        ([str(tmp_path), "--backend", "scriped"], "scripted"),
        ([str(tmp_path), "--backend", "scripted", "--namespace", "", "--port", "0"], "namespace"),
    ):
        assert run_app(app, ["distil", *arguments]) == 2
        assert word in capsys.readouterr().err
