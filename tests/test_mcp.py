"""A bank as an MCP server: the official client recalls, asks and records, over stdio and HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.cli import main
from experiential.cli.errors import run_app
from experiential.cli.mcp import create_server
from tests.chat_server import Server, completion

TASK = "open the red door"
LESSON = "The red door needs the brass key."
TRANSCRIPT = [
    {"role": "user", "content": TASK},
    {"role": "assistant", "content": "I take the brass key."},
]
COMMAND = ["-m", "experiential.cli.main", "mcp"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "bank"


@pytest.fixture
def taught(folder: Path) -> xp.Experience:
    """The one entry of the bank in ``folder``, which is closed again."""
    with FolderBank(folder, embedder="hashing") as bank:
        return bank.add(LESSON, task=TASK)


@pytest.fixture
def bank(folder: Path, taught: xp.Experience) -> Iterator[FolderBank]:
    with FolderBank(folder) as bank:
        yield bank


@pytest.fixture
def manager(bank: FolderBank) -> Iterator[xp.ExperienceManager]:
    with xp.ExperienceManager(bank, free_share=0.0) as manager:
        yield manager


def over_stdio(folder: Path, *arguments: str) -> StdioServerParameters:
    command = [*COMMAND, str(folder), "--embedder", "hashing", *arguments]
    return StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))


async def call(client: Client, tool: str, **arguments: Any) -> CallToolResult:
    found = await client.call_tool(tool, arguments)
    assert isinstance(found, CallToolResult)
    return found


async def answer(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    found = await call(client, tool, **arguments)
    assert not found.is_error and found.structured_content is not None, found
    return found.structured_content


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    found = await call(client, tool, **arguments)
    assert found.is_error
    return str(found.content[0].text)  # type: ignore[union-attr]


async def recalled(client: Client, **arguments: Any) -> dict[str, Any]:
    """Recall until an episode is guided: one in ten plays free, as the baseline."""
    while not (found := await answer(client, "recall", task=TASK, **arguments))["advice"]:
        pass
    return found


async def test_over_stdio_advice_is_shown_used_recorded_and_credited(
    folder: Path, taught: xp.Experience
) -> None:
    async with Client(over_stdio(folder)) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"recall", "ask", "record"}
        assert tools["recall"].input_schema["required"] == ["task"]
        assert tools["recall"].annotations and tools["recall"].annotations.read_only_hint
        found = await recalled(client)
        assert found["advice"] == f"<experience>\n1. {LESSON}\n</experience>\n"
        said = await answer(client, "ask", query="which key opens the red door?")
        assert LESSON in said["result"]
        ended = await answer(
            client, "record", task=TASK, transcript=TRANSCRIPT, success=True, feedback="It opens."
        )
        assert ended == {"episode": found["episode"], "credited": 2}
    with FolderBank(folder) as bank:
        trajectory = bank.trajectory(found["episode"])
        assert trajectory is not None and trajectory.success is True
        assert trajectory.turns[0].action == "I take the brass key."
        assert trajectory.turns[0].feedback == "It opens."
        assert [use.how for use in trajectory.uses] == ["episode_start", "search_and_ask"]
        assert {use.experience_id for use in trajectory.uses} == {taught.id}
        assert bank.outcomes(taught.id, 1) == [1, 1]
        assert bank.queue.waiting() == [found["episode"]], "no extractor: it waits for a distiller"


@contextmanager
def listening(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process on a free port, and its address."""
    command = [sys.executable, *COMMAND, str(folder), "--http", "127.0.0.1:0", *arguments]
    command += () if "--token" in arguments else ("--no-token",)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("serving http://127.0.0.1:"), line + process.stderr.read()
        yield process, line.split()[1]
    finally:
        process.kill()
        process.communicate()


async def test_over_http_a_token_is_asked_for_and_what_is_acknowledged_survives_a_kill(
    folder: Path, taught: xp.Experience
) -> None:
    with listening(folder, "--token", "s3cret") as (process, url):
        with httpx2.Client() as web:
            assert web.post(url, json={}).status_code == 401
        headers = {"authorization": "Bearer s3cret"}
        async with httpx2.AsyncClient(headers=headers, timeout=60) as web:
            transport = streamable_http_client(url, http_client=web)
            async with Client(transport) as client:
                found = await recalled(client, k=1)
                ended = await answer(
                    client,
                    "record",
                    task=TASK,
                    turns=[{"observation": "a red door", "action": "use brass", "reward": 1.0}],
                    score=0.5,
                    episode=found["episode"],
                )
                process.send_signal(signal.SIGKILL)
        assert ended["credited"] == 1
    with FolderBank(folder) as bank:
        trajectory = bank.trajectory(ended["episode"])
        assert trajectory is not None and trajectory.success is None
        assert trajectory.score == 0.5 and trajectory.reward == 1.0
        assert trajectory.uses[0].experience_id == taught.id


