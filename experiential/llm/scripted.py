"""Reply from a script, for tests of anything that talks to a language model."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from experiential.errors import BackendError
from experiential.llm.base import LLM, SamplingParams, cut_after_stop
from experiential.types import FinishReason, Generation, Message, Prompt, is_token_prompt

Reply = Callable[[list[Message]], str | Awaitable[str]]


class ScriptedLLM(LLM):
    """Reply with strings given in advance (cycled), or with the result of a function.

    A reply is cut after the first stop string, and must be one of ``sampling.choices`` when these
    are given. Without a tokenizer a generation has no token ids; with one it has ids, the
    end-of-turn token included, and log-probability 0.

    Args:
        replies: strings, or a function of the messages (plain or async) that returns one.
        tokenizer: a Hugging Face tokenizer, to take token prompts and to fill in token ids.
        name: recorded as the policy of each generation.

    >>> import asyncio
    >>> llm = ScriptedLLM(["go north", "open door"])
    >>> question = [{"role": "user", "content": "What now?"}]
    >>> [asyncio.run(llm.generate(question)).text for _ in range(3)]
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
        self.tokenizer = tokenizer
        if callable(replies):
            self._reply: Reply = replies
        else:
            endless = itertools.cycle(replies)
            self._reply = lambda messages: next(endless)

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Return the next reply."""
        sampling, tokenizer = sampling or SamplingParams(), self.tokenizer
        prompt_ids: tuple[int, ...] = ()
        if is_token_prompt(prompt):
            if tokenizer is None:
                raise BackendError(
                    "Expected messages, got token ids; pass tokenizer= to ScriptedLLM to take token"
                    " prompts"
                )
            prompt_ids = tuple(prompt)
            messages = [Message(role="user", content=tokenizer.decode(list(prompt_ids)))]
        else:
            messages = [message.copy() for message in cast("Sequence[Message]", prompt)]
            if tokenizer is not None:
                ids = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=False
                )
                prompt_ids = tuple(ids)
        self.calls.append(messages)
        reply = self._reply(messages)
        text = await reply if inspect.isawaitable(reply) else reply
        text = cut_after_stop(text, sampling.stop)
        if not sampling.permits(text):
            raise BackendError(
                f"Expected one of the choices {list(sampling.choices or ())}, got the scripted"
                f" reply {text!r}"
            )
        response_ids: tuple[int, ...] = ()
        if tokenizer is not None:
            said = tokenizer(text, add_special_tokens=False)["input_ids"]
            response_ids = (*said, tokenizer.eos_token_id)
        return Generation(
            text=text,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            logprobs=(0.0,) * len(response_ids),
            policy=self.name,
            policy_version=self.version,
            finish_reason=FinishReason.STOP if sampling.choices is None else FinishReason.CHOICE,
            temperature=sampling.temperature or 1.0,
        )
