"""Name worlds: two words each, of which no two splits share a pair."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

NamedSplit = Literal["train", "dev", "eval", "corpus"]
NAMED_SPLITS: tuple[NamedSplit, ...] = ("train", "dev", "eval", "corpus")

FIRST: tuple[str, ...] = tuple(
    "Autumn Bitter Broken Calm Clever Curious Distant Eager Early Empty Faithful Frozen Gentle"
    " Hidden Hollow Humble Iron Jolly Late Little Lonely Lucky Merry Northern Proud Quiet Restless"
    " Silent Sleepy Southern Stormy Winter".split()
)
SECOND: tuple[str, ...] = tuple(
    "Anchor Badger Beacon Bridge Castle Cedar Comet Eagle Falcon Fiddle Forest Garden Hammer Harbor"
    " Heron Island Lantern Library Market Meadow Mill Monk Orchard Otter Palace Pilot River Sailor"
    " Temple Tower Wagon Willow".split()
)
_DEV = 120
"""Names of the development split, the last ones of what was the evaluation split."""


def digest_of(text: str) -> int:
    """Return the first 64 bits of the SHA-256 digest of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@lru_cache
def world_names(split: NamedSplit) -> tuple[str, ...]:
    """Return the world names of a split, which repeat words late; splits share no name."""
    share = {"corpus": (0, 1), "train": (2, 3), "eval": (4, 5), "dev": (4, 5)}[split]
    pairs = [(first, second) for first in FIRST for second in SECOND]
    pairs.sort(key=lambda pair: digest_of(f"order:{pair}"))
    left = _spread(pair for pair in pairs if digest_of(f"split:{pair}") % 6 in share)
    if split == "eval":
        left = left[:-_DEV]
    elif split == "dev":
        left = _spread(left[-_DEV:])
    return tuple(" ".join(pair) for pair in left)


def _spread(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Order pairs so that each next one has the words used least so far."""
    left, used = list(pairs), Counter[str]()
    ordered: list[tuple[str, str]] = []
    while left:
        pair = min(left, key=lambda p: max(used[p[0]], used[p[1]]))
        left.remove(pair)
        used.update(pair)
        ordered.append(pair)
    return ordered
