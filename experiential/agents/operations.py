"""Read an extractor's answer as operations on the bank.

Good operations are kept, each refusal has a named reason, and nothing raises.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from experiential.agents.principles import LONGEST, MOST_TRIPLES, read_triples
from experiential.agents.scanner import ScannedObject, scan_objects
from experiential.bank.text import TEXT_LIMIT as TEXT_LIMIT  # the bank's own default
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

_EXCERPT = 200
_OPEN = re.compile(r"<\s*answer\s*>", re.IGNORECASE)
_TAG = re.compile(r"<\s*(?:/\s*)?answer\s*>", re.IGNORECASE)
_WRAPPER = re.compile(
    r"""\{(\s*["']?(?:operations|ops|actions|answer)["']?\s*:\s*)(?=\[)""", re.IGNORECASE
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_NUMBER = re.compile(r"\d{1,9}(?!\d)")

_OP_KEYS = ("op", "operation", "function_name", "function", "action", "name", "type")
_NESTED_KEYS = ("parameters", "params", "arguments", "args")
_TEXT_KEYS = (
    "text",
    "new_memory",
    "updated_memory",
    "memory",
    "new_text",
    "content",
    "experience",
    "lesson",
)
_TRIPLE_KEYS = ("triples", "structure", "triplets")
_ENTRY_KEYS = ("entry", "index", "idx", "target_idx", "target", "number", "id")
_ENTRIES_KEYS = ("entries", "indices", "idxs", "targets", "ids", *_ENTRY_KEYS)


class Reason(StrEnum):
    """Name the reason why a piece of an answer was refused."""

    NO_OPERATIONS = "no_operations"
    """The answer holds no JSON object at all."""
    MALFORMED = "malformed"
    """An object that cannot be read as JSON, even leniently."""
    TRUNCATED = "truncated"
    """An object that the end of the answer cut."""
    SUPERSEDED = "superseded"
    """An object of an earlier answer; the last answer counts."""
    UNKNOWN_OP = "unknown_op"
    """No known operation is named."""
    UNEXPECTED_OP = "unexpected_op"
    """An operation that this kind of answer may not hold."""
    MISSING_TEXT = "missing_text"
    """The operation needs a text and has none."""
    EMPTY_TEXT = "empty_text"
    """The text is blank."""
    TEXT_TOO_LONG = "text_too_long"
    """The text is longer than ``TEXT_LIMIT`` characters."""
    MISSING_ENTRY = "missing_entry"
    """The operation needs an entry number and has none."""
    ENTRY_OUT_OF_RANGE = "entry_out_of_range"
    """No entry with this number was shown."""
    DUPLICATE = "duplicate"
    """The same operation, or another one on the same entry, was accepted before."""
    TOO_MANY = "too_many"
    """More operations than allowed."""
    WRONG_TRIPLE = "wrong_triple"
    """A triple is invalid or one too many; its operation is accepted without it."""


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
    reader = _Reader(text, max_operations, shown, frozenset(kinds))
    for one in superseded:
        reader.refuse(Reason.SUPERSEDED, one)
    for one in objects:
        reader.read(one)
    if not objects:
        reader.refused.append(Refusal(reason=Reason.NO_OPERATIONS, text=clean(text[:_EXCERPT])))
    return ParsedOperations(operations=tuple(reader.operations), refused=tuple(reader.refused))


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
    if merge:
        variants = [
            _variant("keep", entry=entry),
            _variant("merge", entries={"type": "array", "items": entry, "minItems": 1}, text=text),
            _variant("discard", entry=entry),
        ]
    else:
        update = [_variant("update", entry=entry, text=text)] if shown else []
        variants = [
            _variant("add", text=text, **({"triples": _TRIPLES} if triples else {})),
            *update,
            _variant("return"),
        ]
    operations = {
        "type": "array",
        "items": {"anyOf": variants},
        "minItems": 1,
        "maxItems": max_operations,
    }
    return {
        "type": "object",
        "properties": {"operations": operations},
        "required": ["operations"],
        "additionalProperties": False,
    }


_PART = {"type": "string", "minLength": 1, "maxLength": LONGEST}
_TRIPLE: dict[str, Any] = {"type": "array", "items": _PART, "minItems": 3, "maxItems": 3}
_TRIPLES: dict[str, Any] = {"type": "array", "items": _TRIPLE, "maxItems": MOST_TRIPLES}


def _variant(op: str, **properties: dict[str, Any]) -> dict[str, Any]:
    fields = {"op": {"type": "string", "enum": [op]}, **properties}
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def clean(text: str) -> str:
    """Return ``text`` without control characters and lone surrogates, stripped."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _CONTROL.sub("", joined.replace("\r\n", "\n").replace("\r", "\n")).strip()


class _Refused(Exception):
    def __init__(self, reason: Reason) -> None:
        self.reason = reason


@dataclass
class _Reader:
    """Turn scanned objects into operations, one by one."""

    text: str
    max_operations: int
    shown: int | None
    kinds: frozenset[str]
    operations: list[Operation] = field(default_factory=list[Operation])
    refused: list[Refusal] = field(default_factory=list[Refusal])
    _seen: set[object] = field(default_factory=set[object])

    def refuse(self, reason: Reason, one: ScannedObject) -> None:
        """Count an object that is not accepted."""
        self.refused.append(
            Refusal(
                reason=reason, text=clean(self.text[one.start : min(one.end, one.start + _EXCERPT)])
            )
        )

    def read(self, one: ScannedObject) -> None:
        """Accept or refuse one object."""
        try:
            if one.fault is not None:
                raise _Refused(Reason(one.fault))
            operation = self._build(_flatten(one.fields), (one.start, one.end))
            # an entry may be changed once, a text added once
            match operation:
                case Add(text=text):
                    claims = {" ".join(text.split()).casefold()}
                case Merge(entries=entries):
                    claims = set(entries)
                case Update(entry=entry) | Keep(entry=entry) | Discard(entry=entry):
                    claims = {entry}
                case _:
                    claims = {Return}
            if claims & self._seen:
                raise _Refused(Reason.DUPLICATE)
            if len(self.operations) >= self.max_operations:
                raise _Refused(Reason.TOO_MANY)
            self._seen |= claims
        except _Refused as refusal:
            self.refuse(refusal.reason, one)
        else:
            self.operations.append(operation)

    def _build(self, fields: dict[str, Any], span: tuple[int, int]) -> Operation:
        """Make the operation that the fields of an object describe."""
        known = (*DISTILLATION, *CONSOLIDATION)
        values = (fields.get(key) for key in _OP_KEYS)
        names = (value.strip().lower() for value in values if isinstance(value, str))
        op = next((name for name in names if name in known), None)
        if op is None:
            raise _Refused(Reason.UNKNOWN_OP)
        if op not in self.kinds:
            raise _Refused(Reason.UNEXPECTED_OP)
        match op:
            case "add":
                text, kind = _text(fields), fields.get("kind")
                kind = clean(kind) if isinstance(kind, str) else ""
                triples, wrong = read_triples(_first(fields, _TRIPLE_KEYS))
                excerpt = clean(self.text[span[0] : min(span[1], span[0] + _EXCERPT)])
                self.refused += [Refusal(reason=Reason.WRONG_TRIPLE, text=excerpt)] * wrong
                kind = kind if 0 < len(kind) <= 40 else "lesson"
                return Add(text=text, kind=kind, triples=triples, span=span)
            case "update":
                return Update(entry=self._entry(fields), text=_text(fields), span=span)
            case "keep":
                return Keep(entry=self._entry(fields), span=span)
            case "discard":
                return Discard(entry=self._entry(fields), span=span)
            case "merge":
                return Merge(entries=self._entries(fields), text=_text(fields), span=span)
            case _:
                return Return(span=span)

    def _entry(self, fields: dict[str, Any]) -> int:
        return self._entries(fields, _ENTRY_KEYS)[0]

    def _entries(
        self, fields: dict[str, Any], keys: Sequence[str] = _ENTRIES_KEYS
    ) -> tuple[int, ...]:
        numbers = tuple(dict.fromkeys(_numbers(_first(fields, keys))))
        if not numbers:
            raise _Refused(Reason.MISSING_ENTRY)
        if any(n < 1 or (self.shown is not None and n > self.shown) for n in numbers):
            raise _Refused(Reason.ENTRY_OUT_OF_RANGE)
        return numbers


def _flatten(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields in the flat wire form, with keys in lower case.

    Nested parameters and the form ``{"add": ...}`` are flattened.
    """
    flat = _lowered(fields)
    for key in _NESTED_KEYS:
        if isinstance(flat.get(key), dict):
            flat = _lowered(flat[key]) | flat
    if len(flat) == 1 and (op := next(iter(flat))) in (*DISTILLATION, *CONSOLIDATION):
        value = flat[op]
        given = (
            _lowered(value)
            if isinstance(value, dict)
            else {"entry" if op in {"keep", "discard"} else "text": value}
        )
        return given | {"op": op}
    return flat


def _lowered(fields: Any) -> dict[str, Any]:
    return {str(key).strip().lower(): value for key, value in fields.items()}


def _first(fields: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((fields[key] for key in keys if key in fields), None)


def _text(fields: dict[str, Any]) -> str:
    value = _first(fields, _TEXT_KEYS)
    if not isinstance(value, str):
        raise _Refused(Reason.MISSING_TEXT)
    if len(value) > TEXT_LIMIT:
        raise _Refused(Reason.TEXT_TOO_LONG)
    if not (text := clean(value)):
        raise _Refused(Reason.EMPTY_TEXT)
    return text


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
