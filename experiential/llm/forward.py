"""Run forward passes over batches, and keep key-value states: of a batch, and of past prompts."""

from __future__ import annotations

import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from experiential.errors import BackendError

Ids = NDArray[np.int64]
_SLACK = 64
"""Spare columns added when a decoding batch grows, so that a step does not copy all states."""


@dataclass
class LLMStats:
    """Count what a backend has done since it was made."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forwards: int = 0
    forwarded_rows: int = 0
    forwarded_tokens: int = 0  # after deduplication and prefix cache, without padding
    seconds: float = 0.0  # of compute


class ForwardPass:
    """Turn new tokens and cached states into next-token logits. Call it on the executor's thread.

    Rows are left-padded, and positions are given to the model explicitly.
    """

    def __init__(self, model: Any, *, pad: int, adapter: str | None, stats: LLMStats) -> None:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        config: Any = base.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
            raise BackendError(
                f"Expected a model with full attention in every layer, got {sorted(kinds)}; use"
                " another backend for it"
            )
        self.vocabulary: int = base.get_input_embeddings().num_embeddings
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self._model: Any = model
        self._base: Any = base
        self._pad = pad
        self._adapter = adapter
        self.stats = stats
        self._layers: int = config.num_hidden_layers
        self._device: torch.device = base.device
        short = "logits_to_keep" in inspect.signature(base.forward).parameters
        self._extra: dict[str, Any] = {"logits_to_keep": 1} if short else {}

    def prefill(
        self, prompts: Sequence[NDArray[np.int64]], matches: Sequence[tuple[int, Any]]
    ) -> tuple[KVBlock, Tensor]:
        """Forward the uncached end of each prompt; ``matches`` are (tokens held, their states)."""
        held = [matched for matched, _ in matches]
        width = max(held)
        columns = torch.arange(width, device=self._device)
        mask = columns >= (width - torch.tensor(held, device=self._device)).unsqueeze(1)
        block = KVBlock(self._layers, mask, width)
        if width:  # collate the states, left-padded
            like: Tensor = next(state for _, state in matches if state is not None)
            shape = (like.shape[0], len(prompts), like.shape[1], width, like.shape[3])
            block.data = like.new_zeros(shape)
            for row, (length, state) in enumerate(matches):
                if length:
                    block.data[:, row, :, width - length :] = state[:, :, :length]
        self.stats.cached_tokens += sum(held)
        new = [ids[matched:] for ids, matched in zip(prompts, held, strict=True)]
        return block, self.extend(block, new, held)

    def extend(
        self,
        block: KVBlock,
        tokens: Sequence[Sequence[int] | NDArray[np.int64]],
        seen: Sequence[int],
    ) -> Tensor:
        """Append tokens to the rows of a block, which have seen so many of theirs already.

        The adapter and evaluation mode are set first, for others may share the model.

        Returns:
            next-token logits, shape (rows, vocabulary), float32.
        """
        if self._base.training:
            self._model.eval()
        if self._adapter is not None and self._model.active_adapter != self._adapter:
            self._model.set_adapter(self._adapter)
        widths = [len(ids) for ids in tokens]
        width = max(widths)
        ids = np.full((len(tokens), width), self._pad, dtype=np.int64)
        for row, new in enumerate(tokens):
            ids[row, width - len(new) :] = new
        offset = np.arange(width)[None, :] - (width - np.array(widths))[:, None]
        positions = np.maximum(np.array(seen)[:, None] + offset, 0)
        real = torch.as_tensor(offset >= 0, device=self._device)
        block.mask = torch.cat([block.mask, real], dim=1)
        end = block.length + width
        if (old := block.data) is not None and end > old.shape[3]:
            shape = (old.shape[0], len(tokens), old.shape[2], end + _SLACK, old.shape[4])
            block.data = old.new_empty(shape)
            block.data[:, :, :, : block.length] = old[:, : len(tokens), :, : block.length]
        output = self._base(
            input_ids=torch.as_tensor(ids, device=self._device),
            attention_mask=block.mask,
            position_ids=torch.as_tensor(positions, device=self._device),
            past_key_values=Cache(layers=[_BlockLayer(block, i) for i in range(block.layers)]),
            use_cache=True,
            **self._extra,
        )
        block.length = end
        self.stats.forwards += 1
        self.stats.forwarded_rows += len(tokens)
        self.stats.forwarded_tokens += sum(widths)
        return output.logits[:, -1].float()


class _BlockLayer(DynamicLayer):
    """Give transformers a view of one layer of a ``KVBlock`` that writes in place."""

    def __init__(self, block: KVBlock, index: int) -> None:
        cast("Any", super()).__init__()
        self._block = block
        self._index = index
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns, (rows, heads, n, dim); return all columns of this layer."""
        block = self._block
        rows, heads, new, dim = key_states.shape
        start, end = block.length, block.length + new
        if block.data is None:
            block.data = key_states.new_empty((2 * block.layers, rows, heads, end, dim))
        keys, values = block.data[2 * self._index], block.data[2 * self._index + 1]
        keys[:rows, :, start:end] = key_states
        values[:rows, :, start:end] = value_states
        return keys[:rows, :, :end], values[:rows, :, :end]

    def get_seq_length(self) -> int:
        """Return the columns before the running forward."""
        return self._block.length


