"""Define the protocol of index stores.

A store holds a replica of the live entries of one namespace, which answers searches once a bank is
too large for memory. ``IndexFollower`` keeps it behind the journal and makes it again when it is
damaged or foreign, so a store may forget anything at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from experiential.bank.index.embed import Vector
from experiential.bank.storage.tables import Stored
from experiential.errors import BankError


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
    store again later. A folder whose store cannot be opened, or fails twice, is set aside as
    damaged, unless the exception is an ``ImportError`` or an error of this library. One thread at a
    time writes; any number search and fetch meanwhile.
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
                is "". A store may ignore it, for every result is checked.
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

Its attribute ``pays_from``, if it has one, is the number of entries from which it is asked; 100,000
by default. Below, all vectors are compared in memory.

Called with a folder, which this kind of store has for itself inside the bank's folder and which the
bank's namespaces share, and with a name, which no other namespace and no other bank has.
"""
