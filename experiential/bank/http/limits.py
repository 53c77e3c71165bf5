"""Bound what a bank server gives to whoever can connect: sizes, times, numbers and names.

`RequestGuard` sees every request before its body is read. What comes before a request, half-sent
headers and idle connections, never reaches an application; `server_config` bounds that.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import uvicorn
    from fastapi import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY = "experiential.body"
"""Key of the scope with the whole body of the request."""
SMALL_BODY = 64 * 2**10
"""Bytes of each body that are not counted as in flight; connections bound these."""
LARGE_BODY = 2**20
"""Bytes from which on a request is one of the few large ones carried out at a time."""
ASKING = ("search", "nearest", "embed")
"""Operations whose work grows with the number of texts in them."""
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_LONGEST_HEAD = 64 * 2**10
_MOST_ADDRESSES = 4096


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bound a bank server.

    Attributes:
        body: bytes of a request's body.
        asking: bytes of the body of a search, or of one that asks for vectors.
        body_seconds: from the end of the headers to the end of the body.
        header_seconds: from the connection, or the first byte of a request, to the end of headers.
        in_flight: bytes of all bodies held at a time; small ones do not count.
        large: requests with a large body carried out at a time; others wait.
        connections: open at a time. For a new one, one that waits for its client is closed.
        queries: texts to search for, or to embed, in one request.
        hits: of all queries of one request together.
        namespaces: of a folder; those that exist are always served.
        rate: requests a second from one address, for two seconds twice as many; a body counts as
            one more for each 64 KiB. Requests without the token are counted apart.
    """

    body: int = 8 * 2**20
    asking: int = 2**20
    body_seconds: float = 30.0
    header_seconds: float = 10.0
    in_flight: int = 32 * 2**20
    large: int = 2
    connections: int = 512
    queries: int = 1024
    hits: int = 16_384
    namespaces: int = 100
    rate: float = 1000.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"Expected {name} to be positive, got {value}")

    def check(self, arguments: Mapping[str, Any], entries: int) -> None:
        """Refuse, with ValueError, arguments of an operation that ask for too much.

        Args:
            arguments: by name.
            entries: in the bank, more than which no query finds.
        """
        count = len(arguments.get("queries", arguments.get("texts", ())))
        if count > self.queries:
            raise ValueError(
                f"Expected at most {self.queries} queries in one request, got {count}; send them in"
                " several"
            )
        most = min(arguments.get("k", arguments.get("n", 0)), entries)
        if count * most > self.hits:
            raise ValueError(
                f"Expected at most {self.hits} hits in one request, got {count} queries for {most}"
                " each; ask for fewer at once"
            )


@dataclass
class _Bucket:
    """Hold the requests that an address may make at once, as of ``time``."""

    left: float
    time: float


