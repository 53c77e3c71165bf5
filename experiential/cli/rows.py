"""Show rows of plain values as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_rows(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print rows, all with the same keys, as a table or as JSON."""
    if as_json:
        show_json(rows)
        return
    table = Table(box=None, header_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    Console().print(table if rows else "nothing to show")


def show_pairs(pairs: Mapping[str, Any], column: str = "value") -> None:
    """Print names and values as a table with a row for each."""
    show_rows([{"what": name, column: value} for name, value in pairs.items()], False)


def show_json(value: Any) -> None:
    """Print a value, which may hold models, as indented JSON."""

    def plain(one: Any) -> Any:
        return one.model_dump(mode="json") if isinstance(one, BaseModel) else str(one)

    sys.stdout.write(json.dumps(value, indent=2, default=plain, ensure_ascii=False) + "\n")


def show_line(console: Console, text: str) -> None:
    """Print a text as it is, without markup, colours or line breaks of its own."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
