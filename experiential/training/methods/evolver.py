"""What EvolveR adds to a run: the format reward of an episode, and the pruning of principles that did not help."""

from __future__ import annotations

from experiential.config import ActorSettings
from experiential.rollout.rollout import Episode
from experiential.training.actor_samples import RewardOf, env_reward
from experiential.training.rewards import evolver_reward, format_reward


def worth(settings: ActorSettings) -> RewardOf:
    """What an episode is worth to its actor: the environment's reward, with ``format_reward`` the weighted mean of it and the format's.

    The trajectory keeps the environment's reward. Without a weight the two are the same.
    """
    weight = settings.format_reward
    if not weight:
        return env_reward

    def weighted(episode: Episode) -> float:
        return evolver_reward(env_reward(episode), form(episode, settings), format_weight=weight)

    return weighted


def form(episode: Episode, settings: ActorSettings) -> float:
    """The format reward of an episode's responses."""
    return format_reward(
        [generation.text for generation in episode.generations], settings.format_parts
    )
