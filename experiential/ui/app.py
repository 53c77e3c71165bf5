"""Serve the pages of one bank or run to the browser of this machine.

Every page is made on the server; forms and links work without scripts. A change opens the bank for
writing, is one commit, and closes it again, so that a run may start between two changes.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, urlencode, urlsplit

from experiential.bank.folder import FolderBank
from experiential.errors import BankError, BankLockedError, ConfigError, MissingExtraError
from experiential.ui import page
from experiential.ui.source import Source, filtered

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost", "::1")
LISTED = 200
"""Rows of a list on one page."""
KEYS = ("task", "outcome", "step", "arm")
"""By which episodes are filtered."""
MAX_FORM = 2**20
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}


def create_app(source: Source, token: str, *, cookie: str = "experiential") -> Starlette:
    """Return the application that shows a bank or a run, and changes its bank.

    Args:
        source: the folder.
        token: what the first request carries as ``?token=``; a cookie carries it from then on.
        cookie: name of that cookie; servers of one machine need different ones.

    Raises:
        MissingExtraError: Starlette, which comes with FastAPI, or Jinja2 is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.responses import HTMLResponse, RedirectResponse, Response
        from starlette.routing import Route
    except ImportError:
        raise MissingExtraError("starlette", "serve") from None
    page.environment()

    def shown(name: str, status: int = 200, **values: Any) -> Response:
        writer = source.writer()
        can_write = source.has_bank and writer is None
        known = {"source": source, "writer": writer, "can_write": can_write, "most": LISTED}
        return HTMLResponse(page.render(name, **known, **values), status)

    def home(request: Request) -> Response:
        first = "/run" if source.run else "/entries" if source.has_bank else "/episodes"
        return RedirectResponse(first, 303)

    def run(request: Request) -> Response:
        return shown("run.html", title="Run", here="/run", **page.run_values(source))

    def evaluation(request: Request) -> Response:
        values = page.evaluation_values(source)
        return shown("evaluation.html", title="Evaluation", here="/evaluation", **values)

    def entries(request: Request) -> Response:
        every, words = source.entries(), request.query_params.get("q", "")
        values: dict[str, Any] = {
            "rows": page.searched(every, words),
            "total": len(every),
            "q": words,
        }
        return shown("entries.html", title="What it learned", here="/entries", **values)

    def entry(request: Request) -> Response:
        view = source.entry(request.path_params["id"])
        return shown("entry.html", title=f"Entry {view.row.entry.id[:8]}", here="", view=view)

    def episodes(request: Request) -> Response:
        asked = {name: request.query_params.get(name, "") for name in KEYS}
        every, step = source.episodes(), int(asked["step"]) if asked["step"] else None
        chosen = (asked["task"], asked["outcome"], step, asked["arm"])
        rows = filtered(reversed(every), *chosen)
        values: dict[str, Any] = {"rows": rows, "total": len(every), **asked}
        return shown("episodes.html", title="Episodes", here="/episodes", **values)

    def episode(request: Request) -> Response:
        view = source.episode(request.path_params["id"])
        return shown("episode.html", title="Episode", here="", view=view)

    def commits(request: Request) -> Response:
        return shown("commits.html", title="History", here="/commits", commits=source.commits())

    def letters(request: Request) -> Response:
        found = source.letters()
        return shown("letters.html", title="Dead letters", here="/dead-letters", letters=found)

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in (*page.STYLES, page.SCRIPT):
            return Response("not found", 404)
        kind = "text/javascript" if name.endswith(".js") else "text/css"
        return Response(
            files(page.PACKAGE).joinpath("static", name).read_bytes(),
            headers={"cache-control": "max-age=3600"},
            media_type=kind,
        )

    # Changes: each takes the bank, the id in the path and the form, and returns where to go on

    def edit(bank: FolderBank, id: str, form: dict[str, str]) -> str:
        bank.update(id, form["text"])
        return f"/entries/{id}"

    def approve(bank: FolderBank, id: str, form: dict[str, str]) -> str:
        return f"/entries/{bank.approve(id).id}"

    def retire(bank: FolderBank, id: str, form: dict[str, str]) -> str:
        bank.remove(id)
        return f"/entries/{id}"

    def restore(bank: FolderBank, id: str, form: dict[str, str]) -> str:
        older = bank.version(id, int(form["version"]))
        if older is None:
            raise BankError(f"Expected a version of {id}, got {form['version']}")
        bank.update(id, older.text)
        return f"/entries/{id}"

    def rollback(bank: FolderBank, id: str, form: dict[str, str]) -> str:
        bank.rollback(int(form["commit"]))
        return "/commits"

    def requeue(bank: FolderBank, id: str, form: dict[str, str]) -> str:
        bank.queue.requeue(form["id"])
        return "/dead-letters"

    def changing(change: Callable[[FolderBank, str, dict[str, str]], str]) -> Any:
        from starlette.concurrency import run_in_threadpool

        def act(id: str, form: dict[str, str]) -> str:
            with source.writing() as bank:
                return change(bank, id, form)

        async def endpoint(request: Request) -> Response:
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > MAX_FORM:
                    raise ConfigError(f"Expected a form of at most {MAX_FORM} bytes, got more")
            read = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
            # browsers send line ends of text fields as CR LF
            form = {name: values[-1].replace("\r\n", "\n") for name, values in read.items()}
            to = await run_in_threadpool(act, request.path_params.get("id", ""), form)
            return RedirectResponse(to, 303)

        return endpoint

    def problem(request: Request, error: Exception) -> Response:
        status = 423 if isinstance(error, BankLockedError) else 400
        if isinstance(error, ConfigError) and request.method == "GET":
            status = 404
        is_missing = isinstance(error, KeyError)
        said = f"Expected a field {error} in the form, got none" if is_missing else str(error)
        return shown("problem.html", status, title="Problem", here="", problem=said)

    views = {
        "/": home,
        "/run": run,
        "/evaluation": evaluation,
        "/entries": entries,
        "/entries/{id}": entry,
        "/episodes": episodes,
        "/episodes/{id}": episode,
        "/commits": commits,
        "/dead-letters": letters,
        "/static/{name}": static,
    }
    changes = {
        "/entries/{id}/edit": edit,
        "/entries/{id}/approve": approve,
        "/entries/{id}/retire": retire,
        "/entries/{id}/restore": restore,
        "/commits/rollback": rollback,
        "/dead-letters/requeue": requeue,
    }
    routes = [Route(path, view, methods=["GET"]) for path, view in views.items()]
    routes += [Route(path, changing(one), methods=["POST"]) for path, one in changes.items()]
    handlers: Any = dict.fromkeys((ConfigError, BankError, ValueError, KeyError), problem)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.add_middleware(cast("Any", Guard), token=token, cookie=cookie)
    return app


