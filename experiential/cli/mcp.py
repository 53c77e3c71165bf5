"""Offer a bank to any agent that speaks the Model Context Protocol, with `experiential mcp`.

An agent calls `recall` when it starts a task, `ask` when it is stuck, and `record` when it is done:
what was recalled is then credited with the outcome, and lessons are distilled from the transcript.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field
from typer import Argument, Option

from experiential import __version__
from experiential.bank.episode import Episode
from experiential.bank.manager import ExperienceManager
from experiential.cli.options import (
    BaseUrl,
    Embedder,
    KeyEnv,
    Namespace,
    Review,
    named_model,
    opened_extractor,
)
from experiential.cli.serve import (
    TOKEN_VARIABLE,
    HostName,
    NoToken,
    Token,
    chosen_token,
    listen,
)
from experiential.errors import BankLockedError, ConfigError, ExperientialError, MissingExtraError

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

OPEN_EPISODES = 1_000
"""Episodes that were recalled for and not recorded yet; beyond this the oldest is forgotten."""
ANSWERS = 100
"""Questions answered per episode: a bound for an agent that does nothing but ask."""


class Recalled(BaseModel):
    """Hold the answer of `recall`."""

    episode: str = Field(description="Pass it to ask and record, so that the advice is credited.")
    advice: str = Field(description="Lessons of earlier episodes; empty when there are none.")


class Recorded(BaseModel):
    """Hold the answer of `record`."""

    episode: str = Field(description="Id under which the episode is recorded.")
    credited: int = Field(description="Times that the bank's lessons reached this episode.")


class Step(BaseModel):
    """Hold one turn of an episode."""

    observation: str
    action: str
    reward: float = Field(default=0.0, allow_inf_nan=False)


def mcp(
    bank: Annotated[
        str,
        Argument(
            metavar="BANK",
            help="Folder of the bank, made on first use, or the address of `experiential serve`.",
        ),
    ],
    http: Annotated[
        str | None,
        Option(
            metavar="HOST:PORT",
            help="Address to listen at (streamable HTTP, path /mcp; port 0 takes a free one). By"
            " default the client starts this command and talks over stdin and stdout.",
        ),
    ] = None,
    token: Annotated[
        str | None,
        Option(
            envvar=TOKEN_VARIABLE,
            help="With --http: bearer token that clients must send (default: random). If BANK is an"
            " address: its token.",
        ),
    ] = None,
    no_token: NoToken = False,
    host_name: HostName = None,
    read_only: Annotated[
        bool, Option("--read-only", help="Offer recall and ask only, and write nothing.")
    ] = False,
    model: Annotated[
        str | None,
        Option(
            help="Model that distils: tiny, smollm2, a folder, a hub name, or with --base-url its"
            " name at the server. Without one, episodes wait in the bank's queue."
        ),
    ] = None,
    base_url: BaseUrl = None,
    api_key_env: KeyEnv = None,
    review: Review = False,
    namespace: Namespace = "default",
    embedder: Embedder = None,
) -> None:
    """Offer a bank to agents by the Model Context Protocol: tools recall, ask and record."""
    distils = (model, base_url) != (None, None)
    if read_only and distils:
        raise ConfigError("Expected no model with --read-only, which distils nothing; drop one")
    host, _, port = (http or "").rpartition(":")
    if http is not None and not (host and port.isdecimal() and int(port) < 2**16):
        raise ConfigError(f"Expected --http HOST:PORT, such as 127.0.0.1:8322, got {http!r}")
    try:
        import mcp.server.mcpserver  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise MissingExtraError(error.name or "mcp", "mcp") from None
    from experiential.bank.bank import ExperienceBank
    from experiential.cli.preflight import check_model

    with ExitStack() as stack:
        listener, asked = None, Token(None)
        if http is not None:
            asked = chosen_token(host, token, no_token=no_token)
            listener = stack.enter_context(listen(host, int(port)))
        is_remote = bank.startswith(("http://", "https://"))
        options: dict[str, Any] = {"token": token} if is_remote else {}
        try:
            opened = stack.enter_context(
                ExperienceBank(
                    bank, namespace=namespace, embedder=embedder, read_only=read_only, **options
                )
            )
        except BankLockedError as error:
            raise BankLockedError(
                f"{error}; several agents share a bank through `experiential serve {bank}`: give"
                " its address here, or pass --read-only"
            ) from error
        extractor = None
        if distils:
            settings = named_model(model, base_url, api_key_env)
            check_model(settings)
            extractor = stack.enter_context(opened_extractor(settings))
        manager = stack.enter_context(ExperienceManager(opened, extractor, review=review))
        server = create_server(manager, one_client=listener is None)
        if listener is None:
            server.run("stdio")
            return
        import uvicorn

        from experiential.bank.http.limits import Limits, RequestGuard, server_config

        limits = Limits()
        hosts = (host, *(host_name or ()))
        app = RequestGuard(server.streamable_http_app(host=host), asked.value, limits, hosts)
        address = listener.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        sys.stdout.write(f"serving http://{shown}:{address[1]}/mcp from {bank}\n{asked.line}")
        sys.stdout.flush()
        uvicorn.Server(server_config(app, limits)).run(sockets=[listener])


def create_server(manager: ExperienceManager, *, one_client: bool = False) -> MCPServer[Any]:
    """Return an MCP server with the tools of a bank; `record` is left out where it is read-only.

    Args:
        manager: of the bank; its extractor distils what is recorded.
        one_client: a call without an episode belongs to the one recalled last (for its task).
            Among several clients that would credit one with the work of another.
    """
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations

    tools, read_only = _Tools(manager, one_client), manager.bank.read_only
    server: MCPServer[Any] = MCPServer(
        "experiential",
        version=__version__,
        instructions="Call recall with your task before you start, and heed the advice."
        + ("" if read_only else " Call record when you are done, whether you succeeded or not."),
        log_level="WARNING",
    )
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    server.add_tool(tools.recall, annotations=reads)
    server.add_tool(tools.ask, annotations=reads)
    if not read_only:
        adds = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
        server.add_tool(tools.record, annotations=adds)
    logging.getLogger("mcp").setLevel(logging.WARNING)
    return server


@contextmanager
def _named_errors() -> Generator[None]:
    """Turn a mistake of the caller, or of the bank, into words that its model can read."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        yield
    except (ValueError, TypeError, ExperientialError, TimeoutError) as error:
        raise ToolError(str(error) or type(error).__name__) from error


