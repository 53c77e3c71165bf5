"""Find the tokens that may come next when a response must be a choice or fit a JSON schema.

Choices are a trie over token ids; schemas are compiled by llguidance. Why there are two mechanisms
is in docs/decisions/020: llguidance computes a mask over the whole vocabulary for each token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from experiential.errors import BackendError, require

_SCHEMAS = 256


@dataclass(eq=False, slots=True)
class TrieNode:
    """Hold one state of a response that must be one of some choices.

    Attributes:
        children: next state per allowed token.
        allowed: the allowed tokens, in the order of the choices that brought them.
        choice: the finished string when this is a leaf, else None.
        forced: tokens that follow without a decision, until the next branch or the leaf.
        landing: the state after ``forced``; this node itself when nothing is forced.
    """

    children: dict[int, TrieNode] = field(default_factory=dict[int, "TrieNode"])
    allowed: tuple[int, ...] = ()
    choice: str | None = None
    forced: tuple[int, ...] = ()
    landing: TrieNode = field(init=False, repr=False)


class ChoiceTrie:
    """Arrange the tokens of some strings, each ended by the end-of-turn token, in a trie."""

    def __init__(self, choices: Sequence[str], tokenizer: Any) -> None:
        eos: int | None = tokenizer.eos_token_id
        if not choices or eos is None:
            raise BackendError(
                f"Expected choices and a tokenizer with an eos token, got {len(choices)} choices"
                f" and eos {eos}"
            )
        choices = tuple(dict.fromkeys(choices))
        self.root = TrieNode()
        self.longest = 0
        nodes = [self.root]
        encoded = tokenizer(list(choices), add_special_tokens=False)
        for choice, ids in zip(choices, encoded["input_ids"], strict=True):
            if eos in ids:
                raise BackendError(
                    f"Expected choices without the end-of-turn token, got {choice!r}; remove the"
                    " token's text"
                )
            node = self.root
            for token in (*ids, eos):
                if token not in node.children:
                    nodes.append(TrieNode())
                    node.children[token] = nodes[-1]
                node = node.children[token]
            # two strings may have the same tokens: the first one counts
            node.choice = choice if node.choice is None else node.choice
            self.longest = max(self.longest, len(ids) + 1)
        for node in reversed(nodes):  # a node is made after its parent, so this is leaves first
            node.allowed, node.landing = tuple(node.children), node
            if len(node.allowed) == 1:
                child = node.children[node.allowed[0]]
                node.forced, node.landing = (*node.allowed, *child.forced), child.landing


@dataclass(frozen=True)
class SchemaState:
    """Follow one response through a JSON schema."""

    _matcher: Any
    _vocabulary: int

    @property
    def complete(self) -> bool:
        """Return whether the response is finished and can hold nothing more."""
        return self._matcher.is_stopped()

    def accept(self, token: int) -> None:
        """Take the next token; BackendError if the schema forbids it."""
        if not self._matcher.consume_token(token):
            raise BackendError(
                f"Expected a token that the schema allows, got {token}: {self._matcher.get_error()}"
            )

    def advance(self) -> tuple[int, ...]:
        """Take and return the tokens that must follow; empty where there is a choice."""
        forced = tuple(cast("list[int]", self._matcher.compute_ff_tokens()))
        for token in forced:
            self.accept(token)
        return forced

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, shape (vocabulary,)."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(np.bool_)


class Schemas:
    """Compile JSON schemas for one tokenizer, each once; any thread may ask.

    The form is compact: no space and no line break outside strings, so that no token is drawn for
    layout alone.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        vocabulary: number of logits of the model, which may be more than the tokenizer has tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        require("local", "llguidance")
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
        """Return the state before the first token of a response to ``schema`` (see `canonical`)."""
        with self._lock:
            return SchemaState(self._compiled(schema).deep_copy(), self._vocabulary)

    def allowed(
        self, schema: str, response: Sequence[int], places: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Replay a response; return which tokens could have come at ``places``, rising indices.

        The shape is (places, vocabulary).
        """
        state = self.start(schema)
        rows = np.empty((len(places), self._vocabulary), dtype=np.bool_)
        for row, (done, place) in enumerate(pairwise([0, *places])):
            for token in response[done:place]:
                state.accept(token)
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
    """Return the schema as one string, the same for equal schemas."""
    return json.dumps(schema, separators=(",", ":"))
