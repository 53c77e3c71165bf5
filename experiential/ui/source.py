"""Read what a bank or a run holds: episodes, entries, events; also while another process writes."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from experiential.bank.folder import FolderBank
from experiential.bank.records import (
    Asked,
    DeadLetter,
    EpisodeSummary,
    LogEntry,
    Standing,
    UsedIn,
)
from experiential.bank.storage.journal import JOURNAL_NAME
from experiential.bank.storage.lock import lock_owner
from experiential.errors import BankError, ConfigError
from experiential.evaluation.card import Card
from experiential.evaluation.episode_log import (
    EPISODES_FILE,
    EpisodeLog,
    PlayedTranscript,
    shown_text,
)
from experiential.evaluation.play_log import read_settings
from experiential.evaluation.suite_episodes import SuiteLog
from experiential.ids import whole_id
from experiential.training.metrics import read_events
from experiential.types import Experience, Record

METRICS_FILE, CARD_FILE = "metrics.jsonl", "card.json"


class Advice(Record):
    """Describe one entry that reached the agent in an episode.

    Attributes:
        turn: at whose observation, from 0.
        text: what was shown; None where the bank of the run is gone.
        rejected: the actor rejected it, so that it was not shown.
        is_live: whether this version is what the bank holds today; None where it never knew it, as
            it does not know what the copy of an evaluation held.
    """

    turn: int
    how: str
    id: str
    version: int
    text: str | None
    rank: int
    score: float
    rejected: bool
    is_live: bool | None


class Written(Record):
    """Describe one entry version distilled from an episode, and where it was used later."""

    operation: str
    entry: Experience
    is_live: bool
    used: tuple[UsedIn, ...]


class EpisodeView(Record):
    """Describe all that is known of one episode.

    Attributes:
        distilled: what became of its distillation, in words.
        answers: what the extractor answered, where it wrote something.
    """

    summary: EpisodeSummary
    transcript: PlayedTranscript
    advice: tuple[Advice, ...]
    written: tuple[Written, ...]
    distilled: str
    answers: tuple[str, ...]


class EntryRow(Record):
    """Describe one entry in the list of what was learned.

    Attributes:
        helps: posterior probability that the success rate with the entry is above that without.
    """

    entry: Experience
    standing: Standing
    helps: float


class Version(Record):
    """Describe one version of an entry; ``text`` is None in the line of its removal."""

    commit: LogEntry
    text: str | None
    trajectory: str | None


class EntryView(Record):
    """Describe one entry: its versions, oldest first, and where it was used, newest first."""

    row: EntryRow
    is_live: bool
    versions: tuple[Version, ...]
    used: tuple[UsedIn, ...]


class Letter(DeadLetter):
    """Describe an episode whose distillation was given up."""

    task: str


class Source:
    """Read the folder of a bank, of a run with or without one, or of `experiential eval`.

    The log of a suite, a file, is read as well: it has episodes alone.

    A bank is read as a private copy, made anew when its journal has changed. All methods may be
    called from any thread.

    Args:
        path: the folder, or the file.
        namespace: of the bank.

    Raises:
        ConfigError: it is none of these.
    """

    def __init__(self, path: Path, namespace: str = "default") -> None:
        self.path, self.namespace = path, namespace
        is_bank = (path / JOURNAL_NAME).is_file()
        files = (EPISODES_FILE, METRICS_FILE, CARD_FILE)
        self.run = None if is_bank or path.is_file() else path
        if self.run is not None and not any((path / name).is_file() for name in files):
            raise ConfigError(
                f"Expected the folder of a bank ({JOURNAL_NAME}) or of a run ({EPISODES_FILE}), or"
                f" the log of a suite (.jsonl), got {path}"
            )
        self.bank_folder = path if is_bank else path / "bank"
        self._lock = threading.RLock()
        self._bank: FolderBank | None = None
        self._seen: object = None  # the state of the journal that was copied
        self._logs: list[EpisodeLog | SuiteLog] = []
        if path.is_file():
            read_settings(path)  # refuses another file
            self._logs.append(SuiteLog(path))
        elif not is_bank:
            self._logs += [EpisodeLog(path / at / EPISODES_FILE) for at in ("", "evaluation")]

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return self.path.resolve().name

    # The bank

    @property
    def has_bank(self) -> bool:
        """Return whether there is a bank; that of a run comes with its first step."""
        return (self.bank_folder / JOURNAL_NAME).is_file()

    @contextmanager
    def bank(self) -> Generator[FolderBank | None]:
        """Open the bank read-only, as it is now; None if there is none."""
        with self._lock:
            if not self.has_bank:
                yield None
                return
            state = self._journal_state()
            if self._bank is None or state != self._seen:
                if self._bank is not None:
                    self._bank.close()
                    self._bank = None
                self._bank, self._seen = self._opened(read_only=True), state
            yield self._bank

    @contextmanager
    def writing(self) -> Generator[FolderBank]:
        """Open the bank for writing, for one change.

        Raises:
            BankLockedError: another process writes it.
        """
        with self._lock:
            bank = self._opened(read_only=False)
            try:
                yield bank
            finally:
                bank.close()

    def writer(self) -> str | None:
        """Return who writes the bank now, in words; None if nobody does."""
        return lock_owner(self.bank_folder) if self.has_bank else None

    def close(self) -> None:
        """Close the copy of the bank."""
        with self._lock:
            if self._bank is not None:
                self._bank.close()
                self._bank = None

    def _opened(self, *, read_only: bool) -> FolderBank:
        return FolderBank(self.bank_folder, namespace=self.namespace, read_only=read_only)

    def _journal_state(self) -> object:
        states: list[tuple[int, int]] = []
        for name in (JOURNAL_NAME, f"{JOURNAL_NAME}-wal"):
            file = self.bank_folder / name
            status = file.stat() if file.exists() else None
            states.append((status.st_mtime_ns, status.st_size) if status else (0, 0))
        return states

    # Episodes

    def episodes(self) -> list[EpisodeSummary]:
        """Return all episodes, oldest first: those that the run played, or that the bank recorded.

        Those of an evaluation follow the step that it looks at.

        Raises:
            ConfigError: the run was written by an older version.
        """
        with self._lock:
            if logs := [log for log in self._logs if log.path.is_file()]:
                known = [one for log in logs for one in log.summaries()]
                return sorted(known, key=lambda one: one.step or 0)  # stable
            with self.bank() as bank:
                return [] if bank is None else bank.episodes()

    def episode(self, prefix: str) -> EpisodeView:
        """Return all that is known of one episode.

        Raises:
            ConfigError: no id, or more than one, begins with ``prefix``.
        """
        with self._lock, self.bank() as bank:
            known = {one.id: one for one in self.episodes()}
            if bank is not None and not any(id.startswith(prefix) for id in known):
                # a run's bank has further episodes, such as those of a cold start
                known = {one.id: one for one in bank.episodes()}
            wanted, see = f"the id of an episode of {self.path}", "experiential episodes"
            id = whole_id(prefix, known, wanted, f"{see} {self.path}")
            found = (log.transcript(id) for log in self._logs if log.path.is_file())
            transcript = next((one for one in found if one is not None), None)
            if transcript is None and bank is not None:
                recorded = bank.trajectory(id)
                transcript = None if recorded is None else PlayedTranscript(trajectory=recorded)
            if transcript is None:
                raise ConfigError(
                    f"Expected episode {id} in {self.path}, got it rewound; try again"
                )
            advice = tuple(self._advice(bank, transcript))
            written, answers, distilled = self._written(bank, id)
            if known[id].arm is not None:
                distilled = "what an evaluation writes goes into a copy of the bank"
            return EpisodeView(
                summary=known[id],
                transcript=transcript,
                advice=advice,
                written=written,
                distilled=distilled,
                answers=answers,
            )

    def _advice(self, bank: FolderBank | None, transcript: PlayedTranscript) -> Iterable[Advice]:
        for use in transcript.trajectory.uses:
            text, is_live = transcript.texts.get(use.id), None
            if bank is not None:
                text = shown_text(bank, use) if text is None else text
                if bank.version(use.experience_id, use.experience_version) is not None:
                    live = bank.get(use.experience_id)
                    is_live = live is not None and live.version == use.experience_version
            yield Advice(
                turn=use.turn,
                how=use.how,
                id=use.experience_id,
                version=use.experience_version,
                text=text,
                rank=use.rank,
                score=use.score,
                rejected=use.verdict == "reject",
                is_live=is_live,
            )

    def _written(
        self, bank: FolderBank | None, id: str
    ) -> tuple[tuple[Written, ...], tuple[str, ...], str]:
        """Return what was distilled from an episode, the extractor's answers, and its state."""
        if bank is None:
            return (), (), "there is no bank"
        if bank.trajectory(id) is None:
            return (), (), "the bank has no record of it"
        written, answers = list[Written](), dict[str, None]()
        for entry in bank.why(id).written:
            live = bank.get(entry.id)
            uses = (use for use in bank.used_in(entry.id) if use.version >= entry.version)
            written.append(
                Written(
                    operation="add" if entry.version == 1 else "update",
                    entry=entry,
                    is_live=live is not None and live.version == entry.version,
                    used=tuple(uses),
                )
            )
            generation = bank.generation(entry.provenance.generation or "")
            if generation is not None:
                answers[generation.text] = None
        state = bank.queue.state(id)
        words = {
            "queued": "waits for distillation",
            "dead": "its distillation was given up",
            "done": "distilled, and nothing was written",
        }
        said = words.get(state or "", "nothing was distilled from it")
        return tuple(written), tuple(answers), "distilled" if written else said

    # Entries

    def entries(self) -> list[EntryRow]:
        """Return the live entries, those that most probably help first."""
        with self.bank() as bank:
            if bank is None:
                return []
            rows = _rows(bank, list(bank))
        return sorted(rows, key=lambda row: (-row.helps, -row.standing.uses))

    def entry(self, prefix: str) -> EntryView:
        """Return all that is known of one entry, live or retired.

        Raises:
            ConfigError: no id of an entry, or of several entries, begins with ``prefix``.
        """
        with self.bank() as bank:
            if bank is None:
                raise ConfigError(f"Expected a bank in {self.path}, got none")
            live = {entry.id: entry for entry in bank}
            near = [id for id in live if id.startswith(prefix)]
            wanted, see = f"the id of an entry of {self.bank_folder}", "experiential bank ls"
            id = whole_id(prefix, near or bank.ids(), wanted, f"{see} {self.bank_folder}")
            try:
                log = bank.history(id)
            except (BankError, ValueError):  # it is that of an episode
                raise ConfigError(f"Expected {wanted}, got {prefix!r}") from None
            versions = list[Version]()
            last: Experience | None = None
            for commit in log:
                entry = None if commit.version is None else bank.version(id, commit.version)
                last = entry or last
                text = None if entry is None else entry.text
                trajectory = None if entry is None else entry.provenance.trajectory
                versions.append(Version(commit=commit, text=text, trajectory=trajectory))
            if last is None:
                raise ConfigError(f"Expected a version of entry {id}, got none; see bank doctor")
            [row] = _rows(bank, [live.get(id, last)])
            used = tuple(reversed(bank.used_in(id)))
            return EntryView(row=row, is_live=id in live, versions=tuple(versions), used=used)

    def commits(self) -> list[LogEntry]:
        """Return the commits of the bank that changed entries, newest first."""
        with self.bank() as bank:
            log = [] if bank is None else bank.history()
        return [commit for commit in reversed(log) if commit.changes]

    def letters(self) -> list[Letter]:
        """Return the episodes whose distillation was given up, oldest first."""
        with self.bank() as bank:
            if bank is None:
                return []
            letters = list[Letter]()
            for one in bank.queue.dead_letters():
                trajectory = bank.trajectory(one.id)
                task = "" if trajectory is None else trajectory.task
                letters.append(Letter(**one.model_dump(), task=task))
            return letters

    # The run

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the run so far; none for a bank."""
        file = None if self.run is None else self.run / METRICS_FILE
        return read_events(file) if file is not None and file.is_file() else []

    def cards(self) -> list[tuple[Path, Card]]:
        """Return the cards of `experiential eval` that lie in the folder, or one below it."""
        if self.run is None:
            return []
        files = sorted({*self.run.glob(CARD_FILE), *self.run.glob(f"*/{CARD_FILE}")})
        return [(file, Card.model_validate_json(file.read_text("utf-8"))) for file in files]


def _rows(bank: FolderBank, entries: Sequence[Experience]) -> list[EntryRow]:
    asked = [Asked(id=entry.id, version=entry.version) for entry in entries]
    standings = bank.standings(asked)
    helps = probability_of_lead(
        np.array([one.posterior for one in standings], dtype=np.float64).reshape(-1, 2),
        np.array([one.baseline for one in standings], dtype=np.float64).reshape(-1, 2),
    )
    return [
        EntryRow(entry=entry, standing=standing, helps=float(lead))
        for entry, standing, lead in zip(entries, standings, helps, strict=True)
    ]


def probability_of_lead(
    first: np.ndarray[Any, np.dtype[np.float64]], second: np.ndarray[Any, np.dtype[np.float64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return P(x > y) for independent x and y of Beta distributions, by a sum over a grid.

    Args:
        first: parameters (alpha, beta) of x, shape (n, 2).
        second: those of y, shape (n, 2).

    Returns:
        the probabilities, shape (n,).

    >>> probability_of_lead(np.array([[1.0, 1.0], [9.0, 1.0]]), np.array([[1.0, 1.0]] * 2)).round(2)
    array([0.5, 0.9])
    """
    grid = (np.arange(512) + 0.5) / 512

    def density(parameters: np.ndarray[Any, np.dtype[np.float64]]) -> Any:
        alpha, beta = parameters[:, :1], parameters[:, 1:]
        log = (alpha - 1) * np.log(grid) + (beta - 1) * np.log1p(-grid)
        weight = np.exp(log - log.max(axis=1, keepdims=True))
        return weight / weight.sum(axis=1, keepdims=True)

    if not len(first):
        return np.zeros(0)
    x, y = density(first), density(second)
    return (x * (y.cumsum(axis=1) - y / 2)).sum(axis=1)


def filtered(
    known: Iterable[EpisodeSummary],
    task: str | None = None,
    outcome: str | None = None,
    step: int | None = None,
    arm: str | None = None,
) -> list[EpisodeSummary]:
    """Return the episodes whose task has the words, that ended so, of a step and of an arm.

    Without an arm these are the episodes of training where there are any; ``all`` takes all.
    """
    known, words = list(known), (task or "").casefold().split()
    if not arm:
        arm = None if any(one.arm is None for one in known) else "all"
    return [
        one
        for one in known
        if all(word in f"{one.task} {one.task_id}".casefold() for word in words)
        and outcome in (None, "", one.outcome)
        and step in (None, one.step)
        and arm in ("all", one.arm)
    ]
