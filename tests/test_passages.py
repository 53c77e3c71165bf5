"""Finding paragraphs by BM25 and by embeddings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.envs.bm25 import BM25
from experiential.envs.hotpotqa.passages import Dense, Library, Passage

TEXTS = ["the red door", "the brass key opens the door", "a lamp"]


def slow_scores(texts: list[str], query: str, k1: float = 0.9, b: float = 0.4) -> list[float]:
    """BM25 word by word, from its definition."""
    documents = [text.split() for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores: list[float] = []
    for words in documents:
        score = 0.0
        for word in query.split():
            n, tf = sum(word in other for other in documents), words.count(word)
            if tf:
                idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
                score += idf * tf / (tf + k1 * (1 - b + b * len(words) / mean))
        scores.append(score)
    return scores


def test_bm25_by_hand() -> None:
    ranker = BM25(TEXTS)
    assert ranker.best("door", 3) == [
        0,
        1,
    ]  # both hold it once, the first is shorter; the lamp shares nothing
    assert ranker.best("brass door", 1) == [1]
    assert (
        ranker.best("DOOR!", 1) == [0]
        and ranker.best("window", 3) == []
        and ranker.best("", 3) == []
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.lists(st.sampled_from("abcde"), min_size=1, max_size=6).map(" ".join),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4).map(" ".join),
)
def test_bm25_agrees_with_its_definition(texts: list[str], query: str) -> None:
    expected = slow_scores(texts, query)
    found = BM25(texts).best(query, len(texts))
    assert {i for i, score in enumerate(expected) if score > 0} == set(found)
    assert [expected[i] for i in found] == pytest.approx(
        sorted((s for s in expected if s > 0), reverse=True), rel=1e-5
    )


def test_dense_search_takes_an_embedder_as_a_bank_does() -> None:
    vectors = {
        "north": [1.0, 0.0],
        "east": [0.0, 1.0],
        "northeast": [0.6, 0.8],
        "up north": [0.9, 0.1],
    }
    dense = Dense(
        ["north", "east", "northeast"],
        lambda texts: np.array([vectors[text] for text in texts], dtype=np.float32),
    )
    assert dense.best("up north", 2) == [0, 2] and dense.best(" ", 2) == []
    assert Dense(TEXTS, "hashing").best("a red door", 1) == [0]


def test_a_library_holds_each_paragraph_once_and_finds_titles() -> None:
    library = Library(
        [Passage("Arno", "A river."), Passage("Arno", "A river."), Passage("Pisa", "A town.")]
    )
    assert len(library.passages) == 2
    assert library.search("arno", 5) == [Passage("Arno", "A river.")]
