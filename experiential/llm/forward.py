"""Run forward passes over rows of key-value states."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import (
    sdpa_attention_forward,  # pyright: ignore[reportUnknownVariableType]
)
from transformers.masking_utils import sdpa_mask  # pyright: ignore[reportUnknownVariableType]

from experiential.errors import BackendError
from experiential.llm.decoder import Decoder
from experiential.llm.states import Row, Slab

Ids = NDArray[np.int64]
_PROBE = 16
"""Tokens by which a model and its `Decoder` are compared."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""By how much their logits may differ, as a share of the logits' spread."""


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
    """Turn new tokens and key-value states into next-token logits, on the executor's thread.

    The new tokens of all rows are one packed sequence without padding; positions are explicit, and
    `attend` keeps the rows apart. Where a model has layers that compute attention in another way,
    rows with equally many new tokens get a common cache, a copy of their states, instead.
    """

    def __init__(self, model: Any, *, adapter: str | None, stats: LLMStats) -> None:
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
        self.layers: int = config.num_hidden_layers
        self.stats = stats
        self._model: Any = model
        self._base: Any = base
        self._config: Any = config
        self._adapter = adapter
        self.device: torch.device = base.device
        self._no_mask = torch.zeros((1, 1, 1, 1), device=base.device)  # else one is computed
        accepted = inspect.signature(base.forward).parameters
        self._short = "logits_to_keep" in accepted
        self._packs = (
            getattr(base, "_supports_attention_backend", False)
            and any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())
            and getattr(config, "attn_logit_softcapping", None) is None
        )

    def extend(self, rows: Sequence[Row], tokens: Sequence[Sequence[int] | Ids]) -> Tensor:
        """Append tokens to rows, which have room for them; neighbours in a slab come in order.

        The adapter and evaluation mode are set first, for others may share the model.

        Returns:
            next-token logits, shape (rows, vocabulary), float32.
        """
        if self._base.training:
            self._model.eval()
        if self._adapter is not None and self._model.active_adapter != self._adapter:
            self._model.set_adapter(self._adapter)
        widths = np.array([len(new) for new in tokens], dtype=np.int64)
        logits = self._extend_packed(rows, tokens, widths) if self._packs else None
        if logits is None:
            parts = [
                self._extend_padded(rows, tokens, np.flatnonzero(widths == width))
                for width in np.unique(widths)
            ]
            order = np.argsort(widths, kind="stable").argsort()
            logits = torch.cat(parts)[torch.as_tensor(order, device=self.device)]
        for row, width in zip(rows, widths, strict=True):
            row.length += int(width)
        self.stats.forwarded_rows += len(rows)
        self.stats.forwarded_tokens += int(widths.sum())
        return logits.float()

    def _extend_packed(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int] | Ids], widths: Ids
    ) -> Tensor | None:
        """Forward all rows at once; None if not every layer used `attend` once, and never again."""
        ends = np.cumsum(widths)
        starts = np.array([row.length for row in rows]) - (ends - widths)
        positions = np.arange(int(ends[-1])) + np.repeat(starts, widths)
        to = partial(torch.as_tensor, device=self.device)
        runs = _find_runs(rows, widths.tolist(), self._base.dtype, self.device)
        packed = _Packed(to(np.concatenate(tokens)), to(positions), to(ends - 1), runs)
        if self._decoder is None:
            logits = self._forward_model(packed)
        else:
            logits = self._decode(self._decoder, packed)
        self.stats.forwards += 1
        return logits

    def _forward_model(self, packed: _Packed) -> Tensor | None:
        attended: list[int] = []
        usual = self._config._attn_implementation  # others train the same model
        self._config._attn_implementation = _NAME
        try:
            output = self._base(
                input_ids=packed.ids[None],
                position_ids=packed.positions[None],
                attention_mask=self._no_mask,
                use_cache=False,
                runs=packed.runs,
                attended=attended,
                **({"logits_to_keep": packed.last} if self._short else {}),
            )
        finally:
            self._config._attn_implementation = usual
        if sorted(attended) != [*range(self.layers)]:
            self._packs = False
            return None
        return output.logits[0] if self._short else output.logits[0][packed.last]

    @staticmethod
    def _decode(decoder: Decoder, packed: _Packed) -> Tensor:
        empty = decoder.empty_states()
        for run in packed.runs:
            run.slab.states(empty)
        attend = partial(attend_rows, packed.runs)
        return decoder.logits(packed.ids, packed.positions, packed.last, attend)

    @cached_property
    def _decoder(self) -> Decoder | None:
        """Return what needs less time than the model, if both find the same after some tokens."""
        if not Decoder.fits(self._base):
            return None
        decoder = Decoder(self._base)
        shape = [2 * self.layers, 1, *decoder.empty_states().shape[1:]]
        shape[3] = _PROBE
        with torch.inference_mode():
            states = torch.zeros(shape, dtype=self._base.dtype)
            row = Row(Slab(0, 1, _PROBE, self.layers, states), 0)
            places = torch.arange(_PROBE)
            runs = _find_runs([row], [_PROBE], self._base.dtype, self.device)
            ids = 7919 * (places + 1) % self.vocabulary
            packed = _Packed(ids, places, places, runs)
            expected = self._forward_model(packed)
            if expected is None:
                return None
            try:
                found = self._decode(decoder, packed)
            except (AttributeError, RuntimeError, TypeError):  # parts that another version has not
                return None
        error, spread = (found - expected).square().mean().sqrt(), expected.std()
        return decoder if error < _TOLERANCE[self._base.dtype] * spread else None

    def _extend_padded(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int] | Ids], members: Ids
    ) -> Tensor:
        """Forward rows with equally many new tokens, on a copy of their states padded on the left.

        A transformers cache does the rest, as in ``generate``.
        """
        chosen: list[Row] = [rows[int(i)] for i in members]
        lengths: Ids = np.array([row.length for row in chosen], dtype=np.int64)
        ids = np.array([tokens[int(i)] for i in members], dtype=np.int64)
        held = int(lengths.max())
        cache: Any = DynamicCache()
        if held:
            known = next(row.slab.data for row in chosen if row.length)
            assert known is not None
            shape = (2 * self.layers, len(chosen), known.shape[2], held, known.shape[4])
            states = known.new_zeros(shape)
            for place, row in enumerate(chosen):
                if row.length and (data := row.slab.data) is not None:
                    states[:, place, :, held - row.length :] = data[:, row.slot, :, : row.length]
            for layer in range(self.layers):
                cache.update(states[2 * layer], states[2 * layer + 1], layer)
        places: Ids = np.arange(held + ids.shape[1], dtype=np.int64)
        starts: Ids = lengths.reshape(-1, 1)
        mask = places >= held - starts
        positions = starts + places[: ids.shape[1]]
        output = self._base(
            input_ids=torch.as_tensor(ids, device=self.device),
            attention_mask=torch.as_tensor(mask, device=self.device),
            position_ids=torch.as_tensor(positions, device=self.device),
            past_key_values=cache,
            use_cache=True,
            **({"logits_to_keep": 1} if self._short else {}),
        )
        self.stats.forwards += 1
        if len(cache.layers) != self.layers or cache.get_seq_length() != mask.shape[1]:
            raise BackendError(
                f"Expected a model that keeps keys and values of {self.layers} layers, got"
                f" {type(self._base).__name__}; use another backend for it"
            )
        for layer, made in enumerate(cache.layers):
            for place, row in enumerate(chosen):
                for index, new in ((2 * layer, made.keys), (2 * layer + 1, made.values)):
                    data = row.slab.states(new[:1])[index, row.slot]
                    data[:, row.length : row.length + ids.shape[1]] = new[place, :, held:]
        return output.logits[:, -1]


