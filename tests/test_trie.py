"""ChoiceTrie: exactly the choices can be spelled, and forced runs are known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.errors import BackendError
from experiential.llm.base import SamplingParams
from experiential.llm.request import ChoiceTrie, TrieNode
from experiential.llm.transformers import TransformersLLM
from tests.llm_tiny import tiny_random_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def state_after(trie: ChoiceTrie, prefix: Sequence[int]) -> TrieNode | None:
    """Return the state after a prefix, None when no choice starts so."""
    node: TrieNode | None = trie.root
    for token in prefix:
        node = node.children.get(token) if node is not None else None
    return node


def allowed(trie: ChoiceTrie, prefix: Sequence[int]) -> list[int]:
    """Return the tokens that may follow a prefix; none after a whole choice or an unknown one."""
    node = state_after(trie, prefix)
    return [] if node is None else list(node.allowed)


def forced(trie: ChoiceTrie, prefix: Sequence[int]) -> list[int]:
    """Return the tokens that must follow a prefix up to the next decision."""
    node = state_after(trie, prefix)
    return [] if node is None else list(node.forced)


def spellings(trie: ChoiceTrie) -> set[tuple[int, ...]]:
    done: set[tuple[int, ...]] = set()
    open_prefixes: list[tuple[int, ...]] = [()]
    while open_prefixes:
        prefix = open_prefixes.pop()
        following = allowed(trie, prefix)
        if not following:
            done.add(prefix)
        open_prefixes.extend((*prefix, token) for token in following)
    return done


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=8))
def test_walks_spell_exactly_the_choices(choices: list[str]):
    """Every maximal walk ends with eos and is the encoding of one choice, for any unicode strings,
    prefixes and repeats included.
    """
    expected = {
        (*TOKENIZER(c, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id)
        for c in choices
    }
    trie = ChoiceTrie(choices, TOKENIZER)
    assert spellings(trie) == expected
    assert trie.longest == max(map(len, expected))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abc ", min_size=1, max_size=10), min_size=1, max_size=8))
def test_forced_runs_stop_at_branches_and_ends(choices: list[str]):
    """Forced tokens are single-child steps, and after them there is a branch or the end."""
    trie = ChoiceTrie(choices, TOKENIZER)
    for spelling in spellings(trie):
        for cut in range(len(spelling)):
            prefix = list(spelling[:cut])
            for token in forced(trie, prefix):
                assert allowed(trie, prefix) == [token]
                prefix.append(token)
            assert len(allowed(trie, prefix)) != 1


def test_unknown_prefix_allows_nothing():
    trie = ChoiceTrie(["left", "right"], TOKENIZER)
    assert allowed(trie, [1, 2, 3]) == [] and forced(trie, [1, 2, 3]) == []


async def test_a_backend_makes_the_trie_of_equal_choices_once():
    tokenized: list[Sequence[str]] = []

    class Counting:
        def __call__(self, texts: Sequence[str], **options: Any) -> Any:
            tokenized.append(texts)
            return TOKENIZER(texts, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

    llm = TransformersLLM(tiny_random_model()[0], Counting())
    for choices in (("a", "b"), ("a", "b"), ("b", "a")):
        await llm.generate([{"role": "user", "content": "x"}], SamplingParams(choices=choices))
    llm.close()
    assert [texts for texts in tokenized if len(texts) == 2] == [["a", "b"], ["b", "a"]]


def test_impossible_choices_are_refused():
    with pytest.raises(BackendError, match="0 choices"):
        ChoiceTrie([], TOKENIZER)
    with pytest.raises(BackendError, match="end-of-turn"):
        ChoiceTrie(["go<|im_end|>"], TOKENIZER)
