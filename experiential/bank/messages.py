"""Read OpenAI chat messages: what was said, which tools were called, which call is answered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from experiential.types import ToolCall


def json_fields(value: object) -> Mapping[str, Any]:
    """Return a mapping, or the JSON object from the first to the last brace of a text; else {}."""
    if isinstance(value, str):
        try:
            value = json.loads(value[value.find("{") : value.rfind("}") + 1])
        except (ValueError, RecursionError):  # the latter for what is nested without end
            return {}
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


class ChatMessage(NamedTuple):
    """Hold what a chat message says: its text, the tools it calls, the call that it answers."""

    is_action: bool
    text: str
    calls: Sequence[ToolCall] = ()
    answers: str = ""


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_message(message: Any) -> ChatMessage:
    """Read an OpenAI chat message, a dict or an object with ``model_dump``.

    >>> read_message({"role": "user", "content": [{"type": "text", "text": "Look!"}]}).text
    'Look!'

    Raises:
        TypeError, ValueError: it is no chat message.
    """
    said = _fields(message, "a chat message", "give {'role': ..., 'content': ...}")
    role = said.get("role")
    if role not in _ROLES:
        raise ValueError(
            f"Expected a message with a role of {', '.join(_ROLES)}, got role={role!r}; convert"
            " other forms to OpenAI's"
        )
    texts: list[str] = []
    content = said.get("content")
    for part in [content] if isinstance(content, str) else _listed(content, "the content"):
        if isinstance(part, str):
            texts.append(part)
        else:
            held = _fields(part, "a part of a message", "give {'type': 'text', 'text': ...}")
            texts.append(str(held.get("text") or held.get("refusal") or f"[{held.get('type')}]"))
    if role != "assistant":
        answers = said.get("tool_call_id") or said.get("name") if role in _ROLES[-2:] else ""
        return ChatMessage(False, "\n".join(texts), (), str(answers or ""))
    texts += [str(said["refusal"])] if said.get("refusal") and not texts else []
    calls: list[ToolCall] = []
    for one in _listed(said.get("tool_calls"), "the tool calls"):
        call = _fields(one, "a tool call", "give it as the OpenAI API does")
        form = _fields(call.get("function") or call.get("custom"), "its function", "name it")
        calls.append(_call(str(call.get("id") or ""), form))
    if old := said.get("function_call"):  # the form before tools
        old = _fields(old, "a function call", "give it as the OpenAI API does")
        calls.append(_call(str(old.get("name")), old))
    return ChatMessage(True, "\n".join(texts), calls)


def _call(id: str, form: Mapping[str, Any]) -> ToolCall:
    given = form.get("arguments", form.get("input"))
    arguments = given if isinstance(given, str) else json.dumps(given, default=str)
    return ToolCall(id=id, name=str(form.get("name")), arguments=arguments)


def _listed(value: object, name: str) -> Sequence[Any]:
    """Return a list, or nothing for None; TypeError for anything else."""
    if value is not None and not isinstance(value, list | tuple):
        raise TypeError(
            f"Expected {name} of a message as a list, got {type(value).__name__}; convert other"
            " forms to OpenAI's"
        )
    return cast("Sequence[Any]", value or ())


def _fields(value: object, name: str, advice: str) -> Mapping[str, Any]:
    """Return a dict, or the fields of an SDK's object; TypeError for anything else."""
    dump = getattr(value, "model_dump", None)
    said: object = dump() if callable(dump) else value
    if not isinstance(said, Mapping):
        raise TypeError(
            f"Expected {name} as a dict or an object with model_dump(), got"
            f" {type(value).__name__}; {advice}"
        )
    return cast("Mapping[str, Any]", said)
