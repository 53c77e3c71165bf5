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
_CONTINUED = re.compile(r"  |\t|\s*$")
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
        first, *rest = (_escape(line) for line in str(fields["text"]).split("\n"))
        known = {key: value for key, value in fields.items() if key not in ("text", "task")}
        data = json.dumps({"n": number, **known}).replace(">", "\\u003e")
        lines = [f"- {first}".rstrip(" "), *(f"  {line}".rstrip(" ") for line in rest)]
        item = "\n".join([*lines, f"  <!-- {data} -->"])
        sections.setdefault(fields.get("task"), []).append(item)
    front = [f"{name}: {json.dumps(value)}" for name, value in header.items()]
    blocks = ["\n".join(["---", *front, "---"]), _TITLE]
    for task, items in sections.items():
        heading = NO_TASK if task is None else _escape(task)
        if task == NO_TASK:  # a task of this very name
            heading = f"&#40;{heading[1:]}"
        blocks += [f"## {heading}".rstrip(" "), *items]
    return "\n\n".join(blocks) + "\n"


def load(text: str, name: str) -> tuple[dict[str, Any], list[Row]]:
    """Return the front matter and the entries of a page, in their first order.

    Raises:
        BankError: a line belongs to nothing, or a comment is damaged; the message names the line.
    """
    lines = text.split("\n")
    header, number = _front_matter(lines, name)
    placed: list[tuple[int, Row]] = []
    task: str | None = None
    place = 0
    while number < len(lines):
        line = lines[number]
        start, number = number, number + 1
        if heading := _HEADING.fullmatch(line):
            task = None if heading[1] == NO_TASK else _unescape(heading[1] or "")
        elif _ITEM.fullmatch(line):
            while number < len(lines) and _CONTINUED.match(lines[number]):
                number += 1
            row = _row(lines[start:number], task, start + 1, name)
            # A row without n, new in the file, stays behind its neighbour.
            place = row.fields.pop("n", place)
            if type(place) is not int:
                raise BankError(
                    f"Expected n in the comment of line {row.line} of {name} to be a whole number,"
                    f" got {place!r}"
                )
            placed.append((place, row))
        elif line.strip() and (placed or task is not None):
            raise BankError(
                "Expected a heading ('## task'), an entry ('- text') or a line indented by two"
                f" spaces in line {number} of {name}, got {line[:80]!r}; nothing was imported"
            )
    return header, [row for _, row in sorted(placed, key=lambda pair: pair[0])]


def _escape(line: str) -> str:
    """Replace invisible characters, trailing blanks and comments by references."""
    line = re.sub(r"&(?=(?:amp|#\d{1,7});)", "&amp;", line).replace("<!--", "&#60;!--")
    line = "".join(one if one.isprintable() or one == "\t" else f"&#{ord(one)};" for one in line)
    return f"{line[:-1]}&#{ord(line[-1])};" if line.endswith((" ", "\t")) else line


def _unescape(line: str) -> str:
    def character(found: re.Match[str]) -> str:
        code = int(found[1] or ord("&"))
        return chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else found[0]

    return _REFERENCE.sub(character, line)


def _front_matter(lines: Sequence[str], name: str) -> tuple[dict[str, Any], int]:
    """Return the fields between two lines of ``---`` at the top, and the index of the next line."""
    if lines[0].rstrip() != "---":
        return {}, 0
    header: dict[str, Any] = {}
    for number, line in enumerate(lines[1:], start=1):
        if line.rstrip() == "---":
            return header, number + 1
        if line.strip():
            key, value = (part.strip() for part in line.partition(":")[::2])
            try:
                header[key] = json.loads(value)
            except ValueError:
                header[key] = value
    raise BankError(
        f"Expected the front matter of {name} to end with a line of ---, got none; nothing was"
        " imported"
    )


def _row(lines: Sequence[str], task: str | None, number: int, name: str) -> Row:
    """Return the entry of a list item whose first line has this number."""
    last = max(place for place, line in enumerate(lines) if line.strip())
    data = _DATA.fullmatch(lines[last]) if last else None
    body = lines[1:last] if data else lines[1 : last + 1]
    text = [lines[0][2:], *(line.removeprefix("  ") for line in body)]
    fields: dict[str, Any] = {}
    if data is not None:
        try:
            fields = json.loads(data[1])
        except ValueError as error:
            raise BankError(
                f"Expected JSON in the comment in line {number + last} of {name}, got"
                f" {data[1][:80]!r}; nothing was imported"
            ) from error
    fields["text"] = "\n".join(_unescape(line) for line in text)
    if task is not None:
        fields["task"] = task
    return Row(number, fields)
