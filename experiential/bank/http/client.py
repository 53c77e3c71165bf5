"""Use a bank behind a server as if its folder were here.

A method that is one operation of the server is one line: ``_sends`` gives it the signature and the
documentation of the method that the server calls.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

import numpy as np

from experiential.bank.consolidation import dedupe
from experiential.bank.episode import Episode, EpisodeOptions
from experiential.bank.http import wire
from experiential.bank.http.connection import PATIENCE, Connection
from experiential.bank.http.limits import Limits
from experiential.bank.http.served import (
    At,
    Info,
    Near,
    Page,
    Version,
    Written,
    checked_key,
)
from experiential.bank.http.wire import Body, Operation
from experiential.bank.index.embed import Embedder, Vector, embedder_id, resolve_embedder
from experiential.bank.processes import Line
from experiential.bank.protocol import Bank, Queue, TextEmbedder, View
from experiential.bank.records import Duplicates, Judge
from experiential.bank.search.where import Ranking, Scope, Scored
from experiential.bank.storage.journal import new_folder
from experiential.bank.text import checked_text
from experiential.bank.unmanaged import Unmanaged
from experiential.errors import BankError, ReadOnlyBankError
from experiential.sync import attempted
from experiential.types import Experience, Hit, Statistics, Trajectory

M = TypeVar("M", bound=Callable[..., Any])
_LIMITS = Limits()


def _sends(method: M, operation: str = "") -> M:
    """Return a method with the signature of ``method`` that sends its arguments to the server.

    The name of the operation is by default that of the method.
    """
    signature, operation = inspect.signature(method), operation or method.__name__

    @wraps(method)
    def send(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *values = bound.arguments.items()
        return self.send(operation, **dict(values))

    return cast("M", send)


class ProcessConnection:
    """Call the operations of a bank that another process on this machine has open."""

    def __init__(self, line: Line) -> None:
        self.url = str(line)
        self._line = line

    @property
    def closed(self) -> bool:
        return self._line.closed

    def call(self, operation: Operation, namespace: str, body: Body, key: str | None = None) -> Any:
        """Return the answer to one operation; the line leads to one namespace."""
        arguments = {name: getattr(body, name) for name in type(body).model_fields}
        if key is not None:
            arguments["key"] = key
        return self._line.call(operation.path, **arguments)

    def backup(self, folder: Path) -> None:
        """Write the journal of that bank into a folder."""
        self._line.call("bank.backup", path=folder)

    def close(self) -> None:
        self._line.close()


class RemoteView(View):
    """Read a bank behind a server as it stood in ``view``; None is the present."""

    def __init__(
        self,
        connection: Connection | ProcessConnection,
        namespace: str,
        view: At | None = None,
    ) -> None:
        self.namespace = namespace
        self._connection = connection
        self._view = view
        if view is not None:
            self.commit = view.commit

    def send(self, name: str, /, **values: Any) -> Any:
        """Return the answer to one operation, asked of this view where it can be.

        Raises:
            ValueError: a value does not fit its parameter.
        """
        operation, key = wire.OPERATIONS[name], checked_key(values.pop("key", None))
        if "at" in operation.body.model_fields:
            values.setdefault("at", self._view)
        body = operation.request(values)
        return self._connection.call(operation, self.namespace, body, key)

    get = _sends(View.get)

    def __len__(self) -> int:
        return self.send("info").entries

    def entries(self) -> Iterator[Experience]:
        """Return every entry of one moment; the first page is fetched now, others when needed."""
        return self._following(self.send("entries"))

    def _following(self, page: Page) -> Iterator[Experience]:
        yield from page.entries
        while page.cursor is not None:
            page = self.send("entries", cursor=page.cursor)
            yield from page.entries

    def read(self, experience: Experience) -> Experience:
        return experience  # its counters came with it

    def nearest(
        self, queries: Sequence[str], n: int, scopes: Sequence[Scope], words: bool = False
    ) -> list[Ranking]:
        if not queries and not words:
            return []
        rows: list[list[Near]] = []
        for part in _parts(queries, n) or [slice(0)]:
            rows += self.send(
                "nearest",
                queries=list(queries[part]),
                n=n,
                exclude=[scope.exclude for scope in scopes[part]],
                where=[scope.where and scope.where.fields for scope in scopes[part]],
                words=words,
            )
        return [[Scored(hit.experience, hit.score, hit.words) for hit in row] for row in rows]

    def _hits(self, queries: list[str], k: int, hybrid: float, scope: Scope) -> list[list[Hit]]:
        where = scope.where and scope.where.fields
        filters = {"exclude_instance": scope.exclude, "where": where}
        rows: list[list[Hit]] = []
        for part in _parts(queries, k):
            rows += self.send("search", queries=queries[part], k=k, hybrid=hybrid, **filters)
        return rows


def _parts(texts: Sequence[str], k: int) -> list[slice]:
    """Cut queries for ``k`` hits each into parts that a server takes in one request."""
    most = max(1, min(_LIMITS.queries, _LIMITS.hits // max(k, 1)))
    parts: list[slice] = []
    start = size = 0
    for place, text in enumerate(texts):
        length = 4 * len(text) + 64  # bytes at most, with its filter
        if place > start and (place - start == most or size + length > _LIMITS.asking):
            parts.append(slice(start, place))
            start, size = place, 0
        size += length
    return [*parts, slice(start, len(texts))] if texts else []


class RemoteEmbedder(TextEmbedder):
    """Embed texts at a server; the cache is there too, so nothing is counted here."""

    def __init__(self, bank: RemoteView, id: str) -> None:
        self.id = id
        self.hits = 0
        self.misses = 0
        self.wrapped: Embedder = self
        self._bank = bank

    def __call__(self, texts: Sequence[str]) -> Vector:
        texts, vectors = list(texts), list[list[float]]()
        for part in _parts(texts, 1):
            vectors += self._bank.send("embed", texts=texts[part])
        return np.asarray(vectors, dtype=np.float32)


@dataclass(eq=False)
class RemoteQueue(Queue):
    """Read and update the distillation queue of a bank behind a server."""

    send: Callable[..., Any]

    state = _sends(Queue.state, "queue_state")
    waiting = _sends(Queue.waiting, "queue_waiting")
    counts = _sends(Queue.counts, "queue_counts")
    lease = _sends(Queue.lease, "queue_lease")
    release = _sends(Queue.release, "queue_release")
    fail = _sends(Queue.fail, "queue_fail")
    attempts = _sends(Queue.attempts, "queue_attempts")
    dead_letters = _sends(Queue.dead_letters, "queue_dead_letters")
    requeue = _sends(Queue.requeue, "queue_requeue")


class RemoteBank(RemoteView, Bank):
    """Use the bank of ``experiential serve``; the methods are documented in `Bank`.

    Arguments, results and errors are those of a folder's bank. A write is on the server's disk when
    its method returns; it carries a key, so that one sent again over a new connection is carried
    out once. Any number of processes may use one server.

    Args:
        path: the server's address, or a connection to it; the other arguments then open it again
            in another process. A line leads to a bank that another process has open.
        namespace: which of the server's namespaces; opened there when it is first asked for.
        embedder: None, or the embedder that the bank must have; vectors are made at the server.
        read_only: refuse writes here, and read the bank as it is now.
        token: the server's token; ``$EXPERIENTIAL_TOKEN`` by default.
        timeout: seconds to wait for one answer.
        patience: seconds during which a lost or busy server is tried again.
        info: what the server says of the bank; asked for by default.

    Raises:
        BankError: no server is there, it refused, or its bank has another embedder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Connection | Line,
        *,
        namespace: str = "default",
        embedder: Embedder | str | None = None,
        read_only: bool = False,
        token: str | None = None,
        timeout: float = 60.0,
        patience: float = PATIENCE,
        info: Info | None = None,
    ) -> None:
        checked_text(namespace, "namespace")
        if isinstance(path, Line):
            connection = ProcessConnection(path)
        elif isinstance(path, Connection):
            connection = path
        else:
            connection = Connection(os.fspath(path), token, timeout, patience)
        self.url = connection.url
        self._place = path if isinstance(path, Line) else self.url
        self.read_only = read_only
        self.refused: Counter[str] = Counter()
        self._options = {"token": token, "timeout": timeout, "patience": patience}
        self._now = RemoteView(connection, namespace)
        weakref.finalize(self, connection.close)
        info = info or cast("Info", self._now.send("info"))
        self.embedder = RemoteEmbedder(self._now, info.embedder)
        self.queue = RemoteQueue(self._now.send)
        own = None if embedder is None else embedder_id(resolve_embedder(embedder))
        if own not in (None, info.embedder):
            raise BankError(
                f"Expected the embedder {info.embedder!r} of the bank at {self.url}, got {own!r};"
                " leave embedder= out, the server makes the vectors"
            )
        view = At(commit=info.head, seen=info.head) if read_only else None
        super().__init__(connection, namespace, view)

    def __reduce__(self) -> tuple[Any, ...]:
        options = {**self._options, "namespace": self.namespace, "read_only": self.read_only}
        return partial(RemoteBank, **options), (self._place,)

    def __repr__(self) -> str:
        return f"ExperienceBank({self.url!r}, namespace={self.namespace!r})"

    def send(self, name: str, /, **values: Any) -> Any:
        """Return the answer to one operation; a read-only bank refuses writes."""
        operation, view = wire.OPERATIONS[name], self._view
        if self.read_only and operation.writes and not values.get("dry_run"):
            raise ReadOnlyBankError(
                "Expected a writable bank, got one opened with read_only=True; open it without"
            )
        for commit in (values[key] for key in ("commit", "a", "b") if key in values):
            # `type` and not `isinstance`: users may pass anything, and True is not a commit
            if type(commit) is not int or (view is not None and commit > view.commit):
                raise BankError(
                    f"Expected a commit id of this bank (0 to {self.head}), got {commit!r}; list"
                    " them with bank.commits()"
                )
        if "spans" in operation.body.model_fields:
            # The spans of the operations, which their own JSON leaves out.
            spans = [one.span for one in values["distillation"].parsed.operations]
            values["spans"] = [None if span is None else list(span) for span in spans]
        answer = super().send(name, **values)
        if isinstance(answer, Written):
            self.refused.update(answer.refused)
            return answer.entries
        if view is not None and name in ("commits", "history"):
            return [commit for commit in answer if commit.id <= view.commit]
        return answer

    @property
    def head(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._now.send("info").head if self._view is None else self._view.commit

    @property
    def text_limit(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._now.send("info").text_limit

    @property
    def closed(self) -> bool:
        return self._connection.closed

    @property
    def redacted(self) -> Counter[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Counter(self._now.send("info").redacted)

    def close(self) -> None:
        """Close the connections; the server goes on. Safe to call twice."""
        self._connection.close()

    # Episodes

    def episode(self, task: str, **options: Unpack[EpisodeOptions]) -> Episode:
        return Episode(self._unmanaged, checked_text(task, "task"), **options)

    @cached_property
    def _unmanaged(self) -> Unmanaged:
        return Unmanaged(self)

    # Reading and evidence

    version = _sends(Bank.version)
    commits = _sends(Bank.commits)
    history = _sends(Bank.history)
    diff = _sends(Bank.diff)
    generation = _sends(Bank.generation)
    trajectory = _sends(Bank.trajectory)
    outcomes = _sends(Bank.outcomes)
    lineage = _sends(Bank.lineage)
    uplift = _sends(Bank.uplift)
    why = _sends(Bank.why)
    standings = _sends(Bank.standings)

    def counters(self, experience: Experience) -> Statistics:
        return experience.statistics  # they came with it

    def read(self, experience: Experience) -> Experience:
        if self.read_only:  # counters stay as they were when the bank was opened
            return experience
        statistics = self.send("read", id=experience.id)
        return experience.model_copy(update={"statistics": statistics})

    def at(self, commit: int) -> View:
        view = self.send("at", commit=commit)
        return RemoteView(self._connection, self.namespace, view)

    # Writing

    add = _sends(Bank.add)
    add_many = _sends(Bank.add_many)
    update = _sends(Bank.update)
    approve = _sends(Bank.approve)
    remove = _sends(Bank.remove)
    rollback = _sends(Bank.rollback)
    record = _sends(Bank.record)
    submit = _sends(Bank.submit)
    conclude = _sends(Bank.conclude)
    apply = _sends(Bank.apply)
    consolidate = _sends(Bank.consolidate)
    keep_generation = _sends(Bank.keep_generation)
    save_counters = _sends(Bank.save_counters)
    prune = _sends(Bank.prune)
    evict = _sends(Bank.evict)

    def submit_many(
        self, trajectories: Sequence[Trajectory], *, distil: bool = True, holder: str = ""
    ) -> list[bool | Exception]:
        write = partial(self.submit, holder=holder) if distil else self.record
        return [attempted(partial(write, trajectory)) for trajectory in trajectories]

    def note_retrievals(self, ids: Iterable[str]) -> None:
        if ids := list(ids):
            self.send("note_retrievals", ids=ids)

    def deduplicate(
        self,
        threshold: float = 0.95,
        judge: Judge | None = None,
        *,
        across_tasks: bool = False,
        among: Iterable[str] | None = None,
        dry_run: bool = False,
    ) -> list[Duplicates]:
        # A judge cannot travel, so the entries and their vectors are fetched and it is asked here.
        # Without one all happens at the server, which goes on after a time-out here.
        options: dict[str, Any] = {"across_tasks": across_tasks, "among": among}
        if judge is None:
            return self.send("deduplicate", threshold=threshold, dry_run=dry_run, **options)
        entries = list(self.entries())
        found = dedupe.find(entries, self.embedder, threshold, judge, **options)
        return found if dry_run else self.merge_duplicates(found, f"cosine >= {threshold:g}")

    def merge_duplicates(
        self, found: Sequence[Duplicates], ref: str = "groups given", *, author: str = "human"
    ) -> list[Duplicates]:
        groups = [
            [Version(id=one.id, version=one.version) for one in (group.survivor, *group.merged)]
            for group in found
        ]
        return self.send("merge_duplicates", groups=groups, ref=ref, author=author)

    # Moving

    import_entries = _sends(Bank.import_entries, "import")

    def backup(self, path: str | os.PathLike[str]) -> None:
        self._connection.backup(new_folder(path))
