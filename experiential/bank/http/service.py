"""Serve banks over HTTP: one process writes a folder, any number of clients use it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from experiential.bank.folder import FolderBank
from experiential.bank.http import wire
from experiential.bank.http.limits import ASKING, BODY, Limits, RequestGuard, error_response
from experiential.bank.http.namespaces import Namespaces
from experiential.bank.http.served import LONGEST_KEY
from experiential.bank.http.wire import Body, Operation
from experiential.bank.index.embed import Embedder
from experiential.bank.storage.journal import JOURNAL_NAME
from experiential.errors import (
    BankLockedError,
    ExperientialError,
    MissingExtraError,
    ReadOnlyBankError,
)

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

_HARMLESS = ("keep_generation note_retrievals save_counters queue_lease queue_release").split()
_ONCE = {one.name for one in wire.OPERATIONS.values() if one.writes} - set(_HARMLESS)
"""Writes that a repeated request must not carry out again."""
_PATH = re.compile(r"(?<![\w:/.~-])~?/(?:[^\s'\"/]+/)+([^\s'\",;:)]*)")
"""An absolute path of at least two parts; the slashes of an address come after a colon."""
_log = logging.getLogger(__name__)
_STATUS = {ReadOnlyBankError: 403, BankLockedError: 423, ExperientialError: 409, TimeoutError: 503}


def create_app(
    source: str | os.PathLike[str] | FolderBank | Sequence[FolderBank] | Namespaces,
    token: str | None = None,
    *,
    namespaces: Sequence[str] = (),
    embedder: Embedder | str | None = None,
    limits: Limits | None = None,
    hosts: Sequence[str] = (),
) -> FastAPI:
    """Return the application that serves a bank folder, or banks that are open already.

    A folder's writer lock is taken here, and released when the application shuts down or
    ``app.state.namespaces.close()`` is called. Banks that were open before stay open.

    Args:
        source: a folder (made on first use), or open banks of different namespaces.
        token: required in every request as ``Authorization: Bearer ...``; None requires nothing.
        namespaces: those to serve; empty serves all of the folder, opened when first asked for.
        embedder: for namespaces that were never written; the others keep theirs.
        limits: of what one client may ask for; those of connections and headers need a server
            that is started with ``experiential.bank.http.limits.server_config(app, limits)``.
        hosts: further names by which the server may be called, see `RequestGuard`.

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
    limits = limits or Limits()
    banks = source
    if not isinstance(banks, Namespaces):
        options: dict[str, Any] = {"namespaces": namespaces, "embedder": embedder}
        banks = Namespaces(banks, limit=limits.namespaces, **options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        yield
        banks.close()

    app = FastAPI(title="experiential bank", lifespan=lifespan)
    app.state.namespaces = banks
    app.add_middleware(RequestGuard, token=token, limits=limits, hosts=tuple(hosts))
    for kind in (ExperientialError, ValueError, TimeoutError, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer)

    def health() -> dict[str, Any]:
        """Return whether the server runs, and the namespaces that it serves."""
        return {"status": "ok", "namespaces": banks.names()}

    health.__annotations__ = {"return": dict[str, Any]}
    app.add_api_route(f"{wire.PREFIX}health", health, methods=["GET"])

    def backup() -> Response:
        """Return the journal as it stands, all namespaces, as a file."""
        from fastapi.responses import FileResponse
        from starlette.background import BackgroundTask

        scratch = TemporaryDirectory(prefix="experiential-backup-")
        try:
            banks.backup(Path(scratch.name))
        except BaseException:
            scratch.cleanup()
            raise
        done = BackgroundTask(scratch.cleanup)
        return FileResponse(Path(scratch.name) / JOURNAL_NAME, background=done)

    backup.__annotations__ = {}
    app.add_api_route(wire.BACKUP, backup, methods=["GET"], response_model=None)
    for operation in wire.OPERATIONS.values():
        _add_route(app, banks, limits, operation)
    return app


async def _answer(request: Request, error: Exception) -> Response:
    """Answer a request that failed, with an error that the client raises again.

    Paths of this machine are cut to their last part: who may use a bank need not know the disk.
    """
    from fastapi.exceptions import RequestValidationError

    kind = type(error).__name__
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = f"Expected a request as described at /docs, got {name}: {first['msg']}"
        return error_response(422, "ValueError", message)
    if isinstance(error, (ExperientialError, ValueError, TimeoutError)):
        status = next((code for base, code in _STATUS.items() if isinstance(error, base)), 422)
        if kind not in wire.ERRORS:
            kind = "BankError" if isinstance(error, ExperientialError) else "ValueError"
        return error_response(status, kind, without_paths(str(error)))
    _log.error("%s failed", request.url.path, exc_info=error)
    message = f"Expected an answer of the bank server, but it failed with {kind}; see its log"
    return error_response(500, "BankError", message)


def without_paths(message: str) -> str:
    """Return a message whose absolute paths are cut to their last part.

    >>> without_paths("Expected a folder, got '/home/ann/runs/bank'; see http://a/b/c and /docs")
    "Expected a folder, got '…/bank'; see http://a/b/c and /docs"
    """
    return _PATH.sub(r"…/\1", message)


def _add_route(app: FastAPI, banks: Namespaces, limits: Limits, operation: Operation) -> None:
    from fastapi import Header, Query, Request, Response

    find = attrgetter(operation.path)

    def endpoint(
        request: Request, body: Body, namespace: str = "default", idempotency_key: str | None = None
    ) -> Response:
        served = banks.get(namespace)
        arguments = {name: getattr(body, name) for name in type(body).model_fields}
        if operation.name in ASKING:
            limits.check(arguments, len(served.bank))
        if operation.name == "note_retrievals":
            result = served.count(idempotency_key, arguments["ids"])
        elif idempotency_key is None or operation.name not in _ONCE:
            result = find(served)(**arguments)
        else:
            result = served.once(
                idempotency_key,
                operation.name.encode() + b" " + request.scope[BODY],
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
