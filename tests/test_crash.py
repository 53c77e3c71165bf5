"""A bank whose writer is killed -9 at random points, hundreds of times: what was promised is there,
once, and the bank opens.

``make crash KILLS=2000`` does it for longer; ``SEED`` draws other points.
"""

import json
import multiprocessing
import os
import random
import signal
import sqlite3
import time

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.storage.checkup import examine
from tests.crash_writer import POINTS, Echo, digest, write

ROUNDS = 10
"""Kills that one bank has to stand before a new one is taken."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.crash_writer"])


class Promises:
    """All that the writers of one bank acknowledged."""

    def __init__(self):
        self.versions = {}
        self.submitted = set()
        self.distilled = set()
        self.states = {}
        self.forks = {}
        self.kinds = set()

    def note(self, said):
        kind = said["kind"]
        self.kinds.add(kind)
        if kind == "written":
            self.versions.update({(id, version): text for id, version, text in said["entries"]})
        elif kind == "submitted":
            self.submitted.update(said["ids"])
        elif kind == "distilled":
            self.distilled.add(said["id"])
        elif kind == "state":
            self.states[said["head"]] = said["digest"]
        elif kind == "forked":
            self.forks[said["folder"]] = said["digest"]


def killed(folder, seed, promises, point, rng):
    """Let a writer work until it is dead; gives whether it died at the point named for it."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(
        target=write, args=(str(folder), seed, theirs, point, rng.randint(1, 6)), daemon=True
    )
    process.start()
    theirs.close()
    if point is None:
        assert os.read(ours.fileno(), 1) == b"{", (
            "the writer could not open the bank; its error is above"
        )
        time.sleep(rng.uniform(0.0, 0.35))
        os.kill(process.pid, signal.SIGKILL)
    said = ("{" if point is None else "") + everything(ours, 30.0)
    by_itself = wait_or_kill(process)
    for line in said.split("\n")[:-1]:
        promises.note(json.loads(line))
    return by_itself


def everything(pipe, patience):
    """What comes out of a pipe until its writer is dead, or for as long as we have patience."""
    parts, deadline = [], time.monotonic() + patience
    while pipe.poll(max(0.0, deadline - time.monotonic())):
        part = os.read(pipe.fileno(), 1 << 16)
        if not part:
            break
        parts.append(part)
        if time.monotonic() > deadline:
            break
    return b"".join(parts).decode()


def wait_or_kill(process):
    process.join(1)
    alive = process.is_alive()
    if alive:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL, (
        f"the writer failed by itself with {process.exitcode}; its error is above"
    )
    return not alive


def check(folder, promises):
    """Open the bank again and hold it to every promise."""
    with ExperienceBank(folder) as bank:
        commits = {commit.id for commit in bank.commits()}
        for (id, version), text in promises.versions.items():
            assert bank.version(id, version).text == text, "an acknowledged version is lost"
        for head, state in list(promises.states.items())[-3:]:
            assert head in commits | {0} and digest(bank.at(head).entries()) == state, (
                "an acknowledged state is lost"
            )
        for id in promises.submitted:
            assert bank.queue.state(id) in ("queued", "done") and bank.trajectory(id) is not None, (
                "a submission is lost"
            )
        for id in promises.distilled:
            assert bank.queue.state(id) == "done", "a finished item came back"
        assert [entry.id for entry in bank.entries()] == [
            entry.id for entry in bank.at(bank.head).entries()
        ]
        bank.flush_index()
        assert len(bank._follower.opened()) == len(bank), "the index did not catch up"
    wrong = [finding for finding in examine(folder) if finding.status == "wrong"]
    assert not wrong, wrong
    for fork, state in promises.forks.items():
        with ExperienceBank(fork, read_only=True) as copy:
            assert digest(copy.entries()) == state, "an acknowledged fork is not whole"
    promises.forks.clear()


def check_credit(bank):
    """Each trajectory was distilled by one commit, and each use was counted once."""
    refs = [commit.ref for commit in bank.commits() if commit.cause == "trajectory"]
    assert len(refs) == len(set(refs)), "a trajectory was distilled twice"
    with sqlite3.connect(bank.path / "journal.sqlite") as journal:
        uses = dict(
            journal.execute("SELECT experience, COUNT(*) FROM uses GROUP BY experience").fetchall()
        )
    for entry in bank.entries():
        if not any(
            bank.version(entry.id, version).provenance.parents
            for version in range(1, entry.version + 1)
        ):
            assert entry.statistics.uses == uses.get(entry.id, 0), (
                "a use was counted twice, or never"
            )


def crash(tmp_path, kills, seed):
    """Kill writers of banks until ``kills`` of them are dead; gives what died where."""
    rng = random.Random(seed)
    died = dict.fromkeys([*POINTS, "timer"], 0)
    for first in range(0, kills, ROUNDS):
        folder, promises = tmp_path / f"{first}" / "bank", Promises()
        for turn in range(first, min(first + ROUNDS, kills)):
            point = rng.choice([*POINTS, *[None] * len(POINTS)])
            at_point = killed(folder, rng.randrange(1 << 30), promises, point, rng)
            died[point if point is not None and at_point else "timer"] += 1
            print(f"kill {turn}: {point or 'timer'}", flush=True)
            check(folder, promises)
        with ExperienceBank(folder) as bank:
            with ExperienceManager(bank, Echo()) as manager:
                manager.drain(timeout=60)
            assert all(bank.queue.state(id) == "done" for id in promises.submitted)
            check_credit(bank)
    return died


def test_a_few_kills_lose_nothing(tmp_path):
    assert sum(crash(tmp_path, 10, seed=7).values()) == 10


@pytest.mark.slow
@pytest.mark.timeout(24 * 3600)
def test_kills_at_random_moments_lose_nothing(tmp_path):
    """Kill ``KILLS`` times, 70 by default; `make crash` kills 2,000 times."""
    kills = int(os.environ.get("KILLS", "70"))
    died = crash(tmp_path, kills, seed=int(os.environ.get("SEED", "1")))
    print(died)
    assert sum(died.values()) == kills
    assert kills < 70 or sum(1 for count in died.values() if count) > len(POINTS) // 2, (
        f"kills fell on too few points: {died}"
    )
