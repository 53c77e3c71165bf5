"""Learn by policy gradient on groups of guided and free episodes (GRPO and its kin).

See section 3.2 of Complementary RL.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiential.rollout import Episode
from experiential.training.methods.method import Method, Run
from experiential.training.runtime import LossSettings, Sample
from experiential.training.samples import actor_samples, uninformative


class PolicyGradient(Method):
    """Learn from first attempts by their advantage over other members of their group."""

    def __init__(self, run: Run) -> None:
        self._actor, self._settings = run.actor, run.experiment.actor

    def reward(self, episode: Episode) -> float:
        """Return the reward of an episode for the actor: here, its environment's reward."""
        return episode.trajectory.reward

    async def samples(self, episodes: Sequence[Episode], step: int) -> list[Sample]:
        """Return weighted samples with their advantages; see `actor_samples`.

        The metrics are their age in updates, and how many episodes taught nothing.
        """
        firsts = [e for e in episodes if e.attempt == 1]
        samples = actor_samples(firsts, self._settings, self.reward)
        age = sum(self._actor.version - sample.policy_version for sample in samples)
        self.metrics = {"actor_staleness": age / max(1, len(samples))} | {
            f"actor_{name}": float(count)
            for name, count in uninformative(firsts, self._settings, self.reward).items()
        }
        return samples

    def loss(self, step: int) -> LossSettings:
        """Return the loss that the actor's settings name."""
        settings = self._settings
        return LossSettings(
            kind=settings.loss,
            low=settings.clip_low,
            high=settings.clip_high,
            ratio=settings.ratio,
            correction=settings.correction,
            correction_cap=settings.options.correction_cap,
            kl=settings.kl,
            epochs=settings.epochs,
            mini_batches=settings.mini_batches,
            seed=step,
        )
