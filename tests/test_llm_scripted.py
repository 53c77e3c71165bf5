"""ScriptedLLM: says what it is told, records what it was asked, and keeps to the contract of a
backend.
"""

from __future__ import annotations

import pytest

from experiential.errors import BackendError
from experiential.llm.base import SamplingParams
from experiential.llm.scripted import ScriptedLLM
from experiential.types import FinishReason
from tests.llm_tiny import tiny_tokenizer

CHAT = [{"role": "user", "content": "Which door?"}]


async def test_replies_are_cycled_and_calls_recorded():
    llm = ScriptedLLM(["a", "b"])
    assert [(await llm.generate(CHAT)).text for _ in range(5)] == ["a", "b", "a", "b", "a"]
    assert llm.calls == [CHAT] * 5 and llm.calls[0] is not CHAT


async def test_functions_may_be_sync_or_async():
    async def later(messages: list) -> str:
        return messages[0]["content"] + "!"

    assert (await ScriptedLLM(later).generate(CHAT)).text == "Which door?!"
    assert (await ScriptedLLM(lambda messages: str(len(messages))).generate(CHAT)).text == "1"


async def test_choices_are_checked():
    generation = await ScriptedLLM(["up"]).generate(CHAT, SamplingParams(choices=("up", "down")))
    assert generation.finish_reason is FinishReason.CHOICE
    with pytest.raises(BackendError, match="sideways"):
        await ScriptedLLM(["sideways"]).generate(CHAT, SamplingParams(choices=("up", "down")))


async def test_text_ends_at_the_first_stop_string():
    generation = await ScriptedLLM(["<a>1</a> and <b>2</b>"]).generate(
        CHAT, SamplingParams(stop=("</b>", "</a>"))
    )
    assert generation.text == "<a>1</a>"


async def test_tokenizer_gives_ids_and_takes_token_prompts():
    tokenizer = tiny_tokenizer()
    llm = ScriptedLLM(["go north"], tokenizer=tokenizer)
    generation = await llm.generate(CHAT)
    assert tokenizer.decode(generation.response_ids, skip_special_tokens=True) == "go north"
    assert generation.response_ids[-1] == tokenizer.eos_token_id and len(
        generation.logprobs
    ) == len(generation.response_ids)
    again = await llm.generate(generation.prompt_ids)
    assert again.prompt_ids == generation.prompt_ids
    assert "Which door?" in llm.calls[1][0]["content"]


async def test_token_prompts_need_a_tokenizer():
    with pytest.raises(BackendError, match="tokenizer="):
        await ScriptedLLM(["a"]).generate([1, 2])


@pytest.mark.parametrize("replies", [[], "text"])
def test_empty_or_bare_replies_are_refused(replies: object):
    with pytest.raises(ValueError, match="Expected replies"):
        ScriptedLLM(replies)  # type: ignore[arg-type]
