"""A bank behind a server, with the methods of ``ExperienceBank``.

A method that is one operation is a line: ``_asks`` gives it the signature and the words of the
local one.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np
from pydantic import ValidationError

from experiential.bank.consolidation import dedupe
from experiential.bank.http import wire
from experiential.bank.http.connection import Connection
from experiential.bank.http.wire import At, Body, Operation
from experiential.bank.index.embed import Embedder, embedder_id, resolve_embedder
from experiential.bank.index.vectors import Scored, Vector
from experiential.bank.protocol import Bank, Queue, TextEmbedder, TrustBook, View
from experiential.bank.records import Commit, Difference, Duplicates, Judge, LogEntry
from experiential.bank.search.searchable import Searchable
from experiential.bank.search.where import Scope, Where
from experiential.bank.storage import bundle
from experiential.errors import BankError, ReadOnlyBankError
from experiential.sync import attempted
from experiential.types import Distillation, Experience, Hit, Statistics, Trajectory

B = TypeVar("B", bound=Body)
R = TypeVar("R")
C = TypeVar("C", bound=Commit)
M = TypeVar("M", bound=Callable[..., Any])


class Caller:
    """Asks one namespace of a server; ``at`` names the picture that reads are of, None is the present."""

    def __init__(self, connection: Connection, namespace: str, at: At | None = None) -> None:
        self.connection = connection
        self.namespace = namespace
        self.at = at

    def ask(self, operation: Operation[B, R], **values: Any) -> R:
        """The result of one operation, its body made of ``values``; what is no value for it is a ``ValueError``."""
        if issubclass(operation.body, wire.Reading):
            values["at"] = self.at
        try:
            body = operation.body(**values)
        except ValidationError as error:
            raise _named(error, operation.name) from error
        return self.connection.call(operation, self.namespace, body)

    def entries(self) -> Iterator[Experience]:
        """Every entry of one moment, oldest first; the first page is fetched now, the others as they are needed."""
        return self._following(self.ask(wire.ENTRIES))

    def _following(self, page: wire.Page) -> Iterator[Experience]:
        yield from page.entries
        while page.cursor is not None:
            page = self.ask(wire.ENTRIES, cursor=page.cursor)
            yield from page.entries

    def search(self, queries: list[str], k: int, hybrid: float, scope: Scope) -> list[list[Hit]]:
        """Hits of each query."""
        asked = {
            "queries": queries,
            "k": k,
            "hybrid": hybrid,
            "exclude_instance": scope.exclude,
            "where": _plain(scope.where),
        }
        return self.ask(wire.SEARCH, **asked) if queries else []

    def nearest(
        self,
        queries: Sequence[str],
        n: int,
        exclude: Sequence[str | None],
        where: Sequence[Where | None],
        words: bool,
    ) -> list[list[Scored[Experience]]]:
        """The nearest entries of each query with their counters; without queries only the index of words is asked for."""
        if not queries and not words:
            return []
        filters = [_plain(one) for one in where]
        rows = self.ask(
            wire.NEAREST,
            queries=list(queries),
            n=n,
            exclude=list(exclude),
            where=filters,
            words=words,
        )
        return [[Scored(hit.experience, hit.score, hit.words) for hit in row] for row in rows]

    def count(self) -> int:
        """How many entries there are."""
        return self.ask(wire.INFO).entries


def _plain(where: Where | None) -> dict[str, Any] | None:
    return None if where is None else where.to_json()


def _named(error: ValidationError, operation: str) -> ValueError:
    first = error.errors()[0]
    if first["type"] == "value_error":  # raised by a validator of ours, with all that is to be said
        return ValueError(str(first.get("ctx", {}).get("error")))
    name = ".".join(str(part) for part in first["loc"])
    return ValueError(
        f"Expected {name} of {operation!r} to be right, got {first['input']!r}: {first['msg']}"
    )


def _asks(operation: Operation[Any, Any], method: M) -> M:
    """A method that asks the server for an operation, with the arguments that the local ``method`` takes."""
    signature = inspect.signature(method)

    @wraps(method)
    def ask(self: RemoteBank | RemoteQueue | RemoteView, /, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *values = bound.arguments.items()
        return self.ask(operation, **dict(values))

    return cast("M", ask)


class RemoteView(Searchable, View):
    """A bank behind a server as it stood after one commit; later writes do not change it."""

    def __init__(self, caller: Caller, commit: int) -> None:
        self.commit = commit
        self._caller = caller

    def __len__(self) -> int:
        return self._caller.count()

    def __iter__(self) -> Iterator[Experience]:
        return self.entries()

    def entries(self) -> Iterator[Experience]:
        """Every entry, oldest first."""
        return self._caller.entries()

    def ask(self, operation: Operation[B, R], **values: Any) -> R:
        """The result of one operation, of this state."""
        return self._caller.ask(operation, **values)

    get = _asks(wire.GET, View.get)

    def _hits(self, queries: list[str], k: int, hybrid: float, scope: Scope) -> list[list[Hit]]:
        return self._caller.search(queries, k, hybrid, scope)

    def nearest(
        self,
        queries: Sequence[str],
        n: int,
        exclude: Sequence[str | None],
        where: Sequence[Where | None] = (),
        words: bool = False,
    ) -> list[list[Scored[Experience]]]:
        """The ``n`` nearest entries of each query, as ``Bank.nearest`` gives them."""
        return self._caller.nearest(queries, n, exclude, where, words)

    def read(self, experience: Experience) -> Experience:
        """The same version with the counters of this picture: it came with them."""
        return experience


class RemoteEmbedder(TextEmbedder):
    """The embedder of a server; the cache is there, too, so nothing is counted here."""

    def __init__(self, caller: Caller, id: str) -> None:
        self.id = id
        self.hits = 0
        self.misses = 0
        self.wrapped: Embedder = self._embed
        self._caller = caller

    def __call__(self, texts: Sequence[str]) -> Vector:
        """Vectors of unit length, shape (n, d), float32; n must not be 0."""
        return self._embed(list(texts))

    def _embed(self, texts: list[str]) -> Vector:
        return np.asarray(self._caller.ask(wire.EMBED, texts=texts), dtype=np.float32)


class RemoteQueue(Queue):
    """The distillation queue of a bank behind a server; items come in by ``submit`` and are finished by ``apply``."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def ask(self, operation: Operation[B, R], **values: Any) -> R:
        """The result of one operation on the queue."""
        return self._caller.ask(operation, **values)

    state = _asks(wire.QUEUE_STATE, Queue.state)
    waiting = _asks(wire.QUEUE_WAITING, Queue.waiting)
    fail = _asks(wire.QUEUE_FAIL, Queue.fail)
    attempts = _asks(wire.QUEUE_ATTEMPTS, Queue.attempts)
    dead_letters = _asks(wire.QUEUE_DEAD, Queue.dead_letters)
    requeue = _asks(wire.QUEUE_REQUEUE, Queue.requeue)


