"""Distil queued episodes in the background: leases, workers, retries, dead letters, judges."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from experiential.bank.breaker import CircuitBreaker, is_over_budget, outage_of
from experiential.bank.extractor import Extractor
from experiential.bank.index.embed import EntryKey, embed_entries
from experiential.bank.operations import keys_to_embed
from experiential.bank.options import ManagerOptions
from experiential.bank.outcome import OutcomeJudge
from experiential.bank.protocol import Bank
from experiential.errors import BackendError, BankError, BudgetError
from experiential.llm.rounds import Rounds
from experiential.sync import Batcher, awaited, cancel_tasks
from experiential.types import Distillation, Experience, Trajectory, Usage, new_id

P = ParamSpec("P")
T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_LONGEST_BACKOFF = 30.0
_POLL_SECONDS = 0.5
_REASON = 500  # characters
_OUTAGES = 8  # of the service that an item may meet while others are distilled


class _Distilled(NamedTuple):
    trajectory: Trajectory
    shown: list[Experience]
    drafts: list[Distillation]


class Distiller:
    """Let an extractor work on a bank's queue, as a part of `ExperienceManager`.

    The arguments are the manager's. Its coroutines run on one event loop, that of ``start``.

    Attributes:
        extractor: may be taken away (None) meanwhile.
        on_distillation: the user's hook.
        version: gives the extractor version for provenance.
        resumed: cleared while no distillation may start.
        breaker: pauses distillation while the extractor's service is out.
        slots: held by each question to a judge, so that they are as few as workers.
        counts: what was done, by name.
        operations, refused: operations of all distillations by kind, refusals by reason.
        failures: failed calls by what was tried and the kind of the error.
    """

    def __init__(
        self,
        bank: Bank,
        extractor: Extractor | None,
        settings: ManagerOptions,
        *,
        share_queue: bool,
        on_distillation: Callable[[Trajectory, Distillation, list[Experience]], None] | None,
        seed: int,
        extractor_version: Callable[[], int] | None,
        backoff: float,
        rounds: Rounds | None = None,
        drafts: int = 1,
    ) -> None:
        self.extractor = extractor
        self._rounds, self._drafts = rounds, drafts
        self.on_distillation = on_distillation
        self.counts: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.breaker = CircuitBreaker("Distillation", first=10 * backoff)
        self.slots = asyncio.Semaphore(settings.distill_workers)
        self._bank, self._settings = bank, settings
        self._seed, self._backoff = seed, backoff
        self.version: Callable[[], int] = extractor_version or (
            lambda: extractor.version if extractor is not None else 0
        )
        # One worker each: what comes while it is busy is embedded (into the bank's cache), or
        # written, together.
        self._embedding: Batcher[EntryKey, Any] = Batcher(
            lambda keys: list(map(embed_entries(bank.embedder, keys).get, keys)), workers=1
        )
        self._submitting: Batcher[Trajectory, bool] = Batcher(
            lambda ended: bank.submit_many(
                ended,
                distil=share_queue or self.extractor is not None,
                holder=self._holder if self.extractor is not None or self._judges else "",
            ),
            workers=1,
        )
        self._recording: Batcher[Trajectory, bool] = Batcher(
            lambda ended: bank.submit_many(ended, distil=False), workers=1
        )
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="experiential-writer")
        self._outages: dict[str, tuple[int, int]] = {}
        self._asked_judges: dict[int, OutcomeJudge] = {}  # by id(): they need no hash
        self._judges: dict[str, OutcomeJudge] = {}  # of episodes whose outcome is still to be said
        self._changed = asyncio.Condition()
        self._freed = asyncio.Event()
        self.resumed = asyncio.Event()
        self.resumed.set()
        self._ready: asyncio.Queue[str] = asyncio.Queue()
        self._holder = new_id()
        self._queues = share_queue
        self._takes = share_queue and extractor is not None and not bank.read_only
        self._left: list[str] = []  # by earlier managers, oldest first
        if self._takes:
            most, seconds = settings.distill_workers, settings.lease
            self._left = bank.queue.lease(self._holder, most, seconds=seconds)
        elif extractor is not None and not bank.read_only:
            self._left = bank.queue.waiting()
        self._open: set[str] = set(self._left)
        self._running: set[str] = set()
        self._reserved = 0
        self._workers: set[asyncio.Task[None]] = set()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Distil on this loop what the queue holds already, and from now on what others submit."""
        for id in self._left:
            loop.call_soon_threadsafe(self._enqueue, id)
        if self._takes:
            asyncio.run_coroutine_threadsafe(self._share(), loop)

    async def submit(
        self, trajectory: Trajectory, judge: OutcomeJudge | None, *, distil: bool
    ) -> str | None:
        """Record and queue a trajectory, as ``ExperienceManager.asubmit`` says."""
        if self._bank.read_only:
            return None
        if trajectory.error is not None:
            judge = None
        if judge is not None:
            trajectory = trajectory.model_copy(update={"rubric": judge.rubric})
            self._judges[trajectory.id] = judge
            self._asked_judges[id(judge)] = judge
        if not distil or self.extractor is None or trajectory.error is not None:
            ending = self._submitting if distil else self._recording
            await asyncio.shield(ending.arun([trajectory]))
            queued = distil and self._queues
            if judge is not None:
                self._running.add(trajectory.id)
                task = asyncio.get_running_loop().create_task(self._only_judge(trajectory, queued))
                self._workers.add(task)
                task.add_done_callback(self._workers.discard)
            return trajectory.id if queued and trajectory.error is None else None

        async def queue() -> None:
            [is_new] = await self._submitting.arun([trajectory])
            if is_new and self.extractor is not None:  # it may have been taken away meanwhile
                self._enqueue(trajectory.id)

        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    len(self._open) + self._reserved < self._settings.queue_size
                    or self._rounds is not None  # nothing is distilled before all have submitted
                    or self.breaker.error is not None
                )
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

    def _enqueue(self, id: str) -> None:
        self._open.add(id)
        self._ready.put_nowait(id)
        if self._rounds is not None:
            return
        if len(self._workers) < min(self._settings.distill_workers, len(self._open)):
            self._workers.add(asyncio.get_running_loop().create_task(self._work()))

    async def _share(self) -> None:
        """Keep the leases of what is distilled here, and take what others submit."""
        pause = min(_POLL_SECONDS, self._settings.lease / 3)
        while not self._bank.closed:
            try:
                await self._take()
            except Exception as error:  # noqa: BLE001  (a server that is away may come back)
                self.count_failure("queue", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), pause)
            self._freed.clear()

    async def _take(self) -> None:
        """Take what others submitted, one item for each free worker; renew the leases held here."""
        free = self._settings.distill_workers - len(self._open)
        keep = self._open
        if self.paused or not self._takes or self.extractor is None:
            free = 0
        if self.breaker.error is not None:  # other distillers may have a service that answers
            free, keep = 0, self._running
        taken = await self.write(
            self._bank.queue.lease,
            self._holder,
            max(free, 0),
            keep=list(keep),
            seconds=self._settings.lease,
        )
        for id in taken:
            if id not in self._open:
                self._enqueue(id)

    async def _work(self) -> None:
        """Distil one queued trajectory after the other, and retry or bury what fails."""
        while True:
            id = await self._ready.get()
            await self.resumed.wait()
            try:
                await self._conclude(id, await awaited(self._distilled(id)))
            finally:
                self._running.discard(id)

    async def _work_in_order(self, rounds: Rounds) -> None:
        """Do the same for all that waits at once: ask in rounds, write in queue order."""

        async def tried(id: str) -> _Distilled | Exception:
            result = await awaited(self._distilled(id))
            async with self._changed:  # a drain sees whether there is hope for the others
                self._changed.notify_all()
            return result

        while True:
            ids = [await self._ready.get()]
            ids += [self._ready.get_nowait() for _ in range(self._ready.qsize())]
            try:
                await self.resumed.wait()
                asking = [tried(id) for id in ids]
                for result in await rounds.run(asking, most=self._settings.distill_workers):
                    await self._conclude(ids[0], result)
                    del ids[0]
            finally:  # a drain that ends too early leaves them to the next one
                self._running.difference_update(ids)
                for id in ids:
                    self._ready.put_nowait(id)

    async def _distilled(self, id: str) -> _Distilled:
        """Ask the extractor what a queued trajectory teaches."""
        async with self.breaker.turn():
            self._running.add(id)
            assert self.extractor is not None
            # A bank may be a server: the loop does not wait for it.
            trajectory, shown = await asyncio.to_thread(self._read, id)
            if self._drafts > 1:  # the last one would rewrite what the others had written
                shown = []
            if trajectory.rubric:
                trajectory = await self._judged(trajectory)
            asked = [self.extractor.adistill(trajectory, shown) for _ in range(self._drafts)]
            async with asyncio.timeout(self._settings.distill_timeout):
                # All end before one fails.
                answers = await asyncio.gather(*asked, return_exceptions=True)
            drafts: list[Distillation] = []
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                await self.embed(answer, shown, trajectory.task or None)
                drafts.append(answer)
        return _Distilled(trajectory, shown, drafts)

    async def _conclude(self, id: str, result: _Distilled | Exception) -> None:
        """Write a distillation; try again later what failed."""
        try:
            if isinstance(result, Exception):
                raise result
            trajectory, shown, drafts = result
            written: list[list[Experience]] = []
            for number, one in enumerate(drafts, 1):
                entries = await self.write(
                    self._bank.apply,
                    one,
                    trajectory=trajectory,
                    shown=shown,
                    item=id if number == len(drafts) else None,  # done with the last one
                    extractor_version=self.version(),
                    review=self._settings.review,
                )
                written.append(entries)
        except Exception as error:  # noqa: BLE001  (counted, and tried again)
            await self._try_again(id, error)
        else:
            self._drop(id)
            self.counts["distilled"] += 1
            for one, entries in zip(drafts, written, strict=True):
                self.tell("on_distillation", self.on_distillation, trajectory, one, entries)
            if self._settings.cap and len(self._bank) > self._settings.cap:
                await self._evict()
        finally:
            self._running.discard(id)
            self._freed.set()
            async with self._changed:
                self._changed.notify_all()

    def _read(self, id: str) -> tuple[Trajectory, list[Experience]]:
        """Return a trajectory and the entry versions that it used, each once, in order of use."""
        trajectory = self._bank.trajectory(id)
        if trajectory is None:
            raise BankError(f"Expected a recorded trajectory, got {id!r}")
        used = dict.fromkeys((u.experience_id, u.experience_version) for u in trajectory.uses)
        shown = [one for key in used if (one := self._bank.version(*key)) is not None]
        return trajectory, shown

    async def _judged(self, trajectory: Trajectory) -> Trajectory:
        """Ask the judge of an episode that waits for one; return it with the journalled outcome.

        Without its own judge, which may have been in another process, the extractor is asked. A
        failure leaves the outcome unknown: it is counted, and the episode goes on. While its
        service is out, what is distilled here waits for it.
        """
        judge = self._judges.get(trajectory.id)
        ask = getattr(self.extractor, "aoutcome", None) if judge is None else judge.ajudge
        if ask is None or trajectory.success is not None or trajectory.judgement:
            return trajectory
        try:
            said = await asyncio.wait_for(ask(trajectory), self._settings.distill_timeout)
            conclude = partial(self._bank.conclude, judgement=said.reason)
            await self.write(conclude, trajectory.id, said.success)
            known = await self.write(self._bank.trajectory, trajectory.id)
        except Exception as error:  # noqa: BLE001  (an unknown outcome is an honest one)
            if outage_of(error) is not None and self.extractor is not None:
                raise  # asked again after the pause
            self.count_failure("judge", error)
            return trajectory
        self.counts["judged"] += 1
        return known or trajectory

    async def _only_judge(self, trajectory: Trajectory, queued: bool) -> None:
        """Judge an episode that others distil; until then it is leased, so that they wait."""
        try:
            async with self.slots:
                await self._judged(trajectory)
            self._judges.pop(trajectory.id, None)
            if queued:
                await self.write(self._bank.queue.release, self._holder, trajectory.id)
        except BankError as error:  # a server that went away: the lease ends by itself
            self.count_failure("queue", error)
        finally:
            self._running.discard(trajectory.id)
            async with self._changed:
                self._changed.notify_all()

    async def _evict(self) -> None:
        cap, policy = self._settings.cap, self._settings.eviction
        try:
            evicted = await self.write(self._bank.evict, cap, policy, seed=self._seed, author="run")
            self.counts["evicted"] += len(evicted)
        except Exception as error:  # noqa: BLE001  (the next distillation evicts)
            self.count_failure("evict", error)

    async def _try_again(self, id: str, error: Exception) -> None:
        """Queue a failed item again after a while, or make it a dead letter.

        An outage of the service is not held against the item, unless it goes on failing while
        others are distilled.
        """
        loop = asyncio.get_running_loop()
        if is_over_budget(error):
            self._ready.put_nowait(id)
            return
        reason = self.count_failure("distill", error)
        if outage_of(error) is not None:
            times, distilled = self._outages.get(id, (0, self.counts["distilled"]))
            self._outages[id] = times + 1, distilled
            if times < _OUTAGES or distilled == self.counts["distilled"]:
                delay = min(self._backoff * 2**times, _LONGEST_BACKOFF)
                loop.call_later(delay, self._ready.put_nowait, id)
                return
        self.counts["failed"] += 1
        attempts, last = 1, False
        try:
            if await self.write(self._bank.queue.state, id) != "queued":
                self._drop(id)  # the result was applied, and only the answer to it was lost
                return
            attempts += await self.write(self._bank.queue.attempts, id)
            last = attempts > self._settings.retries
            await self.write(self._bank.queue.fail, id, reason, last=last)
        except Exception as error:  # noqa: BLE001
            # The journal cannot be written: the item is still queued there, and tried again here.
            self.count_failure("queue", error)
            last = False
        if last:
            self._drop(id)
        else:
            delay = min(self._backoff * 2 ** (attempts - 1), _LONGEST_BACKOFF)
            loop.call_later(delay, self._ready.put_nowait, id)

    def _drop(self, id: str) -> None:
        """Forget an item that is done, or dead."""
        self._open.discard(id)
        self._outages.pop(id, None)
        self._judges.pop(id, None)

    async def requeue(self, id: str) -> None:
        """Try a dead letter again, as ``ExperienceManager.requeue`` says."""
        if not await self.write(self._bank.queue.requeue, id):
            raise BankError(
                f"Expected the id of a dead letter, got {id!r}; list them with dead_letters()"
            )
        if self.extractor is not None and not self._bank.read_only:
            self._enqueue(id)

    @property
    def paused(self) -> bool:
        """Return whether ``resumed`` is cleared."""
        return not self.resumed.is_set()

    async def drain(self, timeout: float | None, leave: int) -> None:
        """Wait until the queue is done, as ``ExperienceManager.adrain`` says."""

        def is_done() -> bool:
            return len(self._open | self._running) + self._reserved <= leave

        workers: list[asyncio.Task[None]] = []
        if self._rounds is not None:
            workers.append(asyncio.create_task(self._work_in_order(self._rounds)))
        try:
            async with asyncio.timeout(timeout):
                while True:
                    async with self._changed:
                        await self._changed.wait_for(
                            lambda: is_done() or self.breaker.hopeless() is not None
                        )
                    if not is_done() and (error := self.breaker.hopeless()) is not None:
                        left = f"{len(self._open)} episodes are not distilled and stay queued"
                        if isinstance(error, BudgetError):
                            raise BudgetError(f"{error}; {left}") from error
                        raise BackendError(f"{error}; {left}", outage=outage_of(error)) from error
                    if self._takes:
                        # What was taken when the time ends is distilled all the same.
                        await asyncio.shield(self._take())
                    if is_done():
                        break
        except TimeoutError:
            raise TimeoutError(
                f"Expected the distillation queue to drain within {timeout} s, {len(self._open)}"
                " items are left"
            ) from None
        finally:
            await cancel_tasks(workers)

    async def embed(
        self, distillation: Distillation, shown: Sequence[Experience], task: str | None = None
    ) -> None:
        """Embed what a distillation writes into the bank's cache, before the bank is locked."""
        await self._embedding.arun(keys_to_embed(distillation, shown, task))

    async def write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a write of the bank on the thread of writes."""
        call = partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._writer, call)

    def count_failure(self, what: str, error: Exception) -> str:
        """Count a failure, warn of the first of its kind, and return its reason in words."""
        kind = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
        reason = f"{kind}: {error}"[:_REASON] if str(error) else kind
        counted = f"{what}: {kind}"
        self.failures[counted] += 1
        if self.failures[counted] == 1:
            _LOGGER.warning(
                "%s failed: %s (once; stats()['failures'] counts further ones)", what, reason
            )
        return reason

    def tell(
        self,
        name: str,
        hook: Callable[[T, Distillation, list[Experience]], None] | None,
        source: T,
        distillation: Distillation,
        written: list[Experience],
    ) -> None:
        """Count the operations of a distillation that was applied, and call the user's hook."""
        self.operations.update(operation.op for operation in distillation.parsed.operations)
        self.refused.update(refusal.reason for refusal in distillation.parsed.refused)
        if hook is not None:
            try:
                hook(source, distillation, written)
            except Exception as error:  # noqa: BLE001  (what a user's hook does ends no worker)
                self.count_failure(name, error)

    def usage(self) -> dict[str, Usage]:
        """Return what extractor and judges have spent so far, as far as they report it."""
        spent: dict[str, Usage] = {}
        if (told := getattr(self.extractor, "spent", None)) is not None:
            spent["extractor"] = told
        for judge in self._asked_judges.values():
            if (told := getattr(judge, "spent", None)) is not None:
                spent["judge"] = told + spent.get("judge", Usage())
        return spent

    def stats(self) -> dict[str, Any]:
        """Return the counts that ``ExperienceManager.stats`` has of distillation and merging."""
        queue, outage = self._bank.queue.counts(), self.breaker.error
        done = ("distilled", "judged", "failed", "merges", "deduplicated", "evicted")
        return {
            "queued": len(self._open - self._running),
            "running": len(self._running),
            "waiting": queue["queued"],
            "dead": queue["dead"],
            "pauses": self.breaker.pauses,
            "outage": None if outage is None else str(outage)[:_REASON],
            **{name: self.counts[name] for name in done},
            "operations": dict(self.operations),
            "failures": dict(self.failures),
        }

    def stop_taking(self) -> None:
        """Leave to others what they submit from now on."""
        self._takes = False

    def warn_of_rest(self) -> None:
        """Log how many episodes are left undistilled, or unjudged."""
        if self._open:
            _LOGGER.warning(
                "%d finished episodes are not distilled yet; they stay in the bank's queue, and the"
                " next manager with an extractor distils them, or experiential distil",
                len(self._open),
            )
        elif self._judges:
            _LOGGER.warning(
                "%d finished episodes are not judged yet; their distiller judges them first",
                len(self._judges),
            )

    def close(self) -> None:
        """End the threads and release the leases, once nothing runs on the event loop any more."""
        for batcher in (self._embedding, self._submitting):
            batcher.close(BankError("Expected an open manager, got a closed one"))
        self._writer.shutdown(wait=True)
        if self.extractor is not None and not self._bank.read_only and not self._bank.closed:
            with contextlib.suppress(BankError):  # a server that is away holds no leases
                self._bank.queue.release(self._holder)
