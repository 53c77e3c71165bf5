"""Ask a language model single questions, and derive the seeds that make them repeatable."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import blake2b
from typing import Any

from experiential.agents.dialogue import Dialogue
from experiential.llm.base import LLM, Prompt, SamplingParams
from experiential.types import Generation, Message


class Asker:
    """Put prompts to a backend, each on its own.

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
        """Return the answer to one prompt; ``options`` replace parts of the sampling."""
        seed = None
        if self.seed is not None:
            base = derived_seed(self.seed, json.dumps(messages))
            self._asked[base] += 1
            seed = derived_seed(base, self._asked[base])
        prompt: Prompt = messages
        if self.llm.tokenizer is not None:
            # as token ids, so that no text can pass for a control token of this tokenizer
            dialogue = Dialogue(self.llm.tokenizer)
            for message in messages:
                dialogue.add(message)
            prompt = dialogue.prompt()
        sampling = self.sampling.model_copy(update={"seed": seed, **options})
        return await self.llm.generate(prompt, sampling)


def derived_seed(seed: int, *parts: int | str) -> int:
    """Return a seed of 31 bits that depends on ``seed`` and every part, equal on all machines.

    >>> derived_seed(1, 0) == derived_seed(1, 0), derived_seed(1, 0) == derived_seed(1, 1)
    (True, False)
    """
    text = repr((seed, *parts)).encode("utf-8", "backslashreplace")
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "big") >> 1
