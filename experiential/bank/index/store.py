"""Where the index of a bank is: the protocol of index stores, and the choice of one by name.

The journal is the truth; an index store holds a replica of the live entries of one namespace, which
answers searches once a bank is too large for memory. ``Follower`` keeps it behind the journal and
makes it again when it is damaged or foreign, so a store may forget anything at any time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from experiential.bank.index.vectors import Vector
from experiential.bank.storage.history import History, Stored
from experiential.bank.storage.journal import JOURNAL_NAME
from experiential.errors import BankError, ConfigError
from experiential.plugins import did_you_mean, known_names, resolve
from experiential.types import new_id

EXACT, CHROMA = "exact", "chroma"


class IndexLostError(BankError):
    """Say that an index store does not answer, or holds less than it should; the journal does."""


class Indexed(NamedTuple):
    """Hold one entry version that a store found, with its cosine similarity to the query."""

    id: str
    version: int
    cosine: float


class IndexStore(Protocol):
    """Hold vectors of one version of each entry, and find the nearest.

    Any exception says that the store is away: the bank then answers from memory, and opens the
    store again later. One thread at a time writes; any number search and fetch meanwhile.
    """

    def mark(self) -> str:
        """Return the mark of the last write, kept as long as the entries; "" if there is none."""
        ...

    def __len__(self) -> int:
        """Return the number of entries."""
        ...

    def write(self, put: Sequence[Stored], removed: Sequence[str], mark: str) -> None:
        """Put these versions in place of earlier ones, remove these ids, and then keep the mark.

        Writing the same again must do no harm, and so must removing an id that is not there.
        """
        ...

    def search(
        self, queries: Vector, n: int, where: Mapping[str, Sequence[str]]
    ) -> list[list[Indexed]]:
        """Return the ``n`` nearest entries of each query, best first; they may be approximate.

        Args:
            queries: unit vectors, shape (m, d), float32.
            n: how many for each query.
            where: values by field (``kind``, ``task``), of which an entry should have one; no task
                is "". A store may ignore it: every result is checked, and missing ones are made up
                for.
        """
        ...

    def fetch(self, ids: Sequence[str]) -> Mapping[str, tuple[int, Vector]]:
        """Return version and vector, shape (d,), of those of these entries that are here."""
        ...

    def clear(self) -> None:
        """Remove all entries and the mark."""
        ...

    def close(self) -> None:
        """Release what is open; nothing is called afterwards."""
        ...


StoreFactory = Callable[[Path, str], IndexStore]
"""A part of kind ``stores``, for example a class: opens the entries of one namespace.

Called with a folder, which this kind of store has for itself inside the bank's folder and which the
bank's namespaces share, and with a name, which no other namespace and no other bank has.
"""
_REFERENCE = re.compile(r"[\w.]+:[^\W\d][\w.]*")
STORES: dict[str, str] = {CHROMA: "experiential.bank.index.chroma:folder_store"}


class Site(NamedTuple):
    """Hold where the index of one namespace is.

    Attributes:
        store: the name of the store, or the address of a Chroma server.
        name: of the namespace's entries there.
        folder: of the store; None for a server.
    """

    store: str
    name: str
    folder: Path | None

    def __str__(self) -> str:
        return f"at {self.store}" if self.folder is None else f"in {str(self.folder)!r}"

    @property
    def mark(self) -> str:
        """Return the key under which the journal notes how far this index is."""
        return "indexed" if self.store == CHROMA else f"indexed {self.name} {self.store}"

    def open(self) -> IndexStore:
        """Open the store, which may raise anything."""
        if self.folder is None:
            from experiential.bank.index.chroma import server_store

            return server_store(self.store, self.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        factory: StoreFactory = resolve("stores", self.store, STORES)
        return factory(self.folder, self.name)


def checked_store(store: str | None) -> str | None:
    """Return the store that a user named, an address without a slash at the end.

    Raises:
        ConfigError: there is no such store, or it is no address.
    """
    if store is None or store in (EXACT, CHROMA):
        return store
    if _REFERENCE.fullmatch(store) or store in known_names("stores"):
        resolve("stores", store, STORES)
        return store
    known = known_names("stores", (EXACT, CHROMA))
    try:
        parts = urlsplit(store)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address = is_address and parts.port != 0 and parts.path in ("", "/")
    except ValueError:  # a port that is no number
        is_address = False
    if not is_address:
        raise ConfigError(
            f"Expected store to be one of {', '.join(known)}, the address of a Chroma server like"
            f" 'http://127.0.0.1:8000', or module:attribute, got {store!r}"
            f"{did_you_mean(store, known)}"
        )
    return store.rstrip("/")


def chosen_site(folder: Path, namespace: str, history: History, store: str | None) -> Site | None:
    """Return where the index of a bank is from now on, which the journal remembers.

    Args:
        folder: of the bank.
        namespace: inside the bank.
        history: of the namespace; it is written.
        store: name of a store or address of a Chroma server; None keeps what was chosen before, at
            first Chroma in the bank's folder.

    Raises:
        ConfigError: there is no such store.
    """
    if (chosen := checked_store(store)) is not None and chosen != _recorded(history):
        history.set_meta("store", chosen)
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
    digest = hashlib.sha256(namespace.encode()).hexdigest()[:16]
    if store == CHROMA:
        return Site(store, f"experience-{digest}", folder / CHROMA)
    name = f"experience-{history.meta('chroma_id') or ''}-{digest}"
    if "://" in store:
        return Site(store, name, None)
    return Site(store, name, folder / ("index-" + re.sub(r"[^\w.]+", "-", store)))


def _recorded(history: History) -> str:
    """Return the store that the journal names; older journals name a server under "chroma"."""
    recorded = history.meta("store") or history.meta("chroma") or CHROMA
    return CHROMA if recorded == "folder" else recorded
