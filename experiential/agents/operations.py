"""Read an extractor's answer as operations on the bank.

Good operations are kept, each refusal has a named reason, and nothing raises.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from experiential.bank.text import TEXT_LIMIT as TEXT_LIMIT  # the bank's own default
from experiential.bank.text import canonical
from experiential.types import (
    Add,
    Discard,
    Keep,
    Merge,
    Operation,
    ParsedOperations,
    Refusal,
    Return,
    Update,
)

DISTILLATION = ("add", "update", "return")
PRINCIPLES = ("add", "return")
CONSOLIDATION = ("keep", "merge", "discard")
MOST_TRIPLES = 8  # triples that one principle may have
LONGEST = 120  # characters that each part of a triple may have

Triple = tuple[str, str, str]

_EXCERPT = 200
_OPEN = re.compile(r"<\s*answer\s*>", re.IGNORECASE)
_TAG = re.compile(r"<\s*(?:/\s*)?answer\s*>", re.IGNORECASE)
_WRAPPER = re.compile(
    r"""\{(\s*["']?(?:operations|ops|actions|answer)["']?\s*:\s*)(?=\[)""", re.IGNORECASE
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_NUMBER = re.compile(r"\d{1,9}(?!\d)")

_SEPARATOR = re.compile(r"\s*(?:\||;|,|->|→)\s*")

_OP_KEYS = ("op", "operation", "function_name", "function", "action", "name", "type")
_NESTED_KEYS = ("parameters", "params", "arguments", "args")
_TEXT_KEYS = "text new_memory updated_memory memory new_text content experience lesson".split()
_TRIPLE_KEYS = ("triples", "structure", "triplets")
_ENTRY_KEYS = ("entry", "index", "idx", "target_idx", "target", "number", "id")
_ENTRIES_KEYS = ("entries", "indices", "idxs", "targets", "ids", *_ENTRY_KEYS)
_PARTS = (("subject", "head", "s"), ("predicate", "relation", "verb", "p"), ("object", "tail", "o"))

MAX_DEPTH = 6

_BRACE = re.compile(r"""\{(?=\s*["'}A-Za-z_])""")
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_LITERAL = re.compile(r"""[^\s,{}\[\]"':<>]+""")
_CHUNK = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.)|$)", re.DOTALL)
_ESCAPED = dict(zip("ntrbf/\\\"'", "\n\t\r\b\f/\\\"'", strict=True))
_CLOSING = r"</?\s*answer\b"
_KEY = r"""(?:"[^"\\]{0,40}"|'[^'\\]{0,40}'|[A-Za-z_]\w{0,40})\s*:"""
_CLOSES = {
    "key": re.compile(r"\s*:"),
    "member": re.compile(rf"(?i)\s*(?:[}}\]]|{_CLOSING}|\Z|,\s*(?:[}}\]]|\Z|{_KEY})|{_KEY})"),
    "item": re.compile(rf"(?i)\s*(?:[,\]]|{_CLOSING}|\Z)"),
}


class Reason(StrEnum):
    """Name the reason why a piece of an answer was refused."""

    NO_OPERATIONS = "no_operations"  # the answer holds no JSON object at all
    MALFORMED = "malformed"  # an object that cannot be read as JSON, even leniently
    TRUNCATED = "truncated"  # an object that the end of the answer cut
    SUPERSEDED = "superseded"  # an object of an earlier answer; the last answer counts
    UNKNOWN_OP = "unknown_op"
    UNEXPECTED_OP = "unexpected_op"  # one that this kind of answer may not hold
    MISSING_TEXT = "missing_text"
    EMPTY_TEXT = "empty_text"
    TEXT_TOO_LONG = "text_too_long"  # longer than ``TEXT_LIMIT`` characters
    MISSING_ENTRY = "missing_entry"
    ENTRY_OUT_OF_RANGE = "entry_out_of_range"  # no entry with this number was shown
    DUPLICATE = "duplicate"  # it, or another one on the same entry, was accepted before
    TOO_MANY = "too_many"
    WRONG_TRIPLE = "wrong_triple"  # invalid or one too many; its operation is accepted without it


def parse_operations(
    text: str,
    *,
    max_operations: int = 3,
    shown: int | None = None,
    kinds: Collection[str] = DISTILLATION,
) -> ParsedOperations:
    """Read the operations of a response.

    The wire form is ``<answer>[{"op": "add", "text": "..."}, {"op": "update", "entry": 1, "text":
    "..."}]</answer>``. Good parts of a bad answer are kept; each object that is not accepted gives
    one `Refusal` whose reason is a `Reason`.

    Args:
        text: the whole response; the last ``<answer>`` counts, and without any the bare text is
            searched for objects.
        max_operations: operations accepted; the ones after them are refused.
        shown: how many entries the prompt numbered; None accepts any positive number.
        kinds: the operations allowed, ``DISTILLATION`` or ``CONSOLIDATION``.

    Returns:
        the accepted operations, each with the characters of ``text`` that it was read from, and the
        refusals.

    >>> answer = '<answer>[{"op": "add", "text": "Look."}, {"op": "fly"}]</answer>'
    >>> parsed = parse_operations(answer)
    >>> parsed.operations[0].text, parsed.refused[0].reason
    ('Look.', 'unknown_op')
    """
    objects, superseded = find_objects(text)
    operations: list[Operation] = []
    refused = [(Reason.SUPERSEDED, one) for one in superseded]
    if not objects:
        refused.append((Reason.NO_OPERATIONS, ScannedObject(0, len(text))))
    claimed: set[object] = set()
    for one in objects:
        try:
            if one.fault is not None:
                raise _Refused(one.fault)
            operation, wrong_triples = _operation(one, shown, kinds)
            refused += [(Reason.WRONG_TRIPLE, one)] * wrong_triples
            # an entry may be changed once, a text added once
            match operation:
                case Add(text=added):
                    claims: set[object] = {" ".join(added.split()).casefold()}
                case Merge(entries=entries):
                    claims = set(entries)
                case Update(entry=entry) | Keep(entry=entry) | Discard(entry=entry):
                    claims = {entry}
                case _:
                    claims = {Return}
            if claims & claimed:
                raise _Refused(Reason.DUPLICATE)
            if len(operations) >= max_operations:
                raise _Refused(Reason.TOO_MANY)
        except _Refused as refusal:
            refused.append((refusal.args[0], one))
        else:
            claimed |= claims
            operations.append(operation)
    refusals = tuple(
        Refusal(reason=reason, text=clean(text[one.start : min(one.end, one.start + _EXCERPT)]))
        for reason, one in refused
    )
    return ParsedOperations(operations=tuple(operations), refused=refusals)


def find_objects(text: str) -> tuple[list[ScannedObject], list[ScannedObject]]:
    """Return the JSON objects of the last answer, and those of earlier answers."""
    # same length, so that spans stay true
    text = _WRAPPER.sub(lambda wrapper: f" {wrapper.group(1)}", text)
    answers: list[list[ScannedObject]] = []
    position = 0
    while (opening := _OPEN.search(text, position)) is not None:
        objects, position = scan_objects(text, opening.end(), until=_TAG)
        if objects or "[" in text[opening.end() : position]:
            answers.append(objects)
    if answers:
        return answers[-1], [one for answer in answers[:-1] for one in answer]
    # without tags, objects are looked for behind the thinking, unless there are none
    thought = text.lower().rfind("</think>")
    start = thought if thought >= 0 and "{" in text[thought:] else 0
    return scan_objects(text, start)[0], []


def operations_schema(
    max_operations: int,
    merge: bool = False,
    *,
    shown: int = 0,
    max_chars: int = TEXT_LIMIT,
    triples: bool = False,
) -> dict[str, Any]:
    """Return the JSON schema of an answer, for backends that can restrict a response to one.

    The root is an object with one list, because some services accept no list at the root;
    `parse_operations` reads both.

    Args:
        max_operations: operations that the list may hold.
        merge: for consolidation, else for distillation.
        shown: how many entries the prompt numbered; without any nothing can be updated.
        max_chars: characters of a text, so that an answer ends before the tokens do.
        triples: additions have a list of (subject, predicate, object) triples.
    """
    text = {"type": "string", "minLength": 1, "maxLength": max_chars}
    entry = {"type": "integer", "enum": list(range(1, shown + 1))}
    entries = {"type": "array", "items": entry, "minItems": 1}
    if merge:
        fields = {
            "keep": {"entry": entry},
            "merge": {"entries": entries, "text": text},
            "discard": {"entry": entry},
        }
    else:
        update = {"update": {"entry": entry, "text": text}} if shown else {}
        add = {"text": text, "triples": _TRIPLES} if triples else {"text": text}
        fields = {"add": add, **update, "return": {}}
    closed = {"additionalProperties": False}
    variants: list[dict[str, Any]] = []
    for op, given in fields.items():
        parts = {"op": {"type": "string", "enum": [op]}, **given}
        variants.append({"type": "object", "properties": parts, "required": list(parts), **closed})
    items = {"anyOf": variants}
    listed = {"type": "array", "items": items, "minItems": 1, "maxItems": max_operations}
    root = {"operations": listed}
    return {"type": "object", "properties": root, "required": list(root), **closed}


_PART = {"type": "string", "minLength": 1, "maxLength": LONGEST}
_TRIPLE: dict[str, Any] = {"type": "array", "items": _PART, "minItems": 3, "maxItems": 3}
_TRIPLES: dict[str, Any] = {"type": "array", "items": _TRIPLE, "maxItems": MOST_TRIPLES}


def clean(text: str) -> str:
    """Return ``text`` without control characters and lone surrogates, stripped."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _CONTROL.sub("", joined.replace("\r\n", "\n").replace("\r", "\n")).strip()


def read_triples(value: Any) -> tuple[tuple[Triple, ...], int]:
    """Return the triples in a scanned value, each once, and the number of invalid items.

    A triple is a list of three texts, an object with subject, predicate and object, or one text of
    three parts between commas, bars or semicolons. A part that is blank or longer than ``LONGEST``
    makes it wrong; those after the first ``MOST_TRIPLES`` are too many.

    >>> read_triples([["key", "opens", "door"], {"s": "door", "p": "is", "o": "red"}, ["key"]])
    ((('key', 'opens', 'door'), ('door', 'is', 'red')), 1)
    >>> read_triples("(lamp; hides; key)")
    ((('lamp', 'hides', 'key'),), 0)
    """
    if value is None:
        return (), 0
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    if len(items) == 3 and all(
        isinstance(item, str) and not _SEPARATOR.search(item) for item in items
    ):
        items = [items]  # one triple, not in a list of its own
    good: dict[Triple, None] = {}
    wrong = 0
    for item in items:
        parts: Sequence[Any] = ()
        if isinstance(item, str):
            parts = _SEPARATOR.split(item.strip().strip("()[]"))
        elif isinstance(item, Mapping):
            fields = _lowered(item)
            parts = [_first(fields, names) for names in _PARTS]
        elif isinstance(item, list | tuple):
            parts = cast("Sequence[Any]", item)
        texts = [canonical(" ".join(part.split())) for part in parts if isinstance(part, str)]
        if len(parts) == len(texts) == 3 and all(0 < len(part) <= LONGEST for part in texts):
            good[texts[0], texts[1], texts[2]] = None
        else:
            wrong += 1
    return tuple(good)[:MOST_TRIPLES], wrong + max(0, len(good) - MOST_TRIPLES)


class _Refused(Exception):
    """Refuse an operation for a `Reason`."""


def _operation(
    one: ScannedObject, shown: int | None, kinds: Collection[str]
) -> tuple[Operation, int]:
    """Return the operation that a scanned object describes, and how many triples are wrong."""
    known, span = (*DISTILLATION, *CONSOLIDATION), (one.start, one.end)
    # nested parameters and the form {"add": ...} are read as the flat wire form
    fields = _lowered(one.fields)
    for key in _NESTED_KEYS:
        if isinstance(fields.get(key), dict):
            fields = _lowered(fields[key]) | fields
    if len(fields) == 1 and (key := next(iter(fields))) in known:
        value = fields[key]
        alone = "entry" if key in {"keep", "discard"} else "text"
        fields = (_lowered(value) if isinstance(value, dict) else {alone: value}) | {"op": key}
    values = (fields.get(key) for key in _OP_KEYS)
    names = (value.strip().lower() for value in values if isinstance(value, str))
    op = next((name for name in names if name in known), None)
    if op is None:
        raise _Refused(Reason.UNKNOWN_OP)
    if op not in kinds:
        raise _Refused(Reason.UNEXPECTED_OP)
    if op == "return":
        return Return(span=span), 0
    given = _first(fields, _ENTRIES_KEYS if op == "merge" else _ENTRY_KEYS)
    entries = tuple(dict.fromkeys(_numbers(given)))
    if op != "add":
        if not entries:
            raise _Refused(Reason.MISSING_ENTRY)
        if any(n < 1 or (shown is not None and n > shown) for n in entries):
            raise _Refused(Reason.ENTRY_OUT_OF_RANGE)
        if op in ("keep", "discard"):
            return (Keep if op == "keep" else Discard)(entry=entries[0], span=span), 0
    text = _first(fields, _TEXT_KEYS)
    if not isinstance(text, str):
        raise _Refused(Reason.MISSING_TEXT)
    if len(text) > TEXT_LIMIT:
        raise _Refused(Reason.TEXT_TOO_LONG)
    if not (text := clean(text)):
        raise _Refused(Reason.EMPTY_TEXT)
    if op == "merge":
        return Merge(entries=entries, text=text, span=span), 0
    if op == "update":
        return Update(entry=entries[0], text=text, span=span), 0
    kind = fields.get("kind")
    kind = clean(kind) if isinstance(kind, str) else ""
    triples, wrong = read_triples(_first(fields, _TRIPLE_KEYS))
    kind = kind if 0 < len(kind) <= 40 else "lesson"
    return Add(text=text, kind=kind, triples=triples, span=span), wrong


def _lowered(fields: Any) -> dict[str, Any]:
    return {str(key).strip().lower(): value for key, value in fields.items()}


def _first(fields: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((fields[key] for key in keys if key in fields), None)


def _numbers(value: Any) -> list[int]:
    """Return the entry numbers in a scanned value such as ``"2"``, ``"entry 2"`` or ``"1, 3"``.

    A negative, fractional or absurdly long number reads as 0, which is out of range.
    """
    if isinstance(value, list):
        return [number for item in cast("list[Any]", value) for number in _numbers(item)]
    if not isinstance(value, str):
        return []
    whole = re.sub(r"\.0+\b", "", value)
    if re.search(r"(?<!\w)-\s*\d|\.\d|\d{10}", whole):
        return [0]
    return [int(number) for number in _NUMBER.findall(whole)]


@dataclass(frozen=True)
class ScannedObject:
    """Hold one object at ``text[start:end]``: its fields, or the fault that stopped the scanner."""

    start: int
    end: int
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    fault: Reason | None = None


class _Stop(Exception):
    """Stop reading an object that cannot be completed: the reason, and where scanning goes on."""


def scan_objects(
    text: str, start: int = 0, *, until: re.Pattern[str] | None = None
) -> tuple[list[ScannedObject], int]:
    """Return the outermost objects of ``text[start:]`` up to a match of ``until`` outside them.

    It walks left to right once: a failure resumes at or after the place that failed, so the time is
    linear in the length. Beyond strict JSON it accepts raw newlines and unescaped quotes in
    strings, single quotes, bare keys, missing and trailing commas. Numbers stay text: nothing here
    computes with them, and an absurdly long one must not raise.

    Returns:
        the objects in order, and the position where the walk ended.

    >>> found, _ = scan_objects('Sure: [{"op": "return",}, {"op": "ad')
    >>> [(one.fields, one.fault) for one in found]
    [({'op': 'return'}, None), ({}, <Reason.TRUNCATED: 'truncated'>)]
    """
    found: list[ScannedObject] = []
    position = start
    stops = iter(()) if until is None else (match.start() for match in until.finditer(text, start))
    stop = next(stops, len(text))
    while (opening := _BRACE.search(text, position, stop)) is not None:
        begin = opening.start()
        try:
            fields, end = _read_value(text, begin, 0, "item")
            one = ScannedObject(begin, end, fields)
        except _Stop as stopped:
            fault, end = stopped.args
            one = ScannedObject(begin, max(end, begin + 1), fault=fault)
        found.append(one)
        position = one.end
        while stop < position:  # this one stood inside the object
            stop = next(stops, len(text))
    return found, stop


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    position = match.end() if match else position
    if position >= len(text):
        raise _Stop(Reason.TRUNCATED, len(text))
    return position


def _read_value(text: str, position: int, depth: int, place: str) -> tuple[Any, int]:
    """Read the value at ``position``: of an object (``member``) or in a list (``item``)."""
    opening = text[position]
    if opening in "\"'":
        return _read_string(text, position, place)
    if opening not in "{[":
        if (literal := _LITERAL.match(text, position)) is None:
            raise _Stop(Reason.MALFORMED, position)
        word = literal.group()
        return (None if word.lower() in {"null", "none", "true", "false"} else word), literal.end()
    if depth >= MAX_DEPTH:
        raise _Stop(Reason.MALFORMED, position)
    items: list[Any] = []
    fields: dict[str, Any] = {}
    position = _skip(text, position + 1)
    while text[position] != ("]" if opening == "[" else "}"):
        if opening == "[":
            item, position = _read_value(text, position, depth + 1, "item")
            items.append(item)
            position = _skip(text, position)
        else:
            if text[position] in "\"'":
                key, position = _read_string(text, position, "key")
            elif (word := _WORD.match(text, position)) is not None:
                key, position = word.group(), word.end()
            else:
                raise _Stop(Reason.MALFORMED, position)
            position = _skip(text, position)
            if text[position] != ":":
                raise _Stop(Reason.MALFORMED, position)
            position = _skip(text, position + 1)
            fields[key], position = _read_value(text, position, depth + 1, "member")
            position = _skip(text, position)
            if text[position] in "]<":  # the closing brace was forgotten, every field is complete
                return fields, position
        if text[position] == ",":
            position = _skip(text, position + 1)
    return (items if opening == "[" else fields), position + 1


def _read_string(text: str, position: int, place: str) -> tuple[str, int]:
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
            raise _Stop(Reason.TRUNCATED, len(text))
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
            raise _Stop(Reason.MALFORMED, position - (len(piece) - len(piece.rstrip())) - 1)
        else:
            pieces.append(quote)
            position += 1
