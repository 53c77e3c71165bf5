"""Follow one response in the making: which tokens may come, which have come, when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiential.llm.base import SamplingParams
from experiential.llm.constraints import SchemaState, TrieNode
from experiential.types import FinishReason

_BYTE_SLACK = 4


class StopFinder:
    """Find stop strings as tokens arrive, looking only at the tokens that could hold one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens_with: dict[str, frozenset[int]] = {}  # whose text may hold a character

    def completes(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
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

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens, spaces untouched."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@dataclass(eq=False)
class Request:
    """Hold one prompt and the response so far.

    Attributes:
        limit: response tokens allowed; ignored when choices decide the end.
        eos: tokens that end the response.
        uniform: gives the next random number in [0, 1) of this request.
        node: the state of a response that is one of some choices; at first the root of their trie.
        schema: the state of the response under its JSON schema, when it has one.
        allowed: per token of a restricted response, the tokens it was drawn from; empty under a
            schema, whose sets the trainer finds again by replaying the response.
        seen: tokens that the model has seen: the row's length in the key-value block.
        pending: sampled or forced tokens that the model has not seen yet.
        prefix: prompt and forced first tokens: the input of the first forward.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    limit: int
    eos: frozenset[int]
    stops: StopFinder
    uniform: Callable[[], float]
    node: TrieNode | None = None
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

    def __post_init__(self) -> None:
        self._take_forced()
        self.prefix = (*self.prompt, *self.response)

    @property
    def cancelled(self) -> bool:
        """Return whether nobody waits for the answer any more."""
        return self.future is not None and self.future.cancelled()

    def accept(self, token: int, logprob: float) -> None:
        """Take the token drawn from the model; sets ``finish`` when it ends the response."""
        start = len(self.response)
        self.response.append(token)
        self.logprobs.append(logprob)
        if self.node is not None:
            self.allowed.append(self.node.allowed)
            self.node = self.node.children[token]
            self._take_forced()
        elif self.schema is not None:
            self.allowed.append(())
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
        ends = [at + len(stop) for stop in self.sampling.stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

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
