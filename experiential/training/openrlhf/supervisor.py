"""Supervise Ray actors: ask with a time-out, notice death, start again, name the cause."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from experiential.config import ClusterSettings
from experiential.errors import BackendError, ConfigError, LostProcessError, MissingExtraError
from experiential.training.openrlhf.causes import (
    LOG_LINES,
    excerpt,
    find_cause,
    log_of,
    remedy,
    shorten,
)

_log = logging.getLogger(__name__)
_SEARCHED = 300
"""Last lines of a dead actor's log in which its cause is looked for."""
_NOTICED_S = 10.0
"""Time in which Ray notices that an actor has died, after the calls of its partners failed."""
_DEAD_ENGINE = "EngineDeadError"
"""vLLM's error in an actor that is alive after the process that computes has died."""


class LostActorError(LostProcessError):
    """The Ray actor ``who`` died, was silent or was closed; ``reason`` begins with a verb."""

    advice = ""

    def __init__(self, who: str, reason: str) -> None:
        super().__init__(f"Expected {who} to be alive, but it {reason}{self.advice}")
        self.who, self.reason = who, reason


class SilentActorError(LostActorError):
    """A Ray actor did not answer in time; the call may still run."""

    advice = (
        "; raise cluster.call_timeout if it is only slow (cluster.start_timeout while it starts)"
    )


class FailedCallError(BackendError):
    """A method of a living Ray actor raised ``cause``."""

    def __init__(self, who: str, cause: BaseException) -> None:
        self.cause, self.reason = cause, f"{type(cause).__name__}: {shorten(cause)}"
        super().__init__(f"Expected {who} to do what was asked, got: {self.reason}")


