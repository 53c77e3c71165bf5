"""The bank over HTTP: one process writes a folder, any number of clients read and write through it."""

from __future__ import annotations

import contextlib
import hmac
import inspect
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from experiential.bank.folder import FolderBank
from experiential.bank.http import wire
from experiential.bank.http.shelf import ServedBank, Shelf
from experiential.bank.http.wire import Body, Operation
from experiential.bank.index.embed import Embedder
from experiential.bank.records import Commit, Duplicates
from experiential.bank.search.where import Where
from experiential.errors import (
    BankError,
    BankLockedError,
    ExperientialError,
    MissingExtraError,
    ReadOnlyBankError,
)
from experiential.types import Distillation, Experience, Hit, Statistics

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

MAX_BODY = 8 * 2**20
"""Bytes of a request body, at most, unless the server is told otherwise."""
LONGEST_KEY = 200
_BODY = "experiential.body"
_STATUS = {ReadOnlyBankError: 403, BankLockedError: 423, ExperientialError: 409, TimeoutError: 503}

B = TypeVar("B", bound=Body)
R = TypeVar("R")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Do = Callable[[ServedBank, Any], Any]
Again = Callable[[ServedBank, Any, int], Any]


def create_app(
    source: str | os.PathLike[str] | FolderBank | Sequence[FolderBank] | Shelf,
    token: str | None = None,
    *,
    namespaces: Sequence[str] = (),
    embedder: Embedder | str | None = None,
    max_body: int = MAX_BODY,
) -> FastAPI:
    """The application that serves a bank folder, or banks that are open already.

    A folder's writer lock is taken here, and given back when the application shuts down or
    ``app.state.shelf.close()`` is called. Banks that were open before stay open.

    Args:
        source: a folder (made on first use), or open banks of different namespaces.
        token: what every request must carry as ``Authorization: Bearer ...``; None asks for
            nothing.
        namespaces: those that are served; none named serves all of the folder, opened when first
            asked for.
        embedder: for namespaces that were never written; the others keep theirs.
        max_body: bytes of a request body, at most.

    Raises:
        MissingExtraError: FastAPI is not installed.
        BankLockedError: another process writes the folder.
    """
    try:
        from fastapi import FastAPI
    except ImportError:
        raise MissingExtraError("fastapi", "serve") from None
    if token is not None and not token.strip():
        raise ValueError("Expected token to be non-empty text or None, got blank text")
    shelf = (
        source
        if isinstance(source, Shelf)
        else Shelf(source, namespaces=namespaces, embedder=embedder)
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        yield
        shelf.close()

    app = FastAPI(title="experiential bank", lifespan=lifespan)
    app.state.shelf = shelf
    app.add_middleware(Door, token=token, max_body=max_body)
    _answer_errors(app)
    _add_health(app, shelf)
    for operation in wire.OPERATIONS:
        _add_route(
            app, shelf, operation, _OWN.get(operation) or _method(operation), _AGAIN.get(operation)
        )
    return app


class Door:
    """Lets a request in when it carries the token and its body is not too long; counts the bytes that really come."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        token: str | None,
        max_body: int,
    ) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(cast("list[tuple[bytes, bytes]]", scope["headers"]))
        if self._expected is not None and not hmac.compare_digest(
            headers.get(b"authorization", b""), self._expected
        ):
            await _refuse(
                send,
                401,
                "Expected the token of this bank server as 'Authorization: Bearer TOKEN', got none"
                " or another",
            )
            return
        body = await self._body(headers, receive)
        if body is None:
            await _refuse(
                send,
                413,
                f"Expected a request of at most {self._max_body} bytes, got more; send fewer or"
                " shorter texts at once",
            )
            return
        await self._app({**scope, _BODY: body}, _once(body, receive), send)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
            return None
        body, more = bytearray(), True
        while more:
            event = await receive()
            body += event.get("body", b"")
            more = bool(event.get("more_body", False))
            if len(body) > self._max_body:
                return None
        return bytes(body)


def _once(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the whole body first, then what comes after it."""
    waiting = [body]

    async def give() -> MutableMapping[str, Any]:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return give


async def _refuse(send: Send, status: int, message: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": _error_body("BankError", message)})


def _error_body(kind: str, message: str) -> bytes:
    return json.dumps({"error": {"type": kind, "message": message}}).encode()


def _answer_errors(app: FastAPI) -> None:
    from fastapi import Response
    from fastapi.exceptions import RequestValidationError

    async def answer(request: Request, error: Exception) -> Response:
        kind, status = _kind_of(error)
        return Response(_error_body(kind, str(error)), status, media_type="application/json")

    async def answer_invalid(request: Request, error: Exception) -> Response:
        first = cast("RequestValidationError", error).errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = f"Expected a request as described at /docs, got {name}: {first['msg']}"
        return Response(_error_body("ValueError", message), 422, media_type="application/json")

    async def answer_bug(request: Request, error: Exception) -> Response:
        message = (
            f"Expected an answer of the bank server, but it failed with {type(error).__name__}:"
            f" {error}; see its log"
        )
        return Response(_error_body("BankError", message), 500, media_type="application/json")

    for expected in (ExperientialError, ValueError, TimeoutError):
        app.add_exception_handler(expected, answer)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(Exception, answer_bug)


def _kind_of(error: Exception) -> tuple[str, int]:
    kind = type(error).__name__
    if kind not in wire.ERRORS:
        kind = "BankError" if isinstance(error, ExperientialError) else "ValueError"
    return kind, next((status for base, status in _STATUS.items() if isinstance(error, base)), 422)


def _add_health(app: FastAPI, shelf: Shelf) -> None:
    def health() -> dict[str, Any]:
        """Whether the server runs, and what it serves."""
        return {"status": "ok", "namespaces": shelf.namespaces()}

    health.__annotations__ = {"return": dict[str, Any]}
    app.add_api_route(f"{wire.PREFIX}health", health, methods=["GET"])


def _add_route(
    app: FastAPI, shelf: Shelf, operation: Operation[Any, Any], do: Do, again: Again | None
) -> None:
    from fastapi import Header, Query, Request, Response

    def endpoint(
        request: Request, body: Body, namespace: str, idempotency_key: str | None
    ) -> Response:
        served = shelf.get(namespace)
        if operation is wire.NOTE_RETRIEVALS:
            result = served.count(idempotency_key, cast("wire.Retrieved", body).ids)
        elif idempotency_key is None or again is None:
            result = do(served, body)
        else:
            asked = operation.name.encode() + b" " + request.scope[_BODY]
            result = served.once(
                idempotency_key, asked, partial(do, served, body), partial(again, served, body)
            )
        return Response(operation.result.dump_json(result), media_type="application/json")

    fields = {
        "request": (Request, inspect.Parameter.empty),
        "body": (operation.body, inspect.Parameter.empty),
        "namespace": (Annotated[str, Query(min_length=1)], "default"),
        "idempotency_key": (
            Annotated[str | None, Header(min_length=1, max_length=LONGEST_KEY)],
            None,
        ),
    }
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind, default=default
        )
        for name, (kind, default) in fields.items()
    ]
    endpoint.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]  (real types, whatever the body's)
    app.add_api_route(
        wire.PREFIX + operation.name,
        endpoint,
        methods=["POST"],
        name=operation.name,
        summary=operation.about,
        response_model=operation.type,
    )


# What the operations do that are not one method of a bank, and what a keyed write gave when it made
# a certain commit. A write that the second table lacks is harmless when repeated.

_OWN: dict[Operation[Any, Any], Do] = {}
_AGAIN: dict[Operation[Any, Any], Again] = {
    wire.ADD: lambda served, body, commit: served.written(commit)[0],
    wire.ADD_MANY: lambda served, body, commit: served.written(commit),
    wire.UPDATE: lambda served, body, commit: served.written(commit)[0],
    wire.REMOVE: lambda served, body, commit: None,
    wire.ROLLBACK: lambda served, body, commit: _commit(served.bank, commit),
    wire.IMPORT: lambda served, body, commit: len(served.written(commit)),
    wire.RECORD: lambda served, body, commit: True,
    wire.SUBMIT: lambda served, body, commit: True,
    wire.APPLY: lambda served, body, commit: wire.Written(
        entries=served.written(commit), refused={}
    ),
    wire.CONSOLIDATE: lambda served, body, commit: wire.Written(
        entries=served.written(commit), refused={}
    ),
    wire.QUEUE_FAIL: lambda served, body, commit: served.bank.queue.attempts(body.id),
    wire.QUEUE_REQUEUE: lambda served, body, commit: True,
    wire.PRUNE: lambda served, body, commit: served.removed(commit),
    wire.EVICT: lambda served, body, commit: served.removed(commit),
    wire.DEDUPLICATE: lambda served, body, commit: served.merged(commit),
    wire.MERGE_DUPLICATES: lambda served, body, commit: served.merged(commit),
}


def _serves(
    operation: Operation[B, R],
) -> Callable[[Callable[[ServedBank, B], R]], Callable[[ServedBank, B], R]]:
    def register(do: Callable[[ServedBank, B], R]) -> Callable[[ServedBank, B], R]:
        _OWN[operation] = do
        return do

    return register


def _method(operation: Operation[Any, Any]) -> Do:
    """Calls the method that an operation names with the fields of its body; of an earlier state when it may be asked of one."""
    find = attrgetter(operation.method)

    def do(served: ServedBank, body: Body) -> Any:
        values = {name: getattr(body, name) for name in type(body).model_fields}
        source = served.reader(values.pop("at")) if isinstance(body, wire.Reading) else served.bank
        return find(source)(**values)

    return do


@_serves(wire.INFO)
def _info(served: ServedBank, body: wire.Reading) -> wire.Info:
    head = served.bank.head if body.at is None else body.at.commit
    bank = served.bank
    return wire.Info(
        entries=len(served.reader(body.at)),
        head=head,
        embedder=bank.embedder.id,
        redacted=dict(bank.redacted),
        text_limit=bank.text_limit,
    )


@_serves(wire.AT)
def _at(served: ServedBank, body: wire.Committed) -> wire.At:
    at = wire.At(commit=body.commit, seen=served.bank.head)
    served.reader(at)
    return at


@_serves(wire.READ)
def _read(served: ServedBank, body: wire.Identified) -> Statistics:
    return served.bank.read(Experience(id=body.id, text="-")).statistics


@_serves(wire.ENTRIES)
def _entries(served: ServedBank, body: wire.Paged) -> wire.Page:
    return served.page(body.at, body.cursor, body.limit)


@_serves(wire.EMBED)
def _embed(served: ServedBank, body: wire.Texts) -> list[list[float]]:
    return served.bank.embedder(body.texts).tolist() if body.texts else []


@_serves(wire.SEARCH)
def _search(served: ServedBank, body: wire.Searched) -> list[list[Hit]]:
    reader = served.reader(body.at)
    return reader.search(
        body.queries,
        k=body.k,
        hybrid=body.hybrid,
        exclude_instance=body.exclude_instance,
        where=body.where,
    )


@_serves(wire.NEAREST)
def _nearest(served: ServedBank, body: wire.Compared) -> list[list[wire.Near]]:
    if len(body.exclude) != len(body.queries) or body.n < 1:
        raise ValueError(
            "Expected one excluded instance (or null) per query and a positive n, got"
            f" {len(body.exclude)} and {body.n}"
        )
    if len(body.where) not in (0, len(body.queries)):
        raise ValueError(
            f"Expected one filter (or null) per query or none at all, got {len(body.where)} for"
            f" {len(body.queries)} queries"
        )
    reader = served.reader(body.at)
    rows = reader.nearest(
        body.queries, body.n, body.exclude, [Where.of(one) for one in body.where], body.words
    )
    return [
        [
            wire.Near(experience=reader.read(s.item), score=s.score, rank=rank, words=s.words)
            for rank, s in enumerate(row)
        ]
        for row in rows
    ]


@_serves(wire.APPLY)
def _apply(served: ServedBank, body: wire.Distilled) -> wire.Written:
    if body.trajectory is None:
        raise ValueError("Expected the trajectory that was distilled, got none")
    before = served.bank.refused.copy()
    entries = served.bank.apply(
        _with_spans(body),
        trajectory=body.trajectory,
        shown=body.shown,
        item=body.item,
        extractor_version=body.extractor_version,
    )
    return wire.Written(entries=entries, refused=dict(served.bank.refused - before))


@_serves(wire.CONSOLIDATE)
def _consolidate(served: ServedBank, body: wire.Distilled) -> wire.Written:
    before = served.bank.refused.copy()
    entries = served.bank.consolidate(
        _with_spans(body), shown=body.shown, extractor_version=body.extractor_version
    )
    return wire.Written(entries=entries, refused=dict(served.bank.refused - before))


def _with_spans(body: wire.Distilled) -> Distillation:
    parsed = body.distillation.parsed
    if len(body.spans) != len(parsed.operations):
        raise ValueError(
            f"Expected one span (or null) per operation, got {len(body.spans)} for"
            f" {len(parsed.operations)}"
        )
    pairs = zip(parsed.operations, body.spans, strict=True)
    operations = tuple(
        operation.model_copy(update={"span": None if span is None else tuple(span)})
        for operation, span in pairs
    )
    return body.distillation.model_copy(
        update={"parsed": parsed.model_copy(update={"operations": operations})}
    )


@_serves(wire.MERGE_DUPLICATES)
def _merge_duplicates(served: ServedBank, body: wire.Judged) -> list[Duplicates]:
    known = ([served.bank.version(one.id, one.version) for one in group] for group in body.groups)
    groups = ([entry for entry in group if entry is not None] for group in known)
    found = [
        Duplicates(survivor=survivor, merged=tuple(merged))
        for survivor, *merged in groups
        if merged
    ]
    return served.bank.merge_duplicates(found, body.ref, author=body.author)


@_serves(wire.TRUSTED_VERSIONS)
def _trusted_versions(served: ServedBank, body: wire.After) -> list[tuple[str, int]]:
    return served.trusted_versions(body.after)


@_serves(wire.TRUST_AFTER)
def _trust_after(served: ServedBank, body: wire.Nothing) -> int:
    return served.bank.trust_after


@_serves(wire.SET_TRUST_AFTER)
def _set_trust_after(served: ServedBank, body: wire.After) -> None:
    served.bank.trust_after = body.after


def _commit(bank: FolderBank, id: int) -> Commit:
    found = next((commit for commit in bank.commits() if commit.id == id), None)
    if found is None:
        raise BankError(f"Expected commit {id} in this bank, got none")
    return found
