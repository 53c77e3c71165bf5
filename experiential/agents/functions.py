"""Write entries by a function of the episode, without a model: the extractors of baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from experiential.agents.prompts import cut_middle, kept_ends
from experiential.llm.base import LLM
from experiential.types import (
    Add,
    Distillation,
    Experience,
    Generation,
    ParsedOperations,
    Trajectory,
)

EXAMPLE_LIMIT = 4000
"""Characters of play in a transcript; the middle turns of more are cut."""
_ENTRY_LIMIT = 1500


class FunctionExtractor:
    """Write at most one entry per episode, by a function, without a model.

    An own function becomes an extractor for the setting ``extractor.agent`` by a callable of the
    backend and its options::

        def lessons(llm, **options):
            return FunctionExtractor(lambda trajectory: f"It was {trajectory.turns[-1].action}.")

    Args:
        write: returns the text of an entry; an empty text writes none.
    """

    version = 0

    def __init__(self, write: Callable[[Trajectory], str]) -> None:
        self._write = write

    async def adistill(self, trajectory: Trajectory, shown: Sequence[Experience]) -> Distillation:
        """Return the function's text as an entry to add."""
        text = self._write(trajectory)
        operations = (Add(text=text),) if text else ()
        return Distillation(parsed=ParsedOperations(operations=operations))

    async def arefine(self, query: str, experience: Experience) -> tuple[str, Generation | None]:
        """Return the entry as it is."""
        return experience.text, None

    async def amerge(self, experiences: Sequence[Experience]) -> Distillation:
        """Merge nothing."""
        return Distillation()


def template(trajectory: Trajectory) -> str:
    """Return task, actions, outcome and last answer of an episode in a fixed sentence.

    >>> from experiential.types import Turn
    >>> turn = Turn(observation="A door.", action="push", feedback="It opens.")
    >>> template(Trajectory(task="Open the door.", turns=(turn,), success=True))
    'Open the door. Tried: push. It was solved. Last answer: It opens.'
    """
    actions = cut_middle("; ".join(turn.action for turn in trajectory.turns), _ENTRY_LIMIT // 2)
    last = trajectory.turns[-1].feedback if trajectory.turns else ""
    outcome = "solved" if trajectory.success else "not solved"
    text = f"{trajectory.task} Tried: {actions}. It was {outcome}."
    return cut_middle(f"{text} Last answer: {last}" if last else text, _ENTRY_LIMIT)


def transcript(trajectory: Trajectory, limit: int = EXAMPLE_LIMIT) -> str:
    """Return an episode in words: task, first observation, actions with their answers, outcome.

    Of more than ``limit`` characters of play, the middle turns are left out.
    """
    share = limit // 4
    turns = [
        f"> {cut_middle(turn.action, share)}\n{cut_middle(turn.feedback, share)}"
        for turn in trajectory.turns
    ]
    head, tail = kept_ends([len(turn) for turn in turns], limit)
    if missing := len(turns) - head - tail:
        turns[head : head + missing] = [f"({missing} turns left out)"]
    opening = cut_middle(trajectory.turns[0].observation, share) if trajectory.turns else ""
    outcome = {True: "success", False: "failure", None: "unknown"}[trajectory.success]
    return "\n".join([f"Task: {trajectory.task}", opening, *turns, f"Outcome: {outcome}"])


def template_extractor(llm: LLM | None = None, **options: Any) -> FunctionExtractor:
    """Return the extractor ``template``, which asks no backend."""
    return FunctionExtractor(template)


def transcript_extractor(llm: LLM | None = None, **options: Any) -> FunctionExtractor:
    """Return the extractor ``transcript``, which asks no backend."""
    return FunctionExtractor(transcript)
