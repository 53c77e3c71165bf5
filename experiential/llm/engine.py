"""Decode many requests together: continuous batching with exact behaviour log-probabilities.

Every forward is one closure on the device's executor, so that requests of another priority and
training can come between two forwards.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiential.errors import BackendError
from experiential.llm.executor import DeviceExecutor
from experiential.llm.forward import ForwardPass
from experiential.llm.request import Request
from experiential.llm.states import PrefixCache, Row
from experiential.sync import resolve_futures

_LONGEST_WAIT = 10
"""Requests wait for others at most this many times ``batch_wait``."""
_PREFILL_TOKENS = 16384
"""Tokens of one prefill forward, a little more if its last prompt does; more are split."""
_CPU_PREFILL_TOKENS = 1024
"""The same on a CPU, where the values between two layers shall stay in its cache."""
_ROOM = 128
"""Tokens of a response, at most, that a row has room for from the beginning."""
_NUCLEUS = 1024
"""Most tokens that ``top_p`` keeps, since every kept set goes with its token into training."""
_SHARING = 256
"""Prompt tokens that a forward of a common beginning must save to be worth one forward more."""


@dataclass(eq=False)
class _Track:
    """Hold the requests of one priority: waiting, joining, decoding."""

    # No `Batcher`: with continuous batching rows join and leave a batch while it is decoded.
    priority: int
    waiting: deque[Request] = field(default_factory=deque[Request])
    joining: list[Request] = field(default_factory=list[Request])
    rows: list[Request] = field(default_factory=list[Request])
    scheduled: bool = False
    due: float = 0.0  # then the waiting requests start, unless another one arrives
    overdue: float = 0.0  # then they start in any case


class _Opened(NamedTuple):
    """Hold a distinct prompt, the row that knows its beginning, and the requests for it."""

    row: Row
    ids: NDArray[np.int64]
    requests: list[Request]


@dataclass(eq=False)
class Engine:
    """Decode the requests of each priority in a batch of their own, one forward at a time.

    Attributes:
        forward: the model.
        executor: the thread that runs it.
        max_batch: rows of a batch.
        batch_wait: seconds without a new request after which the waiting ones are started.
        cache: key-value states, those of past prompts included.
        version: gives the version of the weights, and the epoch that counts their changes.
    """

    forward: ForwardPass
    executor: DeviceExecutor
    max_batch: int
    batch_wait: float
    cache: PrefixCache
    version: Callable[[], tuple[int, int]]
    _cache_epoch: int = 0
    _tracks: dict[int, _Track] = field(default_factory=dict[int, _Track])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _held: int = 0  # blocks of ``together`` that are open

    @contextmanager
    def together(self) -> Generator[None]:
        """Start no track inside the block; its requests then form a batch at once."""
        with self._lock:
            self._held += 1
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
                tracks = [one for one in self._tracks.values() if one.waiting and not self._held]
                for track in tracks:
                    track.due = 0.0
                idle = [track for track in tracks if not track.scheduled]
                for track in idle:
                    track.scheduled = True
            for track in idle:
                self._plan(track)

    def submit(self, request: Request) -> None:
        """Queue a request; its future is resolved on its own event loop."""
        now, priority = time.monotonic(), request.sampling.priority
        with self._lock:
            track = self._tracks.setdefault(priority, _Track(priority))
            if not track.waiting:
                track.overdue = now + _LONGEST_WAIT * self.batch_wait
            track.due = min(now + self.batch_wait, track.overdue)
            track.waiting.append(request)
            start = not track.scheduled and not self._held
            track.scheduled = track.scheduled or start
        if start:
            self._plan(track)

    def _plan(self, track: _Track, last: Future[None] | None = None) -> None:
        """Submit the next step; a last one that failed fails only the requests that it touched."""
        if last is not None and last.cancelled():
            closed = "Expected an open executor, got one closed while requests were waiting"
            return self._fail_all(track, BackendError(closed))
        if last is not None and (error := last.exception()) is not None:
            failure = BackendError(
                f"Expected the model's forward to succeed, got {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            with self._lock:
                if track.joining:  # a prefill failed: the rows that were decoding are untouched
                    failed = [request for request in track.joining if request not in track.rows]
                else:  # a decoding step failed: the states of the whole batch are in doubt
                    failed, track.rows = track.rows, []
                    for request in failed:  # this callback runs on the executor's thread
                        self.cache.release(request.row)
                track.joining = []
            resolve_futures((request.future for request in failed), failure)
        with self._lock:
            track.scheduled = bool(track.rows or track.waiting)
            idle = not track.rows and len(track.waiting) < self.max_batch
            delay = max(0.0, track.due - time.monotonic()) if idle else 0.0
        if not track.scheduled:
            return
        try:
            work = partial(self._step, track)
            step = self.executor.submit(work, priority=track.priority, delay=delay)
        except BackendError as error:
            return self._fail_all(track, error)
        step.add_done_callback(partial(self._plan, track))

    def _fail_all(self, track: _Track, error: BackendError) -> None:
        with self._lock:
            failed = [*track.rows, *track.joining, *track.waiting]
            track.rows, track.joining, track.scheduled = [], [], False
            track.waiting.clear()
        resolve_futures((request.future for request in failed), error)

    def _step(self, track: _Track) -> None:
        """Run one prefill of the requests that have arrived, or else one decoding forward."""
        version, epoch = self.version()
        if epoch != self._cache_epoch:
            self.cache.clear()
            self._cache_epoch = epoch
        start = time.perf_counter()
        with torch.inference_mode():
            self._leave(track)
            with self._lock:
                room, waiting = self.max_batch - len(track.rows), len(track.waiting)
                if waiting < room and time.monotonic() < track.due:
                    room = 0  # more requests may come, to be started together
                taken = [track.waiting.popleft() for _ in range(min(room, waiting))]
            track.joining = [request for request in taken if not request.future.cancelled()]
            for request in track.joining:
                request.version, request.epoch = version, epoch
            if track.joining:
                self._prefill(track)
            elif track.rows:
                self._decode(track)
                self._leave(track)
        self.forward.stats.seconds += time.perf_counter() - start

    def _decode(self, track: _Track) -> None:
        """Feed every row what it has not seen, and draw its next token."""
        requests = track.rows
        moved = False
        for request in requests:
            needed = request.row.length + len(request.pending)
            if needed > request.row.slab.capacity:
                self.cache.reserve(request.row, needed)
                moved = True
        if moved:
            requests.sort(key=_place)
        rows = [request.row for request in requests]
        logits = self.forward.extend(rows, [request.pending for request in requests])
        _advance(requests, logits, range(len(requests)))
        resolve_futures(request.future for request in requests if request.finish is not None)

    def _prefill(self, track: _Track) -> None:
        """Forward each distinct prompt once, draw a token for each request, join the unfinished."""
        distinct: dict[tuple[int, ...], list[Request]] = {}
        for request in track.joining:  # a response in the making begins with its forced tokens
            distinct.setdefault((*request.prompt, *request.response), []).append(request)
        prompts = [np.array(prefix, dtype=np.int64) for prefix in distinct]
        opened: list[_Opened] = []
        try:
            beginnings: list[tuple[Row, NDArray[np.int64]]] = []
            try:  # in use until all prompts have them, for idle ones might have to make room
                if self.cache.keeps:
                    self._share(prompts, beginnings)
                for ids, members in zip(prompts, distinct.values(), strict=True):
                    room = min(_ROOM, max(request.limit for request in members))
                    opened.append(_Opened(self.cache.open(ids, room), ids, members))
            finally:
                for row, ids in beginnings:
                    self.cache.release(row, ids)
            opened.sort(key=lambda one: one.row.place, reverse=True)
            cpu = self.forward.device.type == "cpu"
            most = _CPU_PREFILL_TOKENS if cpu else _PREFILL_TOKENS
            while opened:
                chunk = [opened.pop()]
                new = len(chunk[0].ids) - chunk[0].row.length
                while opened and new <= most:
                    new += len(opened[-1].ids) - opened[-1].row.length
                    chunk.append(opened.pop())
                try:
                    self._start(track, chunk)
                except BaseException:
                    opened += chunk
                    raise
        except BaseException:
            for one in opened:
                self.cache.release(one.row)
            raise
        track.joining = []

    def _start(self, track: _Track, chunk: list[_Opened]) -> None:
        """Forward some prompts and draw the first token of their requests.

        Those whose rows have found an owner are taken from ``chunk``, whatever fails later.
        """
        self.forward.stats.cached_tokens += sum(one.row.length for one in chunk)
        logits = self.forward.extend(
            [one.row for one in chunk], [one.ids[one.row.length :] for one in chunk]
        )
        requests = [request for one in chunk for request in one.requests]
        _advance(requests, logits, [i for i, one in enumerate(chunk) for _ in one.requests])
        while chunk:
            one = chunk.pop(0)
            going = [request for request in one.requests if request.finish is None]
            if not going:
                self.cache.release(one.row, one.ids)
                continue
            self.cache.record(one.row, one.ids)
            for request in going:
                first = request is going[0]
                room = min(_ROOM, request.limit)
                request.row = one.row if first else self.cache.fork(one.row, room)
                track.rows.append(request)
        track.rows.sort(key=_place)
        resolve_futures(request.future for request in requests if request.finish is not None)

    def _share(
        self,
        prompts: Sequence[NDArray[np.int64]],
        beginnings: list[tuple[Row, NDArray[np.int64]]],
    ) -> None:
        """Forward the common beginnings of prompts, where one forward more saves enough tokens.

        Their rows are added to ``beginnings``; the caller releases them.

        First comes the beginning of all (a system prompt), then those of the prompts of one task
        (its first observation). The latter are runs of neighbours in sorted order, cut at the
        length that saves most tokens.
        """
        held = [self.cache.match(ids)[0] for ids in prompts]
        if sum(map(len, prompts)) - sum(held) < _SHARING:
            return
        order = sorted(range(len(prompts)), key=lambda i: prompts[i].tolist())
        joints: list[int] = []  # length of the beginning that neighbours share
        for left, right in pairwise(order):
            width = min(len(prompts[left]), len(prompts[right]))
            differ = np.flatnonzero(prompts[left][:width] != prompts[right][:width])
            joints.append(int(differ[0]) if len(differ) else width)
        base = min(joints, default=0)
        tasks: list[tuple[list[int], int]] = []
        most = 0
        for least in sorted(set(joints)):
            groups: list[tuple[list[int], int]] = []
            joined = False
            for (left, right), shared in zip(pairwise(order), joints, strict=True):
                if shared < least:
                    joined = False
                elif joined:
                    groups[-1] = ([*groups[-1][0], right], min(groups[-1][1], shared))
                else:
                    groups.append(([left, right], shared))
                    joined = True
            saved = sum((len(group) - 1) * (shared - base) for group, shared in groups)
            if saved > most:
                tasks, most = groups, saved
        for groups in ([(order, base)], tasks):
            saved = 0
            for group, length in groups:
                known = [held[i] for i in group]
                apart = sum(max(0, length - matched) for matched in known)
                saved += apart - max(0, length - max(known))
            if saved < _SHARING:
                continue
            wanted = [prompts[group[0]][:length] for group, length in groups]
            rows: list[Row] = []
            try:
                for ids in wanted:
                    rows.append(self.cache.open(ids, 0))
                self.forward.stats.cached_tokens += sum(row.length for row in rows)
                self.forward.extend(
                    rows, [ids[row.length :] for ids, row in zip(wanted, rows, strict=True)]
                )
            except BaseException:
                for row in rows:
                    self.cache.release(row)
                raise
            for row, ids in zip(rows, wanted, strict=True):
                self.cache.record(row, ids)
                beginnings.append((row, ids))
            held = [self.cache.match(ids)[0] for ids in prompts]

    def _leave(self, track: _Track) -> None:
        """Take finished and cancelled rows out of the batch.

        Their states stay where they are, for the next turns of their conversations.
        """
        going: list[Request] = []
        for request in track.rows:
            if request.finish is None and not request.future.cancelled():
                going.append(request)
                continue
            row, request.row = request.row, None
            ids = np.array([*request.prompt, *request.response][: row.length], dtype=np.int64)
            self.cache.release(row, ids if request.epoch == self._cache_epoch else None)
        track.rows = going


def _place(request: Request) -> tuple[int, int]:
    return request.row.place


def _advance(requests: Sequence[Request], logits: Tensor, source: Sequence[int]) -> None:
    """Draw one token for each request from its row of ``logits``, given by ``source``."""
    free = [i for i, request in enumerate(requests) if request.node is None]
    bound = [i for i, request in enumerate(requests) if request.node is not None]
    draws: list[tuple[list[int], Tensor, NDArray[np.int64] | None]] = []
    if free:
        everyone = len(free) == len(logits) == len(requests)
        scores = logits if everyone else logits[[source[i] for i in free]]
        schemas = [requests[i].schema for i in free]
        if any(schema is not None for schema in schemas):
            allowed = np.ones(scores.shape, dtype=bool)
            for row, schema in enumerate(schemas):
                if schema is not None:
                    allowed[row] = schema.allowed()
            barred = torch.as_tensor(~allowed, device=scores.device)
            scores = scores.masked_fill(barred, -torch.inf)
        draws.append((free, scores, None))
    if bound:
        # choices allow a handful of tokens, so only their logits leave the device
        choices = [request.node.allowed for request in requests if request.node is not None]
        tokens = np.zeros((len(bound), max(map(len, choices))), dtype=np.int64)
        for row, ids in enumerate(choices):
            tokens[row, : len(ids)] = ids
        rows = torch.tensor([source[i] for i in bound], device=logits.device).unsqueeze(1)
        scores = logits[rows, torch.as_tensor(tokens, device=logits.device)].cpu()
        lengths = torch.tensor([len(ids) for ids in choices]).unsqueeze(1)
        scores = scores.masked_fill(torch.arange(tokens.shape[1]) >= lengths, -torch.inf)
        draws.append((bound, scores, tokens))
    for places, scores, tokens in draws:
        chosen = [requests[i] for i in places]
        tensor = partial(torch.tensor, device=scores.device)
        index, logprobs, kept = draw_tokens(
            scores,
            temperature=tensor([one.sampling.temperature for one in chosen], dtype=torch.float32),
            top_k=tensor([one.sampling.top_k for one in chosen], dtype=torch.int64),
            top_p=tensor([one.sampling.top_p for one in chosen], dtype=torch.float32),
            uniform=tensor([one.uniform() for one in chosen], dtype=torch.float64),
        )
        drawn, values = index.cpu().numpy(), logprobs.cpu().numpy()
        if tokens is not None:
            drawn = tokens[np.arange(len(chosen)), drawn]
        for row, (request, token) in enumerate(zip(chosen, drawn, strict=True)):
            among = kept.get(row)
            if among is not None and tokens is not None:
                among = tokens[row][among]
            within = None if among is None else tuple(among.tolist())
            request.accept(int(token), float(values[row]), within)


def draw_tokens(
    scores: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, dict[int, NDArray[np.int64]]]:
    """Draw from ``softmax(scores / temperature)`` after top-k, then top-p, renormalised.

    A row is drawn by inverse CDF and depends on its own scores and its own uniform number only,
    hence not on the other rows of its batch.

    Args:
        scores: logits, shape (n, v), float32; ``-inf`` marks what a constraint forbids.
        temperature: shape (n,), float32; 0 takes the best index, and the log-probability reported
            is then the one at temperature 1 without truncation (a greedy choice has no density of
            its own).
        top_k: shape (n,), int64; 0 means no limit.
        top_p: shape (n,), float32; 1 means no limit, else 1,024 indices are kept at most.
        uniform: numbers in [0, 1), shape (n,), float64.

    Returns:
        indices, shape (n,), int64, their log-probabilities in nats, shape (n,), float32, and of
        each truncated row the indices that were kept.
    """
    greedy = temperature == 0
    scaled = scores / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    truncated = ((top_k > 0) | (top_p < 1)) & ~greedy
    kept: dict[int, NDArray[np.int64]] = {}
    if bool(truncated.any()):
        # -inf for all but the top k, then for all but the smallest set with mass top_p; of equal
        # scores the lower index is kept
        ordered, order = scaled[truncated].sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(scores.shape[1], device=scores.device)
        limit = torch.where(top_p < 1, _NUCLEUS, scores.shape[1])
        limit = torch.where(top_k > 0, top_k, limit)[truncated].unsqueeze(1)
        ordered = ordered.masked_fill(rank >= limit, -torch.inf)
        probability = torch.softmax(ordered, dim=-1)
        before = probability.cumsum(dim=-1) - probability
        beyond = (before >= top_p[truncated].unsqueeze(1)) & (rank > 0)
        ordered = ordered.masked_fill(beyond, -torch.inf)
        scaled[truncated] = torch.empty_like(ordered).scatter_(1, order, ordered)
        for row in map(int, truncated.nonzero().flatten()):
            kept[row] = scaled[row].isfinite().nonzero().flatten().cpu().numpy()
    logprobs = torch.log_softmax(scaled, dim=-1)
    mass = logprobs.double().exp().cumsum(dim=-1)
    target = (uniform * mass[:, -1]).unsqueeze(1)
    drawn = torch.searchsorted(mass, target, right=True).squeeze(1).clamp(max=scores.shape[1] - 1)
    index = torch.where(greedy, scores.argmax(dim=-1), drawn) if bool(greedy.any()) else drawn
    return index, logprobs.gather(1, index.unsqueeze(1)).squeeze(1), kept
