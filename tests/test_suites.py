"""Suites played for real: agents, arms with and without a bank, failures, results that are kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.bank.bank import ExperienceBank
from experiential.cli.errors import run_app
from experiential.cli.main import app
from experiential.config import Arm
from experiential.envs import ENVS
from experiential.envs.readiness import READINESS, Entry
from experiential.errors import ConfigError
from experiential.evaluation.intervals import over_tasks, wilson
from experiential.evaluation.play_log import PlayedEpisode, PlayLog
from experiential.evaluation.players import Player
from experiential.evaluation.suite_play import (
    MakeActor,
    Plan,
    SuiteBank,
    plan_cells,
    play_cell,
    results_of,
)
from experiential.evaluation.suite_report import SuiteCell, by_world, report
from experiential.evaluation.suites import SUITES, Suite, SuiteTask, find_suite
from experiential.llm.scripted import ScriptedLLM

LAKE = find_suite("frozenlake").tasks[0]
ADVICE = "Win on a grid of symbols within 8 moves: the goal is where the holes are not."


def told(results: Path) -> dict[str, Any]:
    """What a results file holds."""
    return json.loads(results.read_text())


def evaluate(results: Path, *arguments: str) -> int:
    """The command line on a suite."""
    return run_app(app, ["bench", "run", "--results", str(results), *arguments])


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    """A bank with one entry that any FrozenLake task finds."""
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as opened:
        opened.add(
            ADVICE,
            task="Win on a grid of the symbols A B C D within 8 moves (Up, Down, Left, Right).",
        )
    return tmp_path / "bank"


def play(
    task: SuiteTask,
    plan: Plan,
    make_actor: MakeActor,
    folder: Path,
    arm: Arm = "off",
    bank: SuiteBank | None = None,
) -> SuiteCell:
    """Play one task under one arm."""
    cells = plan_cells(Suite("one", (task,), ""), plan, [arm])
    with PlayLog(folder / "played.jsonl", {}) as log:
        asyncio.run(play_cell(cells[0], plan, make_actor, bank, log))
        (cell,) = results_of(log, cells, {}).cells
    return cell


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


# The suites


def test_the_suites_are_those_of_the_issue_and_name_only_registered_environments() -> None:
    assert set(SUITES) == {
        "room",
        "alfworld",
        "webshop",
        "hotpotqa",
        "sokoban",
        "frozenlake",
        "three-task",
        "six-task",
        "alfworld-unseen",
        "alfworld-seen",
        "alfworld-valid-train",
        "frozenlake-published",
        "sokoban-published",
        "webshop-test",
        "webshop-human",
        "hotpotqa-validation",
        "crossep-emb",
        "bfcl-base",
        "bfcl-long-context",
        "bfcl-miss-func",
        "bfcl-miss-param",
        "crossep-tool",
        "vault",
        "lasting",
    }
    assert {task.id for suite in SUITES.values() for task in suite.tasks} <= set(ENVS)
    assert all(suite.source for suite in SUITES.values())


def test_the_mixtures_are_those_of_appendix_c3() -> None:
    three = ["minihack-room", "webshop", "alfworld"]
    assert [task.name for task in SUITES["three-task"].tasks] == three
    extra = {"minihack-maze", "minihack-keyroom", "sokoban-complementary"}
    assert {task.name for task in SUITES["six-task"].tasks} == {*three, *extra} and len(
        SUITES["six-task"].tasks
    ) == 6
    assert {task.turns for task in SUITES["six-task"].tasks} == {30}
    played = {task.name: (task.split, task.worlds) for task in SUITES["six-task"].tasks}
    assert played["alfworld"] == ("valid_unseen", 134) and played["webshop"] == ("test", 500)


@pytest.mark.parametrize(
    "task",
    {
        task.name + str(task.turns): task
        for suite in SUITES.values()
        for task in suite.tasks
        if task.id != "experiential/BFCL-v0"  # any text is an answer there, none has to be listed
    }.values(),
)
def test_every_task_begins_and_tells_its_true_budget(task: SuiteTask) -> None:
    made = Suite("one", (task,), "").with_made_data()
    if missing := made.missing():
        pytest.skip(f"needs {missing}")
    (task,) = made.tasks
    env: Any = gym.make(task.id, disable_env_checker=True, **task.arguments()).unwrapped
    _, info = env.reset(seed=0)
    assert info["admissible"], "the random agent draws from these"
    steps = (env.step("no such action") for _ in range(task.turns))
    assert [step[2] or step[3] for step in steps] == [False] * (task.turns - 1) + [True]
    env.close()


def test_a_suite_that_is_not_ready_names_the_line_that_installs_it(
    monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setitem(
        READINESS,
        "experiential/MiniHack-v0",
        Entry("levels", modules=("no_such_package",), extra="minihack"),
    )
    assert evaluate(tmp_path / "r.json", "--suite", "room", "--agent", "random") == 2
    assert (
        "experiential/MiniHack-v0: run pip install 'experiential-rl[minihack]'"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "r.json").exists()


# What is printed is what is played


@pytest.fixture
def no_data(monkeypatch: Any, tmp_path: Path) -> None:
    """A machine without real data."""
    for name in ("EXPERIENTIAL_DATA", "WEBSHOP_DATA", "HOTPOTQA_DATA", "ALFWORLD_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_without_data_a_suite_names_the_command_and_plays_invented_data_only_on_request(
    no_data: None, tmp_path: Path, capsys: Any
) -> None:
    played = ("--suite", "hotpotqa", "--agent", "oracle", "--episodes", "3")
    assert evaluate(tmp_path / "r.json", *played) == 2
    error = capsys.readouterr().err
    assert "run export HOTPOTQA_DATA=FILE" in error and "--made" in error
    assert not (tmp_path / "r.json").exists()
    assert evaluate(tmp_path / "r.json", *played, "--made") == 0
    shown, found = capsys.readouterr().out, told(tmp_path / "r.json")
    (facts,) = found["settings"]["tasks"]
    row = found["report"]["tasks"][0]
    kept = {name: row[name] for name in ("data", "split", "digest", "protocol")}
    assert kept == {name: facts[name] for name in kept}
    assert (row["data"], row["split"], len(row["digest"])) == ("made", "eval", 12)
    assert row["protocol"] == "5 turns, preset=erl, choices=True"
    assert f"hotpotqa: MADE data, eval of 150 worlds, digest {row['digest']}; 5 turns" in shown
    assert f"made eval {row['digest']}" in shown and "MADE DATA, not that of" in shown
    assert found["settings"]["suite"] == "hotpotqa-made"


def test_real_data_is_said_with_a_digest_that_follows_its_content(
    no_data: None, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    rows = [
        {"_id": str(n), "question": f"Who is {n}?", "answer": "Ada", "context": [["T", ["Ada."]]]}
        for n in range(8)
    ]
    digests: list[str] = []
    for name in ("one", "two", "one"):
        rows[0]["answer"] = name
        (tmp_path / "q.json").write_text(json.dumps(rows))
        os.utime(tmp_path / "q.json", ns=(len(digests), len(digests)))
        monkeypatch.setenv("HOTPOTQA_DATA", str(tmp_path / "q.json"))
        (facts,) = find_suite("hotpotqa").with_split("all").ready()
        assert (facts.data, facts.split, facts.worlds) == ("real", "all", 8)
        digests.append(facts.digest)
    assert digests[0] == digests[2] != digests[1]
    official = ("--suite", "hotpotqa-validation", "--agent", "oracle")
    assert evaluate(tmp_path / "r.json", *official) == 2
    assert "Expected the 7405 worlds of split all" in capsys.readouterr().err


def test_a_digest_knows_the_worlds_apart() -> None:
    def digest(name: str, **kwargs: Any) -> str:
        env: Any = gym.make(f"experiential/{name}-v0", disable_env_checker=True, **kwargs)
        return env.unwrapped.digest()

    for name in ("Sokoban", "FrozenLake", "Vault"):
        drawn = [digest(name, split=split) for split in ("eval", "eval", "train")]
        assert drawn[0] == drawn[1] != drawn[2]
    assert digest("Sokoban", preset="complementary") != digest("Sokoban")


def test_an_official_set_is_played_whole_unless_told_otherwise() -> None:
    task = SuiteTask("set", "Any-v0", worlds=134)
    assert len(Plan().jobs(task, 134, None)) == 134
    assert len(Plan(episodes=20).jobs(task, 134, None)) == 20
    assert len(Plan().jobs(SuiteTask("free", "Any-v0"), 500, None)) == 100


# Agents


@pytest.mark.parametrize("suite", ["sokoban", "frozenlake", "hotpotqa"])
def test_the_oracle_wins_every_episode_and_random_play_does_not(
    suite: str, tmp_path: Path, capsys: Any
) -> None:
    played = ("--suite", suite, "--made", "--episodes", "10")
    assert evaluate(tmp_path / "oracle.json", *played, "--agent", "oracle") == 0
    assert evaluate(tmp_path / "random.json", *played, "--agent", "random") == 0
    won, drawn = told(tmp_path / "oracle.json"), told(tmp_path / "random.json")
    assert all(
        task["success"]["mean"] == 1.0 and task["failed"] == 0 and task["episodes"] == 10
        for task in won["report"]["tasks"]
    )
    assert [task["success"]["mean"] < 1.0 for task in drawn["report"]["tasks"]] == [True] * len(
        SUITES[suite].tasks
    )
    shown = capsys.readouterr().out
    assert "100.0 [72.2, 100.0]" in shown and SUITES[suite].tasks[0].name in shown


def test_the_same_seed_plays_the_same_episodes_and_another_plays_others(tmp_path: Path) -> None:
    seen: list[list[Any]] = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        evaluate(
            tmp_path / f"{name}.json",
            "--suite",
            "frozenlake",
            "--agent",
            "random",
            "--episodes",
            "8",
            "--seed",
            seed,
            "--slots",
            "3",
        )
        seen.append(
            [
                {**one, "seconds": 0, "time": ""}
                for one in told(tmp_path / f"{name}.json")["cells"][0]["episodes"]
            ]
        )
    assert seen[0] == seen[1] != seen[2]


def test_a_function_of_the_users_plays_and_what_it_raises_is_counted(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (tmp_path / "mine.py").write_text(
        "def up(observation, info):\n"
        "    if int(info['task_id'].rpartition('-')[2]) % 2:\n"
        "        raise ValueError('no odd layouts')\n"
        "    return 'Up'\n"
        "def nothing(observation, info):\n"
        "    return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (
        evaluate(
            tmp_path / "r.json", "--suite", "frozenlake", "--agent", "mine:up", "--episodes", "20"
        )
        == 0
    )
    task, episodes = (
        told(tmp_path / "r.json")["report"]["tasks"][0],
        told(tmp_path / "r.json")["cells"][0]["episodes"],
    )
    failed = [one for one in episodes if one["world"] % 2]
    assert 0 < task["failed"] == len(failed) < 20 == task["episodes"] and not any(
        one["success"] or one["turns"] for one in failed
    )
    assert task["failures"] == {"backend: the agent raised ValueError: no odd layouts": len(failed)}
    assert "failed: backend: the agent raised ValueError: no odd layouts" in capsys.readouterr().out
    assert (
        evaluate(
            tmp_path / "n.json",
            "--suite",
            "frozenlake",
            "--agent",
            "mine:nothing",
            "--episodes",
            "2",
        )
        == 1
    )
    assert "expected text from the agent, got NoneType" in capsys.readouterr().out


def test_a_failed_episode_counts_the_least_reward_of_its_task(tmp_path: Path) -> None:
    def raises(observation: str, info: Any) -> str:
        raise RuntimeError("gone")

    task = SuiteTask("lake", LAKE.id, LAKE.kwargs, LAKE.turns, failure=-1.0)
    cell = play(task, Plan(episodes=3), lambda: Player(raises), tmp_path)
    assert [one.reward for one in cell.episodes] == [-1.0] * 3 and {
        one.error for one in cell.episodes
    } == {"backend: the agent raised RuntimeError: gone"}


def test_a_scripted_backend_plays_from_a_file_of_replies(tmp_path: Path) -> None:
    (tmp_path / "replies.txt").write_text("<action>Down</action>\n\n<action>Right</action>\n")
    replies = ("--backend", "scripted", "--replies", str(tmp_path / "replies.txt"))
    assert (
        evaluate(
            tmp_path / "r.json",
            "--suite",
            "frozenlake",
            *replies,
            "--episodes",
            "3",
            "--slots",
            "1",
        )
        == 0
    )
    assert all(
        one["turns"] >= 1 and one["error"] is None
        for one in told(tmp_path / "r.json")["cells"][0]["episodes"]
    )


@pytest.mark.slow
def test_the_tiny_model_plays_with_and_without_a_bank_and_its_tokens_are_counted(
    tmp_path: Path, bank: Path
) -> None:
    arguments = (
        "--suite",
        "frozenlake",
        "--agent",
        "llm",
        "--model",
        "tiny",
        "--episodes",
        "3",
        "--bank",
        str(bank),
    )
    assert evaluate(tmp_path / "r.json", *arguments) == 0
    off, frozen = told(tmp_path / "r.json")["report"]["tasks"]
    assert (
        off["tokens"]["mean"] > 0
        and off["failed"] == frozen["failed"] == 0
        and frozen["seconds"]["mean"] > 0
    )


# With a bank


def prompts_of(llm: ScriptedLLM) -> list[str]:
    """All that a backend was asked, as text."""
    return ["\n".join(message["content"] for message in call) for call in llm.calls]


def test_the_arms_play_the_same_episodes_and_only_one_sees_the_bank_which_stays_as_it_is(
    bank: Path, tmp_path: Path
) -> None:
    before = contents(bank)
    plan, llm = Plan(episodes=6, visits=2, seed=3), ScriptedLLM(["<action>Down</action>"])
    make, one = lambda: ActorAgent(llm), SuiteBank(str(bank))
    cells = [play(LAKE, plan, make, tmp_path, arm, one) for arm in ("off", "frozen")]
    off, frozen = cells
    named = [[(one.world, one.visit, one.task_id) for one in cell.episodes] for cell in cells]
    assert (
        named[0] == named[1]
        and len(named[0]) == 6
        and len({world for world, _, _ in named[0]}) == 3
    )
    assert (off.arm, off.entries, frozen.arm, frozen.entries) == ("off", None, "frozen", (1, 1))
    assert [one.shown for one in off.episodes] == [0] * 6 and all(
        one.shown == 1 for one in frozen.episodes
    )
    turns = sum(one.turns for one in off.episodes)
    assert not any(ADVICE in text for text in prompts_of(llm)[:turns]) and all(
        ADVICE in text for text in prompts_of(llm)[turns:]
    )
    assert contents(bank) == before


def test_both_arms_and_their_paired_difference_are_told(
    tmp_path: Path, bank: Path, capsys: Any
) -> None:
    assert (
        evaluate(
            tmp_path / "r.json",
            "--suite",
            "frozenlake",
            "--agent",
            "random",
            "--episodes",
            "5",
            "--bank",
            str(bank),
        )
        == 0
    )
    found = told(tmp_path / "r.json")
    assert [(cell["task"], cell["arm"]) for cell in found["cells"]] == [
        ("frozenlake", "off"),
        ("frozenlake", "frozen"),
    ]
    (difference,) = found["report"]["differences"]
    assert difference["arms"] == ["frozen", "off"]
    assert difference["success"]["mean"] == 0.0 > difference["success"]["low"] > -0.5
    assert "frozen − off" in capsys.readouterr().out


def test_with_learn_the_bank_grows_and_later_episodes_see_it(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    lessons = [f"{ADVICE} Lesson {number}." for number in range(4)]
    extractor = ExtractorAgent(
        ScriptedLLM([f'<answer>[{{"op": "add", "text": "{text}"}}]</answer>' for text in lessons])
    )
    learning = SuiteBank(str(folder), embedder="hashing", extractor=extractor)
    llm = ScriptedLLM(["<action>Down</action>"])
    cell = play(LAKE, Plan(episodes=4), lambda: ActorAgent(llm), tmp_path, "on", learning)
    assert cell.arm == "on" and cell.entries == (0, 4)
    assert cell.episodes[0].shown == 0 and any(one.shown for one in cell.episodes[1:])
    with ExperienceBank(folder, read_only=True) as grown:
        assert {entry.text for entry in grown.entries()} == set(lessons)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "nothing"), "Expected one of suites (room, "),
        (
            ("--suite", "sokoban", "--tasks", "lake"),
            "Expected tasks of suite sokoban among sokoban-erl",
        ),
        (
            ("--suite", "frozenlake", "--agent", "random", "--learn"),
            "Expected --bank FOLDER with --learn",
        ),
        (
            ("--suite", "frozenlake", "--agent", "random", "--search-and-ask", "1"),
            "Expected --bank FOLDER with --search-and-ask",
        ),
        (
            ("--suite", "frozenlake", "--agent", "random", "--episodes", "2", "--visits", "3"),
            "Expected at most as many --visits",
        ),
        (
            ("--suite", "frozenlake", "--agent", "random", "--bank", "no/such/bank"),
            "Expected an existing bank",
        ),
        (("--suite", "frozenlake", "--agent", "random", "--split", "dev"), "Expected split to be"),
        (
            ("--suite", "frozenlake", "--agent", "nobody"),
            "Expected an agent as llm, random, oracle or",
        ),
        (
            ("--suite", "frozenlake", "--agent", "json:nothing"),
            "Expected an agent as llm, random, oracle or",
        ),
        (
            ("--suite", "frozenlake", "--backend", "openai"),
            "Expected the name of a model at",
        ),
        (("--suite", "frozenlake", "--backend", "scripted"), "Expected --replies FILE"),
        (("--suite", "frozenlake", "--model", "./no/such/model"), "./no/such/model"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: Any
) -> None:
    assert evaluate(tmp_path / "r.json", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "r.json").exists()


# Results


def test_finished_episodes_are_kept_and_other_settings_are_refused(
    tmp_path: Path, capsys: Any
) -> None:
    results, log = tmp_path / "r.json", tmp_path / "r.jsonl"
    arguments = ("--suite", "sokoban", "--agent", "random", "--episodes", "3")
    assert evaluate(results, *arguments) == 0
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 3
    log.write_text("".join(lines[:5]) + lines[5][:40])  # as a kill leaves it
    assert evaluate(results, *arguments) == 0
    assert log.read_text().splitlines(keepends=True)[:5] == lines[:5]
    assert [len(cell["episodes"]) for cell in told(results)["cells"]] == [3, 3]
    assert evaluate(results, *arguments[:-1], "5") == 0  # more episodes begin with the same ones
    assert log.read_text().startswith("".join(lines[:5]))
    assert [len(cell["episodes"]) for cell in told(results)["cells"]] == [5, 5]
    assert evaluate(results, *arguments, "--seed", "1") == 2
    assert "got seed 0 and not 1; use --overwrite" in capsys.readouterr().err
    assert (
        evaluate(results, *arguments, "--seed", "1", "--overwrite") == 0
        and told(results)["settings"]["seed"] == 1
    )
    log.unlink()
    assert evaluate(results, *arguments) == 2 and "use --overwrite" in capsys.readouterr().err


def test_a_bank_that_changed_since_is_another_setting(
    tmp_path: Path, bank: Path, capsys: Any
) -> None:
    arguments = (
        "--suite",
        "frozenlake",
        "--agent",
        "random",
        "--episodes",
        "2",
        "--bank",
        str(bank),
    )
    assert evaluate(tmp_path / "r.json", *arguments) == 0
    with ExperienceBank(bank) as opened:
        opened.add("Something new.")
    assert (
        evaluate(tmp_path / "r.json", *arguments) == 2 and "got commit" in capsys.readouterr().err
    )


def test_an_environment_with_fewer_worlds_is_played_as_often_as_it_has_worlds(
    tmp_path: Path,
) -> None:
    arguments = ("--suite", "frozenlake", "--agent", "oracle", "--episodes", "150")
    assert evaluate(tmp_path / "r.json", *arguments) == 0
    assert told(tmp_path / "r.json")["report"]["tasks"][0]["episodes"] == 100


def played(world: int, visit: int, success: bool) -> PlayedEpisode:
    """An episode."""
    return PlayedEpisode(
        world=world,
        visit=visit,
        task_id=f"w-{world}",
        success=success,
        reward=float(success),
        turns=2,
        prompt_tokens=10,
        response_tokens=5,
        seconds=0.5,
        shown=0,
    )


def cell(task: str, arm: Any, outcomes: list[list[int]]) -> SuiteCell:
    """A cell by outcomes per world and visit."""
    return SuiteCell(
        task=task,
        arm=arm,
        episodes=tuple(
            played(w, v, bool(one)) for w, row in enumerate(outcomes) for v, one in enumerate(row)
        ),
    )


def test_the_report_counts_tasks_alike_and_pairs_worlds() -> None:
    cells = [
        cell("a", "off", [[0], [0], [1], [0]]), cell("a", "frozen", [[1], [0], [1], [1]]),
        cell("b", "off", [[1], [1]]), cell("b", "frozen", [[1], [1]]),
    ]  # fmt: skip
    found = report(cells)
    assert [row["success"]["mean"] for row in found["overall"]] == [
        0.625,
        0.875,
    ]  # (1/4 + 1) / 2 and (3/4 + 1) / 2
    assert [row["success"]["mean"] for row in found["differences"]] == [0.5, 0.0, 0.25]
    assert found["tasks"][0]["tokens"] == {"mean": 15.0, "low": 15.0, "high": 15.0}
    low, high = (
        found["differences"][0]["success"]["low"],
        found["differences"][0]["success"]["high"],
    )
    assert -0.25 <= low <= 0.5 <= high <= 1.0 and found["overall"][0]["episodes"] == 6


def test_visits_to_a_world_are_one_cluster() -> None:
    outcomes = [[1, 1], [0, 0]]
    assert by_world(cell("a", "off", outcomes), "success").tolist() == [1.0, 0.0]
    interval = report([cell("a", "off", outcomes)])["tasks"][0]["success"]
    assert interval == wilson(1, 2).model_dump()


def test_a_stopped_run_has_no_mean_over_all_tasks_under_an_arm_that_lacks_one() -> None:
    cells = [cell("a", "off", [[1]]), cell("a", "frozen", [[1]]), cell("b", "off", [[0]])]
    found = report(cells)
    assert [row["arm"] for row in found["overall"]] == ["off"]
    assert [row["task"] for row in found["differences"]] == ["a"]


def test_the_mean_over_tasks_needs_tasks_with_worlds() -> None:
    assert over_tasks([np.ones(3), np.zeros(5)]).model_dump() == {
        "mean": 0.5,
        "low": 0.5,
        "high": 0.5,
    }
    with pytest.raises(ValueError, match="Expected tasks with worlds"):
        over_tasks([])


def test_the_folder_of_dialogues_that_no_package_has_is_asked_for(monkeypatch: Any) -> None:
    monkeypatch.delenv("BFCL_DATA", raising=False)
    (steps,) = find_suite("crossep-tool").missing().values()
    assert "export BFCL_DATA=FOLDER (experiential bench suites names its source)" in steps
    assert "BFCL_DATA=bfcl_eval of its repository" in find_suite("crossep-tool").source


def test_another_split_is_said_beside_the_source() -> None:
    suite = find_suite("hotpotqa-validation")
    assert suite.with_split("eval").source == f"{suite.source}; here SPLIT eval"


def test_the_suites_are_listed_with_their_sources(capsys: Any) -> None:
    assert run_app(app, ["bench", "suites"]) == 0
    shown = capsys.readouterr().out
    assert "Complementary RL, C.3 (6-Tasks)" in shown and shown.count("\n") == 3 * len(SUITES)


def test_a_bank_that_cannot_be_opened_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="with --learn, and the arms off and on alone, a bank"):
        SuiteBank(str(tmp_path / "none")).open()


# Suites of other packages


FOREIGN = """
import gymnasium as gym
from experiential.envs.vault import VaultEnv
from experiential.evaluation.suites import Suite, SuiteTask

