"""Serve banks over HTTP: one process writes a folder, any number of clients use it."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
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
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 8 * 2**20
"""Default limit of a request body, in bytes."""
LONGEST_KEY = 200
_BODY = "experiential.body"
_HARMLESS = ("keep_generation note_retrievals save_counters queue_lease queue_release").split()
_ONCE = {one.name for one in wire.OPERATIONS.values() if one.writes} - set(_HARMLESS)
"""Writes that a repeated request must not carry out again."""
_STATUS = {ReadOnlyBankError: 403, BankLockedError: 423, ExperientialError: 409, TimeoutError: 503}


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
        from fastapi.exceptions import RequestValidationError
    except ImportError:
        raise MissingExtraError("fastapi", "serve") from None
    if token is not None and not token.strip():
        raise ValueError("Expected token to be non-empty text or None, got blank text")
    banks = source
    if not isinstance(banks, Namespaces):
        banks = Namespaces(banks, namespaces=namespaces, embedder=embedder)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        yield
        banks.close()

    app = FastAPI(title="experiential bank", lifespan=lifespan)
    app.state.namespaces = banks
    app.add_middleware(RequestGuard, token=token, max_body=max_body)
    for kind in (ExperientialError, ValueError, TimeoutError, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer)

    def health() -> dict[str, Any]:
        """Return whether the server runs, and the namespaces that it serves."""
        return {"status": "ok", "namespaces": banks.names()}

    health.__annotations__ = {"return": dict[str, Any]}
    app.add_api_route(f"{wire.PREFIX}health", health, methods=["GET"])
    for operation in wire.OPERATIONS.values():
        _add_route(app, banks, operation)
    return app


@dataclass(repr=False)  # the token stays out of logs
class RequestGuard:
    """Refuse, as ASGI middleware, requests without the token or with too long a body."""

    app: ASGIApp
    token: str | None
    max_body: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(cast("list[tuple[bytes, bytes]]", scope["headers"]))
        given, expected = headers.get(b"authorization", b""), f"Bearer {self.token}".encode()
        if self.token is not None and not hmac.compare_digest(given, expected):
            message = (
                "Expected the token of this bank server as 'Authorization: Bearer TOKEN', got none"
                " or another"
            )
            fields = {"connection": "close", "www-authenticate": "Bearer"}
            await _error(401, "BankError", message, fields)(scope, receive, send)
            return
        length = headers.get(b"content-length", b"")
        is_long = length.isdigit() and int(length) > self.max_body
        body, more = bytearray(), not is_long
        while more:
            event = await receive()
            body += event.get("body", b"")
            is_long = len(body) > self.max_body
            more = bool(event.get("more_body", False)) and not is_long
        if is_long:
            message = (
                f"Expected a request of at most {self.max_body} bytes, got more; send fewer or"
                " shorter texts at once"
            )
            await _error(413, "BankError", message, {"connection": "close"})(scope, receive, send)
            return
        unread = [bytes(body)]

        async def receive_again() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        await self.app({**scope, _BODY: unread[0]}, receive_again, send)


def _error(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> Response:
    from fastapi import Response

    content = json.dumps({"error": {"type": kind, "message": message}})
    return Response(content, status, headers, "application/json")


async def _answer(request: Request, error: Exception) -> Response:
    """Answer a request that failed, with an error that the client raises again."""
    from fastapi.exceptions import RequestValidationError

    kind = type(error).__name__
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = f"Expected a request as described at /docs, got {name}: {first['msg']}"
        return _error(422, "ValueError", message)
    if isinstance(error, (ExperientialError, ValueError, TimeoutError)):
        status = next((code for base, code in _STATUS.items() if isinstance(error, base)), 422)
        if kind not in wire.ERRORS:
            kind = "BankError" if isinstance(error, ExperientialError) else "ValueError"
        return _error(status, kind, str(error))
    message = f"Expected an answer of the bank server, but it failed with {kind}: {error}"
    return _error(500, "BankError", f"{message}; see its log")


def _add_route(app: FastAPI, banks: Namespaces, operation: Operation) -> None:
    from fastapi import Header, Query, Request, Response

    find = attrgetter(operation.path)

    def endpoint(
        request: Request, body: Body, namespace: str = "default", idempotency_key: str | None = None
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

    endpoint.__annotations__ = {  # FastAPI needs types, not their names
        "request": Request,
        "body": operation.body,
        "namespace": Annotated[str, Query(min_length=1)],
        "idempotency_key": Annotated[str | None, Header(min_length=1, max_length=LONGEST_KEY)],
    }
    app.add_api_route(
        wire.PREFIX + operation.name,
        endpoint,
        methods=["POST"],
        name=operation.name,
        summary=operation.summary,
        response_model=operation.type,
    )
