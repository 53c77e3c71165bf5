"""Continuous batching over a causal language model: one executor closure per forward, exact behaviour log-probabilities."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiential.errors import BackendError
from experiential.llm.executor import DeviceExecutor
from experiential.llm.forward import ForwardPass
from experiential.llm.kv import KVBlock, to_tensor
from experiential.llm.prefix_cache import PrefixCache
from experiential.llm.request import Request
from experiential.llm.sampling import draw_tokens

_LONGEST_WAIT = 10
"""Requests wait for others at most this many times ``batch_wait``."""
_SHARING = 256
"""Prompt tokens that a forward of the common beginning alone must save, to be worth being one
forward more.
"""


@dataclass(eq=False)
class _Track:
    """Requests of one priority: those that wait, those that decode together, and their states."""

    priority: int
    waiting: deque[Request] = field(default_factory=deque[Request])
    joining: list[Request] = field(default_factory=list[Request])
    rows: list[Request] = field(default_factory=list[Request])
    block: KVBlock | None = None
    scheduled: bool = False
    first_arrival: float = 0.0
    last_arrival: float = 0.0


class Engine:
    """Decodes requests of each priority in a batch of their own, a forward at a time, on a executor."""

    def __init__(
        self,
        forward: ForwardPass,
        executor: DeviceExecutor,
        *,
        max_batch: int,
        batch_wait: float,
        cache: PrefixCache,
        version: Callable[[], tuple[int, int]],
    ) -> None:
        self._forward = forward
        self._executor = executor
        self._max_batch = max_batch
        self._batch_wait = batch_wait
        self._cache = cache
        self._cache_epoch = 0
        self._version = version
        self._tracks: dict[int, _Track] = {}
        self._lock = threading.Lock()

    def submit(self, request: Request) -> None:
        """Queue a request; its future is resolved on its own event loop."""
        now = time.monotonic()
        with self._lock:
            track = self._tracks.setdefault(
                request.sampling.priority, _Track(request.sampling.priority)
            )
            if not track.waiting:
                track.first_arrival = now
            track.last_arrival = now
            track.waiting.append(request)
            start, track.scheduled = not track.scheduled, True
        if start:
            self._schedule(track, self._batch_wait)

    def _schedule(self, track: _Track, delay: float) -> None:
        try:
            step = self._executor.submit(
                lambda: self._step(track), priority=track.priority, delay=delay
            )
        except BackendError as error:
            self._fail_all(track, error)
            return
        step.add_done_callback(lambda done: self._after(track, done))

    def _after(self, track: _Track, step: Future[None]) -> None:
        """Plan the next step; a step that failed fails the requests that it touched, and nobody else."""
        if step.cancelled():
            self._fail_all(
                track,
                BackendError(
                    "Expected an open executor, got one closed while requests were waiting"
                ),
            )
            return
        if (error := step.exception()) is not None:
            failure = BackendError(
                f"Expected the model's forward to succeed, got {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._fail(track, failure)
        with self._lock:
            track.scheduled = bool(track.rows or track.waiting)
            delay = 0.0 if track.rows else self._patience(track, time.monotonic())
        if track.scheduled:
            self._schedule(track, delay)

    def _fail(self, track: _Track, error: BackendError) -> None:
        """Fail the requests of a failed prefill, or else the whole batch that a failed decoding step leaves in doubt."""
        with self._lock:
            if track.joining:
                failed = [request for request in track.joining if request not in track.rows]
            else:
                failed, track.rows, track.block = track.rows, [], None
            track.joining = []
        _deliver(failed, error)

    def _fail_all(self, track: _Track, error: BackendError) -> None:
        with self._lock:
            failed = [*track.rows, *track.joining, *track.waiting]
            track.rows, track.joining, track.block, track.scheduled = [], [], None, False
            track.waiting.clear()
        _deliver(failed, error)

    def _patience(self, track: _Track, now: float) -> float:
        """Seconds to wait for more requests before the next prefill; 0 when it should start."""
        if len(track.waiting) >= self._max_batch - len(track.rows):
            return 0.0
        quiet = track.last_arrival + self._batch_wait
        overdue = track.first_arrival + _LONGEST_WAIT * self._batch_wait
        return max(0.0, min(quiet, overdue) - now)

    def _step(self, track: _Track) -> None:
        """One prefill of what has arrived, or else one decoding forward."""
        version, epoch = self._version()
        if epoch != self._cache_epoch:
            self._cache.clear()
            self._cache_epoch = epoch
        with self._forward.measured():
            self._sweep(track)
            track.joining = self._admit(track)
            for request in track.joining:
                request.version, request.epoch = version, epoch
            if track.joining:
                self._prefill(track)
            elif track.rows:
                self._decode(track)

    def _sweep(self, track: _Track) -> None:
        """Remove rows that nobody waits for."""
        for row in range(len(track.rows) - 1, -1, -1):
            if track.rows[row].cancelled:
                self._leave(track, row)

    def _admit(self, track: _Track) -> list[Request]:
        with self._lock:
            room = self._max_batch - len(track.rows)
            if room <= 0 or not track.waiting or self._patience(track, time.monotonic()) > 0:
                return []
            taken = [track.waiting.popleft() for _ in range(min(room, len(track.waiting)))]
        return [request for request in taken if not request.cancelled]

    def _prefill(self, track: _Track) -> None:
        """Forward each distinct prompt once, draw a token for every request, and join the unfinished to the batch."""
        distinct: dict[tuple[int, ...], list[Request]] = {}
        for request in track.joining:
            distinct.setdefault(request.prefix, []).append(request)
        arrays = [np.array(prefix, dtype=np.int64) for prefix in distinct]
        matches = self._matches(arrays)
        members = list(distinct.values())
        for chunk in self._forward.plan(
            [len(ids) - matched for ids, (matched, _) in zip(arrays, matches, strict=True)]
        ):
            block, logits = self._forward.prefill(
                [arrays[i] for i in chunk], [matches[i] for i in chunk]
            )
            for row, i in enumerate(chunk):
                self._remember(arrays[i], block, row)
            self._accept_first(track, block, logits, [members[i] for i in chunk])
        track.joining = []

    def _matches(self, prompts: Sequence[NDArray[np.int64]]) -> list[tuple[int, Any]]:
        """What the cache holds of each prompt, once it holds the beginnings that several share, where that pays.

        First the beginning of all (a system prompt), then those of the prompts of one task (its
        first observation).
        """
        matches = [self._cache.match(ids) for ids in prompts]
        for cluster in (_all_together, _by_beginning):
            shared = [
                (group, length)
                for group, length in cluster(prompts)
                if length <= self._cache.max_tokens
            ]
            wanted = [prompts[group[0]][:length] for group, length in shared]
            saved = sum(_saving([matches[i][0] for i in group], length) for group, length in shared)
            if saved >= _SHARING:
                known = [self._cache.match(ids) for ids in wanted]
                block, _ = self._forward.prefill(wanted, known)
                for row, ids in enumerate(wanted):
                    self._remember(ids, block, row)
                matches = [self._cache.match(ids) for ids in prompts]
        return matches

    def _accept_first(
        self, track: _Track, block: KVBlock, logits: Tensor, members: Sequence[Sequence[Request]]
    ) -> None:
        requests = [request for group in members for request in group]
        source = [row for row, group in enumerate(members) for _ in group]
        for request in requests:
            request.seen = len(request.prefix)
        self._advance(requests, logits, source)
        going = [i for i, request in enumerate(requests) if request.finish is None]
        if going:
            chosen = block.select([source[i] for i in going])
            track.block = chosen if track.block is None else track.block.join(chosen)
            track.rows.extend(requests[i] for i in going)
        _deliver([request for request in requests if request.finish is not None])

    def _decode(self, track: _Track) -> None:
        """Feed every row what it has not seen, draw its next token, and let finished rows leave."""
        assert track.block is not None
        rows = track.rows
        logits = self._forward.extend(
            track.block, [row.pending for row in rows], [row.seen for row in rows]
        )
        for row in rows:
            row.seen += len(row.pending)
        self._advance(rows, logits, range(len(rows)))
        _deliver([row for row in rows if row.finish is not None])
        for index in range(len(rows) - 1, -1, -1):
            if rows[index].finish is not None:
                self._leave(track, index)

    def _leave(self, track: _Track, index: int) -> None:
        """Take a row out of the batch (the last row moves into its slot), keeping its states for the next turn."""
        assert track.block is not None
        request = track.rows[index]
        if request.epoch == self._cache_epoch:
            ids = np.array([*request.prompt, *request.response][: request.seen], dtype=np.int64)
            self._remember(ids, track.block, index)
        track.block.drop(index)
        track.rows[index] = track.rows[-1]
        track.rows.pop()
        if not track.rows:
            track.block = None

    def _remember(self, ids: NDArray[np.int64], block: KVBlock, row: int) -> None:
        self._cache.put(ids, lambda: block.row(row, len(ids)))

    def _advance(self, requests: Sequence[Request], logits: Tensor, source: Sequence[int]) -> None:
        """Draw one token for each request from its row of ``logits``; constrained and free requests apart."""
        free = [i for i, request in enumerate(requests) if request.choices is None]
        bound = [i for i, request in enumerate(requests) if request.choices is not None]
        if free:
            chosen = [requests[i] for i in free]
            rows = (
                logits
                if len(free) == len(logits) == len(requests)
                else logits[[source[i] for i in free]]
            )
            index, logprobs = _draw(_structured(rows, chosen), chosen)
            _accept(chosen, index.cpu().numpy(), logprobs)
        if bound:
            self._advance_bound([requests[i] for i in bound], logits, [source[i] for i in bound])

    def _advance_bound(
        self, requests: Sequence[Request], logits: Tensor, source: Sequence[int]
    ) -> None:
        allowed = [request.choices or () for request in requests]
        width = max(map(len, allowed))
        tokens = np.zeros((len(requests), width), dtype=np.int64)
        barred = np.ones((len(requests), width), dtype=bool)
        for row, ids in enumerate(allowed):
            tokens[row, : len(ids)] = ids
            barred[row, : len(ids)] = False
        rows = torch.tensor(source, device=logits.device).unsqueeze(1)
        scores = logits[rows, to_tensor(tokens, logits.device)].cpu()
        scores = scores.masked_fill(to_tensor(barred, scores.device), -torch.inf)
        index, logprobs = _draw(scores, requests)
        _accept(requests, tokens[np.arange(len(requests)), index.numpy()], logprobs)


_Shared = tuple[list[int], int]
"""Indices of prompts, and the length of the beginning that they share."""


def _saving(matched: Sequence[int], shared: int) -> int:
    """Tokens that need no forward when ``shared`` tokens are forwarded once, for prompts of which ``matched`` are known."""
    return sum(max(0, shared - known) for known in matched) - max(0, shared - max(matched))


def _all_together(prompts: Sequence[NDArray[np.int64]]) -> list[_Shared]:
    """All prompts as one group."""
    return [(list(range(len(prompts))), _common_prefix(prompts))]


def _by_beginning(prompts: Sequence[NDArray[np.int64]]) -> list[_Shared]:
    """Groups of prompts that share more than all do: neighbours in sorted order, cut at the length that saves most."""
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].tolist())
    joints = [
        _common_prefix([prompts[i], prompts[j]]) for i, j in zip(order, order[1:], strict=False)
    ]
    base = min(joints, default=0)
    cuts: list[list[_Shared]] = [[], *(_cut(order, joints, least) for least in sorted(set(joints)))]
    return max(
        cuts, key=lambda groups: sum((len(group) - 1) * (shared - base) for group, shared in groups)
    )


def _cut(order: Sequence[int], joints: Sequence[int], least: int) -> list[_Shared]:
    """Runs of two or more neighbours that share at least ``least`` tokens each with the next."""
    groups: list[_Shared] = []
    joined = False
    for left, right, shared in zip(order, order[1:], joints, strict=False):
        if shared < least:
            joined = False
        elif joined:
            groups[-1] = ([*groups[-1][0], right], min(groups[-1][1], shared))
        else:
            groups.append(([left, right], shared))
            joined = True
    return groups


def _common_prefix(prompts: Sequence[NDArray[np.int64]]) -> int:
    """Length of the beginning that all prompts share."""
    width = min(map(len, prompts))
    differ = np.flatnonzero(
        (np.stack([ids[:width] for ids in prompts]) != prompts[0][:width]).any(axis=0)
    )
    return int(differ[0]) if len(differ) else width


def _draw(scores: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    device = scores.device
    sampling = [request.sampling for request in requests]
    return draw_tokens(
        scores,
        torch.tensor([each.temperature for each in sampling], dtype=torch.float32, device=device),
        torch.tensor([each.top_k for each in sampling], dtype=torch.int64, device=device),
        torch.tensor([each.top_p for each in sampling], dtype=torch.float32, device=device),
        torch.tensor(
            [request.uniform() for request in requests], dtype=torch.float64, device=device
        ),
    )


def _structured(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    """``scores`` with ``-inf`` where the schema of a row's request forbids the token."""
    bound = [row for row, request in enumerate(requests) if request.schema is not None]
    if not bound:
        return scores
    allowed = np.ones(scores.shape, dtype=bool)
    for row in bound:
        allowed[row] = requests[row].schema.allowed()  # pyright: ignore[reportOptionalMemberAccess]
    return scores.masked_fill(to_tensor(~allowed, scores.device), -torch.inf)


def _accept(requests: Sequence[Request], tokens: NDArray[np.int64], logprobs: Tensor) -> None:
    for request, token, logprob in zip(requests, tokens, logprobs.cpu().numpy(), strict=True):
        request.accept(int(token), float(logprob))


def _deliver(requests: Sequence[Request], error: BackendError | None = None) -> None:
    """Resolve the futures of these requests, one wake-up per event loop; a loop that has closed has nobody waiting."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for request in requests:
        if request.future is not None:
            by_loop.setdefault(request.future.get_loop(), []).append(request.future)
    for loop, futures in by_loop.items():
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, futures, error)


def _resolve(futures: Sequence[asyncio.Future[None]], error: BackendError | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
