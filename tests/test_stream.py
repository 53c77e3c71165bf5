"""Streams: memories that grow, baselines beside them, logs that survive a kill, transfer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiential.agents.functions import (
    FunctionExtractor,
    template,
    template_extractor,
    transcript,
)
from experiential.bank.index.embed import CachedEmbedder, HashingEmbedder
from experiential.cli.errors import run_app
from experiential.cli.main import app
from experiential.envs.alfworld.games import TASK_TYPES
from experiential.evaluation.memories import (
    BankMemory,
    BM25Examples,
    Examples,
    Setup,
)
from experiential.evaluation.play_log import PlayedEpisode, read_log
from experiential.evaluation.stream import StreamKey, StreamPlan, replay, trajectory_of
from experiential.evaluation.stream_report import curve, paired_rates, report
from experiential.evaluation.suites import find_suite
from experiential.types import Distillation, Experience, Trajectory, Turn
from tests.chat_server import Server, completion
from tests.stream_worlds import ERAS, VAULTS, WORLDS

ROOT = Path(__file__).parent.parent
COMMAND = ["bench", "stream", "--embedder", "hashing", "--agent", "tests.stream_worlds:reader"]
VAULT = [*COMMAND, "--suite", "tests.stream_worlds:VAULTS"]


def played(results: Path, *arguments: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The rows of the report of a command that ends well, by source, task and arm."""
    assert run_app(app, [*arguments, "--results", str(results)]) == 0
    found = json.loads(results.with_suffix(".json").read_text())
    return {(row["source"], row["task"], row["arm"]): row for row in found["rows"]}


def lines(results: Path) -> list[dict[str, Any]]:
    """The episodes of a log without their times, in one order."""
    rows = [json.loads(line) for line in results.read_text().splitlines()[1:]]
    for row in rows:
        del row["seconds"], row["time"], row["spent"]["seconds"]
        row["note"]["memory"].pop("seconds", None)
    return sorted(rows, key=lambda row: (row["arm"], str(row["place"])))


def test_memory_helps_where_only_memory_can_and_another_tasks_memory_does_not(
    tmp_path: Path,
) -> None:
    arms = "none,trajectory,bm25,bank,bank-frozen,bank-shuffled"
    rows = played(tmp_path / "a.jsonl", *VAULT, "--visits", "3", "--arms", arms)
    gain = {arm: row["forward_transfer"] for (_, _, arm), row in rows.items()}
    assert gain["none"] is None
    for arm in ("trajectory", "bm25", "bank"):
        assert gain[arm]["low"] > 0.3, arm
    assert gain["bank-shuffled"]["high"] < gain["bank"]["low"]
    assert 0 < gain["bank-frozen"]["mean"] < gain["bank"]["mean"]
    assert rows["vault", "vault", "bank"]["episodes"] == 3 * 3 * WORLDS
    assert rows["vault", "vault", "none"]["episodes"] == 3 * WORLDS
    first, last = (rows["vault", "vault", "bank"]["curve"][place] for place in (0, -1))
    mean = rows["vault", "vault", "bank"]["success"]["mean"]
    assert first < last == pytest.approx(mean, abs=1e-4)


def test_the_same_seed_gives_the_same_file_and_another_seed_another(tmp_path: Path) -> None:
    small = [*VAULT, "--visits", "2", "--orders", "2", "--arms", "none,bank,bank-shuffled"]
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        played(tmp_path / f"{name}.jsonl", *small, "--seed", seed)
    first, second, other = (lines(tmp_path / f"{name}.jsonl") for name in "abc")
    assert first == second
    assert [row["seed"] for row in first] != [row["seed"] for row in other]