@dataclass(repr=False, eq=False)  # the token stays out of logs
class RequestGuard:
    """Refuse, as ASGI middleware, requests to another host, without the token, or beyond limits.

    Args:
        app: what answers the others.
        token: expected in every request as a bearer token; None expects none.
        limits: of the server.
        hosts: names by which the server may be called besides its address and those of loopback.
            A page in a browser can make its own name lead here (DNS rebinding), and then read all;
            "*" allows every name.
    """

    app: ASGIApp
    token: str | None
    limits: Limits = field(default_factory=Limits)
    hosts: Iterable[str] = ()

    def __post_init__(self) -> None:
        self._hosts = {name.lower() for name in (*_LOOPBACK_NAMES, *self.hosts)}
        self._buckets: dict[tuple[str, bool], _Bucket] = {}
        self._in_flight = 0
        self._large = asyncio.Semaphore(self.limits.large)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(cast("list[tuple[bytes, bytes]]", scope["headers"]))
        if (refusal := self._refused(scope, headers)) is not None:
            await refusal(scope, receive, send)
            return
        body = bytearray()
        held, most = 0, self._most(scope)
        try:
            try:
                async with asyncio.timeout(self.limits.body_seconds):
                    more = True
                    while more:
                        event = await receive()
                        if event["type"] == "http.disconnect":
                            return
                        body += event.get("body", b"")
                        more = bool(event.get("more_body", False))
                        beyond = max(0, len(body) - SMALL_BODY) - held
                        held += beyond
                        self._in_flight += beyond
                        if len(body) > most:
                            refusal = _too_long(most)
                        elif beyond and self._in_flight > self.limits.in_flight:
                            message = (
                                "Expected a request while the server holds fewer bodies, got one"
                                " too many; send it again"
                            )
                            refusal = error_response(503, "BankError", message, _later(1.0))
                        more = more and refusal is None
            except TimeoutError:
                message = (
                    f"Expected the whole request within {self.limits.body_seconds:g} s, got a part"
                    " of it; send fewer or shorter texts at once"
                )
                refusal = error_response(408, "BankError", message, _CLOSE)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            unread = [bytes(body)]
            is_large = len(body) > LARGE_BODY
            body.clear()

            async def receive_again() -> Message:
                if unread:
                    return {"type": "http.request", "body": unread.pop(), "more_body": False}
                return await receive()

            inner = {**scope, BODY: unread[0]}
            if is_large:
                async with self._large:
                    await self.app(inner, receive_again, send)
            else:
                await self.app(inner, receive_again, send)
        finally:
            self._in_flight -= held

    def _refused(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Response | None:
        """Return the answer to a request that is refused for its headers."""
        if not self._is_known(headers.get(b"host", b"").decode("latin-1"), scope):
            message = (
                "Expected the address of this bank server as Host, got another name; call it by"
                " its address, or start it with --host-name NAME"
            )
            return error_response(421, "BankError", message, _CLOSE)
        given, expected = headers.get(b"authorization", b""), f"Bearer {self.token}".encode()
        is_let_in = self.token is None or hmac.compare_digest(given, expected)
        length = headers.get(b"content-length", b"")
        size = int(length) if length.isdigit() and len(length) < 20 else 0
        address = (scope.get("client") or ("", 0))[0]
        most = self._most(scope)
        cost = 1 + (size // SMALL_BODY if is_let_in and size <= most else 0)
        if wait := self._seconds_to_wait((address, is_let_in), cost):
            message = (
                f"Expected at most {self.limits.rate:g} requests a second from one address, got"
                f" more; send it again in {wait:.2f} s"
            )
            return error_response(429, "BankError", message, _later(wait))
        if not is_let_in:
            message = (
                "Expected the token of this bank server as 'Authorization: Bearer TOKEN', got none"
                " or another"
            )
            fields = {**_CLOSE, "www-authenticate": "Bearer"}
            return error_response(401, "BankError", message, fields)
        return _too_long(most) if size > most else None

    def _most(self, scope: Scope) -> int:
        """Return how many bytes the body of a request may have."""
        asks = scope["path"].rpartition("/")[2] in ASKING
        return min(self.limits.body, self.limits.asking) if asks else self.limits.body

    def _is_known(self, host: str, scope: Scope) -> bool:
        if "*" in self._hosts:
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if name in self._hosts or name == (scope.get("server") or ("", 0))[0]:
            return True
        if "0.0.0.0" not in self._hosts and "::" not in self._hosts:
            return False
        try:  # where all addresses are served: any address will do, rebinding needs a name
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _seconds_to_wait(self, who: tuple[str, bool], cost: float) -> float:
        """Count a request, or return how long its client has to wait before it sends it."""
        now, rate = time.monotonic(), self.limits.rate
        most = max(2 * rate, cost)
        bucket = self._buckets.get(who)
        if bucket is None:
            if len(self._buckets) >= _MOST_ADDRESSES:
                self._buckets.clear()
            bucket = self._buckets[who] = _Bucket(most, now)
        bucket.left = min(most, bucket.left + rate * (now - bucket.time))
        bucket.time = now
        if bucket.left < cost:
            return (cost - bucket.left) / rate
        bucket.left -= cost
        return 0.0


_CLOSE = {"connection": "close"}


def _too_long(most: int) -> Response:
    message = (
        f"Expected a request of at most {most} bytes, got more; send fewer or shorter texts at once"
    )
    return error_response(413, "BankError", message, _CLOSE)


def _later(seconds: float) -> dict[str, str]:
    # Whole seconds are what the header can say; the connection stays open for those who read on.
    return {"retry-after": str(max(1, round(seconds)))} | _CLOSE


def error_response(
    status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error as the client of a bank reads it."""
    from fastapi import Response

    content = json.dumps({"error": {"type": kind, "message": message}})
    return Response(content, status, headers, "application/json")


def server_config(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    """Return the settings of a server that bounds connections, their headers and their idleness."""
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol
    opened: dict[Any, None] = {}  # those used last at the end

    class BoundedProtocol(base):
        """Close connections whose headers do not end, and those in the way of new ones."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            base.connection_made(self, transport)
            self.timer: asyncio.TimerHandle | None = None
            self.head = 0
            self.has_answered = False
            opened[self] = None
            if len(opened) > limits.connections:
                # Who has not sent a whole request goes first, then who has nothing to ask.
                waiting = [one for one in opened if one is not self and one.is_waiting()]
                fresh = (one for one in waiting if not one.has_answered)
                victim = next(fresh, waiting[0] if waiting else self)
                opened.pop(victim)
                victim.transport.abort()
            self.watch()

        def data_received(self, data: bytes) -> None:
            base.data_received(self, data)
            self.head += len(data)
            self.watch()

        def on_response_complete(self) -> None:
            base.on_response_complete(self)
            self.has_answered = True
            if self in opened:
                opened[self] = opened.pop(self)

        def connection_lost(self, exc: Exception | None) -> None:
            opened.pop(self, None)
            if self.timer is not None:
                self.timer.cancel()
            base.connection_lost(self, exc)

        def is_waiting(self) -> bool:
            """Return whether the client has to send something, and the server nothing."""
            cycle = self.cycle
            return cycle is None or cycle.response_complete or cycle.more_body

        def watch(self) -> None:
            """Give an unfinished head its time, and stop the clock when it has ended."""
            if self.cycle is None or self.cycle.response_complete:
                if self.head > _LONGEST_HEAD:
                    self.transport.abort()
                elif self.timer is None:
                    self.timer = self.loop.call_later(limits.header_seconds, self.transport.abort)
            else:
                self.head = 0
                if self.timer is not None:
                    self.timer.cancel()
                    self.timer = None

    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=10,
        http=BoundedProtocol,
        ws="none",
        proxy_headers=False,  # anybody on this machine could pretend to be another address
        server_header=False,
        backlog=limits.connections // 2,
    )