class RemoteBook(TrustBook):
    """Which entry versions of a bank behind a server are trusted."""

    def __init__(self, caller: Caller, after: int) -> None:
        if after < 1:
            raise ValueError(
                f"Expected a positive number of tasks to trust an entry after, got {after}"
            )
        self.after = after
        self.trusted = frozenset()
        self._caller = caller

    def is_trusted(self, experience: Experience) -> bool:
        """Return whether this version was trusted at the last refresh."""
        return (experience.id, experience.version) in self.trusted

    def refresh(self) -> None:
        """Ask the server anew."""
        self.trusted = frozenset(self._caller.ask(wire.TRUSTED_VERSIONS, after=self.after))


class RemoteBank(Searchable, Bank):
    """The bank of ``experiential serve``: what ``ExperienceBank("http://host:port")`` gives.

    Arguments, results and errors are those of a folder's bank. A write is on the server's disk when
    its method returns; it carries a key, so that a connection that breaks and is tried again never
    writes twice. Any number of processes may use one server.

    Args:
        path: the server's address, or a connection to it; the other arguments then open it again
            in another process.
        namespace: which of the server's namespaces; opened there when it is first asked for.
        embedder: None, or the embedder that the bank must have; vectors are made at the server.
        read_only: refuse writes here, and read the bank as it is now, whatever others write later.
        token: the server's token; ``$EXPERIENTIAL_TOKEN`` by default.
        timeout: seconds to wait for one answer.
        patience: seconds during which a lost connection is tried again.

    Raises:
        BankError: no server is there, it refused, or its bank has another embedder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Connection,
        *,
        namespace: str = "default",
        embedder: Embedder | str | None = None,
        read_only: bool = False,
        token: str | None = None,
        timeout: float = 60.0,
        patience: float = 1.0,
    ) -> None:
        if not isinstance(namespace, str) or not namespace.strip():  # pyright: ignore[reportUnnecessaryIsInstance]  (users may pass anything)
            raise ValueError(f"Expected namespace to be non-empty text, got {namespace!r}")
        connection = path
        if not isinstance(connection, Connection):
            connection = Connection(os.fspath(connection), token, timeout, patience)
        self.url = connection.url
        self.namespace = namespace
        self.read_only = read_only
        self.refused: Counter[str] = Counter()
        self._again = {"embedder": None, "token": token, "timeout": timeout, "patience": patience}
        self._present = Caller(connection, namespace)
        weakref.finalize(self, connection.close)
        info = self._present.ask(wire.INFO)
        self._embedder = RemoteEmbedder(self._present, info.embedder)
        self._check_embedder(embedder)
        self._caller = (
            Caller(connection, namespace, At(commit=info.head, seen=info.head))
            if read_only
            else self._present
        )
        self._queue = RemoteQueue(self._present)

    def _check_embedder(self, embedder: Embedder | str | None) -> None:
        if (
            embedder is not None
            and (wanted := embedder_id(resolve_embedder(embedder))) != self._embedder.id
        ):
            raise BankError(
                f"Expected the embedder {self._embedder.id!r} of the bank at {self.url}, got"
                f" {wanted!r}; leave embedder= out, the server makes the vectors"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        options = {**self._again, "namespace": self.namespace, "read_only": self.read_only}
        return _reopened, (self.url, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Experience]:
        return self.entries()

    def __len__(self) -> int:
        return self._caller.count()

    def __repr__(self) -> str:
        return f"ExperienceBank({self.url!r}, namespace={self.namespace!r})"

    @property
    def head(self) -> int:
        """The id of the last commit; 0 for a bank never written."""
        return (
            self._caller.at.commit
            if self._caller.at is not None
            else self._present.ask(wire.INFO).head
        )

    @property
    def text_limit(self) -> int:
        return self._present.ask(wire.INFO).text_limit

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._present.connection.closed

    @property
    def embedder(self) -> TextEmbedder:
        """What turns texts into vectors, at the server."""
        return self._embedder

    @property
    def queue(self) -> Queue:
        return self._queue

    @property
    def redacted(self) -> Counter[str]:
        """Secrets taken out of what all clients wrote since the server opened the bank, by kind."""
        return Counter(self._present.ask(wire.INFO).redacted)

    def close(self) -> None:
        """Close the connections; the server goes on. Safe to call twice."""
        self._present.connection.close()

    def ask(self, operation: Operation[B, R], **values: Any) -> R:
        """The result of one operation of the server; of a read-only bank it may be no write."""
        if self.read_only and operation.writes and not values.get("dry_run"):
            raise ReadOnlyBankError(
                "Expected a writable bank, got one opened with read_only=True; open it without"
            )
        return self._caller.ask(operation, **values)

    # Reading

    get = _asks(wire.GET, Bank.get)
    version = _asks(wire.VERSION, Bank.version)
    generation = _asks(wire.GENERATION, Bank.generation)
    trajectory = _asks(wire.TRAJECTORY, Bank.trajectory)
    outcomes = _asks(wire.OUTCOMES, Bank.outcomes)
    lineage = _asks(wire.LINEAGE, Bank.lineage)
    uplift = _asks(wire.UPLIFT, Bank.uplift)
    why = _asks(wire.WHY, Bank.why)
    standing = _asks(wire.STANDING, Bank.standing)
    trusted = _asks(wire.TRUSTED, Bank.trusted)

    @property
    def trust_after(self) -> int:
        """``bank.trust_after`` of the last manager that had one and could write; 0 when there was none."""
        return self.ask(wire.TRUST_AFTER)

    @trust_after.setter
    def trust_after(self, after: int) -> None:
        self.ask(wire.SET_TRUST_AFTER, after=after)

    def trust_book(self, after: int) -> TrustBook:
        return RemoteBook(self._present, after)

    def entries(self) -> Iterator[Experience]:
        """Every entry as it stands now, oldest first; fetched page by page, all of one moment."""
        return self._caller.entries()

    def _hits(self, queries: list[str], k: int, hybrid: float, scope: Scope) -> list[list[Hit]]:
        return self._caller.search(queries, k, hybrid, scope)

    def nearest(
        self,
        queries: Sequence[str],
        n: int,
        exclude: Sequence[str | None],
        where: Sequence[Where | None] = (),
        words: bool = False,
    ) -> list[list[Scored[Experience]]]:
        """The ``n`` nearest entries of each query with their counters, with ``words`` those its words find too."""
        return self._caller.nearest(queries, n, exclude, where, words)

    def counters(self, experience: Experience) -> Statistics:
        """The counters of an entry that ``nearest`` gave: it came with them."""
        return experience.statistics

    def read(self, experience: Experience) -> Experience:
        """The same version with its counters as they are now; those it has already when this bank is read-only."""
        if self.read_only:
            return experience
        return experience.model_copy(
            update={"statistics": self._present.ask(wire.READ, id=experience.id)}
        )

    def commits(self) -> list[Commit]:
        """Every commit, oldest first."""
        return self._until_here(self.ask(wire.COMMITS))

    def history(self, id: str | None = None) -> list[LogEntry]:
        """Every commit with the number of entries that it changed, or those that changed one entry; oldest first."""
        return self._until_here(self.ask(wire.HISTORY, id=id))

    def _until_here(self, commits: list[C]) -> list[C]:
        at = self._caller.at
        return [commit for commit in commits if at is None or commit.id <= at.commit]

    def diff(self, a: int, b: int) -> Difference:
        """What was added, removed and changed from commit ``a`` to commit ``b``; 0 is before the first."""
        return self.ask(wire.DIFF, a=self._checked_commit(a), b=self._checked_commit(b))

    def at(self, commit: int) -> View:
        """The bank as it stood after one commit; 0 is before the first."""
        at = self._present.ask(wire.AT, commit=self._checked_commit(commit))
        return RemoteView(Caller(self._present.connection, self.namespace, at), commit)

    def snapshot(self) -> View:
        return self.at(self.head)

    def _checked_commit(self, commit: object) -> int:
        if (
            not isinstance(commit, int)
            or isinstance(commit, bool)
            or (self.read_only and commit > self.head)
        ):
            raise BankError(
                f"Expected a commit id of this bank (0 to {self.head}), got {commit!r}; list them"
                " with bank.commits()"
            )
        return commit

    # Writing

    add = _asks(wire.ADD, Bank.add)
    add_many = _asks(wire.ADD_MANY, Bank.add_many)
    update = _asks(wire.UPDATE, Bank.update)
    remove = _asks(wire.REMOVE, Bank.remove)
    record = _asks(wire.RECORD, Bank.record)
    submit = _asks(wire.SUBMIT, Bank.submit)

    def submit_many(
        self, trajectories: Sequence[Trajectory], *, distil: bool = True
    ) -> list[bool | Exception]:
        """``submit`` each, or ``record`` it when not ``distil``; gives for each what it gave or raised."""
        write = self.submit if distil else self.record
        return [attempted(partial(write, trajectory)) for trajectory in trajectories]

    keep_generation = _asks(wire.KEEP_GENERATION, Bank.keep_generation)
    save_counters = _asks(wire.SAVE_COUNTERS, Bank.save_counters)
    import_entries = _asks(wire.IMPORT, Bank.import_entries)
    prune = _asks(wire.PRUNE, Bank.prune)
    evict = _asks(wire.EVICT, Bank.evict)

    def rollback(self, commit: int) -> Commit:
        """Let the bank stand as it stood after ``commit``, by a new commit; nothing is erased, counters stay."""
        return self.ask(wire.ROLLBACK, commit=self._checked_commit(commit))

    def apply(
        self,
        distillation: Distillation,
        *,
        trajectory: Trajectory,
        shown: Sequence[Experience],
        item: str | None = None,
        extractor_version: int | None = None,
    ) -> list[Experience]:
        """Write what an extractor distilled from a trajectory, in one commit; gives the entries written."""
        asked = {"trajectory": trajectory, "item": item, "extractor_version": extractor_version}
        return self._distilled(wire.APPLY, distillation, shown, asked)

    def consolidate(
        self,
        distillation: Distillation,
        *,
        shown: Sequence[Experience],
        extractor_version: int | None = None,
    ) -> list[Experience]:
        """Write what an extractor merged, in one commit; gives the merged entries."""
        return self._distilled(
            wire.CONSOLIDATE, distillation, shown, {"extractor_version": extractor_version}
        )

    def _distilled(
        self,
        operation: Operation[wire.Distilled, wire.Written],
        distillation: Distillation,
        shown: Sequence[Experience],
        asked: Mapping[str, Any],
    ) -> list[Experience]:
        spans = [
            None if one.span is None else list(one.span) for one in distillation.parsed.operations
        ]
        written = self.ask(
            operation, distillation=distillation, spans=spans, shown=list(shown), **asked
        )
        self.refused.update(written.refused)
        return written.entries

    def note_retrievals(self, ids: Iterable[str]) -> None:
        """Count retrievals; the server journals them with the next commit or when it stops, so that reading costs no write."""
        if named := list(ids):
            self.ask(wire.NOTE_RETRIEVALS, ids=named)

    def deduplicate(
        self,
        threshold: float = 0.95,
        judge: Judge | None = None,
        *,
        across_tasks: bool = False,
        among: Iterable[str] | None = None,
        dry_run: bool = False,
    ) -> list[Duplicates]:
        """Merge near-duplicates into the oldest of each group, in one commit; gives the groups.

        A ``judge`` cannot travel, so it is asked here: all texts and their vectors are then
            fetched, and the groups sent back. With
        none all happens at the server; what takes longer than ``timeout`` ends with an error here
        and goes on there.
        """
        if judge is None:
            return self.ask(
                wire.DEDUPLICATE,
                threshold=threshold,
                across_tasks=across_tasks,
                among=among,
                dry_run=dry_run,
            )
        found = dedupe.find(
            list(self.entries()),
            self.embedder,
            threshold,
            judge,
            across_tasks=across_tasks,
            among=among,
        )
        return found if dry_run else self.merge_duplicates(found, f"cosine >= {threshold:g}")

    def merge_duplicates(
        self, found: Sequence[Duplicates], ref: str = "groups given", *, author: str = "human"
    ) -> list[Duplicates]:
        """Merge the groups that ``deduplicate(dry_run=True)`` found, or some of them, in one commit; gives those merged."""
        groups = [
            [
                {"id": entry.id, "version": entry.version}
                for entry in (group.survivor, *group.merged)
            ]
            for group in found
        ]
        return self.ask(wire.MERGE_DUPLICATES, groups=groups, ref=ref, author=author)

    # Moving

    def export(self, file: str | os.PathLike[str]) -> int:
        """Write every entry with its provenance and counters to a JSON Lines file on this side; gives their number."""
        return bundle.write(Path(file), list(self.entries()), self.namespace, self._embedder.id)

    def import_(self, file: str | os.PathLike[str], *, edited: bool = False) -> int:
        return self.import_entries(bundle.read(Path(file), edited=edited), Path(file).name)


def _reopened(url: str, options: dict[str, Any]) -> RemoteBank:
    return RemoteBank(url, **options)
