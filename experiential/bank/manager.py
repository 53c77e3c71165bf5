"""Schedule retrieval, distillation and merging, so that no rollout ever waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import numpy as np

from experiential.bank.consolidation.consolidate import merge_group, recent_groups
from experiential.bank.consolidation.dedupe import Passes
from experiential.bank.evidence.trust import Episodes, Probation
from experiential.bank.extractor import Extractor
from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import EntryKey, embed_entries
from experiential.bank.operations import keys_to_embed
from experiential.bank.options import bank_settings
from experiential.bank.protocol import Bank, is_bank
from experiential.bank.records import DeadLetter, Duplicates
from experiential.bank.search.searcher import CLOSED, Searcher
from experiential.bank.search.strategies import STRATEGIES
from experiential.bank.search.where import Filter
from experiential.errors import BankError, ConfigError, ReadOnlyBankError
from experiential.plugins import resolve
from experiential.sync import Batcher, EventLoopThread
from experiential.types import Answer, Distillation, Experience, Hit, Trajectory

P = ParamSpec("P")
T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_LONGEST_BACKOFF = 30.0
_REASON = 500  # characters


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


class ExperienceManager:
    """Run a bank: batched retrieval for actors, a durable queue before the extractor, merging.

    The synchronous methods may be called from any thread, their twins with an ``a`` in front
    awaited on any event loop. Close the manager before the bank. What the extractor fails at is
    counted in ``stats()``, retried, and in the end a dead letter; it never reaches a caller.

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
        extractor: what distils, refines and merges; None only records what is submitted.
        seed: of every random draw in retrieval and eviction.
        extractor_version: gives the version to write into provenance when a distillation carries no
            generation; the extractor's own by default.
        backoff: seconds before the first retry of a failed distillation, doubled for each further
            one.
        options: fields of ``ManagerOptions``; ``retrieval`` may be a dict.

    Attributes:
        on_distillation: called with trajectory, distillation and entries written, after each
            distillation applied.
        on_merge: called with the entries shown, the distillation and the entries written, after
            each chunk merged.
    """

    def __init__(
        self,
        bank: Bank,
        extractor: Extractor | None = None,
        *,
        seed: int = 0,
        extractor_version: Callable[[], int] | None = None,
        backoff: float = 0.5,
        **options: Any,
    ) -> None:
        if not is_bank(bank):  # users may pass a path
            raise ValueError(
                f"Expected bank to be an ExperienceBank, got {type(bank).__name__}; open one with"
                " ExperienceBank(path)"
            )
        self.bank = bank
        self.extractor = extractor
        self.settings = bank_settings(options)
        if "text_limit" in options and (limit := self.settings.text_limit) != bank.text_limit:
            if not isinstance(bank, FolderBank):
                raise BankError(
                    "Expected the limit of texts to be set where the bank is written, at the"
                    f" server of {bank!r}; got {limit} set here, leave it out"
                )
            bank.text_limit = limit
        resolve("strategies", self.settings.retrieval.strategy, STRATEGIES)
        self.on_distillation: (
            Callable[[Trajectory, Distillation, list[Experience]], None] | None
        ) = None
        self.on_merge: (
            Callable[[Sequence[Experience], Distillation, list[Experience]], None] | None
        ) = None
        self._version = extractor_version or (
            lambda: extractor.version if extractor is not None else 0
        )
        self._backoff = backoff
        self._seed = seed
        self._counts: Counter[str] = Counter()
        self._operations: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._merged = 0  # head at the start of the last pass of merging that had no failure
        self._closed = False
        self._probation: Probation | None = None
        if after := self.settings.trust_after:  # without it all entries are trusted
            self._probation = Probation(bank, after, self.settings.provisional_share, seed)
        self._searcher = Searcher(bank, self.settings.retrieval, seed, self._probation)
        # One worker each: what comes while it is busy is embedded (into the bank's cache), or
        # written, together.
        self._embedding: Batcher[EntryKey, Any] = Batcher(
            lambda keys: list(map(embed_entries(bank.embedder, keys).get, keys)), workers=1
        )
        self._submitting: Batcher[Trajectory, bool] = Batcher(
            lambda ended: bank.submit_many(ended, distil=self.extractor is not None), workers=1
        )
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="experiential-writer")
        self._passes = Passes(
            bank,
            self.settings.dedupe_threshold,
            across_tasks=self.settings.dedupe_across_tasks,
        )
        self._judging = asyncio.Semaphore(self.settings.distill_workers)
        self._changed = asyncio.Condition()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._ready: asyncio.Queue[str] = asyncio.Queue()
        left = bank.queue.waiting() if extractor is not None and not bank.read_only else []
        self._open: set[str] = set(left)
        self._running: set[str] = set()
        self._reserved = 0
        self._workers: set[asyncio.Task[None]] = set()
        self._thread = EventLoopThread("experiential-manager")
        for id in left:
            self._thread.loop.call_soon_threadsafe(self._enqueue, id)

    def __enter__(self) -> ExperienceManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Retrieval

    @overload
    def search(
        self,
        query: str,
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        episode: str = "",
        where: Filter | None = None,
    ) -> list[Hit]: ...

    @overload
    def search(
        self,
        query: list[str] | tuple[str, ...],
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        episode: Episodes = "",
        where: Filter | None = None,
    ) -> list[list[Hit]]: ...

    def search(
        self,
        query: str | list[str] | tuple[str, ...],
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        episode: Episodes = "",
        where: Filter | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """Return diversified hits of one query, or of each of several (eq. 6); counters advance.

        Args:
            query: what the actor faces, in words; blank text gets no hits.
            k: how many hits; the setting ``retrieval.k`` by default.
            exclude_instance: leave out entries made from this task instance.
            episode: id of the episode that asks, or one for each query: all its searches may see
                provisional entries, or none may.
            where: only entries whose kind, task and metadata are so (see ``Where``).
        """
        asked = self._searcher.requests(query, k, exclude_instance, episode, where)
        rows = self._searcher.search(asked)
        return rows[0] if isinstance(query, str) else rows

    async def asearch(
        self,
        query: str | list[str] | tuple[str, ...],
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        episode: Episodes = "",
        where: Filter | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """Run ``search`` on any event loop."""
        asked = self._searcher.requests(query, k, exclude_instance, episode, where)
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
        asked = self._searcher.requests([query], k, exclude_instance, episode, where)
        hits = (await self._searcher.asearch(asked))[0]
        if not hits:
            return Answer()
        text, generation = hits[0].experience.text, None
        if self.extractor is not None:
            try:
                text, generation = await asyncio.wait_for(
                    self.extractor.arefine(query, hits[0].experience), self.settings.distill_timeout
                )
            except Exception as error:  # noqa: BLE001  (the entry itself is the answer then)
                self._count_failure("refine", error)
        if generation is not None and not self.bank.read_only:
            await self._write(self.bank.keep_generation, generation)
        refinement = generation.id if generation else None
        use = hits[0].use("search_and_ask", episode=episode, turn=turn, refinement=refinement)
        return Answer(text=text, hit=hits[0], generation=generation, use=use)

    ask = _blocking(aask)

    # Distillation

    @_on_own_loop
    async def asubmit(self, trajectory: Trajectory) -> str | None:
        """Record a finished trajectory and queue it for distillation, durably.

        Waits while the queue is full. Returns the id of the queue item (that of the trajectory);
        None when nothing was queued: on a read-only bank, which also records nothing, and without
        an extractor.
        """
        if self.bank.read_only:
            return None
        if self.extractor is None:
            await asyncio.shield(self._submitting.arun([trajectory]))
            return None

        async def queue() -> None:
            [is_new] = await self._submitting.arun([trajectory])
            if is_new and self.extractor is not None:  # it may have been taken away meanwhile
                self._enqueue(trajectory.id)

        async with self._changed:
            await self._changed.wait_for(
                lambda: len(self._open) + self._reserved < self.settings.queue_size
            )
            self._reserved += 1
        try:
            # A trajectory whose submitter is cancelled is distilled all the same.
            await asyncio.shield(queue())
        finally:
            self._reserved -= 1
            async with self._changed:
                self._changed.notify_all()
        return trajectory.id

    submit = _blocking(asubmit)

    def _enqueue(self, id: str) -> None:
        self._open.add(id)
        self._ready.put_nowait(id)
        if len(self._workers) < min(self.settings.distill_workers, len(self._open)):
            self._workers.add(asyncio.get_running_loop().create_task(self._work()))

    async def _work(self) -> None:
        """Distil one queued trajectory after the other, and retry or bury what fails."""
        while True:
            id = await self._ready.get()
            await self._resumed.wait()
            self._running.add(id)
            try:
                assert self.extractor is not None
                trajectory = self.bank.trajectory(id)
                if trajectory is None:
                    raise BankError(f"Expected a recorded trajectory, got {id!r}")
                # The entry versions that were used, each once, in order of use.
                used = dict.fromkeys(
                    (u.experience_id, u.experience_version) for u in trajectory.uses
                )
                shown = [one for key in used if (one := self.bank.version(*key)) is not None]
                distillation = await asyncio.wait_for(
                    self.extractor.adistill(trajectory, shown), self.settings.distill_timeout
                )
                keys = keys_to_embed(distillation, shown, trajectory.task or None)
                await self._embedding.arun(keys)
                written = await self._write(
                    self.bank.apply,
                    distillation,
                    trajectory=trajectory,
                    shown=shown,
                    item=id,
                    extractor_version=self._version(),
                )
            except Exception as error:  # noqa: BLE001  (counted, and tried again)
                await self._try_again(id, self._count_failure("distill", error))
            else:
                self._open.discard(id)
                self._counts["distilled"] += 1
                self._tell(
                    "on_distillation", self.on_distillation, trajectory, distillation, written
                )
                if self.settings.cap and len(self.bank) > self.settings.cap:
                    await self._evict()
            finally:
                self._running.discard(id)
                async with self._changed:
                    self._changed.notify_all()

    async def _evict(self) -> None:
        cap, policy = self.settings.cap, self.settings.eviction
        try:
            evicted = await self._write(self.bank.evict, cap, policy, seed=self._seed, author="run")
            self._counts["evicted"] += len(evicted)
        except Exception as error:  # noqa: BLE001  (the next distillation evicts)
            self._count_failure("evict", error)

    async def _try_again(self, id: str, reason: str) -> None:
        """Queue a failed item again after a while, or make it a dead letter."""
        self._counts["failed"] += 1
        attempts = self.bank.queue.attempts(id) + 1
        last = attempts > self.settings.retries
        try:
            await self._write(self.bank.queue.fail, id, reason, last=last)
        except Exception as error:  # noqa: BLE001
            # The journal cannot be written: the item is still queued there, and tried again here.
            self._count_failure("queue", error)
            last = False
        if last:
            self._open.discard(id)
        else:
            delay = min(self._backoff * 2 ** (attempts - 1), _LONGEST_BACKOFF)
            asyncio.get_running_loop().call_later(delay, self._ready.put_nowait, id)

    def dead_letters(self) -> list[DeadLetter]:
        """Return the trajectories whose distillation was given up, with the last reason."""
        return self.bank.queue.dead_letters()

    @_blocking
    async def requeue(self, id: str) -> None:
        """Try a dead letter again, with all its attempts.

        Raises:
            BankError: there is no such dead letter.
        """
        if not await self._write(self.bank.queue.requeue, id):
            raise BankError(
                f"Expected the id of a dead letter, got {id!r}; list them with dead_letters()"
            )
        if self.extractor is not None and not self.bank.read_only:
            self._enqueue(id)

    def pause(self) -> None:
        """Start no further distillation; running ones go on."""
        self._thread.loop.call_soon_threadsafe(self._resumed.clear)

    def resume(self) -> None:
        """Start distillations again."""
        self._thread.loop.call_soon_threadsafe(self._resumed.set)

    @property
    def paused(self) -> bool:
        """Return whether ``pause`` holds distillation."""
        return not self._resumed.is_set()

    @_on_own_loop
    async def adrain(self, timeout: float | None = None, *, leave: int = 0) -> None:
        """Wait until all submitted trajectories but ``leave`` are distilled or dead letters.

        Raises:
            TimeoutError: it took longer than ``timeout`` seconds; the rest goes on.
        """
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(
                    lambda: len(self._open | self._running) + self._reserved <= leave
                )
        except TimeoutError:
            raise TimeoutError(
                f"Expected the distillation queue to drain within {timeout} s, {len(self._open)}"
                " items are left"
            ) from None
        if self._probation is not None:
            await self._probation.settle()

    drain = _blocking(adrain)

    # Merging

    @_on_own_loop
    async def amerge(self) -> int:
        """Run one pass of consolidation; return the number of merged entries written.

        The first pass of a manager looks at the whole bank, a later one at what was written since
        the last that had no failure.
        """
        extractor, failed = self._merger("merge"), False

        async def merge_chunk(shown: Sequence[Experience]) -> list[Experience]:
            nonlocal failed
            assert extractor is not None
            try:
                distillation = await asyncio.wait_for(
                    extractor.amerge(shown), self.settings.distill_timeout
                )
                keys = keys_to_embed(distillation, shown)
                await self._embedding.arun(keys)
                written = await self._write(
                    self.bank.consolidate,
                    distillation,
                    shown=shown,
                    extractor_version=self._version(),
                )
            except Exception as error:  # noqa: BLE001  (the next pass looks at these again)
                self._count_failure("merge", error)
                failed = True
                return []
            self._tell("on_merge", self.on_merge, shown, distillation, written)
            return written

        if extractor is None:
            return 0
        head, size, written = self.bank.head, self.settings.merge_chunk, 0
        groups = recent_groups(self.bank.entries(), self._merged, size)
        self._counts["merges"] += 1
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
            async with self._judging:
                return await asyncio.wait_for(ask(older, newer), self.settings.distill_timeout)

        async def attempt(work: Awaitable[list[Duplicates]]) -> list[Duplicates] | None:
            try:
                return await work
            except Exception as error:  # noqa: BLE001  (the next pass looks at these again)
                self._count_failure("deduplicate", error)
                return None

        write = partial(self._write, self.bank.merge_duplicates, author="extractor")
        groups = await self._passes.make(judge, write, attempt)
        merged = sum(len(group.merged) for group in groups)
        self._counts["deduplicated"] += merged
        return merged

    deduplicate = _blocking(adeduplicate)

    def _merger(self, name: str) -> Extractor | None:
        """Return the extractor for a method that merges entries; refuse a read-only bank."""
        if self.bank.read_only:
            raise ReadOnlyBankError(
                f"Expected a writable bank to {name}, got one opened with read_only=True"
            )
        return self.extractor

    # Watching

    def stats(self) -> dict[str, Any]:
        """Return counts of everything done and refused, and the latency of retrieval."""
        counts, embedder, probation = self._searcher.counts, self.bank.embedder, self._probation
        seconds = np.array(list(counts.seconds) or [0.0]) * 1000.0
        asked = embedder.hits + embedder.misses
        failures = self._failures if probation is None else self._failures + probation.failures
        return {
            "entries": len(self.bank),
            "head": self.bank.head,
            "queued": len(self._open) - len(self._running & self._open),
            "running": len(self._running),
            "distilled": self._counts["distilled"],
            "failed": self._counts["failed"],
            "dead": len(self.bank.queue.dead_letters()),
            "merges": self._counts["merges"],
            "deduplicated": self._counts["deduplicated"],
            "evicted": self._counts["evicted"],
            "operations": dict(self._operations),
            "refused": dict(self._refused + self.bank.refused),
            "redacted": dict(self.bank.redacted),
            "failures": dict(failures),
            "searches": counts.queries,
            "retrievals": counts.retrievals,
            "abstentions": counts.abstentions,
            "search_timeouts": counts.timeouts,
            "mean_batch": counts.queries / counts.batches if counts.batches else 0.0,
            "search_p50_ms": float(np.percentile(seconds, 50)),
            "search_p99_ms": float(np.percentile(seconds, 99)),
            "cache_hit_rate": embedder.hits / asked if asked else 0.0,
            **({} if probation is None else probation.stats(self.bank.entries())),
        }

    def close(self, *, drain: float | None = 0.0) -> None:
        """Stop the workers and save the counters. Safe to call twice.

        The bank's queue keeps what is not distilled, for the next manager with an extractor; a
        warning says how many episodes these are.

        Args:
            drain: seconds to wait for the queue first; None neither waits nor warns, for a caller
                that comes back to the queue itself.
        """
        if self._closed:
            return
        try:
            if drain and not self.paused:
                self.drain(drain)
        except TimeoutError:
            pass  # the warning below says what is left
        finally:
            self._stop_all()
        if self._open and drain is not None:
            _LOGGER.warning(
                "%d finished episodes are not distilled yet; they stay in the bank's queue, and the"
                " next manager with an extractor distils them",
                len(self._open),
            )

    def _stop_all(self) -> None:
        self._closed = True
        self._thread.run(self._stop())
        self._thread.close()
        self._passes.close()
        for batcher in (self._embedding, self._submitting):
            batcher.close(BankError("Expected an open manager, got a closed one"))
        self._writer.shutdown(wait=True)
        if self._probation is not None:
            self._probation.close()
        if not self.bank.read_only and not self.bank.closed:
            self.bank.save_counters()

    async def _stop(self) -> None:
        self._searcher.close()
        # Again until all have ended: a wait_for whose work ends just then swallows the cancellation
        # (Python before 3.12).
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.1)

    # Inside

    def loop_thread(self) -> EventLoopThread:
        """Return the thread and event loop of this manager.

        Raises:
            BankError: the manager is closed.
        """
        if self._closed:
            raise BankError(CLOSED)
        return self._thread

    async def _write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a write of the bank on the thread of writes."""
        call = partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._writer, call)

    def _count_failure(self, what: str, error: Exception) -> str:
        """Count a failure, warn of the first of its kind, and return its reason in words."""
        kind = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
        reason = f"{kind}: {error}"[:_REASON] if str(error) else kind
        counted = f"{what}: {kind}"
        self._failures[counted] += 1
        if self._failures[counted] == 1:
            _LOGGER.warning(
                "%s failed: %s (once; stats()['failures'] counts further ones)", what, reason
            )
        return reason

    def _tell(
        self,
        name: str,
        hook: Callable[[T, Distillation, list[Experience]], None] | None,
        source: T,
        distillation: Distillation,
        written: list[Experience],
    ) -> None:
        """Count the operations of a distillation that was applied, and call the user's hook."""
        self._operations.update(operation.op for operation in distillation.parsed.operations)
        self._refused.update(refusal.reason for refusal in distillation.parsed.refused)
        if hook is not None:
            try:
                hook(source, distillation, written)
            except Exception as error:  # noqa: BLE001  (what a user's hook does ends no worker)
                self._count_failure(name, error)
