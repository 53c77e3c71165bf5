"""Embed with a model behind ``/v1/embeddings`` of an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiential.bank.index.embed import Vector, normalise
from experiential.errors import BackendError, ConfigError
from experiential.llm.hosted import OPENAI_URL, SHOWN, HostedClient
from experiential.sync import EventLoopThread
from experiential.types import Usage

_LOGGER = logging.getLogger(__name__)
_NAME = re.compile(r"openai:(?P<model>.+?)(?:#(?P<dimensions>[1-9]\d*))?(?:@(?P<url>https?://.+))?")
_LOCAL = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])([:/]|$)")


class HostedEmbedder:
    """Embed at a server; any thread may call it.

    A bank records the embedder by its ``recorded`` name, never the key, and re-opens with it. The
    key of ``$OPENAI_API_KEY`` then goes only to OpenAI, ``$OPENAI_BASE_URL`` or this machine, since
    a bank may come from somebody else; for another server that needs one, pass the embedder again.

    Args:
        model: the model's name at the server.
        base_url: ends in ``/v1`` for most servers; ``$OPENAI_BASE_URL`` or OpenAI's own by default.
        api_key: ``$OPENAI_API_KEY`` by default; local servers need none.
        dimensions: asks for shorter vectors, of models that can.
        batch: texts in one request.
        max_chars: longer texts are cut, since models refuse more tokens than they can read.
        timeout, max_retries, max_concurrency, backoff: as in `OpenAILLM`.
        price: dollars for a million tokens.
        max_cost, max_total_tokens: as in `OpenAILLM`.

    Attributes:
        id: of the vectors: the same at every server of the model.
        recorded: ``openai:MODEL``, with ``#DIMENSIONS`` and ``@URL`` where they were given.

    Raises:
        ConfigError: the address holds a password.
        ValueError: another argument is out of its range.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        dimensions: int | None = None,
        batch: int = 128,
        max_chars: int = 8000,
        timeout: float = 60.0,
        max_retries: int = 2,
        max_concurrency: int = 8,
        backoff: float = 0.5,
        price: float | None = None,
        max_cost: float | None = None,
        max_total_tokens: int | None = None,
    ) -> None:
        for name, number in (
            ("dimensions", dimensions),
            ("batch", batch),
            ("max_chars", max_chars),
        ):
            if number is not None and number < 1:
                raise ValueError(f"Expected {name} to be positive, got {number}")
        self.id = f"openai:{model}" + (f"#{dimensions}" if dimensions else "")
        self._model, self._dimensions = model, dimensions
        self._batch, self._max_chars = batch, max_chars
        self._client = HostedClient(
            "/embeddings",
            model,
            base_url=base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            max_concurrency=max_concurrency,
            backoff=backoff,
            price=None if price is None else (price, 0.0),
            max_cost=max_cost,
            max_total_tokens=max_total_tokens,
        )
        base = self._client.url.removesuffix("/embeddings")
        if "@" in base.partition("://")[2].partition("/")[0]:
            raise ConfigError(
                f"Expected an address without a password for the embedder {model!r}, since banks"
                " record it; pass api_key= or set OPENAI_API_KEY"
            )
        self.recorded = self.id if base == OPENAI_URL else f"{self.id}@{base}"
        self._length: int | None = dimensions  # of the vectors, once known
        self._lock = threading.Lock()
        self._loop: EventLoopThread | None = None

    @classmethod
    def named(cls, name: str, *, trusted: bool = True) -> HostedEmbedder:
        """Return the embedder called ``openai:MODEL``, ``#DIMENSIONS`` and ``@URL`` optional.

        Args:
            name: such as ``openai:text-embedding-3-small#256@http://localhost:8000/v1``.
            trusted: the caller chose it; a name that a bank recorded is not sent the key.

        Raises:
            ConfigError: the name has another form.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            raise ConfigError(
                f"Expected a hosted embedder as openai:MODEL or openai:MODEL@URL, got {name!r}"
            )
        url, short, key = found["url"], found["dimensions"], None
        own = os.environ.get("OPENAI_BASE_URL", "").rstrip("/")
        if not trusted and url is not None and url != own and not _LOCAL.match(url):
            key = ""
            _LOGGER.warning(
                "This bank's texts and queries are embedded at %s, without a key; pass embedder= to"
                " choose another address or a key",
                url,
            )
        dimensions = None if short is None else int(short)
        # A recorded name without an address means OpenAI's own.
        base = url if trusted else url or OPENAI_URL
        return cls(found["model"], base_url=base, dimensions=dimensions, api_key=key)

    @property
    def spent(self) -> Usage:
        """Return tokens and cost so far; None where the server has not reported them."""
        return self._client.spent

    def __call__(self, texts: list[str]) -> Vector:
        """Return vectors of unit length, shape (n, d), float32.

        Raises:
            BudgetError, BackendError: as in `OpenAILLM.generate`.
        """
        with self._lock:
            if self._loop is None:
                self._loop = EventLoopThread("experiential-embed")
        # servers refuse an empty text
        given = [text[: self._max_chars] if text.strip() else "-" for text in texts]
        return self._loop.run(self._embed(given))

    async def _embed(self, texts: Sequence[str]) -> Vector:
        starts = range(0, len(texts), self._batch)
        parts = [self._embed_batch(texts[start : start + self._batch]) for start in starts]
        return np.concatenate(await asyncio.gather(*parts))

    async def _embed_batch(self, texts: Sequence[str]) -> Vector:
        body: dict[str, Any] = {"model": self._model, "input": list(texts)}
        if self._dimensions is not None:
            body["dimensions"] = self._dimensions
        response = await self._client.post(lambda: body)
        try:
            reply: Any = response.json()
            self._client.charge(reply.get("usage"))
            rows = sorted(reply["data"], key=lambda row: row["index"])
            if [row["index"] for row in rows] != list(range(len(texts))):
                raise ValueError("texts are missing")
            vectors = np.asarray([row["embedding"] for row in rows], dtype=np.float64)
            if vectors.ndim != 2 or not vectors.any(axis=1).all() or not np.isfinite(vectors).all():
                raise ValueError("no vectors")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BackendError(
                f"Expected {len(texts)} embeddings of one length from {self._client.url}, got:"
                f" {response.text[:SHOWN]}"
            ) from error
        with self._lock:
            self._length = self._length or vectors.shape[1]
        if vectors.shape[1] != self._length:
            raise BackendError(
                f"Expected embeddings of {self._length} numbers from {self._model!r}, got"
                f" {vectors.shape[1]}; the server has another model, or ignores dimensions"
            )
        return normalise(vectors)
