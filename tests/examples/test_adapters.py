"""Adapters against the real packages: what they give is what happened. The model is a scripted
server, so that each framework calls a tool. `make test-examples` has the packages.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp")

import experiential as xp
from experiential import adapters
from experiential.bank.folder import FolderBank
from experiential.cli import main
from experiential.cli.errors import run_app
from experiential.envs import check_text_env
from experiential.envs.make import make
from experiential.errors import ConfigError
from tests.chat_server import Server, calling, completion, tool_call

TASK = "Which lever is live?"
GUESS = "game:GuessTheNumber-v0-easy"


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[FolderBank]:
    with FolderBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


@pytest.fixture
def manager(bank: FolderBank) -> Iterator[xp.ExperienceManager]:
    with xp.ExperienceManager(bank, free_share=0.0) as manager:
        yield manager


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    """A server whose model looks at a lever and then answers."""
    server = Server()
    looks = calling(tool_call('{"place": "lever"}', name="look"))
    server.replies = [(200, looks, {}, 0.0), (200, completion("It is brass."), {}, 0.0)]
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    return server.url


def look(place: str) -> str:
    """Look at a place.

    Args:
        place: Where to look.
    """
    return f"The {place} is made of brass."


def run_langgraph(url: str) -> list[Any]:
    from langchain.agents import create_agent
    from langchain_core.messages import convert_to_openai_messages
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="m", use_responses_api=False), tools=[look])
    state = agent.invoke({"messages": [{"role": "user", "content": TASK}]})
    return convert_to_openai_messages(state["messages"])


def run_openai_agents(url: str) -> list[Any]:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("m", AsyncOpenAI())
    agent = Agent("a", model=model, tools=[function_tool(look)])
    return adapters.from_openai_agents(asyncio.run(Runner.run(agent, TASK)))


def run_pydantic_ai(url: str) -> list[Any]:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    result = Agent(OpenAIChatModel("m"), tools=[look]).run_sync(TASK)
    return adapters.from_pydantic_ai(result.all_messages())


def run_openai(url: str) -> list[Any]:
    from openai import OpenAI

    messages: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        reply = OpenAI().chat.completions.create(model="m", messages=messages)
        messages.append(reply.choices[0].message)
        if not messages[-1].tool_calls:
            return messages
        answer = {"role": "tool", "tool_call_id": messages[-1].tool_calls[0].id}
        messages.append(answer | {"content": look("lever")})


@pytest.mark.parametrize("run", [run_openai, run_langgraph, run_openai_agents, run_pydantic_ai])
def test_calls_their_answers_and_the_reply_become_turns(
    run: Callable[[str], list[Any]], url: str, manager: xp.ExperienceManager
) -> None:
    with manager.episode(TASK) as ep:
        ep.extend(run(url))
        first, second = ep.finish(success=True).turns
    assert first.observation == TASK
    assert "look" in first.action and '"lever"' in first.action
    assert second.observation == "The lever is made of brass." == first.feedback
    assert second.action == "It is brass."


def test_a_smolagents_run_is_recorded_without_its_system_prompt(
    manager: xp.ExperienceManager,
) -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    server = Server()
    ends = calling(tool_call('{"answer": "brass"}', name="final_answer"))
    looks = calling(tool_call('{"place": "lever"}', name="look"))
    server.replies = [(200, looks, {}, 0.0), (200, ends, {}, 0.0)]
    model = OpenAIModel(model_id="m", api_base=server.url, api_key="none")
    agent = ToolCallingAgent(tools=[tool(look)], model=model, verbosity_level=0)
    with manager.episode(TASK) as ep:
        assert agent.run(TASK) == "brass"
        ep.extend(adapters.from_smolagents(agent))
        turns = ep.finish(success=True).turns
    assert TASK in turns[0].observation and len(turns[0].observation) < 200
    assert "look" in turns[0].action and "lever" in turns[0].action
    assert "The lever is made of brass." in turns[1].observation
    assert "final_answer" in turns[1].action


def test_pictures_of_a_pydantic_ai_prompt_are_left_out() -> None:
    from pydantic_ai import BinaryContent
    from pydantic_ai.messages import ModelRequest, UserPromptPart

    picture = BinaryContent(b"\x89PNG", media_type="image/png")
    request = ModelRequest(parts=[UserPromptPart([TASK, picture, "Hurry."])])
    [message] = adapters.from_pydantic_ai([request])
    assert message == {"role": "user", "content": f"{TASK}\nHurry."}


GAMES = [
    (adapters.GemEnv, GUESS),
    (adapters.GemEnv, "game:TowerofHanoi-v0-easy"),
    (adapters.TextArenaEnv, "GuessTheNumber-v0"),
    (adapters.TextArenaEnv, "FrozenLake-v0"),
]


@pytest.mark.parametrize(("env", "game"), GAMES)
def test_a_game_is_a_text_environment_without_faults(env: Any, game: str) -> None:
    assert check_text_env(env(game)) == []


def test_a_won_game_of_gem_is_a_success_and_another_is_none() -> None:
    env = make("experiential.adapters:GemEnv", game=GUESS)
    observation, info = env.reset(options={"world": 3})
    assert info["task"] in observation and "Enter your next guess." in observation
    number = env.unwrapped._env.game_number
    *_, terminated, _, info = env.step(f"\\boxed{{{number}}}")
    assert terminated and info["success"] is True
    env.reset(options={"world": 3})
    assert env.unwrapped._env.game_number == number, "a world is a game"
    *_, terminated, _, info = env.step("no number")
    assert terminated and info["success"] is False


def test_a_won_game_of_textarena_is_a_success_and_another_is_none() -> None:
    env = make("experiential.adapters:TextArenaEnv", game="GuessTheNumber-v0")
    env.reset(options={"world": 3})
    number = env.unwrapped._env.state.game_state["game_number"]
    seen, reward, terminated, _, info = env.step(f"[{number}]")
    assert terminated and reward == 1.0 and info["success"] is True and "Congrat" in seen
    observation, _ = env.reset(options={"world": 3})
    assert str(number) not in observation.partition("Enter")[2], "nothing of the game before"
    wrong = 1 if number > 1 else 2
    while not terminated or info["success"]:
        seen, reward, terminated, _, info = env.step(f"[{wrong}]")
    assert reward < 1.0 and info["success"] is False


@pytest.mark.parametrize("env", [adapters.GemEnv, adapters.TextArenaEnv])
def test_evaluation_plays_other_games(env: Any) -> None:
    game = GUESS if env is adapters.GemEnv else "GuessTheNumber-v0"
    names = [env(game, split=split).reset(seed=1)[1]["task_id"] for split in ("train", "eval")]
    assert len(set(names)) == 2
    with pytest.raises(ConfigError, match="split"):
        env(game, split="test")


def test_games_that_cannot_be_played_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="one player, got TicTacToe-v0"):
        adapters.TextArenaEnv("TicTacToe-v0")
    with pytest.raises(ConfigError, match="'Nope-v0'"):
        adapters.GemEnv("Nope-v0")
    with pytest.raises(ConfigError, match="unknown"):
        adapters.TextArenaEnv("GuessTheNumber-v0", unknown=1)
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(ConfigError, match="pip install gem-llm"):
        adapters.GemEnv(GUESS)


def test_the_wrapper_records_games_with_their_outcome(
    bank: FolderBank, manager: xp.ExperienceManager
) -> None:
    env = xp.ExperienceWrapper(adapters.GemEnv(GUESS), manager)
    env.reset(seed=1)
    *_, info = env.step(f"\\boxed{{{env.unwrapped._env.game_number}}}")
    ended = bank.trajectory(info["trajectory_id"])
    assert ended is not None and ended.success is True and ended.task.startswith("You are playing")


def test_a_rollout_of_trl_is_an_episode_also_when_the_model_stops(
    bank: FolderBank, manager: xp.ExperienceManager
) -> None:
    lesson = bank.add("Guess 4 first.", task="You are playing Guess The Number.")
    rollout = adapters.trl_environment(lambda: adapters.GemEnv(GUESS), manager, k=1)()
    prompt = rollout.reset(seed=3, prompt="ignored")
    assert prompt.startswith("<experience>\n1. Guess 4 first.") and "between 1 and 10" in prompt
    number = rollout._env._env.game_number
    assert "Congratulations" in rollout.act(f"\\boxed{{{number}}}")
    assert rollout.act("again") == "The episode is over."
    assert rollout.get_reward() == 1.0
    assert bank.outcomes(lesson.id, 1) == [1]
    rollout.reset(options={"world": 5})
    rollout.act("\\boxed{99}")
    assert rollout.get_reward() == 0.0, "the model stopped: recorded, and no success"
    rollout.reset(options={"world": 5})
    assert rollout.get_reward() == 0.0, "the model did nothing"
    assert bank.queue.counts()["queued"] == 3
    public = [name for name, _ in inspect.getmembers(type(rollout)) if not name.startswith("_")]
    assert public == ["act", "get_reward", "reset"], "TRL takes other methods for tools"


def test_games_run_in_a_suite_as_the_documentation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    code = next(part for part in text.split("```python") if "SuiteTask" in part)
    (tmp_path / "games.py").write_text(code.partition("```")[0])
    monkeypatch.chdir(tmp_path)
    arguments = ["--suite", "games:GAMES", "--agent", "random", "--episodes", "2"]
    assert run_app(main.app, ["bench", "run", *arguments]) == 0
    [results] = (tmp_path / "runs").rglob("*.json")
    assert "guess" in results.read_text()
