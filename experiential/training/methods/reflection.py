"""Implement Experiential RL: second attempts after a reflection, and samples of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiential.agents.reflector import BankMemory, PrivateMemory, ReflectionMemory
from experiential.bank.protocol import Bank
from experiential.config import ReflectionSettings
from experiential.rollout import Episode, Job
from experiential.training.methods.attempt_samples import internalised_samples, reinforced_samples
from experiential.training.methods.attempts import Attempts
from experiential.training.methods.method import Method, Run
from experiential.training.runtime import Sample


class Reflection(Method):
    """Play second attempts after a reflection, and learn from both: algorithm 2."""

    def __init__(self, run: Run, settings: ReflectionSettings) -> None:
        self._run, self._settings = run, settings
        memory, reflector = memory_of(settings, run.bank), run.roles.reflector()
        self._attempts = Attempts(run.rollout, reflector, memory, settings.threshold)

    async def play(self, jobs: Sequence[Job]) -> list[Episode]:
        """Play first and second attempts; see `Attempts.play`."""
        return await self._attempts.play(jobs)

    async def samples(self, episodes: Sequence[Episode], step: int) -> list[Sample]:
        """Return a step's samples beyond those of its first attempts."""
        reinforced = reinforced_samples(episodes, self._run.experiment.actor)
        internalised = await internalised_samples(
            episodes, self._settings, self._run.roles.actor(), self._run.actor
        )
        self.metrics = {
            "reinforced_samples": len(reinforced),
            "internalised_samples": len(internalised),
        }
        return reinforced + internalised

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return how both attempts went, and how much was learnt from them."""
        return self._attempts.event(episodes) | super().event(episodes)

    def state_dict(self) -> dict[str, Any]:
        """Return the private memory; the bank keeps its own state."""
        memory = self._attempts.memory
        return {"memory": {} if memory is None else memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the private memory.

        Raises:
            CheckpointError: the state is of another kind of memory.
        """
        if self._attempts.memory is not None:
            self._attempts.memory.load_state_dict(state["memory"])


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
    return BankMemory(bank, k=settings.recall, same_task=settings.same_task)
