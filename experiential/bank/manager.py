"""Schedule retrieval, distillation and merging, so that no rollout ever waits for them."""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, cast, overload

import numpy as np

from experiential.bank.breaker import is_over_budget
from experiential.bank.consolidation.consolidate import merge_group, recent_groups
from experiential.bank.consolidation.dedupe import Passes
from experiential.bank.distiller import Distiller
from experiential.bank.episode import Episode, EpisodeOptions
from experiential.bank.extractor import Extractor
from experiential.bank.folder import FolderBank
from experiential.bank.options import ManagerOptions, bank_settings
from experiential.bank.outcome import OutcomeJudge
from experiential.bank.processes import Handle, Line, Shared
from experiential.bank.protocol import Bank, is_bank
from experiential.bank.records import DeadLetter, Duplicates
from experiential.bank.search.searcher import CLOSED, Searcher
from experiential.bank.search.strategies import STRATEGIES
from experiential.bank.search.where import Filter
from experiential.bank.text import checked_text
from experiential.errors import (
    BackendError,
    BankError,
    ConfigError,
    ReadOnlyBankError,
)
from experiential.llm.rounds import Rounds
from experiential.plugins import resolve
from experiential.sync import EventLoopThread
from experiential.types import Answer, Distillation, Experience, Hit, Trajectory

P = ParamSpec("P")
T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_LONGEST_BACKOFF = 30.0
_POLL_SECONDS = 0.5
_REASON = 500  # characters
_OUTAGES = 8  # of the service that an item may meet while others are distilled