@dataclass(eq=False)
class KVBlock:
    """Hold the states of a batch in one tensor: joining, leaving and dedup are tensor operations.

    Rows may have masked columns anywhere (left padding, and gaps where a forward fed fewer tokens
    to a row than to others). Gaps change no result, since positions are explicit.

    Attributes:
        layers: of the model.
        mask: marks real tokens, shape (rows, length).
        length: columns that forwards have written.
        data: shape (2 * layers, rows, heads, columns, dim); None before the first forward.
    """

    layers: int
    mask: Tensor
    length: int
    data: Tensor | None = None

    def row(self, row: int, tokens: int) -> Tensor:
        """Copy the first ``tokens`` real columns of one row: (2 * layers, heads, tokens, dim)."""
        assert self.data is not None
        columns = self.mask[row].nonzero().squeeze(1)[:tokens]
        return self.data[:, row].index_select(2, columns)

    def select(self, rows: Sequence[int]) -> KVBlock:
        """Return a new block of these rows in this order; a row may be repeated."""
        assert (data := self.data) is not None
        shape = (data.shape[0], len(rows), data.shape[2], self.length + _SLACK, data.shape[4])
        chosen = data.new_empty(shape)
        for row, source in enumerate(rows):
            chosen[:, row, :, : self.length] = data[:, source, :, : self.length]
        return KVBlock(self.layers, self.mask[list(rows)], self.length, chosen)

    def drop(self, row: int) -> None:
        """Remove a row in place: the last row takes its slot."""
        assert self.data is not None
        last = len(self.mask) - 1
        if row != last:
            self.data[:, row, :, : self.length] = self.data[:, last, :, : self.length]
            self.mask[row] = self.mask[last]
        self.mask = self.mask[:last]

    def join(self, other: KVBlock) -> KVBlock:
        """Return a new block of the rows of both, right-aligned and without unused columns."""
        blocks = [
            (block, int(block.mask.any(dim=0).to(torch.uint8).argmax()))  # its first used column
            for block in (self, other)
            if len(block.mask)
        ]
        width = max(block.length - first for block, first in blocks)
        assert (like := self.data) is not None
        rows = sum(len(block.mask) for block, _ in blocks)
        data = like.new_zeros((like.shape[0], rows, like.shape[2], width + _SLACK, like.shape[4]))
        mask = self.mask.new_zeros((rows, width))
        top = 0
        for block, first in blocks:
            assert block.data is not None
            left = width - (block.length - first)
            bottom = top + len(block.mask)
            used = block.data[:, : len(block.mask), :, first : block.length]
            data[:, top:bottom, :, left:width] = used
            mask[top:bottom, left:] = block.mask[:, first:]
            top = bottom
        return KVBlock(self.layers, mask, width, data)


class PrefixCache:
    """Find key-value states of past prompts again by longest common prefix.

    Turns of an episode share prefixes, and so do the members of a group. Least recently used
    entries are dropped first; the bound is on tokens.

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
        covered: deque[int] = deque()  # entries that are prefixes of the new one
        if self._states:
            common = self._common(ids)
            if int(common.max()) == len(ids):
                self._states.move_to_end(int(common.argmax()))
                return
            lengths = self._lengths[: self._used]
            covered.extend(np.flatnonzero((lengths > 0) & (common == lengths)).tolist())
        while covered or self.tokens + len(ids) > self.max_tokens:
            slot = covered.popleft() if covered else next(iter(self._states))
            del self._states[slot]
            self.tokens -= int(self._lengths[slot])
            self._lengths[slot] = 0
            self._ids[slot] = -1
            self._free.append(slot)
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
