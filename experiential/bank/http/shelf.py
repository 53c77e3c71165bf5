"""The open banks of one server: a namespace is opened when it is first asked for, and written by nobody else."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from experiential.bank.evidence.trust import Book
from experiential.bank.folder import FolderBank
from experiential.bank.http.wire import At, Page
from experiential.bank.index.embed import Embedder
from experiential.bank.index.store import checked_store
from experiential.bank.records import Duplicates
from experiential.bank.storage.journal import Journal
from experiential.bank.storage.lock import WriterLock
from experiential.bank.view import BankView
from experiential.errors import BankError
from experiential.types import Experience, new_id

T = TypeVar("T")
_VIEWS = 8
_LISTINGS = 64
_KEYS = 4096
_BOOKS = 4
_SERVER = "\0server"
"""The name under which a shelf holds the folder's lock; no namespace of a user is called so."""


class Recent(Generic[T]):
    """The values last asked for, at most ``size`` of them; safe to use from many threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[object, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: object) -> T | None:
        """The value of a key, or None when it was never put here or is forgotten."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: object, value: T) -> T:
        """Remember a value, and forget the one that was not asked for the longest."""
        with self._lock:
            self._known[key] = value
            self._known.move_to_end(key)
            while len(self._known) > self._size:
                self._known.popitem(last=False)
        return value


class ServedBank:
    """One open bank with what serving it needs: earlier states, running listings, and each keyed write at most once."""

    def __init__(self, bank: FolderBank) -> None:
        self.bank = bank
        self._views: Recent[BankView] = Recent(_VIEWS)
        self._listings: Recent[list[Experience]] = Recent(_LISTINGS)
        self._books: Recent[Book] = Recent(_BOOKS)
        self._counted: Recent[bool] = Recent(_KEYS)
        self._stripes = [threading.Lock() for _ in range(64)]

    def reader(self, at: At | None) -> FolderBank | BankView:
        """The present bank, or the picture that ``at`` names; a picture made again has the counters of now."""
        if at is None:
            return self.bank
        return self._views.get(at) or self._views.put(at, self.bank.at(at.commit))

    def page(self, at: At | None, cursor: str | None, limit: int) -> Page:
        """One page of a listing; its entries are fixed by the first."""
        start, entries = 0, None
        if cursor is None:
            listing, entries = new_id(), list(self.reader(at).entries())
        else:
            listing, _, place = cursor.partition(".")
            entries, start = self._listings.get(listing), int(place) if place.isdecimal() else 0
        if entries is None:
            raise BankError(
                "Expected a listing that is still known here, got one of before a restart or too"
                " long ago; list again"
            )
        more = len(entries) > start + limit
        if more and cursor is None:
            self._listings.put(listing, entries)
        return Page(
            entries=entries[start : start + limit],
            cursor=f"{listing}.{start + limit}" if more else None,
        )

    def once(
        self, key: str, request: bytes, write: Callable[[], T], again: Callable[[int], T]
    ) -> T:
        """Carry out a keyed write, or say what it gave when it was carried out before, even by an earlier server.

        Args:
            key: names the request; two that run at one time wait for each other.
            request: what is asked, so that a key used for something else is noticed.
            write: does it; its transaction writes the receipt.
            again: what it gave, from the commit that it made.
        """
        digest = hashlib.sha256(request).hexdigest()
        with self._stripes[hash(key) % len(self._stripes)]:
            known = self.bank.receipts.find(key)
            if known is None:
                with self.bank.receipts.noting(key, digest):
                    return write()
            if known.digest != digest:
                raise ValueError(
                    f"Expected a new Idempotency-Key for a new request, got {key!r}, which another"
                    " one had"
                )
            return again(known.commit)

    def count(self, key: str | None, ids: Iterable[str]) -> None:
        """Count retrievals, once for each key; like the counts themselves, these keys live in memory."""
        with self._stripes[hash(key) % len(self._stripes)]:
            if key is None or self._counted.get(key) is None:
                self.bank.note_retrievals(ids)
                self._counted.put(key or new_id(), True)

    def written(self, commit: int) -> list[Experience]:
        """The entry versions that a commit wrote, in the order of writing."""
        found = (
            self.bank.version(id, version) for id, version in self.bank.receipts.written(commit)
        )
        return [entry for entry in found if entry is not None]

    def removed(self, commit: int) -> list[Experience]:
        """The entries that a commit took out, as they stood before it, in the order of removing."""
        found = (
            self.bank.version(id, version) for id, version in self.bank.receipts.removed(commit)
        )
        return [entry for entry in found if entry is not None]

    def trusted_versions(self, after: int) -> list[tuple[str, int]]:
        """Every entry version that is trusted now, with ``after`` tasks asked for."""
        book = self._books.get(after) or self._books.put(after, self.bank.trust_book(after))
        book.refresh()
        return sorted(book.trusted)

    def merged(self, commit: int) -> list[Duplicates]:
        """The groups of near-duplicates that a commit merged."""
        groups: list[Duplicates] = []
        for survivor in self.written(commit):
            family = (
                self.bank.version(*parent)
                for parent in survivor.provenance.parents
                if parent[0] != survivor.id
            )
            groups.append(
                Duplicates(
                    survivor=survivor, merged=tuple(entry for entry in family if entry is not None)
                )
            )
        return groups


