"""One response in the making: which tokens may come, which have come, and when it ends. Pure Python, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from experiential.errors import BackendError
from experiential.llm.base import SamplingParams
from experiential.llm.grammar import SchemaState
from experiential.llm.trie import ChoiceTrie, TrieNode
from experiential.types import FinishReason

_BYTE_SLACK = 4


class StopFinder:
    """Tells whether the newest token completes a stop string, looking only at the tokens that could hold it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._enders = lru_cache(maxsize=256)(self._tokens_with)

    def _tokens_with(self, character: str) -> frozenset[int] | None:
        """Tokens whose text may hold ``character``; None (any token) where the vocabulary's spelling does not show it."""
        if not "!" <= character <= "~":
            return None
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return frozenset(
            token
            for text, token in vocabulary.items()
            if character in text or text.startswith("<0x")
        )

    def completes(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether ``ids`` end in a token that completes one of ``stops``."""
        for stop in stops:
            enders = self._enders(stop[-1])
            if enders is not None and ids[-1] not in enders:
                continue
            window = ids[-(len(stop.encode()) + _BYTE_SLACK) :]
            if stop in self.decode(window):
                return True
        return False

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens, spaces untouched."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@dataclass(eq=False)
class Request:
    """One prompt and the response so far.

    Attributes:
        prompt: token ids of the prompt.
        limit: response tokens allowed; ignored when a trie decides the end.
        eos: tokens that end the response.
        uniform: gives the next random number in [0, 1) of this request.
        trie: what the response may be, when it is one of some choices.
        schema: what may come next, when the response is restricted to a JSON schema.
        prefix: prompt and forced first tokens: what the first forward sees.
        pending: sampled or forced tokens that the model has not seen yet.
        seen: tokens that the model has seen, which is the row's length in the key-value block.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    limit: int
    eos: frozenset[int]
    stops: StopFinder
    uniform: Callable[[], float]
    trie: ChoiceTrie | None = None
    schema: SchemaState | None = None
    future: asyncio.Future[None] | None = None
    response: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    allowed: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    finish: FinishReason | None = None
    version: int = 0
    epoch: int = 0
    seen: int = 0
    pending: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    node: TrieNode | None = None

    def __post_init__(self) -> None:
        if self.trie is not None:
            self._follow(self.trie.root)
        elif self.schema is not None:
            self._advance(self.schema)
        self.prefix = (*self.prompt, *self.response)

    @property
    def choices(self) -> tuple[int, ...] | None:
        """Tokens allowed next, None when any is."""
        return None if self.node is None else self.node.allowed

    @property
    def temperature(self) -> float:
        """Temperature that the log-probabilities are of: 1 for greedy decoding."""
        return self.sampling.temperature or 1.0

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.future is not None and self.future.cancelled()

    def accept(self, token: int, logprob: float) -> None:
        """Take the token drawn from the model; sets ``finish`` when it ends the response."""
        self.response.append(token)
        self.logprobs.append(logprob)
        if self.node is not None:
            self.allowed.append(self.node.allowed)
            start = len(self.response) - 1
            self._follow(self.node.children[token])
            self.pending = tuple(self.response[start:])
            return
        if self.schema is not None:
            self._accept_structured(self.schema, token)
            return
        self.pending = (token,)
        if token in self.eos or (
            self.sampling.stop and self.stops.completes(self.response, self.sampling.stop)
        ):
            self.finish = FinishReason.STOP
        elif len(self.response) >= self.limit:
            self.finish = FinishReason.LENGTH

    def text(self) -> str:
        """The finished text; a stop string is kept, and what its last token held after it is cut."""
        if self.node is not None:
            return self.node.choice or ""
        text = self.stops.decode(self.response)
        ends = [at + len(stop) for stop in self.sampling.stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _accept_structured(self, schema: SchemaState, token: int) -> None:
        start = len(self.response) - 1
        self.allowed.append(())
        if token in self.eos:
            self.finish = FinishReason.STOP
        else:
            schema.accept(token)
            self._advance(schema)
        self.pending = tuple(self.response[start:])

    def _advance(self, schema: SchemaState) -> None:
        """Append what the schema forces; when it lets nothing more come, the response ends."""
        self._force(schema.advance())
        if len(self.response) > self.limit:
            del self.response[self.limit :], self.logprobs[self.limit :], self.allowed[self.limit :]
            self.finish = FinishReason.LENGTH
        elif schema.complete:
            self.finish = FinishReason.STOP
        elif len(self.response) == self.limit:
            self.finish = FinishReason.LENGTH

    def _force(self, tokens: tuple[int, ...]) -> None:
        self.response.extend(tokens)
        self.logprobs.extend(0.0 for _ in tokens)
        self.allowed.extend((token,) for token in tokens)

    def _follow(self, node: TrieNode) -> None:
        self._force(node.forced)
        self.node = node.landing
        if not node.landing.children:
            self.finish = FinishReason.CHOICE


def response_limit(
    prompt: int, sampling: SamplingParams, trie: ChoiceTrie | None, context: int | None
) -> int:
    """Response tokens that fit: ``max_tokens`` cut to the context length.

    Raises:
        BackendError: the prompt, or the prompt and the longest choice, do not fit into the context.
    """
    needed = 1 if trie is None else trie.longest
    if prompt == 0:
        raise BackendError("Expected a prompt of at least one token, got an empty one")
    if context is not None and prompt + needed > context:
        raise BackendError(
            f"Expected prompt and response to fit the context of {context} tokens, got a prompt of"
            f" {prompt} tokens and at least {needed} to generate; shorten the prompt"
        )
    return sampling.max_tokens if context is None else min(sampling.max_tokens, context - prompt)
