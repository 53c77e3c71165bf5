"""Finding paragraphs: BM25 over their words, or the cosine of their vectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from experiential.bank.index.embed import CachedEmbedder, resolve_embedder
from experiential.bank.index.lexical import words_of

Floats = npt.NDArray[np.float32]


class Passage(NamedTuple):
    """One paragraph with its title."""

    title: str
    text: str


class Ranker(Protocol):
    """Orders the texts that it was made from."""

    def best(self, query: str, k: int) -> list[int]:
        """Indices of at most ``k`` texts, best first."""
        ...


class BM25:
    """Okapi BM25 over words in lower case without accents, with Lucene's idf ln(1 + (N - n + 0.5) / (n + 0.5)).

    Texts that share no word with the query are never given; among equal scores the earlier text is first.

    >>> BM25(["the red door", "a brass key opens it", "the brass key of the red door"]).best("brass key", 2)
    [1, 2]

    Args:
        texts: what is searched.
        k1: how soon a word's count saturates.
        b: how much long texts are held back, in [0, 1].
    """

    def __init__(self, texts: Sequence[str], k1: float = 0.9, b: float = 0.4) -> None:
        counts = [Counter(words_of(text)) for text in texts]
        lengths = np.array([count.total() for count in counts], dtype=np.float32)
        mean = float(lengths.mean()) if len(lengths) else 1.0
        postings: dict[str, tuple[list[int], list[int]]] = {}
        for i, count in enumerate(counts):
            for word, number in count.items():
                rows, numbers = postings.setdefault(word, ([], []))
                rows.append(i)
                numbers.append(number)
        norm = k1 * (1 - b + b * lengths / max(mean, 1e-9))
        self._size = len(counts)
        self._weights = {word: self._weighted(np.array(rows), np.array(tf, np.float32), norm) for word, (rows, tf) in postings.items()}

    def _weighted(self, rows: npt.NDArray[np.int64], tf: Floats, norm: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
        idf = np.log1p((self._size - len(rows) + 0.5) / (len(rows) + 0.5))
        return rows, (idf * tf / (tf + norm[rows])).astype(np.float32)

    def best(self, query: str, k: int) -> list[int]:
        """Indices of at most ``k`` texts that share a word with ``query``, best first; a word said twice counts twice."""
        scores = np.zeros(self._size, dtype=np.float32)
        for word, times in Counter(words_of(query)).items():
            if word in self._weights:
                rows, weights = self._weights[word]
                scores[rows] += times * weights
        order = np.argsort(-scores, kind="stable")[:k]
        return [int(i) for i in order if scores[i] > 0]


class Dense:
    """The cosine of embeddings.

    Args:
        texts: what is searched; embedded when the first query comes.
        embedder: a callable that gives vectors of texts, a sentence-transformers name or folder, or ``hashing``, as a bank takes it.
    """

    def __init__(self, texts: Sequence[str], embedder: Callable[[list[str]], Any] | str) -> None:
        self._texts, self._embedder = list(texts), CachedEmbedder(resolve_embedder(embedder))
        self._vectors: Floats | None = None

    def best(self, query: str, k: int) -> list[int]:
        """Indices of the ``k`` texts nearest to ``query``, nearest first; among equals the earlier is first."""
        if not query.strip():
            return []
        if self._vectors is None:
            self._vectors = self._embedder(self._texts)
        cosines = self._vectors @ self._embedder([query])[0]
        return [int(i) for i in np.argsort(-cosines, kind="stable")[:k]]


class Library:
    """Paragraphs that can be searched; title and text both count.

    Args:
        passages: pooled paragraphs; the same title and text twice is one.
        embedder: None for BM25, else see `Dense`.
    """

    def __init__(self, passages: Sequence[Passage], embedder: Callable[[list[str]], Any] | str | None = None) -> None:
        self.passages = list(dict.fromkeys(passages))
        texts = [f"{passage.title}\n{passage.text}" for passage in self.passages]
        self._ranker: Ranker = BM25(texts) if embedder is None else Dense(texts, embedder)

    def search(self, query: str, k: int) -> list[Passage]:
        """At most ``k`` passages, best first."""
        return [self.passages[i] for i in self._ranker.best(query, k)]
