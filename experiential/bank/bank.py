"""The experience bank: durable, versioned, searchable text that an extractor writes and actors read."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from experiential.bank.checks import checked_folder, checked_text
from experiential.bank.evidence import credit
from experiential.bank.index.embed import (
    CachedEmbedder,
    Embedder,
    EntryKey,
    UnknownEmbedder,
    embed_entries,
    embedder_id,
    recorded_embedder,
    resolve_embedder,
)
from experiential.bank.index.follower import IndexFollower
from experiential.bank.index.nearest import Nearest
from experiential.bank.index.store import CHROMA, chosen_site
from experiential.bank.index.vectors import Scored, Vector
from experiential.bank.operations import Consolidator, Distiller, keys_to_embed, source_of
from experiential.bank.search.searchable import Searchable, scopes_of
from experiential.bank.search.where import Where
from experiential.bank.state import Draft, State, origins_of, unknown_entry
from experiential.bank.storage import bundle
from experiential.bank.storage.group_commit import Group, GroupCommit
from experiential.bank.storage.history import Commit, History, Stored
from experiential.bank.storage.journal import JOURNAL_NAME, Journal
from experiential.bank.storage.lock import WriterLock
from experiential.bank.storage.queue import DistillationQueue
from experiential.bank.storage.receipts import Receipts
from experiential.bank.text import TEXT_LIMIT, Gate
from experiential.bank.upkeep import Upkeep
from experiential.bank.view import BankView
from experiential.errors import BankError, ReadOnlyBankError
from experiential.sync import weakly
from experiential.types import (
    Distillation,
    Experience,
    Generation,
    Provenance,
    Statistics,
    Trajectory,
    new_id,
)

T = TypeVar("T")


class ExperienceBank(Searchable, Upkeep):
    """A folder of experience: a journal that is the truth, and an index made from it.

    A write is on the disk when its method returns. One process writes a folder at a time; any
    number may open it with ``read_only=True``, which works on a private copy and changes nothing.
    All methods may be called from any thread, and searches never wait for writes.

    >>> import tempfile
    >>> with ExperienceBank(tempfile.mkdtemp(), embedder="hashing") as bank:
    ...     entry = bank.add("The red door needs the brass key.", task="leave the house")
    ...     bank.search("which key opens the red door?")[0].experience.id == entry.id
    True

    Args:
        path: the bank's folder, made on first use.
        namespace: entries of different namespaces never meet; each has its own history.
        embedder: a callable, the name of one ("hashing", an entry point, ``module:attribute``), a
            sentence-transformers name or folder, or None: the one that the bank was made with, or
            the default model for a new bank.
        read_only: open a picture of the bank as it is now.
        store: where the index of a large bank is: "chroma" (in the bank's folder), the address of
            a Chroma server, "exact" (in memory only), an entry point or ``module:attribute``; None
            is where it was before, and at first "chroma".

    Raises:
        BankLockedError: another writer has the folder.
        BankError: the folder cannot be used, or was made with another embedder.
    """

    RESIDENT_LIMIT = 100_000
    """Entries up to which the exact index in memory answers; above it, the index store does."""
    text_limit = TEXT_LIMIT
    """Characters that the text of an entry may have; set it on a bank to change it there."""

    if not TYPE_CHECKING:  # for a type checker the constructor is the one below

        def __new__(cls, path: str | os.PathLike[str], **options: Any) -> ExperienceBank:
            """An address gives the bank that a server has there; all else is a folder."""
            if (
                cls is ExperienceBank
                and isinstance(path, str)
                and path.startswith(("http://", "https://"))
            ):
                from experiential.bank.http.remote import RemoteBank

                cls = RemoteBank
            return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        namespace: str = "default",
        embedder: Embedder | str | None = None,
        read_only: bool = False,
        store: str | None = None,
    ) -> None:
        self.path = checked_folder(path)
        self.namespace = checked_text(namespace, "namespace")
        self.read_only = read_only
        self.refused: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        lock = self._claim()
        with ExitStack() as undo:  # what was opened is closed again when a later part fails
            undo.callback(_release, lock)
            self._journal = Journal.open_copy(self.path) if read_only else Journal.open(self.path)
            undo.callback(self._journal.close)
            self._history = History(self._journal, namespace)
            self._ledger = credit.Ledger(self._journal, namespace)
            self.queue = DistillationQueue(self._journal, namespace)
            self.receipts = Receipts(self._journal, namespace)
            self._writes = GroupCommit(self._journal, self._transaction)
            site = None if read_only else chosen_site(self.path, namespace, self._history, store)
            self._follower = None if site is None else IndexFollower(self._history, site)
            self._finalizer = weakref.finalize(
                self, _shut, self._follower, self._journal, lock, False
            )
            undo.pop_all()
            undo.callback(self._finalizer)
            self._close_arguments = (self._follower, self._journal, lock, True)
            self._load(embedder)
            undo.pop_all()

    def _claim(self) -> WriterLock | None:
        if self.read_only:
            if not (self.path / JOURNAL_NAME).is_file():
                raise BankError(
                    f"Expected an existing bank in {str(self.path)!r} to open read-only, got none;"
                    " write one first"
                )
            return None
        self.path.mkdir(parents=True, exist_ok=True)
        return WriterLock(self.path, self.namespace)

    def _load(self, embedder: Embedder | str | None) -> None:
        self._embedder = CachedEmbedder(self._chosen_embedder(embedder))
        self._dimension = int(self._history.meta("dimension") or 0)
        self._head = self._history.head()
        entries = self._history.live(self._head)
        self._state = State(entries, self._ledger.statistics(), self._searcher(entries))
        if self._follower is not None:
            self._follower.on_advance, self._follower.patience = (
                weakly(self._settle),
                self._state.nearest.patience,
            )
            if self._follower.is_behind() or self._state.nearest.is_large:
                self._follower.wake()

    def _searcher(self, entries: Sequence[Stored]) -> Nearest:
        follower = self._follower
        if follower is None:
            return Nearest(entries, limit=len(entries))
        behind = self._history.last_seq() if follower.is_behind() else None
        return Nearest(
            entries,
            limit=self.RESIDENT_LIMIT,
            replica=follower.searchable,
            lost=weakly(self._reside),
            behind=behind,
        )

    def _chosen_embedder(self, embedder: Embedder | str | None) -> Embedder:
        recorded = self._history.meta("embedder")
        if recorded is not None and embedder is None:
            return recorded_embedder(recorded, self._history.meta("embedder_name"))
        chosen = resolve_embedder(embedder)
        if recorded not in (None, embedder_id(chosen)) and not self._history.is_empty():
            raise BankError(
                f"Expected the embedder {recorded!r} that this bank was made with, got"
                f" {embedder_id(chosen)!r}; pass that one, or export the bank and import it into a"
                " new one"
            )
        if recorded != embedder_id(chosen) and not self.read_only:
            self._history.set_meta("embedder", embedder_id(chosen))
        if isinstance(embedder, str) and not self.read_only:
            self._history.set_meta("embedder_name", embedder)  # so that it is found without asking
        return chosen

    def __enter__(self) -> ExperienceBank:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._state.entries)

    def __iter__(self) -> Iterator[Experience]:
        return self.entries()

    def __repr__(self) -> str:
        return (
            f"ExperienceBank({str(self.path)!r}, namespace={self.namespace!r}, entries={len(self)},"
            f" head={self.head})"
        )

    @property
    def head(self) -> int:
        """The id of the last commit; 0 for a bank never written."""
        return self._head

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._finalizer.alive

    @property
    def embedder(self) -> CachedEmbedder:
        """What turns texts into vectors here, with its cache."""
        return self._embedder

    @cached_property
    def redacted(self) -> Counter[str]:
        """Secrets taken out of what came in to be written since opening, by kind."""
        return Counter()

    def close(self) -> None:
        """Save counters, let the index catch up, give the folder back; safe to call twice."""
        if self._finalizer.alive and os.getpid() == self._pid:
            try:
                if not self.read_only:
                    self.save_counters()
            finally:
                self._finalizer.detach()
                _shut(*self._close_arguments)

    # Reading

    def get(self, id: str) -> Experience | None:
        """The entry with this id as it stands now, or None."""
        live = self._state.entries.get(checked_text(id, "id"))
        return None if live is None else self._state.read(live.experience)

    def entries(self) -> Iterator[Experience]:
        """Every entry as it stands now, oldest first."""
        state = self._state
        return (state.read(live.experience) for live in list(state.entries.values()))

    def version(self, id: str, version: int) -> Experience | None:
        """One version of one entry, whether it stands now or not; None when there never was one."""
        stored = self._history.stored(id, version)
        return None if stored is None else self._state.read(stored.experience)

    def nearest(
        self,
        queries: Sequence[str],
        n: int,
        exclude: Sequence[str | None],
        where: Sequence[Where | None] = (),
        words: bool = False,
    ) -> list[list[Scored[Experience]]]:
        """The ``n`` nearest entries of each query, with ``words`` those its words find too; see ``Searchable.nearest``."""
        state, scopes = self._state, scopes_of(queries, exclude, where)
        if words:
            state.nearest.index_words(lambda: state.entries)
        if not state.entries or not queries:
            self._journal_must_be_open()
            return [[] for _ in queries]
        return state.nearest.search(
            self._embed(queries), n, lambda: state.entries, scopes, queries if words else ()
        )

    def read(self, experience: Experience) -> Experience:
        """The same version with its counters as they are now."""
        return self._state.read(experience)

    def counters(self, experience: Experience) -> Statistics:
        """The counters of an entry that ``nearest`` gave, as they are now."""
        return self._state.counted(experience.id) or Statistics()

    def commits(self) -> list[Commit]:
        """Every commit, oldest first."""
        return self._history.commits()

    def at(self, commit: int) -> BankView:
        """The bank as it stood after one commit; 0 is before the first."""
        self._check_commit(commit)
        statistics = {
            live.experience.id: self.read(live.experience).statistics
            for live in list(self._state.entries.values())
        }
        return BankView(
            commit,
            self._history.live(commit),
            {**self._state.statistics, **statistics},
            self._embedder,
        )

    def snapshot(self) -> BankView:
        """The bank as it stands now, fixed."""
        return self.at(self.head)

    def generation(self, id: str) -> Generation | None:
        """A journalled generation with its token ids and log-probabilities, or None."""
        return self._history.generation(id)

    def trajectory(self, id: str) -> Trajectory | None:
        """A recorded trajectory, or None."""
        return self._ledger.trajectory(id)

    def outcomes(self, id: str, version: int) -> list[int]:
        """1 or 0 for every recorded use of one entry version, oldest first."""
        return self._ledger.outcomes(id, version)

    def lineage(self, id: str, version: int) -> list[tuple[str, int]]:
        """Every (id, version) that earns the outcome of a use of this version: itself and all it was merged from."""
        return credit.lineage(id, version, self._parents)

    def _parents(self, id: str, version: int) -> tuple[tuple[str, int], ...]:
        experience = self.version(id, version)
        return () if experience is None else experience.provenance.parents

    # Writing

    def add(
        self,
        text: str,
        *,
        task: str | None = None,
        kind: str = "lesson",
        metadata: Mapping[str, Any] | None = None,
    ) -> Experience:
        """Write a new entry; it is durable when this returns."""
        return self.add_many([text], task=task, kind=kind, metadata=metadata)[0]

    def add_many(
        self,
        texts: Iterable[str],
        *,
        task: str | None = None,
        kind: str = "lesson",
        metadata: Mapping[str, Any] | None = None,
    ) -> list[Experience]:
        """Write several entries in one commit."""
        gate = Gate(self.text_limit)
        entries = gate.new_entries(texts, task, kind, metadata)
        self._check_writable()
        if not entries:
            return []
        vectors = self._embed_entries([EntryKey(entry.text, entry.task) for entry in entries])
        pairs = list(zip(entries, vectors, strict=True))
        return self._commit(
            "human",
            "add",
            lambda draft: [draft.put(entry, vector, frozenset()) for entry, vector in pairs],
            gate=gate,
        )

    def update(self, id: str, text: str) -> Experience:
        """Write the next version of an entry; the old one stays in its history."""
        gate = Gate(self.text_limit)
        text = gate.text(text)
        self._check_writable()
        known = self.get(id)
        if known is None:
            raise unknown_entry(id)
        vector = self._embed_entries([EntryKey(text, known.task)])[0]
        source = Provenance(cause="update")
        return self.read(
            self._commit(
                "human", "update", lambda draft: draft.revise(id, text, source, vector), id, gate
            )
        )

    def remove(self, id: str) -> None:
        """Take an entry out; ``at`` and ``rollback`` still know it."""
        checked_text(id, "id")
        self._commit("human", "remove", lambda draft: draft.remove(id), id)

    def rollback(self, commit: int) -> Commit:
        """Let the bank stand as it stood after ``commit``, by a new commit; nothing is erased, counters stay."""
        self._check_writable()
        self._check_commit(commit)
        with self._lock:
            wanted = {stored.experience.id: stored for stored in self._history.live(commit)}
            with self._draft("human", "rollback", ref=str(commit)) as draft:
                for id in [id for id in self._state.entries if id not in wanted]:
                    draft.remove(id)
                for id, stored in wanted.items():
                    live = draft.live(id)
                    if live is None or live.experience.version != stored.experience.version:
                        draft.restore(stored)
            self._state.arrange(wanted)
            return self.commits()[-1]

    def record(self, trajectory: Trajectory) -> bool:
        """Journal the outcome and the uses of a trajectory and update counters; False when it was recorded before."""
        self._check_writable()
        return self._writes.run(partial(self._submitted, trajectory, False))

    def submit(self, trajectory: Trajectory) -> bool:
        """Record a trajectory and queue it for distillation in one commit; False when it was queued before."""
        self._check_writable()
        return self._writes.run(partial(self._submitted, trajectory, True))

    def submit_many(
        self, trajectories: Sequence[Trajectory], *, distil: bool = True
    ) -> list[bool | Exception]:
        """``submit`` each, or ``record`` it when not ``distil``, all in one transaction; gives for each what it gave or raised."""
        self._check_writable()
        return self._writes.run_all(
            [partial(self._submitted, trajectory, distil) for trajectory in trajectories]
        )

    def _submitted(self, trajectory: Trajectory, distil: bool, group: Group) -> bool:
        is_recorded = self._ledger.is_recorded(trajectory.id)
        if self.queue.state(trajectory.id) is not None if distil else is_recorded:
            return False
        with group.draft("run", "record", trajectory.id) as draft:
            if not is_recorded:
                self._record(draft, trajectory)
            return not distil or self.queue.put(trajectory.id)

    def _record(self, draft: Draft, trajectory: Trajectory) -> None:
        self._ledger.record(trajectory, draft.commit)
        for use in credit.counted_uses(trajectory):
            draft.credit(use.experience_id, trajectory.success)

    def apply(
        self,
        distillation: Distillation,
        *,
        trajectory: Trajectory,
        shown: Sequence[Experience],
        item: str | None = None,
        extractor_version: int | None = None,
    ) -> list[Experience]:
        """Write what an extractor distilled from a trajectory, in one commit; gives the entries written.

        Args:
            distillation: the operations and the generation that asked for them.
            trajectory: what was distilled.
            shown: the entries that ``Update`` counts, from 1. One out of range or gone is refused
                and counted in ``refused``.
            item: the queue item that this finishes, in the same transaction; when it is finished
                already, nothing is written.
            extractor_version: recorded when the distillation carries no generation.
        """
        self._check_writable()
        gate = Gate(self.text_limit)
        distillation, task = gate.distillation(distillation), gate.task(trajectory.task)
        vectors = self._vectors(keys_to_embed(distillation, shown, task))
        source = source_of(distillation, trajectory, extractor_version)

        def write(group: Group) -> list[Experience]:
            if item is not None and not self.queue.finish(item):
                return []
            with group.draft("extractor", "trajectory", trajectory.id, gate) as draft:
                self._keep(distillation.generation)
                return Distiller(draft, vectors, source, task, shown).apply(distillation)

        return [self.read(entry) for entry in self._writes.run(write)]

    def consolidate(
        self,
        distillation: Distillation,
        *,
        shown: Sequence[Experience],
        extractor_version: int | None = None,
    ) -> list[Experience]:
        """Write what an extractor merged, in one commit; gives the merged entries.

        An entry that changed since it was shown keeps its change: only the operations that name it
            are refused.
        """
        self._check_writable()
        gate = Gate(self.text_limit)
        distillation = gate.distillation(distillation)
        vectors = self._vectors(keys_to_embed(distillation, shown))
        source = source_of(distillation, None, extractor_version)

        def merge(draft: Draft) -> list[Experience]:
            self._keep(distillation.generation)
            return Consolidator(draft, vectors, source, shown).apply(distillation)

        return [self.read(entry) for entry in self._commit("extractor", "merge", merge, gate=gate)]

    def keep_generation(self, generation: Generation) -> None:
        """Journal a generation that wrote no entry (a refinement), so that it can be trained on."""
        self._check_writable()
        self._writes.run(lambda group: self._keep(generation))

    def _keep(self, generation: Generation | None) -> None:
        if generation is not None:
            self._history.keep_generation(generation)

    def note_retrievals(self, ids: Iterable[str]) -> None:
        """Count retrievals; they are journalled with the next commit or at ``close``, so that reading costs no write."""
        if self.read_only:
            raise ReadOnlyBankError(
                "Expected a writable bank to count retrievals in, got one opened with"
                " read_only=True"
            )
        self._state.note(ids)

    def save_counters(self) -> None:
        """Journal the retrieval counts now."""
        with self._lock, self._state.unsaved() as counters, self._journal.transaction():
            self._ledger.save(counters)

    # Moving

    def export(self, file: str | os.PathLike[str]) -> int:
        """Write every entry with its provenance and counters to a file, Markdown if its name ends in .md; gives their number."""
        return bundle.write(Path(file), list(self.entries()), self.namespace, self._embedder.id)

    def import_(self, file: str | os.PathLike[str], *, edited: bool = False) -> int:
        """Add the entries of an exported file in one commit, except those that say what a live entry says; gives the number added.

        A file that differs from its hash is refused, unless ``edited`` says that it was changed on
        purpose.
        """
        return self.import_entries(bundle.read(Path(file), edited=edited), Path(file).name)

    def import_entries(self, entries: Sequence[Experience], ref: str) -> int:
        """``import_`` of entries that are read already; the commit refers to ``ref``."""
        self._check_writable()
        gate = Gate(self.text_limit)
        entries = gate.imported(entries, ref)
        if not entries:
            return 0
        vectors = self._embed_entries([EntryKey(entry.text, entry.task) for entry in entries])
        with self._draft("human", "import", ref=ref, gate=gate) as draft:
            return sum(
                self._import(draft, entry, vector)
                for entry, vector in zip(entries, vectors, strict=True)
            )

    def _import(self, draft: Draft, entry: Experience, vector: Vector) -> bool:
        if draft.twin((entry.task, entry.kind, entry.text)) is not None:
            return False
        if self._history.last_version(entry.id):
            entry = entry.model_copy(update={"id": new_id()})
        draft.put(entry, vector, origins_of(entry.provenance))
        draft.start_from(entry.id, entry.statistics)
        return True

    def fork(self, path: str | os.PathLike[str], *, keep_queue: bool = False) -> ExperienceBank:
        """A writable copy in another folder, with all history; its distillation queue is empty unless ``keep_queue``."""
        folder = checked_folder(path)
        if (folder / JOURNAL_NAME).exists():
            raise BankError(
                f"Expected a folder without a bank to fork into, got {str(folder)!r}; choose"
                " another or remove it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if not self.read_only:
            self.save_counters()
        self._journal.backup(folder)
        embedder = self._embedder.wrapped
        embedder = None if isinstance(embedder, UnknownEmbedder) else embedder
        copy = ExperienceBank(folder, namespace=self.namespace, embedder=embedder, store=CHROMA)
        if not keep_queue:
            copy.queue.clear()
        return copy

    def rebuild(self) -> int:
        """Make the index again from the journal; return the number of entries indexed."""
        self._check_writable()
        if self._follower is None:  # all is in memory
            return len(self)
        self._reside()
        return self._follower.rebuild()

    def flush_index(self) -> None:
        """Wait until the index has caught up with the journal."""
        self._check_writable()
        if self._follower is not None:
            self._follower.flush()

    # Inside

    def _commit(
        self,
        author: str,
        cause: str,
        work: Callable[[Draft], T],
        ref: str | None = None,
        gate: Gate | None = None,
    ) -> T:
        """One commit, in one transaction with those of other threads that come at the same moment."""

        def write(group: Group) -> T:
            with group.draft(author, cause, ref, gate) as draft:
                return work(draft)

        self._check_writable()
        return self._writes.run(write)

    @contextmanager
    def _draft(
        self, author: str, cause: str, ref: str | None = None, gate: Gate | None = None
    ) -> Generator[Draft]:
        """One commit in a transaction of its own."""
        self._check_writable()
        with (
            self._transaction() as group,
            group.member(),
            group.draft(author, cause, ref, gate) as draft,
        ):
            yield draft

    @contextmanager
    def _transaction(self) -> Generator[Group]:
        with self._lock:
            with self._state.unsaved() as counters, self._journal.transaction():
                self._ledger.save(counters)
                group = Group(self._state, self._journal, self._history, self._ledger)
                yield group
            for draft in group.drafts:
                self._show(draft)

    def _show(self, draft: Draft) -> None:
        self._state.publish(draft.changes, draft.statistics)
        self._head = draft.commit
        self.refused.update(draft.refused)
        self.redacted.update(draft.redacted)
        if self._follower is not None:
            self._follower.note(len(draft.changes))

    def _reside(self) -> None:
        """Search a large bank in memory, until the store holds all of the journal."""
        with self._lock:
            if self._follower is not None and self._state.nearest.is_large:
                self._state.nearest.hold_all(
                    self._history.live(self._head), self._history.last_seq()
                )
                self._follower.lose()

    def _settle(self, seq: int) -> None:
        with self._lock:
            self._state.nearest.drop_indexed(seq)

    def _vectors(self, keys: Sequence[EntryKey]) -> dict[EntryKey, Vector]:
        return dict(zip(keys, self._embed_entries(keys), strict=True)) if keys else {}

    def _embed_entries(self, keys: Sequence[EntryKey]) -> Vector:
        return embed_entries(self._embed, keys)

    def _embed(self, texts: Sequence[str]) -> Vector:
        self._journal_must_be_open()
        vectors = self._embedder(texts)
        if not self._dimension and not self.read_only:
            self._history.set_meta("dimension", str(vectors.shape[1]))
            self._dimension = vectors.shape[1]
        if self._dimension and vectors.shape[1] != self._dimension:
            raise BankError(
                f"Expected vectors of length {self._dimension}, got {vectors.shape[1]} from"
                f" {self._embedder.id!r}"
            )
        return vectors

    def _check_commit(self, commit: int) -> None:
        # `type` and not `isinstance`: users may pass anything, and True is not a commit
        if type(commit) is not int or not self._history.has_commit(commit):
            raise BankError(
                f"Expected a commit id of this bank (0 to {self.head}), got {commit!r}; list them"
                " with bank.commits()"
            )

    def _check_writable(self) -> None:
        if self.read_only:
            raise ReadOnlyBankError(
                "Expected a writable bank, got one opened with read_only=True; open it without, or"
                " bank.fork(path)"
            )
        self._journal_must_be_open()
        if os.getpid() != self._pid:
            raise BankError(
                "Expected the process that opened the bank, got a fork of it; open the bank after"
                " forking, in one process only"
            )

    def _journal_must_be_open(self) -> None:
        if self.closed:
            raise BankError(
                "Expected an open bank, got a closed one; open it again with ExperienceBank(path)"
            )


def _shut(
    follower: IndexFollower | None, journal: Journal, lock: WriterLock | None, catch_up: bool
) -> None:
    try:
        if follower is not None:
            follower.stop(catch_up=catch_up)
        journal.close()
    finally:
        _release(lock)


def _release(lock: WriterLock | None) -> None:
    if lock is not None:
        lock.release()
