"""Make the actor's samples from episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from experiential.config import ActorSettings
from experiential.rollout import Episode
from experiential.training.advantages import cell_advantages, split_weights, turn_advantages
from experiential.training.runtime import Sample, sample_from_generation
from experiential.types import Condition, Generation

RewardOf = Callable[[Episode], float]
"""What an episode is worth to its actor."""


def env_reward(episode: Episode) -> float:
    """Return the sum of the environment's rewards."""
    return episode.trajectory.reward


def actor_samples(
    episodes: Sequence[Episode], settings: ActorSettings, reward_of: RewardOf = env_reward
) -> list[Sample]:
    """Make weighted samples of a batch of episodes.

    Advantages are relative to the members of a group in the same condition (``advantage: split``,
    eq. 5 of Complementary RL, whose weights let both halves of a group count equally) or to all of
    them (``pooled``, eq. 4); second attempts are compared with second attempts. ``estimator`` says
    how, ``credit`` whether a trajectory or each of its turns has one, ``aggregate`` how the tokens
    of a trajectory add up, and ``drop_constant`` whether cells that teach nothing take weight.

    Episodes that failed for a technical reason give none; those with zero advantage only where a KL
    penalty holds them to the reference.
    """
    played = trainable(episodes)
    if not played:
        return []
    group, cells = _cells(played, settings)
    rewards = [reward_of(e) for e in played]
    estimator = settings.estimator
    if settings.credit == "turn":
        by_turn: list[list[float]] = []
        for episode, worth in zip(played, rewards, strict=True):
            steps = iter(turn.reward for turn in episode.trajectory.turns)
            asked = episode.asked or (False,) * len(episode.generations)
            by_turn.append([0.0 if call else next(steps, 0.0) for call in asked])
            # The last response gets what the episode is worth beyond its environment's rewards.
            by_turn[-1][-1] += worth - episode.trajectory.reward
        values = turn_advantages(
            by_turn, group, cells, discount=settings.options.discount, estimator=estimator
        )
    else:
        whole = cell_advantages(rewards, group, cells, estimator=estimator)
        values = [np.full(len(e.generations), a) for e, a in zip(played, whole, strict=True)]
    telling = np.array([row.any() for row in values])
    counted = np.ones(len(played), dtype=bool)
    if settings.drop_constant:  # only cells in which any advantage differs from zero
        keys = 2 * group + cells
        counted = np.isin(keys, keys[telling])
    weights = np.zeros(len(played), dtype=np.float32)
    weights[counted] = (
        split_weights(group[counted], cells[counted])
        if settings.advantage == "split"
        else 1 / max(1, counted.sum())
    )
    made = [
        trajectory_samples(e.generations, row.tolist(), 1.0)
        for e, row in zip(played, values, strict=True)
    ]
    lengths = np.array([sum(len(s.positions) for s in own) for own in made], dtype=np.float32)
    # "sequence" is sum_i w_i mean_t (GRPO), "token" sum_i w_i sum_t / sum_i w_i n_i (DAPO), and
    # "constant" sum_i w_i sum_t / L, so that length has no part in a token's weight (Dr. GRPO).
    if settings.aggregate == "token":
        weights = weights * (lengths / (float((weights * lengths).sum()) or 1.0))
    elif settings.aggregate == "constant":
        weights = weights * (lengths / settings.options.length_norm)
    return [
        sample.weighted(float(weight))
        for own, tells, weight in zip(made, telling, weights, strict=True)
        if tells or settings.kl > 0
        for sample in own
    ]


def trainable(episodes: Sequence[Episode]) -> list[Episode]:
    """Select the trainable episodes: no technical failure, and at least one response."""
    return [e for e in episodes if e.trajectory.error is None and e.generations]


def uninformative(
    episodes: Sequence[Episode], settings: ActorSettings, reward_of: RewardOf = env_reward
) -> dict[str, int]:
    """Count the parts of a batch without a learning signal, so that none is lost silently.

    ``empty`` are finished episodes without a response, ``lone`` cells (group, condition, attempt)
    of one member, ``constant`` cells of more whose rewards are all equal. Zeros are left out.
    """
    played = trainable(episodes)
    finished = [e for e in episodes if e.trajectory.error is None]
    counts = {"empty": len(finished) - len(played), "lone": 0, "constant": 0}
    if played:
        group, cells = _cells(played, settings)
        rewards = np.array([reward_of(e) for e in played])
        for key in set(zip(group.tolist(), cells.tolist(), strict=True)):
            members = rewards[(group == key[0]) & (cells == key[1])]
            counts["lone"] += len(members) == 1
            counts["constant"] += len(members) > 1 and float(np.ptp(members)) == 0.0
    return {name: count for name, count in counts.items() if count}


def _cells(
    played: Sequence[Episode], settings: ActorSettings
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the group and half of each episode; second attempts form groups of their own."""
    keys = [(e.trajectory.group, e.attempt) for e in played]
    names = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group = np.array([names[key] for key in keys], dtype=np.int64)
    guided = np.array([e.trajectory.condition is Condition.GUIDED for e in played])
    return group, guided if settings.advantage == "split" else np.zeros(len(played), dtype=bool)


def trajectory_samples(
    generations: Sequence[Generation], advantage: float | Sequence[float], weight: float
) -> list[Sample]:
    """Make samples of one trajectory's responses, its weight shared by their trained tokens.

    Responses whose prompt continues the previous prompt and response token by token become one
    sample: one forward pass, one sequence-level ratio. A schema applies to one response only, so
    samples with one stay separate. ``advantage`` is one of all responses, or one for each.
    """
    chained: list[Sample] = []
    values = [advantage] * len(generations) if isinstance(advantage, int | float) else advantage
    for generation, value in zip(generations, values, strict=True):
        sample = sample_from_generation(generation, value, weight=weight)
        before = chained[-1] if chained else None
        if (
            before is not None
            and before.json_schema is None
            and sample.json_schema is None
            and sample.tokens[: len(before.tokens)] == before.tokens
        ):
            chained[-1] = replace(
                before,
                tokens=sample.tokens,
                positions=before.positions + sample.positions,
                logprobs=before.logprobs + sample.logprobs,
                advantages=before.advantages + sample.advantages,
                allowed=before.allowed + sample.allowed,
                policy_version=min(before.policy_version, sample.policy_version),
            )
        else:
            chained.append(sample)
    chained = [s for s in chained if s.positions]
    total = sum(len(s.positions) for s in chained)
    return [replace(s, weight=weight * len(s.positions) / total) for s in chained]
