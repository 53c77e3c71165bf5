"""Compute rewards of uses, and advantages and weights per trajectory, in NumPy; no gradient.

An estimator is a function of `Cells`. To add one, name a ``module:function`` as
``actor.estimator``, or declare an entry point of group ``experiential.estimators``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from experiential.plugins import resolve
from experiential.types import Trajectory, Verdict

Floats = npt.NDArray[np.float32]


class Cells(NamedTuple):
    """Describe the rewards of a batch by (group, condition) cell; every array has shape (n,).

    Attributes:
        rewards: outcome per trajectory, float64.
        cell: index of each trajectory's cell, in [0, number of cells), int64.
        size: members of the trajectory's cell, K, int64.
        mean: mean reward of its cell.
        std: population standard deviation of the rewards of its cell.
    """

    rewards: npt.NDArray[np.float64]
    cell: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]

    @property
    def centred(self) -> npt.NDArray[np.float64]:
        """Return each reward minus the mean of its cell."""
        return self.rewards - self.mean


Estimator = Callable[[Cells], npt.NDArray[Any]]
"""Returns one advantage per trajectory, shape (n,). Cells with a lone member or equal rewards are
set to 0 afterwards, so an estimator need not guard its divisions there.
"""

ESTIMATORS: dict[str, Estimator | str] = {
    # (r - mean) / std: eq. 4 and 5 of Complementary RL (GRPO, Shao et al. 2024)
    "grpo": lambda cells: cells.centred / cells.std,
    # r - mean, so that a cell's spread does not weigh it (Liu et al. 2025)
    "dr_grpo": lambda cells: cells.centred,
    # r - mean of the others = (r - mean) K / (K - 1) (Ahmadian et al. 2024)
    "rloo": lambda cells: cells.centred / (1.0 - 1.0 / cells.size),
    # (r - mean) / std over the whole batch (REINFORCE++-baseline, Hu et al. 2025)
    "reinforce++": lambda cells: cells.centred / np.sqrt((cells.centred**2).mean()),
}


@cache  # once, not for every batch
def _named(estimator: str) -> Estimator:
    return resolve("estimators", estimator, ESTIMATORS)


def cell_advantages(
    rewards: npt.ArrayLike,
    group: npt.ArrayLike,
    guided: npt.ArrayLike,
    *,
    estimator: str | Estimator = "grpo",
    eps: float = 1e-6,
) -> Floats:
    """Compare each trajectory with the members of its (group, condition) cell.

    With ``guided`` all false a cell is a whole group: pooled advantages, eq. 4 of Complementary RL.
    Otherwise the halves of a group are compared apart: eq. 5.

    Args:
        rewards: outcome per trajectory, shape (n,), float.
        group: id of the task instance, shape (n,), integer or text.
        guided: condition, shape (n,), bool.
        estimator: a name for `ESTIMATORS` or the plug-in door, or the function itself.
        eps: spread (standard deviation) up to which a cell counts as constant.

    Returns:
        advantages, shape (n,), float32; a cell with fewer than two members or zero spread gives 0.

    Raises:
        ConfigError: the estimator is unknown.
        ValueError: shapes differ, or a reward is not finite.
    """
    if isinstance(estimator, str):
        estimator = _named(estimator)
    values = _rewards(rewards)
    if not len(values):
        return np.zeros(0, np.float32)
    cell, count = _cells(len(values), group, guided)
    size = np.bincount(cell, minlength=count)
    mean = (np.bincount(cell, values, count) / size)[cell]
    std = np.sqrt(np.bincount(cell, (values - mean) ** 2, count) / size)[cell]
    with np.errstate(divide="ignore", invalid="ignore"):
        advantages = estimator(Cells(values, cell, size[cell], mean, std))
    informative = (std > eps) & (size[cell] > 1)
    return np.where(informative, advantages, 0.0).astype(np.float32)


def turn_advantages(
    rewards: Sequence[Sequence[float]],
    group: npt.ArrayLike,
    guided: npt.ArrayLike,
    *,
    discount: float = 1.0,
    estimator: str | Estimator = "grpo",
    eps: float = 1e-6,
) -> list[Floats]:
    """Compare each turn with the same turn of the other members of its (group, condition) cell.

    G_t = r_t + discount G_(t+1), and A_t is the advantage of G_t among the members of the cell that
    got as far as turn t. With one reward at the end and no discount, the first turn has the
    advantage of the whole trajectory.

    ``rewards`` has the reward of each turn per trajectory, ``discount`` is in (0, 1], and the other
    arguments are those of ``cell_advantages``. The result has one float32 advantage per turn: 0
    where fewer than two members got so far, or all have the same G_t.
    """
    member, _ = _cells(len(rewards), group, guided)
    if not rewards:
        return []
    lengths = [len(row) for row in rewards]
    returns: list[float] = []
    for row in rewards:
        begin, following = len(returns), 0.0
        for reward in reversed(row):
            following = reward + discount * following
            returns.insert(begin, following)
    # Only turns of the same number meet.
    turns = np.concatenate([np.arange(n) for n in lengths])
    cell = np.repeat(member, lengths) * max(lengths) + turns
    alike = np.zeros(len(cell), dtype=bool)
    values = cell_advantages(returns, cell, alike, estimator=estimator, eps=eps)
    return np.split(values, np.cumsum(lengths)[:-1])


def split_weights(group: npt.ArrayLike, guided: npt.ArrayLike) -> Floats:
    """Return the weight of each trajectory in the objective of eq. 5: 1/G * 1/C * 1/K_c.

    G is the number of groups, C the number of conditions present in the trajectory's group (1 or 2)
    and K_c the size of its cell. So both halves of a group count equally whatever their sizes, and
    so do all groups. ``group`` (integer or text), ``guided`` (bool) and the weights (float32, which
    sum to 1) have shape (n,).

    Raises:
        ValueError: shapes differ.
    """
    condition = np.asarray(guided, dtype=bool)
    cell, count = _cells(len(condition), group, condition)
    if count == 0:
        return np.zeros(0, np.float32)
    label, groups = _cells(len(condition), group, np.zeros(len(condition), bool))
    first = np.unique(cell, return_index=True)[1]
    conditions = np.bincount(label[first], minlength=groups)
    return (1.0 / (groups * conditions[label] * np.bincount(cell)[cell])).astype(np.float32)


def batch_advantages(rewards: npt.ArrayLike) -> Floats:
    """Return r - mean over the batch, not divided by a spread: eq. 3 of Complementary RL.

    Rewards and advantages have shape (n,); the latter are float32.

    Raises:
        ValueError: not one-dimensional, or a reward is not finite.
    """
    values = _rewards(rewards)
    return (values - (values.mean() if len(values) else 0.0)).astype(np.float32)


def training_count_weights(
    step: int, last_trained: npt.ArrayLike, counts: npt.ArrayLike, *, cooldown: int, decay: float
) -> Floats:
    """Weigh each sample by how often it was trained on: eq. 7 of Complementary RL.

    w = 0 while step - last < cooldown, else (1 + count)^(-decay); 1 where count is 0.

    ``step`` is t, ``cooldown`` delta, ``decay`` alpha; 0 turns them off. ``last_trained`` (the step
    at which each sample was last trained on) and ``counts`` (how often) are integer, the weights
    float32 in [0, 1]; all have shape (n,).

    Raises:
        ValueError: shapes differ, a count is negative, or ``cooldown`` or ``decay`` is negative.
    """
    times, last = np.asarray(counts, dtype=np.int64), np.asarray(last_trained, dtype=np.int64)
    if times.shape != last.shape or times.ndim != 1:
        shapes = f"{times.shape} and {last.shape}"
        raise ValueError(f"Expected counts and last_trained of one shape (n,), got {shapes}")
    if cooldown < 0 or decay < 0 or (times < 0).any():
        found = f"cooldown {cooldown}, decay {decay}"
        raise ValueError(f"Expected counts, cooldown and decay of at least 0, got {found}")
    resting = (times > 0) & (step - last < cooldown)
    return np.where(resting, 0.0, (1.0 + times) ** -float(decay)).astype(np.float32)


def outcome(trajectory: Trajectory) -> float:
    """Return R of eq. 1: 1.0 for a success, else 0.0; a fractional reward does not count.

    Rollouts return no episode of unknown outcome, except those that failed technically.
    """
    return float(bool(trajectory.success))


def use_reward(success: bool) -> int:
    """Return r(m) of section 2.3: +1 if the episode that used the entry succeeded, else -1."""
    return 1 if success else -1


CRITIC_SCORES: dict[Verdict, float] = {"accept": 1.0, "refine": 0.5, "reject": 0.0}
"""s_c of appendix B.1."""


def critic_reward(verdict: Verdict | None, outcome: float) -> float:
    """Compute r~(m) = s_c(m) + r(m): eq. 8 of Complementary RL.

    s_c is 1 for accept, 0.5 for refine and 0 for reject or no verdict; r(m), ``outcome``, is -1 or
    +1. So no failure that was accepted outweighs a success that was refined.
    """
    return outcome + (CRITIC_SCORES[verdict] if verdict is not None else 0.0)


def relative_rewards(
    outcomes: npt.ArrayLike, group: Sequence[object], guided: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Compute the gain of each guided member: R - mean R of its group's free members.

    See appendix B.2 of Complementary RL. ``outcomes`` (R, in [0, 1]), ``group``, ``guided`` and the
    gains have shape (n,). A gain is not a number for free members, and without any in the group.

    Raises:
        ValueError: the shapes differ.
    """
    values, condition = np.asarray(outcomes, dtype=np.float64), np.asarray(guided, dtype=bool)
    if values.shape != condition.shape or values.shape != (len(group),):
        raise ValueError(
            f"Expected outcomes, group and guided of one length, got {values.shape}, {len(group)}"
            f" and {condition.shape}"
        )
    free: dict[object, list[float]] = {}
    for name, value, shown in zip(group, values.tolist(), condition.tolist(), strict=True):
        if not shown:
            free.setdefault(name, []).append(value)
    means = {name: sum(outcomes) / len(outcomes) for name, outcomes in free.items()}
    base = np.array([means.get(name, math.nan) for name in group], dtype=np.float64)
    return np.where(condition, values - base, math.nan)


def _rewards(rewards: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"Expected finite rewards of shape (n,), got {values!r}")
    return values


def _cells(
    n: int, group: npt.ArrayLike, guided: npt.ArrayLike
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the index of each trajectory's (group, condition) cell, and the number of cells."""
    labels: npt.NDArray[Any] = np.asarray(group)
    condition = np.asarray(guided, dtype=bool)
    if labels.shape != (n,) or condition.shape != (n,):
        raise ValueError(
            f"Expected group and guided of shape ({n},), got {labels.shape} and {condition.shape}"
        )
    index = np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64)
    names, cell = np.unique(2 * index + condition, return_inverse=True)
    return cell.reshape(-1).astype(np.int64), len(names)
