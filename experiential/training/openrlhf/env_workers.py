"""Hold environments in Ray actors: few processes on any node, and no thread here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from copy import deepcopy
from functools import partial
from itertools import count
from typing import Any, TypeVar

import gymnasium as gym

from experiential.config import ClusterSettings, EnvSettings
from experiential.errors import BackendError, EnvError, ExperientialError
from experiential.rollout import Start, Step, make_env
from experiential.sync import awaited, shared_loop
from experiential.training.openrlhf.supervisor import (
    FailedCallError,
    Incarnation,
    LostActorError,
    SilentActorError,
    Supervisor,
    is_joined,
    joined_ray,
    start_actor,
)

T = TypeVar("T")
MakeEnv = Callable[[], gym.Env[str, str]]
Home = tuple[Supervisor, Incarnation]
_DESCRIPTION = ("observation_space", "action_space", "metadata", "render_mode")
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
"""CPUs that Ray reserves for a worker: environments mostly wait. With 0, Ray would also place
workers on nodes that offer no CPU.
"""


class EnvHost:
    """Hold environments by number inside a Ray actor; each call runs in a thread of its pool.

    All methods raise `EnvError` where the environment fails: other exceptions may not be picklable.
    ``index`` is the number of this worker in Ray's logs.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="env")
        self._envs: dict[int, gym.Env[str, str]] = {}
        self._running: dict[int, object] = {}
        self._abandoned: set[object] = set()

    def __repr__(self) -> str:
        return f"EnvHost({self._index})"

    async def begin(self, known: Sequence[MakeEnv]) -> str:
        """Make one environment of each kind, to import its package; return the node's address."""
        for make in known:
            await awaited(self.describe(make))
        return str(joined_ray().util.get_node_ip_address())

    async def describe(self, make: MakeEnv) -> dict[str, Any]:
        """Return the spaces of an environment, from one that is made and closed."""

        def look() -> dict[str, Any]:
            with closing(make()) as env:
                return {name: getattr(env, name) for name in _DESCRIPTION}

        return await self._run(look)

    async def reset(
        self, number: int, make: MakeEnv, seed: int | None, options: dict[str, Any] | None
    ) -> Start:
        """Start an episode; the environment is made at first, and again after a failure."""
        if number not in self._envs:
            self._envs[number] = await self._call(number, make)
        env = self._envs[number]
        return await self._call(number, lambda: env.reset(seed=seed, options=options))

    async def step(self, number: int, action: str) -> Any:
        """Step the environment of this number."""
        return await self._call(number, lambda: self._known(number).step(action))

    async def attribute(self, number: int, name: str) -> Any:
        """Return an attribute of the environment or of a wrapper that it is made with."""
        return await self._run(lambda: self._known(number).get_wrapper_attr(name))

    async def close(self, number: int | None = None) -> None:
        """Close the environment of this number, if there is one; every environment if None."""
        if number is None:
            await asyncio.gather(*(self.close(known) for known in list(self._envs)))
        elif number in self._envs:
            await awaited(self._run(self._envs.pop(number).close))

    async def abandon(self, number: int) -> int:
        """Give up an environment that hangs; return how many calls of such ones are still open."""
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

    async def _call(self, number: int, work: Callable[[], T]) -> T:
        """Run one call of one environment; after a failure the next reset makes another."""
        call = self._running[number] = object()
        outcome = await awaited(self._run(work))
        if call in self._abandoned:  # nobody waits for it, and a new environment may be in place
            self._abandoned.discard(call)
            raise EnvError("it was given up")
        self._running.pop(number, None)
        if isinstance(outcome, Exception):
            await self.close(number)
            raise outcome
        return outcome

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is of this environment)
            raise EnvError(f"{type(error).__name__}: {error}") from None