def test_a_killed_stream_goes_on_to_the_figures_of_an_undisturbed_one(tmp_path: Path) -> None:
    small = [*VAULT, "--visits", "2", "--orders", "2", "--arms", "none,bm25,bank"]
    whole = played(tmp_path / "whole.jsonl", *small)
    killed = tmp_path / "killed.jsonl"
    command = [sys.executable, "-m", "experiential.cli.main", *small, "--results", str(killed)]
    for wanted in (20, 50):  # in the middle of a bank, and of another stream
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        while not killed.is_file() or killed.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = killed.read_bytes()
    killed.write_bytes(before[: before.rfind(b"\n") + 1] + b'{"kind": "episode", "ta')
    assert played(killed, *small) == whole
    assert lines(killed) == lines(tmp_path / "whole.jsonl")


def test_transfer_reads_the_memory_of_a_task_in_the_others_and_never_writes_it(
    tmp_path: Path,
) -> None:
    results = tmp_path / "eras.jsonl"
    eras = [*COMMAND, "--suite", "tests.stream_worlds:ERAS", "--transfer", "--orders", "2"]
    rows = played(results, *eras, "--visits", "2", "--arms", "none,bank")
    names = [task.name for task in ERAS.tasks]
    pairs = [(one, other) for one in names for other in names if one != other]
    assert {key[:2] for key in rows if key[2] == "bank"} == {*pairs, *((n, n) for n in names)}
    for name in names:
        assert rows[name, name, "bank"]["forward_transfer"]["low"] > 0
    for one, other in pairs:  # what was learned of another era is wrong here
        assert rows[one, other, "bank"]["success"]["mean"] < 0.2
    for episode in read_log(results):
        assert isinstance(episode, PlayedEpisode)
        own = episode.task == episode.place["source"]
        assert episode.note["learned"] == own
    report = json.loads(results.with_suffix(".json").read_text())
    overall = {(row["source"], row["arm"]): row for row in report["overall"]}
    assert overall["all tasks", "bank"]["success"]["low"] > 0.3
    assert overall["all transfers", "bank"]["success"]["high"] < 0.2


def test_further_arms_and_orders_add_to_a_log(tmp_path: Path) -> None:
    results, small = tmp_path / "a.jsonl", [*VAULT, "--visits", "2"]
    played(results, *small, "--orders", "1", "--arms", "none")
    rows = played(results, *small, "--orders", "2", "--arms", "bm25")
    assert [len(row["by_order"]) for row in rows.values()] == [1, 2]
    assert rows["vault", "vault", "bm25"]["forward_transfer"]["low"] > 0
    text = results.read_bytes()
    assert len(lines(results)) == 3 * 2 * WORLDS
    results.write_bytes(
        text[: text[:-1].rfind(b"\n") + 1]
    )  # the last stream lacks its last episode
    rows = played(results, *small, "--orders", "1", "--arms", "none")
    assert [len(row["by_order"]) for row in rows.values()] == [1, 1]


def test_crossep_emb_is_200_games_of_six_types_and_30_transfers() -> None:
    suite = find_suite("crossep-emb")
    assert {task.name for task in suite.tasks} == set(TASK_TYPES)
    assert sum(task.worlds or 0 for task in suite.tasks) == 200
    assert {(task.split, task.turns) for task in suite.tasks} == {("valid_train", 20)}
    assert all(task.kwargs["task_types"] == [task.name] for task in suite.tasks)


@pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed")
def test_the_oracle_wins_each_api_and_the_twelve_transfers_between_them(tmp_path: Path) -> None:
    ours, base = find_suite("crossep-tool").tasks, find_suite("bfcl-base").tasks
    assert {task.kwargs["category"] for task in ours} == {"ours"} and len(ours) == 4
    assert sum(task.worlds or 0 for task in base) == 200
    small = ["--episodes", "3", "--orders", "1", "--arms", "none,bm25", "--agent", "oracle"]
    rows = played(tmp_path / "a.jsonl", *COMMAND, "--suite", "bfcl-base", "--transfer", *small)
    assert len(rows) == 4 + 4 + 12
    assert all(row["success"]["mean"] == 1.0 for row in rows.values())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("fast_downward") is None, reason="alfworld is not installed")
