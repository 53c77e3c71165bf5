"""Implement Experiential RL: second attempts after a reflection, and samples of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiential.agents.reflection_memory import BankMemory, PrivateMemory, ReflectionMemory
from experiential.bank.protocol import Bank
from experiential.config import ReflectionSettings
from experiential.rollout.rollout import Episode, Job
from experiential.training.methods.attempt_samples import internalised_samples, reinforced_samples
from experiential.training.methods.attempts import Attempts
from experiential.training.methods.method import Method, Run
from experiential.training.runtime import Sample


class Reflection(Method):
    """Play second attempts after a reflection, and learn from both: Experiential RL, algorithm 2.

    Args:
        run: the parts of the run.
        settings: of the second attempts.
    """

    def __init__(self, run: Run, settings: ReflectionSettings) -> None:
        self._run, self._settings = run, settings
        self._attempts = Attempts(
            run.rollout,
            run.roles.reflector(),
            memory_of(settings, run.bank),
            threshold=settings.threshold,
        )
        self._learnt: Counter[str] = Counter()

    @classmethod
    def of(cls, run: Run) -> Reflection | None:
        """Build it with ``reflection``."""
        settings = run.experiment.reflection
        return cls(run, settings) if settings is not None else None

    async def play(self, jobs: Sequence[Job]) -> list[Episode]:
        """Play first and second attempts; see `Attempts.play`."""
        return await self._attempts.play(jobs)

    async def samples(self, episodes: Sequence[Episode], step: int) -> list[Sample]:
        """Return a step's samples beyond those of its first attempts."""
        reinforced = reinforced_samples(episodes, self._run.experiment.actor)
        internalised = await internalised_samples(
            episodes, self._settings, self._run.roles.actor(), self._run.actor
        )
        self._learnt = Counter(reinforced=len(reinforced), internalised=len(internalised))
        return reinforced + internalised

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return how both attempts went, and how much was learnt from them."""
        return self._attempts.event(episodes) | {
            f"{name}_samples": count for name, count in self._learnt.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the private memory."""
        return {"memory": self._attempts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the private memory.

        Raises:
            CheckpointError: the state is of another kind of memory.
        """
        self._attempts.load_state_dict(state["memory"])


def memory_of(settings: ReflectionSettings, bank: Bank | None) -> ReflectionMemory | None:
    """Return where reflections are kept, or None where none are.

    Raises:
        ValueError: the settings need a bank and the run has none.
    """
    if settings.mode == "retry" or settings.memory == "none":
        return None
    if settings.memory == "private":
        return PrivateMemory()
    if bank is None:
        raise ValueError("Expected a bank to keep reflections in, got none")
    return BankMemory(bank)
