"""Keep experience in a folder: a journal that is the truth, and an index made from it.

The file follows the data: open, read, judge by evidence, write, remove, merge, move, and at the
end the transaction that every write passes through.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from experiential.bank.consolidation import dedupe, forget
from experiential.bank.episode import Episode, EpisodeOptions
from experiential.bank.evidence import credit
from experiential.bank.evidence.outcomes import Outcomes
from experiential.bank.evidence.uplift import Evidence
from experiential.bank.index.embed import (
    CachedEmbedder,
    Embedder,
    EntryKey,
    UnknownEmbedder,
    Vector,
    embed_entries,
    embedder_behind,
    embedder_id,
    recorded_embedder,
    resolve_embedder,
)
from experiential.bank.index.follower import BATCH, IndexFollower
from experiential.bank.index.nearest import Layered, Nearest, Snapshot
from experiential.bank.index.site import CHROMA, chosen_site
from experiential.bank.index.store import IndexLostError
from experiential.bank.operations import approve, common_task, consolidate, distil, keys_to_embed
from experiential.bank.outcome import as_outcome
from experiential.bank.processes import Handle, Shared
from experiential.bank.protocol import Bank, Queue, TextEmbedder
from experiential.bank.records import (
    Asked,
    Changed,
    Commit,
    Difference,
    Duplicates,
    EpisodeSummary,
    Explanation,
    Judge,
    LogEntry,
    Policy,
    Shown,
    Standing,
    UsedIn,
)
from experiential.bank.search.where import Ranking, Scope
from experiential.bank.state import (
    BankView,
    Content,
    Draft,
    State,
    StateReader,
    content_of,
    unknown_entry,
)
from experiential.bank.storage.checksums import Damage
from experiential.bank.storage.group_commit import Group, GroupCommit
from experiential.bank.storage.in_place import Since, Unchained, fits, read_since, read_stamp
from experiential.bank.storage.journal import (
    JOURNAL_NAME,
    Journal,
    checked_folder,
    make_folder,
    new_folder,
    refuse_lost,
)
from experiential.bank.storage.lock import WriterLock
from experiential.bank.storage.mapped import Mapped, MappedEntries, mapped_file
from experiential.bank.storage.mapped import write as write_mapped
from experiential.bank.storage.mapped_history import MappedHistory
from experiential.bank.storage.tables import DistillationQueue, History, Live, LiveEntries, Receipts
from experiential.bank.text import TEXT_LIMIT, Gate, checked_text, clean
from experiential.bank.unmanaged import Unmanaged
from experiential.errors import BankError, ReadOnlyBankError
from experiential.sync import weakly
from experiential.types import (
    Distillation,
    Experience,
    Generation,
    Provenance,
    Statistics,
    Trajectory,
    Uplift,
    new_id,
)

if TYPE_CHECKING:
    from experiential.bank.http.served import ServedBank

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])
_FEW, _BEHIND = 500, 10
"""Changes since it was written, at least and as a part of all entries, that make a file old."""
_log = logging.getLogger(__name__)
_CLOSED = "Expected an open bank, got a closed one; open it again with ExperienceBank(path)"


def _once(write: M) -> M:
    """Let a write, repeated with the same ``key=``, return its first answer."""
    signature = inspect.signature(write)

    @wraps(write)
    def keyed(self: FolderBank, /, *args: Any, key: str | None = None, **kwargs: Any) -> Any:
        if key is None:
            return write(self, *args, **kwargs)
        from experiential.bank.http.served import checked_key
        from experiential.bank.http.wire import OPERATIONS

        checked_key(key)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        values = {name: value for name, value in bound.arguments.items() if name != "self"}
        del values["key"]
        operation = OPERATIONS[write.__name__.removesuffix("_entries")]
        body = operation.request(values)
        request = f"{operation.name} {body.model_dump_json()}".encode()
        served = self._answering()  # pyright: ignore[reportPrivateUsage]
        again = partial(served.repeated, operation.name, body=body)
        return served.once(key, request, partial(write, self, *args, **kwargs), again)

    return cast("M", keyed)


class FolderBank(StateReader, Bank, Shared):
    """Keep a bank in a folder: a journal that is the truth, and an index made from it.

    One process writes a folder at a time; any number may open it with ``read_only=True``, which
    works on a private copy and changes nothing. In a child process, a forked or pickled bank is a
    `RemoteBank`, which this process serves for as long as the bank is open here. All methods may be
    called from any thread, and searches never wait for writes. The methods are documented in
    `Bank`.

    Args:
        path: the folder, made on first use.
        namespace: as in `ExperienceBank`, and so are ``embedder`` and ``read_only``.
        store: where the index of a large bank is: "chroma" (in the folder), the address of a
            Chroma server, "faiss" (extra ``faiss``), "exact" (in memory only), an entry point or
            ``module:attribute``; None leaves it where it is, at first "chroma".

    Raises:
        BankLockedError: another writer has the folder.
        BankError: the folder cannot be used, or was made with another embedder.
    """

    RESIDENT_LIMIT: int | None = None
    """Entries up to which the exact index in memory answers; above it, the index store does. None
    is as many as the store was measured to pay from."""
    MAPPED_FROM: int = 2_000
    """Entries from which a writer leaves a file for readers to map; see `Mapped`."""

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
        self.redacted: Counter[str] = Counter()
        self.text_limit = TEXT_LIMIT
        self._served: ServedBank | None = None  # what answers other processes
        self._lock = threading.RLock()
        self._outcomes: Outcomes | None = None  # made when it is first asked for
        self._families: dict[tuple[str, int], tuple[Experience, tuple[Content, ...]]] = {}
        if read_only and not (self.path / JOURNAL_NAME).is_file():
            refuse_lost(self.path)
            raise BankError(
                f"Expected an existing bank in {str(self.path)!r} to open read-only, got none;"
                " write one first"
            )
        if not read_only:
            make_folder(self.path)
        lock = None if read_only else WriterLock(self.path, self.namespace)
        with ExitStack() as undo:  # what was opened is closed again when a later part fails
            if lock is not None:
                undo.callback(lock.release)
            mapped = self._mapped() if lock is None else None
            if lock is not None:
                self._journal = Journal.open(self.path, check=lock.is_first)
            elif mapped is None:
                self._journal = Journal.open_copy(self.path)
            else:  # what the file does not hold, the journal is opened for
                self._journal = Journal.open_copy(self.path, weakly(self._show_copy))
            undo.callback(self._journal.close)
            self._history = History(self._journal, namespace)
            self._ledger = credit.Ledger(self._journal, namespace)
            self._evidence = Evidence(self._journal, namespace)
            self._queue = DistillationQueue(self._journal, namespace)
            self.queue: Queue = self._queue
            self.receipts = Receipts(self._journal, namespace)
            self._writes = GroupCommit(self._journal, self._transaction)
            site = None if read_only else chosen_site(self.path, namespace, self._history, store)
            self._follower = None if site is None else IndexFollower(self._history, site)
            # A bank that nobody closes is shut when it is collected, without waiting for the index.
            self._finalizer = weakref.finalize(self, _shut, self._follower, self._journal, lock)
            undo.pop_all()
            undo.callback(self._finalizer)
            self._load(embedder, mapped)
            undo.pop_all()
        self._offer()

    def _mapped(self) -> tuple[Mapped, Since] | None:
        """Return the mapped entries and what was written since; None where they are not proved."""
        try:
            mapped = Mapped(mapped_file(self.path, self.namespace))
            if mapped.stamp.namespace != self.namespace:
                return None
            since = read_since(self.path, mapped.stamp, most=len(mapped))
            if since is None:
                return None
            lengths = {len(one.vector) for one in since.changed.values() if one is not None}
            if not lengths <= {mapped.dimension}:
                return None
            for id in since.changed:
                mapped.place(id)  # the blocks that are looked at to show the changes are whole
        except IndexLostError as error:
            _log.debug("%s; the journal is read instead", error)
            return None
        return mapped, since

    def _load(
        self, embedder: Embedder | str | None, mapped: tuple[Mapped, Since] | None = None
    ) -> None:
        meta = self._history.meta if mapped is None else mapped[0].stamp.facts.get
        recorded = meta("embedder")
        if recorded is not None and embedder is None:
            chosen = recorded_embedder(recorded, meta("embedder_name"))
        elif embedder is None and (mapped or not self._history.is_empty()):
            chosen = self._unnamed_embedder(mapped and mapped[0])
        else:
            chosen = resolve_embedder(embedder)
            if recorded not in (None, embedder_id(chosen)) and (
                mapped or not self._history.is_empty()
            ):
                raise BankError(
                    f"Expected the embedder {recorded!r} that this bank was made with, got"
                    f" {embedder_id(chosen)!r}; pass that one, or export the bank and import it"
                    " into a new one"
                )
            name = getattr(chosen, "recorded", embedder)
            if isinstance(name, str) and not self.read_only:  # found later without asking
                self._history.set_meta("embedder_name", name)
        id = embedder_id(chosen)
        if recorded != id and not self.read_only and not isinstance(chosen, UnknownEmbedder):
            self._history.set_meta("embedder", id)
        self.embedder: TextEmbedder = CachedEmbedder(chosen)
        self._dimension = int(meta("dimension") or 0)
        if mapped is not None:
            self._show_mapped(*mapped)
            return
        self.head = self._history.head()
        follower = self._follower
        if follower is None:  # a read-only bank never asks the store, which belongs to the writer
            entries = self._history.live(self.head)
            nearest = Nearest(entries, limit=len(entries))
        else:
            limit = follower.pays_from if self.RESIDENT_LIMIT is None else self.RESIDENT_LIMIT
            behind = self._history.last_seq() if follower.is_behind() else None
            most = limit if behind is None else math.inf  # beyond, the store has the vectors
            entries = self._written(most)
            nearest = Nearest(entries, limit=limit, replica=follower.searchable, behind=behind)
        self._state = State(entries.table(), self._ledger.statistics(), nearest)
        if not self.read_only:
            self._save_mapped()
        if follower is not None:
            follower.on_advance, follower.patience = weakly(self._settle), nearest.patience
            if follower.is_behind() or nearest.is_large:
                follower.wake()

    def _unnamed_embedder(self, mapped: Mapped | None) -> Embedder:
        """Return the embedder of a journal whose row with its name is damaged, by the vectors."""
        live = mapped.load() if mapped else self._history.live(self._history.head())
        some = [live.entries[row].experience for row in range(min(len(live), 8))]
        keys = [EntryKey(entry.text, entry.task) for entry in some]
        found = embedder_behind(dict(zip(keys, live.vectors, strict=False)))
        return found or UnknownEmbedder("unknown", "the row with its name is damaged")

    def _written(self, most_vectors: float) -> LiveEntries:
        """Return the live entries of a checked journal: from a mapped file of just this state.

        The journal is read instead where there is none, which takes twice as long.
        """
        with suppress(BankError):
            mapped = Mapped(mapped_file(self.path, self.namespace))
            if mapped.stamp == read_stamp(self._journal, self.namespace):
                return mapped.load(most_vectors=most_vectors)
        return self._history.live(self.head, most_vectors=most_vectors)

    def _show_mapped(self, mapped: Mapped, since: Since) -> None:
        live = {
            id: None if stored is None else Live(stored.experience, stored.origins)
            for id, stored in since.changed.items()
        }
        of_file = partial(Snapshot.of, mapped)
        nearest = Nearest.of(Layered(of_file, mapped.row, since.changed, mapped.place))
        self._state = State(MappedEntries(mapped, live), since.statistics, nearest)
        self.head, self._chain = since.head, since.chain
        past, unchained = MappedHistory(mapped, since), Unchained(self.path, since.chain)

        def answered(statement: str, arguments: tuple[Any, ...]) -> list[Any] | None:
            found = past.rows(statement, arguments)
            return unchained.rows(statement, arguments) if found is None else found

        self._journal.before_open = answered

    def _show_copy(self) -> None:
        """Go on with the copy of the journal just made, if it is damaged or of another state."""
        chain = self._journal.value("SELECT chain FROM commits ORDER BY id DESC LIMIT 1")
        if chain != self._chain or self._journal.damage:
            self._show_journal()
        else:
            self._state.statistics = self._ledger.statistics()

    def _show_journal(self) -> None:
        head = self._history.head()
        entries = self._history.live(head)
        nearest = Nearest(entries, limit=len(entries))
        self._state = State(entries.table(), self._ledger.statistics(), nearest)
        self.head = head

    def _save_mapped(self) -> None:
        """Write the entries for readers to map, where those on the disk are of long ago."""
        file = mapped_file(self.path, self.namespace)
        with self._lock:
            state, stamp = self._state, read_stamp(self._journal, self.namespace)
            count = len(state.entries)
            try:
                if stamp is None or count < self.MAPPED_FROM:
                    file.unlink(missing_ok=True)
                    return
                with suppress(IndexLostError):
                    known = Mapped(file).stamp
                    behind = stamp.seq - known.seq
                    if fits(self._journal, known) and behind <= max(_FEW, count // _BEHIND):
                        return
                entries = state.entries
                vectors = (self._vector(id, live) for id, live in state.entries.items())
                if state.nearest.is_large:  # the vectors are in the store and in the journal
                    live = self._history.live(self.head)
                    entries, vectors = live.table(), iter(live.vectors)
                gone = sorted(set(self._history.entry_ids()).difference(entries))
                numbers = {id: number for number, id in enumerate(chain(entries, gone))}
                past = self._history.past(numbers)
                write_mapped(file, stamp, entries, vectors, gone, past)
            except (OSError, BankError) as error:  # readers then read the journal
                _log.warning("%s could not be written: %s", file.name, error)

    def _vector(self, id: str, live: Live) -> Vector:
        found = self._state.nearest.vector(id)
        if found is None:  # of a proposal
            stored = self._history.stored(id, live.experience.version)
            assert stored is not None
            return stored.vector
        return found

    @property
    def damage(self) -> tuple[Damage, ...]:
        """Return the damaged rows of the journal that were left out when it was opened."""
        return tuple(self._journal.damage)

    def __repr__(self) -> str:
        return (
            f"ExperienceBank({str(self.path)!r}, namespace={self.namespace!r}, entries={len(self)},"
            f" head={self.head})"
        )

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        if self._finalizer.alive:
            try:
                if not self.read_only:
                    self.save_counters()
                    self._save_mapped()
            finally:
                if (held := self._finalizer.detach()) is not None:
                    _shut(*held[2], catch_up=True)

    def _handle(self) -> Handle:
        from experiential.bank.http.client import RemoteBank

        options = {"namespace": self.namespace, "read_only": self.read_only}
        return Handle(RemoteBank, options | {"info": self._answering().info()})

    def _answering(self) -> ServedBank:
        from experiential.bank.http.served import ServedBank

        self._served = self._served or ServedBank(self)
        return self._served

    # Episodes

    def episode(self, task: str, **options: Unpack[EpisodeOptions]) -> Episode:
        return Episode(self._unmanaged, checked_text(task, "task"), **options)

    @cached_property
    def _unmanaged(self) -> Unmanaged:
        return Unmanaged(self)

    # Reading

    def entries(self) -> Iterator[Experience]:
        return self._reading(super().entries)

    def get(self, id: str) -> Experience | None:
        return self._reading(partial(super().get, checked_text(id, "id")))

    def _reading(self, read: Callable[[], T]) -> T:
        """Return what is read of the state; of the journal's where that is lost."""
        try:
            return read()
        except IndexLostError:
            self._reside()  # from now on all entries are in memory
            return read()

    def version(self, id: str, version: int) -> Experience | None:
        stored = self._history.stored(id, version)
        return None if stored is None else self.read(stored.experience)

    def nearest(
        self, queries: Sequence[str], n: int, scopes: Sequence[Scope], words: bool = False
    ) -> list[Ranking]:
        if not self._finalizer.alive:
            raise BankError(_CLOSED)

        def search() -> list[Ranking]:
            state = self._state
            if words:
                state.nearest.index_words(lambda: state.entries)
            if not state.entries or not queries:
                return [[] for _ in queries]
            vectors, texts = self._embed(queries), queries if words else ()
            return state.nearest.search(vectors, n, lambda: state.entries, scopes, texts)

        return self._reading(search)

    def counters(self, experience: Experience) -> Statistics:
        return self._state.counted(experience.id) or Statistics()

    def commits(self) -> list[Commit]:
        return self._history.commits()

    def history(self, id: str | None = None) -> list[LogEntry]:
        found = self._history.log(id)
        if id is not None and not found:
            raise BankError(
                f"Expected the id of an entry that this bank ever had, got {id!r}; list them with"
                " bank.entries()"
            )
        return found

    def at(self, commit: int) -> BankView:
        return self._reading(partial(self._at, commit))

    def _at(self, commit: int) -> BankView:
        self._check_commit(commit)
        with self._lock:
            state = self._state
            statistics = dict(state.statistics)
            for id in list(state.retrieved):  # counters since opening are in memory only
                statistics[id] = state.counted(id) or Statistics()
            touched = self._history.touched(commit, self.head)
            others = {id: then for id, then, now in touched if then != now}
            known = state.entries
            back = [id for id, then in others.items() if then is not None and id not in known]
            has_places = isinstance(known, MappedEntries) or not self.read_only
            is_near = len(others) <= len(known) // 4 and (has_places or not back)
            wanted = [(id, then) for id, then in others.items() if then is not None]
            stored = self._history.stored_all(wanted if is_near else ())
            changes = dict.fromkeys(others) | {id: one for (id, _), one in stored}
            nearest = state.nearest.over(changes) if is_near else None
            if nearest is None:
                live = self._history.live(commit)
                made = partial(Nearest, live, limit=len(live))
                return BankView(commit, live.table(), statistics, self.embedder, made)
            lives = {
                id: None if one is None else Live(one.experience, one.origins)
                for id, one in changes.items()
            }
            if isinstance(known, MappedEntries):
                entries = known.over(lives)
            else:
                entries = {**known, **lives}
                ids = self._history.in_order(known, back)
                entries = {id: live for id in ids if (live := entries[id]) is not None}
            return BankView(commit, entries, statistics, self.embedder, lambda: nearest)

    def diff(self, a: int, b: int) -> Difference:
        for commit in (a, b):
            self._check_commit(commit)
        touched = self._history.touched(min(a, b), max(a, b))
        keys = [(id, one) for id, *both in touched for one in both if one is not None]
        known: dict[tuple[str, int | None], Experience] = {
            key: self.read(of.experience) for key, of in self._history.stored_all(keys)
        }
        versions = [(known.get((id, old)), known.get((id, new))) for id, old, new in touched]
        pairs = versions if a <= b else [(new, old) for old, new in versions]
        return Difference(
            added=tuple(new for old, new in pairs if old is None and new is not None),
            removed=tuple(old for old, new in pairs if new is None and old is not None),
            changed=tuple(
                Changed(old=old, new=new)
                for old, new in pairs
                if old is not None and new is not None and old.version != new.version
            ),
        )

    def ids(self) -> list[str]:
        """Return the ids of all entries there ever were, and of all recorded trajectories."""

        def ids() -> list[str]:
            entries = self._state.entries
            if not isinstance(entries, MappedEntries):
                return self._history.ids()
            return sorted(entries.ids().union(self._ledger.ids()))

        return self._reading(ids)

    def generation(self, id: str) -> Generation | None:
        return self._history.generation(id)

    def trajectory(self, id: str) -> Trajectory | None:
        return self._ledger.trajectory(id)

    def episodes(self) -> list[EpisodeSummary]:
        """Return every recorded episode without its turns, oldest first."""
        return self._ledger.summaries()

    def used_in(self, id: str) -> list[UsedIn]:
        """Return every use of an entry, at any of its versions, oldest first."""
        return self._ledger.used_in(checked_text(id, "id"))

    # Evidence

    def outcomes(self, id: str, version: int) -> list[int]:
        return self._ledger.outcomes(id, version)

    def lineage(self, id: str, version: int) -> list[tuple[str, int]]:
        return credit.lineage(
            id,
            version,
            lambda id, at: () if (one := self.version(id, at)) is None else one.provenance.parents,
        )

    def uplift(self, id: str, version: int | None = None) -> Uplift:
        if version is None:
            live = self.get(id)
            version = self._history.last_version(id) if live is None else live.version
        if self.version(id, version) is None:
            raise BankError(
                f"Expected an entry version that this bank knows, got {id!r} version {version};"
                " list them with bank.history()"
            )
        return self._uplift(id, version)

    def _uplift(self, id: str, version: int) -> Uplift:
        paired = self._evidence.uplift(id, version)
        if paired.groups or (known := self._family(id, version)) is None:
            return paired
        of = self._outcomes_so_far().standing(known[1], None)
        if of.difference is None:
            return paired
        found = {"groups": of.tasks, "mean": of.difference, "interval": of.interval}
        return paired.model_copy(update={**found, "baseline": "tasks"})

    def standings(self, asked: Sequence[Asked]) -> list[Standing]:
        outcomes, found = self._outcomes_so_far(), list[Standing]()
        for one in asked:
            entry, family = self._known_family(one.id, one.version)
            standing = outcomes.standing(
                family,
                one.relevance,
                said=entry.provenance.said,
                task=entry.task,
                age=max(0, self.head - (entry.provenance.commit or 0)),
                proposed=entry.proposed,
                query=one.query,
            )
            found.append(standing)
        return found

    def standings_near(
        self, query: str, found: Sequence[tuple[Experience, float]]
    ) -> list[Standing]:
        outcomes, known = self._outcomes_so_far(), self._families
        asked = [
            (
                (known.get((of.id, of.version)) or self._known_family(of.id, of.version))[1],
                relevance,
                of,
            )
            for of, relevance in found
        ]
        return outcomes.standings(query, asked)

    def _known_family(self, id: str, version: int) -> tuple[Experience, tuple[Content, ...]]:
        known = self._family(id, version)
        if known is None:
            raise BankError(
                f"Expected an entry version that this bank knows, got {id!r} version {version};"
                " list them with bank.history()"
            )
        return known

    def _family(self, id: str, version: int) -> tuple[Experience, tuple[Content, ...]] | None:
        """Return an entry version, and what it says and all that it was merged from said."""
        known = self._families.get((id, version))
        if known is None:
            live = self._reading(lambda: self._state.entries.get(id))
            if live is not None and live.experience.version == version:
                entry = live.experience
            elif (stored := self._history.stored(id, version)) is not None:
                entry = stored.experience
            else:
                return None
            family = {content_of(entry): None}
            if entry.provenance.parents:
                for ancestor in self.lineage(id, version)[1:]:
                    if (above := self._family(*ancestor)) is not None:
                        family[content_of(above[0])] = None
            known = self._families[id, version] = entry, tuple(family)
        return known

    def _outcomes_so_far(self) -> Outcomes:
        """Return the outcomes of all episodes; the first call reads the journal."""
        if self._outcomes is None:
            with self._lock:
                if self._outcomes is None:
                    outcomes = Outcomes()
                    for task, won, uses in self._ledger.episodes():
                        self._note(outcomes, task, won, uses)
                    self._outcomes = outcomes
        return self._outcomes

    def _note(
        self,
        outcomes: Outcomes,
        task: str,
        won: bool | None,
        uses: Sequence[credit.Seen],
        again: bool = False,
    ) -> None:
        """Add one episode; an entry that was used several times counts once."""
        shown: dict[Content, tuple[Content, float, int]] = {}
        for id, version, relevance in uses:
            if (known := self._family(id, version)) is not None:
                content = content_of(known[0])
                shown.setdefault(content, (content, relevance, known[0].provenance.said))
        task = clean(task).text
        outcomes.note(task, won, tuple(shown.values()) if uses else None, again=again)

    def why(self, trajectory: Trajectory | str) -> Explanation:
        known = self.trajectory(trajectory) if isinstance(trajectory, str) else trajectory
        if known is None:
            raise _unknown_trajectory(str(trajectory))
        shown: list[Shown] = []
        for use in known.uses:
            id, at = use.experience_id, use.experience_version
            entry = self.version(id, at)
            refined = self.generation(use.refinement) if use.refinement else None
            shown.append(
                Shown(
                    id=id,
                    version=at,
                    text=None if entry is None else entry.text,
                    refined=None if refined is None else refined.text,
                    statistics=Statistics() if entry is None else entry.statistics,
                    uplift=self._uplift(id, at),
                    **use.model_dump(include={"rank", "score", "propensity", "how", "turn"}),
                )
            )
        written = [self.version(*one) for one in self._history.written_from(known.id)]
        return Explanation(
            trajectory=known.id,
            shown=tuple(shown),
            written=tuple(entry for entry in written if entry is not None),
            **known.model_dump(include=Explanation.model_fields.keys() & Trajectory.model_fields),
        )

    # Writing

    @_once
    def add(
        self,
        text: str,
        *,
        task: str | None = None,
        kind: str = "lesson",
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Experience:
        return self.add_many([text], task=task, kind=kind, metadata=metadata)[0]

    @_once
    def add_many(
        self,
        texts: Iterable[str],
        *,
        task: str | None = None,
        kind: str = "lesson",
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> list[Experience]:
        gate = Gate(self.text_limit)
        entries = gate.new_entries(texts, task, kind, metadata)
        self._check_writable()
        if not entries:
            return []
        keys = [EntryKey(entry.text, entry.task) for entry in entries]
        vectors = embed_entries(self._embed, keys)
        pairs = [(entry, vectors[key]) for entry, key in zip(entries, keys, strict=True)]
        return self._commit(
            "human", "add", lambda draft: [draft.put(*pair) for pair in pairs], gate=gate
        )

    @_once
    def update(self, id: str, text: str, *, key: str | None = None) -> Experience:
        gate = Gate(self.text_limit)
        text = gate.text(text)
        self._check_writable()
        known = self.get(id)
        if known is None:
            raise unknown_entry(id)
        embedded, source = EntryKey(text, known.task), Provenance(cause="update")
        vector = embed_entries(self._embed, [embedded])[embedded]
        entry = self._commit(
            "human",
            "update",
            lambda draft: draft.revise(id, text, known.task, source, vector),
            id,
            gate,
        )
        return self.read(entry)

    @_once
    def approve(self, id: str, *, key: str | None = None) -> Experience:
        self._check_writable()
        checked_text(id, "id")
        return self.read(self._commit("human", "approve", partial(approve, id=id), id))

    @_once
    def remove(self, id: str, *, key: str | None = None) -> None:
        checked_text(id, "id")
        self._commit("human", "remove", lambda draft: draft.remove(id), id)

    @_once
    def rollback(self, commit: int, *, key: str | None = None) -> Commit:
        self._check_writable()
        self._check_commit(commit)
        with self._lock:
            before = self.head
            touched = [
                (id, None if wanted is None else self._history.stored(id, wanted))
                for id, wanted, now in self._history.touched(commit, before)
                if wanted != now
            ]
            gone = {id for id, _ in touched if id not in self._state.entries}
            with self._draft("human", "rollback", ref=str(commit)) as draft:
                for id, stored in touched:
                    if stored is None and id not in gone:
                        draft.remove(id)
                for id, stored in touched:
                    if stored is not None:
                        draft.point(id, stored)
            if gone:  # came back: in the order in which they would be read back
                entries = self._state.entries
                kept = (id for id in entries if id not in gone)
                back = [id for id in entries if id in gone]
                self._state.entries = {id: entries[id] for id in self._history.in_order(kept, back)}
            return self._history.commits(before)[-1]

    def record(self, trajectory: Trajectory) -> bool:
        self._check_writable()
        return self._writes.run(partial(self._submitted, trajectory, False, ""))

    def submit(self, trajectory: Trajectory, *, holder: str = "") -> bool:
        self._check_writable()
        return self._writes.run(partial(self._submitted, trajectory, True, holder))

    def submit_many(
        self, trajectories: Sequence[Trajectory], *, distil: bool = True, holder: str = ""
    ) -> list[bool | Exception]:
        self._check_writable()
        return self._writes.run_all(
            [partial(self._submitted, trajectory, distil, holder) for trajectory in trajectories]
        )

    def _submitted(self, trajectory: Trajectory, distil: bool, holder: str, group: Group) -> bool:
        distil = distil and trajectory.error is None  # a technical failure teaches nothing
        is_recorded = self._ledger.is_recorded(trajectory.id)
        if not self._queue.put(trajectory.id, holder) if distil else is_recorded:
            return False
        if not is_recorded:
            with group.draft("run", "record", trajectory.id) as draft:
                self._record(draft, self._ledger.compared(trajectory))
        return True

    def conclude(self, id: str, success: bool | None, *, judgement: str = "") -> bool:
        self._check_writable()
        gate, said = Gate(self.text_limit), as_outcome(success, "success to be")
        update = {"success": said, "judgement": gate.clean_field(judgement)}

        def write(group: Group) -> bool:
            known = self._ledger.trajectory(id)
            if known is None:
                raise _unknown_trajectory(id)
            if known.success is not None:
                return False
            with group.draft("run", "outcome", id, gate) as draft:
                self._record(draft, known.model_copy(update=update), again=True)
            return True

        return self._writes.run(write)

    def _record(self, draft: Draft, trajectory: Trajectory, *, again: bool = False) -> None:
        """Journal a trajectory, and count the uses in it that are evidence."""
        for use in self._ledger.record(trajectory, draft.commit, again=again):
            known = draft.statistics.get(use.experience_id) or Statistics()
            successes = known.successes + bool(trajectory.success)
            update = {"uses": known.uses + 1, "successes": successes}
            draft.count(use.experience_id, known.model_copy(update=update))
        draft.recorded = trajectory, again

    def apply(
        self,
        distillation: Distillation,
        *,
        trajectory: Trajectory,
        shown: Sequence[Experience],
        item: str | None = None,
        extractor_version: int | None = None,
        review: bool = False,
    ) -> list[Experience]:
        self._check_writable()
        gate = Gate(self.text_limit)
        distillation = gate.distillation(distillation)
        generation, task = distillation.generation, gate.clean_field(trajectory.task) or None
        vectors = embed_entries(self._embed, keys_to_embed(distillation, shown, task))
        source = Provenance(
            author="extractor",
            trajectory=trajectory.id,
            instance=trajectory.instance or None,
            generation=generation.id if generation else None,
            extractor_version=generation.policy_version if generation else extractor_version,
        )

        def write(group: Group) -> list[Experience]:
            if item is not None and not self._queue.finish(item):
                return []
            with group.draft("extractor", "trajectory", trajectory.id, gate) as draft:
                if generation is not None:
                    self._history.keep_generation(generation)
                return distil(draft, distillation, vectors, source, task, shown, review)

        return [self.read(entry) for entry in self._writes.run(write)]

    def consolidate(
        self,
        distillation: Distillation,
        *,
        shown: Sequence[Experience],
        extractor_version: int | None = None,
    ) -> list[Experience]:
        self._check_writable()
        gate = Gate(self.text_limit)
        distillation = gate.distillation(distillation)
        generation = distillation.generation
        vectors = embed_entries(self._embed, keys_to_embed(distillation, shown))
        source = Provenance(
            author="extractor",
            generation=generation.id if generation else None,
            extractor_version=generation.policy_version if generation else extractor_version,
        )

        def merge(draft: Draft) -> list[Experience]:
            if generation is not None:
                self._history.keep_generation(generation)
            return consolidate(draft, distillation, vectors, source, shown)

        return [self.read(entry) for entry in self._commit("extractor", "merge", merge, gate=gate)]

    def keep_generation(self, generation: Generation) -> None:
        self._check_writable()
        self._writes.run(lambda group: self._history.keep_generation(generation))

    def note_retrievals(self, ids: Iterable[str]) -> None:
        if self.read_only:
            raise ReadOnlyBankError(
                "Expected a writable bank to count retrievals in, got one opened with"
                " read_only=True"
            )
        state, ids = self._state, list(ids)
        with state.tally:
            state.retrieved.update(ids)
            state.unsaved.update(ids)

    def save_counters(self) -> None:
        with self._transaction():
            pass  # every transaction journals them

    # Removing and merging

    def prune(
        self,
        *,
        score: float | None = None,
        uplift_below: float | None = None,
        min_uses: int = 5,
        dry_run: bool = False,
        author: str = "human",
    ) -> list[Experience]:
        if not dry_run:
            self._check_writable(" for prune()", ", or pass dry_run=True")
        doomed = forget.prunable(
            list(self.entries()),
            self._uplift,
            score=score,
            uplift_below=uplift_below,
            min_uses=min_uses,
        )
        bounds = {"score": score, "uplift": uplift_below}
        given = [f"{name} < {bound:g}" for name, bound in bounds.items() if bound is not None]
        ref = ", ".join([*given, f"uses >= {min_uses}"])
        return doomed if dry_run else self._remove_all(doomed, author, "prune", ref)

    def evict(
        self,
        cap: int,
        policy: Policy = "utility",
        *,
        per_task: bool = False,
        seed: int = 0,
        dry_run: bool = False,
        author: str = "human",
    ) -> list[Experience]:
        if not dry_run:
            self._check_writable(" for evict()", ", or pass dry_run=True")
        draw = f"{seed}:{self.head}"
        tasks: dict[str | None, list[Experience]] = {}
        entries = list(self.entries())
        for entry in entries:
            tasks.setdefault(entry.task if per_task else None, []).append(entry)
        about = forget.about(entries) if policy == "subject" else {}
        doomed = [
            entry
            for group in (tasks or {None: []}).values()
            for entry in forget.evictable(
                group, cap, policy, draw, self._journal, self.namespace, about
            )
        ]
        ref = f"{policy} to {cap}" + " per task" * per_task
        return doomed if dry_run else self._remove_all(doomed, author, "evict", ref)

    def _remove_all(
        self, doomed: Sequence[Experience], author: str, cause: str, ref: str
    ) -> list[Experience]:
        if not doomed:
            return []
        with self._draft(author, cause, ref) as draft:
            unchanged = [entry for entry in doomed if draft.has(entry)]  # not rewritten meanwhile
            for entry in unchanged:
                draft.remove(entry.id)
            return unchanged

    def deduplicate(
        self,
        threshold: float = 0.95,
        judge: Judge | None = None,
        *,
        across_tasks: bool = False,
        among: Iterable[str] | None = None,
        dry_run: bool = False,
    ) -> list[Duplicates]:
        if not dry_run:
            self._check_writable(" for deduplicate()", ", or pass dry_run=True")
        entries = list(self.entries())
        found = dedupe.find(
            entries, self.embedder, threshold, judge, across_tasks=across_tasks, among=among
        )
        return found if dry_run else self.merge_duplicates(found, f"cosine >= {threshold:g}")

    def merge_duplicates(
        self, found: Sequence[Duplicates], ref: str = "groups given", *, author: str = "human"
    ) -> list[Duplicates]:
        self._check_writable(" for merge_duplicates()", "")
        if not found:
            return []
        lost = [
            EntryKey(group.survivor.text)
            for group in found
            if common_task((group.survivor, *group.merged)) != group.survivor.task
        ]
        vectors = embed_entries(self._embed, list(dict.fromkeys(lost)))
        with self._draft(author, "dedupe", ref) as draft:
            merge = partial(dedupe.merge, draft, self._state, self._history, vectors)
            return [merged for group in found if (merged := merge(group)) is not None]

    # Moving

    @_once
    def import_entries(
        self, entries: Sequence[Experience], ref: str, *, key: str | None = None
    ) -> int:
        self._check_writable()
        gate = Gate(self.text_limit)
        cleaned: list[Experience] = []
        for number, entry in enumerate(entries, start=1):
            try:
                # More repetitions are a claim, so is descent from an entry of this bank; so are
                # counters, which start anew.
                of = entry.provenance
                parents = [one for one in of.parents if not self._history.last_version(one[0])]
                own = of.model_copy(update={"said": 1, "parents": tuple(parents)})
                cleaned.append(gate.entry(entry.model_copy(update={"provenance": own})))
            except ValueError as error:
                place = f"entry {number} of {ref}"
                raise BankError(f"{error}: {place}; nothing was imported") from error
        if not cleaned:
            return 0
        keys = [EntryKey(entry.text, entry.task) for entry in cleaned]
        vectors, added = embed_entries(self._embed, keys), 0
        with self._draft("human", "import", ref, gate) as draft:
            for entry, embedded in zip(cleaned, keys, strict=True):
                if draft.twin((entry.task, entry.kind, entry.text)) is not None:
                    continue
                if self._history.last_version(entry.id):  # versions are never written twice
                    entry = entry.model_copy(update={"id": new_id()})
                draft.put(entry, vectors[embedded])
                added += 1
        return added

    def fork(self, path: str | os.PathLike[str], *, keep_queue: bool = False) -> FolderBank:
        """Return a writable copy in another folder; see ``ForkableBank.fork``."""
        folder = new_folder(path)
        if not self.read_only:
            self.save_counters()
        self._journal.backup(folder, as_new=True)
        embedder = self.embedder.wrapped
        embedder = None if isinstance(embedder, UnknownEmbedder) else embedder
        copy = FolderBank(folder, namespace=self.namespace, embedder=embedder, store=CHROMA)
        if not keep_queue:
            copy._queue.clear()
        return copy

    def backup(self, path: str | os.PathLike[str]) -> None:
        self._journal.backup(new_folder(path))

    def rebuild(self) -> int:
        """Build the index again from the journal; return the number of entries indexed."""
        self._check_writable()
        if self._follower is None:  # everything is in memory
            return len(self)
        self._reside()
        return self._follower.rebuild()

    def flush_index(self) -> None:
        """Wait until the index has caught up with the journal."""
        self._check_writable()
        if self._follower is not None:
            self._follower.flush()

    # The transaction that every write passes through

    def _commit(
        self,
        author: str,
        cause: str,
        work: Callable[[Draft], T],
        ref: str | None = None,
        gate: Gate | None = None,
    ) -> T:
        """Make one commit, in one transaction with those that other threads ask for meanwhile."""

        def write(group: Group) -> T:
            with group.draft(author, cause, ref, gate) as draft:
                return work(draft)

        self._check_writable()
        return self._writes.run(write)

    @contextmanager
    def _draft(
        self, author: str, cause: str, ref: str | None = None, gate: Gate | None = None
    ) -> Generator[Draft]:
        """Make one commit in a transaction of its own."""
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
            state = self._state
            with state.tally:
                ids, state.unsaved = state.unsaved, set()
            try:
                with self._journal.transaction():
                    counters = {id: known for id in ids if (known := state.counted(id)) is not None}
                    self._ledger.save(counters)
                    group = Group(state, self._journal, self._history, self._ledger)
                    yield group
            except BaseException:  # the next transaction saves these counters
                with state.tally:
                    state.unsaved |= ids
                raise
            # Readers see a commit only now, when it is durable.
            for draft in group.drafts:
                state.publish(draft.changes, draft.own_statistics)
                self.head = draft.commit
                self.refused.update(draft.refused)
                self.redacted.update(draft.redacted)
                if self._outcomes is not None and draft.recorded is not None:
                    ended, again = draft.recorded
                    if ended.error is None:
                        seen = credit.seen_in(ended)
                        self._note(self._outcomes, ended.task, ended.success, seen, again)
                if self._follower is not None:
                    self._follower.pending += len(draft.changes)
            if self._follower is not None and self._follower.pending >= BATCH:
                self._follower.wake()

    def _reside(self) -> None:
        """Search a large bank in memory until the index store holds the whole journal."""
        with self._lock:
            if self.read_only:
                self._show_journal()
            elif self._follower is not None and self._state.nearest.is_large:
                self._state.nearest.hold_all(
                    self._history.live(self.head), self._history.last_seq()
                )
                self._follower.wake(reopen=True)

    def _settle(self, seq: int) -> None:
        with self._lock:
            self._state.nearest.drop_indexed(seq)

    def _embed(self, texts: Sequence[str]) -> Vector:
        vectors = self.embedder(texts)
        if not self._dimension and not self.read_only:
            self._history.set_meta("dimension", str(vectors.shape[1]))
            self._dimension = vectors.shape[1]
        if self._dimension and vectors.shape[1] != self._dimension:
            raise BankError(
                f"Expected vectors of length {self._dimension}, got {vectors.shape[1]} from"
                f" {self.embedder.id!r}"
            )
        return vectors

    def _check_commit(self, commit: int) -> None:
        # `type` and not `isinstance`: users may pass anything, and True is not a commit
        if type(commit) is not int or not self._history.has_commit(commit):
            raise BankError(
                f"Expected a commit id of this bank (0 to {self.head}), got {commit!r}; list them"
                " with bank.commits()"
            )

    def _check_writable(self, what: str = "", hint: str = ", or bank.fork(path)") -> None:
        if self.read_only:
            raise ReadOnlyBankError(
                f"Expected a writable bank{what}, got one opened with read_only=True; open it"
                f" without{hint}"
            )
        if not self._finalizer.alive:
            raise BankError(_CLOSED)


def _unknown_trajectory(id: str) -> BankError:
    return BankError(
        f"Expected the id of a recorded trajectory, got {id!r}; bank.history() lists them as refs"
    )


def _shut(
    follower: IndexFollower | None,
    journal: Journal,
    lock: WriterLock | None,
    catch_up: bool = False,
) -> None:
    try:
        if follower is not None:
            follower.stop(catch_up=catch_up)
        journal.close()
    finally:
        if lock is not None:
            lock.release()
