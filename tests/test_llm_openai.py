"""OpenAILLM against a real local HTTP server: what is sent, what is read, and every way it can
fail.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from experiential.errors import BackendError
from experiential.llm.base import SamplingParams
from experiential.llm.openai import OpenAILLM
from experiential.types import FinishReason
from tests.chat_server import CHAT, Server, completion


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def backend(server: Server, **options: Any) -> OpenAILLM:
    return OpenAILLM("m", base_url=server.url, backoff=0.01, **options)


async def test_sends_every_parameter_and_reads_the_text(server: Server):
    schema = {"type": "object"}
    llm = backend(server, api_key="secret", extra_body={"min_p": 0.1})
    sampling = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        max_tokens=12,
        stop=("</a>",),
        seed=4,
        json_schema=schema,
    )
    generation = await llm.generate(CHAT, sampling)
    assert generation.text == "north" and generation.response_ids == () and generation.policy == "m"
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.requests[0] == {
        "path": "/v1/chat/completions",
        "model": "m",
        "messages": CHAT,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 12,
        "stop": ["</a>"],
        "seed": 4,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "reply", "schema": schema},
        },
        "min_p": 0.1,
    }
    await llm.aclose()


async def test_reads_logprobs_and_token_ids_when_given(server: Server):
    listed = {"content": [{"token": "no", "logprob": -0.5}, {"token": "rth", "logprob": -0.25}]}
    server.replies = [
        (
            200,
            {**completion(logprobs=listed, token_ids=[7, 8]), "prompt_token_ids": [1, 2, 3]},
            {},
            0.0,
        )
    ]
    generation = await backend(
        server, logprobs=True, extra_body={"return_token_ids": True}
    ).generate(CHAT)
    assert (generation.prompt_ids, generation.response_ids, generation.logprobs) == (
        (1, 2, 3),
        (7, 8),
        (-0.5, -0.25),
    )
    assert server.requests[0]["logprobs"] is True


async def test_a_cut_stop_string_is_put_back_and_length_is_reported(server: Server):
    server.replies = [
        (200, completion("a<b", stop_reason="</b>"), {}, 0.0),
        (200, completion("a", finish_reason="length"), {}, 0.0),
    ]
    llm = backend(server)
    assert (await llm.generate(CHAT, SamplingParams(stop=("</b>",)))).text == "a<b</b>"
    assert (await llm.generate(CHAT)).finish_reason is FinishReason.LENGTH


async def test_choices_are_sent_checked_and_refused_without_support(server: Server):
    choices = SamplingParams(choices=("north", "south"))
    generation = await backend(server, supports_choices=True).generate(CHAT, choices)
    assert generation.finish_reason is FinishReason.CHOICE
    assert server.requests[0]["structured_outputs"] == {"choice": ["north", "south"]}
    with pytest.raises(BackendError, match="supports_choices"):
        await backend(server).generate(CHAT, choices)
    server.replies = [(200, completion("up"), {}, 0.0)]
    with pytest.raises(BackendError, match="'up'"):
        await backend(server, supports_choices=True).generate(CHAT, choices)


async def test_choices_beside_a_pattern_are_one_regular_expression(server: Server):
    sampling = SamplingParams(choices=("go north", "say[hi]"), pattern=r"say\[\w+\]")
    server.replies = [
        (200, completion("say[hello]"), {}, 0.0),
        (200, completion("say[hel", finish_reason="length"), {}, 0.0),
        (200, completion("say[]"), {}, 0.0),
    ]
    llm = backend(server, supports_choices=True)
    generation = await llm.generate(CHAT, sampling)
    assert generation.text == "say[hello]" and generation.finish_reason is FinishReason.CHOICE
    wanted = r"(?:say\[\w+\])|go\ north"
    assert server.requests[0]["structured_outputs"] == {"regex": wanted}
    assert (await llm.generate(CHAT, sampling)).finish_reason is FinishReason.LENGTH
    with pytest.raises(BackendError, match="'say\\[\\]'"):
        await llm.generate(CHAT, sampling)


async def test_429_then_200_is_retried_after_the_time_asked_for(server: Server):
    server.replies = [
        (429, {"error": "slow down"}, {"retry-after": "0.05"}, 0.0),
        (503, "busy", {}, 0.0),
        (200, completion(), {}, 0.0),
    ]
    start = time.monotonic()
    assert (await backend(server).generate(CHAT)).text == "north"
    assert len(server.requests) == 3 and time.monotonic() - start >= 0.05


async def test_refusals_are_reported_at_once_with_status_and_body(server: Server):
    server.replies = [(400, "x" * 500, {}, 0.0)]
    with pytest.raises(BackendError, match=r"got 400: x{200}$"):
        await backend(server).generate(CHAT)
    assert len(server.requests) == 1


async def test_lasting_500_is_reported_after_all_retries(server: Server):
    server.replies = [(500, "broken", {}, 0.0)]
    with pytest.raises(BackendError, match="500: broken"):
        await backend(server, max_retries=2).generate(CHAT)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        "{}",
        '{"choices": []}',
        '{"choices": [{"message": null}]}',
        "[1]",
        '{"choices": [{"message": {"content": 3}}]}',
    ],
)
async def test_malformed_replies_are_named(server: Server, body: str):
    server.replies = [(200, body, {}, 0.0)]
    with pytest.raises(BackendError, match="Expected a chat completion"):
        await backend(server).generate(CHAT)


async def test_time_out_is_a_backend_error(server: Server):
    server.replies = [(200, completion(), {}, 0.6)]
    with pytest.raises(BackendError, match=r"within 0.1 s, got ReadTimeout in 2 attempts"):
        await backend(server, timeout=0.1, max_retries=1).generate(CHAT)


async def test_no_server_is_a_backend_error():
    with pytest.raises(BackendError, match="ConnectError"):
        await OpenAILLM("m", base_url="http://127.0.0.1:9", max_retries=1, backoff=0.01).generate(
            CHAT
        )


async def test_requests_in_flight_are_limited(server: Server):
    server.replies = [(200, completion(), {}, 0.02)]
    llm = backend(server, max_concurrency=3)
    await asyncio.gather(*(llm.generate(CHAT) for _ in range(12)))
    assert server.peak <= 3 and len(server.requests) == 12
    await llm.aclose()


def test_one_backend_serves_several_event_loops(server: Server):
    llm = backend(server)
    assert [asyncio.run(llm.generate(CHAT)).text for _ in range(3)] == ["north"] * 3
    llm.close()


async def test_token_prompts_are_refused(server: Server):
    with pytest.raises(BackendError, match="text only"):
        await backend(server).generate([1, 2, 3])


def test_bad_arguments_are_refused_at_once():
    with pytest.raises(ValueError, match="max_retries"):
        OpenAILLM("m", max_retries=-1)
