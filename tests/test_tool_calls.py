"""A hosted actor that asks the bank by real tool calls: what the server gets and what is played."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.llm.openai import OpenAILLM
from experiential.llm.scripted import ScriptedLLM
from experiential.types import Usage
from experiential.wrappers import (
    ExperienceVectorWrapper,
    ExperienceWrapper,
    SearchAndAskWrapper,
)
from tests.chat_server import Server, calling, completion, tool_call
from tests.wrapper_worlds import CorridorEnv, CountingManager

GO: tuple[int, Any, dict[str, str], float] = (200, completion("Fine. <action>go</action>"), {}, 0.0)


def asking(*calls: dict[str, Any], **reply: Any) -> tuple[int, Any, dict[str, str], float]:
    return 200, calling(*calls, **reply), {}, 0.0


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def play(
    agent: ActorAgent, *, guided: bool = True, steps: int = 12
) -> tuple[SearchAndAskWrapper, CountingManager, list[str]]:
    manager = CountingManager("Say go.")
    env = SearchAndAskWrapper(ExperienceWrapper(CorridorEnv(), manager))
    agent.reset()
    observation, info = env.reset(options={"guided": guided})
    actions: list[str] = []
    for _ in range(steps):
        actions.append(agent.act(observation, info))
        observation, _, terminated, truncated, info = env.step(actions[-1])
        if terminated or truncated:
            break
    return env, manager, actions


def test_a_call_is_answered_by_a_tool_message_with_its_id(server: Server) -> None:
    server.replies = [asking(tool_call('{"query": "how to cross?"}', id="c7")), GO]
    agent = ActorAgent(OpenAILLM("m", base_url=server.url))
    env, manager, actions = play(agent)
    assert [one[0] for one in manager.asked] == ["how to cross?"] and actions[1:] == ["go", "go"]
    offered = server.requests[0]["tools"]
    assert [one["function"]["name"] for one in offered] == ["search_and_ask"]
    assert offered == [env.tool_schema()] == server.requests[-1]["tools"]
    *_, call, answer = server.requests[1]["messages"]
    assert call["role"] == "assistant" and call["content"] is None
    assert call["tool_calls"] == [tool_call('{"query": "how to cross?"}', id="c7")]
    assert answer == {
        "role": "tool",
        "tool_call_id": "c7",
        "content": "<search_result>\n1. Say go.\n</search_result>",
    }
    (trajectory,) = manager.submitted
    assert [use.how for use in trajectory.uses] == ["episode_start", "search_and_ask"]
    assert [turn.action for turn in trajectory.turns] == ["go", "go"]
    assert agent.usage == Usage(prompt_tokens=27, completion_tokens=6)


def test_parallel_calls_are_carried_out_one_after_the_other_without_another_request(
    server: Server,
) -> None:
    first, second = tool_call('{"query": "one"}'), tool_call('{"query": "two"}', id="c2")
    server.replies = [asking(first, second, content="Two questions."), GO]
    agent = ActorAgent(OpenAILLM("m", base_url=server.url))
    _, manager, _ = play(agent)
    assert [one[0] for one in manager.asked] == ["one", "two"] and len(server.requests) == 3
    talk = [
        (one["role"], one.get("tool_call_id") or [call["id"] for call in one.get("tool_calls", ())])
        for one in server.requests[1]["messages"][2:]
    ]
    assert talk == [("assistant", ["c1"]), ("tool", "c1"), ("assistant", ["c2"]), ("tool", "c2")]
    assert len(agent.generations) == 4 and agent.usage == Usage(
        prompt_tokens=27, completion_tokens=6
    )


def test_calls_that_hold_no_question_are_answered_so_that_the_model_can_mend_them(
    server: Server,
) -> None:
    server.replies = [asking(tool_call("{query: which")), asking(tool_call("{}")), GO]
    _, manager, actions = play(ActorAgent(OpenAILLM("m", base_url=server.url)))
    assert manager.asked == [] and actions[2:] == ["go", "go"]
    said = server.requests[1]["messages"][-1]["content"]
    assert 'The question is empty. Write it as {"query": "…"}.' in said


def test_a_server_that_refuses_tools_gets_the_tag_with_one_warning(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.replies = [
        (400, {"error": {"message": "m does not support tools"}}, {}, 0.0),
        (200, completion("<search_and_ask>how?</search_and_ask>"), {}, 0.0),
        GO,
    ]
    agent = ActorAgent(OpenAILLM("m", base_url=server.url))
    with caplog.at_level(logging.WARNING):
        _, manager, _ = play(agent)
        play(agent)
    assert [one[0] for one in manager.asked] == ["how?"]
    assert ["tools" in one for one in server.requests] == [True, *[False] * 5]
    assert {one["role"] for one in server.requests[-1]["messages"]} == {
        "system",
        "user",
        "assistant",
    }
    assert ["refuses tools" in one.getMessage() for one in caplog.records] == [True]


def test_calls_that_were_made_stay_readable_for_a_server_that_then_refuses_tools(
    server: Server,
) -> None:
    server.replies = [
        asking(tool_call('{"query": "how?"}')),
        (400, {"error": {"message": "tools are not supported"}}, {}, 0.0),
        GO,
    ]
    play(ActorAgent(OpenAILLM("m", base_url=server.url)))
    *_, call, answer = server.requests[-2]["messages"]
    assert call["role"] == "assistant" and '"search_and_ask"' in call["content"]
    assert answer["role"] == "user" and "Say go." in answer["content"]
    assert not {"tool_calls", "tool_call_id"} & {*call, *answer}


def test_a_free_episode_a_tagging_agent_and_a_choice_are_offered_no_tools(server: Server) -> None:
    server.replies = [GO]
    play(ActorAgent(OpenAILLM("m", base_url=server.url)), guided=False)
    play(ActorAgent(OpenAILLM("m", base_url=server.url), tools="tag"))
    server.replies = [(200, completion("go"), {}, 0.0)]
    chooses = OpenAILLM("m", base_url=server.url, supports_choices=True)
    play(ActorAgent(chooses, constrain=True))
    assert len(server.requests) == 6 and not any("tools" in one for one in server.requests)
    with pytest.raises(ValueError, match="'native' with a backend that supports it"):
        ActorAgent(ScriptedLLM(["go"]), tools="native")


def test_a_streaming_actor_calls_tools_and_hands_its_words_on(server: Server) -> None:
    events = {"content-type": "text/event-stream"}
    delta = (
        '{"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "search_and_ask",'
        ' "arguments": "{\\"query\\": \\"how?\\"}"}}]}'
    )
    stream = (
        'data: {"choices": [{"delta": {"content": "Let me ask."}}]}\n\n'
        f'data: {{"choices": [{{"delta": {delta}, "finish_reason": "tool_calls"}}]}}\n\n'
    )
    server.replies = [(200, stream, events, 0.0), GO]
    pieces: list[str] = []
    _, manager, _ = play(ActorAgent(OpenAILLM("m", base_url=server.url, on_text=pieces.append)))
    assert pieces == ["Let me ask."] and [one[0] for one in manager.asked] == ["how?"]


def test_a_short_history_never_shows_an_answer_without_its_call(server: Server) -> None:
    server.replies = [asking(tool_call('{"query": "one"}')), GO]
    for keep_first in (True, False):
        server.replies = [asking(tool_call('{"query": "one"}')), GO]
        play(ActorAgent(OpenAILLM("m", base_url=server.url), history=0, keep_first=keep_first))
        assert all(one["role"] != "tool" for one in server.requests[-2]["messages"])


def test_info_and_record_say_what_actor_and_extractor_took(server: Server, tmp_path: Path) -> None:
    server.replies = [
        asking(tool_call('{"query": "Cross the corridor."}')),
        (200, completion("Say go at once."), {}, 0.0),  # the extractor's refinement
        (200, {**completion("<action>go</action>"), "usage": None}, {}, 0.0),
        GO,
    ]
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add("Say go.", task="Cross the corridor.")
        extractor = ExtractorAgent(OpenAILLM("e", base_url=server.url, price=[1e6, 1e6]))
        steady: dict[str, Any] = {"free_share": 0, "retrieval": {"strategy": "diverse"}}
        manager = ExperienceManager(bank, extractor, **steady)
        manager.pause()
        env = SearchAndAskWrapper(ExperienceWrapper(CorridorEnv(), manager))
        agent = ActorAgent(OpenAILLM("a", base_url=server.url))
        observation, info = env.reset()
        done = False
        while not done:
            observation, _, terminated, truncated, info = env.step(agent.act(observation, info))
            done = terminated or truncated
        assert info["usage"] == {
            "actor": {"prompt_tokens": 18, "completion_tokens": 4, "cost": None},
            "extractor": {"prompt_tokens": 9, "completion_tokens": 2, "cost": 11.0},
        }
        assert manager.stats()["usage"] == {"extractor": info["usage"]["extractor"]}
        kept = bank.trajectory(info["trajectory_id"])
        assert kept is not None and kept.usage["actor"] == Usage(
            prompt_tokens=18, completion_tokens=4
        )
        with manager.episode("Cross the corridor.") as episode:
            episode.spend("actor", {"prompt_tokens": 5, "total_tokens": 5})
            episode.spend("actor", None)
            with pytest.raises(TypeError, match="usage as a table"):
                episode.spend("actor", 5)
            assert episode.finish(success=True).usage == {"actor": Usage(prompt_tokens=5)}
        manager.close(drain=None)


def test_the_cost_of_an_action_survives_vector_environments(server: Server) -> None:
    server.replies = [GO]
    envs = SyncVectorEnv([CorridorEnv], autoreset_mode=AutoresetMode.SAME_STEP)
    wrapped = ExperienceVectorWrapper(envs, CountingManager("Say go."))
    agent = ActorAgent(OpenAILLM("a", base_url=server.url))
    shown, infos = wrapped.reset()
    for _ in range(2):
        shown, _, _, _, infos = wrapped.step([agent.act(str(shown[0]))])
    assert infos["final_info"]["usage"]["actor"]["prompt_tokens"][0] == 18
    assert pickle.loads(pickle.dumps(agent.act("again"))).usage.prompt_tokens == 9
