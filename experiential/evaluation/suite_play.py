"""Play a suite: each task under each arm, on the same worlds and seeds, into a log."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from experiential.agents.actor import ActorAgent
from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.manager_like import ManagerLike, NoBank
from experiential.config import Arm, EnvSettings
from experiential.errors import (
    BackendError,
    BankError,
    ConfigError,
    ContextError,
    ExperientialError,
    NoAnswerError,
)
from experiential.evaluation.arms import ArmBank, Placebo, Shuffled
from experiential.evaluation.play_log import BankChange, PlayedEpisode, PlayLog
from experiential.evaluation.players import Notes, Player, Recorded, Seat, Watched
from experiential.evaluation.suite_report import SuiteCell, report
from experiential.evaluation.suites import Suite, SuiteTask
from experiential.llm.metered import Meter, Spent
from experiential.rollout import (
    Episode,
    Job,
    Rollout,
    Task,
    episode_seed,
    make_env,
    world_count,
)
from experiential.types import Condition, Record, Trajectory

MakeActor = Callable[[], ActorAgent | Player]
"""Builds the agent of a slot."""
OF_THE_MODEL = (NoAnswerError, ContextError)
"""Errors by which a model has failed an episode itself: that is a result, and not played again."""
OUTAGES = 3
"""Episodes in a row that an outage of the server may fail before the run stops; or one per slot."""


@dataclass(frozen=True)
class Plan:
    """Say how a suite is played."""

    episodes: int | None = None
    """Of each task and arm; None: all of an official set, else 100. Fewer where an environment
    lists fewer worlds than needed.
    """
    visits: int = 1
    """Episodes in each world."""
    seed: int = 0
    split: str | None = None
    """None: each task's own."""
    slots: int = 1
    """Episodes at once."""
    search_and_ask: int = 0
    """Calls that a guided episode may make."""
    seat: Seat | None = None
    """Builds an agent that needs the environment itself; None for all other agents."""

    def jobs(self, task: SuiteTask, worlds: int | None, condition: Any) -> list[Job]:
        """Return the episodes of a task, visit by visit.

        They follow from the name of the task and the seed alone, so that a task is played alike in
        every suite and under every arm. ``worlds`` is None where its environment lists none.
        """
        named = zlib.crc32(task.name.encode())
        wanted = max(1, (self.episodes or task.worlds or 100) // self.visits)
        drawn: list[int] = list(range(wanted))
        if worlds is not None:
            shuffled = np.random.default_rng([self.seed, named]).permutation(worlds)
            drawn = shuffled[:wanted].tolist()
        jobs: list[Job] = []
        for visit in range(self.visits):
            for world in drawn:
                seed = episode_seed(self.seed, named, world, visit)
                options = {} if worlds is None else {"world": world}
                played = Task(seed, f"{world}.{visit}", options)
                jobs.append(Job(played, condition, sampling_seed=seed))
        return jobs


@dataclass
class SuiteBank:
    """Say which bank the arms of a suite play with.

    The arm ``on`` lets the bank grow; ``frozen``, ``shuffled`` and ``placebo`` read it as it is.
    """

    path: str
    namespace: str = "default"
    embedder: str | None = None
    extractor: Any | None = None
    """Distils the finished episodes of ``on``."""
    meter: Meter = field(default_factory=Meter)
    """Counts what the extractor generates."""
    snapshot: Path | None = None
    """A copy that is read in place of a bank that grows meanwhile."""

    def open(self, *, writing: bool = False) -> FolderBank:
        """Open the bank to read it, or to let it grow.

        Raises:
            ConfigError: it cannot be opened.
        """
        path = self.path if writing or self.snapshot is None else self.snapshot
        options = {"namespace": self.namespace, "embedder": self.embedder}
        try:
            return FolderBank(path, read_only=not writing, **cast("Any", options))
        except BankError as error:
            hint = "; with --learn, and the arms off and on alone, a bank is made where none is"
            raise ConfigError(f"{error}{'' if writing else hint}") from error

    @contextmanager
    def opened_arm(self, arm: Arm, seed: int, tokenizer: Any | None) -> Generator[ArmBank]:
        """Open the bank of an arm until the end of the block; ``tokenizer`` is the actor's."""
        learns = arm == "on"
        with self.open(writing=learns) as bank:
            manager = ExperienceManager(
                bank,
                self.extractor if learns else None,
                share_queue=False,
                merge_every=0,
                seed=seed,
                retrieval={"strategy": "diverse"},  # as in training and in earlier results
            )
            shown: ManagerLike = manager
            if arm == "shuffled":
                shown = Shuffled(manager, seed)
            elif arm == "placebo":
                shown = Placebo(manager, seed, tokenizer)
            with manager:
                yield ArmBank(shown, manager, len(bank), Condition.GUIDED)


class SuiteResults(Record):
    """Hold what was played of a suite so far, under the settings that decide what is played."""

    settings: dict[str, Any]
    cells: tuple[SuiteCell, ...] = ()
    report: dict[str, Any] = {}
    """Rates, means and differences of the cells, as `report` makes them."""


@dataclass(frozen=True)
class PlannedCell:
    """Hold the episodes of one task under one arm."""

    task: SuiteTask
    arm: Arm
    jobs: tuple[Job, ...]

    def key(self, job: Job) -> tuple[Any, ...]:
        """Return by what the episode of a job is known in a log."""
        return self.task.name, self.arm, *world_and_visit(job)

    def missing(self, log: PlayLog) -> list[Job]:
        """Return the jobs that the log holds no result of."""
        finished = log.finished
        return [job for job in self.jobs if self.key(job) not in finished]


def plan_cells(suite: Suite, plan: Plan, arms: Sequence[Arm]) -> list[PlannedCell]:
    """Return the cells of a suite in the order in which they are played: task by task.

    Raises:
        ConfigError: an environment cannot be made.
    """
    cells: list[PlannedCell] = []
    for task in suite.tasks:
        kwargs = task.kwargs | {"split": plan.split or task.split}
        try:
            worlds = world_count(task.id, kwargs)
        except ExperientialError:
            raise
        except Exception as error:  # an environment of another package may raise anything
            raise ConfigError(
                f"Expected to make {task.id} with {kwargs}, got {type(error).__name__}: {error}"
            ) from error
        for arm in arms:
            condition = Condition.FREE if arm == "off" else Condition.GUIDED
            cells.append(PlannedCell(task, arm, tuple(plan.jobs(task, worlds, condition))))
    return cells


async def play_cell(
    cell: PlannedCell,
    plan: Plan,
    make_actor: MakeActor,
    bank: SuiteBank | None,
    log: PlayLog,
    played: Callable[[PlayedEpisode], object] = lambda one: None,
) -> None:
    """Play what is missing of a cell, and log each episode as it ends.

    ``played`` is called with each episode after it is logged.

    Raises:
        BackendError: an outage of the server failed `OUTAGES` episodes in a row, or one per slot.
        BudgetError: the budget of a backend is spent.
        ConfigError: the bank cannot be opened.
    """
    jobs, task = cell.missing(log), cell.task
    if not jobs:
        return
    recorder = Recorder(cell, log, max(OUTAGES, plan.slots), played)
    notes = recorder.notes
    settings = EnvSettings(
        id=task.id,
        kwargs=task.kwargs,
        eval={"split": plan.split or task.split},
        max_turns=task.turns,
    )
    with ExitStack() as stack:
        arm, meter = ArmBank(NoBank()), Meter()
        if cell.arm != "off":
            if bank is None:
                raise ValueError(f"Expected a bank for the arm {cell.arm!r}, got None")
            tokenizer, meter = make_actor().llm.tokenizer, bank.meter
            arm = stack.enter_context(bank.opened_arm(cell.arm, plan.seed, tokenizer))
        stack.callback(recorder.log_stopped, jobs)
        rollout = Rollout(
            settings,
            settings.eval,
            arm.shown,
            cast("Callable[[], ActorAgent]", lambda: Recorded(make_actor(), notes)),
            slots=plan.slots,
            search_and_ask=plan.search_and_ask,
            make_env=lambda env, given: Watched(make_env(env, given), notes, plan.seat),
        )
        stack.enter_context(closing(rollout))
        # A bank that grows is held still while the slots play one episode each: which of them ends
        # first changes nothing.
        size = plan.slots if cell.arm == "on" else len(jobs)
        for start in range(0, len(jobs), size):
            held, before = entries_of(arm), meter.spent()
            try:
                async with arm.visit():
                    await rollout.play(jobs[start : start + size], recorder.finished)
            finally:
                if arm.manager is not None:
                    grown = (held, entries_of(arm))
                    spent = meter.spent() - before
                    log.append(
                        BankChange(task=task.name, arm=cell.arm, entries=grown, extractor=spent)
                    )


def entries_of(arm: ArmBank) -> int:
    """Return how many entries the bank of an arm has."""
    return 0 if arm.manager is None else len(arm.manager.bank)


class Recorder:
    """Log the episodes of a cell as they end, from what `Recorded` and `Watched` noted of them.

    Args:
        cell: what is played.
        log: where the episodes go.
        outages: episodes in a row that an outage of the server may fail before the run stops.
        played: called with each episode after it is logged.

    Attributes:
        notes: of the episodes that are being played, by seed.
    """

    def __init__(
        self,
        cell: PlannedCell,
        log: PlayLog,
        outages: int,
        played: Callable[[PlayedEpisode], object],
    ) -> None:
        self.notes: dict[int | None, Notes] = {}
        self._cell, self._log, self._played = cell, log, played
        self._most, self._outages = outages, 0

    def finished(self, episode: Episode) -> None:
        """Log an episode.

        Raises:
            BackendError: the server seems to be down.
        """
        job = cast("Job", episode.job)
        noted = self.notes.pop(job.sampling_seed)
        one = self._record(job, episode.trajectory, noted)
        self._log.append(one)
        self._played(one)
        out = isinstance(noted.error, BackendError) and noted.error.outage is not None
        self._outages = self._outages + 1 if out else 0
        if self._outages >= self._most:
            raise BackendError(
                f"Expected a server that answers, got {self._outages} episodes in a row that it"
                f" failed: {noted.error}"
            )

    def log_stopped(self, jobs: Sequence[Job]) -> None:
        """Log what those of the jobs took that the end of the run has stopped."""
        ended = Trajectory(task="", error="the run was stopped")
        for job in jobs:
            noted = self.notes.pop(job.sampling_seed, None)
            if noted is not None and noted.spent.requests:
                one = self._record(job, ended, noted)
                self._log.append(one.model_copy(update={"stopped": True}))

    def _record(self, job: Job, trajectory: Trajectory, noted: Notes) -> PlayedEpisode:
        failed = trajectory.error is not None
        again = failed and not isinstance(noted.error, OF_THE_MODEL)
        one = played_episode(self._cell.task, self._cell.arm, job, trajectory, noted)
        return one.model_copy(update={"again": again})


def world_and_visit(job: Job) -> tuple[int, int]:
    """Return the index of a job's world and the number of the visit to it."""
    world, _, visit = job.task.group.partition(".")
    return int(world), int(visit)


def played_episode(
    task: SuiteTask, arm: str, job: Job, trajectory: Trajectory, noted: Notes
) -> PlayedEpisode:
    """Return what a log keeps of an episode."""
    world, visit = world_and_visit(job)
    failed = trajectory.error is not None
    return PlayedEpisode(
        task=task.name,
        arm=arm,
        world=world,
        visit=visit,
        seed=job.task.seed,
        task_id=trajectory.task_id,
        success=bool(trajectory.success),
        reward=task.failure if failed else trajectory.reward,
        turns=len(noted.turns if failed else trajectory.turns),
        prompt_tokens=noted.spent.prompt_tokens,
        response_tokens=noted.spent.generated_tokens,
        seconds=noted.seconds,
        shown=len(trajectory.uses),
        error=trajectory.error,
        spent=noted.spent,
        transcript=tuple(noted.turns),
        end=noted.end,
        retrieved=tuple(noted.retrieved),
    )


def results_of(
    log: PlayLog, cells: Sequence[PlannedCell], settings: dict[str, Any]
) -> SuiteResults:
    """Return what a log holds of the cells, and its report; those without episodes are left out."""
    found: list[SuiteCell] = []
    for cell in cells:
        name, arm = cell.task.name, cell.arm
        keys = [cell.key(job) for job in cell.jobs]
        episodes = tuple(log.episodes[key] for key in keys if key in log.episodes)
        changes = [one for one in log.changes if (one.task, one.arm) == (name, arm)]
        entries = (changes[0].entries[0], changes[-1].entries[1]) if changes else None
        if episodes:
            found.append(
                SuiteCell(
                    task=name,
                    arm=arm,
                    episodes=episodes,
                    entries=entries,
                    extractor=sum((one.extractor for one in changes), Spent()),
                    actor=log.spent.get((name, arm), Spent()),
                )
            )
    shown = report(found, settings.get("tasks", ()))
    return SuiteResults(settings=settings, cells=tuple(found), report=shown)
