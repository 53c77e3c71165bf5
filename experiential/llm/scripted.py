"""A backend that says what it is told, for tests of anything that talks to a language model."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from experiential.errors import BackendError
from experiential.llm.base import LLM, Prompt, SamplingParams, is_token_prompt
from experiential.types import FinishReason, Generation, Message

Reply = Callable[[list[Message]], str | Awaitable[str]]


class ScriptedLLM(LLM):
    """Replies with strings given in advance (cycled), or with what a function of the messages returns.

    A reply is cut after the first stop string, and must be one of ``sampling.choices`` when these
    are given. Without a tokenizer a generation has no token ids; with one it has ids, the
    end-of-turn token included, and log-probability 0.

    Args:
        replies: strings, or a function of the messages (plain or async) that returns one.
        tokenizer: a Hugging Face tokenizer, to take token prompts and to fill in token ids.
        name: recorded as the policy of each generation.

    >>> import asyncio
    >>> llm = ScriptedLLM(["go north", "open door"])
    >>> [asyncio.run(llm.generate([{"role": "user", "content": "What now?"}])).text for _ in range(3)]
    ['go north', 'open door', 'go north']
    >>> llm.calls[0][0]["content"]
    'What now?'
    >>> echo = ScriptedLLM(lambda messages: messages[-1]["content"].upper())
    >>> asyncio.run(echo.generate([{"role": "user", "content": "hello"}])).text
    'HELLO'

    Attributes:
        calls: the messages of every call, in order.
    """

    def __init__(
        self, replies: Sequence[str] | Reply, *, tokenizer: Any = None, name: str = "scripted"
    ) -> None:
        if isinstance(replies, str) or (not callable(replies) and len(replies) == 0):
            raise ValueError(
                f"Expected replies to be a non-empty list of strings or a callable, got {replies!r}"
            )
        self.name = name
        self.calls: list[list[Message]] = []
        self._tokenizer = tokenizer
        self._reply = replies if callable(replies) else _cycle(replies)

    @property
    def tokenizer(self) -> Any | None:
        """The tokenizer given, else None."""
        return self._tokenizer

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """The next reply.

        Raises:
            BackendError: the reply is not among ``sampling.choices``, or token ids came without a
                tokenizer.
        """
        sampling = sampling or SamplingParams()
        messages = self._messages(prompt)
        self.calls.append(messages)
        reply = self._reply(messages)
        text = _cut(await reply if inspect.isawaitable(reply) else reply, sampling.stop)
        if sampling.choices is not None and text not in sampling.choices:
            raise BackendError(
                f"Expected one of the choices {list(sampling.choices)}, got the scripted reply"
                f" {text!r}"
            )
        response = self._response_ids(text)
        return Generation(
            text=text,
            prompt_ids=self._prompt_ids(prompt, messages),
            response_ids=response,
            logprobs=(0.0,) * len(response),
            policy=self.name,
            policy_version=self.version,
            finish_reason=FinishReason.STOP if sampling.choices is None else FinishReason.CHOICE,
            temperature=sampling.temperature or 1.0,
        )

    def _messages(self, prompt: Prompt) -> list[Message]:
        if not is_token_prompt(prompt):
            return [cast("Message", dict(message)) for message in cast("Sequence[Message]", prompt)]
        if self._tokenizer is None:
            raise BackendError(
                "Expected messages, got token ids; pass tokenizer= to ScriptedLLM to take token"
                " prompts"
            )
        return [Message(role="user", content=self._tokenizer.decode(list(prompt)))]

    def _prompt_ids(self, prompt: Prompt, messages: list[Message]) -> tuple[int, ...]:
        if is_token_prompt(prompt):
            return tuple(cast("Sequence[int]", prompt))
        if self._tokenizer is None:
            return ()
        return tuple(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def _response_ids(self, text: str) -> tuple[int, ...]:
        if self._tokenizer is None:
            return ()
        return (
            *self._tokenizer(text, add_special_tokens=False)["input_ids"],
            self._tokenizer.eos_token_id,
        )


def _cycle(replies: Sequence[str]) -> Reply:
    endless = itertools.cycle(replies)
    return lambda messages: next(endless)


def _cut(text: str, stops: Sequence[str]) -> str:
    ends = [at + len(stop) for stop in stops if stop and (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
