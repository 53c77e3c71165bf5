"""Scan text of language models for JSON objects, and remember where each object stood.

The scanner walks left to right once: a failure resumes at or after the place that failed, so the
time is linear in the length. Beyond strict JSON it accepts raw newlines and unescaped quotes in
strings, single quotes, bare keys, missing and trailing commas. Numbers stay text: nothing here
computes with them, and an absurdly long one must not raise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_DEPTH = 6

_OBJECT = re.compile(r"""\{(?=\s*["'}A-Za-z_])""")
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_LITERAL = re.compile(r"""[^\s,{}\[\]"':<>]+""")
_CHUNK = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.)|$)", re.DOTALL)
_ESCAPED = dict(zip("ntrbf/\\\"'", "\n\t\r\b\f/\\\"'", strict=True))
_TAG = r"</?\s*answer\b"
_KEY = r"""(?:"[^"\\]{0,40}"|'[^'\\]{0,40}'|[A-Za-z_]\w{0,40})\s*:"""
_CLOSES = {
    "key": re.compile(r"\s*:"),
    "member": re.compile(rf"(?i)\s*(?:[}}\]]|{_TAG}|\Z|,\s*(?:[}}\]]|\Z|{_KEY})|{_KEY})"),
    "item": re.compile(rf"(?i)\s*(?:[,\]]|{_TAG}|\Z)"),
}


class Fault(StrEnum):
    """Name the reason why an object could not be read."""

    MALFORMED = "malformed"
    TRUNCATED = "truncated"


@dataclass(frozen=True)
class ScannedObject:
    """Hold one object at ``text[start:end]``: its fields, or the fault that stopped the scanner."""

    start: int
    end: int
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    fault: Fault | None = None


class _Stop(Exception):
    """Stop reading an object that cannot be completed; scanning goes on at ``at``."""

    def __init__(self, fault: Fault, at: int) -> None:
        self.fault, self.at = fault, at


def scan_objects(
    text: str, start: int = 0, *, until: re.Pattern[str] | None = None
) -> tuple[list[ScannedObject], int]:
    """Return the outermost objects of ``text[start:]`` up to a match of ``until`` outside them.

    Returns:
        the objects in order, and the position where the walk ended.

    >>> found, _ = scan_objects('Sure: [{"op": "return",}, {"op": "ad')
    >>> [(one.fields, one.fault) for one in found]
    [({'op': 'return'}, None), ({}, <Fault.TRUNCATED: 'truncated'>)]
    """
    found: list[ScannedObject] = []
    position = start
    stops = iter(()) if until is None else (match.start() for match in until.finditer(text, start))
    stop = next(stops, len(text))
    while (opening := _OBJECT.search(text, position, stop)) is not None:
        begin = opening.start()
        try:
            fields, end = _object(text, begin, 0)
            one = ScannedObject(begin, end, fields)
        except _Stop as stopped:
            one = ScannedObject(begin, max(stopped.at, begin + 1), fault=stopped.fault)
        found.append(one)
        position = one.end
        while stop < position:  # this one stood inside the object
            stop = next(stops, len(text))
    return found, stop


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    position = match.end() if match else position
    if position >= len(text):
        raise _Stop(Fault.TRUNCATED, len(text))
    return position


def _object(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    if depth >= MAX_DEPTH:
        raise _Stop(Fault.MALFORMED, position)
    fields: dict[str, Any] = {}
    position = _skip(text, position + 1)
    while text[position] != "}":
        if text[position] in "\"'":
            key, position = _string(text, position, "key")
        elif (word := _WORD.match(text, position)) is not None:
            key, position = word.group(), word.end()
        else:
            raise _Stop(Fault.MALFORMED, position)
        position = _skip(text, position)
        if text[position] != ":":
            raise _Stop(Fault.MALFORMED, position)
        fields[key], position = _value(text, _skip(text, position + 1), depth, "member")
        position = _skip(text, position)
        if text[position] in "]<":  # the closing brace was forgotten, every field is complete
            return fields, position
        if text[position] == ",":
            position = _skip(text, position + 1)
    return fields, position + 1


def _value(text: str, position: int, depth: int, place: str) -> tuple[Any, int]:
    """Read the value at ``position`` of an object (``member``) or a list (``item``)."""
    opening = text[position]
    if opening in "\"'":
        return _string(text, position, place)
    if opening == "{":
        return _object(text, position, depth + 1)
    if opening == "[":
        if depth + 1 >= MAX_DEPTH:
            raise _Stop(Fault.MALFORMED, position)
        items: list[Any] = []
        position = _skip(text, position + 1)
        while text[position] != "]":
            item, position = _value(text, position, depth + 1, "item")
            items.append(item)
            position = _skip(text, position)
            if text[position] == ",":
                position = _skip(text, position + 1)
        return items, position + 1
    if (literal := _LITERAL.match(text, position)) is None:
        raise _Stop(Fault.MALFORMED, position)
    word = literal.group()
    return (None if word.lower() in {"null", "none", "true", "false"} else word), literal.end()


def _string(text: str, position: int, place: str) -> tuple[str, int]:
    """Read the string that opens at ``position``.

    A quote counts as a character of the string unless JSON can go on behind it.
    """
    quote, closes = text[position], _CLOSES[place]
    pieces: list[str] = []
    position += 1
    while True:
        chunk = _CHUNK[quote].match(text, position)
        piece = chunk.group() if chunk else ""
        position += len(piece)
        pieces.append(piece)
        if position >= len(text):
            raise _Stop(Fault.TRUNCATED, len(text))
        if text[position] == "\\":
            escape = _ESCAPE.match(text, position)
            code, character = escape.groups() if escape else (None, None)
            position = escape.end() if escape else position + 1
            if code is not None:
                pieces.append(chr(int(code, 16)))
            else:
                pieces.append(_ESCAPED.get(character or "", f"\\{character or ''}"))
        elif closes.match(text, position + 1):
            return "".join(pieces), position + 1
        elif piece.rstrip().endswith("{"):  # a forgotten quote, and another object begins here
            raise _Stop(Fault.MALFORMED, position - (len(piece) - len(piece.rstrip())) - 1)
        else:
            pieces.append(quote)
            position += 1
