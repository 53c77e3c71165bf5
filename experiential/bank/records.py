"""Define the records that a bank answers with; every one can travel as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from experiential.types import Condition, Experience, Record, Statistics, Uplift

Policy = Literal["lru", "fifo", "random", "utility"]
"""Order of eviction: least recently used (or written), oldest, random, or lowest Laplace score."""
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


class Standing(Record):
    """Report how far one entry version is trusted, and why.

    Attributes:
        after: required number of independent tasks; 0 trusts everything.
        tasks: independent tasks with evidence.
        mean: mean over tasks of the difference of success rates, in [-1, 1]; None without a task.
        interval: 95 % t-interval of the mean over tasks; None for fewer than two.
        trusted: True when the interval lies above zero, on at least ``after`` tasks.
    """

    id: str
    version: int
    after: int
    tasks: int = 0
    mean: float | None = None
    interval: tuple[float, float] | None = None
    trusted: bool


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
    error: str | None
    shown: tuple[Shown, ...]
    written: tuple[Experience, ...]
