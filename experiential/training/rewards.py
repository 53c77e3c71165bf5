"""Reward trajectories (eq. 5) and the experience that guided them (section 3.3)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from experiential.config import BonusKind, FormatPart
from experiential.envs.answers import exact_match as exact_match  # R_outcome of EvolveR
from experiential.types import Trajectory, Verdict

Key = tuple[str, int]
"""An experience at one version: (experience id, version)."""


def outcome(trajectory: Trajectory) -> float:
    """Return R of eq. 1: 1.0 for a success, else 0.0; a fractional reward does not count."""
    return float(trajectory.success)


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


def entropy_bonus(
    before: float,
    after: float,
    kind: BonusKind,
    *,
    weight: float,
    low: float = -1.0,
    high: float = 1.0,
    temperature: float = 1.0,
) -> float:
    """Compute the bonus of an entry that lowers the actor's entropy, D = H(q) - H(q, m).

    See appendix B.2 of Complementary RL. With w the ``weight`` and tau the ``temperature``:

    * ``relative``: w clip(D / H(q), low, high);
    * ``tanh``: w tanh(D);
    * ``sigmoid``: w (2 sigmoid(D / tau) - 1);
    * ``asymmetric``: w clip(D, low, high), with a ``low`` nearer to 0 than ``high`` where harm
      shall cost less than help earns;
    * ``log``: w sgn(D) log(1 + abs(D)).

    ``before`` is H(q), the entropy over the task without the entry, and ``after`` H(q, m), with it,
    in nats.

    Raises:
        ValueError: an entropy is negative or not finite, or the kind is unknown.
    """
    if not (math.isfinite(before) and math.isfinite(after) and before >= 0 and after >= 0):
        raise ValueError(f"Expected finite entropies of at least 0, got {before} and {after}")
    gain = before - after
    match kind:
        case "relative":
            return weight * min(high, max(low, gain / before)) if before > 0 else 0.0
        case "tanh":
            return weight * math.tanh(gain)
        case "sigmoid":
            # 2 sigmoid(x) - 1 = tanh(x / 2), and does not overflow
            return weight * math.tanh(gain / (2 * temperature))
        case "asymmetric":
            return weight * min(high, max(low, gain))
        case "log":
            return weight * math.copysign(math.log1p(abs(gain)), gain)
        case _:
            raise ValueError(f"Expected a kind of {', '.join(get_args(BonusKind))}, got {kind!r}")


ALL_PARTS: tuple[FormatPart, ...] = get_args(FormatPart)
_THINK_SCORES = (0.0, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0)
_FOUND: dict[FormatPart, re.Pattern[str]] = {
    "think": re.compile(
        r"<think>\s*(?=[^\s<])(?:(?!<think>).)*?</think>", re.DOTALL | re.IGNORECASE
    ),
    "search_experience": re.compile(r"<search_experience>", re.IGNORECASE),
    "search_knowledge": re.compile(r"<search_knowledge>|(?<![\w<])search\[", re.IGNORECASE),
    "answer": re.compile(r"<answer>\s*[^\s<]|(?<![\w<])answer\[", re.IGNORECASE),
}


def think_score(blocks: int) -> float:
    """Compute R_think of EvolveR from the number of thoughts: .5 for more than eight.

    The published code gives 0 for seven and eight, a gap in its table that the paper does not
    state.
    """
    return _THINK_SCORES[blocks] if blocks < len(_THINK_SCORES) else 0.5


def search_score(experience: int, knowledge: int, kinds: int = 2) -> float:
    """Compute R_search of EvolveR, in [0, 1], from the number of searches for each kind.

    It is .5 for a search of every kind, .2 for one kind of two, and .1 per further search, at most
    .5. An environment with only one of them has ``kinds=1``: its use then counts as all.
    """
    made = (experience > 0) + (knowledge > 0)
    if not made:
        return 0.0
    extra = experience + knowledge - made
    return (0.5 if made >= kinds else 0.2) + min(0.5, 0.1 * extra)


def format_reward(responses: Sequence[str], parts: Sequence[FormatPart] = ALL_PARTS) -> float:
    """Compute R_format of EvolveR: 1[complete] (R_think + R_search) / 2, in [0, 1].

    Complete are responses with at least one thought, one search of any kind and one answer.
    ``parts`` leaves out what the environment has no use for: it is neither asked for nor scored,
    and without one of R_think and R_search the other is the whole.

    Raises:
        ValueError: ``parts`` has neither thoughts nor searches.
    """
    searches = [part for part in parts if part.startswith("search")]
    if not searches and "think" not in parts:
        raise ValueError(
            "Expected think or a search among the parts of the format reward, got"
            f" {', '.join(parts) or 'none'}"
        )
    count = {
        part: sum(len(_FOUND[part].findall(text)) for text in responses) if part in parts else 0
        for part in ALL_PARTS
    }
    asked = [count[part] > 0 for part in parts if part in ("think", "answer")]
    if not all(asked) or (searches and not any(count[part] for part in searches)):
        return 0.0
    scores = [think_score(count["think"])] if "think" in parts else []
    if searches:
        asked_bank, asked_world = count["search_experience"], count["search_knowledge"]
        scores.append(search_score(asked_bank, asked_world, len(searches)))
    return sum(scores) / len(scores)


def evolver_reward(
    outcome: float, form: float, *, outcome_weight: float = 1.0, format_weight: float = 0.1
) -> float:
    """Compute R = (w_o R_outcome + w_f R_format) / (w_o + w_f), with rewards in [0, 1].

    The default weights are those of EvolveR's script.

    Raises:
        ValueError: a weight is negative, or both are 0.
    """
    total = outcome_weight + format_weight
    if min(outcome_weight, format_weight) < 0 or total <= 0:
        raise ValueError(
            f"Expected weights of at least 0 and not both 0, got {outcome_weight} and"
            f" {format_weight}"
        )
    return (outcome_weight * outcome + format_weight * form) / total
