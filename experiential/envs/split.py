"""Separate training from evaluation by content."""

from __future__ import annotations

import hashlib
from typing import Literal

from experiential.envs.names import NamedSplit

Split = Literal["train", "eval"]

EVAL_SHARE = 4
"""One content in this many belongs to the evaluation split."""


def split_of(content: str) -> Split:
    """Return the one split of a content, by a hash of the content alone."""
    digest = hashlib.sha256(f"experiential split {content}".encode()).digest()
    return "eval" if digest[0] % EVAL_SHARE == 0 else "train"


def part_of(content: str) -> NamedSplit:
    """Return the one of four splits: ``dev`` is taken from ``split_of``'s eval, corpus from train.

    So what is held out under ``split_of`` is held out here, too.
    """
    number = hashlib.sha256(f"experiential part {content}".encode()).digest()[0]
    if split_of(content) == "eval":
        return "dev" if number % 2 else "eval"
    return "corpus" if number % 4 == 0 else "train"


def is_of(content: str, split: NamedSplit, *, four: bool) -> bool:
    """Return whether a content belongs to a split, one of four or of two."""
    return (part_of if four else split_of)(content) == split
