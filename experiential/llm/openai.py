"""Generate at any server that speaks the OpenAI chat-completion protocol, over plain HTTP.

A hosted model fails in more ways than a local one. Whatever comes back becomes the answer, or an
error with a name: `NoAnswerError` for a reply that holds no answer, `BudgetError` for money or
tokens that are spent, `BackendError` for the rest. An empty text is never an answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

import httpx

from experiential.errors import BackendError, BudgetError, NoAnswerError
from experiential.llm.base import LLM, Prompt, SamplingParams, cut_after_stop, is_token_prompt
from experiential.types import FinishReason, Generation, Message, Usage

_LOGGER = logging.getLogger(__name__)
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_SPENT = re.compile(r"insufficient_quota|billing_hard_limit|credit balance|insufficient credits")
_DROPPABLE = ("temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "response_format")
_REFUSING = re.compile(r"unsupported|not supported|unrecognized|unknown|unexpected|extra inputs")
_MAX_BACKOFF = 30.0
_SHOWN = 200


class OpenAILLM(LLM):
    """Send messages to ``{base_url}/chat/completions`` and read the first choice.

    Text only: token ids and their log-probabilities are filled in when the server returns token ids
    (vLLM does with ``extra_body={"return_token_ids": True}``) with ``logprobs=True``. Stop strings
    are asked for, and put back at the end of the text where the server says which one it cut.

    A parameter that the server refuses by name (``temperature`` of a reasoning model) is left out
    of this and all later requests, with one warning; ``max_tokens`` becomes
    ``max_completion_tokens``. Text behind a stop string is cut here where the server does not.

    Args:
        model: the model's name at the server.
        base_url: ends in ``/v1`` for most servers; ``$OPENAI_BASE_URL`` or OpenAI's own by default.
        api_key: ``$OPENAI_API_KEY`` by default; local servers need none.
        timeout: seconds for one attempt.
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
        spent: tokens and cost of all replies so far, those without an answer included.
    """

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
        if timeout <= 0 or max_retries < 0 or max_concurrency <= 0:
            raise ValueError(
                f"Expected timeout > 0, max_retries >= 0 and max_concurrency > 0, got {timeout},"
                f" {max_retries} and {max_concurrency}"
            )
        if price is not None and (len(price) != 2 or min(price) < 0):
            raise ValueError(
                "Expected price to be two numbers, dollars for a million prompt tokens and for a"
                f" million response tokens, got {price!r}"
            )
        self.name = name or model
        self._model = model
        base = base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        self._url = base.rstrip("/") + "/chat/completions"
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = timeout
        self._max_retries = max_retries
        self._extra = dict(extra_body or {})
        self._omitted = set(omit)
        self._max_tokens_name = "max_tokens"
        self._supports_choices = supports_choices
        self._logprobs = logprobs
        self._max_concurrency = max_concurrency
        self._backoff = backoff
        self._on_text = on_text
        self._price = price
        self._max_cost, self._max_total_tokens = max_cost, max_total_tokens
        self._spending = threading.Lock()
        self.spent = Usage(cost=0.0 if price else None)
        # connections and semaphores belong to the event loop that made them
        self._sessions: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response at the server.

        Raises:
            NoAnswerError: the reply is refused, filtered, empty, a tool call, or nothing but
                reasoning.
            BudgetError: the account's quota or this backend's budget is spent.
            BackendError: any other failure, with the server's words.
        """
        sampling = sampling or SamplingParams()
        if is_token_prompt(prompt):
            raise BackendError(
                f"Expected chat messages for {self.name!r}, got token ids; this backend is text"
                " only"
            )
        if sampling.choices is not None and not self._supports_choices:
            raise BackendError(
                f"Expected a backend that can restrict answers to choices, got {self.name!r};"
                " pass supports_choices=True"
            )
        loop, most = asyncio.get_running_loop(), self._max_concurrency
        if loop not in self._sessions:
            limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
            client = httpx.AsyncClient(timeout=self._timeout, headers=self._headers, limits=limits)
            self._sessions[loop] = client, asyncio.Semaphore(most)
        client, slots = self._sessions[loop]
        async with slots:
            self._check_budget()
            response = await self._post(client, cast("Sequence[Message]", prompt), sampling)
        return self._parse(response, sampling)

    def close(self) -> None:
        """Drop the connections; each is closed when its event loop lets go of it."""
        self._sessions.clear()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        if session := self._sessions.pop(asyncio.get_running_loop(), None):
            await session[0].aclose()

    def _body(self, messages: Sequence[Message], sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [dict(message) for message in messages],
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
        if sampling.choices is not None:
            body["structured_outputs"] = {"choice": list(sampling.choices)}
        if self._on_text is not None:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return {key: body[key] for key in body if key not in self._omitted} | self._extra

    async def _post(
        self, client: httpx.AsyncClient, messages: Sequence[Message], sampling: SamplingParams
    ) -> httpx.Response:
        """Return the first successful response; raise BackendError for a lasting failure."""
        attempt = 0
        while True:
            # a refused parameter is left out of the next body
            body = self._body(messages, sampling)
            last = attempt == self._max_retries
            pause = min(self._backoff * 2**attempt, _MAX_BACKOFF) * random.uniform(0.5, 1.0)
            try:
                if self._on_text is None:
                    response = await client.post(self._url, json=body)
                else:
                    response = await self._stream(client, body, self._on_text)
            except httpx.TransportError as error:
                if last:
                    raise BackendError(
                        f"Expected an answer from {self._url} within {self._timeout:g} s, "
                        f"got {type(error).__name__} in {attempt + 1} attempts"
                    ) from error
            else:
                if response.is_success:
                    return response
                refused = f"got {response.status_code}: {response.text[:_SHOWN]}"
                if response.status_code == 402 or _SPENT.search(response.text.lower()):
                    raise BudgetError(f"Expected an account with quota at {self._url}, {refused}")
                if response.status_code in (400, 422) and self._drop_refused(response, body):
                    continue
                if last or response.status_code not in _RETRIED:
                    raise BackendError(f"Expected status 200 from {self._url}, {refused}")
                asked: str = response.headers.get("retry-after", "")
                if asked.replace(".", "", 1).isdigit():
                    pause = min(float(asked), _MAX_BACKOFF)
            await asyncio.sleep(pause)
            attempt += 1

    async def _stream(
        self, client: httpx.AsyncClient, body: dict[str, Any], on_text: Callable[[str], object]
    ) -> httpx.Response:
        """Put the pieces of a streamed reply together; a stream that breaks off is an error."""
        reply: dict[str, Any] = {}
        message: dict[str, Any] = {}
        choice: dict[str, Any] = {"message": message, "finish_reason": None}
        async with client.stream("POST", self._url, json=body) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                await response.aread()  # an error, or a server that does not stream
                return response
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                piece: dict[str, Any] = {}
                with suppress(ValueError):
                    piece = cast("dict[str, Any]", json.loads(data))
                if "error" in piece or not piece:
                    return httpx.Response(500, text=data)
                reply["usage"] = piece.get("usage") or reply.get("usage")
                parts: list[dict[str, Any]] = piece.get("choices") or []
                for part in parts:
                    choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
                    delta: dict[str, Any] = part.get("delta") or {}
                    for key, value in delta.items():
                        if isinstance(value, str) and key != "role":
                            message[key] = message.get(key, "") + value
                        elif value:
                            message[key] = value
                        if key == "content" and value:
                            on_text(value)
        if choice["finish_reason"] is None:
            raise httpx.RemoteProtocolError("the stream ended without a finish_reason")
        message.setdefault("content", None)
        return httpx.Response(200, json={**reply, "choices": [choice]})

    def _drop_refused(self, response: httpx.Response, body: dict[str, Any]) -> bool:
        """Stop sending the parameter that an error names; return whether there is one."""
        try:
            error: Any = response.json()
            error = error.get("error", error)
            code, param = str(error.get("code")), error.get("param")
        except (ValueError, AttributeError):
            code, param = "", None
        said = response.text.lower()
        if not (code.startswith("unsupported") or _REFUSING.search(said)):
            return False
        named = [key for key in _DROPPABLE if key in body and re.search(rf"\b{key}\b", said)]
        dropped = param if param in body and param in _DROPPABLE else next(iter(named), None)
        if dropped is None or dropped in self._extra:
            return False
        if dropped == "max_tokens":
            self._max_tokens_name = "max_completion_tokens"
        else:
            self._omitted.add(dropped)
        _LOGGER.warning(
            "%s refuses %s; it is %s from now on (pass omit=[%r] to say so beforehand): %s",
            self.name,
            dropped,
            "sent as max_completion_tokens" if dropped == "max_tokens" else "left out",
            dropped,
            response.text[:_SHOWN],
        )
        return True

    def _check_budget(self) -> None:
        tokens = self.spent.prompt_tokens + self.spent.completion_tokens
        if self._max_total_tokens is not None and tokens >= self._max_total_tokens:
            raise BudgetError(
                f"Expected to stay within max_total_tokens={self._max_total_tokens} of"
                f" {self.name!r}, got {tokens} tokens; raise it to go on"
            )
        if self._max_cost is not None and (self.spent.cost or 0.0) >= self._max_cost:
            raise BudgetError(
                f"Expected to stay within max_cost={self._max_cost:g} dollars of {self.name!r},"
                f" got {self.spent.cost:.4g}; raise it to go on"
            )

    def _spend(self, reported: dict[str, Any]) -> Usage:
        """Add what a reply took to ``spent`` and return it."""
        prompt = int(reported.get("prompt_tokens") or 0)
        completion = int(reported.get("completion_tokens") or 0)
        cost = reported.get("cost")
        if not isinstance(cost, int | float):
            cost = None
            if self._price is not None:
                cost = (prompt * self._price[0] + completion * self._price[1]) / 1e6
        usage = Usage(prompt_tokens=prompt, completion_tokens=completion, cost=cost)
        with self._spending:
            self.spent += usage
        return usage

    def _parse(self, response: httpx.Response, sampling: SamplingParams) -> Generation:
        try:
            reply: Any = response.json()
            usage = self._spend(reply.get("usage") or {})
            choice: Any = reply["choices"][0]
            text = self._answer(choice)
            cut = choice.get("stop_reason")
            if isinstance(cut, str) and cut in sampling.stop and not text.endswith(cut):
                text += cut
            whole = text
            if "stop" in self._omitted:
                text = cut_after_stop(text, sampling.stop)
            if sampling.choices is not None and text not in sampling.choices:
                raise BackendError(
                    f"Expected one of the choices {list(sampling.choices)} from {self._url}, got"
                    f" {text[:_SHOWN]!r}"
                )
            listed: Any = choice.get("logprobs")
            listed = listed.get("content") if listed else None
            logprobs = tuple(float(entry["logprob"]) for entry in listed or ())
            response_ids = tuple(choice.get("token_ids") or ())
            prompt_ids = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
            # ids without a log-probability each, or of text that was cut, cannot be trained on
            complete = len(response_ids) == len(logprobs) and text == whole
            finish = FinishReason.STOP
            if sampling.choices is not None:
                finish = FinishReason.CHOICE
            elif choice.get("finish_reason") == "length" and text == whole:
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
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise BackendError(
                f"Expected a chat completion from {self._url}, got status {response.status_code}:"
                f" {response.text[:_SHOWN]}"
            ) from error

    def _answer(self, choice: dict[str, Any]) -> str:
        """Return the text of a choice; NoAnswerError for one that has none."""
        message: dict[str, Any] = choice["message"]
        content, finish = message["content"], choice.get("finish_reason")
        if isinstance(content, list):  # parts, as some servers answer
            parts = cast("list[dict[str, Any]]", content)
            content = "".join(part["text"] for part in parts if "text" in part)
        elif content is None:
            content = ""
        elif not isinstance(content, str):
            raise TypeError(f"content is {type(content).__name__}")
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        call: dict[str, Any] = calls[0]["function"] if calls else message.get("function_call") or {}
        called = call.get("name")
        thinking = message.get("reasoning_content") or message.get("reasoning")
        unclosed = content.lower().rfind("<think>") > content.lower().rfind("</think>")
        long = "; raise max_tokens" if finish == "length" else ""
        problem = None
        if finish == "content_filter":
            problem = "one that its content filter stopped"
        elif unclosed:
            problem = f"reasoning that does not end{long}: {content[-_SHOWN:]!r}"
        elif content.strip():
            pass
        elif refusal := message.get("refusal"):
            problem = f"a refusal: {str(refusal)[:_SHOWN]}"
        elif called:
            problem = f"a call of the tool {called!r}, which was not offered"
        elif thinking:
            problem = f"reasoning alone{long}: {str(thinking)[-_SHOWN:]!r}"
        else:
            problem = f"an empty text (finish_reason {finish!r}){long}"
        if problem is not None:
            raise NoAnswerError(f"Expected an answer from {self.name!r}, got {problem}")
        return content