class _Tools:
    """Answer the calls of agents; their docstrings are what the agents' models read."""

    def __init__(self, manager: ExperienceManager, one_client: bool) -> None:
        self._manager, self._one_client = manager, one_client
        self._running: OrderedDict[str, Episode] = OrderedDict()

    async def recall(self, task: str, k: int | None = None) -> Recalled:
        """Get lessons of earlier episodes for a task that you are about to start.

        Args:
            task: What is to be done, in words; the same words for the same task.
            k: The most lessons to get.
        """
        with _named_errors():
            episode = await self._manager.episode(task, k=k, max_calls=ANSWERS).astart()
        if not self._manager.bank.read_only:
            self._running[episode.id] = episode
            while len(self._running) > OPEN_EPISODES:
                self._running.popitem(last=False)
        return Recalled(episode=episode.id, advice=episode.advice)

    async def ask(self, query: str, episode: str | None = None) -> str:
        """Ask what was learnt in earlier episodes, at any time during a task.

        Args:
            query: Your situation, what you tried, and what you need to know.
            episode: What recall returned for this task.
        """
        with _named_errors():
            asker = self._find(None if self._manager.bank.read_only else episode)
            asker = asker or self._manager.episode(query, guided=True)
            return await asker.tool.acall({"query": query})

    async def record(
        self,
        task: str,
        transcript: str | list[dict[str, Any]] | None = None,
        turns: list[Step] | None = None,
        success: bool | None = None,
        score: Annotated[float | None, Field(allow_inf_nan=False)] = None,
        feedback: str | None = None,
        episode: str | None = None,
    ) -> Recorded:
        """Record a finished task, so that the next attempt at one like it gets its lessons.

        Args:
            task: What was to be done, in the words given to recall.
            transcript: What happened, in your words or as a list of chat messages.
            turns: What happened, as pairs of observation and action; instead of transcript.
            success: Whether it worked; leave it out unless it was checked.
            score: How well it worked, where there is a number for it.
            feedback: What a test, a user or the environment said of the result.
            episode: What recall returned for this task.
        """
        with _named_errors():
            if (transcript is None) == (turns is None):
                got = "neither" if transcript is None else "both"
                raise ValueError(f"Expected either transcript or turns, got {got}")
            # Without a recall it is an episode that saw no advice, of nobody's choice.
            ending = self._find(episode, task) or self._manager.episode(task, guided=True)
            if ending.task != task:
                raise ValueError(
                    f"Expected the task that episode {ending.id} was recalled for,"
                    f" {ending.task!r}, got {task!r}"
                )
            if isinstance(transcript, str):
                ending.record(task, transcript)
            elif transcript is not None:
                ending.extend(transcript)
            for turn in turns or ():
                ending.record(turn.observation, turn.action, turn.reward)
            ended = await ending.afinish(success=success, score=score, feedback=feedback)
            self._running.pop(ending.id, None)
            if ending.error is not None:
                raise ExperientialError(f"The episode could not be recorded: {ending.error}")
        return Recorded(episode=ended.id, credited=len(ended.uses))

    def _find(self, episode: str | None, task: str | None = None) -> Episode | None:
        """Return the running episode with this id, or the newest one of a single client."""
        if episode is not None:
            if episode not in self._running:
                raise ValueError(
                    f"Expected the episode that recall named and that is not recorded yet, got"
                    f" {episode!r}; call recall, or leave episode out"
                )
            return self._running[episode]
        newest = reversed(self._running.values()) if self._one_client else iter(())
        return next((one for one in newest if task is None or one.task == task), None)
