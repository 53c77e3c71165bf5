"""Environments as Ray actors: a few processes on any node hold thousands of them, and nobody waits with a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym

from experiential.config import ClusterSettings, EnvSettings
from experiential.errors import EnvError, ExperientialError
from experiential.rollout.awaited import Start, Step
from experiential.rollout.rollout import make_env
from experiential.sync import awaited, shared_loop
from experiential.training.openrlhf.calls import answer, cause_of, is_joined, joined_ray, told

T = TypeVar("T")
_log = logging.getLogger(__name__)
_THREADS = 128
"""Environments that one worker steps at once; its threads are made as they are needed."""
_CALLS = 100_000
"""Calls that one worker may have open: more than it will ever hold environments."""
_PING_SECONDS = 30.0
_STUCK = _THREADS // 2
"""Calls that never came back after which a worker is started again."""
_CLOSE_SECONDS = 10.0
_SHARE_OF_CPU = 0.01
"""What Ray reserves for a worker: environments mostly wait, and a node without CPUs is not asked.
"""


class Spaces(NamedTuple):
    """What an environment says of itself before it is played."""

    observation: gym.Space[str]
    action: gym.Space[str]
    metadata: dict[str, Any]
    render_mode: str | None


class EnvHost:
    """The inside of a Ray actor: environments by number, each call in a thread of its pool.

    What an environment raises is an answer, not an exception: methods give ``(value, None)`` or
    ``(None, reason)``.

    Args:
        index: number of this worker, for Ray's logs.
        threads: environments stepped at once.
    """

    def __init__(self, index: int, threads: int = _THREADS) -> None:
        self._index = index
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="env")
        self._envs: dict[int, gym.Env[str, str]] = {}
        self._running: dict[int, object] = {}
        self._abandoned: set[object] = set()

    def __repr__(self) -> str:
        return f"EnvHost({self._index})"

    async def begin(self, known: Sequence[tuple[EnvSettings, dict[str, Any]]]) -> str:
        """Import what the environments need by making one of each kind; gives the address of the node."""
        for settings, kwargs in known:
            await self.describe(settings, kwargs)
        return str(joined_ray().util.get_node_ip_address())

    async def describe(
        self, settings: EnvSettings, kwargs: dict[str, Any]
    ) -> tuple[Spaces | None, str | None]:
        """The spaces of an environment, from one that is made and closed."""

        def look() -> Spaces:
            env = make_env(settings, kwargs)
            try:
                return Spaces(
                    env.observation_space, env.action_space, dict(env.metadata), env.render_mode
                )
            finally:
                env.close()

        return await self._outcome(look)

    async def reset(
        self,
        number: int,
        settings: EnvSettings,
        kwargs: dict[str, Any],
        seed: int | None,
        options: dict[str, Any] | None,
    ) -> tuple[Start | None, str | None]:
        """Start an episode in the environment of this number, which is made where there is none: at first, and after a failure."""

        def start() -> Start:
            return self._envs[number].reset(seed=seed, options=options)

        if number not in self._envs:
            env, reason = await self._call(number, partial(make_env, settings, kwargs))
            if env is None:
                return None, reason
            self._envs[number] = env
        return await self._call(number, start)

    async def step(self, number: int, action: str) -> tuple[Any, str | None]:
        """Step the environment of this number."""
        return await self._call(number, lambda: self._known(number).step(action))

    async def attribute(self, number: int, name: str) -> tuple[Any, str | None]:
        """An attribute of the environment of this number or of a wrapper that it is made with."""
        return await self._outcome(lambda: self._known(number).get_wrapper_attr(name))

    async def close(self, number: int) -> None:
        """Close the environment of this number, if there is one."""
        env = self._envs.pop(number, None)
        if env is not None:
            await self._outcome(env.close)

    async def close_all(self) -> None:
        """Close every environment."""
        await asyncio.gather(*(self.close(number) for number in list(self._envs)))

    async def abandon(self, number: int) -> int:
        """Give up an environment that does not answer; gives how many calls of such ones are still open here."""
        self._envs.pop(number, None)
        if number in self._running:
            self._abandoned.add(self._running.pop(number))
        return len(self._abandoned)

    def _known(self, number: int) -> gym.Env[str, str]:
        if number not in self._envs:
            raise gym.error.ResetNeeded(
                "Expected reset() before this call, which starts an environment here; there is none"
            )
        return self._envs[number]

    async def _call(self, number: int, work: Callable[[], T]) -> tuple[T | None, str | None]:
        """One call of one environment; after a failure the next reset makes another, and what comes back too late is dropped."""
        call = self._running[number] = object()
        result, reason = await self._outcome(work)
        if call in self._abandoned:
            self._abandoned.discard(call)
            return None, "it was given up"
        self._running.pop(number, None)
        if reason is not None:
            await self.close(number)
        return result, reason

    async def _outcome(self, work: Callable[[], T]) -> tuple[T | None, str | None]:
        result = await awaited(asyncio.get_running_loop().run_in_executor(self._pool, work))
        return (
            (None, f"{type(result).__name__}: {result}")
            if isinstance(result, Exception)
            else (result, None)
        )


class Life(NamedTuple):
    """One Ray actor of a worker, from its start to its death."""

    number: int
    handle: Any
    begun: Any


class EnvWorker:
    """The trainer's side of a worker: its present life, and how the earlier ones ended.

    Args:
        index: number of this worker.
        cluster: time-outs, and how often it is started again.
        known: the kinds of environments asked for so far; a new life makes one of each before it is
            used.

    Attributes:
        failures: why each life that is over ended, oldest first.
        alive: whether there is a life to ask; one that has only begun counts.
    """

    def __init__(
        self,
        index: int,
        cluster: ClusterSettings,
        known: Sequence[tuple[EnvSettings, dict[str, Any]]],
    ) -> None:
        self.index, self._cluster, self._known = index, cluster, known
        self.failures: list[str] = []
        self.alive = True
        self._node = "a node unknown yet"
        self._lock = threading.Lock()
        self._life = self._born()
        self._started: Life | None = None

    def __str__(self) -> str:
        return f"env worker {self.index} on {self._node}"

    def _born(self) -> Life:
        options = {
            "num_cpus": _SHARE_OF_CPU,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": _CALLS,
        }
        handle: Any = (
            joined_ray()
            .remote(EnvHost)
            .options(scheduling_strategy="SPREAD", **options)
            .remote(self.index)
        )
        return Life(len(self.failures), handle, handle.begin.remote(list(self._known)))

    async def started(self) -> Life:
        """The present life, once it answers.

        Raises:
            EnvError: it does not; it is over, and another may have begun.
        """
        life = self._life
        if self._started is not life:
            self._node = await self._asked(life, life.begun, self._cluster.start_timeout, "begin")
            self._started = life
        return life

    async def ask(
        self, life: Life, method: str, *arguments: Any, seconds: float | None = None
    ) -> Any:
        """What a method of the host gives, in the life that it belongs to.

        Args:
            life: what ``started`` gave; a later one knows nothing of this call's environment.
            method: a method of ``EnvHost`` that gives a value or a reason.
            arguments: of the method; the first is the environment's number.
            seconds: time-out; ``cluster.call_timeout`` by default.

        Raises:
            EnvError: the environment raised, did not answer in time, or its worker died; the
                message names worker and node.
        """
        if life is not self._life or not self.alive:
            raise EnvError(self._end_of(life), lost=True)
        reference = getattr(life.handle, method).remote(*arguments)
        value, reason = await self._asked(
            life, reference, seconds or self._cluster.call_timeout, method, arguments[0]
        )
        if reason is not None:
            raise EnvError(f"{self}: {method} failed: {reason}")
        return value

    async def _asked(
        self, life: Life, reference: Any, seconds: float, method: str, number: object = None
    ) -> Any:
        exceptions = joined_ray().exceptions
        try:
            return await answer(reference, seconds)
        except exceptions.RayTaskError as error:
            raise EnvError(f"{self}: {method} failed: {told(cause_of(error))}") from None
        except exceptions.RayError as error:
            self._end(life, f"died: {told(error)}")
        except TimeoutError:
            await self._examine(life, f"{method} gave no answer within {seconds:g} s", number)
        raise EnvError(self._end_of(life), lost=True)

    async def _examine(self, life: Life, complaint: str, number: object) -> None:
        """End a life that does not answer at all; where the host answers, only the environment hangs."""
        if not isinstance(number, int):
            self._end(life, complaint)
            return
        ray = joined_ray()
        try:
            stuck = await answer(
                life.handle.abandon.remote(number), min(_PING_SECONDS, self._cluster.call_timeout)
            )
        except (TimeoutError, ray.exceptions.RayError):
            self._end(life, f"hangs: {complaint}, and the worker did not answer either")
            return
        if stuck >= _STUCK:
            self._end(life, f"holds {stuck} environments that hang; of the last one {complaint}")
            return
        _log.warning("%s: %s; its environment is given up", self, complaint)
        raise EnvError(
            f"{self}: {complaint}; the worker answers, so its environment hangs and is given up"
        )

    def _end(self, life: Life, reason: str) -> None:
        """Note that a life is over, once, and begin the next one if any is left."""
        with self._lock:
            if life is not self._life or not self.alive:
                return
            joined_ray().kill(life.handle)
            self.failures.append(f"{self} {reason}")
            self.alive = len(self.failures) <= self._cluster.restarts
            what = f"restart {len(self.failures)}" if self.alive else "no restart is left"
            _log.warning("%s; %s of %d", self.failures[-1], what, self._cluster.restarts)
            if self.alive:
                self._life = self._born()

    def _end_of(self, life: Life) -> str:
        return (
            self.failures[life.number] if life.number < len(self.failures) else f"{self} was closed"
        )

    def release(self, life: Life, number: int) -> None:
        """Let the environment of this number close, and wait for nothing; a life that is over is not told."""
        if life is self._life and self.alive and is_joined():
            life.handle.close.remote(number)

    async def close(self) -> None:
        """Let the environments close, for 10 seconds at most, and end the present life for good."""
        life = self._life
        if self._started is life and self.alive:
            await awaited(
                answer(
                    life.handle.close_all.remote(), min(_CLOSE_SECONDS, self._cluster.call_timeout)
                )
            )
        with self._lock:
            if self.alive:
                self.alive = False
                joined_ray().kill(self._life.handle)


class EnvWorkers:
    """A pool of Ray actors that hold environments, spread over the nodes of the cluster.

    Every worker is an asyncio actor with threads of its own: a call holds a thread there only while
    an environment really works, and none here. A worker that dies or no longer answers is started
    again ``cluster.restarts`` times; the episodes that ran there end with an ``EnvError`` that
    names the worker, its node and the reason, and the next ones run in the new one, or in another
    worker when none is left of this one.

    >>> workers = EnvWorkers(ClusterSettings(env_workers=2))  # doctest: +SKIP
    >>> env = workers.make(EnvSettings(), {"worlds": 2})  # doctest: +SKIP
    >>> observation, info = env.reset(seed=1)  # doctest: +SKIP

    Args:
        cluster: ``env_workers``, time-outs and restarts.

    Raises:
        ConfigError: this process has not joined a Ray cluster.
        MissingExtraError: Ray is not installed.
        ValueError: ``env_workers`` is 0.
        EnvError: a worker did not start.
    """

    def __init__(self, cluster: ClusterSettings) -> None:
        if cluster.env_workers < 1:
            raise ValueError(
                f"Expected cluster.env_workers of at least 1, got {cluster.env_workers}"
            )
        joined_ray()
        self.settings = cluster
        self._known: list[tuple[EnvSettings, dict[str, Any]]] = []
        self._spaces: dict[str, Spaces] = {}
        self._numbers = count()
        self.workers = [
            EnvWorker(index, cluster, self._known) for index in range(cluster.env_workers)
        ]
        try:
            shared_loop().run(self._start())
        except EnvError:
            self.close()
            raise

    def __enter__(self) -> EnvWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _start(self) -> None:
        await asyncio.gather(*(worker.started() for worker in self.workers))

    def make(self, settings: EnvSettings, kwargs: dict[str, Any]) -> RemoteEnv:
        """An environment in one of the workers, in turn; a drop-in for ``rollout.make_env``.

        The first one of a kind waits until a worker has made one, to learn its spaces; the others
        are made at their first reset.

        Raises:
            EnvError: the environment cannot be made.
        """
        kind = repr((settings.id, settings.max_turns, settings.kwargs | kwargs))
        if kind not in self._spaces:
            self._spaces[kind] = shared_loop().run(self._describe(settings, kwargs))
            self._known.append((settings, kwargs))
        return RemoteEnv(self, next(self._numbers), settings, kwargs, self._spaces[kind])

    async def _describe(self, settings: EnvSettings, kwargs: dict[str, Any]) -> Spaces:
        worker = self.worker_of(0)
        life = await worker.started()
        return await worker.ask(
            life, "describe", settings, kwargs, seconds=self.settings.start_timeout
        )

    def worker_of(self, number: int) -> EnvWorker:
        """The worker that the environment of this number lives in: its own, or the next one that still has a life.

        Raises:
            ExperientialError: no worker is left.
        """
        alive = [worker for worker in self.workers if worker.alive]
        own = self.workers[number % len(self.workers)]
        if not alive:
            ends = (
                "; ".join(worker.failures[-1] for worker in self.workers if worker.failures)
                or "they were closed"
            )
            raise ExperientialError(
                f"Expected an env worker that lives, got none after {self.settings.restarts}"
                f" restarts each: {ends}"
            )
        return own if own.alive else alive[number % len(alive)]

    def failures(self) -> list[str]:
        """How the lives of workers ended that are over, worker by worker."""
        return [failure for worker in self.workers for failure in worker.failures]

    def close(self) -> None:
        """Close the environments and end all workers; safe to call twice, and after Ray was shut down."""
        if is_joined():
            shared_loop().run(self._close())

    async def _close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))


class RemoteEnv(gym.Env[str, str]):
    """A plain Gymnasium environment that lives in a worker.

    ``reset`` and ``step`` wait; ``areset`` and ``astep`` are the same as coroutines and hold no
    thread. Seeds, options and info go through as they are; they must be picklable. After an
    ``EnvError`` the next ``reset`` starts anew, elsewhere if need be.

    Caveat: attributes of the environment itself are asked for with ``get_wrapper_attr`` after the
    first ``reset``, and come as copies.

    No vector version: the workers of ``EnvWorkers`` are what runs many at once.

    Change log: v0.1.0 added.

    Args:
        workers: the pool.
        number: which of its environments this is.
        settings: what to make.
        kwargs: override those of the settings.
        spaces: what such an environment says of itself.
    """

    def __init__(
        self,
        workers: EnvWorkers,
        number: int,
        settings: EnvSettings,
        kwargs: dict[str, Any],
        spaces: Spaces,
    ) -> None:
        self._workers, self._number, self._settings, self._kwargs = (
            workers,
            number,
            settings,
            kwargs,
        )
        self.observation_space, self.action_space = (
            deepcopy(spaces.observation),
            deepcopy(spaces.action),
        )
        self.metadata, self.render_mode = dict(spaces.metadata), spaces.render_mode
        self._home: tuple[EnvWorker, Life] | None = None

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Start:
        """Start an episode.

        Raises:
            EnvError: the environment or its worker failed.
            ExperientialError: no worker is left.
        """
        worker = self._workers.worker_of(self._number)
        self._home = worker, await worker.started()
        return await self._ask("reset", self._settings, self._kwargs, seed, options)

    async def astep(self, action: str) -> Step:
        """Act.

        Raises:
            EnvError: the environment or its worker failed, or ``reset`` was not called.
        """
        observation, reward, terminated, truncated, info = await self._ask("step", action)
        return observation, float(reward), bool(terminated), bool(truncated), info

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if self._home is None:
            raise EnvError(
                f"Expected reset() before {method}, got a remote environment that was never started"
            )
        worker, life = self._home
        return await worker.ask(life, method, self._number, *arguments)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """``areset``, waited for."""
        return shared_loop().run(self.areset(seed=seed, options=options))

    def step(self, action: str) -> Step:
        """``astep``, waited for."""
        return shared_loop().run(self.astep(action))

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of this object, or a copy of the remote environment's.

        Raises:
            EnvError: neither has it, or it cannot be sent.
        """
        return (
            getattr(self, name)
            if hasattr(self, name)
            else shared_loop().run(self._ask("attribute", name))
        )

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether ``get_wrapper_attr`` gives something."""
        return hasattr(self, name) or not isinstance(
            shared_loop().run(awaited(self._ask("attribute", name))), Exception
        )

    def close(self) -> None:
        """Close the remote environment; nobody waits for it."""
        home, self._home = self._home, None
        if home is not None:
            worker, life = home
            worker.release(life, self._number)
