"""Show rows of plain values as a table or as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

SHORT, LONGEST = 12, 40
"""In a narrow terminal, lines up to `SHORT`, as figures, and words up to `LONGEST` stay whole."""
_INTERVAL = re.compile(r"(\d(?: %)?) \[")
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal obeys instead of showing them, and those that cannot be written."""


def printable(text: object) -> str:
    r"""Return a text for a terminal: control characters are shown as escapes, not obeyed.

    >>> print(printable("\x1b]0;title\x07 and \x9b2J"))
    \x1b]0;title\x07 and \x9b2J
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], str(text))


def show_rows(
    rows: Sequence[Mapping[str, Any]], as_json: bool, short: Mapping[str, str] | None = None
) -> None:
    """Print rows, all with the same keys, as a table or as JSON.

    Values that are keys of ``short``, as ids are, stand in a table as what it has for them.
    """
    texts = short or {}
    if as_json:
        show_json(rows)
        return
    table = Table(box=None, header_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(name, overflow="fold")
    for row in rows:
        shown = (texts.get(str(value), str(value)) for value in row.values())
        table.add_row(*(Text(printable(one)) for one in shown))
    if rows:
        show_table(Console(), table)
    else:
        Console().print("nothing to show")


def show_table(console: Console, table: Table) -> None:
    """Print a table of texts so that no column vanishes and no figure is cut.

    Where it is wider than the console, intervals go under their means and texts are folded; where
    that is not enough, each row becomes lines of names and values.
    """
    wide = console.options.update(max_width=10_000)
    if Measurement.get(console, wide, table).maximum <= console.width:
        console.print(table)
        return
    columns = [
        [_INTERVAL.sub(r"\1\n[", str(cell)) for cell in (column.header, *column.cells)]
        for column in table.columns
    ]
    lines = [[line for cell in cells for line in cell.split("\n")] for cells in columns]
    whole = [max(map(len, column)) for column in lines]
    widths = [max(map(_least, column)) for column in lines]
    gaps = len(columns) - 1
    if sum(widths) + gaps > console.width:
        _show_records(console, table)
        return
    gap = 2 if sum(widths) + 2 * gaps <= console.width else 1
    room = console.width - gap * gaps
    by_need = sorted(range(len(columns)), key=lambda index: whole[index] - widths[index])
    for place, index in enumerate(by_need):
        share = (room - sum(widths)) // (len(columns) - place)
        widths[index] = min(whole[index], widths[index] + share)
    narrow = Table(
        title=table.title,
        title_justify=table.title_justify,
        caption=table.caption,
        box=None,
        header_style="bold",
        padding=(0, gap, 0, 0),
        pad_edge=False,
    )
    for column, cells, width in zip(table.columns, columns, widths, strict=True):
        narrow.add_column(Text(cells[0]), justify=column.justify, overflow="fold", width=width)
    for place, row in enumerate(table.rows, 1):
        narrow.add_row(*(Text(cells[place]) for cells in columns), style=row.style)
    console.print(narrow)


def _least(line: str) -> int:
    """Return the columns that a line needs: of its longest word, or of a short line as a whole."""
    return max(min(len(line), SHORT), *(min(len(word), LONGEST) for word in [*line.split(), ""]))


def _show_records(console: Console, table: Table) -> None:
    """Print the rows of a table as blocks of lines, each with a column's name and its value."""
    for line in filter(None, (table.title, table.caption)):
        console.print(line, markup=False, highlight=False)
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        block = Table.grid(padding=(0, 2, 0, 0))
        block.add_column(style="bold", overflow="fold")
        block.add_column(overflow="fold")
        for column, cell in zip(table.columns, cells, strict=True):
            if str(cell):
                block.add_row(Text(" ".join(str(column.header).split())), Text(str(cell)))
        console.print(block)
        console.print()


def show_pairs(pairs: Mapping[str, Any], column: str = "value") -> None:
    """Print names and values as a table with a row for each."""
    show_rows([{"what": name, column: value} for name, value in pairs.items()], False)


def show_json(value: Any) -> None:
    """Print a value, which may hold models, as indented JSON without raw control characters."""

    def plain(one: Any) -> Any:
        return one.model_dump(mode="json") if isinstance(one, BaseModel) else str(one)

    text = json.dumps(value, indent=2, default=plain, ensure_ascii=False)
    # JSON itself escapes those below 32; a terminal also obeys these.
    sys.stdout.write(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def show_line(console: Console, text: str) -> None:
    """Print a text as it is, without markup, colours or line breaks of its own."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
