"""Hold a conversation as token ids, so that training sees exactly the tokens that were sampled."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, Literal

from experiential.bank.text import PROTOCOL_TAG
from experiential.types import Generation, Message

SpanKind = Literal["system", "user", "experience", "assistant"]

# a stand-in for a reply, to find the text that a template puts after one
_REPLY = "Sentinel4711Reply"
_BEFORE: list[Message] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": _REPLY},
]
_EXPERIENCE = re.compile(r"<experience>\n.*?\n</experience>", re.DOTALL)


@dataclass(frozen=True)
class Span:
    """Name the kind of the tokens ``start`` to ``end`` (exclusive) of a sequence."""

    kind: SpanKind
    start: int
    end: int


@dataclass
class TokenSequence:
    """Hold one sequence to train on; the lists have one item per token.

    The spans come in order and without gaps; a chat template's own tokens belong to the message
    that they surround.
    """

    tokens: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])  # 1 where the token was sampled here
    logprobs: list[float] = field(default_factory=list[float])  # in nats where mask is 1, else 0
    # token ids that a constraint allowed; an empty tuple means unconstrained
    allowed: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    spans: list[Span] = field(default_factory=list[Span])

    def extend(
        self, tokens: Sequence[int], kinds: Iterable[SpanKind], sampled: Generation | None = None
    ) -> None:
        """Append tokens; ``sampled`` is the response that they are, None for tokens given to it."""
        count = len(tokens)
        self.mask += [int(sampled is not None)] * count
        self.logprobs += sampled.logprobs if sampled else [0.0] * count
        self.allowed += (sampled.allowed if sampled else None) or [()] * count
        for position, kind in enumerate(kinds, len(self.tokens)):
            if self.spans and self.spans[-1].kind == kind:
                self.spans[-1] = Span(kind, self.spans[-1].start, position + 1)
            else:
                self.spans.append(Span(kind, position, position + 1))
        self.tokens += tokens


class Conversation:
    """Hold what was said: the base of `MessageDialogue` and `Dialogue`.

    A prompt with no message since the last response is a ValueError.

    Args:
        history: past exchanges that a prompt shows, None for all. The first message always stays,
            for it holds the goal and the advice; a note counts the turns left out after it.
        keep_first: False lets the first message go like any other, for environments whose every
            observation is complete.

    Raises:
        ValueError: ``history`` is negative.
    """

    def __init__(self, *, history: int | None = None, keep_first: bool = True) -> None:
        if history is not None and history < 0:
            raise ValueError(f"Expected history to be None or at least 0, got {history}")
        self._history, self._keep_first = history, keep_first
        self._system = ""
        self._users: list[Message] = []  # one for each response, and the pending one
        self._replies: list[Generation] = []
        self._staged: Any = None  # what a subclass made of the pending message

    def add(self, message: Message) -> None:
        """Add a user or tool message, or, before the first response, the system message.

        Raises:
            ValueError: a message of this role cannot stand here.
        """
        role = message["role"]
        if role == "assistant" or (role == "system" and self._replies):
            raise ValueError(
                f"Expected a user or tool message here, got role {role!r}; responses are given to"
                " append()"
            )
        if role == "system":
            self._system = message["content"]
        elif len(self._users) == len(self._replies):
            self._users.append(message)
        else:  # messages without a response between them become one
            pending = self._users[-1]
            is_tool = role == pending["role"] == "tool"
            both = pending.copy() if is_tool else Message(role="user", content="")
            both["content"] = f"{pending['content']}\n{message['content']}"
            self._users[-1] = both
        self._staged = None

    def withdraw(self) -> None:
        """Drop the messages added since the last response, as after a failed request."""
        del self._users[len(self._replies) :]
        self._staged = None

    def _shown(self) -> tuple[int, list[Message]]:
        """Return the first response that the next prompt shows, and its user messages."""
        if len(self._users) == len(self._replies):
            raise ValueError(
                "Expected a message since the last response, got none; call add() first"
            )
        first = 0 if self._history is None else max(0, len(self._replies) - self._history)
        users = self._users[first:]
        if first and self._keep_first:
            goal, rest = self._users[0]["content"], users[0]["content"]
            users[0] = {"role": "user", "content": f"{goal}\n[{first} turns left out]\n{rest}"}
        elif first:  # the call that a tool message answers is left out
            users[0] = {"role": "user", "content": users[0]["content"]}
        return first, users


class MessageDialogue(Conversation):
    """Hold the conversation as chat messages, for backends that take no tokens.

    >>> talk = MessageDialogue()
    >>> talk.add({"role": "user", "content": "A door."})
    >>> talk.append(Generation(text="open door"))
    >>> talk.add({"role": "user", "content": "It opens."})
    >>> [message["content"] for message in talk.prompt()]
    ['A door.', 'open door', 'It opens.']
    """

    def prompt(self) -> list[Message]:
        """Return the messages to answer."""
        first, users = self._shown()
        messages = [Message(role="system", content=self._system)] if self._system else []
        for user, reply in zip(users[:-1], self._replies[first:], strict=True):
            said = Message(role="assistant", content=reply.text)
            if reply.tool_calls:
                said["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in reply.tool_calls
                ]
            messages += [user, said]
        return [*messages, users[-1]]

    def append(self, generation: Generation) -> None:
        """Record the response to ``prompt()``."""
        self._shown()  # raises without a message to respond to
        self._replies.append(generation)


class Dialogue(Conversation):
    """Hold the conversation as token ids; sampled tokens are never decoded and tokenised again.

    The chat template renders the first messages. Every later message is appended as the difference
    that the template makes for it after a stand-in reply, so that templates which rewrite earlier
    turns (such as those that drop the thinking) cannot change sampled tokens. With ``history=None``
    each prompt begins with the one before it and its response.

    Caveat: when ``history`` makes a prompt drop turns, a new sequence begins, in which the earlier
    responses are context (mask 0).

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        history, keep_first: see `Conversation`.

    Attributes:
        sequence: the current sequence, up to the last response.

    Raises:
        ValueError: the tokenizer has no chat template, or ``history`` is negative.
    """

    def __init__(
        self, tokenizer: Any, *, history: int | None = None, keep_first: bool = True
    ) -> None:
        super().__init__(history=history, keep_first=keep_first)
        self._template = ChatTemplate(tokenizer)
        self.sequence = TokenSequence()
        self._start = 0
        self._closed: list[TokenSequence] = []

    def prompt(self) -> list[int]:
        """Return the token ids to continue, generation prompt included."""
        sequence, tokens, _ = self.stage()
        return sequence.tokens + tokens

    def append(self, generation: Generation) -> None:
        """Record the response to ``prompt()``, with mask 1.

        Raises:
            ValueError: the response was made from another prompt, or its lists differ in length.
        """
        sequence, tokens, kinds = self.stage()
        if generation.prompt_ids and tuple(generation.prompt_ids) != (*sequence.tokens, *tokens):
            raise ValueError(
                "Expected a response to the current prompt, got one made from other tokens; append"
                " the response to prompt()"
            )
        count = len(generation.response_ids)
        allowed = count if generation.allowed is None else len(generation.allowed)
        got = (len(generation.logprobs), allowed)
        if got != (count, count):
            raise ValueError(
                f"Expected one log-probability and allowed set for each of {count} tokens, got"
                f" {got[0]} and {got[1]}"
            )
        if sequence is not self.sequence:
            self._closed = self.sequences()
            self.sequence, (self._start, _) = sequence, self._shown()
        sequence.extend(tokens, kinds)
        sequence.extend(generation.response_ids, repeat("assistant", count), generation)
        self._replies.append(generation)
        self._staged = None

    def sequences(self) -> list[TokenSequence]:
        """Return the sequences to train on; each sampled token has mask 1 in one of them."""
        return [*self._closed, *([self.sequence] if any(self.sequence.mask) else [])]

    def stage(self) -> tuple[TokenSequence, list[int], list[SpanKind]]:
        """Return the sequence to continue, and tokens and kinds of the pending messages."""
        if self._staged is not None:
            return self._staged
        first, users = self._shown()
        sequence = self.sequence
        if self._replies and first == self._start:
            tokens, kinds = self._template.delta(users[-1], self._replies[-1].response_ids)
        else:  # where turns were dropped, in a new sequence with earlier responses as context
            sequence = TokenSequence() if self._replies else sequence
            tokens, kinds = self._template.opening(self._system, users[0])
            for reply, user in zip(self._replies[first:], users[1:], strict=True):
                sequence.extend(tokens, kinds)
                sequence.extend(reply.response_ids, repeat("assistant", len(reply.response_ids)))
                tokens, kinds = self._template.delta(user, reply.response_ids)
        self._staged = (sequence, tokens, kinds)
        return self._staged


class ChatTemplate:
    """Take a chat template apart into an opening and the difference of each further message."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            name = type(tokenizer).__name__
            raise ValueError(
                f"Expected a tokenizer with a chat template, got {name} without one; set"
                " tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._render = partial(tokenizer.apply_chat_template, tokenize=False)
        self._end: list[int] | None = None
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        known = {*tokenizer.all_special_tokens, *(one.content for one in added if one.special)}
        # our own tags stay as they are where a tokenizer has them as special tokens
        specials = [
            token
            for token in known
            if len(token) > 1 and not (token.endswith(">") and PROTOCOL_TAG.match(token))
        ]
        longest_first = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def opening(self, system: str, user: Message) -> tuple[list[int], list[SpanKind]]:
        """Return tokens and kinds of system and first user message, with the generation prompt.

        A template without a system role gets the system text in front of the user's.
        """
        system, user = self._defused(system), {**user, "content": self._defused(user["content"])}
        text = ""
        if system:
            from jinja2 import TemplateError

            messages = [{"role": "system", "content": system}, user]
            with contextlib.suppress(TemplateError):  # raised by templates without a system role
                text = self._render(messages, add_generation_prompt=True)
            if system.strip() not in text:  # or silently left out by them
                user = {**user, "content": f"{system}\n\n{user['content']}"}
                text = ""
        text = text or self._render([user], add_generation_prompt=True)
        system_end = text.find(system.strip()) + len(system.strip()) if system else 0
        return self._encode(text, system_end)

    def delta(self, message: Message, response: Sequence[int]) -> tuple[list[int], list[SpanKind]]:
        """Return tokens and kinds from the end of ``response`` to the next generation prompt."""
        message = {**message, "content": self._defused(message["content"])}
        tokens, kinds = self._after_reply(message)
        if self._end is None:
            self._end, _ = self._after_reply()
        # a response that ended its turn has sampled the tokens that the delta begins with
        longest = min(len(self._end), len(response), len(tokens))
        for overlap in range(longest, 0, -1):
            if tuple(response[-overlap:]) == tuple(tokens[:overlap]):
                return tokens[overlap:], kinds[overlap:]
        return tokens, kinds

    def _after_reply(self, *messages: Message) -> tuple[list[int], list[SpanKind]]:
        """Render messages after a stand-in reply; return what stands behind that reply."""
        text = self._render([*_BEFORE, *messages], add_generation_prompt=bool(messages))
        head, found, tail = text.partition(_REPLY)
        if not found:
            raise ValueError(
                f"Expected a chat template that shows assistant messages, got {head!r} for one"
            )
        return self._encode(tail)

    def _encode(self, text: str, system_end: int = 0) -> tuple[list[int], list[SpanKind]]:
        """Return tokens and their kinds, by the character at which each token starts."""
        if not self._tokenizer.is_fast:
            tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return tokens, ["user"] * len(tokens)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        blocks = [match.span() for match in _EXPERIENCE.finditer(text)]
        kinds: list[SpanKind] = []
        for start, _ in encoded["offset_mapping"]:
            if any(first <= start < last for first, last in blocks):
                kinds.append("experience")
            else:
                kinds.append("system" if start < system_end else "user")
        return list(encoded["input_ids"]), kinds

    def _defused(self, content: str) -> str:
        """Return ``content`` with the special tokens of this tokenizer broken up."""
        return self._special.sub(
            lambda token: ("&lt;" if token[0][0] == "<" else f"{token[0][0]} ") + token[0][1:],
            content,
        )
