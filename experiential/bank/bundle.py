"""The exchange file of a bank: JSON Lines, a header and one entry a line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from experiential.errors import BankError
from experiential.types import Experience

FORMAT = "experiential-bank"


def write(file: Path, entries: Sequence[Experience], namespace: str, embedder: str) -> int:
    """Write entries beside ``file`` and rename, so that a reader finds all of them or the old file."""
    header = {"format": FORMAT, "version": 1, "namespace": namespace, "embedder": embedder, "entries": len(entries)}
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(header, ensure_ascii=False), *(entry.model_dump_json() for entry in entries)]
    with scratch.open("w", encoding="utf-8") as stream:
        stream.write("\n".join(lines) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    scratch.replace(file)
    return len(entries)


def read(file: Path) -> list[Experience]:
    """The entries of an exported file; a plain file of ``{"text": ...}`` lines is accepted too.

    Raises:
        BankError: the file is missing, or a line is no entry; the message names the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BankError(f"Expected a readable export file, got {error}") from error
    found = [_entry(line, f"line {number} of {file.name}") for number, line in enumerate(lines, start=1) if line.strip()]
    return [entry for entry in found if entry is not None]


def _entry(line: str, place: str) -> Experience | None:
    try:
        value = json.loads(line)
        if isinstance(value, dict) and "format" in value:
            _check_header(str(value["format"]), value.get("version"), place)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]  (parsed JSON)
            return None
        entry = Experience.model_validate(value)
    except (ValueError, ValidationError) as error:
        raise BankError(f"Expected an entry in {place}, got {line[:80]!r}; nothing was imported") from error
    if not entry.text.strip():
        raise BankError(f"Expected an entry with text in {place}, got {line[:80]!r}; nothing was imported")
    return entry


def _check_header(format: str, version: object, place: str) -> None:
    if format != FORMAT or version != 1:
        raise BankError(f"Expected {FORMAT!r} version 1 in {place}, got {format!r} version {version}; nothing was imported")
