"""Reward the actor as EvolveR does: the outcome, and the form of the responses."""

from __future__ import annotations

from experiential.config import ActorSettings
from experiential.rollout.rollout import Episode
from experiential.training.methods.policy_gradient import PolicyGradient
from experiential.training.rewards import evolver_reward, format_reward


class EvolveR(PolicyGradient):
    """Learn by policy gradient from a weighted mean of outcome and format reward."""

    def reward(self, episode: Episode) -> float:
        """Return the weighted mean; the trajectory keeps the environment's reward."""
        return shaped_reward(episode, self._settings)


def shaped_reward(episode: Episode, settings: ActorSettings) -> float:
    """Weigh the environment's reward, 1, against the format's, ``settings.format_reward``."""
    form = format_reward([made.text for made in episode.generations], settings.format_parts)
    return evolver_reward(episode.trajectory.reward, form, format_weight=settings.format_reward)
