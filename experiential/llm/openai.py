"""Generate at any server that speaks the OpenAI chat-completion protocol, over plain HTTP.

A hosted model fails in more ways than a local one. Whatever comes back becomes the answer, or an
error with a name: `NoAnswerError` for a reply that holds no answer, `BudgetError` for money or
tokens that are spent, `BackendError` for the rest. An empty text is never an answer.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

import httpx

from experiential.errors import BackendError, NoAnswerError
from experiential.llm.base import LLM, Prompt, SamplingParams, cut_after_stop, is_token_prompt
from experiential.llm.hosted import SHOWN, HostedClient, as_json
from experiential.types import FinishReason, Generation, Message, ToolCall, Usage, whole

_LOGGER = logging.getLogger(__name__)
_DROPPABLE = ("temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "response_format")
_REFUSING = re.compile(r"unsupported|not supported|unrecognized|unknown|unexpected|extra inputs")
_NO_TOOLS = re.compile(
    r"(unsupported|support|unrecognized|unknown|extra inputs|requires|no endpoints).*\btool|"
    r"\btool.*(unsupported|support|unrecognized|unknown|extra inputs|requires|not permitted)",
    re.DOTALL,
)


class OpenAILLM(LLM):
    """Send messages to ``{base_url}/chat/completions`` and read the first choice.

    Text only: token ids and their log-probabilities are filled in when the server returns token ids
    (vLLM does with ``extra_body={"return_token_ids": True}``) with ``logprobs=True``. Stop strings
    are asked for, and put back at the end of the text where the server says which one it cut.

    A parameter that the server refuses by name (``temperature`` of a reasoning model) is left out
    of this and all later requests, with one warning; ``max_tokens`` becomes
    ``max_completion_tokens``. Text behind a stop string is cut here where the server does not.
    Tools are offered as the protocol has it, until the server refuses them: then ``supports_tools``
    becomes False, with one warning, and requests go without.

    Args:
        model: the model's name at the server.
        base_url: ends in ``/v1`` for most servers; ``$OPENAI_BASE_URL`` or OpenAI's own by default.
        api_key: ``$OPENAI_API_KEY`` by default; local servers need none.
        timeout: seconds that an attempt waits for the server's next bytes.
        max_retries: further attempts after 429, 5xx, a time-out or a broken connection, with
            growing pauses. A spent quota is reported at once.
        extra_body: merged into every request.
        omit: parameters never sent, e.g. ``["temperature", "stop"]``.
        supports_choices: the server knows ``structured_outputs: {"choice": [...]}`` (vLLM); without
            it a request with choices is refused.
        logprobs: ask for the log-probability of each token.
        max_concurrency: requests in flight at one time, per event loop.
        backoff: seconds before the first retry; doubled for each next one.
        on_text: stream replies, and call this with each piece of text as it arrives. After a
            broken connection the retry starts again from the first piece.
        price: dollars for a million prompt tokens and a million response tokens. A cost that the
            server reports comes first.
        max_cost: dollars after which no request is sent any more (`BudgetError`). Requests in
            flight at that moment are still paid for.
        max_total_tokens: the same for prompt and response tokens together.

    Attributes:
        spent: tokens and cost of all replies so far, those without an answer included; None where
            no reply has reported them.
    """

    supports_tools = True

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 2,
        extra_body: dict[str, Any] | None = None,
        omit: Iterable[str] = (),
        supports_choices: bool = False,
        logprobs: bool = False,
        max_concurrency: int = 64,
        backoff: float = 0.5,
        on_text: Callable[[str], object] | None = None,
        price: Sequence[float] | None = None,
        max_cost: float | None = None,
        max_total_tokens: int | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or model
        self._model = model
        self._client = HostedClient(
            "/chat/completions",
            self.name,
            base_url=base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            max_concurrency=max_concurrency,
            backoff=backoff,
            price=price,
            max_cost=max_cost,
            max_total_tokens=max_total_tokens,
        )
        self._url = self._client.url
        self._extra = dict(extra_body or {})
        self._omitted = set(omit)
        self._max_tokens_name = "max_tokens"
        self.supports_choices = supports_choices
        self._logprobs = logprobs
        self._on_text = on_text

    @property
    def spent(self) -> Usage:
        """Return tokens and cost of all replies so far."""
        return self._client.spent

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response at the server.

        Raises:
            NoAnswerError: the reply is refused, filtered, empty, nothing but reasoning, or the call
                of a tool that was not offered.
            BudgetError: the account's quota or this backend's budget is spent.
            BackendError: any other failure, with the server's words.
        """
        sampling = sampling or SamplingParams()
        if is_token_prompt(prompt):
            raise BackendError(
                f"Expected chat messages for {self.name!r}, got token ids; this backend is text"
                " only"
            )
        if sampling.choices is not None and not self.supports_choices:
            raise BackendError(
                f"Expected a backend that can restrict answers to choices, got {self.name!r};"
                " pass supports_choices=True"
            )
        messages = cast("Sequence[Message]", prompt)
        response = await self._client.post(
            lambda: self._body(messages, sampling),
            None if self._on_text is None else self._stream,
            self._drop_refused,
        )
        return self._parse(response, sampling)

    def close(self) -> None:
        """Drop the connections; each is closed when its event loop lets go of it."""
        self._client.close()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._client.aclose()

    def _body(self, messages: Sequence[Message], sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [self._sent(message) for message in messages],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self._max_tokens_name: sampling.max_tokens,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if self._logprobs:
            body["logprobs"] = True
        if sampling.json_schema is not None:
            schema = {"name": "reply", "schema": sampling.json_schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if (pattern := sampling.open_choices()) is not None:
            body["structured_outputs"] = {"regex": pattern}
        elif sampling.choices is not None:
            body["structured_outputs"] = {"choice": list(sampling.choices)}
        if sampling.tools and self.supports_tools:
            body["tools"] = list(sampling.tools)
        if self._on_text is not None:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return {key: body[key] for key in body if key not in self._omitted} | self._extra

    def _sent(self, message: Message) -> dict[str, Any]:
        """Return a message as this server takes it: calls as text where it knows no tools."""
        sent: dict[str, Any] = dict(message)
        calls = message.get("tool_calls")
        if self.supports_tools:
            return sent | {"content": message["content"] or None} if calls else sent
        written = [json.dumps(call["function"], ensure_ascii=False) for call in calls or ()]
        role = "user" if message["role"] == "tool" else message["role"]
        return {"role": role, "content": "\n".join(filter(None, [message["content"], *written]))}

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        """Put the pieces of a streamed reply together; a stream that breaks off is an error."""
        reply: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        message: dict[str, Any] = {}
        choice: dict[str, Any] = {"message": message, "finish_reason": None}
        async with client.stream("POST", self._url, **as_json(body)) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                await response.aread()  # an error, or a server that does not stream
                return response
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                piece: dict[str, Any] = {}
                with suppress(ValueError, RecursionError):
                    piece = cast("dict[str, Any]", json.loads(data))
                if "error" in piece or not piece:
                    return httpx.Response(500, text=data)
                try:
                    self._add_piece(piece, reply, choice, calls)
                except (AttributeError, TypeError, KeyError):  # no piece of a chat completion
                    return httpx.Response(500, text=data)
        if choice["finish_reason"] is None:
            raise httpx.RemoteProtocolError("the stream ended without a finish_reason")
        message.setdefault("content", None)
        if calls:
            message["tool_calls"] = calls
        return httpx.Response(200, json={**reply, "choices": [choice]})

    def _add_piece(
        self,
        piece: dict[str, Any],
        reply: dict[str, Any],
        choice: dict[str, Any],
        calls: list[dict[str, Any]],
    ) -> None:
        """Add one event of a stream to the reply, its choice and its tool calls."""
        message: dict[str, Any] = choice["message"]
        reply["usage"] = piece.get("usage") or reply.get("usage")
        parts: list[dict[str, Any]] = piece.get("choices") or []
        for part in parts:
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
            delta: dict[str, Any] = part.get("delta") or {}
            pieces: list[dict[str, Any]] = delta.pop("tool_calls", None) or []
            for said in pieces:
                function: dict[str, Any] = said.get("function") or {}
                # by its number; where a server gives none, a name begins a call
                index = said.get("index")
                known = [call for call in calls if call["index"] == index]
                if index is None:
                    known = [] if function.get("name") else calls[-1:]
                call: dict[str, Any] = {"index": index, "id": None, "function": {}}
                if known:
                    call = known[0]
                else:
                    calls.append(call)
                call["id"] = said.get("id") or call["id"]
                for key, value in function.items():
                    joins = isinstance(value, str) and key in call["function"]
                    call["function"][key] = call["function"][key] + value if joins else value
            for key, value in delta.items():
                if isinstance(value, str) and key != "role":
                    message[key] = message.get(key, "") + value
                elif value:
                    message[key] = value
                if key == "content" and value and self._on_text is not None:
                    self._on_text(value)

    def _drop_refused(self, response: httpx.Response, body: dict[str, Any]) -> bool:
        """Stop sending the parameter or tools that an error names; return whether it names any."""
        said, status = response.text.lower(), response.status_code
        if status in (400, 404, 422, 500, 501) and "tools" in body and _NO_TOOLS.search(said):
            if self.supports_tools:  # else this request was in flight when another was refused
                _LOGGER.warning(
                    "%s refuses tools; they are not offered from now on, and a model that wants one"
                    " writes its call as text: %s",
                    self.name,
                    response.text[:SHOWN],
                )
            self.supports_tools = False
            return "tools" not in self._extra
        try:
            error: Any = response.json()
            error = error.get("error", error)
            code, param = str(error.get("code")), error.get("param")
        except (ValueError, AttributeError, RecursionError):
            code, param = "", None
        if status not in (400, 422) or not (
            code.startswith("unsupported") or _REFUSING.search(said)
        ):
            return False
        named = [key for key in _DROPPABLE if key in body and re.search(rf"\b{key}\b", said)]
        dropped = param if param in body and param in _DROPPABLE else next(iter(named), None)
        if dropped is None or dropped in self._extra:
            return False
        if dropped in self._omitted:
            return True  # this request was in flight when another one was refused
        self._omitted.add(dropped)
        if dropped == "max_tokens":
            self._max_tokens_name = "max_completion_tokens"
        _LOGGER.warning(
            "%s refuses %s; it is %s from now on (pass omit=[%r] to say so beforehand): %s",
            self.name,
            dropped,
            "sent as max_completion_tokens" if dropped == "max_tokens" else "left out",
            dropped,
            response.text[:SHOWN],
        )
        return True

    def _parse(self, response: httpx.Response, sampling: SamplingParams) -> Generation:
        try:
            reply: Any = response.json()
            usage = self._client.charge(reply.get("usage"))
            choice: Any = reply["choices"][0]
            text, calls = self._answer(choice, sampling, usage)
            cut = choice.get("stop_reason")
            if isinstance(cut, str) and cut in sampling.stop and not text.endswith(cut):
                text += cut
            whole = text
            if "stop" in self._omitted:
                text = cut_after_stop(text, sampling.stop)
            cut_short = choice.get("finish_reason") == "length" and text == whole
            if not sampling.permits(text) and not (sampling.pattern and cut_short):
                wanted = f"one of the choices {list(sampling.choices or ())}"
                wanted += f" or {sampling.pattern!r}" if sampling.pattern else ""
                raise BackendError(f"Expected {wanted} from {self._url}, got {text[:SHOWN]!r}")
            listed: Any = choice.get("logprobs")
            listed = listed.get("content") if listed else None
            logprobs = tuple(float(entry["logprob"]) for entry in listed or ())
            response_ids = tuple(choice.get("token_ids") or ())
            prompt_ids = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
            # ids without a log-probability each, or of text that was cut, cannot be trained on
            complete = len(response_ids) == len(logprobs) and text == whole
            finish = FinishReason.STOP
            if sampling.choices is not None and sampling.permits(text):
                finish = FinishReason.CHOICE
            elif cut_short:
                finish = FinishReason.LENGTH
            return Generation(
                text=text,
                prompt_ids=tuple(prompt_ids or ()) if complete else (),
                response_ids=response_ids if complete else (),
                logprobs=logprobs if text == whole else (),
                policy=self.name,
                policy_version=self.version,
                finish_reason=finish,
                temperature=sampling.temperature or 1.0,
                usage=usage,
                tool_calls=calls,
            )
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise BackendError(
                f"Expected a chat completion from {self._url}, got status {response.status_code}:"
                f" {response.text[:SHOWN]}"
            ) from error

    def _answer(
        self, choice: dict[str, Any], sampling: SamplingParams, usage: Usage | None
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Return text and tool calls of a choice; NoAnswerError for one that has neither."""
        message: dict[str, Any] = choice["message"]
        asked: list[dict[str, Any]] = list(message.get("tool_calls") or [])
        if function := message.get("function_call"):  # the old form
            asked.append({"function": function})
        content = message.get("content") if asked else message["content"]
        finish = choice.get("finish_reason")
        if isinstance(content, list):  # parts, as some servers answer
            parts = cast("list[dict[str, Any]]", content)
            content = "".join(part["text"] for part in parts if "text" in part)
        elif content is None:
            content = ""
        elif not isinstance(content, str):
            raise TypeError(f"content is {type(content).__name__}")
        content = whole(content)
        offered = {tool["function"]["name"] for tool in sampling.tools if self.supports_tools}
        calls: list[ToolCall] = []
        for number, call in enumerate(asked):
            name, given = call["function"].get("name"), call["function"].get("arguments")
            text = given if isinstance(given, str) else json.dumps(given or {})
            if name in offered:
                calls.append(
                    ToolCall(id=call.get("id") or f"call_{number}", name=name, arguments=text)
                )
        unknown = [call["function"].get("name") for call in asked]
        unknown = [name for name in unknown if name not in offered]
        thinking = message.get("reasoning_content") or message.get("reasoning")
        unclosed = content.lower().rfind("<think>") > content.lower().rfind("</think>")
        long = "; raise max_tokens" if finish == "length" else ""
        problem = None
        if finish == "content_filter":
            problem = "one that its content filter stopped"
        elif finish == "error":  # as OpenRouter says of a model that broke off
            problem = f"one that broke off: {content[-SHOWN:]!r}"
        elif calls:
            if long and not calls[-1].arguments.rstrip().endswith("}"):
                problem = f"a call of the tool {calls[-1].name!r} that was cut off{long}"
            elif unknown:
                _LOGGER.warning("%s called tools that were not offered: %s", self.name, unknown)
        elif unclosed:
            problem = f"reasoning that does not end{long}: {content[-SHOWN:]!r}"
        elif content.lower().rpartition("</think>")[2].strip():
            pass
        elif refusal := message.get("refusal"):
            problem = f"a refusal: {str(refusal)[:SHOWN]}"
        elif unknown:
            problem = f"a call of the tool {unknown[0]!r}, which was not offered"
        elif thinking := thinking or content.strip():
            problem = f"reasoning alone{long}: {str(thinking)[-SHOWN:]!r}"
        else:
            problem = f"an empty text (finish_reason {finish!r}){long}"
        if problem is not None:
            raise NoAnswerError(f"Expected an answer from {self.name!r}, got {problem}", usage)
        return content, tuple(calls)
