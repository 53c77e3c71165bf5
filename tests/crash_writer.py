"""A writer to be killed: it does random things to a bank, says what is durable, and dies at a named
point or by its parent's hand.
"""

import hashlib
import itertools
import json
import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import chromadb  # noqa: F401  (imported once, in the process that every writer is forked from)

from experiential.bank.bank import ExperienceBank
from experiential.bank.index.follower import Replica
from experiential.bank.index.seal import Seal
from experiential.bank.manager import ExperienceManager
from experiential.bank.state import State
from experiential.bank.storage.journal import Journal
from experiential.types import (
    Add,
    Discard,
    Distillation,
    Merge,
    ParsedOperations,
    Trajectory,
    Use,
    new_id,
)

SQL_POINTS = (
    "BEGIN",
    "COMMIT",
    "SAVEPOINT",
    "RELEASE",
    "INSERT INTO commits",
    "INSERT INTO versions",
    "INSERT INTO changes",
    "INSERT INTO trajectories",
    "INSERT INTO queue",
    "UPDATE queue",
    "INSERT OR REPLACE INTO statistics",
    "INSERT OR REPLACE INTO meta",
    "PRAGMA wal_checkpoint",
)
CALL_POINTS = ("show", "apply", "applied", "clear", "cleared", "backup", "backed up", "seal")
POINTS = (*SQL_POINTS, *CALL_POINTS)


def digest(entries):
    """A bank's live content in one word."""
    content = sorted([entry.id, entry.version, entry.text] for entry in entries)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def made(*operations):
    return Distillation(parsed=ParsedOperations(operations=operations))


class Echo:
    """An extractor that adds one lesson a trajectory and merges all that it is shown."""

    version = 1

    async def adistill(self, trajectory, shown):
        return made(Add(text=f"lesson of {trajectory.id}"))

    async def arefine(self, query, experience):
        return experience.text, None

    async def amerge(self, experiences):
        return made(
            Merge(
                entries=tuple(range(1, len(experiences) + 1)),
                text=" + ".join(e.id[:4] for e in experiences),
            )
        )


class Fuse:
    """Kills this process when a point is passed for the n-th time."""

    def __init__(self, point, count):
        self.point = point
        self.left = count

    def pass_by(self, point):
        if point == self.point:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, bank):
        if self.point in SQL_POINTS:
            watched = self.point
            bank._journal._connection.set_trace_callback(
                lambda sql: self.pass_by(watched if sql.lstrip().startswith(watched) else None)
            )
        before = {
            "show": (State, "publish"),
            "apply": (Replica, "apply"),
            "clear": (Replica, "clear"),
        }
        before |= {"backup": (Journal, "backup"), "seal": (Seal, "_write")}
        after = {
            "applied": (Replica, "apply"),
            "cleared": (Replica, "clear"),
            "backed up": (Journal, "backup"),
        }
        for points, early in ((before, True), (after, False)):
            if self.point in points:
                self._wrap(*points[self.point], early)

    def _wrap(self, owner, name, early):
        call = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if early:
                self.pass_by(self.point)
            result = call(*args, **kwargs)
            if not early:
                self.pass_by(self.point)
            return result

        setattr(owner, name, wrapped)


