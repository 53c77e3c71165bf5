"""Reward the actor as EvolveR does: the outcome, and the form of the responses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

from experiential.config import EvolverSettings, FormatPart
from experiential.rollout import Episode
from experiential.training.methods.method import Run
from experiential.training.methods.policy_gradient import PolicyGradient

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


class EvolveR(PolicyGradient):
    """Learn by policy gradient from a weighted mean of outcome and format reward."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._form = run.experiment.methods.evolver or EvolverSettings(format_reward=0.0)

    def reward(self, episode: Episode) -> float:
        """Return the weighted mean; the trajectory keeps the environment's reward."""
        return shaped_reward(episode, self._form)


def shaped_reward(episode: Episode, settings: EvolverSettings) -> float:
    """Weigh the environment's reward, 1, against the format's, ``settings.format_reward``."""
    form = format_reward([made.text for made in episode.generations], settings.format_parts)
    return evolver_reward(episode.trajectory.reward, form, format_weight=settings.format_reward)


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
