"""Carry out the operations of a bank server on one open bank."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from experiential.bank.protocol import ForkableBank, View
from experiential.bank.records import Duplicates
from experiential.bank.search.where import Scope, Where
from experiential.bank.storage.tables import Receipts
from experiential.errors import BankError
from experiential.types import Distillation, Experience, Hit, Statistics, Trajectory, new_id

T = TypeVar("T")
LONGEST_PAGE = 1000
"""Greatest number of entries in one page of a listing."""
LONGEST_KEY = 200
"""Greatest number of characters in the key of a write."""
_VIEWS = 8
_LISTINGS = 64
_KEYS = 4096


class Body(BaseModel):
    """Base of everything on the wire: immutable; unknown fields and other types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class At(Body):
    """Name a view: the bank after ``commit``, with the counters known at commit ``seen``."""

    commit: int
    seen: int


class Info(Body):
    """Describe a bank; ``redacted`` counts secrets since the server opened it, by kind."""

    entries: int
    head: int
    embedder: str
    redacted: dict[str, int]
    text_limit: int


class Page(Body):
    """Hold a part of a listing and the cursor of the next; all pages show one moment."""

    entries: list[Experience]
    cursor: str | None


class Near(Hit):
    """Hold an entry near a query, and the share of the query's words that it has."""

    words: float = 0.0


class Version(Body):
    """Name one version of one entry."""

    id: str
    version: int


class Written(Body):
    """Hold the entries written from a distillation, and its refused operations by reason."""

    entries: list[Experience]
    refused: dict[str, int]


def checked_key(key: object) -> str | None:
    """Return the key of a write, or None; a text that no header can carry is refused."""
    if key is None:
        return None
    if not (isinstance(key, str) and key.isascii() and key.isprintable() and key.strip() == key):
        raise ValueError(f"Expected key to be printable ASCII without blanks around, got {key!r}")
    if not 0 < len(key) <= LONGEST_KEY:
        raise ValueError(f"Expected key to have 1 to {LONGEST_KEY} characters, got {len(key)}")
    return key


class WritingBank(ForkableBank, Protocol):
    """Describe a bank that notes the keys of requests: that of the process that writes it."""

    receipts: Receipts


