"""Advantages and per-trajectory weights: NumPy in, NumPy out, no gradient needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++"]
"""How rewards of one cell become advantages."""


def split_group_advantages(
    rewards: npt.ArrayLike, group: npt.ArrayLike, guided: npt.ArrayLike, *, eps: float = 1e-6
) -> Floats:
    """Advantages normalised inside each (group, condition) cell: eq. 5 of Complementary RL.

    A = (r - mean) / std over the cell, with the population standard deviation (divided by K_c, not
    K_c - 1), so that the advantages of a cell have mean 0 and variance 1.

    Args:
        rewards: outcome per trajectory, shape (n,), float.
        group: id of the task instance, shape (n,), integer or text.
        guided: condition, shape (n,), bool.
        eps: spread (standard deviation) up to which a cell counts as constant.

    Returns:
        advantages, shape (n,), float32; a cell with fewer than two members or zero spread gives 0.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    return cell_advantages(rewards, group, guided, eps=eps)


def cell_advantages(
    rewards: npt.ArrayLike,
    group: npt.ArrayLike,
    guided: npt.ArrayLike,
    *,
    estimator: Estimator = "grpo",
    eps: float = 1e-6,
) -> Floats:
    """Advantages relative to the members of the same (group, condition) cell; with ``guided`` all false a cell is a group.

    With mean and population standard deviation over a cell of K members:

    * ``grpo``: A = (r - mean) / std (Shao et al. 2024);
    * ``dr_grpo``: A = r - mean, so that easy and hard tasks are not weighed up (Liu et al. 2025);
    * ``rloo``: A = r - mean of the others = (r - mean) K / (K - 1) (Ahmadian et al. 2024);
    * ``reinforce++``: A = (r - mean) / standard deviation of r - mean over the whole batch
      (REINFORCE++-baseline, Hu et al. 2025).

    Args:
        rewards: outcome per trajectory, shape (n,), float.
        group: id of the task instance, shape (n,), integer or text.
        guided: condition, shape (n,), bool.
        estimator: one of the above.
        eps: spread (standard deviation) up to which a cell, or with ``reinforce++`` the batch,
            counts as constant.

    Returns:
        advantages, shape (n,), float32; a cell with fewer than two members or zero spread gives 0.

    Raises:
        ValueError: shapes differ, a reward is not finite, or the estimator is unknown.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(
            f"Expected an estimator of {', '.join(get_args(Estimator))}, got {estimator!r}"
        )
    values = _rewards(rewards)
    cell, count = _cells(len(values), group, guided)
    sizes = np.bincount(cell, minlength=count)
    centred = values - (np.bincount(cell, values, count) / np.maximum(sizes, 1))[cell]
    spread = np.sqrt(np.bincount(cell, centred**2, count) / np.maximum(sizes, 1))[cell]
    informative = (spread > eps) & (sizes[cell] > 1)
    scale = np.ones(len(values))
    if estimator == "grpo":
        scale = np.where(informative, spread, 1.0)
    elif estimator == "rloo":
        scale = 1.0 - 1.0 / np.maximum(sizes[cell], 2)
    elif estimator == "reinforce++":
        scale = np.full(
            len(values), max(float(np.sqrt((centred**2).mean())) if len(values) else 1.0, eps)
        )
    return np.where(informative, centred / scale, 0.0).astype(np.float32)


def turn_advantages(
    rewards: Sequence[Sequence[float]],
    group: npt.ArrayLike,
    guided: npt.ArrayLike,
    *,
    discount: float = 1.0,
    estimator: Estimator = "grpo",
    eps: float = 1e-6,
) -> list[Floats]:
    """Step-wise credit: an advantage per turn, relative to the members of the same (group, condition) cell at the same turn.

    G_t = r_t + discount G_(t+1), and A_t is the advantage of G_t among the members of the cell that
    got as far as turn t. With the one reward at the end and no discount the first turn has the
    advantage of the whole trajectory.

    Args:
        rewards: per trajectory the reward of each turn.
        group: id of the task instance, shape (n,), integer or text.
        guided: condition, shape (n,), bool.
        discount: gamma, in (0, 1].
        estimator: as in ``cell_advantages``.
        eps: likewise.

    Returns:
        per trajectory one advantage per turn, float32; 0 where fewer than two members got so far,
        or all have the same G_t.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    labels, condition = np.asarray(group), np.asarray(guided, dtype=bool)
    if labels.shape != (len(rewards),) or condition.shape != (len(rewards),):
        raise ValueError(
            f"Expected group and guided of shape ({len(rewards)},), got {labels.shape} and"
            f" {condition.shape}"
        )
    names = np.unique(labels, return_inverse=True)[1].reshape(-1)
    lengths = [len(row) for row in rewards]
    longest = max(lengths, default=0)
    flat = np.array(
        [value for row in rewards for value in _returns(row, discount)], dtype=np.float64
    )
    cell = np.array(
        [
            name * longest + turn
            for name, n in zip(names.tolist(), lengths, strict=True)
            for turn in range(n)
        ],
        dtype=np.int64,
    )
    values = cell_advantages(
        flat, cell, np.repeat(condition, lengths), estimator=estimator, eps=eps
    )
    return np.split(values, np.cumsum(lengths)[:-1]) if lengths else []


