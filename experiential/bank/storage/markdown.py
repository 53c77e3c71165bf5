"""Read and write entries as a Markdown page: a heading per task, a list item per entry.

The text that is seen is the text that is read back, exactly: what Markdown or an editor would lose
stands as ``&#N;``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from experiential.errors import BankError

NO_TASK = "(any task)"
_TITLE = (
    "# Experience bank\n\nEach list item is one entry; the heading above it is its task. Further"
    " lines of an entry are indented by two spaces. The\ncomment that ends an entry is for the"
    " program: leave it as it is, and write a new entry without one. Import a changed file"
    " with\n`edited=True`."
)
_HEADING = re.compile(r"##(?: (.*))?")
_ITEM = re.compile(r"[-*+](?: (.*))?")
_DATA = re.compile(r"\s*<!-- (\{.*\}) -->\s*")
_REFERENCE = re.compile(r"&(?:amp|#(\d{1,7}));")


class Row(NamedTuple):
    """Hold one entry as fields, and its line number."""

    line: int
    fields: dict[str, Any]


def dump(header: dict[str, Any], rows: Iterable[dict[str, Any]]) -> str:
    """Return a page of entries, grouped by task; the field ``n`` keeps their order."""
    sections: dict[str | None, list[str]] = {}
    for number, fields in enumerate(rows, start=1):
        sections.setdefault(fields.get("task"), []).append(_item({"n": number, **fields}))
    front = [f"{name}: {json.dumps(value)}" for name, value in header.items()]
    blocks = ["\n".join(["---", *front, "---"]), _TITLE]
    for task, items in sections.items():
        blocks += [_heading(task), *items]
    return "\n\n".join(blocks) + "\n"


def load(text: str, name: str) -> tuple[dict[str, Any], list[Row]]:
    """Return the front matter and the entries of a page, in their first order.

    Raises:
        BankError: a line belongs to nothing, or a comment is damaged; the message names the line.
    """
    lines = text.split("\n")
    header, start = _front_matter(lines, name)
    rows: list[Row] = []
    task: str | None = None
    number = start
    while number < len(lines):
        line = lines[number]
        if heading := _HEADING.fullmatch(line):
            task = None if heading[1] == NO_TASK else _unescape(heading[1] or "")
            number += 1
        elif _ITEM.fullmatch(line):
            end = _end_of_item(lines, number)
            rows.append(_row(lines[number:end], task, number + 1, name))
            number = end
        elif line.strip() and (rows or task is not None):
            raise BankError(
                "Expected a heading ('## task'), an entry ('- text') or a line indented by two"
                f" spaces in line {number + 1} of {name}, got {line[:80]!r}; nothing was imported"
            )
        else:
            number += 1
    return header, _in_order(rows, name)


def _heading(task: str | None) -> str:
    if task is None:
        return f"## {NO_TASK}"
    shown = _escape(task)
    return f"## {'&#40;' + shown[1:] if task == NO_TASK else shown}".rstrip(" ")


def _item(fields: dict[str, Any]) -> str:
    first, *rest = (_escape(line) for line in str(fields["text"]).split("\n"))
    data = json.dumps(
        {key: value for key, value in fields.items() if key not in ("text", "task")}
    ).replace(">", "\\u003e")
    lines = [
        f"- {first}".rstrip(" "),
        *(f"  {line}".rstrip(" ") for line in rest),
        f"  <!-- {data} -->",
    ]
    return "\n".join(lines)


def _escape(line: str) -> str:
    """Replace invisible characters, trailing blanks and comments by references."""
    line = re.sub(r"&(?=(?:amp|#\d{1,7});)", "&amp;", line).replace("<!--", "&#60;!--")
    line = "".join(one if one.isprintable() or one == "\t" else f"&#{ord(one)};" for one in line)
    return f"{line[:-1]}&#{ord(line[-1])};" if line.endswith((" ", "\t")) else line


def _unescape(line: str) -> str:
    return _REFERENCE.sub(lambda found: "&" if found[1] is None else _character(found), line)


def _character(found: re.Match[str]) -> str:
    code = int(found[1])
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else found[0]


def _front_matter(lines: Sequence[str], name: str) -> tuple[dict[str, Any], int]:
    """Return the fields between two lines of ``---`` at the top, and the index of the next line."""
    if lines[0].rstrip() != "---":
        return {}, 0
    end = next(
        (number for number, line in enumerate(lines[1:], start=1) if line.rstrip() == "---"), None
    )
    if end is None:
        raise BankError(
            f"Expected the front matter of {name} to end with a line of ---, got none; nothing was"
            " imported"
        )
    pairs = (line.partition(":") for line in lines[1:end] if line.strip())
    return {key.strip(): _value(value.strip()) for key, _, value in pairs}, end + 1


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _end_of_item(lines: Sequence[str], start: int) -> int:
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith(("  ", "\t"))):
        end += 1
    return end


def _row(lines: Sequence[str], task: str | None, number: int, name: str) -> Row:
    found = _ITEM.fullmatch(lines[0])
    assert found is not None  # that is how the item was found
    last = max(place for place, line in enumerate(lines) if line.strip())
    data = _DATA.fullmatch(lines[last]) if last else None
    body = lines[1:last] if data else lines[1 : last + 1]
    text = "\n".join(
        _unescape(line) for line in [found[1] or "", *(line.removeprefix("  ") for line in body)]
    )
    return Row(
        number,
        {
            **_machine_data(data, number + last, name),
            "text": text,
            **({} if task is None else {"task": task}),
        },
    )


def _machine_data(found: re.Match[str] | None, number: int, name: str) -> dict[str, Any]:
    if found is None:
        return {}
    try:
        return json.loads(found[1])
    except ValueError as error:
        raise BankError(
            f"Expected JSON in the comment in line {number} of {name}, got {found[1][:80]!r};"
            " nothing was imported"
        ) from error


def _in_order(rows: Iterable[Row], name: str) -> list[Row]:
    """Sort rows by their ``n``; one without, new in the file, stays behind its neighbour."""
    placed: list[tuple[int, Row]] = []
    place = 0
    for row in rows:
        place = row.fields.pop("n", place)
        if type(place) is not int:
            raise BankError(
                f"Expected n in the comment of line {row.line} of {name} to be a whole number, got"
                f" {place!r}"
            )
        placed.append((place, row))
    return [row for _, row in sorted(placed, key=lambda pair: pair[0])]