def test_made_households_are_played_by_type_and_the_oracle_wins_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--episodes", "1", "--orders", "1", "--arms", "none,bm25", "--agent", "oracle"]
    emb = [*COMMAND, "--suite", "crossep-emb", "--transfer", "--made", *small]
    rows = played(tmp_path / "a.jsonl", *emb)
    assert len(rows) == 6 + 6 + 30
    assert all(row["success"]["mean"] == 1.0 for row in rows.values())
    assert "MADE DATA" in capsys.readouterr().out


def test_the_oracle_wins_every_episode_and_random_play_does_not(tmp_path: Path) -> None:
    small = ["--visits", "2", "--orders", "1", "--arms", "none,trajectory"]
    start = time.monotonic()
    for agent, won in (("oracle", True), ("random", False)):
        rows = played(tmp_path / f"{agent}.jsonl", *VAULT, *small, "--agent", agent)
        assert all((row["success"]["mean"] == 1.0) == won for row in rows.values())
    assert time.monotonic() - start < 30


def test_a_memory_of_the_users_has_two_methods_and_is_taught_again_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [*VAULT, "--visits", "2", "--orders", "1", "--arms", "none,tests.stream_worlds:Newest"]
    whole = played(tmp_path / "whole.jsonl", *own)
    assert whole["vault", "vault", "tests.stream_worlds:Newest"]["forward_transfer"]["low"] > 0
    results = tmp_path / "failed.jsonl"
    fifteenth = lines(tmp_path / "whole.jsonl")[-1]["transcript"][0]["observation"].split("\n")[0]
    monkeypatch.setenv("READER_FAILS_ON", fifteenth)
    assert run_app(app, [*own, "--results", str(results)]) == 1
    assert "no answer; the same command without --overwrite goes on" in capsys.readouterr().err
    assert 1 < len(results.read_text().splitlines()) < 2 * 2 * WORLDS
    monkeypatch.delenv("READER_FAILS_ON")
    assert played(results, *own) == whole


def test_options_of_a_server_are_those_of_bench_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*VAULT, "--agent", "llm", "--results", str(tmp_path / "a.jsonl")]
    assert run_app(app, [*asked, "--timeout", "9"]) == 2
    assert "a server (--base-url) with --timeout" in capsys.readouterr().err
    hosted = [*asked, "--base-url", "http://127.0.0.1:9/v1", "--model", "m"]
    assert run_app(app, [*hosted, "--extra-body", "{"]) == 2
    assert "Expected --extra-body to be JSON" in capsys.readouterr().err
    assert run_app(app, [*hosted, "--retries", "0", "--concurrency", "1", "--timeout", "1"]) != 0
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_a_conversation_too_long_for_the_model_is_a_result_and_the_stream_goes_on(
    tmp_path: Path,
) -> None:
    server, log = Server(), tmp_path / "a.jsonl"
    server.replies = [
        (200, completion("Yes"), {}, 0.0),  # the question whether there is a server
        (400, {"error": "This model's maximum context length is 4096 tokens."}, {}, 0.0),
        (200, completion(""), {}, 0.0),
        (200, completion("I look."), {}, 0.0),
    ]
    asked = [*VAULT, "--agent", "llm", "--arms", "none", "--episodes", "3", "--slots", "1"]
    hosted = ["--base-url", server.url, "--model", "m", "--results", str(log)]
    try:
        assert run_app(app, [*asked, *hosted]) == 0
    finally:
        server.close()
    rows = [one for one in read_log(log) if isinstance(one, PlayedEpisode)]
    assert [one.error is None for one in rows] == [False, False, True]
    assert "fits the context" in str(rows[0].error) and "an empty text" in str(rows[1].error)


class Counting(FunctionExtractor):
    """Counts what it distils."""

    calls = 0

    async def adistill(self, trajectory: Trajectory, shown: Sequence[Experience]) -> Distillation:
        self.calls += 1
        return await super().adistill(trajectory, shown)


def setup(folder: Path, extractor: Any = None) -> Setup:
    embedder = CachedEmbedder(HashingEmbedder())
    return Setup(0, 2, folder, embedder, extractor or template_extractor())


