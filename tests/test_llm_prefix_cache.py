"""PrefixCache: the longest common prefix is found, bounded by tokens, least recently used out
first.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.llm.forward import PrefixCache

Ids = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(Ids, max_size=25), Ids)
def test_match_equals_brute_force(entries: list[list[int]], query: list[int]):
    """With room for all, the match is the longest common prefix over everything ever stored, and
    its state fits it.
    """
    cache = PrefixCache(10_000, min_match=1)
    for ids in entries:
        cache.put(array(ids), lambda ids=ids: ids)
    expected = max((common(ids, query[:-1]) for ids in entries), default=0)
    found, state = cache.match(array(query))
    assert found == expected
    assert found == 0 or state[:found] == query[:found]


@settings(max_examples=100, deadline=None)
@given(st.lists(Ids, max_size=40), st.integers(0, 60))
def test_stored_tokens_never_exceed_the_bound(entries: list[list[int]], bound: int):
    cache = PrefixCache(bound, min_match=1)
    for ids in entries:
        cache.put(array(ids), lambda ids=ids: ids)
        assert cache.tokens <= bound
        if len(ids) <= bound:
            assert cache.match(array([*ids, 0]))[0] == len(ids)


def test_least_recently_used_goes_first():
    cache = PrefixCache(20, min_match=1)
    for first in (1, 2):
        cache.put(array([first] * 10), lambda first=first: first)
    cache.match(array([1] * 5))
    cache.put(array([3] * 10), lambda: 3)
    assert cache.match(array([1] * 5)) == (4, 1)
    assert cache.match(array([2] * 5)) == (0, None)


def test_an_extended_entry_replaces_its_prefix_and_covered_ones_cost_nothing():
    cache = PrefixCache(100, min_match=1)
    cache.put(array([1, 2]), lambda: "short")
    cache.put(array([1, 2, 3]), lambda: "long")
    cache.put(array([1, 2]), lambda: pytest.fail("a covered prefix was materialised"))
    assert (len(cache), cache.tokens) == (1, 3)
    cache.clear()
    assert (len(cache), cache.tokens, cache.match(array([1, 2, 3]))) == (0, 0, (0, None))
