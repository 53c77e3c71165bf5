"""Which forward passes a batch needs: samples that share a prefix share its computation.

Under causal attention the hidden state at a position depends on the tokens up to it only. So a sample whose needed
tokens are a prefix of another's is read off the other's forward pass, and equal prompts cost one pass however many
responses were drawn from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiential.training.runtime import Sample


@dataclass(frozen=True, slots=True)
class Row:
    """One forward pass: token ids and the indices of the samples that are read off it."""

    tokens: tuple[int, ...]
    samples: tuple[int, ...]


def pack(samples: Sequence[Sample]) -> list[Row]:
    """Fewest rows that hold every sample's inputs ``tokens[:last position]``, longest first.

    Sorted lexicographically, a sequence stands before its extensions, so one backward pass finds what contains what.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.tokens[: max(sample.positions)], []).append(index)
    rows: list[Row] = []
    for tokens in sorted(members, reverse=True):
        if rows and rows[-1].tokens[: len(tokens)] == tokens:
            rows[-1] = Row(rows[-1].tokens, rows[-1].samples + tuple(members[tokens]))
        else:
            rows.append(Row(tokens, tuple(members[tokens])))
    return sorted(rows, key=lambda row: -len(row.tokens))


def micro_batches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Consecutive rows whose padded size stays within ``tokens`` (at least one row each)."""
    batch: list[Row] = []
    width = 0
    for row in rows:
        widest = max(width, len(row.tokens))
        if batch and widest * (len(batch) + 1) > tokens:
            yield batch
            batch, widest = [], len(row.tokens)
        batch.append(row)
        width = widest
    if batch:
        yield batch
