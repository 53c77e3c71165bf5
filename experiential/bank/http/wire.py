"""Derive the HTTP operations of a bank server from the signatures of the bank's methods.

An operation is ``POST /v1/NAME?namespace=...``. Its JSON body holds the arguments of one method by
name, its answer is the method's result. A write may carry an ``Idempotency-Key``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    create_model,
)

from experiential.bank.protocol import Bank, Queue
from experiential.bank.records import Duplicates
from experiential.errors import BankError, BankLockedError, ReadOnlyBankError
from experiential.types import Distillation, Experience, Hit, Statistics, Trajectory

PREFIX = "/v1/"
KEY_HEADER = "Idempotency-Key"
LONGEST_PAGE = 1000
"""Greatest number of entries in one page of a listing."""
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (BankError, BankLockedError, ReadOnlyBankError, ValueError, TypeError, TimeoutError)
}
"""Errors that a client raises as the server named them; any other is a ``BankError`` there."""


class Body(BaseModel):
    """Base of everything on the wire: immutable; unknown fields and other types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class At(Body):
    """Name a view: the bank after ``commit``, with the counters known at commit ``seen``."""

    commit: int
    seen: int


class Info(Body):
    """Describe a bank; ``redacted`` counts secrets since the server opened it, by kind."""

    entries: int
    head: int
    embedder: str
    redacted: dict[str, int]
    text_limit: int


class Page(Body):
    """Hold a part of a listing and the cursor of the next; all pages show one moment."""

    entries: list[Experience]
    cursor: str | None


class Near(Hit):
    """Hold an entry near a query, and the share of the query's words that it has."""

    words: float = 0.0


class Version(Body):
    """Name one version of one entry."""

    id: str
    version: int


class Written(Body):
    """Hold the entries written from a distillation, and its refused operations by reason."""

    entries: list[Experience]
    refused: dict[str, int]


class Service(Protocol):
    """Declare the operations that differ from the bank's method of the same name.

    ``at`` reads an earlier state; None reads the present one.
    """

    def info(self, *, at: At | None = None) -> Info:
        """Describe the bank."""
        ...

    def at(self, commit: int) -> At:
        """Return the value of ``at`` that reads the bank as it stood after a commit."""
        ...

    def get(self, id: str, *, at: At | None = None) -> Experience | None:
        """Return one entry, or null."""
        ...

    def read(self, id: str) -> Statistics:
        """Return the counters of one entry."""
        ...

    def entries(
        self,
        *,
        cursor: str | None = None,
        limit: Annotated[int, Field(ge=1, le=LONGEST_PAGE)] = LONGEST_PAGE,
        at: At | None = None,
    ) -> Page:
        """Return a page of the entries, oldest first; ``cursor`` continues a listing."""
        ...

    def search(
        self,
        queries: list[str],
        *,
        k: int = 1,
        hybrid: float = 0.0,
        exclude_instance: str | None = None,
        where: dict[str, Any] | None = None,
        at: At | None = None,
    ) -> list[list[Hit]]:
        """Return the hits of each query."""
        ...

    def nearest(
        self,
        queries: list[str],
        n: int,
        exclude: list[str | None],
        where: list[dict[str, Any] | None] = [],  # noqa: B006  (only its value is read)
        words: bool = False,
        *,
        at: At | None = None,
    ) -> list[list[Near]]:
        """Return the nearest entries of each query with their counters."""
        ...

    def embed(self, texts: list[str]) -> list[list[float]]:
        """Return the vector of each text."""
        ...

    def apply(
        self,
        distillation: Distillation,
        spans: list[list[int] | None],
        *,
        trajectory: Trajectory,
        shown: list[Experience],
        item: str | None = None,
        extractor_version: int | None = None,
    ) -> Written:
        """Write the operations distilled from a trajectory; ``spans`` are theirs, in order."""
        ...

    def consolidate(
        self,
        distillation: Distillation,
        spans: list[list[int] | None],
        *,
        shown: list[Experience],
        extractor_version: int | None = None,
    ) -> Written:
        """Write the operations of a merge; ``spans`` are theirs, in order."""
        ...

    def deduplicate(
        self,
        threshold: float = 0.95,
        *,
        across_tasks: bool = False,
        among: Iterable[str] | None = None,
        dry_run: bool = False,
    ) -> list[Duplicates]:
        """Merge near-duplicates."""
        ...

    def merge_duplicates(
        self, groups: list[list[Version]], ref: str, *, author: str = "human"
    ) -> list[Duplicates]:
        """Merge groups found by a client: in each the survivor first, then the others."""
        ...

    def trusted_versions(self, after: int) -> list[tuple[str, int]]:
        """Return every trusted entry version, live or not."""
        ...

    def trust_after(self) -> int:
        """Return on how many tasks an entry must have helped; 0 trusts all."""
        ...

    def set_trust_after(self, after: int) -> None:
        """Record on how many tasks an entry must have helped."""
        ...


class Operation:
    """Describe one operation, derived from a method.

    Attributes:
        name: in the address.
        path: the method of a `ServedBank` that carries it out, such as "bank.queue.state".
        writes: whether it may change the bank.
        body: model of the request: the method's parameters with their defaults.
        result: type of the answer.
    """

    def __init__(self, name: str, path: str, method: Callable[..., Any], writes: bool) -> None:
        hints = get_type_hints(method, include_extras=True)
        fields: dict[str, Any] = {
            one.name: (
                _json_type(hints[one.name]),
                ... if one.default is one.empty else one.default,
            )
            for one in inspect.signature(method).parameters.values()
            if one.name != "self"
        }
        self.name = name
        self.path = path
        self.writes = writes
        self.summary = (inspect.getdoc(method) or "").split("\n")[0]
        self.type: Any = hints["return"]
        self.result: TypeAdapter[Any] = TypeAdapter(self.type)
        self.body: type[Body] = create_model(
            "".join(map(str.capitalize, name.split("_"))), __base__=Body, **fields
        )


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
    return dict(value) if isinstance(value, Mapping) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


_READS = (
    "version commits history diff generation trajectory outcomes lineage uplift why standing"
    " trusted"
)
_WRITES = (
    "add add_many update remove rollback record submit keep_generation note_retrievals"
    " save_counters prune evict"
)
_QUEUE_WRITES = ("fail", "requeue")
_SERVICE_WRITES = ("apply", "consolidate", "deduplicate", "merge_duplicates", "set_trust_after")


def _public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        *(
            Operation(name, name, getattr(Service, name), name in _SERVICE_WRITES)
            for name in _public(Service)
        ),
        *(Operation(name, f"bank.{name}", getattr(Bank, name), False) for name in _READS.split()),
        *(Operation(name, f"bank.{name}", getattr(Bank, name), True) for name in _WRITES.split()),
        Operation("import", "bank.import_entries", Bank.import_entries, True),
        *(
            Operation(
                f"queue_{name}", f"bank.queue.{name}", getattr(Queue, name), name in _QUEUE_WRITES
            )
            for name in _public(Queue)
        ),
    )
}
"""All operations, by name."""