class Writer:
    """Does one random thing after another; ``say`` is called with each promise that the bank has
    made.
    """

    def __init__(self, folder, seed, say):
        self.bank = ExperienceBank(folder, embedder="hashing")
        self.rng = random.Random(seed)
        self._say = say
        self._lock = threading.Lock()

    def say(self, kind, **fields):
        with self._lock:
            self._say(json.dumps({"kind": kind, **fields}) + "\n")

    def say_state(self):
        self.say("state", head=self.bank.head, digest=digest(self.bank.entries()))

    def say_written(self, entries):
        self.say("written", entries=[[entry.id, entry.version, entry.text] for entry in entries])

    def run(self, steps=None):
        """Act until this process is killed, or so many times."""
        actions = [
            self.add,
            self.add,
            self.update,
            self.remove,
            self.play,
            self.play,
            self.distil,
            self.distil,
        ]
        actions += [
            self.merge,
            self.dedupe,
            self.evict,
            self.rollback,
            self.rebuild,
            self.follow,
            self.fork,
            self.crowd,
            self.checkpoint,
            self.manage,
            self.bulk,
        ]
        self.say("open")
        for _ in itertools.count() if steps is None else range(steps):
            self.rng.choice(actions)()
            self.say_state()

    def text(self):
        return f"{self.rng.choice(['door', 'key', 'bread', 'oven'])} {self.rng.randrange(10**6)}"

    def some(self, count):
        ids = [entry.id for entry in self.bank.entries()]
        return [self.bank.get(id) for id in self.rng.sample(ids, min(count, len(ids)))]

    def add(self):
        self.say_written(
            self.bank.add_many([self.text() for _ in range(self.rng.choice([1, 1, 3]))])
        )

    def bulk(self):
        """So many that Chroma writes its vector files, which it does after a thousand changes."""
        if len(self.bank) < 1500 and self.rng.random() < 0.25:
            self.say_written(self.bank.add_many([self.text() for _ in range(400)]))

    def update(self):
        for entry in self.some(1):
            self.say_written([self.bank.update(entry.id, self.text())])

    def remove(self):
        for entry in self.some(1):
            self.bank.remove(entry.id)

    def trajectories(self, count):
        uses = [
            Use(experience_id=entry.id, experience_version=entry.version) for entry in self.some(1)
        ]
        return [
            Trajectory(id=new_id(), task="t", success=True, uses=tuple(uses[:1]) if i == 0 else ())
            for i in range(count)
        ]

    def play(self):
        ended = self.trajectories(self.rng.choice([1, 4]))
        assert self.bank.submit_many(ended) == [True] * len(ended)
        self.say("submitted", ids=[one.id for one in ended])

    def distil(self):
        for id in self.bank.queue.waiting()[:2]:
            lesson = made(Add(text=f"lesson of {id}"))
            written = self.bank.apply(
                lesson, trajectory=self.bank.trajectory(id), shown=[], item=id
            )
            self.say("distilled", id=id)
            self.say_written(written)

    def merge(self):
        shown = self.some(3)
        if len(shown) == 3:
            asked = made(Merge(entries=(1, 2), text=self.text()), Discard(entry=3))
            self.say_written(self.bank.consolidate(asked, shown=shown))

    def dedupe(self):
        self.bank.deduplicate(threshold=0.6)

    def evict(self):
        self.bank.evict(max(1, len(self.bank) - 2), self.rng.choice(["utility", "random"]))

    def rollback(self):
        commits = self.bank.commits()[-5:]
        if commits:
            self.bank.rollback(self.rng.choice(commits).id)

    def rebuild(self):
        assert self.bank.rebuild() == len(self.bank)

    def follow(self):
        self.bank.note_retrievals([entry.id for entry in self.some(2)])
        self.bank.save_counters()
        self.bank.flush_index()

    def fork(self):
        folder = self.bank.path.with_name(f"fork-{new_id()}")
        with self.bank.fork(folder) as copy:
            self.say("forked", folder=str(folder), digest=digest(copy.entries()))

    def crowd(self):
        """Four threads at once, so that there are groups to be killed in."""
        texts = [self.text() for _ in range(8)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda text: self.say_written([self.bank.add(text)]), texts))

    def checkpoint(self):
        self.bank._journal.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def manage(self):
        """The manager distils what waits and merges, on its own threads."""
        with ExperienceManager(self.bank, Echo(), merge_chunk=4) as manager:
            manager.on_distillation = lambda trajectory, *_: self.say("distilled", id=trajectory.id)
            for ended in self.trajectories(2):
                manager.submit(ended)
                self.say("submitted", ids=[ended.id])
            manager.drain(timeout=60)
            manager.merge()


def write(folder, seed, pipe, point, count):
    """What a writer process does until it is killed."""
    writer = Writer(folder, seed, lambda line: os.write(pipe.fileno(), line.encode()))
    if point is not None:
        Fuse(point, count).watch(writer.bank)
    writer.run()


def main():
    """Act a number of times on a bank, promises going to the standard output; then close it."""
    folder, seed, steps = sys.argv[1:]
    writer = Writer(folder, int(seed), lambda line: os.write(1, line.encode()))
    writer.run(int(steps))
    writer.bank.close()


if __name__ == "__main__":
    main()
