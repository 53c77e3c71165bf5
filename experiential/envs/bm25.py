"""Search a few thousand texts in memory by BM25."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from experiential.bank.index.lexical import words_of

Floats = npt.NDArray[np.float32]


class BM25:
    """Rank texts by Okapi BM25 with Lucene's idf ln(1 + (N - n + 0.5) / (n + 0.5)), in float32.

    The order of operations is Lucene's, too. Texts without a term of the query are left out; of
    equal scores the earlier text is first.

    >>> texts = ["the red door", "a brass key opens it", "the brass key of the red door"]
    >>> BM25(texts).best("brass key", 2)
    [1, 2]

    Args:
        texts: the texts to search.
        terms: splits a text or query; by default into lower-case words without accents.
        stored: rounds a text's number of terms as the index stores it.
        k1: saturation of a term's count.
        b: penalty of long texts, in [0, 1].
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
        postings: dict[str, tuple[list[int], list[int]]] = {}  # texts that have a term, how often
        for i, count in enumerate(counts):
            for term, number in count.items():
                rows, numbers = postings.setdefault(term, ([], []))
                rows.append(i)
                numbers.append(number)
        lengths = [count.total() for count in counts]
        mean = np.float32(max(sum(lengths), 1) / max(len(counts), 1))
        kept = np.array([stored(length) for length in lengths], np.float32)
        inverse = np.float32(1) / (
            np.float32(k1) * (np.float32(1 - b) + np.float32(b) * kept / mean)
        )
        self._terms, self._size = terms, len(counts)
        self._weights: dict[str, tuple[npt.NDArray[np.int64], Floats]] = {}
        for term, (rows, times) in postings.items():
            places, tf = np.array(rows), np.array(times, np.float32)
            idf = np.float32(np.log(1 + (self._size - len(rows) + 0.5) / (len(rows) + 0.5)))
            weight = idf - idf / (np.float32(1) + tf * inverse[places])
            self._weights[term] = places, weight.astype(np.float32)

    def scores(self, query: str) -> Floats:
        """Return the score of every text, shape (n,), float32; a repeated term counts again."""
        scores = np.zeros(self._size, np.float32)
        for term, times in Counter(self._terms(query)).items():
            if term in self._weights:
                rows, weights = self._weights[term]
                scores[rows] += np.float32(times) * weights
        return scores

    def best(self, query: str, k: int) -> list[int]:
        """Return the indices of at most ``k`` texts, best first."""
        scores = self.scores(query)
        return [int(i) for i in np.argsort(-scores, kind="stable")[:k] if scores[i] > 0]
