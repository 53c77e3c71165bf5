"""Keep key-value states where they were written: rows of slabs, found again by their tokens."""

from __future__ import annotations

import heapq
import os
import warnings
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]
MEMORY_SHARE = 0.1
"""Share of the free memory that the states of a policy may take where no size is set."""
_FLOOR_GB = 0.25
"""Memory that they may take at least, then."""
_SLAB = 8192
"""Tokens that one slab has room for; a longer row has a slab of its own."""
_LEAST = 64
"""Tokens of the smallest row; the next sizes are twice as large each."""
_SHORTEST = 8
"""Tokens that a prompt must share with known ones, to be worth a lookup."""
_COPIED = 32
"""Tokens that are copied in the time in which one is forwarded, at least."""
_BLOCK = 256
"""Tokens that are compared at a time."""
_GHOSTS = 256
"""Dropped rows whose tokens are remembered, to notice that they were needed."""
_THRASHING = 4096
"""Tokens forwarded again that are worth a warning, if they are a quarter of all."""


@dataclass(eq=False)
class Slab:
    """Hold rows of one capacity side by side, so that attention runs over neighbours in one call.

    Attributes:
        order: when it was made; rows are sorted by it.
        capacity: tokens that a row has room for.
        data: shape (2 * layers, rows, heads, capacity, dim); the first forward makes it. What has
            not been written is finite, for masked columns are multiplied by zero.
        free: unused slots, a heap.
    """

    order: int
    rows: int
    capacity: int
    layers: int
    data: Tensor | None = None
    free: list[int] = field(default_factory=list[int])

    def states(self, like: Tensor) -> Tensor:
        """Return the tensor, made for states ``like`` (1, heads, tokens, dim) if there is none."""
        if self.data is None:
            shape = (2 * self.layers, self.rows, like.shape[1], self.capacity, like.shape[3])
            if like.device.type == "cpu":  # numpy leaves pages unmapped until they are written
                size = int(np.prod(shape)) * like.element_size()
                self.data = torch.as_tensor(np.zeros(size, np.uint8)).view(like.dtype).view(shape)
            else:
                self.data = like.new_zeros(shape)
        return self.data


@dataclass(eq=False)
class Row:
    """Place the states of one sequence: its tokens are the first ``length`` columns of a slot."""

    slab: Slab
    slot: int
    length: int = 0
    entry: int | None = None  # of the cache's index; None where no prompt shall find it

    @property
    def place(self) -> tuple[int, int]:
        """Return what rows are sorted by: neighbours are attended to together."""
        return self.slab.order, self.slot


