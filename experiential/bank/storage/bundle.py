"""Read and write the exchange file of a bank, as JSON Lines or Markdown with a content hash."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from experiential.bank.storage import markdown
from experiential.bank.storage.markdown import Row
from experiential.errors import BankError
from experiential.types import Experience, Provenance

FORMAT = "experiential-bank"
VERSION = 1
_MARKDOWN = (".md", ".markdown")
_CHECK = "check"  # field of a row: the first digits of its digest
_CHECKED = 16
_SHOWN = 5


class Item(NamedTuple):
    """Hold one entry of a file, its line and digest, and what its written digest says."""

    entry: Experience
    line: int
    digest: str
    is_checked: bool
    is_changed: bool


def write(file: Path, entries: Sequence[Experience], namespace: str, embedder: str) -> int:
    """Write entries beside ``file``, then rename, so that readers see all or nothing new.

    A name that ends in ``.md`` gives Markdown, any other JSON Lines: a header and one entry a line.
    """
    digests = [digest(entry) for entry in entries]
    header = {
        "format": FORMAT,
        "version": VERSION,
        "namespace": namespace,
        "embedder": embedder,
        "entries": len(entries),
        "sha256": _hash("\n".join(digests)),
    }
    rows = [
        {**_fields(entry), _CHECK: known[:_CHECKED]}
        for entry, known in zip(entries, digests, strict=True)
    ]
    if file.suffix.lower() in _MARKDOWN:
        text = markdown.dump(header, rows)
    else:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [header, *rows])
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)  # it is still there only when writing failed
    return len(entries)


def read(file: Path, *, edited: bool = False) -> list[Experience]:
    """Return the entries of an exported file, or of one written by hand (``{"text": ...}`` lines).

    Args:
        file: what to read; the end of its name says which format it has.
        edited: take a file that differs from its hash; what was changed in it counts as written by
            a person.

    Raises:
        BankError: the file is missing, a part of it is no entry, or it differs from its hash; the
            message says where.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BankError(f"Expected a readable export file, got {error}") from error
    load = markdown.load if file.suffix.lower() in _MARKDOWN else _load_lines
    header, rows = load(text, file.name)
    if header and (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        found = f"{header.get('format')!r} version {header.get('version')}"
        raise BankError(
            f"Expected {FORMAT!r} version {VERSION} in {file.name}, got {found}; nothing was"
            " imported"
        )
    items: list[Item] = []
    for line, fields in rows:
        check = fields.get(_CHECK)
        try:
            own = {name: value for name, value in fields.items() if name != _CHECK}
            entry = Experience.model_validate(own)
            known = digest(entry)
        except ValueError as error:  # pydantic's errors are, that for a lone surrogate too
            raise _no_entry(line, file.name, json.dumps(fields)) from error
        if not entry.text.strip():
            raise _no_entry(line, file.name, json.dumps(fields))
        is_changed = check is not None and str(check) != known[:_CHECKED]
        items.append(Item(entry, line, known, check is not None, is_changed))
    entries = [item.entry for item in items]
    if edited:
        # An edited entry keeps its origins, but no generation wrote it.
        for place, item in enumerate(items):
            if item.is_changed:
                kept = item.entry.provenance.model_dump(include={"trajectory", "instance"})
                own = Provenance(cause="import", **kept)
                entries[place] = item.entry.model_copy(update={"provenance": own})
        return entries
    if differences := _differences(header, items):
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise BankError(
            f"Expected {file.name} as it was exported, got a file that differs from its hash:"
            f" {'; '.join(differences[:_SHOWN])}{more}; nothing was imported. Restore the file, or"
            " import it with edited=True if it was changed on purpose"
        )
    return entries


def digest(entry: Experience) -> str:
    """Return the SHA-256 of an entry as JSON with sorted keys and without default fields."""
    return _hash(json.dumps(_fields(entry), sort_keys=True, separators=(",", ":")))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _fields(entry: Experience) -> dict[str, Any]:
    kept = json.loads(entry.model_dump_json(exclude_defaults=True))
    return {"id": entry.id, "text": entry.text, **kept}


def _load_lines(text: str, name: str) -> tuple[dict[str, Any], list[Row]]:
    header: dict[str, Any] = {}
    rows: list[Row] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _no_entry(number, name, line) from error
        if not isinstance(fields, dict):
            raise _no_entry(number, name, line)
        if "format" not in fields:
            rows.append(Row(number, cast("dict[str, Any]", fields)))
        else:
            header = header or cast("dict[str, Any]", fields)
    return header, rows


def _no_entry(line: int, name: str, got: str) -> BankError:
    return BankError(
        f"Expected an entry with text in line {line} of {name}, got {got[:80]!r}; nothing was"
        " imported"
    )


def _differences(header: dict[str, Any], items: Sequence[Item]) -> list[str]:
    """Describe how entries differ from their hashes; empty if they do not, or have none."""
    changed = [f"line {one.line} was changed" for one in items if one.is_changed]
    if "sha256" not in header:
        checked = any(item.is_checked for item in items)
        return ["its header is missing"] if checked and not header else changed
    found = [
        f"line {one.line} was {'changed' if one.is_checked else 'added'}"
        for one in items
        if one.is_changed or not one.is_checked
    ]
    if len(items) != header.get("entries"):
        found.append(f"it should hold {header.get('entries')} entries and holds {len(items)}")
    if not found and _hash("\n".join(item.digest for item in items)) != header["sha256"]:
        found.append("its entries or its header are not those that were written")
    return found