def _returns(rewards: Sequence[float], discount: float) -> list[float]:
    """G_t of every turn."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + discount * (returns[-1] if returns else 0.0))
    return returns[::-1]


def pooled_group_advantages(
    rewards: npt.ArrayLike, group: npt.ArrayLike, *, eps: float = 1e-6
) -> Floats:
    """Advantages normalised inside each group, whatever the condition: eq. 4 of Complementary RL (plain GRPO).

    Args:
        rewards: outcome per trajectory, shape (n,), float.
        group: id of the task instance, shape (n,), integer or text.
        eps: spread up to which a group counts as constant.

    Returns:
        advantages, shape (n,), float32, with the conventions of ``split_group_advantages``.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    values = _rewards(rewards)
    return split_group_advantages(values, group, np.zeros(len(values), bool), eps=eps)


def split_weights(group: npt.ArrayLike, guided: npt.ArrayLike) -> Floats:
    """Weight of each trajectory in the objective of eq. 5: 1/G * 1/C * 1/K_c.

    G is the number of groups, C the number of conditions present in the trajectory's group (2, or 1
    where a group has one condition only, which gives its members 1/K each) and K_c the size of its
    cell. So both halves of a group count equally whatever their sizes, and so do all groups.

    Args:
        group: id of the task instance, shape (n,), integer or text.
        guided: condition, shape (n,), bool.

    Returns:
        weights, shape (n,), float32; they sum to 1 (n > 0).

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
    """A = r - mean over the batch, not divided by a spread: the advantage of eq. 3 of Complementary RL.

    Args:
        rewards: mean reward per sample, shape (n,), float.

    Returns:
        advantages, shape (n,), float32.

    Raises:
        ValueError: not one-dimensional, or a reward is not finite.
    """
    values = _rewards(rewards)
    return (values - (values.mean() if len(values) else 0.0)).astype(np.float32)


def training_count_weights(
    step: int, last_trained: npt.ArrayLike, counts: npt.ArrayLike, *, cooldown: int, decay: float
) -> Floats:
    """Weight of each sample by how often it was trained on: eq. 7 of Complementary RL.

    w = 0 while step - last < cooldown, else (1 + count)^(-decay).

    Args:
        step: present training step t.
        last_trained: step at which each sample was last trained on, shape (n,), integer; ignored
            where ``counts`` is 0.
        counts: how often each sample was trained on, shape (n,), integer.
        cooldown: delta; 0 turns the cooldown off.
        decay: alpha >= 0; 0 turns the discount off.

    Returns:
        weights, shape (n,), float32, in [0, 1]; a sample never trained on has weight 1.

    Raises:
        ValueError: shapes differ, a count is negative, or ``cooldown`` or ``decay`` is negative.
    """
    times, last = np.asarray(counts, dtype=np.int64), np.asarray(last_trained, dtype=np.int64)
    if times.shape != last.shape or times.ndim != 1:
        raise ValueError(
            f"Expected counts and last_trained of one shape (n,), got {times.shape} and"
            f" {last.shape}"
        )
    if cooldown < 0 or decay < 0 or (times < 0).any():
        raise ValueError(
            f"Expected counts, cooldown and decay of at least 0, got cooldown {cooldown}, decay"
            f" {decay}"
        )
    resting = (times > 0) & (step - last < cooldown)
    return np.where(resting, 0.0, (1.0 + times) ** -float(decay)).astype(np.float32)


def _rewards(rewards: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"Expected finite rewards of shape (n,), got {values!r}")
    return values


def _cells(
    n: int, group: npt.ArrayLike, guided: npt.ArrayLike
) -> tuple[npt.NDArray[np.int64], int]:
    """Index of each trajectory's (group, condition) cell, and how many cells there are."""
    labels: npt.NDArray[Any] = np.asarray(group)
    condition = np.asarray(guided, dtype=bool)
    if labels.shape != (n,) or condition.shape != (n,):
        raise ValueError(
            f"Expected group and guided of shape ({n},), got {labels.shape} and {condition.shape}"
        )
    index = np.unique(labels, return_inverse=True)[1].reshape(-1).astype(np.int64)
    names, cell = np.unique(2 * index + condition, return_inverse=True)
    return cell.reshape(-1).astype(np.int64), len(names)
