"""Make the actor's samples from episodes: advantages, weights of trajectories, and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from experiential.config import ActorSettings
from experiential.rollout.rollout import Episode
from experiential.training.advantages import Floats, cell_advantages, split_weights, turn_advantages
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
    them (``pooled``, eq. 4, all trajectories equally); second attempts are compared with second
    attempts. ``estimator`` says how, ``credit`` whether a trajectory or each of its turns has one,
    ``aggregate`` how the tokens of a trajectory add up, and ``drop_constant`` whether cells that
    teach nothing take weight.

    Episodes that failed for a technical reason give none; those with zero advantage only where a KL
    penalty holds them to the reference.
    """
    played = trainable(episodes)
    if not played:
        return []
    group, cells = _cells(played, settings)
    values = _advantages(played, group, cells, settings, reward_of)
    telling = np.array([any(row) for row in values])
    counted = (
        _informative(telling, group, cells)
        if settings.drop_constant
        else np.ones(len(played), dtype=bool)
    )
    weights = np.zeros(len(played), dtype=np.float32)
    weights[counted] = (
        split_weights(group[counted], cells[counted])
        if settings.advantage == "split"
        else 1 / max(1, counted.sum())
    )
    made = [
        trajectory_samples(e.generations, row, 1.0) for e, row in zip(played, values, strict=True)
    ]
    lengths = np.array(
        [sum(len(s.positions) for s in samples) for samples in made], dtype=np.float32
    )
    scaled = weights * _length_factor(weights, lengths, settings)
    triples = zip(made, telling, scaled, strict=True)
    return [
        s.weighted(float(weight))
        for samples, tells, weight in triples
        if tells or settings.kl > 0
        for s in samples
    ]


def trainable(episodes: Sequence[Episode]) -> list[Episode]:
    """Select the trainable episodes: no technical failure, and at least one response."""
    return [e for e in episodes if e.trajectory.error is None and e.generations]


def uninformative(
    episodes: Sequence[Episode], settings: ActorSettings, reward_of: RewardOf = env_reward
) -> dict[str, int]:
    """Count the parts of a batch without a learning signal, so that none is lost silently.

    Returns:
        ``empty``: finished episodes without a response; ``lone``: cells (group, condition, attempt)
            with one member, which has nobody to
        be compared with; ``constant``: cells of more members whose rewards are all equal. Counts of
        zero are left out.
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
    """Return, per episode, the number of its group and its half of the group.

    Second attempts form groups of their own; with ``pooled`` a group has one half.
    """
    keys = [(e.trajectory.group, e.job.attempt if e.job else 1) for e in played]
    names = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group = np.array([names[key] for key in keys], dtype=np.int64)
    guided = np.array([e.trajectory.condition is Condition.GUIDED for e in played])
    return group, guided if settings.advantage == "split" else np.zeros(len(played), dtype=bool)


def _advantages(
    played: Sequence[Episode],
    group: npt.NDArray[np.int64],
    cells: npt.NDArray[np.bool_],
    settings: ActorSettings,
    reward_of: RewardOf,
) -> list[list[float]]:
    """Compute, per episode, one advantage for each of its responses."""
    if settings.credit == "turn":
        rewards = [_rewards(e, reward_of(e)) for e in played]
        turns = turn_advantages(
            rewards, group, cells, discount=settings.discount, estimator=settings.estimator
        )
        return [row.tolist() for row in turns]
    whole = cell_advantages(
        [reward_of(e) for e in played], group, cells, estimator=settings.estimator
    )
    return [[value] * len(e.generations) for e, value in zip(played, whole.tolist(), strict=True)]


def _rewards(episode: Episode, worth: float) -> list[float]:
    """Return the reward of each response.

    The episode's reward beyond its environment's is added to the last one.
    """
    steps = iter(turn.reward for turn in episode.trajectory.turns)
    asked = episode.asked or (False,) * len(episode.generations)
    rewards = [0.0 if call else next(steps, 0.0) for call in asked]
    rewards[-1] += worth - episode.trajectory.reward
    return rewards


def _informative(
    telling: npt.NDArray[np.bool_], group: npt.NDArray[np.int64], cells: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Mark the members of cells in which any advantage differs from zero."""
    keys = 2 * group + cells
    return np.isin(keys, keys[telling])


def _length_factor(weights: Floats, lengths: Floats, settings: ActorSettings) -> Floats:
    """Compute the factor from a mean over each trajectory's tokens to the chosen aggregate.

    ``sequence``: sum_i w_i mean_t (GRPO); ``token``: sum_i w_i sum_t / sum_i w_i n_i, every token
    equally (DAPO); ``constant``: sum_i w_i sum_t / L, so that length has no part in the weight of a
    token (Dr. GRPO), with L of ``length_norm`` tokens.
    """
    if settings.aggregate == "sequence":
        return np.ones_like(lengths)
    return (
        lengths / (float((weights * lengths).sum()) or 1.0)
        if settings.aggregate == "token"
        else lengths / settings.length_norm
    )


def trajectory_samples(
    generations: Sequence[Generation], advantage: float | Sequence[float], weight: float
) -> list[Sample]:
    """Make samples of one trajectory's responses.

    The trajectory's weight is shared in proportion to their trained tokens.

    Responses whose prompt continues the previous prompt and response token by token become one
    sample, so that a conversation kept whole costs one forward pass and has one sequence-level
    ratio.

    Args:
        generations: the responses, in order.
        advantage: of all of them, or one for each.
        weight: of the trajectory.
    """
    chained: list[Sample] = []
    values = [advantage] * len(generations) if isinstance(advantage, int | float) else advantage
    for generation, value in zip(generations, values, strict=True):
        sample = sample_from_generation(generation, value, weight=weight)
        if chained and _continues(chained[-1], sample):
            sample = _joined(chained.pop(), sample)
        chained.append(sample)
    chained = [s for s in chained if s.positions]
    total = sum(len(s.positions) for s in chained)
    return [replace(s, weight=weight * len(s.positions) / total) for s in chained]


def _continues(first: Sample, second: Sample) -> bool:
    """Return whether both can form one sequence.

    A schema applies to one response only, so samples with a schema stay separate.
    """
    return (
        first.json_schema is None
        and second.json_schema is None
        and second.tokens[: len(first.tokens)] == first.tokens
    )


def _joined(first: Sample, second: Sample) -> Sample:
    return Sample(
        tokens=second.tokens,
        positions=first.positions + second.positions,
        logprobs=first.logprobs + second.logprobs,
        advantages=first.advantages + second.advantages,
        allowed=first.allowed + second.allowed,
        teacher=first.teacher + second.teacher,
        weight=first.weight,
        temperature=first.temperature,
        policy_version=min(first.policy_version, second.policy_version),
    )
