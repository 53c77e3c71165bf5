"""BFCL's dialogues: what is read as a call, BFCL's own verdict, and references that pass."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiential.agents.actor import ActorAgent
from experiential.envs import check_text_env
from experiential.envs.bfcl.calls import LONGEST, Call, read_calls
from experiential.envs.bfcl.env import APIS, BFCLEnv
from experiential.envs.bfcl.source import INSTALL, default_folder, source
from experiential.errors import ConfigError
from experiential.llm.openai import OpenAILLM
from tests.chat_server import Server, calling, completion, tool_call

needs_bfcl = pytest.mark.skipif(
    default_folder() is None or importlib.util.find_spec("mpmath") is None,
    reason=f"needs {INSTALL}",
)


def play(env: BFCLEnv, world: int, *actions: str) -> Any:
    """The last step of an episode."""
    env.reset(options={"world": world})
    return [env.step(action) for action in actions][-1]


def replies(turns: list[list[str]]) -> list[str]:
    """Actions that make the calls of each turn, and end it."""
    return [
        action for turn in turns for action in ([f"[{', '.join(turn)}]"] if turn else []) + ["Ok."]
    ]


class TestCalls:
    """What a reply asks for; needs no BFCL."""

    @pytest.mark.parametrize(
        "reply",
        [
            "[cd(folder='a'), sort('b')]",
            "cd(folder='a'), sort('b')",
            "I will look.\n[cd(folder='a'), sort('b')]",
            "```python\n[cd(folder='a'),\n sort('b')]\n```",
            "Now [cd(folder='a'), sort('b')] it is.",
        ],
    )
    def test_python_calls(self, reply: str) -> None:
        assert read_calls(reply) == [Call("cd", named={"folder": "a"}), Call("sort", ("b",))]

    @pytest.mark.parametrize(
        "reply",
        [
            '{"name": "cd", "arguments": {"folder": "a"}}',
            '[{"name": "cd", "parameters": {"folder": "a"}}]',
            'Well.\n<tool_call>\n{"name": "cd", "arguments": {"folder": "a"}}\n</tool_call>',
        ],
    )
    def test_json_calls(self, reply: str) -> None:
        assert read_calls(reply) == [Call("cd", named={"folder": "a"})]

    @pytest.mark.parametrize(
        "reply",
        ["", "Done.", "[1, 2]", "The file (b) is sorted.", "[cd(folder='a'", '{"name": 3}', "[]"],
    )
    def test_anything_else_is_an_answer(self, reply: str) -> None:
        assert read_calls(reply) == []

    def test_an_argument_that_is_no_literal_is_a_fault_and_is_not_evaluated(self) -> None:
        (call,) = read_calls("cd(folder=__import__('os').getcwd())")
        assert call == Call("cd", fault="expected literals as arguments")
        assert read_calls("cd(**{'folder': 'a'})")[0].fault

    @given(st.text(alphabet="[](){}'\"=,.a-\n \ud800", max_size=60))
    def test_no_reply_raises(self, reply: str) -> None:
        assert isinstance(read_calls(reply), list)

    @pytest.mark.parametrize("part", ["(", "[", "-", "a.", "f(", '{"a":', "["])
    def test_a_deep_or_long_reply_raises_nothing(self, part: str) -> None:
        assert read_calls(part * (LONGEST // len(part))) == []
        assert read_calls("cd('a')" + " " * LONGEST + "x") == []


def test_what_is_missing_is_said_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BFCL_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    source.cache_clear()
    with pytest.raises(ConfigError, match=r"run: pip install --no-deps bfcl-eval mpmath"):
        BFCLEnv()
    with pytest.raises(ConfigError, match="Expected a folder bfcl_eval with data"):
        BFCLEnv(data=str(tmp_path))
    source.cache_clear()


@needs_bfcl
@pytest.mark.parametrize("category", ["base", "long_context", "miss_func", "miss_param"])
def test_the_reference_calls_pass_in_all_200_dialogues(category: str) -> None:
    env = BFCLEnv("all", category=category)
    assert len(env.worlds) == 200
    for world in env.worlds:
        env.reset(options={"world": world})
        step = env.step(env.oracle_action())
        while not (step[2] or step[3]):
            step = env.step(env.oracle_action())
        assert step[1] == 1.0 and step[4]["success"], (env.dialogues[world].id, step[0])


@needs_bfcl
def test_each_of_four_apis_has_fifty_dialogues() -> None:
    found = [BFCLEnv("all", api=api).dialogues for api in APIS]
    assert [len(one) for one in found] == [50] * 4
    assert len({dialogue.id for one in found for dialogue in one}) == 200
    train, held = BFCLEnv("train").dialogues, BFCLEnv("eval").dialogues
    assert {one.id for one in train}.isdisjoint(one.id for one in held)
    variants = {one.number for one in BFCLEnv("eval", category="long_context").dialogues}
    assert variants == {one.number for one in held}


def changed(turns: list[list[str]], how: str) -> list[list[str]]:
    """The reference calls, spoilt in one way."""
    turns = [list(turn) for turn in turns]
    last = max(number for number, turn in enumerate(turns) if turn)
    if how == "drop":
        turns[last].pop()
    elif how == "repeat":
        turns[0] *= 2
    elif how == "silent":
        turns[last] = []
    elif how == "unknown":
        turns[0].insert(0, "no_such_function(a=1)")
    elif how == "late":
        turns[-1], turns[0] = turns[-1] + turns[0], []
    return turns


@needs_bfcl
@pytest.mark.parametrize("category", ["base", "miss_func"])
@pytest.mark.parametrize("how", ["none", "drop", "repeat", "silent", "unknown", "late"])
def test_the_verdict_is_that_of_bfcls_own_checker(how: str, category: str) -> None:
    env = BFCLEnv("all", category=category)
    verdicts: set[bool] = set()
    for world in env.worlds[::4]:
        dialogue = env.dialogues[world]
        turns = changed(dialogue.answers, how)
        step = play(env, world, *replies(turns))
        entry = {
            "id": dialogue.id,
            "initial_config": dialogue.scenario,
            "involved_classes": dialogue.apis,
        }
        official = source(None).checker.multi_turn_checker(
            [[turn] if turn else [] for turn in turns], dialogue.answers, entry, category, how
        )["valid"]
        assert step[4]["success"] is official and step[1] == float(official) and step[2]
        verdicts.add(official)
    assert (False in verdicts) is (how in ("drop", "repeat", "silent", "late"))


@needs_bfcl
def test_a_failed_call_uses_a_step_and_the_others_are_carried_out() -> None:
    env = BFCLEnv("all", api="gorilla_fs")
    env.reset(options={"world": 0})
    shown, reward, terminated, truncated, info = env.step("[nothing(), pwd(), cd(dir='a')]")
    first, second, third = shown.splitlines()
    assert first == "Error during execution: name 'nothing' is not defined"
    assert "current_working_directory" in second and "unexpected keyword argument" in third
    assert info["invalid"] and first in info["feedback"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert not env.step("[pwd()]")[4]["invalid"] and not env.step("Done.")[4]["invalid"]


@needs_bfcl
@pytest.mark.parametrize("name", ["_load_scenario", "__init__", "root.contents.clear", "kill"])
def test_only_public_functions_can_be_called(name: str) -> None:
    env = BFCLEnv("all", api="gorilla_fs")
    env.reset(options={"world": 0})
    assert env.step(f"{name}()")[0] == f"Error during execution: name '{name}' is not defined"


@needs_bfcl
@pytest.mark.parametrize(
    "call", ["add(a=0x{}, b=1)", "multiply(a=0x{}, b=2)", "display_log(messages=[0x{}])"]
)
def test_a_number_too_long_to_be_written_is_a_failed_call(call: str) -> None:
    env = BFCLEnv("all")
    name = call.partition("(")[0]
    apis = {"display_log": "VehicleControlAPI"}
    world = next(n for n, one in enumerate(env.dialogues) if apis.get(name, "MathAPI") in one.apis)
    env.reset(options={"world": world})
    shown, *_, info = env.step(call.format("f" * 6000))
    assert shown.startswith("Error during execution: Exceeds the limit") and info["invalid"]
    assert not env.step("Ok.")[4]["success"]


@needs_bfcl
@pytest.mark.parametrize(
    "call",
    [
        "power(base=10, exponent=10000000000)",
        "logarithm(10, 2, 1000000000)",
        "square_root(number=2, precision=1e12)",
        "round_number(number=5, decimal_places=-1000000000)",
    ],
)
def test_a_number_that_would_take_for_ever_is_a_failed_call(call: str) -> None:
    env = BFCLEnv("all")
    env.reset(options={"world": next(n for n in env.worlds if "MathAPI" in env.dialogues[n].apis)})
    shown, *_, info = env.step(call)
    assert shown == "Error during execution: Exceeds the limit (4300 digits)" and info["invalid"]
    assert env.step("power(base=10, exponent=3)")[0] == '{"result": 1000}'


@needs_bfcl
def test_a_call_that_would_take_for_ever_fails_and_the_turn_with_it() -> None:
    env = BFCLEnv("all", api="gorilla_fs")
    env.reset(options={"world": 0})
    # each folder shares the contents of the one before twice: a search visits 2 to the 40 paths
    twice = "mkdir('a{1}'), cp('a{0}', 'a{1}'), mkdir('b'), cp('a{0}', 'b'), mv('b', 'a{1}')"
    grown = [twice.format(number, number + 1) for number in range(40)]
    shown, *_ = env.step(f"[mkdir('a0'), {', '.join(grown)}]")
    assert "Error during execution" not in shown
    shown, *_, info = env.step("[find(path='.', name='x'), pwd()]")
    faults = shown.splitlines()
    assert faults == ["Error during execution: Expected an end within 200,000 lines of Python"] * 2
    assert info["invalid"]
    env.step("[mkdir('c'), cp('c', 'c')]")  # and comparing that with the reference never ends
    assert env.step("Ok.")[0].startswith("User: ")


@needs_bfcl
def test_functions_that_were_held_back_are_offered_in_the_turn_without_a_request() -> None:
    env = BFCLEnv("all", category="miss_func")
    first, info = env.reset(options={"world": 0})
    held = env.dialogues[0].held
    assert held == {3: ["sort"]} and not any(env.dialogues[0].answers[2])
    assert '"name": "sort"' not in first
    assert "sort" not in {one["function"]["name"] for one in info["tools"]}
    for turn in (1, 2):
        shown, *_, info = env.step("Ok.")
        assert shown == f"User: {env.dialogues[0].requests[turn]}" and "tools" not in info
    shown, *_, more = env.step("I cannot sort.")
    listed, _, request = shown.partition("\n\n")
    assert json.loads(listed.removeprefix("Functions:\n"))["name"] == "sort"
    assert (
        request == "User: I have updated some more functions you can choose from. What about now?"
    )
    assert len(more["tools"]) == len({one["function"]["name"] for one in more["tools"]})
    assert "sort" in {one["function"]["name"] for one in more["tools"]}


@needs_bfcl
def test_a_hosted_actor_gets_the_functions_that_were_held_back_as_tools() -> None:
    server = Server()
    server.replies = [(200, completion("Ok."), {}, 0.0) for _ in range(4)]
    env = BFCLEnv("all", category="miss_func", functions=False)
    agent = ActorAgent(OpenAILLM("m", base_url=server.url))
    try:
        observation, info = env.reset(options={"world": 0})
        for _ in range(4):
            observation, _, _, _, info = env.step(agent.act(observation, info))
    finally:
        server.close()
    offered = [{one["function"]["name"] for one in sent["tools"]} for sent in server.requests]
    assert ["sort" in names for names in offered] == [False, False, False, True]
    assert offered[3] - {"sort"} == offered[0]


@needs_bfcl
def test_the_digest_is_of_the_dialogues() -> None:
    base, long, again = (BFCLEnv("all", category=one) for one in ("base", "long_context", "base"))
    assert base.digest() == again.digest() != long.digest()


@needs_bfcl
def test_what_is_no_text_ends_the_turn_as_an_empty_answer_does_and_is_invalid() -> None:
    env = BFCLEnv("all", api="gorilla_fs")
    not_text: Any = None
    empty, invalid = play(env, 0, ""), play(env, 0, not_text)
    assert empty[:4] == invalid[:4] and not empty[4]["invalid"] and invalid[4]["invalid"]


@needs_bfcl
def test_too_many_replies_with_calls_in_one_turn_truncate() -> None:
    env = BFCLEnv("all", api="gorilla_fs", steps=2)
    steps = [play(env, 0, *["[pwd()]"] * count) for count in (2, 3)]
    assert [step[2:4] for step in steps] == [(False, False), (False, True)]
    assert not play(env, 0, "[pwd()]", "Ok.", "[pwd()]", "[pwd()]")[3]


@needs_bfcl
def test_functions_are_offered_as_text_and_as_tools() -> None:
    env = BFCLEnv("all", api="gorilla_fs")
    text, info = env.reset(options={"world": 1})
    tools = {one["function"]["name"]: one["function"] for one in info["tools"]}
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"name"')]
    assert {row["name"] for row in rows} == set(tools) and "grep" in tools
    assert tools["cd"]["parameters"]["type"] == "object"
    assert text.endswith(f"User: {info['task']}")
    assert "Functions:" not in BFCLEnv(functions=False).reset(seed=0)[0]
    assert "tools" not in env.step("[pwd()]")[4]


@needs_bfcl
def test_a_hosted_actor_plays_by_real_tool_calls() -> None:
    server = Server()
    asked = [
        calling(tool_call('{"folder": "document"}', name="cd", id="a")),
        calling(tool_call("{}", name="pwd", id="b")),
        completion("You are in document."),
    ]
    server.replies = [(200, reply, {}, 0.0) for reply in asked]
    env = BFCLEnv("all", api="gorilla_fs", functions=False)
    agent = ActorAgent(OpenAILLM("m", base_url=server.url))
    try:
        observation, info = env.reset(options={"world": 0})
        for _ in asked:
            observation, _, _, _, info = env.step(agent.act(observation, info))
    finally:
        server.close()
    assert observation == f"User: {env.dialogues[0].requests[1]}"
    assert "cd" in {one["function"]["name"] for one in server.requests[0]["tools"]}
    answers = [one for one in server.requests[2]["messages"] if one["role"] == "tool"]
    assert [one["tool_call_id"] for one in answers] == ["a", "b"]
    assert "document" in answers[0]["content"] and "document" in answers[1]["content"]


@needs_bfcl
@pytest.mark.parametrize("category", ["base", "miss_func"])
def test_a_pickled_dialogue_goes_on_where_it_was(category: str) -> None:
    env = BFCLEnv("all", api="travel_api", category=category)
    for world in (0, 7):
        env.reset(options={"world": world})
        step = env.step("[no_such_function()]")
        while not (step[2] or step[3]):
            twin, action = pickle.loads(pickle.dumps(env)), env.oracle_action()
            step = env.step(action)
            assert twin.step(action) == step


@needs_bfcl
def test_our_checker_finds_no_fault() -> None:
    assert check_text_env(BFCLEnv("eval", category="miss_param")) == []
    assert check_text_env(BFCLEnv("eval", category="miss_func")) == []


@needs_bfcl
def test_a_folder_is_used_instead_of_the_package_and_two_copies_are_refused(tmp_path: Path) -> None:
    copy = tmp_path / "bfcl_eval"
    copy.symlink_to(Path(str(default_folder())), target_is_directory=True)
    code = (
        "from experiential.envs.bfcl.env import BFCLEnv\n"
        f"env = BFCLEnv('all', data={str(copy)!r})\n"
        "print(len(env.worlds), env.reset(seed=0)[1]['task_id'][:20])\n"
    )
    told = {**os.environ, "BFCL_DATA": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=told)
    assert done.stdout == "200 bfcl-multi_turn_base\n", done.stderr
    (tmp_path / "other" / "data").mkdir(parents=True)
    (tmp_path / "other" / "eval_checker").mkdir()
    BFCLEnv()
    with pytest.raises(ConfigError, match="Expected one copy of BFCL in a process"):
        BFCLEnv(data=str(tmp_path / "other"))