class ServedBank:
    """Carry out the operations of one open bank; each keyed write at most once.

    The methods up to ``merge_duplicates`` are operations that differ from the bank's method of the
    same name, see `experiential.bank.http.wire`. ``at`` reads an earlier state; None the present.
    """

    def __init__(self, bank: WritingBank) -> None:
        def view(commit: int, seen: int) -> View:
            return bank.at(commit)  # one made again has the counters of now

        self.bank = bank
        self._view = lru_cache(_VIEWS)(view)
        self._lock = threading.Lock()
        self._listings: OrderedDict[str, list[Experience]] = OrderedDict()
        self._counted: OrderedDict[str, None] = OrderedDict()
        self._stripes = [threading.Lock() for _ in range(64)]

    def info(self, *, at: At | None = None) -> Info:
        """Describe the bank."""
        return Info(
            entries=len(self._reader(at)),
            head=self.bank.head if at is None else at.commit,
            embedder=self.bank.embedder.id,
            redacted=dict(self.bank.redacted),
            text_limit=self.bank.text_limit,
        )

    def at(self, commit: int) -> At:
        """Return the value of ``at`` that reads the bank as it stood after a commit."""
        at = At(commit=commit, seen=self.bank.head)
        self._reader(at)
        return at

    def _reader(self, at: At | None) -> View:
        return self.bank if at is None else self._view(at.commit, at.seen)

    def get(self, id: str, *, at: At | None = None) -> Experience | None:
        """Return one entry, or null."""
        return self._reader(at).get(id)

    def read(self, id: str) -> Statistics:
        """Return the counters of one entry."""
        return self.bank.read(Experience(id=id, text="-")).statistics

    def entries(
        self,
        *,
        cursor: str | None = None,
        limit: Annotated[int, Field(ge=1, le=LONGEST_PAGE)] = LONGEST_PAGE,
        at: At | None = None,
    ) -> Page:
        """Return a page of the entries, oldest first; ``cursor`` continues a listing."""
        if cursor is None:
            listing, start, entries = new_id(), 0, list(self._reader(at).entries())
        else:
            listing, _, place = cursor.partition(".")
            start, entries = int(place) if place.isdecimal() else 0, self._listings.get(listing)
        if entries is None:
            raise BankError(
                "Expected a listing that is still known here, got one of before a restart or too"
                " long ago; list again"
            )
        end = start + limit
        if len(entries) > limit:  # kept, so that all pages show the moment of the first
            self._remember(self._listings, listing, entries, _LISTINGS)
        more = f"{listing}.{end}" if len(entries) > end else None
        return Page(entries=entries[start:end], cursor=more)

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
        """Return the hits of each query."""
        return self._reader(at).search(
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
        """Return the nearest entries of each query with their counters."""
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
        reader = self._reader(at)
        pairs = zip(exclude, where or [None] * len(queries), strict=True)
        scopes = [Scope(excluded, Where.of(one)) for excluded, one in pairs]
        rows = reader.nearest(queries, n, scopes, words)
        return [
            [
                Near(experience=reader.read(one.item), score=one.score, rank=rank, words=one.words)
                for rank, one in enumerate(row)
            ]
            for row in rows
        ]

    def embed(self, texts: list[str]) -> list[list[float]]:
        """Return the vector of each text."""
        return self.bank.embedder(texts).tolist() if texts else []

    def apply(
        self,
        distillation: Distillation,
        spans: list[list[int] | None],
        *,
        trajectory: Trajectory,
        shown: Sequence[Experience],
        item: str | None = None,
        extractor_version: int | None = None,
        review: bool = False,
    ) -> Written:
        """Write the operations distilled from a trajectory; ``spans`` are theirs, in order."""
        write = partial(self.bank.apply, trajectory=trajectory, item=item, review=review)
        return self._written(write, distillation, spans, shown, extractor_version)

    def consolidate(
        self,
        distillation: Distillation,
        spans: list[list[int] | None],
        *,
        shown: Sequence[Experience],
        extractor_version: int | None = None,
    ) -> Written:
        """Write the operations of a merge; ``spans`` are theirs, in order."""
        return self._written(self.bank.consolidate, distillation, spans, shown, extractor_version)

    def _written(
        self,
        write: Callable[..., list[Experience]],
        distillation: Distillation,
        spans: list[list[int] | None],
        shown: Sequence[Experience],
        extractor_version: int | None,
    ) -> Written:
        """Write a distillation with the spans of its operations, which their JSON leaves out."""
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
        parsed = parsed.model_copy(update={"operations": operations})
        distillation = distillation.model_copy(update={"parsed": parsed})
        before = self.bank.refused.copy()
        entries = write(distillation, shown=shown, extractor_version=extractor_version)
        return Written(entries=entries, refused=dict(self.bank.refused - before))

    def deduplicate(
        self,
        threshold: float = 0.95,
        *,
        across_tasks: bool = False,
        among: Iterable[str] | None = None,
        dry_run: bool = False,
    ) -> list[Duplicates]:
        """Merge near-duplicates."""
        return self.bank.deduplicate(
            threshold, across_tasks=across_tasks, among=among, dry_run=dry_run
        )

    def merge_duplicates(
        self, groups: list[list[Version]], ref: str, *, author: str = "human"
    ) -> list[Duplicates]:
        """Merge groups found by a client: in each the survivor first, then the others."""
        found: list[Duplicates] = []
        for group in groups:
            known = self._versions((one.id, one.version) for one in group)
            if len(known) > 1:
                found.append(Duplicates(survivor=known[0], merged=tuple(known[1:])))
        return self.bank.merge_duplicates(found, ref, author=author)

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
            if key is None or key not in self._counted:
                self.bank.note_retrievals(ids)
            if key is not None:
                self._remember(self._counted, key, None, _KEYS)

    def _remember(self, known: OrderedDict[str, T], key: str, value: T, most: int) -> None:
        """Keep a value, and forget the one that was kept the longest ago if there are too many."""
        with self._lock:
            known[key] = value
            known.move_to_end(key)
            if len(known) > most:
                known.popitem(last=False)

    def repeated(self, operation: str, commit: int, body: Body) -> Any:
        """Return the answer that a write gave when it made ``commit``."""
        written = self._versions(self.bank.receipts.written(commit))
        match operation:
            case "add" | "update" | "approve":
                return written[0]
            case "add_many":
                return written
            case "apply" | "consolidate":
                return Written(entries=written, refused={})
            case "import":
                return len(written)
            case "prune" | "evict":
                return self._versions(self.bank.receipts.removed(commit))
            case "deduplicate" | "merge_duplicates":
                groups: list[Duplicates] = []
                for survivor in written:
                    parents = [one for one in survivor.provenance.parents if one[0] != survivor.id]
                    merged = tuple(self._versions(parents))
                    groups.append(Duplicates(survivor=survivor, merged=merged))
                return groups
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
