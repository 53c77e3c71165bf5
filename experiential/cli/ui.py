"""Show a bank or a run in the browser with `experiential ui`."""

from __future__ import annotations

import secrets
import sys
import webbrowser
from contextlib import closing
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from experiential.cli.options import Namespace
from experiential.cli.serve import listen
from experiential.errors import MissingExtraError


def ui(
    path: Annotated[
        Path,
        Argument(
            metavar="BANK|RUN|LOG",
            help="Folder of a bank, of a run or of `experiential eval`, or the log of `bench run`.",
        ),
    ],
    port: Annotated[
        int, Option(min=0, max=65535, help="Port of 127.0.0.1 to listen at; 0 takes a free one.")
    ] = 0,
    open_browser: Annotated[
        bool, Option("--open/--no-open", help="Open the page in a browser.")
    ] = False,
    namespace: Namespace = "default",
) -> None:
    """Serve a local page with entries, episodes, the run and its evaluations.

    Only this machine can reach it, and only with the token in the printed address. A run in
    progress is shown live, its bank read-only. It is served until Ctrl-C.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtraError(error.name or "uvicorn", "serve") from None
    from experiential.ui.app import create_app
    from experiential.ui.source import Source

    token = secrets.token_urlsafe(24)
    with closing(Source(path, namespace)) as source, listen("127.0.0.1", port) as listener:
        bound = listener.getsockname()[1]
        app = create_app(source, token, cookie=f"experiential-{bound}")
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=2
        )
        address = f"http://127.0.0.1:{bound}/?token={token}"
        sys.stdout.write(f"{path} is shown at {address}\n")
        sys.stdout.flush()
        if open_browser:
            webbrowser.open(address)
        uvicorn.Server(config).run(sockets=[listener])
