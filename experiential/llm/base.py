"""Define the contract of a language-model backend, and open one by name."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import yaml
from pydantic import Field

from experiential.errors import BackendError, ConfigError
from experiential.plugins import resolve
from experiential.types import Generation, Prompt, Record
from experiential.types import is_token_prompt as is_token_prompt


class SamplingParams(Record):
    """Say how to sample one response.

    Attributes:
        temperature: 0 means greedy.
        stop: strings that end the response; the stop string itself is kept in the text.
        choices: the response is exactly one of these strings, drawn from the model's own
            distribution restricted to them. Backends without support raise ``BackendError``.
        pattern: beside choices, a regular expression of further responses: the response is a choice
            or matches it as a whole. Backends that cannot do this draw a choice.
        json_schema: restrict the response to this JSON schema; ignored by backends that cannot.
        tools: what the response may call, OpenAI tool schemas; ignored by backends without
            ``supports_tools``.
        seed: makes one request reproducible in any batch.
        priority: lower runs first when requests compete for one device (0 rollout, 1 background).
        session: name of the conversation; a backend with several engines keeps it on one of them,
            whose prefix cache holds its earlier turns.
    """

    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, description="0 means no limit")
    max_tokens: int = Field(default=256, gt=0)
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    pattern: str | None = None
    json_schema: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    seed: int | None = None
    priority: int = 0
    session: str | None = None

    def open_choices(self) -> str | None:
        r"""Return one regular expression of the choices and ``pattern``, None without one of them.

        >>> SamplingParams(choices=("wait", "say[hi]"), pattern=r"say\[\w+\]").open_choices()
        '(?:say\\[\\w+\\])|wait'
        """
        if self.pattern is None or self.choices is None:
            return None
        others = [one for one in self.choices if not self._matches(one)]
        return "|".join([f"(?:{self.pattern})", *map(re.escape, others)])

    def permits(self, text: str) -> bool:
        """Return whether a response is one of the choices or matches ``pattern``.

        Raises:
            BackendError: ``pattern`` is no regular expression.
        """
        if self.choices is None or text in self.choices:
            return True
        return self._matches(text)

    def _matches(self, text: str) -> bool:
        try:
            return self.pattern is not None and re.fullmatch(self.pattern, text) is not None
        except (re.error, TypeError) as error:  # of an environment that was not checked
            expected = "Expected pattern to be a regular expression"
            raise BackendError(f"{expected}, got {self.pattern!r}: {error}") from error


class LLM(ABC):
    """Generate text; a backend batches concurrent requests itself."""

    name: str = "llm"
    version: int = 0
    """Optimiser steps the weights have seen; stays 0 for weights that are never trained."""
    tokenizer: Any = None
    """The Hugging Face tokenizer when prompts may be token ids, else None."""
    supports_choices: bool = True
    """Whether a response can be restricted to `SamplingParams.choices`."""
    supports_tools: bool = False
    """Whether responses can call the tools that a request offers."""

    @abstractmethod
    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response, or raise BackendError."""

    def together(self) -> AbstractContextManager[None]:
        """Start the requests made in the block as one batch, when it ends, if the backend can."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027  (an optional hook, not an abstract method)
        """Release threads, sockets and weights."""


BACKENDS: dict[str, Callable[..., LLM] | str] = {
    "local": "experiential.llm.transformers:TransformersLLM",
    "openai": "experiential.llm.openai:OpenAILLM",
    "scripted": "experiential.llm.scripted:ScriptedLLM",
    "vllm": "experiential.llm.vllm:VLLM",
}
"""Built-in backends by name, imported when chosen."""
IN_PROCESS = ("local", "vllm")
"""Backends that load weights here."""


def open_llm(name: str, **options: Any) -> LLM:
    """Return the backend called ``name``.

    Args:
        name: ``local``, ``vllm``, ``openai``, ``scripted``, an entry point of
            ``experiential.llms``, or ``module:attribute``: a callable that takes keyword options
            and returns an `LLM`.
        options: passed on; ``model`` names the weights where a backend has several.

    >>> open_llm("scripted", replies=["go north"]).name
    'scripted'
    """
    make = resolve("llms", name, BACKENDS)
    try:
        llm = make(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Expected options that the backend {name!r} takes, got {', '.join(options) or 'none'}:"
            f" {error}"
        ) from error
    # a mistake of a foreign package is found here, not in the middle of an episode
    if not isinstance(llm, LLM):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"Expected {name!r} of llms to return an experiential.llm.LLM, got {type(llm).__name__}"
        )
    return llm


def cut_after_stop(text: str, stops: Iterable[str]) -> str:
    """Return the text up to the end of its first stop string; all of it if it has none.

    >>> cut_after_stop("north</a> or south</a>", ["</a>"])
    'north</a>'
    """
    ends = [at + len(stop) for stop in stops if stop and (at := text.find(stop)) >= 0]
    return text[: min(ends, default=None)]


def read_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Return the options written as ``key=value`` on a command line; values are YAML.

    >>> read_options(["timeout=5", "extra_body={top_k: 3}"])
    {'timeout': 5, 'extra_body': {'top_k': 3}}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.isidentifier():
            raise ConfigError(f"Expected an option of the form key=value, got {pair!r}")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"Expected a YAML value in the option {pair!r}") from error
    return options
