"""BM25 over a few thousand texts in memory, with the terms of a text and their count as the caller takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from experiential.bank.index.lexical import words_of

Floats = npt.NDArray[np.float32]


class BM25:
    """Okapi BM25 with Lucene's idf ln(1 + (N - n + 0.5) / (n + 0.5)), in float32 and in Lucene's order of operations.

    Texts that share no term with the query are never given; among equal scores the earlier text is
    first.

    >>> BM25(["the red door", "a brass key opens it", "the brass key of the red door"]).best("brass key", 2)
    [1, 2]

    Args:
        texts: what is searched.
        terms: the terms of a text or query; by default its words in lower case without accents.
        stored: a text's number of terms as the index keeps it.
        k1: how soon a term's count saturates.
        b: how much long texts are held back, in [0, 1].
    """

    def __init__(
        self,
        texts: Sequence[str],
        terms: Callable[[str], list[str]] = words_of,
        stored: Callable[[int], int] = int,
        k1: float = 0.9,
        b: float = 0.4,
    ) -> None:
        counts = [Counter(terms(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = np.float32(max(sum(lengths), 1) / max(len(counts), 1))
        kept = np.array([stored(length) for length in lengths], np.float32)
        inverse = np.float32(1) / (
            np.float32(k1) * (np.float32(1 - b) + np.float32(b) * kept / mean)
        )
        self._terms, self._size = terms, len(counts)
        self._weights = {
            term: self._weighted(np.array(rows), np.array(times, np.float32), inverse)
            for term, (rows, times) in _postings(counts).items()
        }

    def _weighted(
        self, rows: npt.NDArray[np.int64], tf: Floats, inverse: Floats
    ) -> tuple[npt.NDArray[np.int64], Floats]:
        idf = np.float32(np.log(1 + (self._size - len(rows) + 0.5) / (len(rows) + 0.5)))
        return rows, (idf - idf / (np.float32(1) + tf * inverse[rows])).astype(np.float32)

    def scores(self, query: str) -> Floats:
        """The score of every text, shape (n,), float32; a term said twice counts twice."""
        scores = np.zeros(self._size, np.float32)
        for term, times in Counter(self._terms(query)).items():
            if term in self._weights:
                rows, weights = self._weights[term]
                scores[rows] += np.float32(times) * weights
        return scores

    def best(self, query: str, k: int) -> list[int]:
        """Indices of at most ``k`` texts, best first."""
        scores = self.scores(query)
        return [int(i) for i in np.argsort(-scores, kind="stable")[:k] if scores[i] > 0]


def _postings(counts: Sequence[Counter[str]]) -> dict[str, tuple[list[int], list[int]]]:
    """Of each term the texts that have it, and how often."""
    postings: dict[str, tuple[list[int], list[int]]] = {}
    for i, count in enumerate(counts):
        for term, number in count.items():
            rows, numbers = postings.setdefault(term, ([], []))
            rows.append(i)
            numbers.append(number)
    return postings
