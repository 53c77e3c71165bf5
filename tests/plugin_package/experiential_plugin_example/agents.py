"""A language-model backend and an extractor."""

from __future__ import annotations

from typing import Any

from experiential.agents.extractor import ExtractorAgent
from experiential.llm.scripted import ScriptedLLM
from experiential.types import Distillation
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
