"""Reward the actor as EvolveR does: the outcome, and the form of the responses."""

from __future__ import annotations

from experiential.config import EvolverSettings
from experiential.rollout.rollout import Episode
from experiential.training.methods.method import Run
from experiential.training.methods.policy_gradient import PolicyGradient
from experiential.training.rewards import evolver_reward, format_reward


class EvolveR(PolicyGradient):
    """Learn by policy gradient from a weighted mean of outcome and format reward."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._form = run.experiment.methods.evolver or EvolverSettings()

    def reward(self, episode: Episode) -> float:
        """Return the weighted mean; the trajectory keeps the environment's reward."""
        return shaped_reward(episode, self._form)


def shaped_reward(episode: Episode, settings: EvolverSettings) -> float:
    """Weigh the environment's reward, 1, against the format's, ``settings.format_reward``."""
    form = format_reward([made.text for made in episode.generations], settings.format_parts)
    return evolver_reward(episode.trajectory.reward, form, format_weight=settings.format_reward)
