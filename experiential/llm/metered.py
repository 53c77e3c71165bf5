"""Count the requests and tokens of a policy on any backend."""

from __future__ import annotations

import threading
import time

from experiential.llm.base import LLM, Prompt, SamplingParams
from experiential.types import Generation, Record


class Spent(Record):
    """Hold the cost of some requests."""

    requests: int = 0
    prompt_tokens: int = 0  # those found in a prefix cache included
    generated_tokens: int = 0
    seconds: float = 0.0  # wall-clock time in which at least one request was open

    @property
    def tokens(self) -> int:
        """Return prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens

    def __add__(self, other: Spent) -> Spent:
        """Add two costs; the seconds add up too, so the two must not have run at one time."""
        return Spent(**{name: value + getattr(other, name) for name, value in self})

    def __sub__(self, earlier: Spent) -> Spent:
        """Return the cost since ``earlier``."""
        return Spent(**{name: value - getattr(earlier, name) for name, value in self})


class Meter:
    """Add up what backends generate, on any threads; tokens only if they show token ids."""

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

    def end(self, generation: Generation | None) -> None:
        """Note that a request has ended; ``generation`` is None when it failed."""
        with self._lock:
            self._open -= 1
            self._spent += Spent(
                requests=1,
                seconds=0.0 if self._open else time.perf_counter() - self._since,
                prompt_tokens=len(generation.prompt_ids) if generation else 0,
                generated_tokens=len(generation.response_ids) if generation else 0,
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

    @property
    def version(self) -> int:  # type: ignore[override]  # a live value here, a default in the base
        """Return the optimiser steps the weights have seen."""
        return self.llm.version

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response, and count it."""
        generation: Generation | None = None
        self.meter.begin()
        try:
            generation = await self.llm.generate(prompt, sampling)
            return generation
        finally:
            self.meter.end(generation)

    def close(self) -> None:
        """Close the backend."""
        self.llm.close()
