"""Run forward passes over batches with cached prefixes, and hold their key-value states."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from experiential.errors import BackendError

_PREFILL_TOKENS = 16384
"""Padded tokens of one prefill forward; more are split over several forwards."""
_WASTE = 64
"""Tokens of padding that a prompt may need, beside its own length, to join a wider prefill."""
_SLACK = 64
"""Spare columns added when a decoding batch grows, so that a step does not copy all states."""

_from_numpy: Callable[[NDArray[Any]], Tensor] = cast("Any", torch).from_numpy  # untyped in torch


def to_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on ``device``; shares memory on the CPU."""
    return _from_numpy(array).to(device)


@dataclass
class LLMStats:
    """Count what a backend has done since it was made.

    ``forwarded_tokens`` counts after deduplication and prefix cache, without padding; ``seconds``
    are those of compute.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forwards: int = 0
    forwarded_rows: int = 0
    forwarded_tokens: int = 0
    seconds: float = 0.0


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
        self._stats = stats
        self._layers: int = config.num_hidden_layers
        self._device: torch.device = base.device
        short = "logits_to_keep" in inspect.signature(base.forward).parameters
        self._extra: dict[str, Any] = {"logits_to_keep": 1} if short else {}

    @contextlib.contextmanager
    def measured(self) -> Generator[None, None, None]:
        """Activate the adapter and evaluation mode, turn gradients off, and count the seconds."""
        start = time.perf_counter()
        if self._base.training:
            self._model.eval()
        if self._adapter is not None and self._model.active_adapter != self._adapter:
            self._model.set_adapter(self._adapter)
        with torch.inference_mode():
            yield
        self._stats.seconds += time.perf_counter() - start

    @staticmethod
    def plan(widths: Sequence[int]) -> list[list[int]]:
        """Split rows of ``widths`` new tokens into forwards of bounded padding and size."""
        chunks: list[list[int]] = []
        widest = 0
        for row in sorted(range(len(widths)), key=lambda row: -widths[row]):
            fits = (
                chunks
                and widest <= 2 * widths[row] + _WASTE
                and (len(chunks[-1]) + 1) * widest <= _PREFILL_TOKENS
            )
            if fits:
                chunks[-1].append(row)
            else:
                chunks.append([row])
                widest = widths[row]
        return chunks

    def prefill(
        self, prompts: Sequence[NDArray[np.int64]], matches: Sequence[tuple[int, Any]]
    ) -> tuple[KVBlock, Tensor]:
        """Forward the uncached end of each prompt; ``matches`` are (tokens held, their states)."""
        held = [matched for matched, _ in matches]
        block = KVBlock.from_states(
            self._layers, [state for _, state in matches], held, self._device
        )
        self._stats.cached_tokens += sum(held)
        return block, self.extend(
            block, [ids[matched:] for ids, matched in zip(prompts, held, strict=True)], held
        )

    def extend(
        self,
        block: KVBlock,
        tokens: Sequence[Sequence[int] | NDArray[np.int64]],
        seen: Sequence[int],
    ) -> Tensor:
        """Append tokens to each row and return its next-token logits.

        Args:
            block: the states of the rows.
            tokens: new token ids of each row.
            seen: tokens that each row has seen already.

        Returns:
            logits, shape (rows, vocabulary), float32.
        """
        widths = [len(ids) for ids in tokens]
        width = max(widths)
        ids = np.full((len(tokens), width), self._pad, dtype=np.int64)
        for row, new in enumerate(tokens):
            ids[row, width - len(new) :] = new
        offset = np.arange(width)[None, :] - (width - np.array(widths))[:, None]
        positions = np.maximum(np.array(seen)[:, None] + offset, 0)
        cache = block.begin(to_tensor(offset >= 0, self._device))
        output = self._base(
            input_ids=to_tensor(ids, self._device),
            attention_mask=block.mask,
            position_ids=to_tensor(positions, self._device),
            past_key_values=cache,
            use_cache=True,
            **self._extra,
        )
        block.commit()
        self._stats.forwards += 1
        self._stats.forwarded_rows += len(tokens)
        self._stats.forwarded_tokens += sum(widths)
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
        """Write the new columns; return all columns of this layer's keys and values."""
        return self._block.write(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the columns before the running forward."""
        return self._block.length


class KVBlock:
    """Hold the states of a batch in one tensor: joining, leaving and dedup are tensor operations.

    ``data`` is (2 * layers, rows, heads, columns, dim); ``mask`` (rows, length) marks real tokens.
    Rows may have masked columns anywhere (left padding, and gaps where a forward fed fewer tokens
    to a row than to others). Gaps change no result, since positions are explicit.
    """

    def __init__(self, layers: int, mask: Tensor, data: Tensor | None = None) -> None:
        self.layers = layers
        self.mask = mask
        self.data = data
        self.length = mask.shape[1]
        self._pending = 0

    @property
    def rows(self) -> int:
        """Return the number of sequences in the block."""
        return self.mask.shape[0]

    @classmethod
    def from_states(
        cls,
        layers: int,
        states: Sequence[Tensor | None],
        lengths: Sequence[int],
        device: torch.device,
    ) -> KVBlock:
        """Collate the first ``lengths[i]`` tokens of each state, left-padded.

        A state has shape (2 * layers, heads, tokens, dim).
        """
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
        """Prepare to append columns, and return the cache to pass to the model.

        ``mask`` (rows, n) marks the real tokens among them.
        """
        self._pending = mask.shape[1]
        self.mask = torch.cat([self.mask, mask], dim=1)
        columns = self.length + self._pending
        if self.data is not None and columns > self.data.shape[3]:
            old = self.data
            self.data = old.new_empty(
                (old.shape[0], self.rows, old.shape[2], columns + _SLACK, old.shape[4])
            )
            self.data[:, :, :, : self.length] = old[:, : self.rows, :, : self.length]
        return Cache(layers=[_BlockLayer(self, index) for index in range(self.layers)])

    def commit(self) -> None:
        """Count the columns that the forward wrote."""
        self.length += self._pending
        self._pending = 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new columns, shape (rows, heads, n, dim); return all its columns."""
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
        """Copy the first ``tokens`` real columns of one row: (2 * layers, heads, tokens, dim)."""
        columns = self.mask[row].nonzero().squeeze(1)[:tokens]
        return self._filled()[:, row].index_select(2, columns)

    def select(self, rows: Sequence[int]) -> KVBlock:
        """Return a new block of these rows in this order; a row may be repeated."""
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
        """Return a new block of the rows of both, right-aligned and without unused columns."""
        blocks = [
            (block, int(block.mask.any(dim=0).to(torch.uint8).argmax()))  # its first used column
            for block in (self, other)
            if block.rows
        ]
        width = max(block.length - first for block, first in blocks)
        like = self._filled()
        rows = sum(block.rows for block, _ in blocks)
        data = like.new_zeros((like.shape[0], rows, like.shape[2], width + _SLACK, like.shape[4]))
        mask = self.mask.new_zeros((rows, width))
        top = 0
        for block, first in blocks:
            left = width - (block.length - first)
            bottom = top + block.rows
            used = block._filled()[:, : block.rows, :, first : block.length]
            data[:, top:bottom, :, left:width] = used
            mask[top:bottom, left:] = block.mask[:, first:]
            top = bottom
        return KVBlock(self.layers, mask, data)

    def _filled(self) -> Tensor:
        if self.data is None:
            raise RuntimeError("Expected a block that went through a forward, got an empty one")
        return self.data
