"""Serve a bank folder over HTTP with `experiential serve`.

One process writes the folder, any number of others use it.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from experiential.cli.options import Embedder, Store
from experiential.errors import ConfigError, MissingExtraError

TOKEN_VARIABLE = "EXPERIENTIAL_TOKEN"
_MEBIBYTE = 2**20
_SECONDS_TO_FINISH = 10


def serve(
    folder: Annotated[
        Path, Argument(metavar="BANK", help="Folder of the bank; made on first use.")
    ],
    host: Annotated[
        str,
        Option(help="Address to listen at. Anything but this machine alone needs a token."),
    ] = "127.0.0.1",
    port: Annotated[
        int, Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = 8321,
    token: Annotated[
        str | None,
        Option(
            envvar=TOKEN_VARIABLE,
            help="What clients must send as a bearer token; the variable hides it from `ps`.",
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        Option(
            help="Serve this namespace only; may be repeated. All, opened when asked for, by"
            " default."
        ),
    ] = None,
    embedder: Embedder = None,
    store: Store = None,
    max_body: Annotated[int, Option(min=1, help="Longest request body, in MiB.")] = 8,
) -> None:
    """Serve a bank to other processes: they open it with ExperienceBank("http://HOST:PORT").

    This process is then the folder's only writer. It stops cleanly on Ctrl-C and on SIGTERM; what
    was acknowledged is on the disk even when it is killed.
    """
    if token is not None and not (
        token and token.isascii() and token.isprintable() and token.strip() == token
    ):
        raise ConfigError(
            f"Expected --token (or {TOKEN_VARIABLE}) to be printable ASCII without blanks at its"
            " ends, got another text"
        )
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"Expected a token to listen at {host!r}, which other machines can reach, got none; "
            f"set {TOKEN_VARIABLE} or pass --token, or listen at 127.0.0.1"
        )
    try:
        import uvicorn

        import_module("fastapi")  # asked for before the folder is locked
    except ImportError as error:
        raise MissingExtraError(error.name or "uvicorn", "serve") from None
    from experiential.bank.http.namespaces import Namespaces
    from experiential.bank.http.service import create_app

    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=kind, flags=flags)[0]
        place = (str(address[0]), port)
        listener = socket.create_server(place, family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"Expected an address and a free port to listen at, got {host}:{port}:"
            f" {error.strerror or error}"
        ) from error
    with listener:
        try:
            banks = Namespaces(folder, namespaces=namespace or (), embedder=embedder, store=store)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            app = create_app(banks, token, max_body=max_body * _MEBIBYTE)
            config = uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_SECONDS_TO_FINISH,
            )
            # Ends this process before uvicorn listens for it, and after: uvicorn raises it again.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
            shown = f"[{host}]" if ":" in host else host
            names = ", ".join(banks.names()) or "none yet"
            sys.stdout.write(
                f"serving http://{shown}:{listener.getsockname()[1]} from {folder} (namespaces:"
                f" {names})\n"
            )
            sys.stdout.flush()
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            banks.close()


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
