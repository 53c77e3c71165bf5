"""A bank behind a server, with the methods of ``ExperienceBank``."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import numpy as np
from pydantic import ValidationError

from experiential.bank import bundle, wire
from experiential.bank.bank import ExperienceBank
from experiential.bank.connection import Connection
from experiential.bank.embed import CachedEmbedder, Embedder, embedder_id, resolve_embedder
from experiential.bank.history import Commit
from experiential.bank.queue import DeadLetter, DistillationQueue
from experiential.bank.vectors import Scored, Vector
from experiential.bank.view import BankView, checked_queries
from experiential.bank.wire import At, Body, Operation
from experiential.errors import BankError, ReadOnlyBankError
from experiential.types import Distillation, Experience, Generation, Hit, Trajectory

B = TypeVar("B", bound=Body)
R = TypeVar("R")


class Caller:
    """Asks one namespace of a server; ``at`` names the picture that reads are of, None is the present."""

    def __init__(self, connection: Connection, namespace: str, at: At | None = None) -> None:
        self.connection = connection
        self.namespace = namespace
        self.at = at

    def ask(self, operation: Operation[B, R], **values: Any) -> R:
        """The result of one operation, its body made of ``values``; what is no value for it is a ``ValueError``."""
        try:
            body = operation.body(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"Expected {name} of {operation.name!r} to be right, got {first['input']!r}: {first['msg']}") from error
        return self.connection.call(operation, self.namespace, body)

    def entries(self) -> Iterator[Experience]:
        """Every entry of one moment, oldest first; the first page is fetched now, the others as they are needed."""
        return self._following(self.ask(wire.ENTRIES, at=self.at))

    def _following(self, page: wire.Page) -> Iterator[Experience]:
        yield from page.entries
        while page.cursor is not None:
            page = self.ask(wire.ENTRIES, at=self.at, cursor=page.cursor)
            yield from page.entries

    def search(self, query: object, k: int, exclude_instance: str | None) -> Any:
        """Hits of one query, or a list of them for each of several."""
        queries = checked_queries(query, k)
        rows = self.ask(wire.SEARCH, queries=queries, k=k, exclude_instance=exclude_instance, at=self.at) if queries else []
        return rows[0] if isinstance(query, str) else rows

    def count(self) -> int:
        """How many entries there are."""
        return self.ask(wire.INFO, at=self.at).entries


class RemoteView(BankView):
    """A bank behind a server as it stood after one commit; later writes do not change it."""

    def __init__(self, caller: Caller, commit: int) -> None:
        self.commit = commit
        self._caller = caller

    def __len__(self) -> int:
        return self._caller.count()

    def entries(self) -> Iterator[Experience]:
        """Every entry, oldest first."""
        return self._caller.entries()

    def get(self, id: str) -> Experience | None:
        """The entry with this id, or None."""
        return self._caller.ask(wire.GET, id=id, at=self._caller.at)

    @overload
    def search(self, query: str, *, k: int = 1, exclude_instance: str | None = None) -> list[Hit]: ...

    @overload
    def search(self, query: list[str] | tuple[str, ...], *, k: int = 1, exclude_instance: str | None = None) -> list[list[Hit]]: ...

    def search(
        self, query: str | list[str] | tuple[str, ...], *, k: int = 1, exclude_instance: str | None = None
    ) -> list[Hit] | list[list[Hit]]:
        """The ``k`` most similar entries of one query, or of each of several."""
        return self._caller.search(query, k, exclude_instance)


class RemoteEmbedder(CachedEmbedder):
    """The embedder of a server; the cache is there, too, so nothing is counted here."""

    def __init__(self, caller: Caller, id: str) -> None:
        self.id = id
        self.hits = 0
        self.misses = 0
        self.wrapped = self._embed
        self._caller = caller

    def __call__(self, texts: Sequence[str]) -> Vector:
        """Vectors of unit length, shape (n, d), float32; n must not be 0."""
        return self._embed(list(texts))

    def _embed(self, texts: list[str]) -> Vector:
        return np.asarray(self._caller.ask(wire.EMBED, texts=texts), dtype=np.float32)


class RemoteQueue(DistillationQueue):
    """The distillation queue of a bank behind a server; items come in by ``submit`` and are finished by ``apply``."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def put(self, id: str) -> bool:
        """Refuse: ``submit`` of the bank queues a trajectory."""
        raise BankError("Expected bank.submit(trajectory), which queues it at the server, got queue.put")

    def finish(self, id: str) -> bool:
        """Refuse: ``apply(..., item=id)`` of the bank finishes an item."""
        raise BankError("Expected bank.apply(..., item=id), which finishes it at the server, got queue.finish")

    def clear(self) -> None:
        """Refuse: nobody forgets the items of all clients."""
        raise BankError("Expected a bank folder to clear the queue of, got a bank behind a server, where others may wait for it")

    def state(self, id: str) -> str | None:
        """'queued', 'done', 'dead', or None for a stranger."""
        return self._caller.ask(wire.QUEUE_STATE, id=id)

    def waiting(self) -> list[str]:
        """Ids still to be distilled, oldest first."""
        return self._caller.ask(wire.QUEUE_WAITING)

    def fail(self, id: str, reason: str, *, last: bool) -> int:
        """Count a failed attempt, the last one ends among the dead letters; gives the attempts so far."""
        return self._caller.ask(wire.QUEUE_FAIL, id=id, reason=reason, last=last)

    def attempts(self, id: str) -> int:
        """Failed attempts so far."""
        return self._caller.ask(wire.QUEUE_ATTEMPTS, id=id)

    def dead_letters(self) -> list[DeadLetter]:
        """Items that were given up, oldest first."""
        return self._caller.ask(wire.QUEUE_DEAD)

    def requeue(self, id: str) -> bool:
        """Give a dead letter a new life with all its attempts; False when it is not dead."""
        return self._caller.ask(wire.QUEUE_REQUEUE, id=id)