def _on_own_loop(
    method: Callable[Concatenate[ExperienceManager, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ExperienceManager, P], Coroutine[Any, Any, T]]:
    """Let a coroutine method be awaited on any event loop; it runs on that of the manager."""

    @wraps(method)
    async def call(self: ExperienceManager, *args: P.args, **kwargs: P.kwargs) -> T:
        loop, work = self.loop_thread().loop, method(self, *args, **kwargs)
        if asyncio.get_running_loop() is loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    return call


def _blocking(
    method: Callable[Concatenate[ExperienceManager, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ExperienceManager, P], T]:
    """Return the synchronous twin of a coroutine method, to be called from any thread."""

    @wraps(method)
    def call(self: ExperienceManager, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.loop_thread().run(method(self, *args, **kwargs))

    call.__name__ = method.__name__.removeprefix("a")
    return call


class ExperienceManager(Shared):
    """Run a bank: batched retrieval for actors, a durable queue before the extractor, merging.

    The synchronous methods may be called from any thread, their twins with an ``a`` in front
    awaited on any event loop. Close the manager before the bank. What the extractor fails at is
    counted in ``stats()``, retried, and in the end a dead letter; it never reaches a caller. While
    the service of the extractor is out, distillation pauses instead (see `CircuitBreaker`). In a
    child process, a forked or pickled manager is a `ManagerHandle`, whose calls this one carries
    out.

    >>> import tempfile
    >>> from experiential.bank.bank import ExperienceBank
    >>> bank = ExperienceBank(tempfile.mkdtemp(), embedder="hashing")
    >>> entry = bank.add("The red door needs the brass key.")
    >>> with ExperienceManager(bank) as manager:
    ...     [hit.experience.text for hit in manager.search("which key opens the red door?")]
    ['The red door needs the brass key.']
    >>> bank.close()

    Args:
        bank: where entries are read and written.
        extractor: what distils, refines and merges; None leaves what is submitted in the bank's
            queue, for a manager with one or ``experiential distil``.
        share_queue: whether an extractor here also distils what others submit to the bank, as it
            comes, and what is submitted here without one is queued for others. False, as in
            training and evaluation: an extractor distils what is submitted here or was queued
            before, and without one nothing is queued.
        on_distillation: called with trajectory, distillation and entries written, after each
            distillation applied; also an attribute.
        seed: of every random draw in retrieval and eviction.
        extractor_version: gives the version to write into provenance when a distillation carries no
            generation; the extractor's own by default.
        backoff: seconds before the first retry of a failed distillation, doubled for each further
            one; ten times as long is the first pause while the extractor's service is out.
        rounds: what the extractor asks. What is submitted is then distilled by ``drain`` only, and
            in the order of the queue, so that equal runs write equal banks.
        drafts: answers that the extractor is asked for about each episode. Of several, none is
            shown an entry, so that each adds entries of its own.
        options: fields of ``ManagerOptions``; ``retrieval`` may be a dict.

    Attributes:
        on_merge: called with the entries shown, the distillation and the entries written, after
            each chunk merged.
    """

    def __init__(
        self,
        bank: Bank,
        extractor: Extractor | None = None,
        *,
        share_queue: bool = True,
        on_distillation: Callable[[Trajectory, Distillation, list[Experience]], None] | None = None,
        seed: int = 0,
        extractor_version: Callable[[], int] | None = None,
        backoff: float = 0.5,
        rounds: Rounds | None = None,
        drafts: int = 1,
        **options: Any,
    ) -> None:
        if not is_bank(bank):  # users may pass a path
            raise ValueError(
                f"Expected bank to be an ExperienceBank, got {type(bank).__name__}; open one with"
                " ExperienceBank(path)"
            )
        if drafts < 1:
            raise ConfigError(f"Expected drafts of at least 1, got {drafts}")
        self.bank = bank
        self.settings = bank_settings(options)
        limit = self.settings.text_limit
        if "text_limit" in self.settings.model_fields_set and limit != bank.text_limit:
            if not isinstance(bank, FolderBank):
                raise BankError(
                    "Expected the limit of texts to be set where the bank is written, at the"
                    f" server of {bank!r}; got {limit} set here, leave it out"
                )
            bank.text_limit = limit
        resolve("strategies", self.settings.retrieval.strategy, STRATEGIES)
        self.on_merge: (
            Callable[[Sequence[Experience], Distillation, list[Experience]], None] | None
        ) = None
        self._merged = 0  # head at the start of the last pass of merging that had no failure
        self._closed = False
        self._searcher = Searcher(
            bank, self.settings.retrieval, seed, free_share=self.settings.free_share
        )
        self._passes = Passes(
            bank,
            self.settings.dedupe_threshold,
            across_tasks=self.settings.dedupe_across_tasks,
        )
        self._distiller = Distiller(
            bank,
            extractor,
            self.settings,
            share_queue=share_queue,
            on_distillation=on_distillation,
            seed=seed,
            extractor_version=extractor_version,
            backoff=backoff,
            rounds=rounds,
            drafts=drafts,
        )
        self._in_order = asyncio.Semaphore(1 if rounds else sys.maxsize)
        self._thread = EventLoopThread("experiential-manager")
        self._distiller.start(self._thread.loop)
        self._offer()

    @property
    def extractor(self) -> Extractor | None:
        """Return what distils; set None to have what is submitted from now on recorded only."""
        return self._distiller.extractor

    @extractor.setter
    def extractor(self, extractor: Extractor | None) -> None:
        self._distiller.extractor = extractor

    @property
    def on_distillation(
        self,
    ) -> Callable[[Trajectory, Distillation, list[Experience]], None] | None:
        """Return the hook that is called after each distillation applied; may be set."""
        return self._distiller.on_distillation

    @on_distillation.setter
    def on_distillation(
        self, hook: Callable[[Trajectory, Distillation, list[Experience]], None] | None
    ) -> None:
        self._distiller.on_distillation = hook

    def __enter__(self) -> ExperienceManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Episodes

    def episode(self, task: str, **options: Unpack[EpisodeOptions]) -> Episode:
        """Return an episode of an agent, to be used as ``with`` or ``async with`` block.

        Args:
            task: what is asked, in words: the query of retrieval, and the task of entries.
            options: see `Episode`.
        """
        return Episode(self, checked_text(task, "task"), **options)

    def plays_free(self, task: str) -> bool:
        """Draw whether the next episode of a task plays without the bank, as a baseline.

        A share of the episodes does (``free_share``): none while the bank is new, which is at a
        share of a tenth for its first ten commits and episodes, and none once outcomes have settled
        that what this manager found for the task helps (``Standing.settled``). The draws depend on
        the seed, the commit that the manager started at, and their order.

        Args:
            task: what is asked of the actor, in words.
        """
        return self._searcher.plays_free(task)

    # Retrieval

    @overload
    def search(
        self,
        query: str,
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        where: Filter | None = None,
    ) -> list[Hit]: ...

    @overload
    def search(
        self,
        query: list[str] | tuple[str, ...],
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        where: Filter | None = None,
    ) -> list[list[Hit]]: ...

    def search(
        self,
        query: str | list[str] | tuple[str, ...],
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        where: Filter | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """Return the hits of one query, or of each of several, by ``strategy``; counters advance.

        Args:
            query: what the actor faces, in words; blank text gets no hits.
            k: how many hits; the setting ``retrieval.k`` by default.
            exclude_instance: leave out entries made from this task instance.
            where: only entries whose kind, task and metadata are so (see ``Where``).
        """
        asked = self._searcher.requests(query, k, exclude_instance, where)
        rows = self._searcher.search(asked)
        return rows[0] if isinstance(query, str) else rows

    async def asearch(
        self,
        query: str | list[str] | tuple[str, ...],
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        where: Filter | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """Run ``search`` on any event loop."""
        asked = self._searcher.requests(query, k, exclude_instance, where)
        rows = await self._searcher.asearch(asked)
        return rows[0] if isinstance(query, str) else rows

    @_on_own_loop
    async def aask(
        self,
        query: str,
        *,
        k: int = 1,
        episode: str = "",
        turn: int = 0,
        exclude_instance: str | None = None,
        where: Filter | None = None,
    ) -> Answer:
        """Let the extractor fit the best hit to a question; without a hit the answer has no text.

        Args:
            query: the actor's question.
            k: hits to retrieve; the first is refined.
            episode: id of the asking episode, for credit.
            turn: turn of the asking episode.
            exclude_instance: leave out entries made from this task instance.
            where: only entries whose kind, task and metadata are so (see ``Where``).
        """
        asked = self._searcher.requests([query], k, exclude_instance, where)
        hits = (await self._searcher.asearch(asked))[0]
        if not hits:
            return Answer()
        text, generation = hits[0].experience.text, None
        if self.extractor is not None and self._distiller.breaker.error is None:
            try:
                text, generation = await asyncio.wait_for(
                    self.extractor.arefine(query, hits[0].experience), self.settings.distill_timeout
                )
            except Exception as error:  # noqa: BLE001  (the entry itself is the answer then)
                self._distiller.count_failure("refine", error)
        if generation is not None and not self.bank.read_only:
            await self._distiller.write(self.bank.keep_generation, generation)
        refinement = generation.id if generation else None
        use = hits[0].use("search_and_ask", episode=episode, turn=turn, refinement=refinement)
        return Answer(text=text, hit=hits[0], generation=generation, use=use)

    ask = _blocking(aask)

    # Distillation

    @_on_own_loop
    async def asubmit(
        self, trajectory: Trajectory, *, judge: OutcomeJudge | None = None, distil: bool = True
    ) -> str | None:
        """Record a finished trajectory and queue it for distillation, durably.

        Waits while too many wait for the extractor here. Returns the id of the queue item (that of
        the trajectory); None when nothing was queued: on a read-only bank, which also records
        nothing, without an extractor where the queue is not shared, for an episode that failed for
        a technical cause, and with ``distil=False``.

        Args:
            trajectory: the episode.
            judge: says its outcome, in the background and before it is distilled.
            distil: whether to make lessons of it; without, it is recorded only.
        """
        return await self._distiller.submit(trajectory, judge, distil=distil)

    submit = _blocking(asubmit)

    def dead_letters(self) -> list[DeadLetter]:
        """Return the trajectories whose distillation was given up, with the last reason."""
        return self.bank.queue.dead_letters()

    @_blocking
    async def requeue(self, id: str) -> None:
        """Try a dead letter again, with all its attempts.

        Raises:
            BankError: there is no such dead letter.
        """
        await self._distiller.requeue(id)

    def pause(self) -> None:
        """Start no further distillation; running ones go on."""
        self._thread.loop.call_soon_threadsafe(self._distiller.resumed.clear)

    def resume(self) -> None:
        """Start distillations again."""
        self._thread.loop.call_soon_threadsafe(self._distiller.resumed.set)

    @property
    def paused(self) -> bool:
        """Return whether ``pause`` holds distillation."""
        return self._distiller.paused

    @_on_own_loop
    async def adrain(self, timeout: float | None = None, *, leave: int = 0) -> None:
        """Wait until all submitted trajectories but ``leave`` are distilled or dead letters.

        Where the queue is shared, also those of others, except what another distiller is at.

        Raises:
            TimeoutError: it took longer than ``timeout`` seconds; the rest goes on.
            BudgetError: the budget of the extractor's backend is spent; the rest stays queued.
            BackendError: its service refuses the account, or has been out for 10 minutes; the rest
                stays queued, and distillation goes on when the service answers.
        """
        await self._distiller.drain(timeout, leave)

    drain = _blocking(adrain)

    # Merging

    @_on_own_loop
    async def amerge(self) -> int:
        """Run one pass of consolidation; return the number of merged entries written.

        The first pass of a manager looks at the whole bank, a later one at what was written since
        the last that had no failure.

        Raises:
            BudgetError: the budget of the extractor's backend is spent; what was merged stays.
        """
        extractor, failed = self._merger("merge"), False

        async def merge_chunk(shown: Sequence[Experience]) -> list[Experience]:
            nonlocal failed
            assert extractor is not None
            try:
                distillation = await asyncio.wait_for(
                    extractor.amerge(shown), self.settings.distill_timeout
                )
                await self._distiller.embed(distillation, shown)
                written = await self._distiller.write(
                    self.bank.consolidate,
                    distillation,
                    shown=shown,
                    extractor_version=self._distiller.version(),
                )
            except Exception as error:  # noqa: BLE001  (the next pass looks at these again)
                if is_over_budget(error):
                    raise
                self._distiller.count_failure("merge", error)
                failed = True
                return []
            self._distiller.tell("on_merge", self.on_merge, shown, distillation, written)
            return written

        if extractor is None:
            return 0
        head, size, written = self.bank.head, self.settings.merge_chunk, 0
        approved = (entry for entry in self.bank.entries() if not entry.proposed)
        groups = recent_groups(approved, self._merged, size)
        self._distiller.counts["merges"] += 1
        for group in groups:
            written += len(await merge_group(group, size, merge_chunk))
        if not failed:
            self._merged = head
        return written

    merge = _blocking(amerge)

    @_on_own_loop
    async def adeduplicate(self) -> int:
        """Run one pass of deduplication, judged by the extractor; return the number merged away.

        The first pass of a manager compares the whole bank; a later one what was written since the
        last that had no failure, within itself and then with older entries.
        ``bank.options.dedupe_threshold`` says from which cosine on the extractor is asked.

        Raises:
            ConfigError: the extractor has no ``ajudge``.
            BudgetError: the budget of its backend is spent; what was merged stays.
        """
        extractor = self._merger("deduplicate")
        if extractor is None:
            return 0
        ask = getattr(extractor, "ajudge", None)
        if ask is None:
            raise ConfigError(
                "Expected an extractor with ajudge(a, b) to deduplicate, got"
                f" {type(extractor).__name__}"
            )

        async def judge(older: Experience, newer: Experience) -> bool:
            async with self._distiller.slots:
                return await asyncio.wait_for(ask(older, newer), self.settings.distill_timeout)

        async def attempt(work: Awaitable[list[Duplicates]]) -> list[Duplicates] | None:
            try:
                async with self._in_order:
                    return await work
            except Exception as error:  # noqa: BLE001  (the next pass looks at these again)
                if is_over_budget(error):
                    raise
                self._distiller.count_failure("deduplicate", error)
                return None

        write = partial(self._distiller.write, self.bank.merge_duplicates, author="extractor")
        groups = await self._passes.make(judge, write, attempt)
        merged = sum(len(group.merged) for group in groups)
        self._distiller.counts["deduplicated"] += merged
        return merged

    deduplicate = _blocking(adeduplicate)

    def _merger(self, name: str) -> Extractor | None:
        """Return the extractor for a method that merges entries; refuse a read-only bank."""
        if self.bank.read_only:
            raise ReadOnlyBankError(
                f"Expected a writable bank to {name}, got one opened with read_only=True"
            )
        if self.settings.review:
            raise ConfigError(
                f"Expected review=False to {name}, got review=True: an extractor would replace what"
                " a person approved; use a manager without it"
            )
        return self.extractor

    # Watching

    def stats(self) -> dict[str, Any]:
        """Return counts of everything done and refused, and the latency of retrieval.

        ``queued`` and ``running`` are of this manager; ``waiting`` are all in the bank's queue,
        whoever distils them, and ``dead`` all that were given up. ``outage`` is the reason for
        which distillation pauses or has ended, and ``pauses`` counts its pauses. ``usage`` has the
        tokens and the cost of extractor, judge and embedder so far, as far as services report them.
        """
        counts, embedder = self._searcher.counts, self.bank.embedder
        usage = self._distiller.usage()
        if (spent := getattr(getattr(embedder, "wrapped", None), "spent", None)) is not None:
            usage["embedder"] = spent
        seconds = np.array(list(counts.seconds) or [0.0]) * 1000.0
        asked = embedder.hits + embedder.misses
        return {
            "entries": len(self.bank),
            "head": self.bank.head,
            **self._distiller.stats(),
            "usage": {role: one.model_dump() for role, one in usage.items()},
            "refused": dict(self._distiller.refused + self.bank.refused),
            "redacted": dict(self.bank.redacted),
            "searches": counts.queries,
            "retrievals": counts.retrievals,
            "abstentions": counts.abstentions,
            "search_timeouts": counts.timeouts,
            "mean_batch": counts.queries / counts.batches if counts.batches else 0.0,
            "search_p50_ms": float(np.percentile(seconds, 50)),
            "search_p99_ms": float(np.percentile(seconds, 99)),
            "cache_hit_rate": embedder.hits / asked if asked else 0.0,
        }

    def close(self, *, drain: float | None = 0.0) -> None:
        """Stop the workers and save the counters. Safe to call twice.

        The bank's queue keeps what is not distilled, for the next manager with an extractor; a
        warning says how many episodes these are.

        Args:
            drain: seconds to wait for the queue first; None neither waits nor warns, for a caller
                that comes back to the queue itself.
        """
        if self._closed or sys.is_finalizing():  # from a __del__, when the loop's thread is gone
            return
        try:
            self._distiller.stop_taking()
            if drain and not self.paused:
                self.drain(drain)
        except (TimeoutError, BackendError):
            pass  # the warning below says what is left
        finally:
            self._closed = True
            self._thread.run(self._stop())
            self._thread.close()
            self._passes.close()
            self._distiller.close()
            if not self.bank.read_only and not self.bank.closed:
                self.bank.save_counters()
        if drain is not None:
            self._distiller.warn_of_rest()

    async def _stop(self) -> None:
        self._searcher.close()
        # Again until all have ended: a wait_for whose work ends just then swallows the cancellation
        # (Python before 3.12).
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.1)

    # Inside

    @property
    def closed(self) -> bool:
        """Return whether ``close`` was called."""
        return self._closed

    def _handle(self) -> Handle:
        return Handle(ManagerHandle, {"bank": self.bank, "settings": self.settings})

    def loop_thread(self) -> EventLoopThread:
        """Return the thread and event loop of this manager.

        Raises:
            BankError: the manager is closed.
        """
        if self._closed:
            raise BankError(CLOSED)
        return self._thread


def _asks(method: Callable[Concatenate[ExperienceManager, P], T]) -> Callable[..., T]:
    """Return a method that has the manager of the other process carry out this one."""

    @wraps(method)
    def call(self: ManagerHandle, /, *args: Any, **kwargs: Any) -> T:
        return self.line.call(call.__name__, *args, **kwargs)

    return call


def _awaits(method: Callable[..., T]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return the coroutine twin of such a method, which waits in a thread."""

    @wraps(method)
    async def call(self: ManagerHandle, /, *args: Any, **kwargs: Any) -> T:
        return await asyncio.to_thread(method, self, *args, **kwargs)

    return call


class ManagerHandle:
    """Use the manager of the process that made this one: what a pickled or forked manager is here.

    Searches, the draws behind them, refinement and distillation happen there, for all processes
    together. Closing a handle leaves the manager open.

    Attributes:
        bank: a handle of the manager's bank.
        settings: those of the manager.
    """

    def __init__(self, line: Line, bank: Bank, settings: ManagerOptions) -> None:
        self.line = line
        self.bank = bank
        self.settings = settings

    def __enter__(self) -> ManagerHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    episode = cast("Callable[..., Episode]", ExperienceManager.episode)
    plays_free = _asks(ExperienceManager.plays_free)
    search = _asks(ExperienceManager.search)
    ask = _asks(ExperienceManager.ask)

    def submit(
        self, trajectory: Trajectory, *, judge: OutcomeJudge | None = None, distil: bool = True
    ) -> str | None:
        """Record and queue a trajectory; a judge that cannot travel leaves it to the extractor."""
        try:
            pickle.dumps(judge)
        except Exception as error:  # noqa: BLE001  (whatever the pickle of a model does)
            assert judge is not None
            trajectory, judge = trajectory.model_copy(update={"rubric": judge.rubric}), None
            _LOGGER.warning(
                "Episode %s is judged by the extractor of %s: its own judge cannot be pickled (%s)",
                trajectory.id,
                self.line,
                error,
            )
        return self.line.call("submit", trajectory, judge=judge, distil=distil)

    drain = _asks(ExperienceManager.drain)
    merge = _asks(ExperienceManager.merge)
    deduplicate = _asks(ExperienceManager.deduplicate)
    dead_letters = _asks(ExperienceManager.dead_letters)
    requeue = _asks(ExperienceManager.requeue)
    stats = _asks(ExperienceManager.stats)
    asearch, aask, asubmit = _awaits(search), _awaits(ask), _awaits(submit)
    adrain, amerge, adeduplicate = _awaits(drain), _awaits(merge), _awaits(deduplicate)

    def close(self, *, drain: float | None = None) -> None:
        """Close the sockets of this process; safe to call twice."""
        self.line.close()
