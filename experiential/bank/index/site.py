"""Choose the index store of a bank by name, and remember the choice in the journal."""

from __future__ import annotations

import contextlib
import hashlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from experiential.bank.index.store import IndexStore, StoreFactory
from experiential.bank.storage.journal import JOURNAL_NAME
from experiential.bank.storage.tables import History
from experiential.errors import ConfigError, MissingExtraError
from experiential.plugins import did_you_mean, known_names, resolve
from experiential.types import new_id

EXACT, CHROMA, FAISS = "exact", "chroma", "faiss"
_REFERENCE = re.compile(r"[\w.]+:[^\W\d][\w.]*")
STORES: dict[str, str] = {
    CHROMA: "experiential.bank.index.chroma:ChromaStore",
    FAISS: "experiential.bank.index.graph:FaissStore",
}
PAYS_FROM = 100_000
"""Entries from which a store that does not say so itself is asked."""


class Site(NamedTuple):
    """Hold where the index of one namespace is."""

    store: str  # name of the store, or address of a Chroma server
    name: str  # of the namespace's entries there
    folder: Path | None  # of the store; None for a server

    def __str__(self) -> str:
        return f"at {self.store}" if self.folder is None else f"in {str(self.folder)!r}"

    def pays_from(self) -> int:
        """Return the number of entries from which asking the store is cheaper than comparing all.

        A class may have it as ``pays_from``.
        """
        factory: StoreFactory = resolve("stores", self._kind(), STORES)
        return getattr(factory, "pays_from", PAYS_FROM)

    def open(self) -> IndexStore:
        """Open the store, which may raise anything."""
        if self.folder is None:
            from experiential.bank.index.chroma import ChromaStore

            return ChromaStore(self.store, self.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        factory: StoreFactory = resolve("stores", self._kind(), STORES)
        return factory(self.folder, self.name)

    def _kind(self) -> str:
        return CHROMA if self.folder is None else self.store


def checked_store(store: str | None) -> str | None:
    """Return the store that a user named, an address without its last slash, else ConfigError."""
    if store == FAISS and find_spec("faiss") is None:
        raise MissingExtraError("faiss-cpu", "faiss")
    if store is None or store == EXACT or store in STORES:
        return store
    if _REFERENCE.fullmatch(store) or store in known_names("stores"):
        resolve("stores", store, STORES)
        return store
    known = known_names("stores", (EXACT, *STORES))
    is_address = False
    with contextlib.suppress(ValueError):  # a port that is no number
        parts = urlsplit(store)
        has_host = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address = has_host and parts.port != 0 and parts.path in ("", "/")
    if not is_address:
        raise ConfigError(
            f"Expected store to be one of {', '.join(known)}, the address of a Chroma server like"
            f" 'http://127.0.0.1:8000', or module:attribute, got {store!r}"
            f"{did_you_mean(store, known)}"
        )
    return store.rstrip("/")


def chosen_site(folder: Path, namespace: str, history: History, store: str | None) -> Site | None:
    """Return where the index of a bank is from now on, and let its journal remember it.

    ``store`` is the name of a store or the address of a Chroma server; None keeps what was chosen
    before, at first Chroma in the bank's folder.
    """
    if (chosen := checked_store(store)) is not None and chosen != _recorded(history):
        history.set_meta("store", chosen)
    if _recorded(history) not in STORES:  # a package that is missing now keeps no bank shut
        checked_store(_recorded(history))
    # A copy of the folder must not write into the collection of the original: the id that sets
    # this bank's collections apart is made anew when the journal has moved.
    home = f"{folder.resolve()} {(folder / JOURNAL_NAME).stat().st_ino}"
    if _recorded(history) not in (EXACT, CHROMA) and history.meta("chroma_home") != home:
        history.set_meta("chroma_home", home)
        history.set_meta("chroma_id", new_id())
    return recorded_site(folder, namespace, history)


def recorded_site(folder: Path, namespace: str, history: History) -> Site | None:
    """Return where the index of a bank is; None if everything is held in memory."""
    store = _recorded(history)
    if store == EXACT:
        return None
    if store == CHROMA:
        return folder_site(folder, namespace)
    digest = _digest(namespace)
    name = f"experience-{history.meta('chroma_id') or ''}-{digest}"
    if "://" in store:
        return Site(store, name, None)
    return Site(store, name, folder / ("index-" + re.sub(r"[^\w.]+", "-", store)))


def folder_site(folder: Path, namespace: str) -> Site:
    """Return where the index of a bank is when it is Chroma's, in the bank's folder."""
    return Site(CHROMA, f"experience-{_digest(namespace)}", folder / CHROMA)


def _digest(namespace: str) -> str:
    return hashlib.sha256(namespace.encode()).hexdigest()[:16]


def _recorded(history: History) -> str:
    """Return the store that the journal names; older journals name a server under "chroma"."""
    recorded = history.meta("store") or history.meta("chroma") or CHROMA
    return CHROMA if recorded == "folder" else recorded
