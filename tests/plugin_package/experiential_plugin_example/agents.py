"""A language-model backend, an extractor and a memory."""

from __future__ import annotations

from typing import Any

from experiential.agents.extractor import ExtractorAgent
from experiential.evaluation.memories import Setup
from experiential.llm.scripted import ScriptedLLM
from experiential.types import Distillation, Trajectory
from experiential_plugin_example import note


class Parrot(ScriptedLLM):
    """Reply with the same word every time."""

    def __init__(self, *, word: object = "0", **options: Any) -> None:
        note("llms")
        super().__init__(lambda messages: str(word), name="parrot")


class NoteTaker(ExtractorAgent):
    """Distil as the default extractor does."""

    async def adistill(self, *arguments: Any, **options: Any) -> Distillation:
        """Return the default extractor's answer."""
        note("extractors")
        return await super().adistill(*arguments, **options)


class Diary:
    """Remember the last answer of each task."""

    def __init__(self, setup: Setup) -> None:
        note("memories")
        self._last: dict[str, str] = {}

    def recall(self, task: str) -> str:
        """Return what the environment said last."""
        return self._last.get(task, "")

    def learn(self, trajectory: Trajectory) -> None:
        """Keep what the environment said last."""
        self._last[trajectory.task] = trajectory.turns[-1].feedback
