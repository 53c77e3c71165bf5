"""Remember reflections that led to a successful second attempt: the memory m of ERL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from experiential.bank.protocol import Bank
from experiential.errors import CheckpointError
from experiential.types import Trajectory

KIND = "reflection"  # kind of the entries that hold reflections in a bank


class ReflectionMemory(ABC):
    """Keep the reflections that passed, and show them to a reflector.

    Algorithms 1 and 2 write "m <- reflection if r2 > tau" with tau = 1. Rewards do not exceed 1
    there, so that as printed nothing would ever be kept; here, as in the authors' code, a
    reflection is kept when r2 >= tau (`passes`).
    """

    @abstractmethod
    def recall(self, trajectory: Trajectory) -> Sequence[str]:
        """Return the reflections to show when this attempt is reflected on."""

    @abstractmethod
    def keep(self, text: str, trajectory: Trajectory) -> None:
        """Keep a reflection that led to success; ``trajectory`` is the second attempt."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; empty where the memory lives elsewhere."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; one of another kind of memory is a `CheckpointError`."""
        if state:
            raise CheckpointError(
                f"Expected no state for {type(self).__name__}, got {dict(state)!r}"
            )


def passes(reward: float, threshold: float) -> bool:
    """Return whether a second attempt earns its reflection a place in the memory: r2 >= tau."""
    return reward >= threshold


class PrivateMemory(ReflectionMemory):
    """Keep one string, as in the paper: each reflection that passed overwrites the one before.

    >>> memory = PrivateMemory()
    >>> memory.keep("Check the box first.", Trajectory(task="a"))
    >>> memory.keep("Never turn back.", Trajectory(task="b"))
    >>> memory.recall(Trajectory(task="c"))
    ['Never turn back.']
    """

    def __init__(self) -> None:
        self.text = ""  # before the first reflection

    def recall(self, trajectory: Trajectory) -> list[str]:
        """Return the one reflection for any task; none before the first."""
        return [self.text] if self.text else []

    def keep(self, text: str, trajectory: Trajectory) -> None:
        """Overwrite the reflection."""
        self.text = text

    def state_dict(self) -> dict[str, Any]:
        """Return the string."""
        return {"text": self.text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the string; a state of another kind of memory is a `CheckpointError`."""
        text = state.get("text")
        if not isinstance(text, str):
            raise CheckpointError(
                f"Expected the state of a private reflection memory, a text, got {dict(state)!r}"
            )
        self.text = text


class BankMemory(ReflectionMemory):
    """Keep reflections as entries of a bank, found by their task: an extension the paper names.

    Other readers of the bank find them, too. Nothing is overwritten: two attempts at one task
    give two entries. The bank's own journal makes it durable.

    Args:
        bank: where entries are added and searched.
        k: reflections shown at once.

    Raises:
        ValueError: ``k`` is not positive.
    """

    def __init__(self, bank: Bank, *, k: int = 1) -> None:
        if k < 1:
            raise ValueError(f"Expected k to be positive, got {k}")
        self.bank, self.k = bank, k

    def recall(self, trajectory: Trajectory) -> list[str]:
        """Return the reflections of the nearest tasks."""
        hits = self.bank.search(trajectory.task, k=self.k, where={"kind": KIND})
        return [hit.experience.text for hit in hits]

    def keep(self, text: str, trajectory: Trajectory) -> None:
        """Add the reflection under its task."""
        metadata = {"trajectory": trajectory.id, "instance": trajectory.instance}
        self.bank.add(text, task=trajectory.task, kind=KIND, metadata=metadata)