class Shelf:
    """The namespaces of one folder, or banks that somebody else opened and will close.

    Args:
        source: a folder, which this takes the writer's lock of at once, or open banks of different
            namespaces.
        namespaces: those that may be asked for; none named allows all.
        embedder: for namespaces that were never written.
        store: where the index of a folder's namespaces is, see ``FolderBank``.

    Raises:
        BankLockedError: another process writes the folder.
        BankError: the folder cannot be used, or its journal cannot be read.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | FolderBank | Sequence[FolderBank],
        *,
        namespaces: Sequence[str] = (),
        embedder: Embedder | str | None = None,
        store: str | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._open: dict[str, ServedBank] = {}
        self._allowed = tuple(dict.fromkeys(namespaces))
        self._embedder = embedder
        self._store = checked_store(store)
        self._folder: Path | None = None
        self._claim: WriterLock | None = None
        self._journal: Journal | None = None
        self._closed = False
        if isinstance(source, (str, os.PathLike)):
            self._claim_folder(Path(source).expanduser())
            return
        banks = [source] if isinstance(source, FolderBank) else list(source)
        self._open = {bank.namespace: ServedBank(bank) for bank in banks}
        if len(self._open) < max(1, len(banks)):
            raise ValueError(f"Expected open banks of different namespaces, got {banks!r}")

    def _claim_folder(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise BankError(f"Expected a folder, got the file {str(folder)!r}; choose another path")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._claim = folder, WriterLock(folder, _SERVER)
        with (
            contextlib.ExitStack() as undo
        ):  # what was opened is closed again when a later part fails
            undo.callback(self.close)
            self._journal = Journal.open(folder)
            for name in self._allowed:
                self.get(name)
            undo.pop_all()

    def get(self, namespace: str) -> ServedBank:
        """The bank of a namespace, opened at the first call.

        Raises:
            BankError: it is not served here.
        """
        if (known := self._open.get(namespace)) is not None:
            return known
        with self._lock:
            if self._closed:
                raise BankError(
                    "Expected a running bank server, got one that is shutting down; ask again when"
                    " it is back"
                )
            known = self._open.get(namespace)
            if known is None:
                known = self._open[namespace] = ServedBank(self._opened(namespace))
            return known

    def _opened(self, namespace: str) -> FolderBank:
        if self._folder is None or (self._allowed and namespace not in self._allowed):
            served = ", ".join(map(repr, self.namespaces()))
            raise BankError(
                f"Expected a namespace served here ({served}), got {namespace!r}; start the server"
                " with --namespace for it"
            )
        return FolderBank(
            self._folder,
            namespace=namespace,
            embedder=self._embedder_for(namespace),
            store=self._store,
        )

    def _embedder_for(self, namespace: str) -> Embedder | str | None:
        assert self._journal is not None
        written = self._journal.value(
            "SELECT 1 FROM versions WHERE namespace = ? LIMIT 1", namespace
        )
        return self._embedder if written is None else None

    def namespaces(self) -> list[str]:
        """Names of the namespaces that are served: those allowed, else those that were ever opened."""
        if self._allowed or self._journal is None:
            return list(self._allowed or self._open)
        return [
            row[0]
            for row in self._journal.rows("SELECT DISTINCT namespace FROM meta ORDER BY namespace")
        ]

    def close(self) -> None:
        """Close what was opened here and give the folder back; safe to call twice."""
        with self._lock:
            self._closed = True
            opened, self._open = self._open, {}
            for served in opened.values() if self._folder is not None else ():
                served.bank.close()
            if self._journal is not None:
                self._journal.close()
            if self._claim is not None:
                self._claim.release()
