"""From episodes to what the actor learns from: advantages, weights of trajectories, and tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiential.config import ActorSettings
from experiential.training.advantages import Floats, cell_advantages, split_weights
from experiential.training.rollout import Episode, trajectory_samples
from experiential.training.runtime import Sample
from experiential.types import Condition


def actor_samples(episodes: Sequence[Episode], settings: ActorSettings) -> list[Sample]:
    """Weighted samples of a batch of episodes.

    Advantages are relative to the members of a group in the same condition (``advantage: split``, eq. 5 of Complementary RL, whose weights
    let both halves of a group count equally) or to all of them (``pooled``, eq. 4, all trajectories equally). ``estimator`` says how,
    ``aggregate`` how the tokens of a trajectory add up, and ``drop_constant`` whether cells that teach nothing take weight.

    Episodes that failed for a technical reason and those with zero advantage give none.
    """
    played = [e for e in episodes if e.trajectory.error is None and e.generations]
    if not played:
        return []
    names = {name: i for i, name in enumerate(dict.fromkeys(e.trajectory.group for e in played))}
    rewards = np.array([e.trajectory.reward for e in played], dtype=np.float32)
    group = np.array([names[e.trajectory.group] for e in played], dtype=np.int64)
    guided = np.array([e.trajectory.condition is Condition.GUIDED for e in played])
    cells = guided if settings.advantage == "split" else np.zeros(len(played), dtype=bool)
    values = cell_advantages(rewards, group, cells, estimator=settings.estimator)
    counted = _informative(values, group, cells) if settings.drop_constant else np.ones(len(played), dtype=bool)
    weights = np.zeros(len(played), dtype=np.float32)
    weights[counted] = split_weights(group[counted], cells[counted]) if settings.advantage == "split" else 1 / max(1, counted.sum())
    made = [trajectory_samples(e.generations, float(value), 1.0) for e, value in zip(played, values, strict=True)]
    lengths = np.array([sum(len(s.positions) for s in samples) for samples in made], dtype=np.float32)
    scaled = weights * _length_factor(weights, lengths, settings)
    triples = zip(made, values, scaled, strict=True)
    return [s.weighted(float(weight)) for samples, value, weight in triples if value != 0 for s in samples]


def _informative(values: Floats, group: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Members of cells in which any advantage differs from zero."""
    keys = 2 * group + cells
    return np.isin(keys, keys[values != 0])


def _length_factor(weights: Floats, lengths: Floats, settings: ActorSettings) -> Floats:
    """What turns a mean over the tokens of each trajectory into the aggregate asked for.

    ``sequence``: sum_i w_i mean_t (GRPO); ``token``: sum_i w_i sum_t / sum_i w_i n_i, every token equally (DAPO); ``constant``:
    sum_i w_i sum_t / L, so that length has no part in the weight of a token (Dr. GRPO), with L of ``length_norm`` tokens.
    """
    if settings.aggregate == "sequence":
        return np.ones_like(lengths)
    return lengths / (float((weights * lengths).sum()) or 1.0) if settings.aggregate == "token" else lengths / settings.length_norm
