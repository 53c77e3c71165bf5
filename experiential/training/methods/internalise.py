"""Imitate successes with help after prompts without it: internalisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiential.agents.actor import ActorAgent
from experiential.config import SelfDistillSettings
from experiential.rollout import Episode
from experiential.training.advantages import outcome, relative_rewards
from experiential.training.methods.method import Method
from experiential.training.runtime import Sample
from experiential.training.samples import trainable, trajectory_samples
from experiential.types import Condition, Generation


def without_help(episode: Episode, actor: ActorAgent) -> list[Generation]:
    """Return the responses of an episode, after prompts without advice and bank calls.

    Responses that did not step the environment are left out. Prompts are rebuilt as token ids from
    the environment's own observations by ``actor``, which has the settings of the one that played;
    its conversation is replaced. The responses keep the ids that were sampled, and they alone are
    trained on.

    Raises:
        ValueError: the episode does not have one response per turn.
    """
    return actor.replay([turn.observation for turn in episode.trajectory.turns], episode.acts())


def imitation_samples(
    episodes: Sequence[Episode], actor: ActorAgent, weight: float
) -> list[Sample]:
    """Make ``sft`` samples that imitate these episodes without their help (`without_help`).

    Every episode counts equally; ``weight`` is that of their loss beside the others of the batch.
    """
    share = weight / max(1, len(episodes))
    return [
        replace(sample, kind="sft")
        for e in episodes
        for sample in trajectory_samples(without_help(e, actor), 0.0, share)
    ]


def beyond_free(episodes: Sequence[Episode]) -> list[Episode]:
    """Select guided episodes with a reward above the mean of their group's free members.

    See section 4.3 of Complementary RL. Episodes that failed for a technical reason do not count,
    on either side; a group without free members gives none.
    """
    played = trainable(episodes)
    gains = relative_rewards(
        [e.trajectory.reward for e in played],
        [e.trajectory.group for e in played],
        [e.trajectory.condition is Condition.GUIDED for e in played],
    )
    return [e for e, gain in zip(played, gains.tolist(), strict=True) if gain > 1e-9]


@dataclass
class CollapseGuard:
    """Pause imitation while the actor plays much worse on its own than before.

    Imitation of its own successes narrows a policy; the paper saw early gains and a collapse later.
    The guard follows the running mean of the free members' success and stops imitation as long as
    that is more than ``margin`` below its best. Plain reinforcement learning goes on meanwhile.

    Attributes:
        margin: in [0, 1].
        memory: share of the running mean that a further step leaves.
        mean: running mean; None before the first step with free members.
        best: largest running mean so far.

    >>> guard = CollapseGuard(margin=0.1, memory=0.5)
    >>> [guard.allows(success) for success in (0.4, 0.8, 0.2, 0.7)]
    [True, True, False, True]
    """

    margin: float
    memory: float
    mean: float | None = None
    best: float = 0.0

    def allows(self, success: float | None) -> bool:
        """Record the success rate of a step's free members; return whether to imitate.

        None stands for a step without free members.
        """
        if success is not None:
            if self.mean is None:
                self.mean = success
            else:
                self.mean = self.memory * self.mean + (1 - self.memory) * success
            self.best = max(self.best, self.mean)
        return self.mean is None or self.mean >= self.best - self.margin


class SelfDistillation(Method):
    """Imitate guided episodes that beat the free ones: section 4.3 of Complementary RL.

    ``make_actor`` builds an agent as the rollouts have, to rebuild prompts with.

    Attributes:
        paused: steps in which the guard held imitation back.
    """

    def __init__(self, settings: SelfDistillSettings, make_actor: Callable[[], ActorAgent]) -> None:
        self._settings, self._make_actor = settings, make_actor
        self._guard = CollapseGuard(settings.guard, settings.memory)
        self.paused = 0

    async def samples(self, episodes: Sequence[Episode], step: int) -> list[Sample]:
        """Return the imitation samples of these episodes."""
        firsts = [e for e in episodes if e.attempt == 1]
        free = [
            outcome(e.trajectory)
            for e in firsts
            if e.trajectory.error is None and e.trajectory.condition is Condition.FREE
        ]
        allowed = self._guard.allows(float(np.mean(free)) if free else None)
        due = (step + 1) % self._settings.every == 0
        self.paused += due and not allowed
        samples: list[Sample] = []
        if due and allowed:
            better = beyond_free(firsts)
            samples = imitation_samples(better, self._make_actor(), self._settings.weight)
        self.metrics = {
            "actor_imitated": float(len(samples)),
            "actor_imitation_paused": float(self.paused),
        }
        return samples

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's memory and count."""
        return {"mean": self._guard.mean, "best": self._guard.best, "paused": self.paused}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the guard's memory and count."""
        self._guard.mean, self._guard.best = state["mean"], state["best"]
        self.paused = state["paused"]
