"""Schedule retrieval, distillation and merging, so that no rollout ever waits for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload

import numpy as np

from experiential.bank.consolidation.consolidate import merge_group, recent_groups
from experiential.bank.consolidation.dedupe import Passes
from experiential.bank.evidence.trust import Episodes, checked_episodes, probation_of
from experiential.bank.extractor import Extractor, judge_of
from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import EntryKey, texts_to_embed
from experiential.bank.operations import keys_to_embed
from experiential.bank.options import bank_settings
from experiential.bank.protocol import Bank, is_bank
from experiential.bank.records import DeadLetter, Duplicates
from experiential.bank.search.searchable import checked_queries
from experiential.bank.search.searcher import Searcher
from experiential.bank.search.strategies import find_strategy
from experiential.bank.search.where import Filter, Where
from experiential.batching import Batcher
from experiential.errors import BankError, ReadOnlyBankError
from experiential.sync import EventLoopThread, awaited
from experiential.types import Answer, Distillation, Experience, Generation, Hit, Trajectory

T = TypeVar("T")
_LONGEST_BACKOFF = 30.0


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
        find_strategy(self.settings.retrieval.strategy)
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
        self._merge_failures = 0
        self._closed = False
        self._probation = probation_of(bank, self.settings, seed)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="experiential-writer")
        self._thread = EventLoopThread("experiential-manager")
        self._thread.run(self._start(seed))

    async def _start(self, seed: int) -> None:
        self._searcher = Searcher(self.bank, self.settings.retrieval, seed, self._probation)
        # One worker each: what comes while it is busy is embedded, or written, together. Episodes
        # that end in one tick of the loop wait a millisecond for each other, and share a commit.
        self._embedding: Batcher[str, Any] = Batcher(
            lambda texts: list(self.bank.embedder(texts)), workers=1
        )
        self._submitting: Batcher[Trajectory, bool] = Batcher(
            partial(self.bank.submit_many, distil=self._distils), size=64, wait=0.001, workers=1
        )
        self._passes = Passes(
            self.bank,
            self.settings.dedupe_threshold,
            across_tasks=self.settings.dedupe_across_tasks,
        )
        self._judging = asyncio.Semaphore(self.settings.distill_workers)
        self._changed = asyncio.Condition()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._ready: asyncio.Queue[str] = asyncio.Queue()
        self._open: set[str] = set()
        self._running: set[str] = set()
        self._reserved = 0
        self._workers: set[asyncio.Task[None]] = set()
        if self._distils:
            for id in self.bank.queue.waiting():
                self._enqueue(id)

    @property
    def _distils(self) -> bool:
        return self.extractor is not None and not self.bank.read_only

    def __enter__(self) -> ExperienceManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        rows = self._searcher.search(
            *self._asked(query, k, exclude_instance, episode), Where.of(where)
        )
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
        rows = await self._searcher.asearch(
            *self._asked(query, k, exclude_instance, episode), Where.of(where)
        )
        return rows[0] if isinstance(query, str) else rows

    def _asked(
        self,
        query: str | list[str] | tuple[str, ...],
        k: int | None,
        exclude: str | None,
        episode: Episodes,
    ) -> tuple[list[str], int, str | None, Sequence[str]]:
        """Check the arguments of a search."""
        wanted = self.settings.retrieval.k if k is None else k
        queries = checked_queries(query, wanted, blank=True)
        return queries, wanted, exclude, checked_episodes(episode, len(queries))

    def ask(
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
        return self._run(self._ask(query, k, episode, turn, exclude_instance, Where.of(where)))

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
        """Run ``ask`` on any event loop."""
        return await self._bridge(
            self._ask(query, k, episode, turn, exclude_instance, Where.of(where))
        )

    async def _ask(
        self, query: str, k: int, episode: str, turn: int, exclude: str | None, where: Where | None
    ) -> Answer:
        hits = (await self._searcher.asearch(*self._asked([query], k, exclude, episode), where))[0]
        if not hits:
            return Answer()
        hit = hits[0]
        text, generation = await self._refined(query, hit.experience)
        use = hit.use(
            "search_and_ask",
            episode=episode,
            turn=turn,
            refinement=generation.id if generation else None,
        )
        return Answer(text=text, hit=hit, generation=generation, use=use)

    async def _refined(self, query: str, experience: Experience) -> tuple[str, Generation | None]:
        if self.extractor is None:
            return experience.text, None
        answer, reason = await self._attempt(self.extractor.arefine(query, experience))
        if answer is None:
            self._failures[f"refine: {reason}"] += 1
            return experience.text, None
        text, generation = answer
        if generation is not None and not self.bank.read_only:
            await self._write(self.bank.keep_generation, generation)
        return text, generation

    # Distillation

    def submit(self, trajectory: Trajectory) -> str | None:
        """Record a finished trajectory and queue it for distillation, durably.

        Waits while the queue is full. Gives the id of the queue item (that of the trajectory); None
        when nothing was queued: on a read-only bank, which also records nothing, and without an
        extractor.
        """
        return self._run(self._submit(trajectory))

    async def asubmit(self, trajectory: Trajectory) -> str | None:
        """Run ``submit`` on any event loop."""
        return await self._bridge(self._submit(trajectory))

    async def _submit(self, trajectory: Trajectory) -> str | None:
        if self.bank.read_only:
            return None
        if not self._distils:
            await asyncio.shield(self._submitting.arun([trajectory]))
            return None
        async with self._changed:
            await self._changed.wait_for(
                lambda: len(self._open) + self._reserved < self.settings.queue_size
            )
            self._reserved += 1
        try:
            # A trajectory whose submitter is cancelled is distilled all the same.
            await asyncio.shield(self._queued(trajectory))
        finally:
            self._reserved -= 1
            await self._notify()
        return trajectory.id

    async def _queued(self, trajectory: Trajectory) -> None:
        """Submit a trajectory, in one transaction with those of other callers."""
        [is_new] = await self._submitting.arun([trajectory])
        if is_new:
            self._enqueue(trajectory.id)

    def _enqueue(self, id: str) -> None:
        self._open.add(id)
        self._ready.put_nowait(id)
        if len(self._workers) < min(self.settings.distill_workers, len(self._open)):
            self._workers.add(asyncio.get_running_loop().create_task(self._work()))

    async def _work(self) -> None:
        while True:
            id = await self._ready.get()
            await self._resumed.wait()
            self._running.add(id)
            try:
                await self._distil(id)
            finally:
                self._running.discard(id)
                await self._notify()

    async def _distil(self, id: str) -> None:
        done, reason = await self._attempt(self._distillation(id), limit=None)
        if done is None:
            await self._failed(id, reason)
            return
        trajectory, distillation, written = done
        self._open.discard(id)
        self._counts["distilled"] += 1
        self._tally(distillation)
        await self._tell("on_distillation", self.on_distillation, trajectory, distillation, written)
        await self._hold_cap()

    async def _distillation(self, id: str) -> tuple[Trajectory, Distillation, list[Experience]]:
        assert self.extractor is not None
        trajectory = self.bank.trajectory(id)
        if trajectory is None:
            raise BankError(f"Expected a recorded trajectory, got {id!r}")
        shown = self.shown(trajectory)
        distillation = await asyncio.wait_for(
            self.extractor.adistill(trajectory, shown), self.settings.distill_timeout
        )
        await self._embedded(keys_to_embed(distillation, shown, trajectory.task or None))
        version = self._version()
        write = partial(
            self.bank.apply,
            distillation,
            trajectory=trajectory,
            shown=shown,
            item=id,
            extractor_version=version,
        )
        return trajectory, distillation, await self._write(write)

    async def _hold_cap(self) -> None:
        """Evict the entries beyond the cap."""
        cap = self.settings.cap
        if not cap or len(self.bank) <= cap:
            return
        evict = partial(self.bank.evict, cap, self.settings.eviction, seed=self._seed, author="run")
        evicted, reason = await self._attempt(self._write(evict), limit=None)
        if evicted is None:
            self._failures[f"evict: {reason}"] += 1
        else:
            self._counts["evicted"] += len(evicted)

    async def _failed(self, id: str, reason: str) -> None:
        self._failures[f"distill: {reason}"] += 1
        self._counts["failed"] += 1
        attempts = self.bank.queue.attempts(id) + 1
        last = attempts > self.settings.retries
        noted, why = await self._attempt(
            self._write(partial(self.bank.queue.fail, id, reason, last=last)), limit=None
        )
        if (
            noted is None
        ):  # the journal cannot be written: the item is still queued there, and tried again here
            self._failures[f"queue: {why}"] += 1
        if last and noted is not None:
            self._open.discard(id)
        else:
            delay = min(self._backoff * 2 ** (attempts - 1), _LONGEST_BACKOFF)
            asyncio.get_running_loop().call_later(delay, self._ready.put_nowait, id)

    def shown(self, trajectory: Trajectory) -> list[Experience]:
        """Return the entry versions that a trajectory used, each once, in order of use."""
        named = dict.fromkeys(
            (use.experience_id, use.experience_version) for use in trajectory.uses
        )
        found = (self.bank.version(id, version) for id, version in named)
        return [experience for experience in found if experience is not None]

    def dead_letters(self) -> list[DeadLetter]:
        """Return the trajectories whose distillation was given up, with the last reason."""
        return self.bank.queue.dead_letters()

    def requeue(self, id: str) -> None:
        """Try a dead letter again, with all its attempts.

        Raises:
            BankError: there is no such dead letter.
        """
        self._run(self._requeue(id))

    async def _requeue(self, id: str) -> None:
        if not await self._write(self.bank.queue.requeue, id):
            raise BankError(
                f"Expected the id of a dead letter, got {id!r}; list them with dead_letters()"
            )
        if self._distils:
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

    def drain(self, timeout: float | None = None, *, leave: int = 0) -> None:
        """Wait until all submitted trajectories but ``leave`` are distilled or dead letters.

        Raises:
            TimeoutError: it took longer than ``timeout`` seconds; the rest goes on.
        """
        self._run(self._drain(timeout, leave))

    async def adrain(self, timeout: float | None = None, *, leave: int = 0) -> None:
        """Run ``drain`` on any event loop."""
        await self._bridge(self._drain(timeout, leave))

    async def _drain(self, timeout: float | None, leave: int) -> None:
        async def idle() -> None:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: len(self._open | self._running) + self._reserved <= leave
                )

        try:
            await asyncio.wait_for(idle(), timeout)
        except TimeoutError:
            raise TimeoutError(
                f"Expected the distillation queue to drain within {timeout} s, {len(self._open)}"
                " items are left"
            ) from None
        if self._probation is not None:
            await self._probation.settle()

    # Merging

    def merge(self) -> int:
        """Run one pass of consolidation; return the number of merged entries written.

        The first pass of a manager looks at the whole bank, a later one at what was written since
        the last that had no failure.
        """
        return self._run(self._merge())

    async def amerge(self) -> int:
        """Run ``merge`` on any event loop."""
        return await self._bridge(self._merge())

    async def _merge(self) -> int:
        if self.bank.read_only:
            raise ReadOnlyBankError(
                "Expected a writable bank to merge, got one opened with read_only=True"
            )
        if self.extractor is None:
            return 0
        head, failures = self.bank.head, self._merge_failures
        groups = recent_groups(self.bank.entries(), self._merged, self.settings.merge_chunk)
        self._counts["merges"] += 1
        written = sum(
            [
                len(await merge_group(group, self.settings.merge_chunk, self._merge_chunk))
                for group in groups
            ]
        )
        if self._merge_failures == failures:
            self._merged = head
        return written

    async def _merge_chunk(self, shown: Sequence[Experience]) -> list[Experience]:
        done, reason = await self._attempt(self._consolidation(shown), limit=None)
        if done is None:
            self._failures[f"merge: {reason}"] += 1
            self._merge_failures += 1
            return []
        distillation, written = done
        self._tally(distillation)
        await self._tell("on_merge", self.on_merge, shown, distillation, written)
        return written

    async def _consolidation(
        self, shown: Sequence[Experience]
    ) -> tuple[Distillation, list[Experience]]:
        assert self.extractor is not None
        distillation = await asyncio.wait_for(
            self.extractor.amerge(shown), self.settings.distill_timeout
        )
        await self._embedded(keys_to_embed(distillation, shown))
        write = partial(
            self.bank.consolidate, distillation, shown=shown, extractor_version=self._version()
        )
        return distillation, await self._write(write)

    def deduplicate(self) -> int:
        """Run one pass of deduplication, judged by the extractor; return the number merged away.

        The first pass of a manager compares the whole bank; a later one what was written since the
        last that had no failure, within itself and then with older entries.
        ``bank.options.dedupe_threshold`` says from which cosine on the extractor is asked.
        """
        return self._run(self._deduplicate())

    async def adeduplicate(self) -> int:
        """Run ``deduplicate`` on any event loop."""
        return await self._bridge(self._deduplicate())

    async def _deduplicate(self) -> int:
        if self.bank.read_only:
            raise ReadOnlyBankError(
                "Expected a writable bank to deduplicate, got one opened with read_only=True"
            )
        if self.extractor is None:
            return 0
        ask = judge_of(self.extractor)

        async def judge(older: Experience, newer: Experience) -> bool:
            async with self._judging:
                return await asyncio.wait_for(ask(older, newer), self.settings.distill_timeout)

        groups = await self._passes.make(
            judge,
            partial(self._write, partial(self.bank.merge_duplicates, author="extractor")),
            self._merge_piece,
        )
        merged = sum(len(group.merged) for group in groups)
        self._counts["deduplicated"] += merged
        return merged

    async def _merge_piece(self, work: Awaitable[list[Duplicates]]) -> list[Duplicates] | None:
        groups, reason = await self._attempt(work, limit=None)
        if groups is None:
            self._failures[f"deduplicate: {reason}"] += 1
        return groups

    # Watching

    def stats(self) -> dict[str, Any]:
        """Return counts of everything done and refused, and the latency of retrieval."""
        counts, embedder = self._searcher.counts, self.bank.embedder
        seconds = np.array(list(counts.seconds) or [0.0]) * 1000.0
        asked = embedder.hits + embedder.misses
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
            "failures": dict(
                self._failures
                if self._probation is None
                else self._failures + self._probation.failures
            ),
            "searches": counts.queries,
            "retrievals": counts.retrievals,
            "abstentions": counts.abstentions,
            "search_timeouts": counts.timeouts,
            "mean_batch": counts.queries / counts.batches if counts.batches else 0.0,
            "search_p50_ms": float(np.percentile(seconds, 50)),
            "search_p99_ms": float(np.percentile(seconds, 99)),
            "cache_hit_rate": embedder.hits / asked if asked else 0.0,
            **({} if self._probation is None else self._probation.stats(self.bank.entries())),
        }

    def _tally(self, distillation: Distillation) -> None:
        self._operations.update(operation.op for operation in distillation.parsed.operations)
        self._refused.update(refusal.reason for refusal in distillation.parsed.refused)

    def close(self) -> None:
        """Stop the workers and save the counters; the queue keeps the rest. Safe to call twice."""
        if self._closed:
            return
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

    async def _attempt(
        self, work: Awaitable[T], limit: float | None = -1.0
    ) -> tuple[T | None, str]:
        """Return the result of some work, or None and the reason of its failure."""
        outcome = await awaited(
            asyncio.wait_for(work, self.settings.distill_timeout if limit == -1.0 else limit)
        )
        if isinstance(outcome, TimeoutError):
            return None, "timeout"
        return (None, type(outcome).__name__) if isinstance(outcome, Exception) else (outcome, "")

    async def _tell(self, name: str, hook: Callable[..., None] | None, *news: object) -> None:
        async def call() -> bool:
            if hook is not None:
                hook(*news)
            return True

        done, reason = await self._attempt(call(), limit=None)
        if done is None:
            self._failures[f"{name}: {reason}"] += 1

    async def _embedded(self, keys: Sequence[EntryKey]) -> None:
        """Fill the bank's cache with the vectors of these entries, many callers in one batch."""
        await self._embedding.arun(texts_to_embed(keys))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _write(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work, *arguments)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        self._check_open(work)
        return self._thread.run(work)

    async def _bridge(self, work: Coroutine[Any, Any, T]) -> T:
        self._check_open(work)
        if asyncio.get_running_loop() is self._thread.loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._thread.loop))

    def _check_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._closed:
            work.close()
            raise BankError(
                "Expected an open manager, got a closed one; make a new ExperienceManager"
            )
