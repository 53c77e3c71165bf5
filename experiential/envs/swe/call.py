"""Read tool calls from text, leniently."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, cast

LONGEST = 100_000  # most characters of an action
TOOLS = ("execute_bash", "str_replace_editor", "submit")
_OPEN = re.compile(r"<function=\s*([\w-]+)\s*>", re.IGNORECASE)
_SHUT = re.compile(r"\s*</function>", re.IGNORECASE)
_PARAMETER = re.compile(r"\s*<parameter=\s*([\w-]+)\s*>", re.IGNORECASE)
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|\Z))", re.IGNORECASE)
_OUTER_BREAKS = re.compile(r"\A\r?\n|\r?\n\Z")
_OBJECT = re.compile(r'\{\s*"(?:name|tool|arguments|parameters)"\s*:')
_TRIES = 8


class Call(NamedTuple):
    """Hold a call of a tool with its unchecked parameters."""

    tool: str
    parameters: dict[str, Any]

    def text(self, name: str) -> str | None:
        """Return the parameter as text (numbers and lists in JSON), or None if it is missing."""
        value = self.parameters.get(name)
        return value if isinstance(value, str) or value is None else json.dumps(value)


def read_call(action: str) -> Call | None:
    r"""Return the last call in ``action``, or None.

    A call is ``<function=NAME><parameter=KEY>VALUE</parameter>...</function>``, and values stand as
    they are, nothing is escaped; one line break after the opening and one before the closing tag of
    a value do not count. Tags that are left open at the end are taken as closed. Without such a
    call a JSON object ``{"name": NAME, "arguments": {KEY: VALUE}}`` is read, wherever it stands.

    >>> read_call("Look. <function=execute_bash>\n<parameter=command>ls</parameter>\n</function>")
    Call(tool='execute_bash', parameters={'command': 'ls'})
    >>> read_call('{"name": "submit", "arguments": {}}')
    Call(tool='submit', parameters={})
    """
    if len(action) > LONGEST:
        return None
    last, place = None, 0
    while opening := _OPEN.search(action, place):
        parameters: dict[str, Any] = {}
        place = opening.end()
        while parameter := _PARAMETER.match(action, place):
            start = parameter.end()
            if ending := _VALUE_END.search(action, start):
                stop, place = ending.span()
            else:  # left open: up to the end of the function, or of the text
                stop = action.find("</function>", start)
                stop = place = stop if stop >= 0 else len(action)
            parameters[parameter[1].lower()] = _OUTER_BREAKS.sub("", action[start:stop])
            if ending is None:
                break
        closed = _SHUT.match(action, place)
        if parameters or closed or not action[place:].strip():
            last = Call(opening[1].lower(), parameters)
    if last is not None:
        return last
    decoder = json.JSONDecoder(strict=False)
    for start in reversed([match.start() for match in _OBJECT.finditer(action)][-_TRIES:]):
        try:
            value: dict[str, Any] = decoder.raw_decode(action, start)[0]
        except (ValueError, RecursionError):
            continue
        tool = value.get("name", value.get("tool"))
        given = value.get("arguments", value.get("parameters", {}))
        if isinstance(tool, str) and isinstance(given, dict):
            known = cast("dict[str, Any]", given)
            return Call(tool.lower(), {key.lower(): entry for key, entry in known.items()})
    return None
