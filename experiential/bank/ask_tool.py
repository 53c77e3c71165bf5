"""Let the model of an agent ask the bank in the middle of an episode: search_and_ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from experiential.bank.manager_like import AsyncManagerLike, ManagerLike
from experiential.bank.messages import json_fields
from experiential.bank.text import numbered
from experiential.sync import attempted, awaited
from experiential.types import Answer, Experience, Hit, How, Trajectory

_FORM = 'as {"query": "…"}'


class AskingEpisode(Protocol):
    """Declare the part of `Episode` that its tool reads and credits."""

    guided: bool
    manager: ManagerLike
    trajectory: Trajectory | None
    answers: list[str]

    def scope(self) -> dict[str, Any]:
        """Return the options of a search."""
        ...

    def use(self, hits: Sequence[Hit], how: How) -> None:
        """Credit hits."""
        ...

    def credit(self, answer: Answer | Exception) -> Answer | None:
        """Credit an answer."""
        ...

    def fail(self, error: Exception) -> str:
        """Note a failure of the bank."""
        ...


class Reply(NamedTuple):
    """Hold what an agent's question brought: the text to show, the hits, why the bank failed."""

    text: str
    hits: Sequence[Hit] = ()
    error: str | None = None
    is_refused: bool = False

    @property
    def block(self) -> str:
        """Return the text between the tags that mark it as data."""
        return f"<search_result>\n{self.text}\n</search_result>"


class AskTool:
    """Answer the questions of the model in one episode: search_and_ask as a tool.

    ``schema`` is the OpenAI form, ``mcp`` the form of the Model Context Protocol. Call the object
    with the arguments of a tool call, as JSON text or a dict; the result is the text to send back:
    the best entry, refined for the question and escaped, or why there is none. It never raises for
    what the model wrote. Each answer is credited to the episode as a use.

    >>> from experiential.bank.ask_tool import AskTool
    >>> tool = AskTool(None, max_calls=1)
    >>> tool.schema["function"]["name"], tool.mcp["inputSchema"]["required"]
    ('search_and_ask', ['query'])

    Args:
        episode: the running episode; may be set later.
        name: of the tool.
        max_calls: questions answered per episode; a free episode gets a fixed refusal.
        show: gives the text of an entry: the ``k`` best entries are then shown as they are, and no
            model refines one.
        k: entries shown then; None takes the manager's ``retrieval.k``.

    Attributes:
        calls: questions answered in this episode.
    """

    def __init__(
        self,
        episode: AskingEpisode | None,
        *,
        name: str = "search_and_ask",
        max_calls: int = 2,
        show: Callable[[Experience], str] | None = None,
        k: int | None = None,
    ) -> None:
        if max_calls < 1:
            raise ValueError(f"Expected max_calls to be positive, got {max_calls!r}")
        self.episode, self.name, self.max_calls, self.calls = episode, name, max_calls, 0
        self._show, self._k = show, k

    @property
    def mcp(self) -> dict[str, Any]:
        """Return name, description and input schema, as an MCP server lists them."""
        asks = "Ask what was learnt in earlier episodes."
        wants = "Your situation, what you tried, and what you need to know."
        limits = f"At most {self.max_calls} answers per episode; costs no move."
        query = {"query": {"type": "string", "description": wants}}
        given: dict[str, Any] = {"type": "object", "properties": query, "required": ["query"]}
        given["additionalProperties"] = False
        return {"name": self.name, "description": f"{asks} {limits}", "inputSchema": given}

    @property
    def schema(self) -> dict[str, Any]:
        """Return the tool as the OpenAI chat API takes it."""
        said = self.mcp
        function = {"name": said["name"], "description": said["description"]}
        return {"type": "function", "function": function | {"parameters": said["inputSchema"]}}

    @property
    def calls_left(self) -> int:
        """Return how many questions would still be answered."""
        is_guided = self.episode is not None and self.episode.guided
        return self.max_calls - self.calls if is_guided else 0

    def __call__(self, arguments: str | Mapping[str, Any]) -> str:
        """Return the text that answers a tool call with these arguments."""
        return self.reply(query_in(arguments)).block

    async def acall(self, arguments: str | Mapping[str, Any]) -> str:
        """Do as a call without blocking the event loop."""
        episode = self._asks(query := query_in(arguments))
        if isinstance(episode, Reply):
            return episode.block
        manager, scope = cast("AsyncManagerLike", episode.manager), episode.scope()
        if self._show is None:
            found = await awaited(manager.aask(query, **scope))
        else:
            found = await awaited(manager.asearch(query, k=self._k, **scope))
        return self._replied(episode, found).block

    def reply(self, query: str, form: str = _FORM) -> Reply:
        """Answer a question, or refuse it in words, of which ``form`` says how to ask."""
        episode = self._asks(query, form)
        if isinstance(episode, Reply):
            return episode
        manager, scope = episode.manager, episode.scope()
        if self._show is None:
            found = attempted(manager.ask, query, **scope)
        else:
            found = attempted(manager.search, query, k=self._k, **scope)
        return self._replied(episode, found)

    def _asks(self, query: str, form: str = _FORM) -> AskingEpisode | Reply:
        """Count a question and return the episode that asks it, or else a refusal."""
        refusal, episode = "", self.episode
        if episode is None or episode.trajectory is not None:
            return Reply("The episode is over.", is_refused=True)
        if not episode.guided:
            refusal = "not available"
        elif not query:
            refusal = f"The question is empty. Write it {form}."
        elif self.calls >= self.max_calls:
            refusal = f"No calls left: all {self.max_calls} of this episode are used."
            refusal += " Continue with an action."
        if refusal:
            return Reply(refusal, is_refused=True)
        self.calls += 1
        return episode

    def _replied(self, episode: AskingEpisode, found: Answer | list[Hit] | Exception) -> Reply:
        """Credit what was found and show it."""
        if isinstance(found, Exception):
            return Reply("The search failed.", error=episode.fail(found))
        if isinstance(found, Answer):
            episode.credit(found)
            hits = [] if found.hit is None else [found.hit]
            texts = [] if found.text is None else [found.text]
        else:
            assert self._show is not None
            episode.use(found, "search_and_ask")
            hits, texts = found, [self._show(hit.experience) for hit in found]
        reply = Reply(numbered(texts) if texts else "Nothing found.", hits)
        episode.answers.append(reply.block)
        return reply


def query_in(arguments: object) -> str:
    """Return the question in the arguments of a tool call; empty if there is none."""
    return str(json_fields(arguments).get("query") or "").strip()
