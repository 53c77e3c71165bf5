"""Choose the tasks of a step and play many episodes at once, each a trajectory and its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal, Protocol, cast

import gymnasium as gym
import numpy as np

from experiential.agents.actor import ActorAgent
from experiential.config import EnvSettings
from experiential.envs.make import NO_BUILTINS, make
from experiential.errors import (
    BackendError,
    BudgetError,
    ConfigError,
    ContextError,
    EnvError,
    ExperientialError,
)
from experiential.llm.rounds import Rounds
from experiential.plugins import resolve
from experiential.sync import attempted
from experiential.types import Condition, Generation, Trajectory
from experiential.wrappers.experience import ExperienceWrapper, require_text
from experiential.wrappers.feedback import FeedbackWrapper, Shown
from experiential.wrappers.search_and_ask import SearchAndAskWrapper
from experiential.wrappers.text_observation import TextObservation

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """Define the start of an episode; members of a group share it."""

    seed: int
    group: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Job:
    """Describe one episode to play: a task, its condition and the seed of its sampling.

    Without a condition the manager decides whether the episode may see the bank.
    ``advice`` is a block that the actor sees in place of what the bank would give; ``attempt``
    counts the tries at one instance, from 1; ``distil`` says whether lessons are made of it.
    """

    task: Task
    condition: Condition | None
    sampling_seed: int
    advice: str | None = None
    attempt: int = 1
    distil: bool = True


@dataclass(frozen=True, slots=True)
class Episode:
    """Represent a finished episode with its responses.

    Attributes:
        generations: the actor's responses, in order.
        broken: its environment failed, so that it never finished.
        asked: per response, whether it asked the bank and so did not step the environment.
        outgrown: it was cut off where its next prompt no longer fitted the model's context.
    """

    trajectory: Trajectory
    generations: tuple[Generation, ...]
    broken: bool = False
    asked: tuple[bool, ...] = ()
    job: Job | None = None
    outgrown: bool = False

    @property
    def attempt(self) -> int:
        """Return which try at its instance it is, from 1."""
        return 1 if self.job is None else self.job.attempt

    def acts(self) -> list[Generation]:
        """Return the responses that stepped the environment, one per turn of the trajectory."""
        asked = self.asked or (False,) * len(self.generations)
        return [one for one, call in zip(self.generations, asked, strict=True) if not call]


_WORLDS = 1  # third coordinate of the draws of worlds, so that they differ from those of seeds


@dataclass(frozen=True)
class TaskSource:
    """Draw the tasks of each step.

    An environment that lists ``worlds`` is asked for them by ``reset(options={"world": i})``, each
    world once per step while there are enough, and the same ones for ``settings.visits`` steps in a
    row; any other environment (``worlds`` is None) gets fresh seeds.
    """

    settings: EnvSettings
    worlds: int | None
    seed: int

    def tasks(self, step: int, groups: int) -> list[Task]:
        """Return the tasks of a step."""
        seeds = np.random.default_rng([self.seed, step]).integers(2**31 - 1, size=groups)
        options: list[dict[str, Any]] = [{} for _ in range(groups)]
        if self.worlds is not None:
            rng = np.random.default_rng([self.seed, step // self.settings.visits, _WORLDS])
            # the newest, of several at one step the last
            changes = sorted(self.settings.changes, key=lambda c: c.step)
            change = next((c for c in reversed(changes) if c.step <= step), None)
            active = min(change.worlds, self.worlds) if change else self.worlds
            rounds = [rng.permutation(active) for _ in range(-(-groups // active))]
            options = [
                {"world": int(w)} | ({"era": change.era} if change and w < change.changed else {})
                for w in np.concatenate(rounds)[:groups]
            ]
        return [
            Task(seed=int(s), group=f"{step}.{i}", options=o)
            for i, (s, o) in enumerate(zip(seeds, options, strict=True))
        ]

    def jobs(
        self, step: int, groups: int, group_size: int, guided: str, *, distil: bool = True
    ) -> list[Job]:
        """Return the episodes of a step: each task once per member of its group.

        ``guided`` says which members are: the first ceil(K/2) (``half``), ``all``, ``none``, or
        those that the manager chooses (``auto``). Without ``distil`` they are recorded only.
        """
        conditions: Sequence[Condition | None] = [None] * group_size
        if guided != "auto":
            share = {"all": group_size, "none": 0, "half": (group_size + 1) // 2}[guided]
            conditions = [
                Condition.GUIDED if k < share else Condition.FREE for k in range(group_size)
            ]
        return [
            Job(
                task,
                condition,
                sampling_seed=episode_seed(self.seed, step, g, k),
                distil=distil,
            )
            for g, task in enumerate(self.tasks(step, groups))
            for k, condition in enumerate(conditions)
        ]


def episode_seed(*parts: int) -> int:
    """Derive a sampling seed from the coordinates of an episode."""
    return int(np.random.SeedSequence([p & 0xFFFFFFFF for p in parts]).generate_state(1)[0])


def world_facts(env_id: str, kwargs: dict[str, Any]) -> tuple[int | None, float | None]:
    """Return the number of worlds of an environment, and the success rate of blind play.

    Each is None where the environment does not state it.
    """
    env = make(env_id, **kwargs)
    worlds = getattr(env.unwrapped, "worlds", None)
    chance = getattr(env.unwrapped, "chance", None)
    env.close()
    return None if worlds is None else len(worlds), chance


def world_count(env_id: str, kwargs: dict[str, Any]) -> int | None:
    """Return the number of worlds of an environment; None if it lists none."""
    return world_facts(env_id, kwargs)[0]


class Reviewer(Protocol):
    """Judge retrieved experience for an episode before its first action."""

    async def review(self, env: gym.Env[str, str], info: dict[str, Any]) -> dict[str, Any]:
        """Return the info of the reset with the advice that may be shown."""
        ...


MakeEnv = Callable[[EnvSettings, dict[str, Any]], gym.Env[str, str]]
"""Builds the innermost environment, from the settings and arguments of ``gymnasium.make``."""


def make_env(settings: EnvSettings, kwargs: dict[str, Any]) -> gym.Env[str, str]:
    """Make the environment of the settings, in this process; ``kwargs`` override theirs.

    Raises:
        ConfigError: it does not speak text, and ``settings.text`` is left out or does not fit.
    """
    env = make(settings.id, max_episode_steps=settings.max_turns, **(settings.kwargs | kwargs))
    return as_text(env, settings)


def as_text(env: gym.Env[Any, Any], settings: EnvSettings) -> gym.Env[str, str]:
    """Return an environment that speaks text, wrapped as ``settings.text`` says if it is given.

    Raises:
        ConfigError: it does not speak text, and ``settings.text`` is left out or does not fit.
    """
    text = settings.text
    if text is None:
        space: Any = getattr(env, "action_space", None)
        try:
            require_text(env.observation_space)
            if isinstance(space, gym.spaces.Discrete):
                raise TypeError("Expected actions in text, got numbers")
        except TypeError as error:
            raise ConfigError(
                f"Expected {settings.id!r} to speak text, got observations of"
                f" {env.observation_space} and actions of {space}; set env.text, to {{}} or to"
                " names for its actions (docs/quickstart.md)"
            ) from error
        return env
    render: Any = text.render and resolve("envs", text.render, NO_BUILTINS)
    success: Any = text.success
    if isinstance(success, str):
        success = resolve("envs", success, NO_BUILTINS)
    options: dict[str, Any] = {"success": success, "max_turns": settings.max_turns}
    try:
        return TextObservation(env, render, text.actions, text.instruction, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Expected env.text to fit {settings.id!r}: {error}") from error


@dataclass
class Slot:
    """Hold an actor and its environment, made for the first episode and replaced after it fails.

    ``stack`` is the wrapped environment and its innermost wrapper, which awaits the environment.
    """

    actor: ActorAgent
    stack: tuple[gym.Env[str, str], AwaitedEnv] | None = None


class Rollout:
    """Play episodes concurrently in slots of environment and actor.

    Environment calls run in threads, so a slow environment or a bank query never holds up the
    others. An environment with ``areset`` and ``astep`` is awaited instead and holds no thread.
    An episode that its environment or the backend fails is data: it comes back with the reason,
    and the next episode of its slot gets a new environment. A spent budget of the backend ends
    ``play`` with a `BudgetError`.

    Args:
        settings: which environment.
        kwargs: arguments of ``gymnasium.make`` beside ``settings.kwargs``.
        manager: an ``ExperienceManager`` or `NoBank`.
        make_actor: builds one actor per slot.
        slots: episodes played at once.
        search_and_ask: calls allowed per guided episode; 0 leaves the tool out.
        search_experience: the same for EvolveR's action; nothing is retrieved at the start then.
        make_env: builds the innermost environments, on the event loop; in this process by default.
        critic: reviews retrieved experience before an episode begins.
        in_order: play in `Rounds`, so that equal episodes come out whatever their speed.
        keeps_outgrown: keep an episode that outgrows the model's context up to there, as no
            success, if it has a response; without that it is one that the backend fails.

    Attributes:
        close_errors: how often closing an environment failed, by reason.
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
        search_experience: int = 0,
        make_env: MakeEnv = make_env,
        critic: Reviewer | None = None,
        in_order: bool = False,
        keeps_outgrown: bool = False,
    ) -> None:
        self._in_order, self._keeps_outgrown = in_order, keeps_outgrown
        self._rounds: Rounds | None = None  # of all actors, which share their model
        self._settings, self._kwargs = settings, kwargs
        self._manager, self._make_actor = manager, make_actor
        self._make_env, self.critic = make_env, critic
        self._limit, self._calls, self._lookups = slots, search_and_ask, search_experience
        self._threads = ThreadPoolExecutor(max_workers=min(slots, 32), thread_name_prefix="env")
        self._slots: list[Slot] = []
        self.close_errors: Counter[str] = Counter()

    async def play(
        self, jobs: Sequence[Job], finished: Callable[[Episode], object] | None = None
    ) -> list[Episode]:
        """Play all jobs, at most ``slots`` at a time; a failed episode carries its reason.

        ``finished`` is called with each episode as it ends; what it raises ends all others.
        """

        async def played(job: Job) -> Episode:
            episode = await self._episode(free, job)
            if finished is not None:
                finished(episode)
            return episode

        while len(self._slots) < min(self._limit, len(jobs)):
            self._slots.append(Slot(self._make_actor()))
            if self._in_order:
                actor = self._slots[-1].actor
                actor.llm = self._rounds = self._rounds or Rounds(actor.llm)
        free: asyncio.Queue[Slot] = asyncio.Queue()
        for slot in self._slots:
            free.put_nowait(slot)
        if self._rounds is not None:
            return await self._rounds.run([played(job) for job in jobs], most=len(self._slots))
        tasks = [asyncio.create_task(played(job)) for job in jobs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # what ends one episode with more than a reason ends the others too
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Wait for the calls under way, then close environments and threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for slot in self._slots:
            if slot.stack is not None:
                self._note_close(attempted(slot.stack[0].close))
        self._slots.clear()

    async def _episode(self, free: asyncio.Queue[Slot], job: Job) -> Episode:
        """Play one job in a free slot; an episode that fails technically has no turns."""
        run, threads = asyncio.get_running_loop().run_in_executor, self._threads
        task, slot = job.task, await free.get()
        actor, info, asked, outgrown = slot.actor, dict[str, Any](), list[bool](), False
        try:
            env, inner = slot.stack = slot.stack or self._make_stack()
            env.get_wrapper_attr("log").needs_outcome = True
            actor.reset(seed=job.sampling_seed)
            await inner.await_reset(seed=task.seed, options=dict(task.options))
            options = task.options | {
                "guided": None if job.condition is None else job.condition is Condition.GUIDED,
                "group": task.group,
                "distil": job.distil,
                "policy_version": actor.llm.version,
            }
            reset = partial(env.reset, seed=task.seed, options=options)
            observation, info = await run(threads, reset)
            if self.critic is not None:
                info = await self.critic.review(env, info)
            if job.advice is not None:
                info = {**info, "experience_prompt": job.advice}
            done = False
            while not done:
                try:
                    action = await actor.aact(observation, info)
                except ContextError:
                    if not self._keeps_outgrown or not actor.generations:
                        raise
                    finish = env.get_wrapper_attr("log").finish
                    await run(threads, partial(finish, {"success": False} | info))
                    outgrown = True
                    break
                step = partial(env.step, action)
                # A call to the bank does not step the environment.
                asks = isinstance(env, SearchAndAskWrapper) and env.query_of(action) is not None
                asked.append(asks)
                if not asks:
                    await inner.await_step(action)
                observation, _, terminated, truncated, info = await run(threads, step)
                done = terminated or truncated
        except BudgetError:  # every further episode would fail likewise
            raise
        except (BackendError, EnvError) as error:
            failed = isinstance(error, EnvError)
            if failed and slot.stack is not None:
                close, slot.stack = slot.stack[0].close, None
                self._note_close(await run(threads, lambda: attempted(close)))
            trajectory = Trajectory(
                task=str(info.get("task", "")),
                group=task.group,
                seed=task.seed,
                condition=job.condition or Condition.FREE,
                error=f"{'env' if failed else 'backend'}: {error}",
            )
            return Episode(trajectory, (), broken=failed and not error.lost, job=job)
        else:
            trajectory = env.get_wrapper_attr("log").last_trajectory
            played = tuple(actor.generations)
            calls = tuple(asked[: len(played)])  # a player that asks no model has no responses
            return Episode(trajectory, played, asked=calls, job=job, outgrown=outgrown)
        finally:
            free.put_nowait(slot)

    def _make_stack(self) -> tuple[gym.Env[str, str], AwaitedEnv]:
        with environment_errors():
            made = self._make_env(self._settings, self._kwargs)
        inner = AwaitedEnv(made, self._settings.reward_range)
        env = with_experience(
            inner,
            self._manager,
            feedback=self._settings.feedback,
            search_and_ask=self._calls,
            search_experience=self._lookups,
        )
        return env, inner

    def _note_close(self, failure: Exception | None) -> None:
        if isinstance(failure, EnvError):
            self.close_errors[shortened(str(failure))] += 1
            _log.warning("Closing an environment failed: %s", failure)
        elif failure is not None:
            raise failure


def with_experience(
    env: gym.Env[str, str],
    manager: Any,
    *,
    feedback: Shown | Literal["as_is"] = "as_is",
    search_and_ask: int = 0,
    search_experience: int = 0,
) -> gym.Env[str, str]:
    """Wrap an environment as in training and evaluation; the arguments are those of settings."""
    base = env if feedback == "as_is" else FeedbackWrapper(env, feedback)
    if search_experience:
        asking: dict[str, Any] = {"tag": "search_experience", "refine": False, "offer": True}
        asking["exclude_same_instance"] = True
        return SearchAndAskWrapper(base, bank=manager, max_calls=search_experience, **asking)
    options: dict[str, Any] = {"inject": "system", "exclude_same_instance": True, "k": None}
    advised: gym.Env[str, str] = ExperienceWrapper(base, manager, **options)
    if not search_and_ask:
        return advised
    return SearchAndAskWrapper(advised, max_calls=search_and_ask, offer=True)


def shortened(reason: str) -> str:
    r"""Return the first line of a reason, at most 200 characters of it and the place it names.

    >>> shortened("env: ValueError: no such room\nIt was torn down.")
    'env: ValueError: no such room'
    >>> shortened("env: ValueError: " + 300 * "x" + " (game.py:12)")[-15:]
    'xx (game.py:12)'
    """
    first = reason.strip().partition("\n")[0]
    place = re.search(r" \([^()]+:\d+\)$", first)
    end = len(first) if place is None else place.start()
    return first[:end][:200] + first[end:]


def failures(episodes: Sequence[Episode]) -> dict[str, int]:
    """Count these episodes' technical failures by shortened reason, the most frequent first."""
    reasons = [e.trajectory.error for e in episodes if e.trajectory.error is not None]
    return dict(Counter(map(shortened, reasons)).most_common())


def refuse_broken(episodes: Sequence[Episode]) -> None:
    """Raise ExperientialError when the environment failed every one of these episodes.

    Episodes whose environment went down with its process do not count: the next ones have another.
    """
    if not episodes or not all(episode.broken for episode in episodes):
        return
    frequent = list(failures(episodes).items())[:3]
    reasons = "; ".join(f"{reason} ({count} times)" for reason, count in frequent)
    raise ExperientialError(
        f"Expected an environment that can be played, got {len(episodes)} of {len(episodes)}"
        f" episodes that it failed: {reasons}; try it alone: gymnasium.make, reset and step"
    )


Start = tuple[str, dict[str, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]


class AwaitedEnv(gym.Wrapper[str, str, str, str]):
    """Return awaited answers from ``reset`` and ``step`` at once.

    This is the innermost wrapper of a stack that an event loop plays. Gymnasium's wrappers are
    synchronous, so one that waits for a remote environment holds a thread meanwhile. Here the loop
    first awaits ``await_reset`` or ``await_step``, and then calls the stack with the same action.

    It also separates failures of the environment, which become ``EnvError``, from those of the
    wrappers above. An invalid answer (no text, a reward that is not finite) is such a failure.

    Caveat: the loop must know whether the stack will step the environment at all;
    ``SearchAndAskWrapper`` answers a call itself. An answer that was not awaited before is
    fetched synchronously, and a step with another action than was awaited is a RuntimeError.

    Args:
        env: an environment; only one with ``areset`` and ``astep`` is awaited.
        reward_range: least and largest reward of a step; None takes any finite one.
    """

    def __init__(
        self, env: gym.Env[str, str], reward_range: tuple[float, float] | None = None
    ) -> None:
        super().__init__(env)
        self._range = reward_range
        self._awaitable: Any = env if hasattr(env, "areset") and hasattr(env, "astep") else None
        # what was awaited: the answer of a reset, the action and answer of a step
        self._start: tuple[Any] | None = None
        self._step: tuple[str, Any] | None = None

    async def await_reset(self, *, seed: int | None, options: dict[str, Any] | None) -> None:
        """Fetch the answer of the next ``reset``; do nothing if the environment is synchronous."""
        self._start = self._step = None
        if self._awaitable is not None:
            with environment_errors():
                self._start = (await self._awaitable.areset(seed=seed, options=options),)

    async def await_step(self, action: str) -> None:
        """Fetch the answer of the next ``step``, which must have the same action."""
        self._step = None
        if self._awaitable is not None:
            with environment_errors():
                self._step = action, await self._awaitable.astep(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Start an episode."""
        known, self._start = self._start, None
        with environment_errors():
            return checked_start(
                self.env.reset(seed=seed, options=options) if known is None else known[0]
            )

    def step(self, action: str) -> Step:
        """Act."""
        known, self._step = self._step, None
        if known is not None and known[0] != action:
            raise RuntimeError(
                f"Expected the action {known[0]!r}, which was awaited and taken already, got"
                f" {action!r}"
            )
        with environment_errors():
            answer: Any = self.env.step(action) if known is None else known[1]
            observation, reward, terminated, truncated, info = answer
            reward = float(reward)
            if not math.isfinite(reward):
                raise ValueError(f"Expected step() to give a finite reward, got {reward}")
            if self._range is not None and not self._range[0] <= reward <= self._range[1]:
                raise ValueError(
                    f"Expected step() to give a reward in {list(self._range)} (env.reward_range),"
                    f" got {reward}"
                )
            observation, info = checked_start((observation, info))
        return observation, reward, bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the environment."""
        with environment_errors():
            self.env.close()


@contextlib.contextmanager
def environment_errors() -> Generator[None]:
    """Raise a failure of the environment as the EnvError that ends its episode.

    Errors that this package raises on purpose pass as they are: they say more, and one of them (no
    worker is left) ends a run. A ``ConfigError`` is of this episode's world, and so a failure.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ExperientialError) and not isinstance(error, ConfigError):
            raise
        first, newline, rest = f"{type(error).__name__}: {error}".partition("\n")
        raise EnvError(f"{first}{raised_at(error)}{newline}{rest}") from error


def raised_at(error: Exception) -> str:
    """Return the file and line of the environment that raised, as `` (game.py:12)``.

    These are the last ones in the folder of the first module that is neither of this package nor
    of Gymnasium. Where only those two were called it is an empty string.
    """
    ours = (str(Path(__file__).parent), str(Path(gym.__file__).parent))
    frames = [
        (Path(frame.f_code.co_filename), line)
        for frame, line in walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((*ours, "<"))
    ]
    if not frames:
        return ""
    folder = frames[0][0].parent
    file, line = next(one for one in reversed(frames) if one[0].is_relative_to(folder))
    here = Path.cwd()
    return f" ({file.relative_to(here) if file.is_relative_to(here) else file}:{line})"


def checked_start(answer: Any) -> Start:
    """Return the answer of ``reset``; raise TypeError or ValueError if it is invalid."""
    observation, info = answer
    if not isinstance(observation, str):
        raise TypeError(
            f"Expected the environment to observe text, got {type(observation).__name__}; wrap it"
            " in TextObservation"
        )
    if not isinstance(info, dict):
        raise TypeError(f"Expected the environment's info to be a dict, got {type(info).__name__}")
    return observation, cast("dict[str, Any]", info)
