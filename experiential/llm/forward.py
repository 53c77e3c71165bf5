"""Forward passes of a causal language model over batches with cached prefixes, left-padded, with explicit positions."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiential.errors import BackendError
from experiential.llm.kv import KVBlock, to_tensor

_PREFILL_TOKENS = 16384
"""Padded tokens of one prefill forward; more are split over several forwards."""
_WASTE = 64
"""A prompt joins a wider prefill if that pads it by no more than its own length and this many
tokens.
"""


@dataclass
class LLMStats:
    """What a backend has done since it was made; ``forwarded_tokens`` counts after dedup and prefix cache, without padding."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forwards: int = 0
    forwarded_rows: int = 0
    forwarded_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of compute."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class ForwardPass:
    """The model seen as a function from new tokens and cached states to next-token logits. Call on the executor."""

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
        """Split rows that feed ``widths`` tokens each into forwards, so that padding and size stay bounded."""
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
        """Forward what the prefix cache does not hold of each prompt; ``matches`` are (tokens held, their states)."""
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
        """Append tokens to each row, which has seen ``seen`` already; next-token logits, shape (rows, vocabulary), float32."""
        widths = [len(ids) for ids in tokens]
        width = max(widths)
        ids = np.full((len(tokens), width), self._pad, dtype=np.int64)
        for row, new in enumerate(tokens):
            ids[row, width - len(new) :] = new
        offset = np.arange(width)[None, :] - (width - np.array(widths))[:, None]
        positions = np.maximum(np.array(seen)[:, None] + offset, 0)
        cache = block.begin(self._tensor(offset >= 0))
        output = self._base(
            input_ids=self._tensor(ids),
            attention_mask=block.mask,
            position_ids=self._tensor(positions),
            past_key_values=cache,
            use_cache=True,
            **self._extra,
        )
        block.commit()
        self._stats.forwards += 1
        self._stats.forwarded_rows += len(tokens)
        self._stats.forwarded_tokens += sum(widths)
        return output.logits[:, -1].float()

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_tensor(array, self._device)