gym.register("Mine-v0", entry_point=VaultEnv)
MINE = Suite("mine", (SuiteTask("vaults", "Mine-v0", turns=8),), "no paper")

def make():
    return MINE

def wrong():
    return "mine"
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: Any) -> str:
    """A module with an environment and a suite of its own, in the current folder."""
    name = f"foreign_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize("attribute", ["MINE", "make"])
def test_a_suite_of_another_package_with_its_environment_is_played(
    attribute: str, foreign: str, tmp_path: Path
) -> None:
    gym.registry.pop("Mine-v0", None)
    suite = ("--suite", f"{foreign}:{attribute}", "--episodes", "5")
    assert evaluate(tmp_path / "o.json", *suite, "--agent", "oracle") == 0
    found = told(tmp_path / "o.json")
    assert found["report"]["tasks"][0]["success"]["mean"] == 1.0
    assert (
        found["settings"]["suite"] == "mine" and found["settings"]["tasks"][0]["data"] == "foreign"
    )
    assert evaluate(tmp_path / "r.json", *suite, "--agent", "random") == 0


def test_what_is_no_suite_is_refused_in_one_line_and_a_misspelt_name_gets_the_nearest(
    foreign: str, tmp_path: Path, capsys: Any
) -> None:
    for name, message in (
        (f"{foreign}:wrong", "to be a Suite or a callable that returns one, got str"),
        (f"{foreign}:nothing", "Expected an attribute 'nothing'"),
        ("six-tusk", "did you mean 'six-task'?"),
    ):
        assert evaluate(tmp_path / "r.json", "--suite", name, "--agent", "random") == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_another_backend_is_found_by_module_and_attribute(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_backend.py").write_text(
        "from experiential.llm.scripted import ScriptedLLM\n"
        "def open(**options):\n"
        "    return ScriptedLLM(['<action>Down</action>'], name=options['model'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ("--suite", "frozenlake", "--episodes", "2", "--model", "m")
    assert evaluate(tmp_path / "r.json", *arguments, "--backend", "my_backend:open") == 0
    assert told(tmp_path / "r.json")["settings"]["backend"] == "my_backend:open"
    assert evaluate(tmp_path / "s.json", *arguments, "--backend", "locale") == 2
