"""Log played episodes as JSON lines, each written when it ends; results are computed from the log.

The first line holds the settings, every other one a `PlayedEpisode` or a `BankChange`. One process
writes a log. A kill at any moment costs the episodes that were being played and at most one line
that is cut off, which readers skip and the next writer removes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from experiential.errors import ConfigError
from experiential.evaluation.results import check_settings
from experiential.llm.metered import Spent
from experiential.types import Record, Text

ABOUT = "a log of played episodes"
_HEAD = b'{"kind": "settings", "settings": '


class PlayedTurn(Record):
    """Hold one reply of the agent and what came of it."""

    observation: Text
    reply: Text = ""
    """All that the model wrote; the action where no model was asked."""
    action: Text
    reward: float | None = None
    """None: it did not step the environment, as a question to the bank does not."""


class Retrieved(Record):
    """Hold one entry of a bank that reached the agent."""

    turn: int
    """Of the reply that could use it, from 0."""
    id: str
    version: int = 1
    text: Text
    score: float = 0.0


class PlayedEpisode(Record):
    """Hold one episode. It is known by its task, arm, world, visit and place."""

    kind: Literal["episode"] = "episode"
    task: str = ""
    """Name of the suite's task."""
    arm: str = "off"
    """What the agent was shown, such as an arm of an evaluation or a baseline."""
    world: int
    """Index of its world; where the environment lists none, the number of its seed."""
    visit: int
    """Number of the visit to that world, from 0."""
    place: dict[str, int | str] = {}
    """Further coordinates, such as the order and position in a stream."""
    seed: int = 0
    task_id: str
    success: bool
    reward: float
    """Sum of rewards; after a failure the least that the task gives."""
    turns: int
    prompt_tokens: int
    """0 where the backend neither counts tokens nor shows their ids."""
    response_tokens: int
    seconds: float
    """From the reset to the end of the last step, the agent's time included."""
    shown: int
    """Entries of the bank that reached the agent."""
    error: Text | None = None
    """The reason of a failure."""
    again: bool = False
    """Whether the failure is technical, so that the next run plays the episode again. A model that
    refuses, does not answer or runs out of context has failed by itself."""
    stopped: bool = False
    """Whether the run ended before the episode, which then counts for nothing but ``spent``."""
    spent: Spent = Spent()
    """Requests, tokens and cost of the agent's model, those of a failed episode included."""
    transcript: tuple[PlayedTurn, ...] = ()
    end: Text = ""
    """The last observation."""
    retrieved: tuple[Retrieved, ...] = ()
    note: dict[str, Any] = {}
    """What a protocol needs beyond this to go on from here, as JSON."""
    time: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """When it ended."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Return by what an episode is known."""
        return self.task, self.arm, self.world, self.visit, *sorted(self.place.items())

    def summary(self) -> PlayedEpisode:
        """Return the episode without what was read and written in it."""
        return self.model_copy(update={"transcript": (), "end": "", "retrieved": ()})


class BankChange(Record):
    """Hold what became of the bank of an arm over some episodes."""

    kind: Literal["bank"] = "bank"
    task: str
    arm: str
    entries: tuple[int, int]
    """Of the bank before and after."""
    extractor: Spent = Spent()
    """What distillation took."""


Line = Annotated[PlayedEpisode | BankChange, Field(discriminator="kind")]
_LINE: TypeAdapter[PlayedEpisode | BankChange] = TypeAdapter(Line)


