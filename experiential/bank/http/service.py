"""Serve banks over HTTP: one process writes a folder, any number of clients use it."""

from __future__ import annotations

import contextlib
import hmac
import inspect
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, cast

from experiential.bank.folder import FolderBank
from experiential.bank.http import wire
from experiential.bank.http.namespaces import Namespaces
from experiential.bank.http.wire import Body, Operation
from experiential.bank.index.embed import Embedder
from experiential.errors import (
    BankLockedError,
    ExperientialError,
    MissingExtraError,
    ReadOnlyBankError,
)

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

MAX_BODY = 8 * 2**20
"""Default limit of a request body, in bytes."""
LONGEST_KEY = 200
_BODY = "experiential.body"
_HARMLESS = ("keep_generation", "note_retrievals", "save_counters", "set_trust_after")
_ONCE = {one.name for one in wire.OPERATIONS.values() if one.writes} - set(_HARMLESS)
"""Writes that a repeated request must not carry out again."""
_STATUS = {ReadOnlyBankError: 403, BankLockedError: 423, ExperientialError: 409, TimeoutError: 503}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def create_app(
    source: str | os.PathLike[str] | FolderBank | Sequence[FolderBank] | Namespaces,
    token: str | None = None,
    *,
    namespaces: Sequence[str] = (),
    embedder: Embedder | str | None = None,
    max_body: int = MAX_BODY,
) -> FastAPI:
    """Return the application that serves a bank folder, or banks that are open already.

    A folder's writer lock is taken here, and released when the application shuts down or
    ``app.state.namespaces.close()`` is called. Banks that were open before stay open.

    Args:
        source: a folder (made on first use), or open banks of different namespaces.
        token: required in every request as ``Authorization: Bearer ...``; None requires nothing.
        namespaces: those to serve; empty serves all of the folder, opened when first asked for.
        embedder: for namespaces that were never written; the others keep theirs.
        max_body: greatest size of a request body, in bytes.

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
    banks = (
        source
        if isinstance(source, Namespaces)
        else Namespaces(source, namespaces=namespaces, embedder=embedder)
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        yield
        banks.close()

    app = FastAPI(title="experiential bank", lifespan=lifespan)
    app.state.namespaces = banks
    app.add_middleware(RequestGuard, token=token, max_body=max_body)
    _answer_errors(app)

    def health() -> dict[str, Any]:
        """Return whether the server runs, and the namespaces that it serves."""
        return {"status": "ok", "namespaces": banks.names()}

    health.__annotations__ = {"return": dict[str, Any]}  # FastAPI needs types, not their names
    app.add_api_route(f"{wire.PREFIX}health", health, methods=["GET"])
    for operation in wire.OPERATIONS.values():
        _add_route(app, banks, operation)
    return app


class RequestGuard:
    """Refuse, as ASGI middleware, requests without the token or with too long a body."""

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
        """Handle one connection."""
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
    """Return a ``receive`` that yields the whole body first."""
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


def _add_route(app: FastAPI, banks: Namespaces, operation: Operation) -> None:
    from fastapi import Header, Query, Request, Response

    find = attrgetter(operation.path)

    def endpoint(
        request: Request, body: Body, namespace: str, idempotency_key: str | None
    ) -> Response:
        served = banks.get(namespace)
        arguments = {name: getattr(body, name) for name in type(body).model_fields}
        if operation.name == "note_retrievals":
            result = served.count(idempotency_key, arguments["ids"])
        elif idempotency_key is None or operation.name not in _ONCE:
            result = find(served)(**arguments)
        else:
            result = served.once(
                idempotency_key,
                operation.name.encode() + b" " + request.scope[_BODY],
                partial(find(served), **arguments),
                lambda commit: served.repeated(operation.name, commit, body),
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
    endpoint.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    app.add_api_route(
        wire.PREFIX + operation.name,
        endpoint,
        methods=["POST"],
        name=operation.name,
        summary=operation.summary,
        response_model=operation.type,
    )
