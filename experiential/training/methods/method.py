"""Define the contract of a training method, and the parts of a run offered to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from experiential.bank.manager import ExperienceManager
from experiential.bank.protocol import Bank
from experiential.config import Experiment
from experiential.llm.base import LLM
from experiential.rollout import Episode, Job, Reviewer, Rollout
from experiential.training.metrics import Observer
from experiential.training.roles import Roles
from experiential.training.runtime import LossSettings, PolicyRuntime, Sample
from experiential.types import Trajectory


@dataclass(frozen=True)
class Run:
    """Offer the parts of a run to its methods.

    Attributes:
        experiment: everything that defines the run.
        roles: builds agents around the policies.
        actor: the policy that plays and learns.
        rollout: plays training tasks.
        bank: None, as its manager, for a run without experience.
        emit: records an event in the metrics.
    """

    experiment: Experiment
    roles: Roles
    actor: PolicyRuntime
    rollout: Rollout
    bank: Bank | None
    manager: ExperienceManager | None
    emit: Observer


class Method:
    """Decide on the episodes of a run and the actor's samples of them.

    Every hook has a default that does nothing, so a method defines only what it changes. A run has
    one main method, named by the setting ``method`` and called with the `Run`, and any number of
    additions that other settings ask for. The trainer calls the hooks in the order in which they
    stand here.

    Attributes:
        metrics: this method's part of a step's metrics, unless it overrides `event`.
    """

    metrics: Mapping[str, Any] = MappingProxyType({})

    async def begin(self) -> None:
        """Prepare a new run; a resumed run has done so already."""

    def reviewer(self, llm: LLM | None = None) -> Reviewer | None:
        """Return a judge of retrieved experience: training's own, or one that asks ``llm``."""
        return None

    async def play(self, jobs: Sequence[Job]) -> list[Episode] | None:
        """Play a step's jobs in this method's own way; None leaves them to the rollout."""
        return None

    async def bonuses(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return the extractor's reward for uses beyond the outcome, by id of the use."""
        return {}

    async def samples(self, episodes: Sequence[Episode], step: int) -> list[Sample]:
        """Return the actor's samples of these episodes; the samples of all methods form a batch."""
        return []

    def loss(self, step: int) -> LossSettings | None:
        """Return the loss of the batch; None leaves it to other methods."""
        return None

    async def after_step(self, episodes: Sequence[Episode], step: int) -> None:
        """Follow up on a step, once the weights that generate are the new ones."""

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return this method's part of a step's metrics."""
        return dict(self.metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``.

        Raises:
            CheckpointError: the state is of another kind.
        """
