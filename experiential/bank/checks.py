"""Check arguments that several ways into a bank take."""

from __future__ import annotations

import os
from pathlib import Path

from experiential.errors import BankError


def checked_folder(path: object) -> Path:
    """Return a folder name as a path; refuse an address, a file, and any other value."""
    if isinstance(path, str) and "://" in path:
        raise BankError(
            f"Expected a folder, got the address {path!r}; only ExperienceBank takes one, with"
            " http:// or https://"
        )
    if not isinstance(path, (str, os.PathLike)) or not str(path):  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"Expected path to be a folder name, got {path!r}")
    folder = Path(os.fspath(path)).expanduser()  # pyright: ignore[reportUnknownArgumentType]
    if folder.exists() and not folder.is_dir():
        raise BankError(f"Expected a folder, got the file {str(folder)!r}; choose another path")
    return folder


def checked_text(value: object, name: str) -> str:
    """Return text that is not blank; errors call it ``name``."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"Expected {name} to be non-empty text, got {value!r}")
    return value
