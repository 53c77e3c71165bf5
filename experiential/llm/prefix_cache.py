"""Find key-value states of past prompts again by longest common prefix.

Turns of an episode share them, and so do the members of a group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class PrefixCache:
    """Keep (token ids, key-value tensor), least recently used first out, bounded by tokens.

    Used from one thread, the executor's. All stored ids lie in one padded matrix, so that one
    comparison finds the best entry; a dict finds equal keys only. An entry that is a prefix of a
    newer one is dropped; the newer one serves its matches.

    Args:
        max_tokens: bound on the tokens stored; 0 stores nothing.
        min_match: shorter common prefixes are not worth collating and count as no match.
    """

    def __init__(self, max_tokens: int, *, min_match: int = 8) -> None:
        if max_tokens < 0:
            raise ValueError(f"Expected max_tokens of at least 0, got {max_tokens}")
        self.max_tokens = max_tokens
        self.tokens = 0
        self._min_match = min_match
        self._ids: Ids = np.full((16, 256), -1, dtype=np.int64)
        self._lengths: Ids = np.zeros(16, dtype=np.int64)
        self._used = 0
        self._free: list[int] = []
        self._states: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def match(self, ids: Ids) -> tuple[int, Any]:
        """Return ``(n, kv)`` of the longest common prefix, n < len(ids); (0, None) without one.

        ``kv`` covers n tokens or more. The last token is never served, for its logits are needed.
        """
        if not self._states:
            return 0, None
        common = self._common(ids[:-1])
        slot = int(common.argmax())
        if common[slot] < self._min_match:
            return 0, None
        self._states.move_to_end(slot)
        return int(common[slot]), self._states[slot]

    def put(self, ids: Ids, state: Callable[[], Any]) -> None:
        """Store the key-value state of ``ids``, which ``state`` makes if no entry covers them."""
        if len(ids) > self.max_tokens or len(ids) < self._min_match:
            return
        if self._states:
            common = self._common(ids)
            if int(common.max()) == len(ids):
                self._states.move_to_end(int(common.argmax()))
                return
            lengths = self._lengths[: self._used]
            for slot in np.flatnonzero((lengths > 0) & (common == lengths)):
                self._remove(int(slot))
        while self.tokens + len(ids) > self.max_tokens:
            self._remove(next(iter(self._states)))
        made = state()
        slot = self._free.pop() if self._free else self._used
        self._used = max(self._used, slot + 1)
        rows, width = self._ids.shape
        if self._used > rows or len(ids) > width:  # at least double what is too small
            more = self._used if self._used > rows else 0
            wider = 2 * len(ids) - width if len(ids) > width else 0
            self._ids = np.pad(self._ids, ((0, more), (0, wider)), constant_values=-1)
            self._lengths = np.pad(self._lengths, (0, more))
        self._ids[slot, : len(ids)] = ids
        self._lengths[slot] = len(ids)
        self._states[slot] = made
        self.tokens += len(ids)

    def clear(self) -> None:
        """Drop all entries, because the weights that made them have changed."""
        self._states.clear()
        self._free.clear()
        self._lengths[:] = 0
        self._ids[:] = -1
        self._used = self.tokens = 0

    def _common(self, ids: Ids) -> Ids:
        """Return the length of the prefix that each slot shares with ``ids``."""
        width = min(len(ids), self._ids.shape[1])
        if width == 0:
            return np.zeros(self._used, dtype=np.int64)
        equal = self._ids[: self._used, :width] == ids[:width]
        first_difference = equal.argmin(axis=1)
        return np.where(equal[np.arange(self._used), first_difference], width, first_difference)

    def _remove(self, slot: int) -> None:
        del self._states[slot]
        self.tokens -= int(self._lengths[slot])
        self._lengths[slot] = 0
        self._ids[slot] = -1
        self._free.append(slot)