class EnvWorkers(AbstractContextManager["EnvWorkers"]):
    """Spread environments over a pool of Ray actors on the nodes of the cluster.

    Every worker is an asyncio actor with threads of its own: a call holds a thread there only while
    an environment really works, and none here. A worker that dies or no longer answers is started
    again ``cluster.restarts`` times. The episodes that ran there end with an ``EnvError`` that
    names the worker, its node and the reason. The next ones run in the new worker, or in another
    one when no restart is left.

    >>> workers = EnvWorkers(ClusterSettings(env_workers=2))  # doctest: +SKIP
    >>> env = workers.make(EnvSettings(), {"worlds": 2})  # doctest: +SKIP
    >>> observation, info = env.reset(seed=1)  # doctest: +SKIP

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
        self._known: list[MakeEnv] = []
        self._spaces: dict[str, dict[str, Any]] = {}
        self._numbers = count()
        begin = partial(
            start_actor,
            EnvHost,
            begin=(self._known,),  # at each start those known by then
            scheduling_strategy="SPREAD",
            num_cpus=_SHARE_OF_CPU,
            max_concurrency=_CALLS,
        )
        self.workers = [
            Supervisor(f"env worker {i} on an unknown node", partial(begin, i), cluster)
            for i in range(cluster.env_workers)
        ]
        try:
            shared_loop().run(_together(self.home(i) for i in range(cluster.env_workers)))
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def make(self, settings: EnvSettings, kwargs: dict[str, Any]) -> RemoteEnv:
        """Return an environment in one of the workers, as ``rollout.make_env`` does here.

        The first one of a kind waits until a worker has made one, to learn its spaces; the others
        are made at their first reset.

        Raises:
            EnvError: the environment cannot be made.
        """
        kind = repr((settings.id, settings.max_turns, settings.kwargs | kwargs))
        make = partial(make_env, settings, kwargs)
        if kind not in self._spaces:
            home, seconds = shared_loop().run(self.home(0)), self.settings.start_timeout
            spaces = self.ask(home, "describe", make, seconds=seconds)
            self._spaces[kind] = shared_loop().run(spaces)
            self._known.append(make)
        return RemoteEnv(self, next(self._numbers), make, self._spaces[kind])

    async def home(self, number: int) -> Home:
        """Return the worker that holds an environment, started: its own, or one that is left.

        Raises:
            EnvError: the worker was lost while it started.
            ExperientialError: no worker is left.
        """
        alive = [worker for worker in self.workers if worker.alive]
        if not alive:
            ends = "; ".join(worker.failures[-1] for worker in self.workers if worker.failures)
            raise ExperientialError(
                f"Expected an env worker that lives, got none after {self.settings.restarts}"
                f" restarts each: {ends or 'they were closed'}"
            )
        worker = self.workers[number % len(self.workers)]
        if not worker.alive:
            worker = alive[number % len(alive)]
        try:
            actor = await worker.started()
        except (LostActorError, FailedCallError) as error:
            raise EnvError(f"{worker.name} {error.reason}", lost=True) from None
        worker.name = f"env worker {self.workers.index(worker)} on {actor.result}"
        return worker, actor

    async def ask(
        self, home: Home, method: str, *arguments: Any, seconds: float | None = None
    ) -> Any:
        """Call a method of `EnvHost` in the actor of a worker that holds the environment.

        Raises:
            EnvError: the environment raised, did not answer in time, or its worker died; the
                message names worker and node.
        """
        worker, actor = home
        try:
            return await worker.ask(actor, method, *arguments, seconds=seconds)
        except SilentActorError as error:
            complaint = f"{method} {error.reason}"
        except LostActorError as error:
            raise EnvError(f"{worker.name} {error.reason}", lost=True) from None
        except FailedCallError as error:
            reason = str(error.cause) if isinstance(error.cause, EnvError) else error.reason
            raise EnvError(f"{worker.name}: {method} failed: {reason}") from None
        # A worker that does not answer at all is ended; where it answers, only the environment
        # hangs. `describe` has no environment to give up.
        if method != "describe":
            limit = min(_PING_SECONDS, self.settings.call_timeout)
            try:
                stuck = await worker.ask(actor, "abandon", arguments[0], seconds=limit)
            except BackendError:
                complaint = f"hangs: {complaint}, and the worker did not answer either"
            else:
                if stuck < _STUCK:
                    _log.warning("%s: %s; its environment is given up", worker.name, complaint)
                    raise EnvError(
                        f"{worker.name}: {complaint}; the worker answers, so its environment hangs"
                        " and is given up"
                    )
                complaint = f"holds {stuck} environments that hang; of the last one {complaint}"
        worker.lose(actor, complaint)
        raise EnvError(f"{worker.name} {actor.ended}", lost=True)

    def close(self) -> None:
        """Close the environments within 10 seconds and end all workers; safe to call twice."""
        if is_joined():  # else Ray was shut down, and the workers with it
            ends = (worker.stop("close", _CLOSE_SECONDS) for worker in self.workers)
            shared_loop().run(_together(ends))


async def _together(work: Iterable[Awaitable[object]]) -> None:
    await asyncio.gather(*work)


class RemoteEnv(gym.Env[str, str]):
    """Play an environment that lives in a worker, as a plain Gymnasium environment.

    ``reset`` and ``step`` wait; ``areset`` and ``astep`` are the same as coroutines and hold no
    thread. Seeds, options and info go through unchanged; they must be picklable. After an
    ``EnvError`` the next ``reset`` starts anew, elsewhere if need be.

    Caveat: attributes of the environment itself are read with ``get_wrapper_attr`` after the first
    ``reset``, and come as copies. No vector version: ``EnvWorkers`` runs many at once.

    Change log: v0.1.0 added.
    """

    def __init__(
        self, workers: EnvWorkers, number: int, make: MakeEnv, spaces: dict[str, Any]
    ) -> None:
        self._workers, self._number, self._make = workers, number, make
        vars(self).update(deepcopy(spaces))
        self._home: Home | None = None

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Start:
        """Start an episode.

        Raises:
            EnvError: the environment or its worker failed.
            ExperientialError: no worker is left.
        """
        self._home = await self._workers.home(self._number)
        return await self._ask("reset", self._make, seed, options)

    async def astep(self, action: str) -> Step:
        """Act; raise ``EnvError`` where ``reset`` was not called, or as ``areset`` does."""
        observation, reward, terminated, truncated, info = await self._ask("step", action)
        return observation, float(reward), bool(terminated), bool(truncated), info

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if self._home is None:
            raise EnvError(
                f"Expected reset() before {method}, got a remote environment that was never started"
            )
        return await self._workers.ask(self._home, method, self._number, *arguments)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Start:
        """Run ``areset`` and wait for it."""
        return shared_loop().run(self.areset(seed=seed, options=options))

    def step(self, action: str) -> Step:
        """Run ``astep`` and wait for it."""
        return shared_loop().run(self.astep(action))

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of this object, or a copy of the remote environment's.

        Raises:
            EnvError: neither has it, or it cannot be sent.
        """
        if hasattr(self, name):
            return getattr(self, name)
        return shared_loop().run(self._ask("attribute", name))

    def has_wrapper_attr(self, name: str) -> bool:
        """Return whether ``get_wrapper_attr`` finds the attribute."""
        found = hasattr(self, name) or shared_loop().run(awaited(self._ask("attribute", name)))
        return not isinstance(found, Exception)

    def close(self) -> None:
        """Let the remote environment close, without waiting for it."""
        home, self._home = self._home, None
        if home is not None and not home[1].ended and is_joined():
            home[1].handle.close.remote(self._number)