class Guard:
    """Let only the browser in that was given the token, as ASGI middleware.

    A request must name this machine as its host, which other sites' names that lead here do not; it
    must carry the token, in the address or as a cookie; and a change must come from these pages.
    """

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        from starlette.requests import Request

        request = Request(scope)
        answer: ASGIApp = self._refusal(request) or self._app

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (k.encode(), v.encode())
                        for k, v in HEADERS.items()
                        if k.encode() not in named
                    ),
                ]
            await send(message)

        await answer(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that goes no further, or None."""
        from starlette.responses import PlainTextResponse, RedirectResponse

        host = request.headers.get("host", "")
        try:
            named = urlsplit(f"//{host}").hostname
        except ValueError:
            named = None
        if named not in HOSTS:
            return PlainTextResponse("Expected a request to this machine by 127.0.0.1", 403)
        given = request.query_params.get("token")
        if given is not None and request.method == "GET" and self._fits(given):
            rest = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
            query = f"?{urlencode(rest)}" if rest else ""
            # one slash: two would name another host
            response = RedirectResponse(f"/{request.url.path.lstrip('/')}{query}", 303)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return response
        if not self._fits(request.cookies.get(self._cookie, "")):
            said = "Expected the token: open the address that `experiential ui` printed"
            return PlainTextResponse(said, 403)
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("origin")
            site = request.headers.get("sec-fetch-site", "same-origin")
            if site != "same-origin" or (origin is not None and urlsplit(origin).netloc != host):
                return PlainTextResponse("Expected a form of these pages, got another site's", 403)
        return None

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())
