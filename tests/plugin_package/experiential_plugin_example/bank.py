"""A retrieval strategy, an embedder and an index store."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiential.bank.index.store import Indexed
from experiential.bank.search.strategies import Candidate, Retrievals
from experiential_plugin_example import note


def newest(
    candidates: Sequence[Candidate], seen: Retrievals, settings: Any, rng: random.Random, k: int
) -> list[tuple[Candidate, float]]:
    """Return the first k candidates, each certain to be picked."""
    note("strategies")
    return [(candidate, 1.0) for candidate in candidates[:k]]


class LetterEmbedder:
    """Count the letters a to z."""

    id = "example-letters"

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Return unit vectors, shape (n, 26), float32."""
        note("embedders")
        counts = [[text.lower().count(chr(97 + i)) + 0.01 for i in range(26)] for text in texts]
        vectors = np.array(counts, np.float32).reshape(len(texts), 26)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class DictStore:
    """Hold vectors in a dict; a bank fills it again when it is opened."""

    def __init__(self, folder: Path, name: str) -> None:
        note("stores")
        self._held: dict[str, tuple[int, np.ndarray]] = {}
        self._mark = ""

    def mark(self) -> str:
        """Return the mark of the last write."""
        return self._mark

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._held)

    def write(self, put: Sequence[Any], removed: Sequence[str], mark: str) -> None:
        """Put and remove entries, then keep the mark."""
        for stored in put:
            entry = stored.experience
            self._held[entry.id] = (entry.version, stored.vector)
        for id in removed:
            self._held.pop(id, None)
        self._mark = mark

    def search(
        self, queries: np.ndarray, n: int, where: Mapping[str, Sequence[str]]
    ) -> list[list[Indexed]]:
        """Return the n nearest entries of each query, best first."""
        found = [
            [Indexed(id, version, float(query @ v)) for id, (version, v) in self._held.items()]
            for query in queries
        ]
        return [sorted(hits, key=lambda hit: -hit.cosine)[:n] for hits in found]

    def fetch(self, ids: Sequence[str]) -> Mapping[str, tuple[int, np.ndarray]]:
        """Return version and vector of those of these entries that are here."""
        return {id: self._held[id] for id in ids if id in self._held}

    def clear(self) -> None:
        """Remove everything."""
        self._held, self._mark = {}, ""

    def close(self) -> None:
        """Release nothing."""
