"""The contract of a language-model backend: a prompt and sampling parameters in, a `Generation` out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from experiential.types import Generation, Message, Record

Prompt = Sequence[Message] | Sequence[int]
"""Chat messages, or token ids when the caller owns the conversation as tokens
(``agents/dialogue.py``).
"""


class SamplingParams(Record):
    """How to sample one response.

    Attributes:
        temperature: 0 means greedy.
        stop: strings that end the response; the stop string itself is kept in the text.
        choices: when given, the response is exactly one of these strings, sampled from the model's
            own distribution restricted to them (a token trie); backends without support raise
            ``BackendError``.
        json_schema: constrain the response to this JSON schema, where the backend can; ignored
            elsewhere.
        seed: makes one request reproducible whatever it is batched with.
        priority: lower runs first when requests compete for one device (0 rollout, 1 background).
    """

    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, description="0 means no limit")
    max_tokens: int = Field(default=256, gt=0)
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    json_schema: dict[str, Any] | None = None
    seed: int | None = None
    priority: int = 0


class LLM(ABC):
    """A backend that generates text.

    ``generate`` is a coroutine and may be awaited concurrently: backends batch concurrent requests
    themselves.
    """

    name: str = "llm"
    version: int = 0
    """Optimiser steps the weights have seen; stays 0 for weights that are never trained."""

    @property
    def tokenizer(self) -> Any | None:
        """The Hugging Face tokenizer when prompts may be token ids, else None."""
        return None

    @abstractmethod
    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response.

        Raises:
            BackendError: the backend failed; the message says what was asked and what came.
        """

    def close(self) -> None:  # noqa: B027  (an optional hook, not an abstract method)
        """Release threads, sockets and weights."""


def is_token_prompt(prompt: Prompt) -> bool:
    """Whether ``prompt`` is a sequence of token ids."""
    return len(prompt) > 0 and isinstance(prompt[0], int)
