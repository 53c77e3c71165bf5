"""Read the named action that a reply asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TAG = re.compile(r"<(/?)action>", re.IGNORECASE)
_FENCED = re.compile(r"```(.*?)```", re.DOTALL)
_EDGES = " \t\r\n.,;:!?\"'`*"


def tagged_action(text: str) -> str | None:
    """Return the content of the last ``<action>…</action>`` in any case, or None."""
    start, found = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            start, found = None, text[start : tag.start()]
    return found


def parse_action(text: str, names: Iterable[str]) -> str | None:
    """Return the member of ``names`` that ``text`` asks for, or None.

    Read in this order: the last ``<action>…</action>``, the last triple-backtick block, the whole
    text. Case, blanks and punctuation at either end do not count.

    >>> parse_action("Hm. <action>Down</action> no, <action> up. </action>", ["Up", "Down"])
    'Up'
    >>> parse_action("maybe up", ["Up", "Down"]) is None
    True
    """
    tagged = tagged_action(text)
    said = tagged if tagged is not None else (_FENCED.findall(text) or [text])[-1]
    word = said.strip(_EDGES).casefold()
    return next((name for name in names if name.casefold() == word), None)
