"""Count the requests and tokens of a policy on any backend."""

from __future__ import annotations

import math
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from experiential.errors import NoAnswerError
from experiential.llm.base import LLM, Prompt, SamplingParams
from experiential.types import Generation, Record, Usage


def in_dollars(amount: float) -> str:
    """Return an amount in words, less than a cent with its first two digits.

    >>> in_dollars(1234.5), in_dollars(0.000123), in_dollars(0)
    ('$1,234.50', '$0.00012', '$0.00')
    """
    if not 0 < amount < 0.01:
        return f"${amount:,.2f}"
    return f"${amount:.{1 - math.floor(math.log10(amount))}f}"


class Spent(Record):
    """Hold the cost of some requests."""

    requests: int = 0
    prompt_tokens: int = 0  # those found in a prefix cache included
    generated_tokens: int = 0
    seconds: float = 0.0  # wall-clock time in which at least one request was open
    cost: float | None = None
    """Dollars; None: no reply had a known price."""
    unreported: int = 0
    """Replies whose tokens nobody reported: they are missing from the counts."""

    @property
    def tokens(self) -> int:
        """Return prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens

    def reported(self) -> dict[str, float]:
        """Return tokens, replies without a report, and cost; without what is unknown."""
        told: dict[str, float] = {}
        if self.tokens or not self.unreported:
            told = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.generated_tokens}
        if self.unreported:
            told["unreported"] = self.unreported
        return told if self.cost is None else {**told, "cost": self.cost}

    def describe(self) -> str:
        """Return the cost in words.

        >>> Spent(requests=3, prompt_tokens=1200, generated_tokens=30, cost=0.5).describe()
        '1,230 tokens, $0.50'
        >>> Spent(requests=3, prompt_tokens=9, unreported=1).describe()
        '9 tokens and those of 1 replies that report none'
        >>> Spent(unreported=1).describe()
        'unknown tokens'
        """
        words = (
            f"{self.tokens:,} tokens" if self.tokens or not self.unreported else "unknown tokens"
        )
        if self.tokens and self.unreported:
            words += f" and those of {self.unreported:,} replies that report none"
        return words if self.cost is None else f"{words}, {in_dollars(self.cost)}"

    def __add__(self, other: Spent) -> Spent:
        """Add two costs; the seconds add up too, so the two must not have run at one time."""
        return self._combined(other, 1)

    def __sub__(self, earlier: Spent) -> Spent:
        """Return the cost since ``earlier``."""
        return self._combined(earlier, -1)

    def _combined(self, other: Spent, sign: int) -> Spent:
        known = self.cost is not None or other.cost is not None
        summed: dict[str, Any] = {
            name: (value or 0) + sign * (getattr(other, name) or 0) for name, value in self
        }
        return Spent.model_validate(summed if known else {**summed, "cost": None})


class Meter:
    """Add up what backends generate, on any threads: tokens as servers count them, else ids."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent = Spent()
        self._open = 0
        self._since = 0.0

    def spent(self) -> Spent:
        """Return the cost so far; requests that are still open count their seconds only."""
        with self._lock:
            running = time.perf_counter() - self._since if self._open else 0.0
            return self._spent + Spent(seconds=running)

    def begin(self) -> None:
        """Note that a request starts."""
        with self._lock:
            if not self._open:
                self._since = time.perf_counter()
            self._open += 1

    def end(self, generation: Generation | None, usage: Usage | None = None) -> None:
        """Note that a request has ended.

        Args:
            generation: the response; None when it failed.
            usage: what a reply without an answer took.
        """
        prompt = generated = unreported = 0
        if generation is not None:
            usage = generation.usage
            prompt, generated = len(generation.prompt_ids), len(generation.response_ids)
            unreported = int(usage is None and not generated)
        if usage is not None:
            prompt, generated = usage.prompt_tokens or 0, usage.completion_tokens or 0
        with self._lock:
            self._open -= 1
            self._spent += Spent(
                requests=1,
                seconds=0.0 if self._open else time.perf_counter() - self._since,
                prompt_tokens=prompt,
                generated_tokens=generated,
                cost=None if usage is None else usage.cost,
                unreported=unreported,
            )


class Metered(LLM):
    """Pass requests on to a backend and count them with a meter.

    >>> import asyncio
    >>> from experiential.llm.scripted import ScriptedLLM
    >>> meter = Meter()
    >>> llm = Metered(ScriptedLLM(["go north"]), meter)
    >>> asyncio.run(llm.generate([{"role": "user", "content": "Where?"}])).text
    'go north'
    >>> meter.spent().requests
    1
    """

    def __init__(self, llm: LLM, meter: Meter) -> None:
        self.llm, self.meter = llm, meter
        self.name, self.tokenizer = llm.name, llm.tokenizer
        self.supports_choices = llm.supports_choices

    @property
    def version(self) -> int:  # type: ignore[override]  # a live value here, a default in the base
        """Return the optimiser steps the weights have seen."""
        return self.llm.version

    @property
    def supports_tools(self) -> bool:  # type: ignore[override]  # likewise
        """Return whether responses can call tools."""
        return self.llm.supports_tools

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response, and count it."""
        generation, usage = None, None
        self.meter.begin()
        try:
            generation = await self.llm.generate(prompt, sampling)
            return generation
        except NoAnswerError as error:
            usage = error.usage
            raise
        finally:
            self.meter.end(generation, usage)

    def together(self) -> AbstractContextManager[None]:
        """Start what is asked for in the block when it ends."""
        return self.llm.together()

    def close(self) -> None:
        """Close the backend."""
        self.llm.close()
