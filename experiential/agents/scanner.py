"""A small JSON scanner that survives what language models write, and remembers where each object stood.

It walks text left to right once: a failure resumes at or after the place that failed, so the time
is linear in the length. Beyond strict JSON it accepts raw newlines and unescaped quotes in strings,
single quotes, bare keys, missing and trailing commas. Numbers stay text, because nobody here
computes with them and because an absurdly long one must not raise.
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
_ESCAPED = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "/": "/",
    "\\": "\\",
    '"': '"',
    "'": "'",
}
_TAG = r"</?\s*answer\b"
_KEY = r"""(?:"[^"\\]{0,40}"|'[^'\\]{0,40}'|[A-Za-z_]\w{0,40})\s*:"""
_CLOSES = {
    "key": re.compile(r"\s*:"),
    "member": re.compile(
        rf"\s*(?:[}}\]]|{_TAG}|\Z|,\s*(?:[}}\]]|\Z|{_KEY})|{_KEY})", re.IGNORECASE
    ),
    "item": re.compile(rf"\s*(?:[,\]]|{_TAG}|\Z)", re.IGNORECASE),
}


class Fault(StrEnum):
    """Why an object could not be read."""

    MALFORMED = "malformed"
    TRUNCATED = "truncated"


@dataclass(frozen=True)
class ScannedObject:
    """One object found in a text: its fields, or the fault that stopped the scanner, and its characters ``text[start:end]``."""

    start: int
    end: int
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    fault: Fault | None = None


class _Stop(Exception):
    """The object being read cannot be completed; scanning goes on at ``at``."""

    def __init__(self, fault: Fault, at: int) -> None:
        self.fault, self.at = fault, at


def scan_objects(
    text: str, start: int = 0, *, until: re.Pattern[str] | None = None
) -> tuple[list[ScannedObject], int]:
    """The outermost objects of ``text`` from ``start``, up to the first match of ``until`` outside every object.

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
        one = _read(text, opening.start())
        found.append(one)
        position = one.end
        while stop < position:  # this one stood inside the object
            stop = next(stops, len(text))
    return found, stop


def _read(text: str, start: int) -> ScannedObject:
    try:
        fields, end = _object(text, start, 0)
    except _Stop as stop:
        return ScannedObject(start, max(stop.at, start + 1), fault=stop.fault)
    return ScannedObject(start, end, fields)


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
        key, position = _key(text, position)
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


def _key(text: str, position: int) -> tuple[str, int]:
    if text[position] in "\"'":
        return _string(text, position, "key")
    if (word := _WORD.match(text, position)) is None:
        raise _Stop(Fault.MALFORMED, position)
    return word.group(), word.end()


def _value(text: str, position: int, depth: int, place: str) -> tuple[Any, int]:
    opening = text[position]
    if opening in "\"'":
        return _string(text, position, place)
    if opening == "{":
        return _object(text, position, depth + 1)
    if opening == "[":
        return _array(text, position, depth + 1)
    if (literal := _LITERAL.match(text, position)) is None:
        raise _Stop(Fault.MALFORMED, position)
    word = literal.group()
    return (None if word.lower() in {"null", "none", "true", "false"} else word), literal.end()


def _array(text: str, position: int, depth: int) -> tuple[list[Any], int]:
    if depth >= MAX_DEPTH:
        raise _Stop(Fault.MALFORMED, position)
    items: list[Any] = []
    position = _skip(text, position + 1)
    while text[position] != "]":
        item, position = _value(text, position, depth, "item")
        items.append(item)
        position = _skip(text, position)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return items, position + 1


def _string(text: str, position: int, place: str) -> tuple[str, int]:
    """The string opening at ``position``; a quote that nothing of JSON follows is a character of the string."""
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
            character, position = _escape(text, position)
            pieces.append(character)
        elif closes.match(text, position + 1):
            return "".join(pieces), position + 1
        elif piece.rstrip().endswith(
            "{"
        ):  # the closing quote was forgotten and another object begins here
            raise _Stop(Fault.MALFORMED, position - (len(piece) - len(piece.rstrip())) - 1)
        else:
            pieces.append(quote)
            position += 1


def _escape(text: str, position: int) -> tuple[str, int]:
    match = _ESCAPE.match(text, position)
    if match is None:
        return "\\", position + 1
    code, character = match.groups()
    if code is not None:
        return chr(int(code, 16)), match.end()
    return _ESCAPED.get(character or "", f"\\{character or ''}"), match.end()
