"""Single questions to a language model: one prompt, one answer, repeatable."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from experiential.agents.dialogue import Dialogue
from experiential.agents.seeds import derived_seed
from experiential.llm.base import LLM, Prompt, SamplingParams
from experiential.types import Generation, Message


class Asker:
    """Puts prompts to a backend, each on its own.

    Caveat: with a ``seed`` the answer to a prompt depends on how often that prompt was asked
    before, so that equal questions get different draws and a run can still be repeated.

    Args:
        llm: the backend.
        sampling: how answers are drawn unless a question says otherwise.
        seed: makes every request repeatable; None leaves it to the backend.
    """

    def __init__(self, llm: LLM, sampling: SamplingParams, seed: int | None) -> None:
        self.llm, self.sampling, self.seed = llm, sampling, seed
        self._asked: Counter[int] = Counter()

    async def ask(self, messages: list[Message], **options: Any) -> Generation:
        """The answer to one prompt; ``options`` replace parts of the sampling.

        Raises:
            BackendError: the backend failed.
        """
        sampling = self.sampling.model_copy(update={"seed": self._seed(messages), **options})
        return await self.llm.generate(self._prompt(messages), sampling)

    def _prompt(self, messages: list[Message]) -> Prompt:
        """Token ids where the backend takes them, so that no text can pass for a control token of its tokenizer."""
        if (tokenizer := self.llm.tokenizer) is None:
            return messages
        dialogue = Dialogue(tokenizer)
        for message in messages:
            dialogue.add(message)
        return dialogue.prompt()

    def _seed(self, messages: list[Message]) -> int | None:
        if self.seed is None:
            return None
        base = derived_seed(self.seed, json.dumps(messages))
        self._asked[base] += 1
        return derived_seed(base, self._asked[base])
