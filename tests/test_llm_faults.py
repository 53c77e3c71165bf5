"""Faults of hosted models as servers send them: each ends in the right text or in a named error."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from experiential.errors import BackendError, BudgetError, ContextError, NoAnswerError
from experiential.llm.base import SamplingParams
from experiential.llm.openai import OpenAILLM
from experiential.types import FinishReason, Usage
from tests.chat_server import CHAT, Server, calling, completion, tool_call


def reply(content: Any = None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    whole = {"role": "assistant", "content": content, **message}
    return completion(message=whole, finish_reason=finish)


def refused(code: str, param: str | None, message: str) -> dict[str, Any]:
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": param,
            "code": code,
        }
    }


@dataclass(frozen=True)
class Fault:
    """What a server sends, and what must come of it: a text, or an error and its words."""

    name: str
    replies: list[tuple[int, Any]]
    text: str | None = None
    error: type[BackendError] | None = None
    words: str = ""
    requests: int = 1
    last: dict[str, Any] = field(default_factory=dict)  # in the last request
    absent: tuple[str, ...] = ()  # from the last request
    options: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    tools: bool = False  # offer the tool search_and_ask
    calls: list[tuple[str, str]] = field(default_factory=list)  # id and action of those read


OK = (200, completion("go north"))
CALL = [{"id": "c", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}]
QUOTA = {
    "error": {
        "message": "You exceeded your current quota",
        "type": "insufficient_quota",
        "param": None,
        "code": "insufficient_quota",
    }
}


def event(delta: dict[str, Any], finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': finish}]})}\n\n"


STREAM = (
    event({"role": "assistant", "content": ""})
    + event({"content": "go "})
    + ": keep-alive\n\n"
    + event({"content": "north"})
    + event({}, "stop")
    + 'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'
    + "data: [DONE]\n\n"
)
EVENTS = {"content-type": "text/event-stream"}
STREAMED = {"on_text": lambda piece: None}

ASK = {"type": "function", "function": {"name": "search_and_ask", "parameters": {}}}
WHICH = '{"query": "which?"}'
WHICH_ACTION = '{"name": "search_and_ask", "arguments": {"query": "which?"}}'


def call_delta(index: int | None, **function: Any) -> dict[str, Any]:
    """A piece of a streamed tool call; only the first of a call has its id."""
    call = {"function": function} | ({} if index is None else {"index": index})
    return {"tool_calls": [call | ({"id": f"c{index}"} if "name" in function else {})]}


TOOL_FAULTS = [
    Fault("a call", [(200, calling(tool_call(WHICH)))], tools=True, calls=[("c1", WHICH_ACTION)]),
    Fault(
        "a call that ends with stop",
        [(200, calling(tool_call(WHICH), content="", finish="stop"))],
        tools=True,
        calls=[("c1", WHICH_ACTION)],
    ),
    Fault(
        "a call without content",
        [(200, completion(message={"role": "assistant", "tool_calls": [tool_call(WHICH)]}))],
        tools=True,
        calls=[("c1", WHICH_ACTION)],
    ),
    Fault(
        "a call beside words",
        [(200, calling(tool_call(WHICH), content="Let me ask."))],
        text="Let me ask.",
        tools=True,
        calls=[("c1", WHICH_ACTION)],
    ),
    Fault(
        "a call beside thinking that does not end",
        [(200, calling(tool_call(WHICH), content="<think>Ask"))],
        text="<think>Ask",
        tools=True,
        calls=[("c1", WHICH_ACTION)],
    ),
    Fault(
        "a call in the old form",
        [(200, reply(None, "function_call", function_call=tool_call(WHICH)["function"]))],
        tools=True,
        calls=[("call_0", WHICH_ACTION)],
    ),
    Fault(
        "a call without an id",
        [(200, calling(tool_call(WHICH, id=None)))],
        tools=True,
        calls=[("call_0", WHICH_ACTION)],
    ),
    Fault(
        "parallel calls",
        [(200, calling(tool_call(WHICH), tool_call('{"query": "who?"}', id="c2")))],
        tools=True,
        calls=[("c1", WHICH_ACTION), ("c2", WHICH_ACTION.replace("which", "who"))],
    ),
    Fault(
        "arguments as a table",
        [(200, calling(tool_call({"query": "which?"})))],
        tools=True,
        calls=[("c1", WHICH_ACTION)],
    ),
    Fault(
        "arguments that are no JSON",
        [(200, calling(tool_call("{query: which")))],
        tools=True,
        calls=[("c1", '{"name": "search_and_ask", "arguments": "{query: which"}')],
    ),
    Fault(
        "arguments cut off",
        [(200, calling(tool_call('{"query": "whi'), finish="length"))],
        tools=True,
        error=NoAnswerError,
        words="'search_and_ask' that was cut off; raise max_tokens",
    ),
    Fault(
        "an unknown tool",
        [(200, calling(tool_call("{}", "lookup")))],
        tools=True,
        error=NoAnswerError,
        words="the tool 'lookup', which was not offered",
    ),
    Fault(
        "an unknown tool beside a known one",
        [(200, calling(tool_call("{}", "lookup", "c0"), tool_call(WHICH)))],
        tools=True,
        calls=[("c1", WHICH_ACTION)],
    ),
    Fault(
        "an unknown tool beside an answer",
        [(200, calling(tool_call("{}", "lookup"), content="go north"))],
        text="go north",
        tools=True,
    ),
    Fault(
        "a call that is no table",
        [(200, calling("lookup"))],  # type: ignore[arg-type]
        tools=True,
        error=BackendError,
        words="Expected a chat completion",
    ),
    Fault(
        "tools refused by vLLM",
        [(400, {"message": '"auto" tool choice requires --enable-auto-tool-choice'}), OK],
        text="go north",
        requests=2,
        absent=("tools",),
        tools=True,
    ),
    Fault(
        "tools refused by llama.cpp with 500",
        [(500, {"error": {"message": "tools param requires --jinja flag"}}), OK],
        text="go north",
        requests=2,
        absent=("tools",),
        tools=True,
    ),
    Fault(
        "tools refused by Ollama",
        [(400, {"error": {"message": "gemma:2b does not support tools"}}), OK],
        text="go north",
        requests=2,
        absent=("tools",),
        tools=True,
    ),
    Fault(
        "tools refused by OpenRouter with 404",
        [(404, {"error": {"message": "No endpoints found that support tool use."}}), OK],
        text="go north",
        requests=2,
        absent=("tools",),
        tools=True,
    ),
    Fault(
        "a tool schema that is refused",
        [(400, refused("invalid_function_parameters", "tools[0]", "Invalid schema for 'ask'"))],
        error=BackendError,
        words="Invalid schema",
        tools=True,
    ),
    Fault(
        "a streamed call",
        [
            (
                200,
                event({"role": "assistant", "content": None})
                + event(call_delta(0, name="search_and_ask", arguments=""))
                + event(call_delta(0, arguments='{"query": '))
                + event(call_delta(0, arguments='"which?"}'))
                + event({}, "tool_calls"),
            )
        ],
        headers=EVENTS,
        options=STREAMED,
        tools=True,
        calls=[("c0", WHICH_ACTION)],
    ),
    Fault(
        "streamed calls without a number",
        [
            (
                200,
                event(call_delta(None, name="search_and_ask", arguments='{"query": '))
                + event(call_delta(None, arguments='"which?"}'))
                + event(call_delta(None, name="search_and_ask", arguments=WHICH))
                + event({}, "tool_calls"),
            )
        ],
        headers=EVENTS,
        options=STREAMED,
        tools=True,
        calls=[("cNone", WHICH_ACTION)] * 2,
    ),
    Fault(
        "a streamed call that is no table",
        [(200, event({"tool_calls": ["lookup"]}) + event({}, "stop"))],
        error=BackendError,
        words="lookup",
        requests=3,
        headers=EVENTS,
        options=STREAMED,
        tools=True,
    ),
    Fault(
        "streamed parallel calls beside words",
        [
            (
                200,
                event({"content": "Two "})
                + event(call_delta(0, name="search_and_ask", arguments=WHICH))
                + event({"content": "questions."})
                + event(call_delta(1, name="search_and_ask", arguments=WHICH))
                + event({}, "stop"),
            )
        ],
        text="Two questions.",
        headers=EVENTS,
        options=STREAMED,
        tools=True,
        calls=[("c0", WHICH_ACTION), ("c1", WHICH_ACTION)],
    ),
]
FAULTS = [
    *TOOL_FAULTS,
    # parameters that a server refuses
    Fault(
        "max_tokens of a reasoning model",
        [
            (
                400,
                refused(
                    "unsupported_parameter",
                    "max_tokens",
                    "Unsupported parameter: 'max_tokens' is not supported with this model."
                    " Use 'max_completion_tokens' instead.",
                ),
            ),
            OK,
        ],
        text="go north",
        requests=2,
        last={"max_completion_tokens": 32},
        absent=("max_tokens",),
    ),
    Fault(
        "temperature of a reasoning model",
        [
            (
                400,
                refused(
                    "unsupported_value",
                    "temperature",
                    "Unsupported value: 'temperature' does not support 0.5 with this model."
                    " Only the default (1) value is supported.",
                ),
            ),
            OK,
        ],
        text="go north",
        requests=2,
        absent=("temperature",),
    ),
    Fault(
        "top_p refused in words only",
        [(400, {"error": {"message": "`top_p` is not supported by this model"}}), OK],
        text="go north",
        requests=2,
        absent=("top_p",),
    ),
    Fault(
        "stop refused, text behind it cut here",
        [
            (400, refused("unsupported_parameter", "stop", "'stop' is not supported")),
            (200, completion("go north</a> and then go south")),
        ],
        text="go north</a>",
        requests=2,
        absent=("stop",),
    ),
    Fault(
        "seed refused with 422",
        [
            (422, {"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}),
            OK,
        ],
        text="go north",
        requests=2,
        absent=("seed",),
    ),
    Fault(
        "response_format refused",
        [(400, refused("", None, "unknown field `response_format`")), OK],
        text="go north",
        requests=2,
        absent=("response_format",),
    ),
    Fault(
        "four parameters refused one after the other",
        [
            (400, refused("unsupported_parameter", "max_tokens", "not supported: max_tokens")),
            (400, refused("unsupported_value", "temperature", "not supported: temperature")),
            (400, refused("unsupported_parameter", "top_p", "not supported: top_p")),
            (400, refused("unsupported_parameter", "stop", "not supported: stop")),
            OK,
        ],
        text="go north",
        requests=5,
        absent=("max_tokens", "temperature", "top_p", "stop"),
        options={"max_retries": 0},
    ),
    Fault(
        "parameters left out beforehand",
        [OK],
        text="go north",
        options={"omit": ["temperature", "top_p", "stop"]},
        absent=("temperature", "top_p", "stop"),
    ),
    Fault(
        "a refused parameter that the caller insists on",
        [(400, refused("unsupported_parameter", "top_k", "'top_k' is not supported"))],
        error=BackendError,
        words="top_k",
        options={"extra_body": {"top_k": 5}},
    ),
    Fault(
        "400 about the messages",
        [(400, refused("invalid_value", "messages", "messages: at least one is required"))],
        error=BackendError,
        words="at least one is required",
    ),
    Fault(
        "context length exceeded",
        [
            (
                400,
                refused(
                    "context_length_exceeded",
                    "messages",
                    "This model's maximum context length is 8192 tokens",
                ),
            )
        ],
        error=ContextError,
        words="maximum context length",
    ),
    Fault(
        "context of llama.cpp exceeded",
        [(400, {"error": {"type": "exceed_context_size_error", "message": "9 tokens"}})],
        error=ContextError,
        words="fits the context",
    ),
    # replies without an answer
    Fault("empty text", [(200, reply(""))], error=NoAnswerError, words="an empty text"),
    Fault("blanks", [(200, reply(" \n"))], error=NoAnswerError, words="an empty text"),
    Fault("null content", [(200, reply(None))], error=NoAnswerError, words="an empty text"),
    Fault(
        "nothing before the limit",
        [(200, reply("", "length"))],
        error=NoAnswerError,
        words="raise max_tokens",
    ),
    Fault(
        "reasoning alone",
        [(200, reply("", "length", reasoning_content="Let me see, the door"))],
        error=NoAnswerError,
        words="reasoning alone; raise max_tokens: 'Let me see, the door'",
    ),
    Fault(
        "reasoning beside an answer",
        [(200, reply("go north", reasoning_content="The door is north."))],
        text="go north",
    ),
    Fault("half of a character", [(200, reply("go \ud83d"))], text="go \ufffd"),
    Fault(
        "thinking beside an answer",
        [(200, reply("<think>North?</think>go north"))],
        text="<think>North?</think>go north",
    ),
    Fault(
        "thinking without an answer",
        [(200, reply("<think>Perhaps <action>jump</action></think>\n"))],
        error=NoAnswerError,
        words="reasoning alone: '<think>Perhaps",
    ),
    Fault(
        "an answer that broke off",
        [(200, reply("go no", "error"))],
        error=NoAnswerError,
        words="broke off: 'go no'",
    ),
    Fault(
        "thinking that does not end",
        [(200, reply("<think>Perhaps <action>jump</action>, or", "length"))],
        error=NoAnswerError,
        words="reasoning that does not end; raise max_tokens",
    ),
    Fault(
        "a refusal",
        [(200, reply(None, refusal="I can't help with that."))],
        error=NoAnswerError,
        words="a refusal: I can't help with that.",
    ),
    Fault(
        "a filtered reply",
        [(200, reply("go no", "content_filter"))],
        error=NoAnswerError,
        words="content filter",
    ),
    Fault(
        "an unexpected tool call",
        [(200, reply(None, "tool_calls", tool_calls=CALL))],
        error=NoAnswerError,
        words="the tool 'lookup'",
    ),
    Fault(
        "an unexpected call in the old form",
        [(200, reply(None, "function_call", function_call={"name": "lookup", "arguments": "{}"}))],
        error=NoAnswerError,
        words="the tool 'lookup'",
    ),
    Fault(
        "content as parts",
        [(200, reply([{"type": "text", "text": "go "}, {"type": "text", "text": "north"}]))],
        text="go north",
    ),
    Fault("content as no parts", [(200, reply([]))], error=NoAnswerError, words="an empty text"),
    # malformed replies
    Fault("no JSON", [(200, "oops")], error=BackendError, words="Expected a chat completion"),
    Fault("HTML in a 200", [(200, "<html>Bad gateway</html>")], error=BackendError, words="<html>"),
    Fault(
        "an error in a 200",
        [(200, {"error": {"message": "model is loading"}})],
        error=BackendError,
        words="model is loading",
    ),
    Fault("no choices", [(200, {"choices": []})], error=BackendError, words="chat completion"),
    Fault(
        "usage that is no table", [(200, completion("go north") | {"usage": 3})], text="go north"
    ),
    Fault("JSON nested too deeply", [(200, "[" * 10**5)], error=BackendError, words="chat compl"),
    Fault(
        "a body that cannot be unpacked",
        [(200, "no gzip")],
        error=BackendError,
        words="DecodingError",
        requests=3,
        headers={"content-encoding": "gzip"},
    ),
    # status codes
    Fault(
        "wrong key", [(401, {"error": "Incorrect API key"})], error=BackendError, words="API key"
    ),
    Fault(
        "no such model", [(404, {"error": "no model m"})], error=BackendError, words="no model m"
    ),
    Fault("429, then an answer", [(429, "slow down"), OK], text="go north", requests=2),
    Fault(
        "429 with a date",
        [(429, "slow down"), OK],
        text="go north",
        requests=2,
        headers={"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"},
    ),
    Fault(
        "429 with a pause that is no number",
        [(429, "slow down"), OK],
        text="go north",
        requests=2,
        headers={"retry-after": "²"},
    ),
    Fault("a proxy without its server", [(521, "down"), OK], text="go north", requests=2),
    Fault("429 for ever", [(429, "slow down")], error=BackendError, words="429", requests=3),
    Fault("quota spent", [(429, QUOTA)], error=BudgetError, words="insufficient_quota"),
    Fault("payment required", [(402, "pay first")], error=BudgetError, words="pay first"),
    Fault("overloaded", [(529, "overloaded"), OK], text="go north", requests=2),
    Fault("500 for ever", [(500, "broken")], error=BackendError, words="500: broken", requests=3),
    # streams
    Fault("a stream", [(200, STREAM)], text="go north", headers=EVENTS, options=STREAMED),
    Fault(
        "a stream that breaks off",
        [(200, event({"content": "go no"})), (200, STREAM)],
        text="go north",
        requests=2,
        headers=EVENTS,
        options=STREAMED,
    ),
    Fault(
        "an error in a stream",
        [(200, 'data: {"error": {"message": "worker died"}}\n\n')],
        error=BackendError,
        words="worker died",
        requests=3,
        headers=EVENTS,
        options=STREAMED,
    ),
    Fault(
        "no JSON in a stream",
        [(200, "data: oops\n\n")],
        error=BackendError,
        words="oops",
        requests=3,
        headers=EVENTS,
        options=STREAMED,
    ),
    Fault("a whole reply instead of a stream", [OK], text="go north", options=STREAMED),
    Fault(
        "reasoning alone in a stream",
        [(200, event({"reasoning_content": "Let me"}) + event({}, "length"))],
        error=NoAnswerError,
        words="reasoning alone",
        headers=EVENTS,
        options=STREAMED,
    ),
]
SAMPLING = SamplingParams(
    temperature=0.5, max_tokens=32, stop=("</a>",), seed=3, json_schema={"type": "object"}
)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_a_fault_ends_in_the_right_text_or_a_named_error(server: Server, fault: Fault):
    server.replies = [(status, body, fault.headers, 0.0) for status, body in fault.replies]
    llm = OpenAILLM("m", base_url=server.url, backoff=0.001, **fault.options)
    sampling = SAMPLING.model_copy(update={"tools": (ASK,)}) if fault.tools else SAMPLING
    if fault.error is None:
        generation = await llm.generate(CHAT, sampling)
        assert generation.text == (fault.text or "")
        assert [(call.id, call.action()) for call in generation.tool_calls] == fault.calls
    else:
        with pytest.raises(BackendError) as caught:
            await llm.generate(CHAT, sampling)
        assert type(caught.value) is fault.error and fault.words in str(caught.value)
    assert len(server.requests) == fault.requests
    sent = server.requests[-1]
    assert fault.last.items() <= sent.items() and not sent.keys() & set(fault.absent)
    await llm.aclose()


def test_at_least_34_faults_are_recorded():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 34


async def test_a_refused_parameter_is_dropped_once_for_all_with_one_warning(
    server: Server, caplog: pytest.LogCaptureFixture
):
    no = refused("unsupported_value", "temperature", "Unsupported value: 'temperature'")
    server.replies = [(400, no, {}, 0.0), (200, completion(), {}, 0.0)]
    llm = OpenAILLM("m", base_url=server.url)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await llm.generate(CHAT)
    assert len(server.requests) == 4
    assert [r.getMessage() for r in caplog.records if "refuses temperature" in r.getMessage()]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("param", ["temperature", "max_tokens", "tools"])
async def test_requests_in_flight_together_are_refused_with_one_warning(
    server: Server, caplog: pytest.LogCaptureFixture, param: str
):
    said = "tools" if param == "tools" else f"'{param}'"
    no = refused("unsupported_value", param, f"Unsupported value: {said} is not supported")

    def strict(body: dict[str, Any]) -> tuple[int, Any, dict[str, str], float]:
        return (400, no, {}, 0.0) if param in body else (200, completion(), {}, 0.0)

    server.reply_to = strict
    llm = OpenAILLM("m", base_url=server.url)
    sampling = SamplingParams(tools=(ASK,))
    with caplog.at_level(logging.WARNING):
        done = await asyncio.gather(*(llm.generate(CHAT, sampling) for _ in range(4)))
    assert [one.text for one in done] == ["north"] * 4 and len(server.requests) == 8
    assert len(caplog.records) == 1  # all four were made before the first answer


async def test_tokens_and_cost_are_counted_also_for_replies_without_an_answer(server: Server):
    server.replies = [
        (200, completion(), {}, 0.0),
        (200, reply(None), {}, 0.0),
        (200, completion() | {"usage": {"prompt_tokens": 5, "cost": 0.25}}, {}, 0.0),
        (200, {**completion(), "usage": None}, {}, 0.0),
    ]
    llm = OpenAILLM("m", base_url=server.url, price=[1.0, 10.0])
    first = await llm.generate(CHAT)
    assert first.usage == Usage(prompt_tokens=9, completion_tokens=2, cost=29e-6)
    with pytest.raises(NoAnswerError):
        await llm.generate(CHAT)
    assert (await llm.generate(CHAT)).usage == Usage(prompt_tokens=5, cost=0.25)
    await llm.generate(CHAT)
    assert (llm.spent.prompt_tokens, llm.spent.completion_tokens) == (23, 4)
    assert llm.spent.cost == pytest.approx(0.25 + 58e-6)


@pytest.mark.parametrize("limit", ["max_cost", "max_total_tokens"])
@pytest.mark.parametrize("usage", [None, 3, {}, {"prompt_tokens": None}, {"prompt_tokens": -5}])
async def test_a_limit_ends_with_a_bill_that_cannot_be_read(server: Server, usage: Any, limit: str):
    server.replies = [(200, completion(), {}, 0.0), (200, completion() | {"usage": usage}, {}, 0.0)]
    llm = OpenAILLM("m", base_url=server.url, price=[1.0, 1.0], **{limit: 1000})
    await llm.generate(CHAT)
    assert (await llm.generate(CHAT)).usage is None
    with pytest.raises(BudgetError, match="to report what each reply takes"):
        await llm.generate(CHAT)


@pytest.mark.parametrize("cost", [float("nan"), -1.0, None, "free"])
async def test_a_cost_that_cannot_be_read_ends_a_limit_of_cost(server: Server, cost: Any):
    bills = [{"prompt_tokens": 9, "cost": 0.5}, {"prompt_tokens": 9, "cost": cost}]
    server.replies = [(200, completion() | {"usage": bill}, {}, 0.0) for bill in bills]
    llm = OpenAILLM("m", base_url=server.url, max_cost=1.0)
    await llm.generate(CHAT)
    await llm.generate(CHAT)
    assert llm.spent.cost == 0.5
    with pytest.raises(BudgetError, match="to report what each reply takes"):
        await llm.generate(CHAT)


@pytest.mark.parametrize("options", [{}, STREAMED])
async def test_half_of_a_character_in_a_prompt_is_replaced(server: Server, options: dict[str, Any]):
    await OpenAILLM("m", base_url=server.url, **options).generate(
        [{"role": "user", "content": "A sign: \ud83d."}]
    )
    assert server.requests[0]["messages"][0]["content"] == "A sign: \ufffd."


async def test_no_request_is_sent_when_the_budget_is_spent(server: Server):
    priced = OpenAILLM("m", base_url=server.url, price=[1e5, 0], max_cost=1.0)  # .9 a reply
    assert (await priced.generate(CHAT)).text == (await priced.generate(CHAT)).text == "north"
    with pytest.raises(BudgetError, match=r"max_cost=1 dollars of 'm', got 1\.8"):
        await priced.generate(CHAT)
    counted = OpenAILLM("m", base_url=server.url, max_total_tokens=11)
    await counted.generate(CHAT)
    with pytest.raises(BudgetError, match="max_total_tokens=11"):
        await counted.generate(CHAT)
    assert len(server.requests) == 3


async def test_a_stream_hands_on_each_piece_and_its_usage(server: Server):
    server.replies = [(200, STREAM, EVENTS, 0.0)]
    pieces: list[str] = []
    generation = await OpenAILLM("m", base_url=server.url, on_text=pieces.append).generate(CHAT)
    assert pieces == ["go ", "north"] and generation.text == "go north"
    assert generation.usage == Usage(prompt_tokens=9, completion_tokens=2)
    assert generation.finish_reason is FinishReason.STOP
    assert server.requests[0]["stream"] is True


def test_a_wrong_price_is_refused():
    with pytest.raises(ValueError, match="Expected price to be two numbers"):
        OpenAILLM("m", price=[1.0])
