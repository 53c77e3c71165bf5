"""Connect a client to a bank server: keys, retries, and errors as the server named them."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from experiential.bank.http import wire
from experiential.bank.http.wire import Body, Operation
from experiential.bank.storage.journal import JOURNAL_NAME
from experiential.errors import BankError
from experiential.types import new_id

TOKEN_VARIABLE = "EXPERIENTIAL_TOKEN"
_CONNECTIONS = 64
_CONNECT_SECONDS = 5.0
_LONGEST_PAUSE = 0.5
_SAID_AFTER = 1.0
"""Seconds of waiting for a lost server after which the log says so."""
PATIENCE = 30.0
"""Seconds during which a lost or busy server is tried again: a restart takes 2 to 5."""
_log = logging.getLogger(__name__)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Connection:
    """Call operations of a bank server from any thread; a forked process opens its own sockets.

    Args:
        url: the server's address, ``http://host:port``.
        token: sent as a bearer token; ``$EXPERIENTIAL_TOKEN`` by default.
        timeout: seconds to wait for one answer.
        patience: seconds during which a lost connection, or a server that has too much to do, is
            tried again; a write keeps its key, so it is carried out once.

    Raises:
        ValueError: the address cannot be read, or a number is out of range.
    """

    def __init__(self, url: str, token: str | None, timeout: float, patience: float) -> None:
        if timeout <= 0 or patience < 0:
            raise ValueError(
                f"Expected timeout > 0 and patience >= 0, got {timeout} and {patience}"
            )
        try:
            host = urlsplit(url).hostname if urlsplit(url).port != 0 else None
        except ValueError as error:
            raise ValueError(
                f"Expected an address like 'http://127.0.0.1:8321', got {url!r}: {error}"
            ) from error
        if not host:
            raise ValueError(
                "Expected an address with a host and a port, like 'http://127.0.0.1:8321', got"
                f" {url!r}"
            )
        self.url = url.rstrip("/")
        self.closed = False
        token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        self._direct = host in _LOOPBACK
        self._timeout = timeout
        self._patience = patience
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._pid = 0

    def call(self, operation: Operation, namespace: str, body: Body, key: str | None = None) -> Any:
        """Return the answer to one operation.

        ``key`` names a write: sent again under it, the write is carried out once. By default each
        call has a new one.

        Raises:
            BankError: the server is out of reach, or refused. Its other errors keep their type.
        """
        try:
            content = body.model_dump_json().encode()
        except PydanticSerializationError as error:
            raise ValueError(f"Expected values that JSON can hold, got {error}") from error
        headers = {wire.KEY_HEADER: key or new_id()} if operation.writes else {}
        response = self._send(operation.name, namespace, content, headers)
        if response.status_code == 200:
            try:
                return operation.result.validate_json(response.content)
            except ValidationError as error:
                raise BankError(
                    f"Expected an answer to {operation.name!r} from {self.url}, got another"
                    " version's; update both ends"
                ) from error
        raise self._refusal(response)

    def _refusal(self, response: httpx.Response) -> Exception:
        """Return the error that an answer stands for."""
        try:
            refusal: dict[str, Any] = response.json()["error"]
            kind, message = str(refusal["type"]), str(refusal["message"])
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            return BankError(
                f"Expected a bank server at {self.url}, got status {response.status_code} ; check"
                " the address"
            )
        if response.status_code == 401:
            return BankError(
                f"Expected the token of the bank server at {self.url}; pass token= or set"
                f" {TOKEN_VARIABLE}"
            )
        return wire.ERRORS.get(kind, BankError)(message)

    def backup(self, folder: Path) -> None:
        """Write the journal of the server into a folder, named once complete.

        Raises:
            BankError: the server is out of reach, or refused.
        """
        part = folder / f"{JOURNAL_NAME}.part"
        try:
            with self._opened().stream("GET", wire.BACKUP) as answer, part.open("wb") as file:
                if answer.status_code != 200:
                    answer.read()
                    raise self._refusal(answer)
                for piece in answer.iter_bytes():
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            part.replace(folder / JOURNAL_NAME)
        except httpx.TransportError as error:
            raise BankError(
                f"Expected the journal of the bank server at {self.url}, got"
                f" {type(error).__name__}: {error}; try again"
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def _send(
        self, name: str, namespace: str, content: bytes, headers: dict[str, str]
    ) -> httpx.Response:
        """Send a request until it is answered, or patience has ended."""
        since, pause, is_said, may_be_made = 0.0, 0.05, False, False
        while True:
            try:
                response = self._opened().post(
                    wire.PREFIX + name,
                    params={"namespace": namespace},
                    content=content,
                    headers=headers,
                )
                if response.status_code not in (429, 503) or "retry-after" not in response.headers:
                    return response
                found, wait = response, float(response.headers["retry-after"])
            except httpx.TransportError as error:
                is_unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                may_be_made = may_be_made or not is_unsent
                # A server that is slow may have made the write, and is not asked again.
                if isinstance(error, httpx.TimeoutException) and not is_unsent:
                    raise BankError(
                        f"Expected an answer from the bank server at {self.url} within"
                        f" {self._timeout} s, got none{_advice(headers, may_be_made)}"
                    ) from error
                found, wait = error, pause
            now = time.monotonic()
            since = since or now  # from the first loss on
            if now + wait > since + self._patience:
                if isinstance(found, httpx.Response):
                    return found
                raise BankError(
                    f"Expected a bank server at {self.url}, got {type(found).__name__}:"
                    f" {found}; start it where the bank's folder is: experiential serve FOLDER"
                    f"{_advice(headers, may_be_made)}"
                ) from found
            if now - since > _SAID_AFTER and not is_said:
                is_said = True
                _log.warning(
                    "The bank server at %s does not answer; trying for %g s",
                    self.url,
                    self._patience,
                )
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _opened(self) -> httpx.Client:
        with self._lock:
            if self.closed:
                raise BankError(
                    "Expected an open bank, got a closed one; open it again with"
                    f" ExperienceBank({self.url!r})"
                )
            if self._client is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._client = httpx.Client(
                    base_url=self.url,
                    headers=self._headers,
                    timeout=httpx.Timeout(self._timeout, connect=_CONNECT_SECONDS),
                    limits=httpx.Limits(
                        max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS
                    ),
                    trust_env=not self._direct,  # no proxy for this machine
                )
            return self._client

    def close(self) -> None:
        """Close the sockets of this process; safe to call twice."""
        with self._lock:
            self.closed = True
            client, self._client = self._client, None
        if client is not None and self._pid == os.getpid():
            client.close()


def _advice(headers: Mapping[str, str], may_be_made: bool) -> str:
    """Return what to do about a write whose answer was lost."""
    if not may_be_made or wire.KEY_HEADER not in headers:
        return ""
    return (
        "; a write may have been made: look, or repeat it with"
        f" key={headers[wire.KEY_HEADER]!r}, where the method takes one, which writes once"
    )
