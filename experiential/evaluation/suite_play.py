"""Play a suite: each task without a bank and with one, on the same worlds and seeds."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from experiential.agents.actor import ActorAgent
from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.manager_like import NoBank
from experiential.config import EnvSettings
from experiential.errors import BankError, ConfigError, ExperientialError
from experiential.evaluation.arms import ArmBank
from experiential.evaluation.players import Player, Seat, Watched
from experiential.evaluation.suite_report import PlayedEpisode, SuiteCell, report
from experiential.evaluation.suites import Suite, SuiteTask
from experiential.llm.metered import Meter
from experiential.rollout import (
    Episode,
    Job,
    Rollout,
    Task,
    episode_seed,
    make_env,
    world_count,
)
from experiential.types import Condition, Record

MakeActor = Callable[[], ActorAgent | Player]
"""Builds the agent of a slot."""


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
    meter: Meter = field(default_factory=Meter)
    """Counts what the agent's language model generates."""

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
    """Say which bank the second arm of a suite plays with, and whether it grows."""

    path: str
    namespace: str = "default"
    embedder: str | None = None
    extractor: Any | None = None
    """Distils finished episodes, which lets the bank grow; None only reads it."""
    meter: Meter = field(default_factory=Meter)
    """Counts what the extractor generates."""

    @property
    def arm(self) -> Literal["frozen", "on"]:
        """Return the name of an arm with this bank."""
        return "frozen" if self.extractor is None else "on"

    def open(self) -> FolderBank:
        """Open the bank, read-only where nothing distils.

        Raises:
            ConfigError: it cannot be opened.
        """
        reading, options = self.extractor is None, {"namespace": self.namespace}
        try:
            return FolderBank(self.path, embedder=self.embedder, read_only=reading, **options)
        except BankError as error:
            hint = "; with --learn a bank is made where none is" if reading else ""
            raise ConfigError(f"{error}{hint}") from error


class SuiteResults(Record):
    """Hold what was played of a suite so far, under the settings that decide what is played."""

    settings: dict[str, Any]
    cells: tuple[SuiteCell, ...] = ()
    report: dict[str, Any] = {}
    """Rates, means and differences of the cells, as `report` makes them."""


async def play_suite(
    suite: Suite,
    plan: Plan,
    make_actor: MakeActor,
    bank: SuiteBank | None,
    done: SuiteResults,
    finished: Callable[[SuiteResults], object],
) -> SuiteResults:
    """Play the cells of a suite that are not done; each task without the bank first, then with it.

    ``finished`` is called with all results after each cell.
    """
    for task in suite.tasks:
        for one in (None,) if bank is None else (None, bank):
            arm = "off" if one is None else one.arm
            if any((cell.task, cell.arm) == (task.name, arm) for cell in done.cells):
                continue
            cells = (*done.cells, await play_cell(task, plan, make_actor, one))
            found = report(cells, done.settings.get("tasks", ()))
            done = done.model_copy(update={"cells": cells, "report": found})
            finished(done)
    return done


async def play_cell(
    task: SuiteTask, plan: Plan, make_actor: MakeActor, bank: SuiteBank | None
) -> SuiteCell:
    """Play one task under one arm, with a bank or without.

    Raises:
        ConfigError: the environment or the bank cannot be opened.
    """
    meter = Meter() if bank is None else bank.meter
    spent_before, seconds = meter.spent(), dict[int | None, float]()
    actor_before = plan.meter.spent()
    settings = EnvSettings(
        id=task.id,
        kwargs=task.kwargs,
        eval={"split": plan.split or task.split},
        max_turns=task.turns,
    )
    kwargs = task.kwargs | settings.eval
    with ExitStack() as stack:
        arm, entries = ArmBank(NoBank()), None
        if bank is not None:
            folder = stack.enter_context(bank.open())
            learning = ExperienceManager(
                folder,
                bank.extractor,
                share_queue=False,
                merge_every=0,
                seed=plan.seed,
                retrieval={"strategy": "diverse"},  # as in training and in earlier results
            )
            manager = stack.enter_context(learning)
            arm = ArmBank(manager, manager, len(folder), Condition.GUIDED)
        try:
            worlds = world_count(task.id, kwargs)
        except ExperientialError:
            raise
        except Exception as error:  # an environment of another package may raise anything
            raise ConfigError(
                f"Expected to make {task.id} with {kwargs}, got {type(error).__name__}: {error}"
            ) from error
        jobs = plan.jobs(task, worlds, arm.condition)
        rollout = Rollout(
            settings,
            settings.eval,
            arm.shown,
            cast("Callable[[], ActorAgent]", make_actor),
            slots=plan.slots,
            search_and_ask=plan.search_and_ask,
            make_env=lambda env, given: Watched(make_env(env, given), seconds, plan.seat),
        )
        stack.enter_context(closing(rollout))
        # A bank that grows is held still while the slots play one episode each: which of them ends
        # first changes nothing.
        size = plan.slots if bank is not None and bank.extractor is not None else len(jobs)
        played: list[Episode] = []
        for start in range(0, len(jobs), size):
            async with arm.visit():
                played += await rollout.play(jobs[start : start + size])
        if arm.manager is not None:
            entries = (arm.entries, len(arm.manager.bank))
    episodes: list[PlayedEpisode] = []
    for job, episode in zip(jobs, played, strict=True):
        trajectory, (world, _, visit) = episode.trajectory, job.task.group.partition(".")
        episodes.append(
            PlayedEpisode(
                world=int(world),
                visit=int(visit),
                task_id=trajectory.task_id,
                success=bool(trajectory.success),
                reward=trajectory.reward if trajectory.error is None else task.failure,
                turns=len(trajectory.turns),
                prompt_tokens=sum(
                    (one.usage and one.usage.prompt_tokens) or len(one.prompt_ids)
                    for one in episode.generations
                ),
                response_tokens=sum(
                    (one.usage and one.usage.completion_tokens) or len(one.response_ids)
                    for one in episode.generations
                ),
                seconds=seconds.get(job.task.seed, 0.0),
                shown=len(trajectory.uses),
                error=trajectory.error,
            )
        )
    return SuiteCell(
        task=task.name,
        arm="off" if bank is None else bank.arm,
        episodes=tuple(episodes),
        entries=entries,
        extractor=meter.spent() - spent_before,
        actor=plan.meter.spent() - actor_before,
    )
