"""Define the records that a bank answers with; every one can travel as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from experiential.types import Condition, Experience, Record, Statistics, Uplift

Policy = Literal["lru", "fifo", "random", "utility", "subject"]
"""Order of eviction: least recently used (or written), oldest, random, or lowest Laplace score."""
LEASE_SECONDS = 30.0
"""How long an item of the queue stays with a distiller that is no longer heard of."""
Judge = Callable[[Experience, Experience], bool]
"""Decide whether two entries, the older first, teach the same; see ``ExtractorAgent.judge``."""


class Commit(Record):
    """Describe one change: author, cause, and the trajectory, file or commit that it refers to."""

    id: int
    time: float
    author: str
    cause: str
    ref: str | None = None


class LogEntry(Commit):
    """Describe one commit and how much it changed.

    Attributes:
        changes: number of entries written, rewritten or removed.
        version: in the log of one entry, its version after the commit; None once removed.
    """

    changes: int
    version: int | None = None


class Changed(Record):
    """Pair the two versions of an entry that differs between two commits."""

    old: Experience
    new: Experience


class Difference(Record):
    """List the differences between two commits, in the order of the entries."""

    added: tuple[Experience, ...]
    removed: tuple[Experience, ...]
    changed: tuple[Changed, ...]


class DeadLetter(Record):
    """Describe a trajectory whose distillation was given up."""

    id: str
    attempts: int
    reason: str


class Duplicates(Record):
    """Group entries that say the same: the survivor and those merged into it, oldest first."""

    survivor: Experience
    merged: tuple[Experience, ...]


class Asked(Record):
    """Name an entry version, its relevance to the query at hand, and that query.

    Relevance None takes that of the best use so far.
    """

    id: str
    version: int
    relevance: float | None = None
    query: str = ""


def asked_near(query: str, found: Iterable[tuple[Experience, float]]) -> list[Asked]:
    """Name the entries that a search found, each with its relevance to the query."""
    return [
        Asked(id=entry.id, version=entry.version, relevance=relevance, query=query)
        for entry, relevance in found
    ]


class Standing(Record):
    """Say what the episodes journalled in this bank tell of one entry, near one relevance.

    Attributes:
        uses: with a known outcome, near this relevance, at most the last 200; where there are none,
            those at a higher relevance if most of these failed.
        successes, failures: of these, older ones counted less.
        unknown: uses whose outcome is not known.
        suspect: whether it adds a word to query and task that did harm in this and other entries.
        others: uses of all entries near this relevance, of the last 200.
        free_successes, free_failures: of episodes of the entry's task without any entry.
        posterior: Beta distribution of the success rate with the entry shown.
        baseline: Beta distribution of the success rate without.
        tasks: tasks on which it was used that were played without any entry, too.
        difference: success rate with the entry minus that without, over these tasks; None without.
        interval: of the difference, 95 %, valid at any time; against all episodes without entries
            where the tasks have none.
        settled: whether such an interval says that all entries this near help taken together, so
            that no further episode needs to play free.
        said: times that extractors wrote the text, from one episode each.
        task: of the entry.
        age: commits since it was written.
        proposed: whether it waits for approval by a person.
    """

    uses: int = 0
    successes: float = 0.0
    failures: float = 0.0
    unknown: int = 0
    suspect: bool = False
    others: int = 0
    free_successes: int = 0
    free_failures: int = 0
    posterior: tuple[float, float] = (1.0, 1.0)
    baseline: tuple[float, float] = (1.0, 1.0)
    tasks: int = 0
    difference: float | None = None
    interval: tuple[float, float] = (-1.0, 1.0)
    settled: bool = False
    said: int = 1
    task: str | None = None
    age: int = 0
    proposed: bool = False

    @property
    def verdict(self) -> Literal["proposed", "quarantined", "suspect", "helps", "unproven"]:
        """Return what the interval says of the entry, or that it is suspect."""
        if self.proposed:
            return "proposed"
        if self.interval[1] < 0.0:
            return "quarantined"
        if self.suspect:
            return "suspect"
        return "helps" if self.interval[0] > 0.0 else "unproven"


class Shown(Record):
    """Describe one use in an episode, and the present evidence for its entry.

    Attributes:
        text: the entry at the version used; None when the bank never had it.
        refined: the text shown instead when an extractor fitted the entry to a question.
        statistics: counters of the entry over all its versions.
        uplift: counts and estimates of the version used.
    """

    id: str
    version: int
    text: str | None
    refined: str | None
    rank: int
    score: float
    propensity: float
    how: str
    turn: int
    statistics: Statistics
    uplift: Uplift


class Explanation(Record):
    """Explain one episode: the entries it saw, its outcome, and the versions written from it."""

    trajectory: str
    task: str
    condition: Condition
    success: bool | None
    reward: float
    score: float | None = None
    baseline: float | None = None
    judgement: str = ""
    error: str | None
    shown: tuple[Shown, ...]
    written: tuple[Experience, ...]


class EpisodeSummary(Record):
    """Describe one recorded episode in a line of a list.

    Attributes:
        step: of the run that played it; None where only a bank knows it.
        arm: what an evaluation showed the agent, such as ``on``; None in training.
        visit: of an evaluation to this world, from 1.
        success: None where the outcome is unknown, or the episode failed for a technical cause.
    """

    id: str
    step: int | None = None
    arm: str | None = None
    visit: int | None = None
    task: str
    task_id: str = ""
    success: bool | None
    score: float | None = None
    reward: float = 0.0
    condition: Condition
    turns: int
    uses: int = 0
    attempt: int = 1
    error: str | None = None

    @property
    def outcome(self) -> Literal["success", "failure", "unknown", "error"]:
        """Return how it ended, in a word."""
        if self.error is not None:
            return "error"
        return "unknown" if self.success is None else "success" if self.success else "failure"

    @property
    def part(self) -> str:
        """Return which part of an evaluation it is, in words; nothing of training."""
        return "" if self.arm is None else f"{self.arm}, visit {self.visit}"


class UsedIn(Record):
    """Describe one use of an entry: the episode and turn in which an agent saw it."""

    episode: str
    version: int
    turn: int
    how: str
    rejected: bool = False
    task: str
    success: bool | None
