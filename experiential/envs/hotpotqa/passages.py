"""Find paragraphs by BM25 over their words, or by the cosine of their vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiential.bank.index.embed import CachedEmbedder, resolve_embedder
from experiential.envs.bm25 import BM25, Floats

Embedder = Callable[[list[str]], Any] | str
"""Texts to vectors, or a name that a bank takes: ``hashing``, a sentence-transformers folder ..."""


class Passage(NamedTuple):
    """Hold one paragraph with its title."""

    title: str
    text: str


class Dense:
    """Rank texts by the cosine of their embeddings, made at the first query."""

    def __init__(self, texts: Sequence[str], embedder: Embedder) -> None:
        self._texts, self._embedder = list(texts), CachedEmbedder(resolve_embedder(embedder))
        self._vectors: Floats | None = None

    def best(self, query: str, k: int) -> list[int]:
        """Return the indices of at most ``k`` texts, best first; of equals the earlier first."""
        if not query.strip():
            return []
        if self._vectors is None:
            self._vectors = self._embedder(self._texts)
        cosines = self._vectors @ self._embedder([query])[0]
        return [int(i) for i in np.argsort(-cosines, kind="stable")[:k]]


class Library:
    """Search paragraphs by title and text, each once: by BM25 or by an embedder's cosine."""

    def __init__(self, passages: Sequence[Passage], embedder: Embedder | None = None) -> None:
        self.passages = list(dict.fromkeys(passages))
        texts = [f"{passage.title}\n{passage.text}" for passage in self.passages]
        self._ranker = BM25(texts) if embedder is None else Dense(texts, embedder)

    def search(self, query: str, k: int) -> list[Passage]:
        """Return at most ``k`` passages, best first."""
        return [self.passages[i] for i in self._ranker.best(query, k)]