def joined_ray() -> Any:
    """Return the ``ray`` package of a process that has joined a cluster.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: this process has not joined a cluster.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise MissingExtraError("ray", "openrlhf") from None
    if not ray.is_initialized():
        raise ConfigError(
            "Expected a process that has joined a Ray cluster, got one that has not; call"
            " ray.init() first"
        )
    return ray


def is_joined() -> bool:
    """Return whether this process has joined a cluster that is still up."""
    return bool(getattr(sys.modules.get("ray"), "is_initialized", bool)())


async def answer(reference: Any, who: str, seconds: float) -> Any:
    """Await the result of the remote call ``reference`` without holding a thread.

    Raises:
        LostActorError: the actor is dead.
        SilentActorError: no result within ``seconds``.
        FailedCallError: the method raised.
    """
    ray: Any = import_module("ray")
    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), seconds)
    except TimeoutError:
        raise SilentActorError(who, f"gave no answer within {seconds:g} s") from None
    except ray.exceptions.RayTaskError as error:
        # Ray brings the method's own exception along where it could be pickled.
        cause: Any = getattr(error, "cause", None)
        failed = FailedCallError(who, cause if isinstance(cause, BaseException) else error)
        if _DEAD_ENGINE in failed.reason or _DEAD_ENGINE in str(error):
            raise LostActorError(who, f"died: {failed.reason}") from error
        raise failed from error
    except ray.exceptions.RayError as error:
        raise LostActorError(who, f"died: {shorten(error)}") from error


def explain(error: BackendError) -> None:
    """Add cause and remedy to the message of a failed call, and the actor's log as notes.

    The log of a dead actor is searched for the cause; of a living one the error itself is it.

    It blocks for some seconds.
    """
    source: Any = error.__cause__  # Ray's error, which knows the actor
    actor = getattr(source, "actor_id", None) or getattr(source, "_actor_id", None)
    where, lines = log_of(actor) if isinstance(actor, str) else ("", [])
    dead = not isinstance(error, FailedCallError)
    message, cause = str(error), find_cause(lines[-_SEARCHED:]) if dead else ""
    if cause and cause not in message:
        message += f"; cause: {shorten(cause)}"
    if advice := remedy(cause) or remedy(str(error)) or remedy("\n".join(lines[-LOG_LINES:])):
        message += f"; {advice}"
    error.args = (message,)
    if lines:
        error.add_note(f"from the log {where}")
        for line in excerpt(lines, cause):
            error.add_note(f"  {line}")


async def answers(references: Sequence[Any], who: Sequence[str], seconds: float) -> list[Any]:
    """Await calls that were made at the same moment to actors that compute together.

    When one of them dies, the calls of the others may fail before Ray notices its death. So an
    actor that is lost within `_NOTICED_S` of the first failure is named, and not the one that
    failed.

    Raises:
        LostActorError, FailedCallError: of one of them, as `answer`.
    """
    pairs = zip(references, who, strict=True)
    calls = [asyncio.ensure_future(answer(reference, name, seconds)) for reference, name in pairs]
    try:
        return list(await asyncio.gather(*calls))
    except FailedCallError as failed:
        waiting = set(calls)
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=_NOTICED_S, return_when=asyncio.FIRST_COMPLETED
            )
            for call in done:
                if isinstance(error := call.exception(), LostActorError):
                    raise error from failed
            if not done:
                break
        raise
    finally:
        for call in calls:
            call.cancel()


@dataclass(eq=False)
class Incarnation:
    """Hold one actor from its start to its death.

    Attributes:
        handle: Ray's handle.
        begun: reference of the first call, whose answer shows that the actor has started.
        end: kills the actor, in whatever state it is.
        result: answer of the first call, once it has ``started``.
        ended: reason of the end; empty while it lasts.
    """

    handle: Any
    begun: Any
    end: Callable[[], None]
    result: Any = None
    started: bool = False
    ended: str = ""


def start_actor(kind: type, *arguments: Any, begin: tuple[Any, ...], **options: Any) -> Incarnation:
    """Start a Ray actor and its first call, ``begin``; return at once.

    Ray itself never restarts it, which would lose the actor's state without a word.
    """
    ray = joined_ray()
    options |= {"max_restarts": 0, "max_task_retries": 0}
    handle = ray.remote(kind).options(**options).remote(*arguments)
    return Incarnation(handle, handle.begin.remote(*begin), partial(ray.kill, handle))


class Supervisor:
    """Keep one Ray actor running: start it when it is needed, and again after it was lost.

    An actor begins when it is needed (`current`, `started`) and not when the last one ends: a
    pool that is being closed starts nothing. Calls may come from several event loops.

    Args:
        name: of the actor, for errors; may be changed once the node is known.
        begin: starts an actor and returns at once.
        cluster: time-outs, and how often the actor is started again.
        fixed: reason for not starting it again, for the error; None starts it again.

    Attributes:
        failures: reason of each loss, oldest first.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[], Incarnation],
        cluster: ClusterSettings,
        *,
        fixed: str | None = None,
    ) -> None:
        self.name, self.failures = name, list[str]()
        self._begin, self._cluster = begin, cluster
        self._allowed = cluster.restarts if fixed is None else 0
        self._final = fixed or f"no restart is left of {cluster.restarts} (cluster.restarts)"
        self._lock = threading.Lock()
        self._closed, self._last = False, ""
        self._current: Incarnation | None = None

    @property
    def restarts(self) -> int:
        """Return how often the actor was started again."""
        return min(len(self.failures), self._allowed)

    @property
    def alive(self) -> bool:
        """Return whether an actor runs or may still be started."""
        return not self._closed and len(self.failures) <= self._allowed

    @property
    def current(self) -> Incarnation:
        """Return the present actor, begun now if the last one has ended.

        Raises:
            LostActorError: no restart is left, or the supervisor was closed.
        """
        with self._lock:
            if self._closed:
                raise LostActorError(self.name, "was closed")
            if not self.alive:
                raise LostActorError(self.name, f"{self._last}; {self._final}")
            if self._current is None:
                self._current = self._begin()
            return self._current

    async def started(self) -> Incarnation:
        """Return the present actor once it has answered its first call.

        Raises:
            LostActorError: it was lost, or no restart is left.
            FailedCallError: its first call raised; the actor is over.
        """
        actor = self.current
        if not actor.started:
            try:
                actor.result = await answer(actor.begun, self.name, self._cluster.start_timeout)
            except (LostActorError, FailedCallError) as error:
                failed = isinstance(error, FailedCallError)
                self.lose(actor, f"did not start: {error.reason}" if failed else error.reason)
                raise
            actor.started = True
        return actor

    async def ask(
        self, actor: Incarnation, method: str, *arguments: Any, seconds: float | None = None
    ) -> Any:
        """Call a method in one actor, by default within ``cluster.call_timeout`` seconds.

        Raises:
            LostActorError: the actor died, now or before.
            SilentActorError: it gave no answer; the caller decides whether it is lost.
            FailedCallError: the method raised.
        """
        if actor.ended:
            raise LostActorError(self.name, actor.ended)
        reference = getattr(actor.handle, method).remote(*arguments)
        try:
            return await answer(reference, self.name, seconds or self._cluster.call_timeout)
        except LostActorError as error:
            if not isinstance(error, SilentActorError):
                self.lose(actor, error.reason)
            raise

    def lose(self, actor: Incarnation, reason: str) -> None:
        """Kill an actor that is of no use any more and note why, once."""
        with self._lock:
            if actor.ended:
                return
            actor.ended = self._last = reason
            self._current = None
            self.failures.append(f"{self.name} {reason}")
            actor.end()
        left = self._allowed - len(self.failures) + 1
        _log.warning("%s; restarts left: %d", self.failures[-1], max(0, left))

    def close(self) -> None:
        """Kill the actor for good; safe to call twice."""
        with self._lock:
            self._closed = True
            actor, self._current = self._current, None
            if actor is not None:
                actor.ended = "was closed"
                actor.end()

    async def stop(self, method: str, seconds: float) -> None:
        """Let a running actor finish by one last call of ``method``, then kill it for good."""
        actor = self._current
        try:
            if actor is not None and actor.started:
                call = getattr(actor.handle, method).remote()
                await answer(call, self.name, min(seconds, self._cluster.call_timeout))
        except BackendError as error:
            _log.warning("%s was not closed cleanly: %s", self.name, error)
        finally:
            self.close()
