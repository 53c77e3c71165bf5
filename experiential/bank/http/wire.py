"""Derive the HTTP operations of a bank server from the signatures of the bank's methods.

An operation is ``POST /v1/NAME?namespace=...``. Its JSON body holds the arguments of one method by
name, its answer is the method's result. A write may carry an ``Idempotency-Key``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

from pydantic import (
    BeforeValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
)

from experiential.bank.http.served import Body, ServedBank
from experiential.bank.protocol import Bank, Queue
from experiential.errors import BankError, BankLockedError, ReadOnlyBankError

PREFIX = "/v1/"
BACKUP = f"{PREFIX}backup"
"""Answers a GET with the whole journal."""
KEY_HEADER = "Idempotency-Key"
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (BankError, BankLockedError, ReadOnlyBankError, ValueError, TypeError, TimeoutError)
}
"""Errors that a client raises as the server named them; any other is a ``BankError`` there."""


class Operation:
    """Describe one operation, derived from a method.

    Attributes:
        name: in the address.
        path: the method of a `ServedBank` that carries it out, such as "bank.queue.state".
        writes: whether it may change the bank.
        body: model of the request: the method's parameters with their defaults.
        result: type of the answer.
    """

    def __init__(self, path: str, method: Callable[..., Any], writes: bool) -> None:
        hints = get_type_hints(method, include_extras=True)
        fields: dict[str, Any] = {}
        for one in inspect.signature(method).parameters.values():
            if one.name not in ("self", "key"):  # the key is a header
                default = ... if one.default is one.empty else one.default
                fields[one.name] = (_json_type(hints[one.name]), default)
        name = path.removeprefix("bank.").removesuffix("_entries").replace(".", "_")
        model = name.title().replace("_", "")
        self.name = name
        self.path = path
        self.writes = writes
        self.summary = (inspect.getdoc(method) or "").split("\n")[0]
        self.type: Any = hints["return"]
        self.result: TypeAdapter[Any] = TypeAdapter(self.type)
        self.body: type[Body] = create_model(model, __base__=Body, **fields)

    def request(self, values: Mapping[str, Any]) -> Body:
        """Return the request with these arguments; ValueError names one that does not fit."""
        try:
            return self.body(**values)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "value_error":  # raised by a validator of ours, in full words
                raise ValueError(str(first.get("ctx", {}).get("error"))) from error
            field = ".".join(str(part) for part in first["loc"])
            raise ValueError(
                f"Expected {field} of {self.name!r} to be right, got {first['input']!r}:"
                f" {first['msg']}"
            ) from error


def _json_type(hint: Any) -> Any:
    """Return the type with abstract containers replaced by lists and dicts, as JSON has them."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return Union[tuple(_json_type(one) for one in arguments)]  # noqa: UP007  (made at run time)
    if origin in (Iterable, Sequence):
        return Annotated[list[arguments[0]], BeforeValidator(_listed)]
    if origin is Mapping:
        return Annotated[dict[arguments[0], arguments[1]], BeforeValidator(_as_dict)]
    return hint


def _listed(value: object, info: ValidationInfo) -> object:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(
            f"Expected {info.field_name} to be a list of {info.field_name}, got {value!r}"
        )
    return list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _as_dict(value: object) -> object:
    return dict(cast("Mapping[Any, Any]", value)) if isinstance(value, Mapping) else value


_SERVED_READS = "info at get read entries search nearest embed"
_SERVED_WRITES = "apply consolidate deduplicate merge_duplicates"
_READS = "version commits history diff generation trajectory outcomes lineage uplift why standings"
_WRITES = (
    "add add_many update approve remove rollback record submit conclude keep_generation"
    " note_retrievals save_counters prune evict import_entries"
)
_METHODS = (  # class, its object in a `ServedBank`, names, whether they write
    (ServedBank, "", _SERVED_READS, False),
    (ServedBank, "", _SERVED_WRITES, True),
    (Bank, "bank.", _READS, False),
    (Bank, "bank.", _WRITES, True),
    (Queue, "bank.queue.", "state waiting counts attempts dead_letters", False),
    (Queue, "bank.queue.", "fail requeue lease release", True),
)
OPERATIONS = {
    operation.name: operation
    for owner, path, names, writes in _METHODS
    for name in names.split()
    for operation in (Operation(path + name, getattr(owner, name), writes),)
}
"""All operations, by name."""
