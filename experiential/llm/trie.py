"""A trie over token ids: which tokens may come next when a response must be exactly one of some strings."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from experiential.errors import BackendError

_TRIES_PER_TOKENIZER = 1024


class TrieNode:
    """One state of a constrained response.

    Attributes:
        children: next state per allowed token.
        allowed: the allowed tokens, in the order of the choices that brought them.
        choice: the finished string when this is a leaf, else None.
        forced: tokens that follow without a decision, until the next branch or the leaf.
        landing: the state after ``forced``; this node itself when nothing is forced.
    """

    __slots__ = ("allowed", "children", "choice", "forced", "landing")

    def __init__(self) -> None:
        self.children: dict[int, TrieNode] = {}
        self.allowed: tuple[int, ...] = ()
        self.choice: str | None = None
        self.forced: tuple[int, ...] = ()
        self.landing: TrieNode = self

    def freeze(self) -> None:
        """Fill in the derived attributes of this node and all below it, leaves first."""
        stack: list[tuple[TrieNode, bool]] = [(self, False)]
        while stack:
            node, below_done = stack.pop()
            if not below_done:
                stack.append((node, True))
                stack.extend((child, False) for child in node.children.values())
                continue
            node.allowed = tuple(node.children)
            if len(node.allowed) == 1:
                child = node.children[node.allowed[0]]
                node.forced, node.landing = (*node.allowed, *child.forced), child.landing


class ChoiceTrie:
    """Token sequences of a set of strings; each is encoded without special tokens and ended by the end-of-turn token.

    Raises:
        BackendError: no choices, a tokenizer without an end-of-turn token, or a choice that
            contains that token.
    """

    def __init__(self, choices: Sequence[str], tokenizer: Any) -> None:
        eos: int | None = tokenizer.eos_token_id
        if not choices or eos is None:
            raise BackendError(
                f"Expected choices and a tokenizer with an eos token, got {len(choices)} choices"
                f" and eos {eos}"
            )
        self.eos = eos
        self.choices = tuple(dict.fromkeys(choices))
        self.root = TrieNode()
        self.longest = 0
        encoded: list[list[int]] = tokenizer(list(self.choices), add_special_tokens=False)[
            "input_ids"
        ]
        for choice, ids in zip(self.choices, encoded, strict=True):
            self._insert(choice, ids)
        self.root.freeze()

    def _insert(self, choice: str, ids: list[int]) -> None:
        if self.eos in ids:
            raise BackendError(
                f"Expected choices without the end-of-turn token, got {choice!r}; remove the"
                " token's text"
            )
        node = self.root
        for token in (*ids, self.eos):
            node = node.children.setdefault(token, TrieNode())
        node.choice = choice if node.choice is None else node.choice
        self.longest = max(self.longest, len(ids) + 1)

    def node(self, prefix_ids: Sequence[int]) -> TrieNode | None:
        """The state after ``prefix_ids``, None when no choice starts so."""
        node: TrieNode | None = self.root
        for token in prefix_ids:
            node = node.children.get(token) if node is not None else None
        return node

    def allowed(self, prefix_ids: Sequence[int]) -> list[int]:
        """Tokens that may follow ``prefix_ids``; empty when a choice is complete or none starts so."""
        node = self.node(prefix_ids)
        return [] if node is None else list(node.allowed)

    def forced(self, prefix_ids: Sequence[int]) -> list[int]:
        """Tokens that must follow ``prefix_ids`` up to the next decision; found without the model."""
        node = self.node(prefix_ids)
        return [] if node is None else list(node.forced)


_cache: weakref.WeakKeyDictionary[Any, OrderedDict[tuple[str, ...], ChoiceTrie]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


def choice_trie(choices: tuple[str, ...], tokenizer: Any) -> ChoiceTrie:
    """The trie of ``choices``, cached per (tokenizer, choices); the least recently used are dropped."""
    with _lock:
        tries = _cache.setdefault(tokenizer, OrderedDict())
        trie = tries.get(choices)
        if trie is None:
            trie = tries[choices] = ChoiceTrie(choices, tokenizer)
        tries.move_to_end(choices)
        while len(tries) > _TRIES_PER_TOKENIZER:
            tries.popitem(last=False)
        return trie
