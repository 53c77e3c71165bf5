"""Locate the cache of files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(part: str) -> Path:
    """Return the cache folder of one part.

    It lies in ``EXPERIENTIAL_CACHE``, else in ``experiential`` below ``XDG_CACHE_HOME`` or
    ``~/.cache``.
    """
    if own := os.environ.get("EXPERIENTIAL_CACHE"):
        return Path(own) / part
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "experiential" / part
