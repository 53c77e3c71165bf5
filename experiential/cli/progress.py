"""Show how a suite gets on: one changing line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.status import Status

from experiential.evaluation.play_log import PlayedEpisode
from experiential.llm.metered import Spent

PAUSE = 30.0
"""Seconds between two plain lines."""


class Progress:
    """Count episodes and write on stderr how many there are, success, failures, cost and time left.

    Args:
        total: episodes of all cells.
        before: those of them that were finished in earlier runs.
    """

    def __init__(self, total: int, before: int = 0) -> None:
        self._total, self._before = total, before
        self._played = self._won = self._failed = 0
        self._spent, self._where = Spent(), ""
        self._begin = self._written = time.monotonic()
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._status = Console(stderr=True).status("")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()
        if self._played:
            sys.stderr.write(self.text() + "\n")

    def note(self, one: PlayedEpisode) -> None:
        """Count an episode that has ended."""
        self._played += 1
        self._won += one.success
        self._failed += one.error is not None
        self._spent += one.spent
        self._where = f"{one.task} ({one.arm})"
        if self._status is not None:
            self._status.update(self.text().replace("[", r"\["))
        elif time.monotonic() - self._written > PAUSE:
            self._written = time.monotonic()
            sys.stderr.write(self.text() + "\n")

    def text(self) -> str:
        """Return the state in words."""
        done, ended = self._before + self._played, self._played - self._failed
        words = [f"{done:,} of {self._total:,} episodes", self._where]
        if ended:
            words.append(f"success {100 * self._won / ended:.1f} %")
        if self._failed:
            words.append(f"{self._failed:,} failed")
        if self._spent.requests:
            words.append(self._spent.describe())
        if self._played and done < self._total:
            each = (time.monotonic() - self._begin) / self._played
            words.append(f"about {span((self._total - done) * each)} left")
        return ", ".join(filter(None, words))


def span(seconds: float) -> str:
    """Return a time in words.

    >>> span(42), span(400), span(9000)
    ('42 s', '7 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
