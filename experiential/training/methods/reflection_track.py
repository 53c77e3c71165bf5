"""Second attempts in a run: played, learnt from, told, and carried over by a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiential.agents.reflection_memory import BankMemory, PrivateMemory, ReflectionMemory
from experiential.bank.protocol import Bank
from experiential.config import ActorSettings, Experiment, ReflectionSettings
from experiential.rollout.rollout import Episode, Job, Rollout
from experiential.training.methods.attempt_samples import internalised_samples, reinforced_samples
from experiential.training.methods.attempts import Attempts
from experiential.training.roles import Roles
from experiential.training.runtime import PolicyRuntime, Sample


class ReflectionTrack:
    """What Experiential RL adds to a run.

    Args:
        settings: of the second attempts.
        actor: how advantages are made.
        roles: builds agents.
        policy: the actor's, which reflects as well.
        attempts: plays both attempts.
    """

    def __init__(
        self,
        settings: ReflectionSettings,
        actor: ActorSettings,
        roles: Roles,
        policy: PolicyRuntime,
        attempts: Attempts,
    ) -> None:
        self._settings, self._actor, self._roles, self._policy, self._attempts = (
            settings,
            actor,
            roles,
            policy,
            attempts,
        )
        self._learnt: Counter[str] = Counter()

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        roles: Roles,
        policy: PolicyRuntime,
        rollout: Rollout,
        bank: Bank | None,
    ) -> ReflectionTrack | None:
        """The track of an experiment; None where one attempt is all.

        Args:
            experiment: everything that defines the run.
            roles: builds agents.
            policy: the actor's.
            rollout: plays jobs.
            bank: of the run, where reflections are kept if the experiment says so.
        """
        settings = experiment.reflection
        if settings is None:
            return None
        attempts = Attempts(
            rollout, roles.reflector(), memory_of(settings, bank), threshold=settings.threshold
        )
        return cls(settings, experiment.actor, roles, policy, attempts)

    async def play(self, jobs: Sequence[Job]) -> list[Episode]:
        """First and second attempts; see `Attempts.play`."""
        return await self._attempts.play(jobs)

    async def samples(self, episodes: Sequence[Episode]) -> list[Sample]:
        """What a step learns beside its first attempts."""
        reinforced = reinforced_samples(episodes, self._actor)
        internalised = await internalised_samples(
            episodes, self._settings, self._roles.actor(), self._policy
        )
        self._learnt = Counter(reinforced=len(reinforced), internalised=len(internalised))
        return reinforced + internalised

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """What the step's record says of both attempts and of what was learnt from them last."""
        return self._attempts.event(episodes) | {
            f"{name}_samples": count for name, count in self._learnt.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, as JSON."""
        return {"memory": self._attempts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave.

        Raises:
            CheckpointError: it is of another kind of memory.
        """
        self._attempts.load_state_dict(state["memory"])


def memory_of(settings: ReflectionSettings, bank: Bank | None) -> ReflectionMemory | None:
    """Where reflections are kept: nowhere without reflections, else as the settings say.

    Raises:
        ValueError: a bank is asked for and there is none.
    """
    if settings.mode == "retry" or settings.memory == "none":
        return None
    if settings.memory == "private":
        return PrivateMemory()
    if bank is None:
        raise ValueError("Expected a bank to keep reflections in, got none")
    return BankMemory(bank)
