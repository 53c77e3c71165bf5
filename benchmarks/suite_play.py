"""A suite played: each task under each arm, the same worlds and seeds in both."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import gymnasium as gym
import numpy as np
from pydantic import Field

from benchmarks.players import Watched
from benchmarks.suites import SuiteTask
from experiential.agents.actor import ActorAgent
from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.config import EnvSettings
from experiential.errors import BankError, ConfigError
from experiential.evaluation.arms import ArmBank
from experiential.llm.metered import Meter, Spent
from experiential.rollout.rollout import Episode, Job, NoBank, Rollout, Task, make_env
from experiential.rollout.tasks import episode_seed, world_count
from experiential.types import Record

ArmName = Literal["off", "frozen", "on"]
"""As in an evaluation: no bank; a bank that is only read; a bank that grows."""


class PlayedEpisode(Record):
    """One episode.

    Attributes:
        world: index of its world; where the environment lists none, the number of its seed.
        visit: which visit to that world it was, from 0.
        task_id: name of the world, as the environment tells it.
        success: whether the task was done.
        reward: sum of rewards; where the episode failed for a technical reason, the least that the
            task gives.
        turns: steps of the environment.
        prompt_tokens: of all prompts, as the model was given them; 0 where the backend shows no
            token ids.
        response_tokens: of all responses; 0 likewise.
        seconds: wall clock from the reset to the end of the last step, the agent's time included.
        shown: entries of the bank that reached the agent.
        error: the reason of a technical failure.
    """

    world: int
    visit: int
    task_id: str
    success: bool
    reward: float
    turns: int
    prompt_tokens: int
    response_tokens: int
    seconds: float
    shown: int
    error: str | None = None


class Cell(Record):
    """One task under one arm.

    Attributes:
        task: name of the task.
        arm: which experience was shown.
        episodes: in the order of worlds and visits.
        entries: entries of the bank at the beginning and at the end; None for ``off``.
        extractor: what distillation generated.
    """

    task: str
    arm: ArmName
    episodes: tuple[PlayedEpisode, ...] = Field(min_length=1)
    entries: tuple[int, int] | None = None
    extractor: Spent = Field(default_factory=Spent)


@dataclass(frozen=True)
class Plan:
    """How a suite is played.

    Attributes:
        episodes: of each task and arm; where an environment lists fewer worlds than are needed,
            fewer.
        visits: episodes in each world.
        seed: of worlds, episodes and sampling.
        split: of the environments.
        slots: episodes at once.
        search_and_ask: calls that a guided episode may make.
        oracle: the agent is the oracle.
    """

    episodes: int = 100
    visits: int = 1
    seed: int = 0
    split: str = "eval"
    slots: int = 1
    search_and_ask: int = 0
    oracle: bool = False

    def jobs(self, task: SuiteTask, worlds: int | None, condition: Any) -> list[Job]:
        """The episodes of a task, visit by visit, from the name of the task and the seed alone."""
        named = zlib.crc32(task.name.encode())
        wanted = max(1, self.episodes // self.visits)
        drawn = (
            range(wanted)
            if worlds is None
            else np.random.default_rng([self.seed, named]).permutation(worlds)[:wanted].tolist()
        )
        return [
            self._job(named, int(world), visit, worlds is not None, condition)
            for visit in range(self.visits)
            for world in drawn
        ]

    def _job(self, named: int, world: int, visit: int, listed: bool, condition: Any) -> Job:
        seed = episode_seed(self.seed, named, world, visit)
        return Job(
            Task(seed, f"{world}.{visit}", {"world": world} if listed else {}),
            condition,
            sampling_seed=seed,
        )


@dataclass
class Experience:
    """A bank and how an arm meets it.

    Attributes:
        path: its folder or address.
        namespace: inside it.
        embedder: for a bank that is made now; None for the default.
        extractor: distils finished episodes, which lets the bank grow; None only reads it.
        meter: counts what the extractor generates.
    """

    path: str
    namespace: str = "default"
    embedder: str | None = None
    extractor: Any | None = None
    meter: Meter = field(default_factory=Meter)

    @property
    def arm(self) -> ArmName:
        """What an arm with this bank is called."""
        return "frozen" if self.extractor is None else "on"

    def open(self) -> ExperienceBank:
        """The bank, for reading alone where nothing distils.

        Raises:
            ConfigError: it cannot be opened.
        """
        try:
            return ExperienceBank(
                self.path,
                namespace=self.namespace,
                embedder=self.embedder,
                read_only=self.extractor is None,
            )
        except BankError as error:
            raise ConfigError(
                f"{error}; with --learn a bank is made where none is"
                if self.extractor is None
                else str(error)
            ) from error


async def play_cell(
    task: SuiteTask, plan: Plan, make_actor: Callable[[], Any], experience: Experience | None
) -> Cell:
    """One task under one arm.

    Args:
        task: what is played.
        plan: how.
        make_actor: builds an ``ActorAgent`` or a `Player`.
        experience: the bank; None plays without one.

    Raises:
        ConfigError: the environment or the bank cannot be opened.
    """
    if experience is None:
        return Cell(
            task=task.name,
            arm="off",
            episodes=await _episodes(task, plan, make_actor, ArmBank(NoBank()), 0),
        )
    before = experience.meter.spent()
    with (
        experience.open() as bank,
        ExperienceManager(bank, experience.extractor, merge_every=0, seed=plan.seed) as manager,
    ):
        entries = len(bank)
        at_once = plan.slots if experience.extractor is not None else 0
        episodes = await _episodes(
            task, plan, make_actor, ArmBank(manager, manager, entries), at_once
        )
        told = (entries, len(bank))
    return Cell(
        task=task.name,
        arm=experience.arm,
        episodes=episodes,
        entries=told,
        extractor=experience.meter.spent() - before,
    )


async def _episodes(
    task: SuiteTask, plan: Plan, make_actor: Callable[[], Any], opened: ArmBank, at_once: int
) -> tuple[PlayedEpisode, ...]:
    """Play and settle ``at_once`` episodes at a time, so that what one is shown does not depend on who ends first; 0 for all at once."""
    seconds: dict[int | None, float] = {}
    settings = EnvSettings(
        id=task.id, kwargs=task.kwargs, eval={"split": plan.split}, max_turns=task.turns
    )
    jobs = plan.jobs(task, world_count(task.id, task.kwargs | settings.eval), opened.condition)

    def watched(settings: EnvSettings, kwargs: dict[str, Any]) -> gym.Env[str, str]:
        return Watched(make_env(settings, kwargs), seconds, oracle=plan.oracle)

    rollout = Rollout(
        settings, settings.eval, opened.shown, cast("Callable[[], ActorAgent]", make_actor),
        slots=plan.slots, search_and_ask=plan.search_and_ask, make_env=watched,
    )  # fmt: skip
    played: list[Episode] = []
    try:
        for part in _parts(jobs, at_once or len(jobs)):
            opened.hold()
            played += await rollout.play(part)
            await opened.settle()
    finally:
        rollout.close()
    return tuple(
        _told(task, job, episode, seconds) for job, episode in zip(jobs, played, strict=True)
    )


def _parts(jobs: Sequence[Job], size: int) -> list[Sequence[Job]]:
    return [jobs[start : start + size] for start in range(0, len(jobs), size)]


def _told(
    task: SuiteTask, job: Job, episode: Episode, seconds: dict[int | None, float]
) -> PlayedEpisode:
    trajectory, (world, _, visit) = episode.trajectory, job.task.group.partition(".")
    return PlayedEpisode(
        world=int(world),
        visit=int(visit),
        task_id=trajectory.task_id,
        success=trajectory.success,
        reward=trajectory.reward if trajectory.error is None else task.failure,
        turns=len(trajectory.turns),
        prompt_tokens=sum(len(one.prompt_ids) for one in episode.generations),
        response_tokens=sum(len(one.response_ids) for one in episode.generations),
        seconds=seconds.get(job.task.seed, 0.0),
        shown=len(trajectory.uses),
        error=trajectory.error,
    )
