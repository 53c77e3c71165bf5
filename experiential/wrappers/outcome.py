"""Say whether an episode succeeded, or that nobody knows: an outcome is never guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from experiential.types import Trajectory

Success = Callable[[Trajectory], bool | None] | float
"""A function of the finished trajectory (None: unknown), or the return from which on it counts."""
KEYS = ("success", "is_success", "won")
"""Keys of ``info`` by which environments say it."""


def known_success(
    trajectory: Trajectory,
    info: Mapping[str, Any],
    success: Success | None = None,
    reward_threshold: float | None = None,
) -> bool | None:
    """Return whether an episode succeeded; None if nothing says so.

    Args:
        trajectory: the finished episode; its own ``success`` is not read.
        info: of the last step; the first of ``KEYS`` that is there counts, if ``success`` is None.
        success: the caller's rule, which comes first.
        reward_threshold: of the environment's specification, a mean over many episodes: a return
            that reaches it is a success, a lower one says nothing.

    >>> run = Trajectory(task="Balance.", reward=12.0)
    >>> known_success(run, {}), known_success(run, {"is_success": True}), known_success(run, {}, 10)
    (None, True, True)
    >>> known_success(run, {}, lambda trajectory: len(trajectory.turns) > 3)
    False
    >>> known_success(run, {}, None, 10.0), known_success(run, {}, None, 475.0)
    (True, None)
    """
    if callable(success):
        return as_outcome(success(trajectory), "success(trajectory) to return")
    if success is not None:
        return trajectory.reward >= success
    said = said_in(info)
    if said is None and reward_threshold is not None and trajectory.reward >= reward_threshold:
        return True
    return said


def said_in(info: Mapping[str, Any]) -> bool | None:
    """Return what an environment says under the first of ``KEYS`` that is there."""
    key = next((key for key in KEYS if info.get(key) is not None), None)
    return None if key is None else as_outcome(info[key], f"info[{key!r}] to be")


def as_outcome(value: Any, place: str) -> bool | None:
    """Return a value as True, False or None; TypeError for anything that is no yes or no."""
    if value is None or value in (0, 1):  # numbers, too: many environments give 1.0
        return None if value is None else bool(value)
    raise TypeError(f"Expected {place} True, False or None, got {value!r}")


def check_success(success: Success | None) -> None:
    """Refuse an argument that is no rule for success."""
    number = isinstance(success, int | float) and not isinstance(success, bool)
    if success is not None and not callable(success) and not (number and isfinite(success)):
        raise TypeError(
            "Expected success to be a function of the trajectory, a finite return or None, got"
            f" {success!r}"
        )
