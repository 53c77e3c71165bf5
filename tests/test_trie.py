"""ChoiceTrie: exactly the choices can be spelled, and forced runs are known in advance."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.errors import BackendError
from experiential.llm.trie import ChoiceTrie, choice_trie
from tests.llm_tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def spellings(trie: ChoiceTrie) -> set[tuple[int, ...]]:
    done: set[tuple[int, ...]] = set()
    open_prefixes: list[tuple[int, ...]] = [()]
    while open_prefixes:
        prefix = open_prefixes.pop()
        allowed = trie.allowed(prefix)
        if not allowed:
            done.add(prefix)
        open_prefixes.extend((*prefix, token) for token in allowed)
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
    """Following forced() takes only single-child steps, and after it there is a branch or the end."""
    trie = ChoiceTrie(choices, TOKENIZER)
    for spelling in spellings(trie):
        for cut in range(len(spelling)):
            prefix = list(spelling[:cut])
            for token in trie.forced(prefix):
                assert trie.allowed(prefix) == [token]
                prefix.append(token)
            assert len(trie.allowed(prefix)) != 1


def test_unknown_prefix_allows_nothing():
    trie = ChoiceTrie(["left", "right"], TOKENIZER)
    assert trie.allowed([1, 2, 3]) == [] and trie.forced([1, 2, 3]) == []


def test_tries_are_cached_per_tokenizer_and_choices():
    first = choice_trie(("a", "b"), TOKENIZER)
    assert choice_trie(("a", "b"), TOKENIZER) is first
    assert choice_trie(("b", "a"), TOKENIZER) is not first
    assert choice_trie(("a", "b"), tiny_tokenizer()) is not first


def test_impossible_choices_are_refused():
    with pytest.raises(BackendError, match="0 choices"):
        ChoiceTrie([], TOKENIZER)
    with pytest.raises(BackendError, match="end-of-turn"):
        ChoiceTrie(["go<|im_end|>"], TOKENIZER)
