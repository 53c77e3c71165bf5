"""The primary track's learning side: from a step's episodes to an update of the actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from experiential.agents.actor import ActorAgent
from experiential.config import ActorSettings
from experiential.rollout.rollout import Episode
from experiential.training.actor_samples import RewardOf, actor_samples, env_reward, uninformative
from experiential.training.methods.critic import SuccessRates
from experiential.training.methods.internalise import SelfDistillation
from experiential.training.runtime import LossSettings, PolicyRuntime, Sample, TrainStats


class ActorTrack:
    """Trains the actor on what it played: policy gradient, and imitation where the recipe has it.

    Args:
        runtime: the actor's policy.
        settings: advantages, clipping and the methods on top.
        make_actor: builds an agent as the rollouts have, to rebuild prompts with.
        reward_of: what an episode is worth.

    Attributes:
        rates: how often the actor succeeded, by task.
    """

    def __init__(
        self,
        runtime: PolicyRuntime,
        settings: ActorSettings,
        make_actor: Callable[[], ActorAgent],
        reward_of: RewardOf = env_reward,
    ) -> None:
        self._runtime, self._settings, self._make_actor, self._reward_of = (
            runtime,
            settings,
            make_actor,
            reward_of,
        )
        self._distillation = (
            SelfDistillation(settings.self_distill) if settings.self_distill else None
        )
        self.rates = SuccessRates()

    async def update(
        self, episodes: Sequence[Episode], step: int, more: Sequence[Sample] = ()
    ) -> TrainStats:
        """Learn from a step's episodes, and from ``more`` samples in the same batch; the weights that generate follow."""
        self.rates.add(e.trajectory for e in episodes)
        if not self._settings.train:
            return TrainStats(version=self._runtime.version)
        samples, version = (
            actor_samples(episodes, self._settings, self._reward_of),
            self._runtime.version,
        )
        imitated = (
            self._distillation.samples(episodes, self._make_actor(), step)
            if self._distillation
            else []
        )
        stats = await self._runtime.train([*samples, *imitated, *more], self._loss(step))
        await self._runtime.sync()
        stats.metrics["staleness"] = sum(version - s.policy_version for s in samples) / max(
            1, len(samples)
        )
        stats.metrics |= {
            name: float(count)
            for name, count in uninformative(episodes, self._settings, self._reward_of).items()
        }
        if self._distillation:
            stats.metrics |= {
                "imitated": float(len(imitated)),
                "imitation_paused": float(self._distillation.paused),
            }
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Everything a checkpoint needs, as JSON."""
        return {
            "rates": self.rates.state_dict(),
            "distillation": self._distillation.state_dict() if self._distillation else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        self.rates.load_state_dict(state["rates"])
        if self._distillation and state["distillation"]:
            self._distillation.load_state_dict(state["distillation"])

    def _loss(self, step: int) -> LossSettings:
        settings = self._settings
        return LossSettings(
            kind=settings.loss,
            low=settings.clip_low,
            high=settings.clip_high,
            ratio=settings.ratio,
            kl=settings.kl,
            epochs=settings.epochs,
            mini_batches=settings.mini_batches,
            seed=step,
        )