class _Packed(NamedTuple):
    """Hold the new tokens of all rows as one sequence.

    Attributes:
        ids: shape (tokens,).
        positions: of the tokens in their rows.
        last: places of those whose logits are wanted.
        runs: of the rows, in the order of their new tokens.
    """

    ids: Tensor
    positions: Tensor
    last: Tensor
    runs: list[_Run]


class _Run(NamedTuple):
    """Describe neighbouring rows of one slab that get equally many new tokens.

    Attributes:
        first: slot of the first row; ``rows`` slots follow each other.
        begin: place of their first new token in the packed sequence.
        width: new tokens of each row.
        start: tokens that each row has already; None where they differ.
        columns: tokens of the longest row with its new ones.
        at: slots and columns of the new tokens where rows differ (then ``width`` is 1).
        mask: minus infinity where a column is hidden from a query, else 0, shape (rows, 1, 1,
            columns) or (width, columns); None where it would hide nothing, or as ``is_causal``.
    """

    slab: Slab
    first: int
    rows: int
    begin: int
    width: int
    start: int | None
    columns: int
    at: tuple[Tensor, Tensor] | None
    mask: Tensor | None


def _find_runs(
    rows: Sequence[Row], widths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[_Run]:
    """Group rows that one call of attention can take."""
    groups: list[list[int]] = []
    for i, row in enumerate(rows):
        before = groups[-1][-1] if groups else 0
        last = rows[before]
        neighbours = last.slab is row.slab and last.slot + 1 == row.slot
        alike = widths[before] == widths[i] and (widths[i] == 1 or last.length == row.length)
        if groups and neighbours and alike:
            groups[-1].append(i)
        else:
            groups.append([i])
    runs: list[_Run] = []
    begin = 0
    for group in groups:
        first, width = rows[group[0]], widths[group[0]]
        lengths = np.array([rows[i].length for i in group])
        columns = int(lengths.max()) + width
        at = start = None
        hidden = mask = None
        if (lengths == lengths[0]).all():
            start = int(lengths[0])
            if width > 1 and start:
                hidden = np.arange(columns) > start + np.arange(width)[:, None]
        else:
            slots = torch.arange(first.slot, first.slot + len(group), device=device)
            at = slots, torch.as_tensor(lengths, device=device)
            hidden = (np.arange(columns) > lengths[:, None])[:, None, None]
        if hidden is not None:
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            mask.masked_fill_(torch.as_tensor(hidden, device=device), -torch.inf)
        runs.append(
            _Run(first.slab, first.slot, len(group), begin, width, start, columns, at, mask)
        )
        begin += width * len(group)
    return runs


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    runs: Sequence[_Run] | None = None,
    attended: list[int] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Write new states into their slots and attend to those of each row: no state is copied.

    Args:
        module: the attention layer.
        query: of the packed new tokens, shape (1, heads, tokens, dim).
        key: likewise, with as many heads as there are key-value heads.
        value: likewise.
        attention_mask: not used with runs, which know what columns are visible.
        runs: rows, in the order of their new tokens. Another thread that uses the model meanwhile
            comes without, and gets plain attention.
        attended: the index of this layer is appended, to show that it has been here.
        options: of transformers; ``scaling`` is used.

    Returns:
        what the tokens attend to, shape (1, tokens, heads, dim), and no weights.
    """
    if runs is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise BackendError(
            "Expected plain softmax attention, got soft-capped scores or attention sinks; use"
            " another backend for this model"
        )
    if attended is not None:
        attended.append(module.layer_idx)
    for run in runs:
        run.slab.states(key)
    result = query.new_empty((query.shape[2], query.shape[1], query.shape[3]))
    query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
    scaling = options.get("scaling")
    attend_rows(runs, module.layer_idx, query, key, value, result, scaling)
    return result.unsqueeze(0), None


def attend_rows(
    runs: Sequence[_Run],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    scaling: float | None = None,
) -> None:
    """Write new states into their slots, and what the tokens attend to into ``result``.

    Tensors have shape (tokens, heads, dim), and may have more precision than the states.
    """
    heads, dim = key.shape[1:]
    shared = query.shape[1] // heads  # query heads of a key-value head
    for run in runs:
        data = run.slab.data
        assert data is not None
        index, slots = 2 * layer, slice(run.first, run.first + run.rows)
        tokens = slice(run.begin, run.begin + run.rows * run.width)
        queries, *new = (
            one[tokens].view(run.rows, run.width, -1, dim).transpose(1, 2)
            for one in (query, key, value)
        )
        for states, parts in zip(data[index : index + 2], new, strict=True):
            if run.at is not None:
                states[run.at[0], :, run.at[1]] = parts[:, :, 0].to(data.dtype)
            else:
                states[slots, :, run.start : run.columns] = parts
        causal = run.width > 1 and run.start == 0
        if causal:
            keys, values = new
        else:
            queries = queries.to(data.dtype)
            keys, values = data[index : index + 2, slots, :, : run.columns]
        mask = None if run.mask is None else run.mask.to(queries.dtype)
        if not causal and shared > 1:
            # heads that share keys are rows of one product; sdpa would repeat or mask them apart
            queries = queries.reshape(run.rows, heads, shared * run.width, dim)
            mask = mask.repeat(shared, 1) if mask is not None and run.width > 1 else mask
        seen = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=causal and shared > 1,
        ).reshape(run.rows, heads * shared, run.width, dim)
        result[tokens].view(run.rows, run.width, -1, dim).copy_(seen.transpose(1, 2))


_NAME = "experiential"
AttentionInterface.register(_NAME, attend)  # pyright: ignore[reportUnknownMemberType]
AttentionMaskInterface.register(_NAME, sdpa_mask)  # pyright: ignore[reportUnknownMemberType]
