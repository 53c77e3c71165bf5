"""Keep the open banks of one server and carry out its operations."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from experiential.bank.evidence.trust import Book
from experiential.bank.folder import FolderBank
from experiential.bank.http.wire import (
    LONGEST_PAGE,
    At,
    Body,
    Info,
    Near,
    Page,
    Service,
    Version,
    Written,
)
from experiential.bank.index.embed import Embedder
from experiential.bank.index.site import checked_store
from experiential.bank.records import Duplicates
from experiential.bank.search.where import Where
from experiential.bank.storage.journal import Journal
from experiential.bank.storage.lock import WriterLock
from experiential.bank.view import BankView
from experiential.errors import BankError
from experiential.types import Distillation, Experience, Hit, Statistics, Trajectory, new_id

T = TypeVar("T")
_VIEWS = 8
_LISTINGS = 64
_KEYS = 4096
_BOOKS = 4
_SERVER = "\0server"
"""Name under which the server holds the folder's lock; no namespace of a user has it."""


class Recent(Generic[T]):
    """Remember the values used last, at most ``size`` of them; safe to use from many threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[object, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: object) -> T | None:
        """Return the value of a key, or None when it is unknown or forgotten."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: object, value: T) -> T:
        """Remember a value, and forget the least recently used one."""
        with self._lock:
            self._known[key] = value
            self._known.move_to_end(key)
            while len(self._known) > self._size:
                self._known.popitem(last=False)
        return value


