"""Generate at any server that speaks the OpenAI chat-completion protocol, over plain HTTP."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import weakref
from collections.abc import Sequence
from typing import Any, cast

import httpx

from experiential.errors import BackendError
from experiential.llm.base import LLM, Prompt, SamplingParams, is_token_prompt
from experiential.types import FinishReason, Generation, Message

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_MAX_BACKOFF = 30.0
_SHOWN = 200


class OpenAILLM(LLM):
    """Send messages to ``{base_url}/chat/completions`` and read the first choice.

    Text only: token ids and their log-probabilities are filled in when the server returns token ids
    (vLLM does with ``extra_body={"return_token_ids": True}``) with ``logprobs=True``. Stop strings
    are asked for, and put back at the end of the text where the server says which one it cut.

    Args:
        model: the model's name at the server.
        base_url: ends in ``/v1`` for most servers; ``$OPENAI_BASE_URL`` or OpenAI's own by default.
        api_key: ``$OPENAI_API_KEY`` by default; local servers need none.
        timeout: seconds for one attempt.
        max_retries: further attempts after 429, 5xx, a time-out or a broken connection, with
            growing pauses.
        extra_body: merged into every request.
        supports_choices: the server knows ``structured_outputs: {"choice": [...]}`` (vLLM); without
            it a request with choices is refused.
        logprobs: ask for the log-probability of each token.
        max_concurrency: requests in flight at one time, per event loop.
        backoff: seconds before the first retry; doubled for each next one.
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
        supports_choices: bool = False,
        logprobs: bool = False,
        max_concurrency: int = 64,
        backoff: float = 0.5,
        name: str | None = None,
    ) -> None:
        if timeout <= 0 or max_retries < 0 or max_concurrency <= 0:
            raise ValueError(
                f"Expected timeout > 0, max_retries >= 0 and max_concurrency > 0, got {timeout},"
                f" {max_retries} and {max_concurrency}"
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
        self._supports_choices = supports_choices
        self._logprobs = logprobs
        self._max_concurrency = max_concurrency
        self._backoff = backoff
        # connections and semaphores belong to the event loop that made them
        self._sessions: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response at the server."""
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
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [dict(message) for message in cast("Sequence[Message]", prompt)],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
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
        loop, most = asyncio.get_running_loop(), self._max_concurrency
        if loop not in self._sessions:
            limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
            client = httpx.AsyncClient(timeout=self._timeout, headers=self._headers, limits=limits)
            self._sessions[loop] = client, asyncio.Semaphore(most)
        client, slots = self._sessions[loop]
        async with slots:
            response = await self._post(client, {**body, **self._extra})
        return self._parse(response, sampling)

    def close(self) -> None:
        """Drop the connections; each is closed when its event loop lets go of it."""
        self._sessions.clear()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        if session := self._sessions.pop(asyncio.get_running_loop(), None):
            await session[0].aclose()

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        for attempt in itertools.count():
            last = attempt == self._max_retries
            pause = min(self._backoff * 2**attempt, _MAX_BACKOFF) * random.uniform(0.5, 1.0)
            try:
                response = await client.post(self._url, json=body)
            except httpx.TransportError as error:
                if last:
                    raise BackendError(
                        f"Expected an answer from {self._url} within {self._timeout:g} s, "
                        f"got {type(error).__name__} in {attempt + 1} attempts"
                    ) from error
            else:
                if response.is_success:
                    return response
                if last or response.status_code not in _RETRIED:
                    raise BackendError(
                        f"Expected status 200 from {self._url}, got {response.status_code}:"
                        f" {response.text[:_SHOWN]}"
                    )
                asked: str = response.headers.get("retry-after", "")
                if asked.replace(".", "", 1).isdigit():
                    pause = min(float(asked), _MAX_BACKOFF)
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def _parse(self, response: httpx.Response, sampling: SamplingParams) -> Generation:
        try:
            reply: Any = response.json()
            choice: Any = reply["choices"][0]
            text: str = choice["message"]["content"] or ""
            cut = choice.get("stop_reason")
            if isinstance(cut, str) and cut in sampling.stop and not text.endswith(cut):
                text += cut
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
            # ids without a log-probability each cannot be trained on, so they are left out
            complete = len(response_ids) == len(logprobs)
            finish = FinishReason.STOP
            if sampling.choices is not None:
                finish = FinishReason.CHOICE
            elif choice.get("finish_reason") == "length":
                finish = FinishReason.LENGTH
            return Generation(
                text=text,
                prompt_ids=tuple(prompt_ids or ()) if complete else (),
                response_ids=response_ids if complete else (),
                logprobs=logprobs,
                policy=self.name,
                policy_version=self.version,
                finish_reason=finish,
                temperature=sampling.temperature or 1.0,
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise BackendError(
                f"Expected a chat completion from {self._url}, got status {response.status_code}:"
                f" {response.text[:_SHOWN]}"
            ) from error