def test_over_http_it_stops_cleanly_on_sigterm(folder: Path, taught: xp.Experience) -> None:
    with listening(folder) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
    FolderBank(folder).close()  # the lock is free


async def test_read_only_hides_record_and_works_beside_the_writer(
    folder: Path, bank: FolderBank
) -> None:
    head = bank.head
    async with Client(over_stdio(folder, "--read-only")) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == {"recall", "ask"}
        assert LESSON in (await recalled(client))["advice"]
        assert (
            LESSON in (await answer(client, "ask", query="which key opens the red door?"))["result"]
        )
        assert "record" in await refusal(client, "record", task=TASK, transcript="I won.")
    assert bank.head == head and bank.queue.waiting() == []


async def test_a_named_model_distils_what_is_recorded_for_the_next_recall(folder: Path) -> None:
    server = Server()
    lesson = '<answer>[{"op": "add", "text": "Take the brass key to the red door."}]</answer>'
    server.replies = [(200, completion(lesson), {}, 0.0)]
    arguments = ("--model", "m", "--base-url", server.url)
    async with Client(over_stdio(folder, *arguments)) as client:
        await answer(client, "record", task=TASK, transcript="I pulled in vain.", success=False)
        async with asyncio.timeout(60):
            found = await recalled(client)
    assert "Take the brass key to the red door." in found["advice"]
    assert "I pulled in vain." in str(server.requests)


async def test_among_several_clients_only_the_id_says_whose_episode_it_is(
    manager: xp.ExperienceManager,
) -> None:
    shared = create_server(manager)
    async with Client(shared) as one, Client(shared) as two:
        found = await answer(one, "recall", task=TASK)
        other = await answer(two, "record", task=TASK, transcript="I never asked.", success=False)
        assert other["episode"] != found["episode"] and other["credited"] == 0
        mine = await answer(
            one, "record", task=TASK, transcript="Brass.", success=True, episode=found["episode"]
        )
        assert mine == {"episode": found["episode"], "credited": 1}


async def test_one_client_needs_no_id_and_gets_the_newest_episode_of_its_task(
    manager: xp.ExperienceManager,
) -> None:
    async with Client(create_server(manager, one_client=True)) as client:
        first = await answer(client, "recall", task=TASK)
        second = await answer(client, "recall", task=TASK)
        await answer(client, "recall", task="close the red door")
        for found in (second, first):
            ended = await answer(client, "record", task=TASK, transcript="Brass.")
            assert ended["episode"] == found["episode"]


async def test_what_a_model_gets_wrong_is_said_in_words_and_can_be_put_right(
    manager: xp.ExperienceManager,
) -> None:
    async with Client(create_server(manager)) as client:
        assert "non-empty text" in await refusal(client, "recall", task=" ")
        assert "whole number" in await refusal(client, "recall", task=TASK, k=0)
        id = (await answer(client, "recall", task=TASK))["episode"]
        of = {"task": TASK, "episode": id}
        assert "got neither" in await refusal(client, "record", **of)
        assert "got both" in await refusal(client, "record", **of, transcript="x", turns=[])
        assert TASK in await refusal(client, "record", task="other", episode=id, transcript="x")
        assert "role" in await refusal(client, "record", **of, transcript=[{"content": "x"}])
        assert "score" in await refusal(client, "record", **of, transcript="x", score="nan")
        assert "recall" in await refusal(client, "record", task=TASK, episode="?", transcript="x")
        assert "recall" in await refusal(client, "ask", query="which key?", episode="?")
        assert (await answer(client, "record", **of, transcript="At last."))["episode"] == id
        ended = manager.bank.trajectory(id)
        assert ended is not None and [turn.action for turn in ended.turns] == ["At last."]
        assert "recall" in await refusal(client, "record", **of, transcript="Again.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--http", "8322"], "HOST:PORT"),
        (["--http", "127.0.0.1:99999"], "HOST:PORT"),
        (["--http", "0.0.0.0:0", "--no-token"], "token"),
        (["--base-url", "http://127.0.0.1:1/v1"], "127.0.0.1:1"),
        (["--read-only", "--model", "m"], "--read-only"),
    ],
)
def test_wrong_options_are_user_errors(
    folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(main.app, ["mcp", str(folder), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_in_use_names_the_way_to_share_it(
    folder: Path, bank: FolderBank, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(main.app, ["mcp", str(folder)]) == 2
    assert "experiential serve" in capsys.readouterr().err


def test_without_the_package_the_extra_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert run_app(main.app, ["mcp", str(folder)]) == 2
    assert "experiential-rl[mcp]" in capsys.readouterr().err
    assert not folder.exists()
