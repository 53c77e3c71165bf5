"""The key-value states of a batch in one tensor, so that joining, leaving and dedup are single tensor operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_from_numpy: Callable[[NDArray[Any]], Tensor] = cast(
    "Any", torch
).from_numpy  # torch leaves its argument untyped

_SLACK = 64
"""Spare columns added when a decoding batch grows, so that a step does not copy all states."""


def to_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on ``device``; shares memory on the CPU."""
    return _from_numpy(array).to(device)


class _BlockLayer(DynamicLayer):
    """One layer's window on a ``KVBlock``; writes in place instead of concatenating."""

    def __init__(self, block: KVBlock, index: int) -> None:
        cast("Any", super()).__init__()
        self._block = block
        self._index = index
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns; returns all columns of this layer's keys and values."""
        return self._block.write(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        """Columns before the running forward."""
        return self._block.length


class KVBlock:
    """States of some rows: ``data`` is (2 * layers, rows, heads, columns, dim), ``mask`` (rows, length) marks real tokens.

    Rows may have masked columns anywhere (left padding, and gaps where a forward fed fewer tokens
    to a row than to others); positions are given to the model explicitly, so gaps change no result.
    """

    def __init__(self, layers: int, mask: Tensor, data: Tensor | None = None) -> None:
        self.layers = layers
        self.mask = mask
        self.data = data
        self.length = mask.shape[1]
        self._pending = 0

    @property
    def rows(self) -> int:
        """Sequences in the block."""
        return self.mask.shape[0]

    @classmethod
    def from_states(
        cls,
        layers: int,
        states: Sequence[Tensor | None],
        lengths: Sequence[int],
        device: torch.device,
    ) -> KVBlock:
        """Collate the first ``lengths[i]`` tokens of each (2 * layers, heads, tokens, dim) state, left-padded."""
        width = max(lengths)
        mask = torch.arange(width, device=device) >= (
            width - torch.tensor(lengths, device=device)
        ).unsqueeze(1)
        like = next((state for state in states if state is not None), None)
        if like is None or width == 0:
            return cls(layers, mask[:, :0])
        data = like.new_zeros((like.shape[0], len(states), like.shape[1], width, like.shape[3]))
        for row, (state, length) in enumerate(zip(states, lengths, strict=True)):
            if state is not None and length:
                data[:, row, :, width - length :] = state[:, :, :length]
        return cls(layers, mask, data)

    def begin(self, mask: Tensor) -> Cache:
        """Prepare to append columns whose real tokens are marked in ``mask`` (rows, n); pass the result to the model."""
        self._pending = mask.shape[1]
        self.mask = torch.cat([self.mask, mask], dim=1)
        if self.data is not None:
            self._reserve(self.data, self.length + self._pending)
        return Cache(layers=[_BlockLayer(self, index) for index in range(self.layers)])

    def commit(self) -> None:
        """Count the columns that the forward wrote."""
        self.length += self._pending
        self._pending = 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new columns, shape (rows, heads, n, dim); returns all its columns."""
        end = self.length + keys.shape[2]
        if self.data is None:
            self.data = keys.new_empty(
                (2 * self.layers, keys.shape[0], keys.shape[1], end, keys.shape[3])
            )
        data = self.data
        data[2 * layer, : self.rows, :, self.length : end] = keys
        data[2 * layer + 1, : self.rows, :, self.length : end] = values
        return data[2 * layer, : self.rows, :, :end], data[2 * layer + 1, : self.rows, :, :end]

    def row(self, row: int, tokens: int) -> Tensor:
        """A copy of the first ``tokens`` real columns of one row, shape (2 * layers, heads, tokens, dim)."""
        columns = self.mask[row].nonzero().squeeze(1)[:tokens]
        return self._filled()[:, row].index_select(2, columns)

    def select(self, rows: Sequence[int]) -> KVBlock:
        """A new block of these rows, in this order, with room for more columns; a row may be repeated."""
        data = self._filled()
        chosen = data.new_empty(
            (data.shape[0], len(rows), data.shape[2], self.length + _SLACK, data.shape[4])
        )
        for row, source in enumerate(rows):
            chosen[:, row, :, : self.length] = data[:, source, :, : self.length]
        return KVBlock(self.layers, self.mask[list(rows)], chosen)

    def drop(self, row: int) -> None:
        """Remove a row in place: the last row takes its slot."""
        last = self.rows - 1
        if row != last:
            data = self._filled()
            data[:, row, :, : self.length] = data[:, last, :, : self.length]
            self.mask[row] = self.mask[last]
        self.mask = self.mask[:last]

    def join(self, other: KVBlock) -> KVBlock:
        """A new block of the rows of both, right-aligned; columns that no row uses are trimmed on the left."""
        blocks = [(block, block.first_column()) for block in (self, other) if block.rows]
        width = max(block.length - first for block, first in blocks)
        like = self._filled()
        rows = sum(block.rows for block, _ in blocks)
        data = like.new_zeros((like.shape[0], rows, like.shape[2], width + _SLACK, like.shape[4]))
        mask = self.mask.new_zeros((rows, width))
        top = 0
        for block, first in blocks:
            left = width - (block.length - first)
            data[:, top : top + block.rows, :, left:width] = block._filled()[
                :, : block.rows, :, first : block.length
            ]
            mask[top : top + block.rows, left:] = block.mask[:, first:]
            top += block.rows
        return KVBlock(self.layers, mask, data)

    def first_column(self) -> int:
        """The first column that some row uses."""
        return int(self.mask.any(dim=0).to(torch.uint8).argmax())

    def _filled(self) -> Tensor:
        if self.data is None:
            raise RuntimeError("Expected a block that went through a forward, got an empty one")
        return self.data

    def _reserve(self, data: Tensor, columns: int) -> None:
        if columns <= data.shape[3]:
            return
        grown = data.new_empty(
            (*data.shape[:1], self.rows, data.shape[2], columns + _SLACK, data.shape[4])
        )
        grown[:, :, :, : self.length] = data[:, : self.rows, :, : self.length]
        self.data = grown