def test_a_resumed_bank_does_not_distil_again_what_its_log_kept(tmp_path: Path) -> None:
    results = tmp_path / "a.jsonl"
    played(results, *VAULT, "--visits", "1", "--orders", "1", "--arms", "bank")
    episodes = [one for one in read_log(results) if isinstance(one, PlayedEpisode)]
    found: list[str] = []
    for number, kept in enumerate((True, False)):
        extractor = Counting(template)
        memory = BankMemory(setup(tmp_path / str(number), extractor))
        for one in episodes:
            if kept:
                replay(memory, [one])
            else:
                memory.recall(one.note["words"])
                memory.learn(trajectory_of(one))
        assert extractor.calls == (0 if kept else WORLDS)
        found.append(memory.recall(episodes[3].note["words"]))
        memory.close()
    assert found[0] == found[1] != ""


def trajectory(task: str, *actions: str, success: bool = True) -> Trajectory:
    turns = [Turn(observation="You wait.", action=one, feedback=f"{one} done") for one in actions]
    return Trajectory(task=task, turns=tuple(turns), success=success)


def test_examples_are_the_nearest_episodes_and_of_equally_near_ones_the_newest(
    tmp_path: Path,
) -> None:
    nearest, words = Examples(setup(tmp_path)), BM25Examples(setup(tmp_path))
    for memory in (nearest, words):
        assert memory.recall("open the red door") == ""
        memory.learn(trajectory("open the red door", "push"))
        memory.learn(trajectory("boil an egg", "heat the water"))
        memory.learn(trajectory("open the red door", "pull", success=False))
        advice = memory.recall("open the red door")
        assert advice.index("> pull") < advice.index("> push")
        assert "egg" not in advice
        assert "Outcome: failure" in advice
    assert "heat the water" in words.recall("water")  # a word of the play, not of the task


def test_a_long_episode_loses_its_middle() -> None:
    text = transcript(trajectory("wait", *(f"wait {number}" for number in range(100))), limit=400)
    assert "> wait 0\n" in text
    assert "> wait 99\n" in text
    assert "turns left out" in text
    assert len(text) < 600


def test_only_the_first_episodes_teach_a_frozen_bank() -> None:
    plan = StreamPlan(VAULTS.tasks, ("bank-frozen",), visits=2, freeze_after=5)
    steps = plan.steps(StreamKey("bank-frozen", 0, "vault"))
    assert [step.learns for step in steps] == [True] * 5 + [False] * (2 * WORLDS - 5)
    half = StreamPlan(VAULTS.tasks, ("bank-frozen",), visits=2)
    assert sum(step.learns for step in half.steps(StreamKey("bank-frozen", 0, "vault"))) == WORLDS


def test_orders_are_permutations_of_the_same_episodes() -> None:
    plan = StreamPlan(VAULTS.tasks, ("bank",), visits=2)
    orders = [
        [step.job for step in plan.steps(StreamKey("bank", order, "vault"))] for order in range(3)
    ]
    assert len({tuple(job.task.group for job in order) for order in orders}) == 3
    assert len({tuple(sorted(job.task.group for job in order)) for order in orders}) == 1
    assert len({frozenset((j.task.group, j.sampling_seed) for j in order) for order in orders}) == 1


def episode(world: int, position: int, success: bool, order: int = 0) -> PlayedEpisode:
    return PlayedEpisode(
        task="vault",
        world=world,
        visit=0,
        place={"order": order, "source": "vault", "position": position},
        task_id="",
        success=success,
        reward=0.0,
        turns=1,
        prompt_tokens=0,
        response_tokens=0,
        seconds=0.0,
        shown=0,
        note={"memory": {}},
    )


