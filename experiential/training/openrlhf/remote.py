"""Calls to Ray actors that always end: with a result, with the actor's own error, or with an error that names who did not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from experiential.errors import BackendError
from experiential.training.openrlhf import calls

_DEAD_ENGINE = "EngineDeadError"
"""What vLLM raises, in an actor that is alive, once the process that computes is not."""


class LostActorError(BackendError):
    """A Ray actor died or did not answer in time."""


async def answer(reference: Any, who: str, seconds: float) -> Any:
    """The result of a remote call.

    Args:
        reference: Ray's ``ObjectRef``.
        who: names the actor in errors.
        seconds: how long it may take.

    Raises:
        LostActorError: the actor is dead, or took longer.
        BackendError: the call itself failed there.
    """
    ray: Any = import_module("ray")
    try:
        return await calls.answer(reference, seconds)
    except TimeoutError:
        raise LostActorError(
            f"Expected {who} to answer within {seconds:g} s, got nothing; raise"
            " cluster.call_timeout if it is only slow"
        ) from None
    except ray.exceptions.RayActorError as error:
        raise LostActorError(f"Expected {who} to be alive, got: {calls.told(error)}") from error
    except ray.exceptions.RayError as error:
        cause = calls.cause_of(error)
        reason = f"{type(cause).__name__}: {calls.told(cause)}"
        if type(cause).__name__ == _DEAD_ENGINE or _DEAD_ENGINE in str(error):
            raise LostActorError(f"Expected {who} to be alive, got: {reason}") from error
        raise BackendError(f"Expected {who} to do what was asked, got: {reason}") from error


async def answers(references: Sequence[Any], who: Sequence[str], seconds: float) -> list[Any]:
    """Results of calls made at the same moment; raises what the first that fails does."""
    return list(
        await asyncio.gather(
            *(
                answer(reference, name, seconds)
                for reference, name in zip(references, who, strict=True)
            )
        )
    )
