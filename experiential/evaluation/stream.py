"""Play streams: tasks in a seeded order, while a memory grows episode by episode.

A stream belongs to one arm (a memory), one order and one task, its *source*. With ``transfer`` it
goes on, when the memory has seen its source, through the other tasks without learning (EvoMemBench,
arXiv 2605.18421: in-environment and cross-environment evaluation).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import gymnasium as gym
import numpy as np

from experiential.agents.actor import ActorAgent
from experiential.bank.extractor import Extractor
from experiential.bank.index.embed import CachedEmbedder
from experiential.bank.manager_like import NoBank
from experiential.config import EnvSettings
from experiential.errors import BackendError
from experiential.evaluation.memories import FROZEN, NONE, MakeMemory, Memory, Setup
from experiential.evaluation.play_log import PlayedEpisode, PlayLog, Retrieved, read_log
from experiential.evaluation.players import Notes, Recorded, Seat, Watched
from experiential.evaluation.suite_play import OF_THE_MODEL, MakeActor, Plan, played_episode
from experiential.evaluation.suites import SuiteTask
from experiential.llm.metered import Meter
from experiential.rollout import Job, Rollout, make_env, world_count
from experiential.types import Condition, Trajectory, Turn

TRIES = 3
"""Times that an episode is begun before a failure of its environment is kept as its result."""


class Step(NamedTuple):
    """Name one episode of a stream."""

    task: SuiteTask
    job: Job
    learns: bool


class StreamKey(NamedTuple):
    """Name a stream."""

    arm: str
    order: int
    source: str


@dataclass(frozen=True)
class StreamPlan:
    """Say which streams are played."""

    tasks: tuple[SuiteTask, ...]
    arms: tuple[str, ...]
    episodes: int | None = None
    """Of each task; by default each world once per visit, or 100 where none are listed."""
    visits: int = 1
    """Episodes in each world."""
    orders: int = 3
    """Orders in which every arm meets the episodes."""
    seed: int = 0
    transfer: bool = False
    """Whether the memory of each task is then read, not written, in all others."""
    freeze_after: int | None = None
    """Episodes after which ``bank-frozen`` stops learning; half of them by default."""
    slots: int = 1
    """Streams at once."""
    seat: Seat | None = None
    """Builds an agent that needs the environment itself; None for all other agents."""

    def streams(self) -> list[StreamKey]:
        """Return the streams; without memory all orders are one, so it plays only the first."""
        return [
            StreamKey(arm, order, task.name)
            for task in self.tasks
            for order in range(self.orders)
            for arm in self.arms
            if arm != NONE or order == 0
        ]

    def steps(self, key: StreamKey) -> list[Step]:
        """Return the episodes of a stream in their order.

        World, seed and sampling seed of an episode do not depend on arm, order and source, so that
        arms can be compared episode by episode.
        """
        source = next(task for task in self.tasks if task.name == key.source)
        jobs = self._shuffled(source, key.order)
        limit = len(jobs)
        if key.arm == FROZEN:
            limit = len(jobs) // 2 if self.freeze_after is None else self.freeze_after
        steps = [Step(source, job, place < limit) for place, job in enumerate(jobs)]
        if self.transfer and key.arm != NONE:
            for task in self.tasks:
                if task is not source:
                    steps += [Step(task, job, False) for job in self._shuffled(task, key.order)]
        return steps

    def _shuffled(self, task: SuiteTask, order: int) -> list[Job]:
        worlds = world_count(task.id, task.arguments())
        episodes = self.episodes or (100 if worlds is None else worlds * self.visits)
        jobs = Plan(episodes, self.visits, self.seed).jobs(task, worlds, Condition.FREE)
        rng = np.random.default_rng([self.seed, zlib.crc32(task.name.encode()), order])
        return [jobs[place] for place in rng.permutation(len(jobs))]


@dataclass
class Tools:
    """Hold what streams are played with."""

    make_actor: MakeActor
    make_extractor: Callable[[Meter], Extractor]
    """Builds what distils in an arm with a bank; the meter counts its tokens."""
    memories: dict[str, MakeMemory]
    """By arm."""
    embedder: CachedEmbedder
    k: int = 3
    """Entries or past episodes that a memory recalls."""


@dataclass
class Recall:
    """Put what a memory recalls for a task before the agent, at the start of an episode."""

    memory: Memory
    advice: str = field(default="", init=False)
    """Of the episode begun last."""

    async def review(self, env: gym.Env[str, str], info: dict[str, Any]) -> dict[str, Any]:
        """Return the info of the reset with the advice."""
        task: str = env.get_wrapper_attr("log").episode.task
        self.advice = await asyncio.to_thread(self.memory.recall, task)
        return {**info, "experience_prompt": self.advice} if self.advice else info

    def shown(self) -> tuple[Retrieved, ...]:
        """Return what was put before the agent, for the log."""
        return (Retrieved(turn=0, id="", text=self.advice),) if self.advice else ()


async def play_streams(
    plan: StreamPlan,
    tools: Tools,
    log: PlayLog,
    ended: Callable[[PlayedEpisode], object] = lambda episode: None,
) -> None:
    """Play what the log lacks, ``plan.slots`` streams at once; call ``ended`` after each episode.

    Raises:
        BackendError: the agent or its model failed; the log keeps what was played before.
        ConfigError: an environment cannot be made.
    """
    done: dict[StreamKey, list[PlayedEpisode]] = {}
    for episode in read_log(log.path):
        if isinstance(episode, PlayedEpisode):
            done.setdefault(stream_of(episode), []).append(episode)
    waiting: Iterator[StreamKey] = iter(plan.streams())

    def keep(episode: PlayedEpisode) -> None:
        log.append(episode)
        ended(episode)

    async def work() -> None:
        for key in waiting:
            await play_stream(plan, key, tools, done.get(key, []), keep)

    workers = [asyncio.create_task(work()) for _ in range(plan.slots)]
    try:
        await asyncio.gather(*workers)
    finally:  # what ends one stream ends all
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def play_stream(
    plan: StreamPlan,
    key: StreamKey,
    tools: Tools,
    done: Sequence[PlayedEpisode],
    keep: Callable[[PlayedEpisode], object],
) -> None:
    """Play the rest of a stream, after its memory was brought to where it had been.

    ``keep`` is called with each episode when the memory has learned from it.
    """
    steps = plan.steps(key)
    if len(done) >= len(steps):
        return
    learning, notes = Meter(), dict[int | None, Notes]()
    with TemporaryDirectory(prefix="experiential-stream-") as scratch, ExitStack() as stack:
        extractor = tools.make_extractor(learning)
        setup = Setup(plan.seed + key.order, tools.k, Path(scratch), tools.embedder, extractor)
        memory = await asyncio.to_thread(tools.memories[key.arm], setup)
        stack.callback(getattr(memory, "close", lambda: None))
        await asyncio.to_thread(replay, memory, done)
        recall, left = Recall(memory), enumerate(steps[len(done) :], len(done))
        for task, stage in groupby(left, lambda numbered: numbered[1].task):
            # closed at the end of its task: the environments of the next one may be large
            with closing(opened(plan, task, tools, notes)) as rollout:
                rollout.critic = recall
                for position, step in stage:
                    before = learning.spent()
                    trajectory = await play_episode(rollout, step.job, notes)
                    noted = notes.pop(step.job.task.seed)
                    episode = logged(key, position, step, trajectory, noted, recall)
                    note = episode.note | await taken_in(memory, step, episode)
                    took = learning.spent() - before
                    note["memory"] = took.model_dump(exclude_defaults=True)
                    keep(episode.model_copy(update={"note": note}))


def logged(
    key: StreamKey,
    position: int,
    step: Step,
    trajectory: Trajectory,
    noted: Notes,
    recall: Recall,
) -> PlayedEpisode:
    """Return an episode as the log keeps it, before a memory has learned from it."""
    one = played_episode(step.task, key.arm, step.job, trajectory, noted)
    more = {
        "place": {"order": key.order, "source": key.source, "position": position},
        "shown": int(bool(recall.advice)),
        "retrieved": recall.shown(),
        "note": {"words": trajectory.task, "instance": trajectory.instance},
    }
    return one.model_copy(update=more)


async def taken_in(memory: Memory, step: Step, episode: PlayedEpisode) -> dict[str, Any]:
    """Let a memory learn from an episode, if it is to; return what the log notes of that."""
    learned, kept = step.learns and episode.error is None, None
    if learned:
        kept = await asyncio.to_thread(memory.learn, trajectory_of(episode))
    return {"learned": learned, "kept": kept}


def stream_of(episode: PlayedEpisode) -> StreamKey:
    """Return the stream that an episode is of."""
    place = episode.place
    return StreamKey(episode.arm, int(place["order"]), str(place["source"]))


def finished(plan: StreamPlan, episodes: Iterable[PlayedEpisode]) -> list[PlayedEpisode]:
    """Return the episodes of streams that are complete, of arms and orders outside the plan too."""
    found: dict[StreamKey, list[PlayedEpisode]] = {}
    for episode in episodes:
        found.setdefault(stream_of(episode), []).append(episode)
    whole = (played for key, played in found.items() if len(played) >= len(plan.steps(key)))
    return [episode for played in whole for episode in played]


def trajectory_of(episode: PlayedEpisode) -> Trajectory:
    """Return an episode as its memory learns from it, now and when a stream goes on."""
    after = [*(turn.observation for turn in episode.transcript[1:]), episode.end]
    key = stream_of(episode)
    return Trajectory(
        id=f"{key.arm}-{key.order}-{key.source}-{episode.place['position']}",
        task=episode.note["words"],
        task_id=episode.task_id,
        instance=episode.note["instance"],
        group=f"{episode.world}.{episode.visit}",
        turns=tuple(
            Turn(
                observation=turn.observation,
                action=turn.action,
                reward=turn.reward or 0.0,
                feedback=feedback,
            )
            for turn, feedback in zip(episode.transcript, after, strict=False)
        ),
        reward=episode.reward,
        success=episode.success,
        seed=episode.seed,
        condition=Condition.FREE,
    )


def replay(memory: Memory, episodes: Iterable[PlayedEpisode]) -> None:
    """Bring a memory to the state that it had after these episodes; nothing is played."""
    relearn: Callable[[Trajectory, Any], object] | None = getattr(memory, "relearn", None)
    for episode in episodes:
        memory.recall(episode.note["words"])
        if episode.note["learned"] and relearn is not None:
            relearn(trajectory_of(episode), episode.note["kept"])
        elif episode.note["learned"]:
            memory.learn(trajectory_of(episode))


def opened(
    plan: StreamPlan,
    task: SuiteTask,
    tools: Tools,
    notes: dict[int | None, Notes],
) -> Rollout:
    """Return what plays the episodes of a task one by one."""
    settings = EnvSettings(
        id=task.id, kwargs=task.kwargs, eval={"split": task.split}, max_turns=task.turns
    )
    return Rollout(
        settings,
        settings.eval,
        NoBank(),
        lambda: cast("ActorAgent", Recorded(tools.make_actor(), notes)),
        slots=1,
        make_env=lambda env, given: Watched(make_env(env, given), notes, plan.seat),
    )


async def play_episode(rollout: Rollout, job: Job, notes: dict[int | None, Notes]) -> Trajectory:
    """Play one episode, up to `TRIES` times where its environment fails.

    What the model itself fails, `OF_THE_MODEL`, is a result.

    Raises:
        BackendError: the agent or its model failed otherwise.
    """
    trajectory = (await rollout.play([job]))[0].trajectory
    for _ in range(TRIES - 1):
        if trajectory.error is None or trajectory.error.startswith("backend:"):
            break
        trajectory = (await rollout.play([job]))[0].trajectory
    by_agent = trajectory.error is not None and trajectory.error.startswith("backend:")
    if by_agent and not isinstance(notes[job.task.seed].error, OF_THE_MODEL):
        raise BackendError(str(trajectory.error).removeprefix("backend: "))
    return trajectory
