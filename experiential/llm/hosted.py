"""Send requests to a hosted service: retries, a limit of what is in flight, and a budget.

`OpenAILLM` and `HostedEmbedder` share it. A request ends in a successful response or in an error
whose ``outage`` says whether the service, and not the request, is at fault.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from experiential.errors import BackendError, BudgetError, ContextError
from experiential.types import Usage, whole

NEUTRAL = frozenset(
    "price max_cost max_total_tokens timeout max_retries max_concurrency backoff".split()
)
"""Options that change no answer, so that results may be gone on with under others."""
OPENAI_URL = "https://api.openai.com/v1"
SHOWN = 200
"""Characters of a server's words in an error."""
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, *range(520, 531)})  # 52x: proxies
_LASTING = frozenset({401, 403, 404})
_SPENT = re.compile(r"insufficient_quota|billing_hard_limit|credit balance|insufficient credits")
_TOO_LONG = re.compile(
    r"context_length_exceeded|exceed_context_size|(maximum|available|model'?s) context"
    r"|context limit|maximum model length|(prompt|input) is too long|maximum number of tokens"
)
"""Words of OpenAI, vLLM, SGLang, llama.cpp, Anthropic and Gemini for a prompt that does not fit."""
_MAX_BACKOFF = 30.0

Send = Callable[[httpx.AsyncClient, dict[str, Any]], Awaitable[httpx.Response]]


def as_json(body: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a POST of JSON; halves of characters, as models write them, go."""
    text = whole(json.dumps(body, ensure_ascii=False))
    return {"content": text.encode(), "headers": {"content-type": "application/json"}}


class HostedClient:
    """Post JSON to one address of an OpenAI-compatible server.

    Args:
        route: behind the base address, such as ``/chat/completions``.
        name: what errors call the model.
        base_url: ``$OPENAI_BASE_URL`` or OpenAI's own by default.
        api_key: ``$OPENAI_API_KEY`` by default, ``""`` for none.
        timeout, max_retries, max_concurrency, backoff, price, max_cost, max_total_tokens: as in
            `OpenAILLM`.

    Attributes:
        url: where requests go.
        spent: tokens and cost of all replies so far; None where no reply has reported them.
    """

    def __init__(
        self,
        route: str,
        name: str,
        *,
        base_url: str | None,
        api_key: str | None,
        timeout: float,
        max_retries: int,
        max_concurrency: int,
        backoff: float,
        price: Sequence[float] | None,
        max_cost: float | None,
        max_total_tokens: int | None,
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
        base = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        self.name, self.url = name, base.rstrip("/") + route
        self._key = key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout, self._max_retries, self._backoff = timeout, max_retries, backoff
        self._max_concurrency = max_concurrency
        self._price, self._max_cost, self._max_total_tokens = price, max_cost, max_total_tokens
        self._untold = False  # a reply did not say what a limit counts
        self._spending = threading.Lock()
        self.spent = Usage()
        # connections and semaphores belong to the event loop that made them
        self._sessions: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    async def post(
        self,
        make_body: Callable[[], dict[str, Any]],
        send: Send | None = None,
        amend: Callable[[httpx.Response, dict[str, Any]], bool] | None = None,
    ) -> httpx.Response:
        """Return the first successful response.

        Args:
            make_body: makes the body of each attempt.
            send: makes an attempt otherwise than by one POST.
            amend: called with a refused response and its body; True repeats the request at once.

        Raises:
            BudgetError: the account's quota or this client's budget is spent.
            BackendError: any other lasting failure, with the server's words.
        """
        loop, most = asyncio.get_running_loop(), self._max_concurrency
        if loop not in self._sessions:
            limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
            session = httpx.AsyncClient(timeout=self._timeout, headers=self._headers, limits=limits)
            self._sessions[loop] = session, asyncio.Semaphore(most)
        client, slots = self._sessions[loop]
        async with slots:
            self._check_budget()
            attempt = 0
            while True:
                body, last = make_body(), attempt == self._max_retries
                pause = min(self._backoff * 2**attempt, _MAX_BACKOFF) * random.uniform(0.5, 1.0)
                try:
                    if send is None:
                        response = await client.post(self.url, **as_json(body))
                    else:
                        response = await send(client, body)
                except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                    raise BackendError(
                        f"Expected the address of a server, got {self.url}: {error}",
                        outage="lasting",
                    ) from error
                except httpx.RequestError as error:  # a body that cannot be decoded, too
                    if last:
                        raise BackendError(
                            f"Expected an answer from {self.url} within {self._timeout:g} s, "
                            f"got {type(error).__name__} in {attempt + 1} attempts",
                            outage="passing",
                        ) from error
                else:
                    if response.is_success:
                        return response
                    status, said = response.status_code, response.text
                    if self._key:  # some servers repeat it
                        said = said.replace(self._key, "***")
                    refused = f"got {status}: {said[:SHOWN]}"
                    if status == 402 or _SPENT.search(said.lower()):
                        raise BudgetError(
                            f"Expected an account with quota at {self.url}, {refused}",
                            outage="lasting",
                        )
                    if amend is not None and amend(response, body):
                        continue
                    if status in (400, 413, 422, 500) and _TOO_LONG.search(said.lower()):
                        raise ContextError(
                            f"Expected a prompt that fits the context at {self.url}, {refused}"
                        )
                    if last or status not in _RETRIED:
                        outage = "passing" if status in _RETRIED else None
                        raise BackendError(
                            f"Expected status 200 from {self.url}, {refused}",
                            outage="lasting" if status in _LASTING else outage,
                        )
                    asked: str = response.headers.get("retry-after", "")
                    if asked.replace(".", "", 1).isdecimal():
                        pause = min(float(asked), _MAX_BACKOFF)
                await asyncio.sleep(pause)
                attempt += 1

    def charge(self, reported: Any) -> Usage | None:
        """Add the ``usage`` of a reply to ``spent`` and return it; None if it cannot be read."""
        usage = Usage()
        try:
            cost = reported.get("cost")
            usage = Usage(
                prompt_tokens=reported.get("prompt_tokens"),
                completion_tokens=reported.get("completion_tokens"),
                cost=cost if isinstance(cost, int | float) else None,
            )
        except (AttributeError, ValueError):  # no table, or one of impossible numbers
            pass
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        counted = prompt is not None or completion is not None
        if counted and usage.cost is None and self._price is not None:
            cost = ((prompt or 0) * self._price[0] + (completion or 0) * self._price[1]) / 1e6
            usage = usage.model_copy(update={"cost": cost})
        with self._spending:
            self.spent += usage
            uncounted = self._max_total_tokens is not None and not counted
            self._untold |= uncounted or (self._max_cost is not None and usage.cost is None)
        return None if usage == Usage() else usage

    def close(self) -> None:
        """Drop the connections; each is closed when its event loop lets go of it."""
        self._sessions.clear()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        if session := self._sessions.pop(asyncio.get_running_loop(), None):
            await session[0].aclose()

    def _check_budget(self) -> None:
        tokens = (self.spent.prompt_tokens or 0) + (self.spent.completion_tokens or 0)
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
        if self._untold:
            raise BudgetError(
                f"Expected {self.name!r} to report what each reply takes, to keep a limit, got"
                " a reply without; pass price= if tokens are reported, else leave the limit out"
            )
