"""Follow one response in the making: which tokens may come, which have come, when it ends.

A response may have to be one of some choices, or fit a JSON schema or a regular expression. Choices
are a trie over token ids; the others are compiled by llguidance. Why there are two mechanisms is in
docs/decisions/020: llguidance computes a mask over the whole vocabulary for each token.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from experiential.errors import BackendError, require
from experiential.llm.base import SamplingParams, cut_after_stop
from experiential.types import FinishReason, Message, Prompt, is_token_prompt

_SCHEMAS = 256
_PATTERN = "x-pattern"
"""The only key of a schema that stands for text matching a regular expression, and not for JSON."""
_BYTE_SLACK = 4


class PromptEncoder:
    """Turn prompts into token ids; messages go through the chat template.

    Args:
        tokenizer: of the model.
        name: of the model, for errors.
        vocabulary: token ids from this number on are refused; None leaves them to the model.
    """

    def __init__(self, tokenizer: Any, name: str, vocabulary: int | None = None) -> None:
        self._tokenizer, self._name, self._vocabulary = tokenizer, name, vocabulary
        # members of a group share their first prompt
        self._render = lru_cache(maxsize=512)(self._render_now)

    def __call__(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt."""
        if not is_token_prompt(prompt):
            messages = cast("Sequence[Message]", prompt)
            return self._render(tuple((one["role"], one["content"]) for one in messages))
        ids = tuple(prompt)
        if self._vocabulary is not None and (min(ids) < 0 or max(ids) >= self._vocabulary):
            raise BackendError(
                f"Expected token ids from 0 to {self._vocabulary - 1}, got {min(ids)} to {max(ids)}"
            )
        return ids

    def _render_now(self, messages: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        if not messages:
            return ()
        if not self._tokenizer.chat_template:
            raise BackendError(
                "Expected a tokenizer with a chat template to render messages, got one without for"
                f" {self._name!r}; send token ids"
            )
        chat = [{"role": role, "content": content} for role, content in messages]
        ids = self._tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return tuple(ids)


class StopFinder:
    """Find stop strings as tokens arrive, looking only at the tokens that could hold one.

    Attributes:
        decode: returns the text of tokens without special ones, spaces untouched.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decode: Callable[[list[int]], str] = partial(
            tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._tokens_with: dict[str, frozenset[int]] = {}  # whose text may hold a character

    def completes(self, ids: list[int], stops: Sequence[str]) -> bool:
        """Return whether the last token of ``ids`` completes one of ``stops``."""
        for stop in stops:
            # vocabularies spell blanks and bytes beyond ASCII in their own ways
            if "!" <= (last := stop[-1]) <= "~":
                if last not in self._tokens_with:
                    vocabulary: dict[str, int] = self._tokenizer.get_vocab()
                    self._tokens_with[last] = frozenset(
                        token
                        for text, token in vocabulary.items()
                        if last in text or text.startswith("<0x")
                    )
                if ids[-1] not in self._tokens_with[last]:
                    continue
            # a token holds a byte or more, so the stop string lies in this many tokens
            window = ids[-(len(stop.encode()) + _BYTE_SLACK) :]
            if stop in self.decode(window):
                return True
        return False


@dataclass(eq=False)
class Request:
    """Hold one prompt and the response so far.

    Attributes:
        limit: response tokens allowed; ignored when choices decide the end.
        eos: tokens that end the response.
        uniform: gives the next random number in [0, 1) of this request.
        future: resolved with the response, or cancelled where nobody waits for it any more.
        node: the state of a response that is one of some choices; at first the root of their trie.
        schema: the state of the response under its JSON schema, when it has one.
        allowed: per token, the tokens it was drawn from; empty where none was excluded, and under
            a schema, whose sets the trainer finds again by replaying the response.
        row: the key-value states of what the model has seen, while the request is decoded.
        pending: sampled or forced tokens that the model has not seen yet.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    limit: int
    eos: frozenset[int]
    stops: StopFinder
    uniform: Callable[[], float]
    node: TrieNode | None = None
    schema: SchemaState | None = None
    future: asyncio.Future[None] = field(default_factory=asyncio.Future[None])
    response: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    allowed: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    finish: FinishReason | None = None
    version: int = 0
    epoch: int = 0
    row: Any = None
    pending: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._take_forced()

    def accept(self, token: int, logprob: float, kept: tuple[int, ...] | None = None) -> None:
        """Take the token drawn from the model; sets ``finish`` when it ends the response.

        ``kept`` are the tokens that ``top_k`` and ``top_p`` left of those possible.
        """
        start = len(self.response)
        self.response.append(token)
        self.logprobs.append(logprob)
        self.allowed.append(kept or (self.node.allowed if self.node is not None else ()))
        if self.node is not None:
            self.node = self.node.children[token]
            self._take_forced()
        elif self.schema is not None:
            if token in self.eos:
                self.finish = FinishReason.STOP
            else:
                self.schema.accept(token)
                self._take_forced()
        elif token in self.eos or (
            self.sampling.stop and self.stops.completes(self.response, self.sampling.stop)
        ):
            self.finish = FinishReason.STOP
        elif len(self.response) >= self.limit:
            self.finish = FinishReason.LENGTH
        self.pending = tuple(self.response[start:])

    def text(self) -> str:
        """Return the finished text; it ends with its first stop string, if it has one."""
        if self.node is not None:
            return self.node.choice or ""
        text = self.stops.decode(self.response)
        return cut_after_stop(text, self.sampling.stop)

    def _take_forced(self) -> None:
        """Append the tokens that the constraint leaves no choice about; end a finished response."""
        if self.node is not None:
            forced, self.node = self.node.forced, self.node.landing
        else:
            forced = () if self.schema is None else self.schema.advance()
        self.response.extend(forced)
        self.logprobs.extend(0.0 for _ in forced)
        self.allowed.extend((token,) for token in forced)
        if self.node is not None:
            self.finish = None if self.node.children else FinishReason.CHOICE
        elif self.schema is not None:
            if self.schema.complete and len(self.response) <= self.limit:
                self.finish = FinishReason.STOP
            elif len(self.response) >= self.limit:
                for tokens in (self.response, self.logprobs, self.allowed):
                    del tokens[self.limit :]
                self.finish = FinishReason.LENGTH


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

        asked: dict[str, Any] = json.loads(schema)
        if asked.keys() == {_PATTERN}:
            grammar = LLMatcher.grammar_from_regex(asked[_PATTERN])
        else:
            grammar = LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_flexible": False}
            )
        matcher: Any = LLMatcher(self._tokenizer, grammar)
        if error := matcher.get_error():
            got = f"{schema[:200]}: {error}"
            raise BackendError(f"Expected a JSON schema or pattern that can be compiled, got {got}")
        return matcher


def restriction(sampling: SamplingParams) -> str | None:
    """Return what `Schemas` restricts a response to, as one string; None for nothing."""
    if (pattern := sampling.open_choices()) is not None:
        return canonical({_PATTERN: pattern})
    return None if sampling.json_schema is None else canonical(sampling.json_schema)


def check_pattern(pattern: str) -> None:
    """Raise ValueError if no response can be restricted to a pattern.

    Where llguidance is installed, what only Python's regular expressions have, such as look-around,
    is refused too.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(str(error)) from error
    if find_spec("llguidance") is not None:
        from llguidance import LLMatcher

        fault: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern))
        if fault:
            raise ValueError(" ".join(fault.split()))


def canonical(schema: Mapping[str, Any]) -> str:
    """Return the schema as one string, the same for equal schemas."""
    return json.dumps(schema, separators=(",", ":"))
