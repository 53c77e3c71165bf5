"""Separate training from evaluation by content."""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "eval"]

EVAL_SHARE = 4
"""One content in this many belongs to the evaluation split."""


def split_of(content: str) -> Split:
    """Return the one split of a content, by a hash of the content alone."""
    digest = hashlib.sha256(f"experiential split {content}".encode()).digest()
    return "eval" if digest[0] % EVAL_SHARE == 0 else "train"
