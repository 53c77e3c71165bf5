"""`experiential bench run` with a server: killed, out of money, left alone, moved, gone on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiential.agents.prompts import derived_seed
from experiential.bank.bank import ExperienceBank
from experiential.cli.errors import run_app
from experiential.cli.main import app
from experiential.cli.progress import Progress
from experiential.evaluation.arms import PLACEBO, WORDS
from experiential.evaluation.play_log import BankChange, PlayedEpisode, read_log
from experiential.llm.metered import Spent
from tests.chat_server import Server, completion

LESSON = '<answer>[{"op": "add", "text": "Holes are where the goal is not."}]</answer>'


class Lake(Server):
    """Plays FrozenLake by going down, distils, and may be down, slow or dear."""

    def __init__(self) -> None:
        super().__init__()
        self.served = 10**9
        self.delay, self.text, self.cost = 0.0, "I go. <action>Down</action>", 0.01
        self.longest = 10**9

    def reply_to(self, body: dict[str, Any]) -> tuple[int, Any, dict[str, str], float]:
        if body["max_tokens"] == 1:  # the question whether there is a server
            return 200, completion("Yes"), {}, 0.0
        if len(body["messages"]) > self.longest:
            return (
                400,
                {"error": {"code": "context_length_exceeded", "message": "Too long."}},
                {},
                0,
            )
        self.served -= 1
        if self.served < 0:
            return 503, {"error": "down"}, {}, 0.0
        distils = "<op" in body["messages"][0]["content"] or "operations" in str(body["messages"])
        reply = completion(LESSON if distils else self.text)
        reply["usage"] |= {"cost": self.cost}
        return 200, reply, {}, self.delay

    def begun(self) -> list[int]:
        """Seeds of the first requests of episodes."""
        return [
            one["seed"]
            for one in self.requests
            if one["max_tokens"] != 1 and len(one["messages"]) == 2
        ]


@pytest.fixture
def server() -> Iterator[Lake]:
    """A server that plays."""
    lake = Lake()
    yield lake
    lake.close()


def command(server: Server, folder: Path, *more: str) -> list[str]:
    """The command line of a run against a server."""
    where = ["--base-url", server.url, "--model", "m", "--results", str(folder / "r.json")]
    return ["bench", "run", "--suite", "frozenlake", *where, "--retries", "0", *more]


def logged(folder: Path) -> list[PlayedEpisode]:
    """The episodes in the log."""
    return [one for one in read_log(folder / "r.jsonl") if isinstance(one, PlayedEpisode)]


def test_a_killed_run_loses_at_most_the_episodes_that_were_being_played(
    server: Lake, tmp_path: Path
) -> None:
    server.delay, slots, kept = 0.02, 3, 0
    arguments = command(server, tmp_path, "--episodes", "20", "--slots", str(slots))
    for requests in (35, 80):
        begun, before = len(server.begun()), {derived_seed(one.seed, 0) for one in played(tmp_path)}
        line = [sys.executable, "-m", "experiential.cli.main", *arguments]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while len(server.requests) < requests and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.1)  # until the server has noted what was on its way
        new = server.begun()[begun:]
        assert new and not before & set(new)
        assert len(played(tmp_path)) > kept
        assert len(new) - (len(played(tmp_path)) - kept) <= slots
        kept = len(played(tmp_path))
    before = {derived_seed(one.seed, 0) for one in played(tmp_path)}
    begun = len(server.begun())
    assert run_app(app, arguments) == 0
    assert not before & set(server.begun()[begun:])
    assert len(played(tmp_path)) == len(server.begun()[begun:]) + kept == 20


def played(folder: Path) -> list[PlayedEpisode]:
    """The episodes in the log, if there is one."""
    return logged(folder) if (folder / "r.jsonl").exists() else []


def test_an_episode_is_logged_with_all_that_was_read_written_and_paid(
    server: Lake, tmp_path: Path
) -> None:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        entry = bank.add("Go down first.", task="Win on a grid of symbols within 8 moves.")
    arguments = command(server, tmp_path, "--episodes", "2", "--bank", str(tmp_path / "bank"))
    assert run_app(app, [*arguments, "--search-and-ask", "1"]) == 0
    off, frozen = logged(tmp_path)[0], logged(tmp_path)[-1]
    assert (off.arm, frozen.arm, off.shown, frozen.shown) == ("off", "frozen", 0, 1)
    assert off.retrieved == () and frozen.retrieved[0].id == entry.id
    assert frozen.retrieved[0].text == "Go down first."
    for one in (off, frozen):
        assert len(one.transcript) == one.turns == one.spent.requests > 0
        assert {turn.reply for turn in one.transcript} == {"I go. <action>Down</action>"}
        assert {turn.action for turn in one.transcript} == {"Down"}
        assert sum(turn.reward or 0.0 for turn in one.transcript) == one.reward
        assert (one.prompt_tokens, one.response_tokens) == (9 * one.turns, 2 * one.turns)
        assert one.spent.cost == pytest.approx(0.01 * one.turns)
        texts = [turn.observation for turn in one.transcript]
        assert len(texts[0].splitlines()) > 3 and one.end and one.error is None
    report = json.loads((tmp_path / "r.json").read_text())["report"]
    assert report["tasks"][0]["tokens"]["mean"] == pytest.approx(
        sum(11 * one.turns for one in logged(tmp_path) if one.arm == "off") / 2
    )


def test_a_server_that_goes_down_stops_the_run_and_costs_nothing_once_it_is_back(
    server: Lake, tmp_path: Path, capsys: Any
) -> None:
    arguments = command(server, tmp_path, "--episodes", "20", "--slots", "2")
    server.served = 30
    assert run_app(app, arguments) == 1
    error = capsys.readouterr().err
    assert "3 episodes in a row that it failed" in error and "same command" in error
    found = logged(tmp_path)
    good = {one.key for one in found if not one.error}
    failed = [one for one in found if one.error and not one.stopped]
    # The last good answer may come late and begin the count anew; one per slot may end meanwhile.
    assert 0 < len(good) < 20 and 3 <= len(failed) <= 6
    assert all(one.again and "503" in (one.error or "") for one in failed)
    report = json.loads((tmp_path / "r.json").read_text())["report"]
    assert report["tasks"][0]["failed"] == report["tasks"][0]["again"] == len(failed)

    server.served, server.requests = 10**9, []
    assert run_app(app, arguments) == 0
    asked = {seed for seed in server.begun()}
    assert len(server.begun()) == len(asked) == 20 - len(good)
    assert not asked & {derived_seed(one.seed, 0) for one in found if one.key in good}
    report = json.loads((tmp_path / "r.json").read_text())["report"]
    assert (report["tasks"][0]["failed"], report["tasks"][0]["episodes"]) == (0, 20)

    server.requests = []
    server.close()  # what is finished needs no server
    assert run_app(app, arguments) == 0 and not server.requests


def test_a_refusal_is_a_result_and_is_not_asked_for_again(
    server: Lake, tmp_path: Path, capsys: Any
) -> None:
    server.text = ""
    arguments = command(server, tmp_path, "--episodes", "3")
    assert run_app(app, arguments) == 1
    assert all("an empty text" in (one.error or "") for one in logged(tmp_path))
    assert not any(one.again for one in logged(tmp_path))
    assert sum(one.spent.prompt_tokens for one in logged(tmp_path)) == 27  # each was paid for
    asked = len(server.requests)
    assert run_app(app, arguments) == 1 and len(server.requests) == asked


def test_a_conversation_too_long_for_the_model_is_a_result_and_is_not_asked_for_again(
    server: Lake, tmp_path: Path, capsys: Any
) -> None:
    server.longest = 4  # messages: a system message, an observation, a reply, an observation
    arguments = command(server, tmp_path, "--episodes", "3", "--slots", "1")
    assert run_app(app, arguments) == 1  # every episode has failed
    assert "Expected a prompt that fits the context" in capsys.readouterr().out
    assert [(one.turns, one.again) for one in logged(tmp_path)] == [(2, False)] * 3
    asked = len(server.requests)
    assert run_app(app, arguments) == 1 and len(server.requests) == asked


def test_each_model_has_its_file_and_the_address_may_change(
    server: Lake, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["bench", "run", "--suite", "frozenlake", "--episodes", "2", "--seed", "3"]
    for name in ("lab/first:7b", "second"):
        assert run_app(app, [*line, "--base-url", server.url, "--model", name]) == 0
    files = sorted(path.name for path in (tmp_path / "runs" / "benchmarks").iterdir())
    assert files == [
        "frozenlake-llm-lab_first_7b-3.json",
        "frozenlake-llm-lab_first_7b-3.jsonl",
        "frozenlake-llm-second-3.json",
        "frozenlake-llm-second-3.jsonl",
    ]
    moved = Lake()
    again = [*line[:5], "3", *line[6:], "--base-url", moved.url, "--model", "second"]
    assert run_app(app, [*again, "--timeout", "9", "--concurrency", "2"]) == 0
    assert len(moved.begun()) == 1  # of three episodes, two were there
    assert run_app(app, [*again, "--extra-body", '{"top_k": 3}']) == 2
    assert "got extra_body None and not '{\"top_k\": 3}'" in capsys.readouterr().err
    moved.close()


def test_the_limit_of_cost_holds_over_runs(server: Lake, tmp_path: Path, capsys: Any) -> None:
    arguments = command(server, tmp_path, "--episodes", "12", "--slots", "2", "--max-cost")
    for limit, told in (("0.2", "0.2"), ("0.2", "0.2"), ("0.35", "0.35")):
        assert run_app(app, [*arguments, limit]) == 1
        error = capsys.readouterr().err
        assert f"stay within --max-cost {told} dollars" in error and "raise it" in error
        lines = logged(tmp_path)
        paid = sum(one.spent.cost or 0.0 for one in lines)
        assert float(limit) <= paid + 1e-9 and paid <= float(limit) + 2 * 0.01
        # a request in flight when the limit is reached is paid for, and its price never known
        real = 0.01 * sum(one["max_tokens"] > 1 for one in server.requests)
        assert paid - 1e-9 <= real <= paid + 2 * 2 * 0.01
    assert any(one.stopped for one in logged(tmp_path))
    assert run_app(app, [*arguments, "100"]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert len(found["cells"][0]["episodes"]) == 12 and found["report"]["tasks"][0]["failed"] == 0
    real = 0.01 * sum(one["max_tokens"] > 1 for one in server.requests)
    assert real - 2 * 2 * 0.01 <= found["report"]["tasks"][0]["actor"]["cost"] <= real + 1e-9


def test_all_arms_read_the_bank_as_it_was_while_one_lets_it_grow(
    server: Lake, tmp_path: Path, capsys: Any
) -> None:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add("Go down first.", task="Win on a grid of symbols within 8 moves.")
        bank.add("Levers open doors.", task="Open the vault.")
    arms = ("--bank", str(tmp_path / "bank"), "--arms", "on,off,frozen,shuffled,placebo")
    arguments = command(server, tmp_path, "--episodes", "3", "--learn", "--slots", "1", *arms)
    assert run_app(app, arguments) == 0
    texts = {
        arm: {entry.text for one in logged(tmp_path) if one.arm == arm for entry in one.retrieved}
        for arm in ("on", "off", "frozen", "shuffled", "placebo")
    }
    assert texts["off"] == set() and texts["frozen"] == {"Go down first."}
    assert texts["shuffled"] <= {"Go down first.", "Levers open doors."}
    assert "Levers open doors." in texts["shuffled"]
    assert {word.strip(".") for text in texts["placebo"] for word in text.split()} <= set(WORDS)
    assert all(
        entry.id == PLACEBO
        for one in logged(tmp_path)
        if one.arm == "placebo"
        for entry in one.retrieved
    )
    with ExperienceBank(tmp_path / "bank", read_only=True) as bank:
        grown = len(bank)
    changes = [one for one in read_log(tmp_path / "r.jsonl") if isinstance(one, BankChange)]
    assert grown > 2 and [one.entries for one in changes if one.arm == "on"][-1][1] == grown
    assert {one.entries for one in changes if one.arm != "on"} == {(2, 2)}
    found = json.loads((tmp_path / "r.json").read_text())["report"]
    pairs = {tuple(row["arms"]) for row in found["differences"]}
    assert ("on", "off") in pairs and ("frozen", "shuffled") in pairs and len(pairs) == 8
    assert [row["extractor"]["requests"] > 0 for row in found["tasks"]] == [True] + [False] * 4
    asked = len(server.requests)
    assert run_app(app, arguments) == 0 and len(server.requests) == asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arms", "on"), "Expected --bank FOLDER with --arms, got none"),
        (("--arms", "of"), "Expected --bank FOLDER with --arms, got none"),
        (("--bank", "b", "--arms", "frozn"), "did you mean 'frozen'?"),
        (("--bank", "b", "--arms", "off,on"), "Expected --learn and the arm on together"),
        (("--bank", "b", "--arms", "off", "--learn"), "got only --learn"),
        (("--agent", "random", "--results", "r.jsonl"), "Expected --results to be a JSON file"),
        (("--agent", "random", "--results", "."), "to be a JSON file, got the folder"),
        (("--agent", "random", "--results", "/dev/null/r.json"), "Expected to write a log"),
        (("--agent", "random", "--results", "r" * 300), "File name too long"),
        (("--agent", "random", "--seed", "-1"), "greater than or equal to 0"),
        (("--agent", "random", "--model", "m"), "no --model with --agent random, which asks no mo"),
        (("--agent", "random", "--constrain"), "Expected no --constrain with --agent random"),
        (("--agent", "oracle", "--max-cost", "3"), "Expected no --max-cost with --agent oracle"),
        (("--temperature", "-1"), "greater than or equal to 0"),
        (("--model", "tiny", "--max-cost", "3"), "Expected a server (--base-url) with --max-cost"),
        (("--base-url", "http://127.0.0.1:9", "--extra-body", "["), "--extra-body to be JSON"),
        (("--base-url", "http://127.0.0.1:9", "--extra-body", "3"), "a JSON object"),
    ],
)
def test_bad_options_are_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_app(app, ["bench", "run", "--suite", "frozenlake", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_asks_nobody_and_bounds_requests_tokens_and_cost(
    server: Lake, tmp_path: Path, capsys: Any
) -> None:
    arguments = command(server, tmp_path, "--episodes", "10", "--max-tokens", "100")
    assert run_app(app, [*arguments, "--dry-run", "--price", "1", "2"]) == 0
    shown = capsys.readouterr().out
    assert not server.requests and not [*tmp_path.iterdir()]
    assert "frozenlake (off): 10 episodes of at most 8 turns" in shown
    assert "requests to the model: at most 80" in shown and "8,000 written" in shown
    read = int(shown.split("at most about ")[1].split(" read")[0].replace(",", ""))
    assert f"cost: at most about ${(read + 2 * 8_000) / 1e6:.2f}" in shown
    # eight prompts of a system message and observations, and 28 earlier turns of 100 tokens
    assert 10 * 28 * 100 < read < 10 * (8 * 1_500 + 28 * 500)
    assert run_app(app, [*arguments[:-3], "4", *arguments[-2:]]) == 0
    capsys.readouterr()
    assert run_app(app, [*arguments, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "6 episodes of at most 8 turns, 4 are finished" in shown
    assert "by the 4 episodes in the log: about" in shown and "cost: unknown; pass" in shown
    assert run_app(app, [*arguments, "--dry-run", "--seed", "1"]) == 2
    assert "got seed 0 and not 1; use --overwrite" in capsys.readouterr().err
    (tmp_path / "r.jsonl").write_text("my notes\n")
    assert run_app(app, [*arguments, "--dry-run"]) == 2
    assert "got another file" in capsys.readouterr().err


def test_progress_is_plain_lines_without_a_terminal(monkeypatch: Any, capsys: Any) -> None:
    clock = [100.0]
    monkeypatch.setattr("experiential.cli.progress.time.monotonic", lambda: clock[0])
    one = PlayedEpisode(
        task="lake", arm="on", world=1, visit=0, task_id="", success=True, reward=1.0, turns=3,
        prompt_tokens=0, response_tokens=0, seconds=0.0, shown=0,
        spent=Spent(requests=3, prompt_tokens=900, generated_tokens=100, cost=0.5),
    )  # fmt: skip
    with Progress(total=10, before=2) as progress:
        for number in range(4):
            clock[0] += 20.0
            failed = {"success": False, "error": "down", "spent": Spent()}
            progress.note(one.model_copy(update=failed if number == 3 else {}))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "4 of 10 episodes, lake (on), success 100.0 %, 2,000 tokens, $1.00, about 2 min left",
        "6 of 10 episodes, lake (on), success 100.0 %, 1 failed, 3,000 tokens, $1.50,"
        " about 80 s left",
        "6 of 10 episodes, lake (on), success 100.0 %, 1 failed, 3,000 tokens, $1.50,"
        " about 80 s left",
    ]


def test_an_interrupt_says_once_that_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiential.cli.bench.play", interrupted)
    results = str(tmp_path / "r.json")
    command = ["bench", "run", "--suite", "frozenlake", "--agent", "random", "--results", results]
    assert run_app(app, command) == 130
    assert capsys.readouterr().err.splitlines() == [
        "The same command goes on with what is left.",
        "error: interrupted",
    ]
