"""Calls to Ray actors: Ray itself, answers with a time-out, and what an actor's death is called."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Any

from experiential.errors import ConfigError, MissingExtraError

_LONGEST_REASON = 300
_GUESSES = " Some common causes include"


def joined_ray() -> Any:
    """The ``ray`` package of a process that has joined a cluster.

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
    """Whether this process has joined a cluster that is still up."""
    return bool(getattr(sys.modules.get("ray"), "is_initialized", bool)())


async def answer(reference: Any, seconds: float) -> Any:
    """What a remote call gives, awaited without a thread.

    Args:
        reference: what ``method.remote(...)`` returned.
        seconds: how long to wait at most.

    Raises:
        TimeoutError: no answer came in time; the call may still run.
        ray.exceptions.RayError: the actor died, or the call raised.
    """
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), seconds)


def told(error: BaseException) -> str:
    r"""What Ray says of a failure, in one line of at most 300 characters, without ids and guesses at causes.

    >>> told(ValueError("The actor died.\n\tclass_name: Host\nIt was killed by `ray.kill`."))
    'The actor died. It was killed by `ray.kill`.'
    """
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if line.strip() and not line.startswith("\t")
    ]
    text = " ".join(lines).partition(_GUESSES)[0] or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "…"


def cause_of(error: Any) -> BaseException:
    """The exception that a remote method raised, where Ray could bring it along; else Ray's own."""
    cause: Any = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error
