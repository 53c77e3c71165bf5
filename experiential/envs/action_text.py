"""The action that a reply asks for, where the actions have names."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TAGGED = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"```(.*?)```", re.DOTALL)
_EDGES = " \t\r\n.,;:!?\"'`*"


def parse_action(text: str, names: Iterable[str]) -> str | None:
    """The member of ``names`` that ``text`` asks for, or None.

    Read in this order: the last ``<action>…</action>``, the last triple-backtick block, the whole text. Case, blanks and
    punctuation at either end do not count.

    >>> parse_action("Hm. <action>Down</action> no, <action> up. </action>", ["Up", "Down"])
    'Up'
    >>> parse_action("maybe up", ["Up", "Down"]) is None
    True
    """
    found = _TAGGED.findall(text) or _FENCED.findall(text) or [text]
    word = found[-1].strip(_EDGES).casefold()
    return next((name for name in names if name.casefold() == word), None)
