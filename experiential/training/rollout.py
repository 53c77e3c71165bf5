"""Rollouts: many episodes at once, each an actor in a wrapped environment, each giving a trajectory and its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym

from experiential.agents.actor import ActorAgent
from experiential.config import EnvSettings
from experiential.errors import BackendError, EnvError
from experiential.training.awaited import AwaitedEnv, Start, Step
from experiential.training.runtime import Sample, sample_from_generation
from experiential.types import Answer, Condition, Generation, Trajectory, Use
from experiential.wrappers.experience import ExperienceWrapper
from experiential.wrappers.search_and_ask import SearchAndAskWrapper

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """What one episode starts from; members of a group share it."""

    seed: int
    group: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to play: a task, its condition and the seed of its sampling."""

    task: Task
    condition: Condition
    sampling_seed: int


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished episode with the responses that made it."""

    trajectory: Trajectory
    generations: tuple[Generation, ...]


class NoBank:
    """Stands where a manager would when a recipe has no bank: finds nothing, keeps nothing."""

    def search(self, query: Any, *, k: int | None = None, exclude_instance: Any = None, episode: Any = "") -> Any:
        """No hits."""
        return [] if isinstance(query, str) else [[] for _ in query]

    def submit(self, trajectory: Trajectory) -> str | None:
        """Nothing is queued."""
        return None

    def ask(self, query: str, *, k: int = 1, episode: str = "", turn: int = 0, exclude_instance: str | None = None) -> Answer:
        """Nothing to say."""
        return Answer()

    def close(self) -> None:
        """Nothing to close."""


MakeEnv = Callable[[EnvSettings, dict[str, Any]], gym.Env[str, str]]
"""Builds the environment that the wrappers stand around, from the settings and further arguments of ``gymnasium.make``."""


def make_env(settings: EnvSettings, kwargs: dict[str, Any]) -> gym.Env[str, str]:
    """The environment that settings name, in this process; ``kwargs`` override those of the settings."""
    kwargs = settings.kwargs | kwargs
    return gym.make(settings.id, max_episode_steps=settings.max_turns, disable_env_checker=True, **kwargs)


class Slot(NamedTuple):
    """One place of a rollout: the wrapped environment, what awaits the innermost one, and the actor."""

    env: gym.Env[str, str]
    inner: AwaitedEnv
    actor: ActorAgent


class Rollout:
    """Slots of environment and actor that play episodes concurrently.

    Environment calls run in threads, so a slow environment or a bank query never holds up the others; the backend
    batches the actors' requests. An environment with ``areset`` and ``astep`` is awaited instead and holds no thread, so that
    episodes at once are not bounded by threads.

    Args:
        settings: which environment.
        kwargs: arguments of ``gymnasium.make`` beside ``settings.kwargs``.
        manager: an ``ExperienceManager`` or `NoBank`.
        make_actor: builds one actor per slot.
        slots: episodes played at once.
        search_and_ask: calls allowed per guided episode; 0 leaves the tool out.
        make_env: builds the innermost environments; in this process by default.
    """

    def __init__(
        self,
        settings: EnvSettings,
        kwargs: dict[str, Any],
        manager: Any,
        make_actor: Callable[[], ActorAgent],
        *,
        slots: int,
        search_and_ask: int = 0,
        make_env: MakeEnv = make_env,
    ) -> None:
        self._settings, self._kwargs, self._manager, self._make_actor = settings, kwargs, manager, make_actor
        self._make_env = make_env
        self._limit, self._calls = slots, search_and_ask
        self._threads = ThreadPoolExecutor(max_workers=min(slots, 32), thread_name_prefix="env")
        self._slots: list[Slot] = []

    async def play(self, jobs: Sequence[Job]) -> list[Episode]:
        """Play all jobs, at most ``slots`` at a time; a failed episode comes back with its reason as an error."""
        while len(self._slots) < min(self._limit, len(jobs)):
            self._slots.append(self._make_slot())
        free: asyncio.Queue[Slot] = asyncio.Queue()
        for slot in self._slots:
            free.put_nowait(slot)

        async def one(job: Job) -> Episode:
            slot = await free.get()
            try:
                return await self._episode(slot, job)
            finally:
                free.put_nowait(slot)

        return list(await asyncio.gather(*(one(job) for job in jobs)))

    def close(self) -> None:
        """Close environments and threads."""
        for slot in self._slots:
            slot.env.close()
        self._slots.clear()
        self._threads.shutdown(wait=False)

    def _make_slot(self) -> Slot:
        inner = AwaitedEnv(self._make_env(self._settings, self._kwargs))
        env: gym.Env[str, str] = ExperienceWrapper(inner, self._manager, inject="system")
        return Slot(SearchAndAskWrapper(env, max_calls=self._calls) if self._calls else env, inner, self._make_actor())

    async def _episode(self, slot: Slot, job: Job) -> Episode:
        info: dict[str, Any] = {}
        try:
            slot.actor.reset(seed=job.sampling_seed)
            observation, info = await self._reset(slot, job)
            done = False
            while not done:
                action = await slot.actor.aact(observation, info)
                observation, _, terminated, truncated, info = await self._step(slot, action)
                done = terminated or truncated
        except (BackendError, EnvError) as error:
            reason = f"{'env' if isinstance(error, EnvError) else 'backend'}: {error}"
            failed = Trajectory(task=str(info.get("task", "")), group=job.task.group, condition=job.condition, error=reason)
            return Episode(failed, ())
        return Episode(slot.env.get_wrapper_attr("last_trajectory"), tuple(slot.actor.generations))

    async def _reset(self, slot: Slot, job: Job) -> Start:
        options = job.task.options | {
            "guided": job.condition is Condition.GUIDED,
            "group": job.task.group,
            "policy_version": slot.actor.llm.version,
        }
        await slot.inner.await_reset(seed=job.task.seed, options=dict(job.task.options))
        return await self._in_thread(lambda: slot.env.reset(seed=job.task.seed, options=options))

    async def _step(self, slot: Slot, action: str) -> Step:
        if not (isinstance(slot.env, SearchAndAskWrapper) and slot.env.query_of(action) is not None):
            await slot.inner.await_step(action)  # a call to the bank does not step the environment
        observation, reward, terminated, truncated, info = await self._in_thread(partial(slot.env.step, action))
        return observation, float(reward), terminated, truncated, info

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def guided_members(group_size: int, guided: str) -> list[Condition]:
    """Conditions of a group's members: the first ceil(K/2) guided under ``half``, or all, or none."""
    share = {"all": group_size, "none": 0, "half": (group_size + 1) // 2}[guided]
    return [Condition.GUIDED] * share + [Condition.FREE] * (group_size - share)


def trajectory_samples(generations: Sequence[Generation], advantage: float, weight: float) -> list[Sample]:
    """Samples that train on one trajectory's responses, its weight shared in proportion to their trained tokens.

    Responses whose prompt continues the previous prompt and response token by token become one sample, so that a
    conversation kept whole costs one forward pass and has one sequence-level ratio.
    """
    chained: list[Sample] = []
    for generation in generations:
        sample = sample_from_generation(generation, advantage, weight=weight)
        if chained and _continues(chained[-1], sample):
            sample = _joined(chained.pop(), sample)
        chained.append(sample)
    chained = [s for s in chained if s.positions]
    total = sum(len(s.positions) for s in chained)
    return [_reweighted(s, weight * len(s.positions) / total) for s in chained]


def credited_uses(trajectory: Trajectory) -> list[Use]:
    """The uses of a trajectory that count: none when the episode failed for a technical reason."""
    return list(trajectory.uses) if trajectory.error is None else []


def _continues(first: Sample, second: Sample) -> bool:
    """Whether both can be one sequence: a schema rules one response only, so samples that have one stay apart."""
    return first.json_schema is None and second.json_schema is None and second.tokens[: len(first.tokens)] == first.tokens


def _joined(first: Sample, second: Sample) -> Sample:
    return Sample(
        tokens=second.tokens,
        positions=first.positions + second.positions,
        logprobs=first.logprobs + second.logprobs,
        advantages=first.advantages + second.advantages,
        allowed=first.allowed + second.allowed,
        weight=first.weight,
        temperature=first.temperature,
        policy_version=min(first.policy_version, second.policy_version),
    )


def _reweighted(sample: Sample, weight: float) -> Sample:
    return replace(sample, weight=weight)