def read_log(
    path: Path, settings: Mapping[str, Any] | None = None, remedy: str = "remove it"
) -> Iterator[PlayedEpisode | BankChange]:
    """Yield what a log holds, with transcripts, in the order in which it was written.

    An episode that was played again comes once for each time; the last counts.

    Args:
        path: the file.
        settings: those that it must have been played with, if given.
        remedy: as for `PlayLog`.

    Raises:
        ConfigError: the file cannot be read, is no log, is of other settings, or a line before the
            last is damaged.
    """
    known = dict[str, Any]()
    for number, (_, line) in enumerate(_whole_lines(path)):
        if number == 0:
            known = _settings_in(line, path, remedy)
            continue
        if number == 1 and settings is not None:
            check_settings(known, settings, ABOUT, path, remedy)
        yield _parsed(line, path, number, remedy)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in the first line of a log.

    Raises:
        ConfigError: the file cannot be read, or is no log.
    """
    for _, line in _whole_lines(path):
        if line.startswith(_HEAD):
            with suppress(ValueError):
                return json.loads(line)["settings"]
        break
    raise ConfigError(f"Expected {ABOUT} in {path}, got another file")


class PlayLog:
    """Append episodes to a log, and know which of them are finished.

    >>> from tempfile import TemporaryDirectory
    >>> one = PlayedEpisode(task="lake", world=3, visit=0, task_id="lake-3", success=True, reward=1,
    ...     turns=5, prompt_tokens=0, response_tokens=0, seconds=0.1, shown=0)
    >>> with TemporaryDirectory() as folder:
    ...     with PlayLog(Path(folder) / "log.jsonl", {"seed": 0}) as log:
    ...         log.append(one)
    ...     with PlayLog(Path(folder) / "log.jsonl", {"seed": 0}) as log:
    ...         one.key in log.finished
    True

    Args:
        path: the file; its folder is made where there is none.
        settings: what decides the outcome of episodes; a log of other settings is refused.
        overwrite: begin anew.
        remedy: what the user can do about a file that cannot be used, for error messages.

    Attributes:
        episodes: all that were played, summaries without transcripts, by key; the last of each.
        changes: of banks, in order.
        spent: requests, tokens and cost of all attempts, by task and arm. The seconds overlap.

    Raises:
        ConfigError: the file is no log, is damaged, is of other settings, or another process
            writes it.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        overwrite: bool = False,
        remedy: str = "remove it",
    ) -> None:
        self.path = path
        self.episodes: dict[tuple[Any, ...], PlayedEpisode] = {}
        self.changes: list[BankChange] = []
        self.spent: dict[tuple[str, str], Spent] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"Expected to write {ABOUT} to {path}, got {error}") from error
        try:
            self._claim()
            if overwrite:
                os.ftruncate(self._file, 0)
            self._end = self._read(settings, remedy)
            os.ftruncate(self._file, self._end)  # a line that a kill cut off
            if not self._end:
                self._write(_HEAD.decode() + json.dumps(dict(settings)) + "}")
        except BaseException:
            self.close()
            raise

    @property
    def finished(self) -> set[tuple[Any, ...]]:
        """Return the keys of the episodes that need not be played again."""
        return {key for key, one in self.episodes.items() if not one.again}

    @property
    def cost(self) -> float:
        """Return the dollars that agents and extractors have taken, as far as they are known."""
        extractors = (change.extractor for change in self.changes)
        return sum(one.cost or 0.0 for one in (*self.spent.values(), *extractors))

    def append(self, line: PlayedEpisode | BankChange) -> None:
        """Write one line; it is on disk when this returns."""
        self._write(line.model_dump_json())
        self._note(line)

    def close(self) -> None:
        """Let another process write the log; safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> PlayLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _claim(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Expected to be the only writer of {self.path}, which another process is writing;"
                " wait until it has ended"
            ) from None

    def _read(self, settings: Mapping[str, Any], remedy: str) -> int:
        """Take in what the file holds; return where the next line goes."""
        begins = os.pread(self._file, len(_HEAD), 0)
        if not _HEAD.startswith(begins):
            raise ConfigError(f"Expected {ABOUT} in {self.path}, got another file; {remedy}")
        end, known = 0, dict[str, Any]()
        for number, (after, line) in enumerate(_whole_lines(self.path)):
            if number == 0:
                known = _settings_in(line, self.path, remedy)
            else:
                end = after
                self._note(_parsed(line, self.path, number, remedy))
        if not end:
            return 0  # nothing was played yet, so its settings do not matter
        check_settings(known, settings, ABOUT, self.path, remedy)
        return end

    def _note(self, line: PlayedEpisode | BankChange) -> None:
        if isinstance(line, BankChange):
            self.changes.append(line)
            return
        if not line.stopped:
            self.episodes[line.key] = line.summary()
        cell = line.task, line.arm
        self.spent[cell] = self.spent.get(cell, Spent()) + line.spent

    def _write(self, text: str) -> None:
        data = text.encode() + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
            os.fsync(self._file)
        except OSError as error:  # a full disk must not leave a part for the next line to follow
            os.ftruncate(self._file, self._end)
            raise ConfigError(f"Expected to write to {self.path}, got {error}") from error
        self._end += len(data)


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that were written whole, each with the offset of its end."""
    end = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    end += len(line)
                    yield end, line
    except OSError as error:
        raise ConfigError(f"Expected {ABOUT} in {path}, got {error}") from error


def _settings_in(line: bytes, path: Path, remedy: str) -> dict[str, Any]:
    if not line.startswith(_HEAD):
        raise ConfigError(f"Expected {ABOUT} in {path}, got another file; {remedy}")
    with suppress(ValueError):
        return json.loads(line)["settings"]
    return {}


def _parsed(
    line: bytes, path: Path, number: int, remedy: str = "remove it"
) -> PlayedEpisode | BankChange:
    try:
        return _LINE.validate_json(line)
    except ValidationError as error:
        raise ConfigError(
            f"Expected {ABOUT} in {path}, got in line {number + 1}: {str(error).splitlines()[0]};"
            f" {remedy}"
        ) from error
