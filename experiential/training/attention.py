"""Attend along the paths of a packed row, without a mask over the whole row.

Tokens of a branch see the path before their branch and what stands before them in it. Queries are
cut into blocks, each with the keys that it needs and a mask of its own size, so that cost and
memory of a row grow with the lengths of its paths and not with the square of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from experiential.training.packing import Row
from experiential.training.runtime import Sample

NAME = "experiential_packed"
QUERIES = 256
"""Queries of a block that needs a mask: enough for full speed, few enough for small masks."""
_KEPT = 8
"""Blocks with more keys per query gather their keys again going backward instead of keeping them,
so that what is kept per token has a bound."""

Runs = tuple[tuple[int, int], ...]
States = list[tuple[Tensor, Tensor]]
"""Keys and values of some tokens, per layer, shape (1, heads, n, width) each."""


@dataclass
class _Block:
    """Describe consecutive queries: those of several branches only if their trunk is the same."""

    trunk: Runs  # what is before the branch on its path
    begin: int  # where the branch begins, and so its keys after the trunk
    start: int
    lengths: list[int]  # queries per branch
    stop: int


@dataclass(frozen=True)
class Layout:
    """Tell attention how a row is cut.

    Attributes:
        positions: the position of each forwarded token in its own sequence, shape (1, n).
        queries: length of each block of queries.
        keys: length of each segment of keys, those of known tokens included.
        seen: per block, the indices of its segments.
        masks: per block, added to the scores, shape (queries, keys); None where a causal one does.
        known: of the tokens that the row begins with and that are not forwarded.
        made: takes those of the forwarded tokens, layer by layer; None keeps none.
    """

    positions: Tensor
    queries: list[int]
    keys: list[int]
    seen: list[list[int]]
    masks: list[Tensor | None]
    known: States | None = None
    made: States | None = None


class Beginning:
    """Hold what all rows of a batch begin with, so that it goes forward and backward once.

    Rows attend to copies of its keys and values outside of its graph. There they leave gradients,
    and ``backward`` sends the sum of these on.

    Attributes:
        states: the copies; empty if the rows have no common beginning.
    """

    def __init__(self, made: States) -> None:
        self._made = [x for pair in made for x in pair]
        copies = [x.detach().requires_grad_(x.requires_grad) for x in self._made]
        self.states: States = list(zip(copies[::2], copies[1::2], strict=True))

    def backward(self) -> None:
        """Go backward from the gradients that rows have left."""
        copies = (x for pair in self.states for x in pair)
        ends = [(x, c.grad) for x, c in zip(self._made, copies, strict=True) if c.grad is not None]
        torch.autograd.backward([x for x, _ in ends], [gradient for _, gradient in ends])


def layout(row: Row, device: torch.device, dtype: torch.dtype) -> Layout:
    """Cut a row into blocks of queries and segments of keys."""
    positions = np.zeros(len(row.tokens), dtype=np.int64)
    blocks: list[_Block] = []
    end = row.known
    for path in row.paths:
        if path[-1] < end:
            continue  # the beginning of a path before
        start, end = end, path[-1] + 1
        positions[list(path)] = np.arange(len(path))
        trunk = _runs(path[: len(path) - (end - start)])
        last = blocks[-1] if blocks else None
        if not trunk:
            blocks.append(_Block(trunk, start, start, [end - start], end))
        elif (
            last
            and last.trunk == trunk
            and last.begin == last.start
            and end - start + (last.stop - last.start) <= QUERIES
        ):
            last.lengths.append(end - start)
            last.stop = end
        else:
            for a in range(start, end, QUERIES):
                b = min(a + QUERIES, end)
                blocks.append(_Block(trunk, start, a, [b - a], b))
    runs = [(*block.trunk, (block.begin, block.stop)) for block in blocks]
    edges = sorted({edge for block in runs for run in block for edge in run})
    place = {edge: i for i, edge in enumerate(edges)}
    made: dict[tuple[int, ...], Tensor] = {}
    masks: list[Tensor | None] = []
    for block in blocks:
        before = sum(b - a for a, b in block.trunk) + block.start - block.begin
        shape = (before, *block.lengths)
        if before and shape not in made:
            made[shape] = _mask(before, block.lengths, device, dtype)
        masks.append(made[shape] if before else None)
    return Layout(
        positions=torch.tensor(positions[None, row.known :], device=device),
        queries=[block.stop - block.start for block in blocks],
        keys=[b - a for a, b in zip(edges, edges[1:], strict=False)],
        seen=[[i for a, b in block for i in range(place[a], place[b])] for block in runs],
        masks=masks,
    )


def _runs(path: Sequence[int]) -> Runs:
    """Return the ranges of consecutive places."""
    places = np.asarray(path, dtype=np.int64)
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple((int(p[0]), int(p[-1]) + 1) for p in np.split(places, cuts) if len(p))


def _mask(before: int, lengths: list[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Show every query what is before its block, and itself and what is before it in its branch."""
    own = (torch.ones(n, n, device=device).tril() for n in lengths)
    causal: Tensor = cast("Any", torch).block_diag(*own) > 0
    hidden = torch.nn.functional.pad(~causal, (before, 0))
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill(hidden, -torch.inf)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as ``layout`` has it; an attention function for transformers.

    Shapes are (1, heads, n, width), with fewer heads of keys and values where queries share them.
    NaN where the model's attention is another, so that `PackedModel.branching` is False: an
    exception would leave the weights that DeepSpeed gathers in the middle of a forward pass.
    """
    other = ("softcap", "s_aux", "sliding_window", "position_bias")
    if layout is None or any(options.get(name) is not None for name in other):
        return torch.full_like(query, torch.nan).transpose(1, 2).contiguous(), None
    if layout.made is not None:
        layout.made.append((key, value))
    if layout.known is not None:
        index: int = cast("Any", module).layer_idx
        keys_before, values_before = layout.known[index]
        key, value = torch.cat([keys_before, key], 2), torch.cat([values_before, value], 2)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type != "cpu":  # no fused kernel takes both groups and a mask
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    keys, values = torch.split(key, layout.keys, 2), torch.split(value, layout.keys, 2)
    found: list[Tensor] = []
    blocks = zip(torch.split(query, layout.queries, 2), layout.seen, layout.masks, strict=True)
    again = cast("Any", torch.utils.checkpoint).checkpoint  # torch leaves its arguments untyped
    for queries, seen, mask in blocks:
        parts = [keys[i] for i in seen], [values[i] for i in seen]
        if mask is not None and mask.shape[1] > _KEPT * mask.shape[0] and torch.is_grad_enabled():
            attended = again(_attend, queries, *parts, mask, dropout, scaling, use_reentrant=False)
        else:
            attended = _attend(queries, *parts, mask, dropout, scaling)
        found.append(attended)
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    key, value = (x[0] if len(x) == 1 else torch.cat(x, dim=2) for x in (keys, values))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


cast("Any", AttentionInterface).register(NAME, packed_attention)


class PackedModel:
    """Let a causal language model compute packed rows, branched ones where it can.

    Args:
        model: of transformers; its attention is replaced while it computes a branched row.
        run: computes what the model is asked for; None takes the hidden states.
    """

    def __init__(self, model: Any, run: Callable[..., Any] | None = None) -> None:
        self.model, self.run = model, run or model.base_model

    @cached_property
    def branching(self) -> bool:
        """Test whether the model computes branched rows and plain ones alike.

        Some take no attention function from outside, and some make positions themselves. Makes
        five forward passes at most, which all ranks of ZeRO 3 must make.
        """
        model = self.model
        if "position_ids" not in signature(model.base_model.forward).parameters:
            return False
        paths = ((0, 1, 2, 3, 4), (0, 1, 2, 5, 6))
        size = model.config.get_text_config().vocab_size
        tokens = tuple(token % size for token in (11, 23, 31, 41, 53, 61, 73))
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                both = self.inputs(Row(tokens, (0, 1), paths), branching=True)
                with self.attention(branching=True):
                    branched = self.run(**both)[0][0].float()
                allowed = 10 * torch.finfo(model.dtype).eps ** 0.75 * branched.abs().max()
                for path in paths:
                    row = Row(tuple(tokens[i] for i in path), (0,), (tuple(range(5)),))
                    plain = self.run(**self.inputs(row, branching=False))[0][0].float()
                    if not (branched[list(path)] - plain).abs().max() <= allowed:
                        return False
                # the same again, after a beginning that is known
                row = Row(tokens, (0, 1), paths, known=2)
                rest = self.inputs(row, branching=True, known=self.beginning([row]).states)
                with self.attention(branching=True):
                    later = self.run(**rest)[0][0].float()
                if not (branched[2:] - later).abs().max() <= allowed:
                    return False
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False  # the model refuses such attention
        finally:
            model.train(training)
        return True

    @contextmanager
    def attention(self, *, branching: bool | None = None) -> Generator[None]:
        """Let the model attend along the paths of a row inside the block."""
        if not (self.branching if branching is None else branching):
            yield
            return
        usual = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            self.model.set_attn_implementation(usual)

    def beginning(self, rows: Sequence[Row]) -> Beginning:
        """Forward the tokens that all rows know."""
        made, count = States(), rows[0].known
        if count:
            row = Row(rows[0].tokens[:count], (), (tuple(range(count)),))
            inputs = self.inputs(row, branching=True)
            inputs["layout"] = replace(inputs["layout"], made=made)
            with self.attention(branching=True):
                self.run(**inputs)
        return Beginning(made)

    def inputs(
        self, row: Row, *, branching: bool | None = None, known: States | None = None
    ) -> dict[str, Any]:
        """Return the arguments of a forward pass, with the keys and values that the row knows."""
        device = next(self.model.parameters()).device
        tokens = torch.tensor([row.tokens[row.known :]], device=device)
        inputs = {"input_ids": tokens, "use_cache": False}
        if self.branching if branching is None else branching:
            cut = layout(row, device, self.model.dtype)
            if row.known:
                cut = replace(cut, known=known)
            inputs |= {"position_ids": cut.positions, "layout": cut}
        return inputs

    def places(self, row: Row, members: Sequence[Sample]) -> Tensor:
        """Return where in a row each trained token of its samples is predicted, shape (n,)."""
        pairs = zip(members, row.paths, strict=True)
        places = [path[p - 1] - row.known for sample, path in pairs for p in sample.positions]
        device = next(self.model.parameters()).device
        return torch.tensor(places, dtype=torch.long, device=device)
