"""The cross-episode memory m of Experiential RL: reflections that led to a successful second attempt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from experiential.bank.protocol import Bank
from experiential.errors import CheckpointError
from experiential.types import Trajectory

KIND = "reflection"
"""The kind of entries that reflections are in a bank."""


class ReflectionMemory(ABC):
    """What reflections a reflector is shown, and where those that passed are kept.

    Algorithms 1 and 2 write "m <- reflection if r2 > tau" with tau = 1. Rewards do not exceed 1
    there, so that as printed nothing would ever be kept; here, as in the authors' code, a
    reflection is kept when r2 >= tau. Who plays the attempts compares (`passes`).
    """

    @abstractmethod
    def recall(self, trajectory: Trajectory) -> Sequence[str]:
        """The reflections to show when this attempt is reflected on."""

    @abstractmethod
    def keep(self, text: str, trajectory: Trajectory) -> None:
        """Keep a reflection that led to success; ``trajectory`` is the second attempt."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON; nothing where the memory lives elsewhere."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave.

        Raises:
            CheckpointError: the state is of another kind of memory.
        """
        if state:
            raise CheckpointError(
                f"Expected no state for {type(self).__name__}, got {dict(state)!r}"
            )


def passes(reward: float, threshold: float) -> bool:
    """Whether a second attempt is good enough for its reflection to be kept: r2 >= tau (see `ReflectionMemory`)."""
    return reward >= threshold


class PrivateMemory(ReflectionMemory):
    """One string, as in the paper: the last reflection that passed overwrites the one before.

    >>> memory = PrivateMemory()
    >>> memory.keep("Check the box first.", Trajectory(task="a")), memory.keep("Never turn back.", Trajectory(task="b"))
    (None, None)
    >>> memory.recall(Trajectory(task="c"))
    ['Never turn back.']

    Attributes:
        text: the reflection; empty before the first one.
    """

    def __init__(self) -> None:
        self.text = ""

    def recall(self, trajectory: Trajectory) -> list[str]:
        """The one reflection, whatever the task; none before the first."""
        return [self.text] if self.text else []

    def keep(self, text: str, trajectory: Trajectory) -> None:
        """Overwrite it."""
        self.text = text

    def state_dict(self) -> dict[str, Any]:
        """The string."""
        return {"text": self.text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the string.

        Raises:
            CheckpointError: the state is not of such a memory.
        """
        text = state.get("text")
        if not isinstance(text, str):
            raise CheckpointError(
                f"Expected the state of a private reflection memory, a text, got {dict(state)!r}"
            )
        self.text = text


class BankMemory(ReflectionMemory):
    """A bank, which the paper names as an extension: reflections are entries of kind ``reflection``, found by the task.

    Whatever else reads the bank finds them, too. Nothing is overwritten; what two attempts at one
    task taught are two entries. The bank's own journal makes it durable, and a run's checkpoint
    holds the bank.

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
        """The reflections of the nearest tasks.

        Raises:
            BankError: the bank failed.
        """
        return [
            hit.experience.text
            for hit in self.bank.search(trajectory.task, k=self.k, where={"kind": KIND})
        ]

    def keep(self, text: str, trajectory: Trajectory) -> None:
        """Add it under its task.

        Raises:
            BankError: the bank failed.
        """
        self.bank.add(
            text,
            task=trajectory.task,
            kind=KIND,
            metadata={"trajectory": trajectory.id, "instance": trajectory.instance},
        )
