"""Say whether an episode succeeded, or that nobody knows: an outcome is never guessed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import isfinite
from numbers import Real
from typing import Any, Literal, Protocol, cast, runtime_checkable

from pydantic import Field

from experiential.sync import run_sync
from experiential.types import Record, Trajectory

_LOGGER = logging.getLogger(__name__)
_WARNED = set[type[Exception]]()


class Judgement(Record):
    """Hold what a judge said of an episode: its outcome, None if it cannot tell, and why."""

    success: bool | None
    reason: str = Field(default="no reason was given", min_length=1)


@runtime_checkable
class OutcomeJudge(Protocol):
    """Say the outcome of an episode after its end, such as ``Judge`` does with a language model.

    Attributes:
        rubric: what makes an episode a success, in words; recorded with the episode.
    """

    rubric: str

    async def ajudge(self, trajectory: Trajectory) -> Judgement:
        """Judge a finished episode; what is raised leaves its outcome unknown."""
        ...


Success = Callable[[Trajectory], bool | None] | float | Literal["better"] | OutcomeJudge
"""A function of the finished trajectory (None: unknown), the score, else return, from which on it
counts, a judge, or ``better``: a score above the mean of the earlier episodes of the task."""
Score = Callable[[Trajectory], float]
"""A function of the finished trajectory that grades it; the scale is the caller's."""
KEYS = ("success", "is_success", "won")
"""Keys of ``info`` by which environments say it."""


def concluded(
    trajectory: Trajectory,
    info: Mapping[str, Any],
    success: Success | None = None,
    reward_threshold: float | None = None,
) -> Trajectory:
    """Return a finished episode with its outcome, as far as that is known now.

    What ``better`` or a judge says comes later: such an episode is marked as ``relative``, or with
    the ``rubric`` of its judge. The arguments are as for `known_success`.

    >>> run = Trajectory(task="Balance.", reward=12.0)
    >>> concluded(run, {}, 10).success, concluded(run, {}, "better").relative
    (True, True)
    """
    if success == "better":
        return trajectory.model_copy(update={"relative": True})
    if isinstance(success, OutcomeJudge):
        return trajectory.model_copy(update={"rubric": success.rubric})
    said = known_success(trajectory, info, success, reward_threshold)
    return trajectory.model_copy(update={"success": said})


def judged(trajectory: Trajectory, judge: OutcomeJudge) -> Trajectory:
    """Return a finished episode with what its judge says, waiting for it.

    A judge that fails leaves the outcome unknown; the first failure of each kind is a warning.
    """
    update: dict[str, Any] = {"rubric": judge.rubric}
    try:
        said = run_sync(judge.ajudge(trajectory))
    except Exception as error:  # noqa: BLE001  (the episode is worth more than its outcome)
        if type(error) not in _WARNED:
            _WARNED.add(type(error))
            _LOGGER.warning("The judge failed, and the outcome stays unknown: %s", error)
    else:
        update |= {"success": said.success, "judgement": said.reason}
    return trajectory.model_copy(update=update)


def said_score(info: Mapping[str, Any]) -> float | None:
    """Return ``info["score"]`` of the last step if it is a finite number."""
    said = info.get("score")
    if isinstance(said, bool) or not isinstance(said, Real):
        return None
    try:
        score = float(said)
    except OverflowError:  # an integer or a fraction beyond what a float holds
        return None
    return score if isfinite(score) else None


def known_success(
    trajectory: Trajectory,
    info: Mapping[str, Any],
    success: Callable[[Trajectory], bool | None] | float | None = None,
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
        graded = trajectory.reward if trajectory.score is None else trajectory.score
        return graded >= success
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
    try:
        if value is None or value in (0, 1):  # numbers, too: many environments give 1.0
            return None if value is None else bool(value)
    except ValueError:  # an array of several
        pass
    raise TypeError(
        f"Expected {place} True, False or None, got {value!r}; a rule success= comes before what"
        " info says"
    )


def check_success(success: Success | None, score: Score | None = None, task: object = None) -> None:
    """Refuse arguments that are no rules for success, the score and a wrapper's task."""
    if isinstance(success, int | float):
        rule = not isinstance(success, bool) and isfinite(success)
    else:
        rule = callable(success) or success is None or success == "better"
        if isinstance(success, OutcomeJudge):  # a blank rubric stands for an episode without judge
            rubric = cast("object", success.rubric)
            if not isinstance(rubric, str) or not rubric.strip():
                raise TypeError(
                    f"Expected a judge whose rubric says what a success is, got rubric={rubric!r}"
                )
            rule = True
    if not rule:
        raise TypeError(
            "Expected success to be a function of the trajectory, a finite return, a Judge,"
            f" 'better' or None, got {success!r}"
        )
    if score is not None and not callable(score):
        raise TypeError(
            f"Expected score to be a function of the trajectory or None, got {score!r}; give a"
            " number to finish(score=...)"
        )
    if task is not None and not callable(task):
        raise TypeError(
            f"Expected task to be a function of observation and info, or None, got {task!r}; for"
            f" one task give lambda observation, info: {task!r}"
        )