class ServedBank(Service):
    """Carry out the operations of one open bank; each keyed write at most once."""

    def __init__(self, bank: FolderBank) -> None:
        self.bank = bank
        self._views: Recent[BankView] = Recent(_VIEWS)
        self._listings: Recent[list[Experience]] = Recent(_LISTINGS)
        self._books: Recent[Book] = Recent(_BOOKS)
        self._counted: Recent[bool] = Recent(_KEYS)
        self._stripes = [threading.Lock() for _ in range(64)]

    def reader(self, at: At | None) -> FolderBank | BankView:
        """Return the present bank, or a view; one made again has the counters of now."""
        if at is None:
            return self.bank
        return self._views.get(at) or self._views.put(at, self.bank.at(at.commit))

    # Operations that differ from the bank's method of the same name

    def info(self, *, at: At | None = None) -> Info:
        return Info(
            entries=len(self.reader(at)),
            head=self.bank.head if at is None else at.commit,
            embedder=self.bank.embedder.id,
            redacted=dict(self.bank.redacted),
            text_limit=self.bank.text_limit,
        )

    def at(self, commit: int) -> At:
        at = At(commit=commit, seen=self.bank.head)
        self.reader(at)
        return at

    def get(self, id: str, *, at: At | None = None) -> Experience | None:
        return self.reader(at).get(id)

    def read(self, id: str) -> Statistics:
        return self.bank.read(Experience(id=id, text="-")).statistics

    def entries(
        self, *, cursor: str | None = None, limit: int = LONGEST_PAGE, at: At | None = None
    ) -> Page:
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
        if more and cursor is None:  # kept, so that all pages show the moment of the first
            self._listings.put(listing, entries)
        return Page(
            entries=entries[start : start + limit],
            cursor=f"{listing}.{start + limit}" if more else None,
        )

    def search(
        self,
        queries: list[str],
        *,
        k: int = 1,
        hybrid: float = 0.0,
        exclude_instance: str | None = None,
        where: dict[str, Any] | None = None,
        at: At | None = None,
    ) -> list[list[Hit]]:
        return self.reader(at).search(
            queries, k=k, hybrid=hybrid, exclude_instance=exclude_instance, where=where
        )

    def nearest(
        self,
        queries: list[str],
        n: int,
        exclude: list[str | None],
        where: Sequence[dict[str, Any] | None] = (),
        words: bool = False,
        *,
        at: At | None = None,
    ) -> list[list[Near]]:
        if len(exclude) != len(queries) or n < 1:
            raise ValueError(
                "Expected one excluded instance (or null) per query and a positive n, got"
                f" {len(exclude)} and {n}"
            )
        if len(where) not in (0, len(queries)):
            raise ValueError(
                f"Expected one filter (or null) per query or none at all, got {len(where)} for"
                f" {len(queries)} queries"
            )
        reader = self.reader(at)
        rows = reader.nearest(queries, n, exclude, [Where.of(one) for one in where], words)
        return [
            [
                Near(experience=reader.read(one.item), score=one.score, rank=rank, words=one.words)
                for rank, one in enumerate(row)
            ]
            for row in rows
        ]

    def embed(self, texts: list[str]) -> list[list[float]]:
        return self.bank.embedder(texts).tolist() if texts else []

    def apply(
        self,
        distillation: Distillation,
        spans: list[list[int] | None],
        *,
        trajectory: Trajectory,
        shown: list[Experience],
        item: str | None = None,
        extractor_version: int | None = None,
    ) -> Written:
        before = self.bank.refused.copy()
        entries = self.bank.apply(
            _with_spans(distillation, spans),
            trajectory=trajectory,
            shown=shown,
            item=item,
            extractor_version=extractor_version,
        )
        return Written(entries=entries, refused=dict(self.bank.refused - before))

    def consolidate(
        self,
        distillation: Distillation,
        spans: list[list[int] | None],
        *,
        shown: list[Experience],
        extractor_version: int | None = None,
    ) -> Written:
        before = self.bank.refused.copy()
        entries = self.bank.consolidate(
            _with_spans(distillation, spans), shown=shown, extractor_version=extractor_version
        )
        return Written(entries=entries, refused=dict(self.bank.refused - before))

    def deduplicate(
        self,
        threshold: float = 0.95,
        *,
        across_tasks: bool = False,
        among: Iterable[str] | None = None,
        dry_run: bool = False,
    ) -> list[Duplicates]:
        return self.bank.deduplicate(
            threshold, across_tasks=across_tasks, among=among, dry_run=dry_run
        )

    def merge_duplicates(
        self, groups: list[list[Version]], ref: str, *, author: str = "human"
    ) -> list[Duplicates]:
        found: list[Duplicates] = []
        for group in groups:
            known = self._versions((one.id, one.version) for one in group)
            if len(known) > 1:
                found.append(Duplicates(survivor=known[0], merged=tuple(known[1:])))
        return self.bank.merge_duplicates(found, ref, author=author)

    def trusted_versions(self, after: int) -> list[tuple[str, int]]:
        book = self._books.get(after) or self._books.put(after, self.bank.trust_book(after))
        book.refresh()
        return sorted(book.trusted)

    def trust_after(self) -> int:
        return self.bank.trust_after

    def set_trust_after(self, after: int) -> None:
        self.bank.trust_after = after

    # Writes with a key

    def once(
        self, key: str, request: bytes, write: Callable[[], T], again: Callable[[int], T]
    ) -> T:
        """Carry out a keyed write, or repeat its answer if it was done before.

        Args:
            key: names the request; two that run at one time wait for each other.
            request: its content; a key may not be used for another request.
            write: carries it out; its transaction writes the receipt.
            again: returns its answer from the commit that it made.
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
        """Count retrievals once for each key; like the counts, these keys live in memory."""
        with self._stripes[hash(key) % len(self._stripes)]:
            if key is None or self._counted.get(key) is None:
                self.bank.note_retrievals(ids)
                self._counted.put(key or new_id(), True)

    def repeated(self, operation: str, commit: int, body: Body) -> Any:
        """Return the answer that a write gave when it made ``commit``."""
        match operation:
            case "add" | "update":
                return self._versions(self.bank.receipts.written(commit))[0]
            case "add_many":
                return self._versions(self.bank.receipts.written(commit))
            case "apply" | "consolidate":
                written = self._versions(self.bank.receipts.written(commit))
                return Written(entries=written, refused={})
            case "import":
                return len(self.bank.receipts.written(commit))
            case "prune" | "evict":
                return self._versions(self.bank.receipts.removed(commit))
            case "deduplicate" | "merge_duplicates":
                return self._merged(commit)
            case "rollback":
                return next(one for one in self.bank.commits() if one.id == commit)
            case "queue_fail":
                return self.bank.queue.attempts(getattr(body, "id"))  # noqa: B009
            case "remove":
                return None
            case _:  # record, submit, queue_requeue
                return True

    def _versions(self, named: Iterable[tuple[str, int]]) -> list[Experience]:
        found = (self.bank.version(id, version) for id, version in named)
        return [entry for entry in found if entry is not None]

    def _merged(self, commit: int) -> list[Duplicates]:
        groups: list[Duplicates] = []
        for survivor in self._versions(self.bank.receipts.written(commit)):
            parents = (one for one in survivor.provenance.parents if one[0] != survivor.id)
            groups.append(Duplicates(survivor=survivor, merged=tuple(self._versions(parents))))
        return groups


def _with_spans(distillation: Distillation, spans: list[list[int] | None]) -> Distillation:
    """Return the distillation with the spans of its operations, which their JSON leaves out."""
    parsed = distillation.parsed
    if len(spans) != len(parsed.operations):
        raise ValueError(
            f"Expected one span (or null) per operation, got {len(spans)} for"
            f" {len(parsed.operations)}"
        )
    operations = tuple(
        operation.model_copy(update={"span": None if span is None else tuple(span)})
        for operation, span in zip(parsed.operations, spans, strict=True)
    )
    return distillation.model_copy(
        update={"parsed": parsed.model_copy(update={"operations": operations})}
    )


class Namespaces:
    """Open the namespaces of one folder when first asked for, or serve banks opened by the caller.

    Args:
        source: a folder, whose writer's lock is taken at once, or open banks of different
            namespaces, which stay open.
        namespaces: those that may be asked for; empty allows all.
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
        """Return the bank of a namespace, opened at the first call.

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
            served = ", ".join(map(repr, self.names()))
            raise BankError(
                f"Expected a namespace served here ({served}), got {namespace!r}; start the server"
                " with --namespace for it"
            )
        assert self._journal is not None
        written = self._journal.value(
            "SELECT 1 FROM versions WHERE namespace = ? LIMIT 1", namespace
        )
        return FolderBank(
            self._folder,
            namespace=namespace,
            embedder=self._embedder if written is None else None,  # a written one keeps its own
            store=self._store,
        )

    def names(self) -> list[str]:
        """Return the names of the served namespaces: those allowed, else those ever opened."""
        if self._allowed or self._journal is None:
            return list(self._allowed or self._open)
        return [
            row[0]
            for row in self._journal.rows("SELECT DISTINCT namespace FROM meta ORDER BY namespace")
        ]

    def close(self) -> None:
        """Close the banks opened here and release the folder; safe to call twice."""
        with self._lock:
            self._closed = True
            opened, self._open = self._open, {}
            for served in opened.values() if self._folder is not None else ():
                served.bank.close()
            if self._journal is not None:
                self._journal.close()
            if self._claim is not None:
                self._claim.release()