def test_forward_transfer_leaves_out_the_first_episode_and_pairs_the_others() -> None:
    without = [episode(0, 0, False), episode(1, 1, True), episode(2, 2, False)]
    grown = [
        *(episode(0, 0, True), episode(1, 1, True), episode(2, 2, True)),
        *(episode(2, 0, True, 1), episode(0, 1, False, 1), episode(1, 2, False, 1)),
    ]
    # world 0: 0 - 0 in order 1; world 1: 1 - 1 and 0 - 1; world 2: 1 - 0 in order 0
    with_memory, base = paired_rates(grown, without)
    np.testing.assert_allclose(with_memory, [0.0, 0.5, 1.0])
    np.testing.assert_allclose(base, [0.0, 1.0, 0.0])
    # up to each position: order 0 gives 1, 1, 1 and order 1 gives 1, 1/2, 1/3
    assert curve(grown) == [1.0, 0.75, 0.6667]


def test_worlds_that_all_agree_have_the_intervals_of_as_many_episodes() -> None:
    grown = [episode(world, world, False, order) for world in range(8) for order in range(2)]
    never = [one for one in grown if one.place["order"] == 0]
    played = [
        one.model_copy(update={"arm": arm})
        for arm, episodes in (("none", never), ("bank", grown))
        for one in episodes
    ]
    rows = {row["arm"]: row for row in report(played)["rows"]}
    for row in rows.values():  # Wilson, 0 of 8
        assert row["success"]["high"] == pytest.approx(0.3244, abs=1e-4)
    gain = rows["bank"]["forward_transfer"]  # Newcombe, of the seven that are not the first
    assert (gain["low"], gain["high"]) == pytest.approx((-0.3543, 0.3543), abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arms", "bnak"], "did you mean 'bank'"),
        (["--transfer"], "Expected a suite of several tasks for --transfer"),
        (["--seed", "5"], "seed"),
        (["--results", "r.json"], "Expected --results to be a JSON Lines file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "a.jsonl"
    small = [*VAULT, "--orders", "1", "--arms", "none", "--episodes", "2"]
    played(results, *small)
    capsys.readouterr()
    assert run_app(app, [*small, "--results", str(results), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_dry_run_counts_the_episodes_and_plays_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eras = [*COMMAND, "--suite", "tests.stream_worlds:ERAS", "--transfer", "--orders", "2"]
    results = tmp_path / "a.jsonl"
    arguments = [*eras, "--arms", "none,bank", "--dry-run", "--results", str(results)]
    assert run_app(app, arguments) == 0
    # none: 3 tasks; bank: 2 orders of 3 sources, each in 3 tasks; 8 worlds
    shown = capsys.readouterr().out
    assert f"9 streams, {(3 + 2 * 3 * 3) * WORLDS} episodes" in shown and "no model" in shown
    assert not results.exists()


def test_a_dry_run_bounds_requests_tokens_and_cost_of_each_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, figures = Server(), dict[str, list[float]]()
    small = [*VAULT, "--agent", "llm", "--model", "m", "--base-url", server.url, "--orders", "1"]
    more = ["--max-tokens", "100", "--price", "1", "2", "--dry-run"]
    for arm in ("none", "bm25", "bank"):
        results = ["--results", str(tmp_path / "a.jsonl")]
        assert run_app(app, [*small, "--arms", arm, *more, *results]) == 0
        _, asked, tokens, cost = capsys.readouterr().out.splitlines()
        found = [word.replace(",", "") for word in f"{asked} {tokens} {cost}".split()]
        figures[arm] = [float(word.strip("$")) for word in found if word.strip("$")[0].isdigit()]
    server.close()
    assert not server.requests and not [*tmp_path.iterdir()]
    turns = VAULTS.tasks[0].turns
    calls, read, written, dollars = figures["none"]
    assert (calls, written) == (WORLDS * turns, WORLDS * turns * 100)
    assert abs(dollars - (read + 2 * written) / 1e6) <= 0.005
    # three past episodes of 4,000 characters each in every prompt; an episode distilled each
    assert figures["bm25"][1] == read + WORLDS * turns * 4_000
    assert figures["bank"][0] == calls + WORLDS and figures["bank"][2] == written + WORLDS * 512
