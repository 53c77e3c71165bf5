"""Serve a bank folder over HTTP with `experiential serve`.

One process writes the folder, any number of others use it.
"""

from __future__ import annotations

import ipaddress
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from experiential.cli.options import Embedder, Store
from experiential.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from experiential.bank.http.limits import Limits
    from experiential.bank.http.namespaces import Namespaces

TOKEN_VARIABLE = "EXPERIENTIAL_TOKEN"
_MEBIBYTE = 2**20
NoToken = Annotated[
    bool,
    Option("--no-token", help="Let everybody on this machine in; an open address needs a token."),
]
HostName = Annotated[
    list[str] | None,
    Option(
        metavar="NAME",
        help="Further name by which clients call this server, such as that of a proxy; may be"
        " repeated.",
    ),
]


def serve(
    folder: Annotated[
        Path, Argument(metavar="BANK", help="Folder of the bank; made on first use.")
    ],
    host: Annotated[
        str,
        Option(help="Address to listen at."),
    ] = "127.0.0.1",
    port: Annotated[
        int, Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = 8321,
    token: Annotated[
        str | None,
        Option(
            envvar=TOKEN_VARIABLE,
            help="Bearer token that clients must send (default: random); the variable hides it from"
            " `ps`.",
        ),
    ] = None,
    no_token: NoToken = False,
    host_name: HostName = None,
    namespace: Annotated[
        list[str] | None,
        Option(
            help="Serve only this namespace; may be repeated. By default all are served, each"
            " opened at its first request."
        ),
    ] = None,
    embedder: Embedder = None,
    store: Store = None,
    max_body: Annotated[int, Option(min=1, help="Longest request body, in MiB.")] = 8,
    max_namespaces: Annotated[
        int, Option(min=1, help="Namespaces from which on no further one is made.")
    ] = 100,
    rate: Annotated[
        float, Option(min=1, help="Requests a second that one address may send.")
    ] = 1000.0,
) -> None:
    """Serve a bank to other processes: they open it with ExperienceBank("http://HOST:PORT").

    This process is then the folder's only writer. It stops cleanly on Ctrl-C and on SIGTERM.
    Acknowledged writes are on the disk even if it is killed.
    """
    from experiential.bank.http.limits import Limits

    limits = Limits(body=max_body * _MEBIBYTE, namespaces=max_namespaces, rate=rate)
    options: dict[str, Any] = {"namespaces": namespace or (), "embedder": embedder, "store": store}
    chosen = chosen_token(host, token, no_token=no_token)
    hosts = host_name or ()
    with bank_server(folder, host, port, chosen, hosts, limits, **options) as (_, run):
        # Ends this process before uvicorn listens for it, and after: uvicorn raises it again.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
        run()


@contextmanager
def bank_server(
    folder: Path,
    host: str,
    port: int,
    token: Token,
    host_names: Sequence[str] = (),
    limits: Limits | None = None,
    **options: Any,
) -> Generator[tuple[Namespaces, Callable[[], None]]]:
    """Open a bank folder to be served; close it at the end.

    Args:
        folder: of the bank; made on first use.
        host: address to listen at.
        port: 0 takes a free one.
        token: what clients must send.
        host_names: further names by which clients call this server.
        limits: of what clients may ask for.
        options: of `Namespaces`.

    Yields:
        the open banks, and the call that says where it serves and serves them until it is stopped:
        on the main thread by a signal, on another by the end of the context.

    Raises:
        ConfigError: the token, the address or the folder cannot be used.
        MissingExtraError: FastAPI or uvicorn is not installed.
        BankLockedError: another process writes the folder.
    """
    try:
        import uvicorn

        import_module("fastapi")  # asked for before the folder is locked
    except ImportError as error:
        raise MissingExtraError(error.name or "uvicorn", "serve") from None
    from experiential.bank.http.limits import Limits, server_config
    from experiential.bank.http.namespaces import Namespaces
    from experiential.bank.http.service import create_app

    limits = limits or Limits()
    with listen(host, port) as listener:
        try:
            banks = Namespaces(folder, limit=limits.namespaces, **options)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            hosts = (host or "0.0.0.0", *host_names)
            app = create_app(banks, token.value, limits=limits, hosts=hosts)
            server, running = uvicorn.Server(server_config(app, limits)), threading.Lock()
            shown = f"[{host}]" if ":" in host else host

            def run() -> None:
                names = ", ".join(banks.names()) or "none yet"
                sys.stdout.write(
                    f"serving http://{shown}:{listener.getsockname()[1]} from {folder} (namespaces:"
                    f" {names})\n{token.line}"
                )
                sys.stdout.flush()
                with running:
                    server.run(sockets=[listener])

            try:
                yield banks, run
            finally:
                server.should_exit = True
                with running:  # it answers what it has begun
                    pass
        finally:
            banks.close()


class Token(NamedTuple):
    """Hold what clients must send (None: nothing), and the line that says so, if any."""

    value: str | None
    line: str = ""


def chosen_token(host: str, token: str | None, *, no_token: bool = False) -> Token:
    """Return the token of a server: the one given, or a random one that is shown once.

    Raises:
        ConfigError: no header can carry it, or an open address is to be served without one.
    """
    if token is not None and not (
        token and token.isascii() and token.isprintable() and token.strip() == token
    ):
        raise ConfigError(
            f"Expected --token (or {TOKEN_VARIABLE}) to be printable ASCII without blanks at its"
            " ends, got another text"
        )
    if no_token and not is_loopback(host):
        raise ConfigError(
            f"Expected a token to listen at {host!r}, which other machines can reach, got"
            " --no-token; leave it out, or listen at 127.0.0.1"
        )
    if no_token or token is not None:
        return Token(None if no_token else token)
    made = secrets.token_urlsafe(24)
    return Token(made, f"clients need: export {TOKEN_VARIABLE}={made}\n")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; ConfigError if that is not possible."""
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=kind, flags=flags)[0]
        place = (str(address[0]), port)
        return socket.create_server(place, family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"Expected an address and a free port to listen at, got {host}:{port}:"
            f" {error.strerror or error}"
        ) from error


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address.

    A name counts when all its addresses do.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "")]
    [True, True, True, False, False]
    """
    try:
        found = socket.getaddrinfo(host or None, 0, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    texts = [str(address[0]).partition("%")[0] for *_, address in found]
    return all(ipaddress.ip_address(text).is_loopback for text in texts)
