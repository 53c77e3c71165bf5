"""Chroma as a server given by its address: the journal stays in the bank's folder, vectors and texts go to a collection there."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from experiential.bank.index.chroma import CHROMA_NAME, ChromaIndex, Place, collection_name
from experiential.bank.index.seal import Seal
from experiential.bank.storage.history import History
from experiential.bank.storage.journal import JOURNAL_NAME
from experiential.types import new_id

TOKEN_VARIABLE = "EXPERIENTIAL_CHROMA_TOKEN"
FOLDER = "folder"
"""Says that the index is to be in the bank's own folder again."""
DEFAULT_PORT = 8000
CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 30.0


class NoSeal(Seal):
    """What a server keeps its files by is its own affair."""

    def __init__(self) -> None:
        super().__init__(Path())

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing."""


class ServerIndex(ChromaIndex):
    """The Chroma collection of one namespace at a server; with ``make`` it is made when it is not there."""

    def __init__(self, url: str, name: str, *, make: bool = True) -> None:
        self._url = url
        self._make = make
        self._place = f"at {url}"
        self._seal = NoSeal()
        self._name = name
        with self._told():
            self._open()

    def _connected(self) -> Any:
        import chromadb
        from chromadb.config import Settings

        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        httpx.get(
            f"{self._url}/api/v2/heartbeat", headers=_headers(), timeout=timeout
        ).raise_for_status()
        address = checked_address(self._url)
        client = chromadb.HttpClient(
            host=address.hostname or "",
            port=address.port or DEFAULT_PORT,
            ssl=address.scheme == "https",
            headers=_headers(),
            settings=Settings(anonymized_telemetry=False),
        )
        session: httpx.Client = client._server._session  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]  (Chroma would wait for ever)
        session.timeout = timeout
        return client

    def _found(self) -> Any:
        return (
            super()._found()
            if self._make
            else self._client.get_collection(self._name, embedding_function=None)
        )


def _headers() -> dict[str, str]:
    token = os.environ.get(TOKEN_VARIABLE)
    return {"Authorization": f"Bearer {token}", "X-Chroma-Token": token} if token else {}


def checked_place(chroma: str | None) -> str | None:
    """Where somebody wants the index, without a slash at the end; ``checked_address`` refuses what is neither None nor "folder"."""
    if chroma is None or chroma == FOLDER:
        return chroma
    checked_address(chroma)
    return chroma.rstrip("/")


def checked_address(url: str) -> SplitResult:
    """The parts of a server's address.

    Raises:
        ValueError: it is none of ``http://host:port``.
    """
    parts = urlsplit(url)
    try:
        good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and parts.path in ("", "/")
        )
    except ValueError:
        good = False
    if not good:
        raise ValueError(
            f"Expected chroma to be an address like 'http://127.0.0.1:8000' or {FOLDER!r}, got"
            f" {url!r}"
        )
    return parts


def place_of(folder: Path, namespace: str, history: History, chroma: str | None) -> Place:
    """Where the index of a bank is from now on; the journal remembers it.

    Args:
        folder: of the bank.
        namespace: whose index it is.
        history: of this namespace.
        chroma: address of a server; None is where the index was before, and at first the folder;
            "folder" is the folder again.
    """
    before = history.meta("chroma") or FOLDER
    chosen = checked_place(chroma) or before
    if chosen != before:
        history.set_meta("chroma", chosen)
    if chosen == FOLDER:
        return Place(partial(ChromaIndex, folder, namespace), "indexed", folder / CHROMA_NAME)
    _give_id(folder, history)
    name = _name(namespace, history)
    return Place(partial(ServerIndex, chosen, name), f"indexed {name} {chosen}", None)


def recorded(history: History, namespace: str) -> tuple[str, str] | None:
    """The server that holds the index of a bank, and the collection there; None when it is in the bank's folder."""
    url = history.meta("chroma") or FOLDER
    return None if url == FOLDER else (url, _name(namespace, history))


def _name(namespace: str, history: History) -> str:
    return collection_name(namespace, history.meta("chroma_id") or "")


def _give_id(folder: Path, history: History) -> None:
    """What sets the collections of this bank apart: kept in the journal, and made anew when the journal is a copy in another place."""
    home = f"{folder.resolve()} {(folder / JOURNAL_NAME).stat().st_ino}"
    if history.meta("chroma_home") != home:
        history.set_meta("chroma_home", home)
        history.set_meta("chroma_id", new_id())