class RemoteBank(ExperienceBank):
    """The bank of ``experiential serve``: what ``ExperienceBank("http://host:port")`` gives.

    Arguments, results and errors are those of a folder's bank. A write is on the server's disk when its method returns; it carries a
    key, so that a connection that breaks and is tried again never writes twice. Any number of processes may use one server.

    Args:
        path: the server's address.
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
        path: str | os.PathLike[str],
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
        connection = Connection(os.fspath(path), token, timeout, patience)
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
        self._caller = Caller(connection, namespace, At(commit=info.head, seen=info.head)) if read_only else self._present
        self.queue = RemoteQueue(self._present)

    def _check_embedder(self, embedder: Embedder | str | None) -> None:
        if embedder is not None and (wanted := embedder_id(resolve_embedder(embedder))) != self._embedder.id:
            raise BankError(
                f"Expected the embedder {self._embedder.id!r} of the bank at {self.url}, got {wanted!r}; "
                "leave embedder= out, the server makes the vectors"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        options = {**self._again, "namespace": self.namespace, "read_only": self.read_only}
        return _reopened, (self.url, options)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "text_limit":
            raise BankError(f"Expected the limit of texts to be set at the server of {self.url}, got {value!r} set here; leave it out")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        return self._caller.count()

    def __repr__(self) -> str:
        return f"ExperienceBank({self.url!r}, namespace={self.namespace!r})"

    @property
    def head(self) -> int:
        """The id of the last commit; 0 for a bank never written."""
        return self._caller.at.commit if self._caller.at is not None else self._present.ask(wire.INFO).head

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._present.connection.closed

    @property
    def embedder(self) -> CachedEmbedder:
        """What turns texts into vectors, at the server."""
        return self._embedder

    @property
    def redacted(self) -> Counter[str]:  # pyright: ignore[reportIncompatibleVariableOverride]  (nobody sets it; here it is asked for)
        """Secrets taken out of what all clients wrote since the server opened the bank, by kind."""
        return Counter(self._present.ask(wire.INFO).redacted)

    def close(self) -> None:
        """Close the connections; the server goes on. Safe to call twice."""
        self._present.connection.close()

    # Reading

    def get(self, id: str) -> Experience | None:
        """The entry with this id as it stands now, or None."""
        return self._caller.ask(wire.GET, id=id, at=self._caller.at)

    def entries(self) -> Iterator[Experience]:
        """Every entry as it stands now, oldest first; fetched page by page, all of one moment."""
        return self._caller.entries()

    def version(self, id: str, version: int) -> Experience | None:
        """One version of one entry, whether it stands now or not; None when there never was one."""
        return self._present.ask(wire.VERSION, id=id, version=version)

    @overload
    def search(self, query: str, *, k: int = 1, exclude_instance: str | None = None) -> list[Hit]: ...

    @overload
    def search(self, query: list[str] | tuple[str, ...], *, k: int = 1, exclude_instance: str | None = None) -> list[list[Hit]]: ...

    def search(
        self, query: str | list[str] | tuple[str, ...], *, k: int = 1, exclude_instance: str | None = None
    ) -> list[Hit] | list[list[Hit]]:
        """The ``k`` most similar entries of one query, or of each of several; no counter changes."""
        return self._caller.search(query, k, exclude_instance)

    def nearest(self, queries: Sequence[str], n: int, exclude: Sequence[str | None]) -> list[list[Scored[Experience]]]:
        """The ``n`` nearest entries of each query with their cosines, one excluded task instance (or None) per query."""
        if not queries:
            return []
        rows = self._caller.ask(wire.NEAREST, queries=list(queries), n=n, exclude=list(exclude), at=self._caller.at)
        return [[Scored(hit.experience, hit.score) for hit in row] for row in rows]

    def read(self, experience: Experience) -> Experience:
        """The same version with its counters as they are now; those it has already when this bank is read-only."""
        if self.read_only:
            return experience
        return experience.model_copy(update={"statistics": self._present.ask(wire.READ, id=experience.id)})

    def commits(self) -> list[Commit]:
        """Every commit, oldest first."""
        last = None if self._caller.at is None else self._caller.at.commit
        return [commit for commit in self._present.ask(wire.COMMITS) if last is None or commit.id <= last]

    def at(self, commit: int) -> BankView:
        """The bank as it stood after one commit; 0 is before the first."""
        at = self._present.ask(wire.AT, commit=self._checked_commit(commit))
        return RemoteView(Caller(self._present.connection, self.namespace, at), commit)

    def _checked_commit(self, commit: object) -> int:
        if not isinstance(commit, int) or isinstance(commit, bool) or (self.read_only and commit > self.head):
            raise BankError(f"Expected a commit id of this bank (0 to {self.head}), got {commit!r}; list them with bank.commits()")
        return commit

    def generation(self, id: str) -> Generation | None:
        """A journalled generation with its token ids and log-probabilities, or None."""
        return self._present.ask(wire.GENERATION, id=id)

    def trajectory(self, id: str) -> Trajectory | None:
        """A recorded trajectory, or None."""
        return self._present.ask(wire.TRAJECTORY, id=id)

    def outcomes(self, id: str, version: int) -> list[int]:
        """1 or 0 for every recorded use of one entry version, oldest first."""
        return self._present.ask(wire.OUTCOMES, id=id, version=version)

    def lineage(self, id: str, version: int) -> list[tuple[str, int]]:
        """Every (id, version) that earns the outcome of a use of this version: itself and all it was merged from."""
        return self._present.ask(wire.LINEAGE, id=id, version=version)

    # Writing

    def _write(self, operation: Operation[B, R], **values: Any) -> R:
        if self.read_only:
            raise ReadOnlyBankError("Expected a writable bank, got one opened with read_only=True; open it without")
        return self._present.ask(operation, **values)

    def add(self, text: str, *, task: str | None = None, kind: str = "lesson", metadata: Mapping[str, Any] | None = None) -> Experience:
        """Write a new entry; it is durable when this returns."""
        return self._write(wire.ADD, text=text, task=task, kind=kind, metadata=_plain(metadata))

    def add_many(
        self, texts: Iterable[str], *, task: str | None = None, kind: str = "lesson", metadata: Mapping[str, Any] | None = None
    ) -> list[Experience]:
        """Write several entries in one commit."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  (users may pass anything)
            raise ValueError(f"Expected texts to be a list of texts, got {texts!r}")
        return self._write(wire.ADD_MANY, texts=list(texts), task=task, kind=kind, metadata=_plain(metadata))

    def update(self, id: str, text: str) -> Experience:
        """Write the next version of an entry; the old one stays in its history."""
        return self._write(wire.UPDATE, id=id, text=text)

    def remove(self, id: str) -> None:
        """Take an entry out; ``at`` and ``rollback`` still know it."""
        self._write(wire.REMOVE, id=id)

    def rollback(self, commit: int) -> Commit:
        """Let the bank stand as it stood after ``commit``, by a new commit; nothing is erased, counters stay."""
        return self._write(wire.ROLLBACK, commit=self._checked_commit(commit))

    def record(self, trajectory: Trajectory) -> bool:
        """Journal the outcome and the uses of a trajectory and update counters; False when it was recorded before."""
        return self._write(wire.RECORD, trajectory=trajectory)

    def submit(self, trajectory: Trajectory) -> bool:
        """Record a trajectory and queue it for distillation in one commit; False when it was queued before."""
        return self._write(wire.SUBMIT, trajectory=trajectory)

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
        self, distillation: Distillation, *, shown: Sequence[Experience], extractor_version: int | None = None
    ) -> list[Experience]:
        """Write what an extractor merged, in one commit; gives the merged entries."""
        return self._distilled(wire.CONSOLIDATE, distillation, shown, {"extractor_version": extractor_version})

    def _distilled(
        self,
        operation: Operation[wire.Distilled, wire.Written],
        distillation: Distillation,
        shown: Sequence[Experience],
        asked: Mapping[str, Any],
    ) -> list[Experience]:
        spans = [None if one.span is None else list(one.span) for one in distillation.parsed.operations]
        written = self._write(operation, distillation=distillation, spans=spans, shown=list(shown), **asked)
        self.refused.update(written.refused)
        return written.entries

    def keep_generation(self, generation: Generation) -> None:
        """Journal a generation that wrote no entry (a refinement), so that it can be trained on."""
        self._write(wire.KEEP_GENERATION, generation=generation)

    def note_retrievals(self, ids: Iterable[str]) -> None:
        """Count retrievals; the server journals them with the next commit or when it stops, so that reading costs no write."""
        if named := list(ids):
            self._write(wire.NOTE_RETRIEVALS, ids=named)

    def save_counters(self) -> None:
        """Journal the retrieval counts now."""
        self._write(wire.SAVE_COUNTERS)

    # Moving

    def export(self, file: str | os.PathLike[str]) -> int:
        """Write every entry with its provenance and counters to a JSON Lines file on this side; gives their number."""
        return bundle.write(Path(file), list(self.entries()), self.namespace, self._embedder.id)

    def import_entries(self, entries: Sequence[Experience], ref: str) -> int:
        """``import_`` of entries that are read already; the commit refers to ``ref``."""
        return self._write(wire.IMPORT, entries=list(entries), ref=ref)

    def fork(self, path: str | os.PathLike[str], *, keep_queue: bool = False) -> ExperienceBank:
        """Refuse: a journal is copied where it is."""
        self._refuse("fork")

    def rebuild(self) -> int:
        """Refuse: the index is the server's."""
        self._refuse("rebuild")

    def flush_index(self) -> None:
        """Refuse: the index is the server's."""
        self._refuse("flush_index")

    def _refuse(self, name: str) -> NoReturn:
        raise BankError(f"Expected a bank folder for {name}(), got the server at {self.url}; open the folder, or export() the entries")


def _plain(metadata: Mapping[str, Any] | None) -> Any:
    return dict(metadata) if isinstance(metadata, Mapping) else metadata


def _reopened(url: str, options: dict[str, Any]) -> RemoteBank:
    return RemoteBank(url, **options)
