"""Read function calls from text: Python, as BFCL asks for it, or JSON, as tool calls come."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from typing import Any, cast

LONGEST = 20_000
"""Characters of a reply beyond which it is not read."""
_FENCE = re.compile(r"\A```\w*\s*|\s*```\Z")
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """Hold one call; ``fault`` says why its arguments cannot be used, empty where they can."""

    name: str
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict[str, Any])
    fault: str = ""


def read_calls(reply: str) -> list[Call]:
    """Return the calls in a reply in order; an empty list is an answer to the user.

    Read are a list of Python calls or one call, as the whole reply, in its last line or between its
    outer brackets; JSON objects ``{"name": NAME, "arguments": {...}}``, one or a list; and such
    objects inside ``<tool_call>`` tags. Arguments in Python must be literals: nothing of a reply is
    ever evaluated.

    >>> [call.name for call in read_calls("[cd(folder='a'), ls(a=True)]")]
    ['cd', 'ls']
    >>> read_calls('{"name": "sort", "arguments": {"file_name": "b"}}')
    [Call(name='sort', positional=(), named={'file_name': 'b'}, fault='')]
    >>> read_calls("I have sorted the file (b).")
    []
    """
    text = _FENCE.sub("", reply.strip())
    if not text or len(text) > LONGEST:
        return []
    if tagged := _TAGGED.findall(text):
        return [call for one in tagged for call in _from_json(one)]
    inner = text[text.find("[") : text.rfind("]") + 1]
    for candidate in (text, text.splitlines()[-1], inner):
        if calls := _from_json(candidate) or _from_python(candidate):
            return calls
    return []


def _from_json(text: str) -> list[Call]:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls: list[Call] = []
    for one in cast("list[Any]", value if isinstance(value, list) else [value]):
        fields = cast("dict[str, Any]", one if isinstance(one, dict) else {})
        name, given = fields.get("name"), fields.get("arguments", fields.get("parameters", {}))
        if not isinstance(name, str):
            return []
        if isinstance(given, dict):
            calls.append(Call(name, named=cast("dict[str, Any]", given)))
        else:
            calls.append(Call(name, fault="expected the arguments as a JSON object"))
    return calls


def _from_python(text: str) -> list[Call]:
    try:
        body = ast.parse(text.strip(), mode="eval").body
        nodes = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
        return [_call(node) for node in nodes if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # those of ast.parse
        return []


def _call(node: ast.Call) -> Call:
    name = ast.unparse(node.func)
    try:
        positional = tuple(ast.literal_eval(one) for one in node.args)
        named = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords if one.arg}
        if len(named) == len(node.keywords):
            return Call(name, positional, named)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    return Call(name, fault="expected literals as arguments")
