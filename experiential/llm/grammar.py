"""Responses restricted to a JSON schema: which tokens may come next, and which must, by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from experiential.errors import BackendError, MissingExtraError

_SCHEMAS = 256


class SchemaState:
    """One response in the making: the tokens that have come, as the schema sees them."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def complete(self) -> bool:
        """Whether the response is finished and can hold nothing more."""
        return self._matcher.is_stopped()

    def accept(self, token: int) -> None:
        """Take the next token.

        Raises:
            BackendError: the schema forbids it.
        """
        if not self._matcher.consume_token(token):
            raise BackendError(
                f"Expected a token that the schema allows, got {token}: {self._matcher.get_error()}"
            )

    def advance(self) -> tuple[int, ...]:
        """The tokens that must follow, now taken; empty where there is a choice."""
        forced = tuple(cast("list[int]", self._matcher.compute_ff_tokens()))
        for token in forced:
            self.accept(token)
        return forced

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, shape (vocabulary,)."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(np.bool_)


class Schemas:
    """Compiles JSON schemas for one tokenizer; each is compiled once, and any thread may ask.

    The form is compact: no space and no line break outside strings, so that the only tokens drawn
    are those that say something.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        vocabulary: number of logits of the model, which may be more than the tokenizer has tokens.

    Raises:
        MissingExtraError: llguidance is not installed.
        BackendError: the tokenizer cannot be read.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        if find_spec("llguidance") is None:
            raise MissingExtraError("llguidance", "local")
        from llguidance.hf import from_tokenizer

        try:
            self._tokenizer: Any = from_tokenizer(tokenizer, vocabulary)
        except (ValueError, TypeError, RuntimeError) as error:
            raise BackendError(
                "Expected a tokenizer that schemas can be compiled for, got"
                f" {type(tokenizer).__name__}: {error}"
            ) from error
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compiled = lru_cache(maxsize=_SCHEMAS)(self._compile)

    def start(self, schema: str) -> SchemaState:
        """The state before the first token of a response to ``schema`` (see `canonical`).

        Raises:
            BackendError: the schema asks for what cannot be compiled.
        """
        with self._lock:
            return SchemaState(self._compiled(schema).deep_copy(), self._vocabulary)

    def allowed(
        self, schema: str, response: Sequence[int], places: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Which tokens could have come at each of ``places`` (rising indices of ``response``), shape (places, vocabulary)."""
        state = self.start(schema)
        rows = np.empty((len(places), self._vocabulary), dtype=np.bool_)
        done = 0
        for row, place in enumerate(places):
            for token in response[done:place]:
                state.accept(token)
            done = place
            rows[row] = state.allowed()
        return rows

    def _compile(self, schema: str) -> Any:
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_flexible": False}
        )
        matcher: Any = LLMatcher(self._tokenizer, grammar)
        if error := matcher.get_error():
            raise BackendError(
                f"Expected a JSON schema that can be compiled, got {schema[:200]}: {error}"
            )
        return matcher


def canonical(schema: Mapping[str, Any]) -> str:
    """The schema as one string, the same for equal schemas."""
    return json.dumps(schema, separators=(",", ":"))