class PrefixCache:
    """Own all states of one policy, and find those of a prompt's beginning.

    A conversation goes on in its row without a copy. A prompt that branches off copies the
    beginning. Idle rows are dropped, the least recently used first, where their room is needed.

    Used from one thread, the executor's. The ids of all rows lie in one padded matrix, so that one
    comparison finds the best row; a dict finds equal keys only.

    Args:
        layers: of the model.
        max_gb: memory for states, in 10^9 bytes; None takes a tenth of what is free at the first
            forward, 0 keeps no idle row. Rows in use get room in any case; once they are idle, the
            oldest go until the rest fits.
    """

    def __init__(self, layers: int, max_gb: float | None = None) -> None:
        if max_gb is not None and max_gb < 0:
            raise ValueError(f"Expected a prefix cache of at least 0 GB, got {max_gb}")
        self.tokens = 0  # that there is room for, used or not
        self._layers = layers
        self._max_gb = max_gb
        self._token_bytes = 0  # known after the first forward
        self._made = 0
        self._slabs: list[Slab] = []
        self._idle: OrderedDict[int, Row] = OrderedDict()  # by entry, least recently used first
        self._busy: dict[int, Row] = {}  # by entry
        self._ghosts: OrderedDict[int, None] = OrderedDict()  # entries without a row
        self._ids: Ids = np.full((16, 256), -1, dtype=np.int64)
        self._lengths: Ids = np.zeros(16, dtype=np.int64)
        self._vacant: list[int] = []
        self._used = 0
        self._lost = self._forwarded = 0
        self._warned = False

    def __len__(self) -> int:
        return len(self._idle)

    @property
    def keeps(self) -> bool:
        """Return whether rows are kept for later prompts."""
        return self._max_gb != 0

    def match(self, ids: Ids) -> tuple[int, Row | None]:
        """Return ``(n, row)`` of the longest known beginning, n < len(ids); (0, None) without one.

        The last token is never known, for its logits are needed.
        """
        common = self._common(ids[:-1])
        if not self._idle and not self._busy:
            return 0, None
        live = np.array([*self._idle, *self._busy])
        # of equal beginnings, a row that ends there goes on in place
        ends = (common[live] == self._lengths[live]) & (np.arange(len(live)) < len(self._idle))
        best = int(live[(2 * common[live] + ends).argmax()])
        if common[best] < _SHORTEST:
            return 0, None
        return int(common[best]), self._idle.get(best) or self._busy[best]

    def open(self, ids: Ids, room: int) -> Row:
        """Return a row that holds as many of ``ids`` as are known, with room for more after them.

        An idle row that ends where the prompt goes on is continued, else its beginning is copied.
        """
        known, source = self.match(ids)
        self._watch(ids, known)
        if source is None:
            return self._take(len(ids) + room)
        if source.entry in self._idle and (source.length - known) * _COPIED <= known:
            self._busy[source.entry] = self._idle.pop(source.entry)
            source.length = self._lengths[source.entry] = known
            try:
                self.reserve(source, len(ids) + room)
            except BaseException:
                self.release(source)
                raise
            return source
        if source.entry in self._idle:
            self._idle.move_to_end(source.entry)
        return self._copy(source, known, len(ids) + room)

    def fork(self, row: Row, room: int) -> Row:
        """Return a copy of a row, with room for more tokens."""
        return self._copy(row, row.length, row.length + room)

    def reserve(self, row: Row, tokens: int) -> None:
        """Move a row that has no room for so many tokens to a slot at least twice as large."""
        if tokens <= row.slab.capacity:
            return
        larger = self._copy(row, row.length, tokens)
        self._vacate(row)
        row.slab, row.slot = larger.slab, larger.slot

    def record(self, row: Row, ids: Ids) -> None:
        """Let prompts that begin as ``ids`` find this row, which is in use."""
        if len(ids) < _SHORTEST:
            return
        if row.entry is None:
            row.entry = self._vacant.pop() if self._vacant else self._used
            self._used = max(self._used, row.entry + 1)
            self._busy[row.entry] = row
        rows, width = self._ids.shape
        if self._used > rows or len(ids) > width:  # at least double what is too small
            more = self._used if self._used > rows else 0
            wider = 2 * len(ids) - width if len(ids) > width else 0
            self._ids = np.pad(self._ids, ((0, more), (0, wider)), constant_values=-1)
            self._lengths = np.pad(self._lengths, (0, more))
        self._ids[row.entry, : len(ids)] = ids
        self._lengths[row.entry] = len(ids)

    def release(self, row: Row, ids: Ids | None = None) -> None:
        """End the use of a row; with its ``ids``, prompts of the same weights may continue it."""
        if ids is not None and self.keeps:
            self.record(row, ids)
        if row.entry is None:
            self._vacate(row)
            return
        self._busy.pop(row.entry)
        if ids is None or not self.keeps or self._is_known(row.entry, ids):
            self._forget(row.entry)
            self._vacate(row)
        else:
            self._idle[row.entry] = row
            while sum(one.slab.capacity for one in self._idle.values()) > self._limit():
                self._drop_oldest()

    def clear(self) -> None:
        """Drop the idle rows and hide those in use, because the weights have changed."""
        for row in self._idle.values():
            self._vacate(row)
        for row in (*self._idle.values(), *self._busy.values()):
            row.entry = None
        for held in (self._idle, self._busy, self._ghosts, self._vacant):
            held.clear()
        self._lengths[:] = 0
        self._used = self._lost = self._forwarded = 0

    def _copy(self, source: Row, tokens: int, room: int) -> Row:
        row = self._take(max(room, tokens))
        if source.slab.data is not None and tokens:
            # a row dropped just now to make room keeps its states until they are written over
            try:
                target = row.slab.states(source.slab.data[0, :1])
            except BaseException:  # out of memory
                self._vacate(row)
                raise
            target[:, row.slot, :, :tokens] = source.slab.data[:, source.slot, :, :tokens]
        row.length = tokens
        return row

    def _take(self, tokens: int) -> Row:
        """Return a free slot, in a new slab if there is none; idle rows are dropped for it."""
        capacity = max(_LEAST, 1 << (tokens - 1).bit_length())
        while True:
            for slab in self._slabs:
                if slab.capacity == capacity and slab.free:
                    return Row(slab, heapq.heappop(slab.free))
            left = self._limit() - self.tokens
            if left >= capacity or not self._idle:
                # Beyond the limit, rows in use alone take room, and more of them will: each in a
                # slab of its own would be attended to alone.
                room = min(left, _SLAB) if left >= capacity else _SLAB
                rows = max(1, room // capacity)
                slab = Slab(self._made, rows, capacity, self._layers, free=[*range(rows)])
                self._made += 1
                self.tokens += rows * capacity
                self._slabs.append(slab)
            else:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        entry, row = self._idle.popitem(last=False)
        self._vacate(row)
        self._ghosts[entry] = None
        if len(self._ghosts) > _GHOSTS:
            self._forget(self._ghosts.popitem(last=False)[0])

    def _limit(self) -> int:
        """Return the tokens that there may be room for; a slab's before the first forward."""
        if not self._token_bytes:
            data = next((slab.data for slab in self._slabs if slab.data is not None), None)
            if data is None:
                return self.tokens + _SLAB
            self._token_bytes = data[:, 0, :, 0].numel() * data.element_size()
            if self._max_gb is None:
                self._max_gb = max(_FLOOR_GB, MEMORY_SHARE * free_memory(data.device) / 1e9)
        return int((self._max_gb or 0.0) * 1e9 / self._token_bytes)

    def _vacate(self, row: Row) -> None:
        self._limit()  # its slab may be the only one that knows
        heapq.heappush(row.slab.free, row.slot)
        if len(row.slab.free) == row.slab.rows:
            self._slabs.remove(row.slab)
            self.tokens -= row.slab.rows * row.slab.capacity

    def _forget(self, entry: int) -> None:
        self._lengths[entry] = 0
        self._vacant.append(entry)

    def _is_known(self, entry: int, ids: Ids) -> bool:
        """Return whether another row has these tokens, too."""
        others = [one for one in (*self._idle, *self._busy) if one != entry]
        return bool(others) and int(self._common(ids)[others].max()) == len(ids)

    def _watch(self, ids: Ids, known: int) -> None:
        """Warn, once, if much is forwarded again whose states had to go."""
        self._forwarded += len(ids) - known
        if self._warned or not self._ghosts:
            return
        self._lost += max(0, int(self._common(ids[:-1])[[*self._ghosts]].max()) - known)
        if self._lost < max(_THRASHING, self._forwarded / 4):
            return
        self._warned = True
        wanted = (self._limit() + self._lost) * self._token_bytes / 1e9
        warnings.warn(
            f"Expected room for the key-value states of all conversations, got"
            f" {self._max_gb or 0:.2f} GB: {self._lost} of {self._forwarded} tokens were forwarded"
            f" again because their states had been dropped; set model.prefix_cache_gb to"
            f" {wanted:.2f} or more, or run fewer episodes at once",
            RuntimeWarning,
            stacklevel=2,
        )

    def _common(self, ids: Ids) -> Ids:
        """Return the length of the beginning that each entry shares with ``ids``."""
        common = np.zeros(self._used, dtype=np.int64)
        alike = np.flatnonzero(self._lengths[: self._used])
        for start in range(0, min(len(ids), self._ids.shape[1]), _BLOCK):
            block = ids[start : start + _BLOCK]
            held = self._ids[alike, start : start + len(block)]
            differs = np.pad(held != block[: held.shape[1]], ((0, 0), (0, 1)), constant_values=True)
            first: Ids = differs.argmax(axis=1)
            common[alike] = start + first
            alike = alike[first == _BLOCK]
        return np.minimum(common, self._lengths[: self._used])


def total_memory(device: torch.device) -> int:
    """Return the bytes of a device that this process might take if nobody else took any."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    total: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # a container may take less; or the word max
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still take on a device, as far as is known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with suppress(OSError, KeyError, ValueError):  # other systems, or less than Linux tells
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")  # a container may take less than the machine has
    with suppress(OSError, KeyError, ValueError):
        most = int((group / "memory.max").read_text())  # or the word max
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = int(stat["active_file"]) + int(stat["inactive_file"])  # which the kernel gives back
        free = min(free, most - int((group / "memory.current").read_text()) + files)
    return max(0, free)
