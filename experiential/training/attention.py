"""Attend along the paths of a packed row, without a mask over the whole row.

Tokens of a branch see the path before their branch and what stands before them in it. Queries are
cut into blocks, each with the keys that it needs and a mask of its own size, so that cost and
memory of a row grow with the lengths of its paths and not with the square of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from experiential.training.samples import Row

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
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as ``layout`` has it; an attention function for transformers.

    Shapes are (1, heads, n, width), with fewer heads of keys and values where queries share them.
    """
    refused = [
        name
        for name in ("softcap", "s_aux", "sliding_window", "position_bias")
        if options.get(name) is not None
    ]
    if refused:
        raise ValueError(f"Expected plain attention, got {', '.join(refused)}")
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
