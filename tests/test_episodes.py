"""Every episode of a run, with a bank or without, and of a bank can be read with `experiential
episodes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import experiential as xp
from experiential.cli import main, train
from experiential.cli.errors import run_app
from experiential.evaluation.episode_log import EpisodeLog, episode_row
from experiential.evaluation.play_log import PlayedEpisode, PlayedTurn, PlayLog, Retrieved
from experiential.evaluation.suite_episodes import SuiteLog
from experiential.rollout import Episode, Job, Task
from experiential.training.metrics import Metrics
from experiential.types import Condition, Generation, Trajectory, Turn, Use
from tests.test_frozen import KEY, SMALL, VaultServer

WORLDS = ("eval.worlds=2", "eval.visits=2", "eval.arms=[off,on]")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs of two steps by a hosted agent: `with` a bank and `without`."""
    folder = tmp_path_factory.mktemp("runs")
    server = VaultServer()
    hosted = ("--actor-url", server.url, "--api-key-env", "VAULT_KEY", "--plain")
    few = ("run.steps=2", "eval.after=false", "eval.before=false", "run.drain=true")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VAULT_KEY", KEY)
        for name, more in (
            ("with", []),
            ("without", ["extractor.enabled=false"]),
            ("evaluated", ["run.steps=1", "eval.after=true", *WORLDS]),
        ):
            options = ["--recipe", "frozen", "--output", str(folder / name), *hosted, *SMALL, *few]
            assert run_app(train.app, [*options, *more]) == 0
        options = ["--arms", "off,on", "--plain", "--output", str(folder / "evaluation"), *WORLDS]
        assert run_app(main.app, ["eval", str(folder / "with"), *options]) == 0
    yield folder
    server.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run_app(main.app, ["episodes", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def listed(run: Run, *arguments: object) -> list[dict[str, Any]]:
    code, out, error = run(*arguments, "--json")
    assert code == 0, error
    return json.loads(out)


def test_the_list_has_every_episode_and_is_filtered(run: Run, folder: Path) -> None:
    every = listed(run, folder / "with", "--limit", 0)
    assert len(every) == 12 and {one["step"] for one in every} == {1, 2}
    lost = listed(run, folder / "with", "--outcome", "failure")
    assert lost and {one["outcome"] for one in lost} == {"failure"}
    name = every[0]["task"].removesuffix(".").split()[-1]
    named = listed(run, folder / "with", "--task", name.lower(), "--step", 2)
    assert named and all(name in one["task"] and one["step"] == 2 for one in named)
    assert listed(run, folder / "with", "--limit", 1) == every[-1:]
    code, out, _ = run(folder / "with")
    assert code == 0 and every[-1]["id"][:8] in out and every[-1]["id"] not in out


def test_an_episode_shows_its_advice_what_it_wrote_and_where_that_was_used(
    run: Run, folder: Path
) -> None:
    wrote = [one for one in listed(run, folder / "with", "--step", 1) if one["turns"]]
    views = {one["id"]: listed(run, folder / "with", one["id"]) for one in wrote}
    id, view = next((id, v) for id, v in views.items() if any(w["used"] for w in v["written"]))
    [written] = view["written"]
    later = written["used"][0]["episode"]
    code, out, _ = run(folder / "with", id[:9])
    assert code == 0 and "Levers: " in out and "  > pull " in out
    assert f"add {written['entry']['id'][:8]} v1" in out and later[:8] in out
    # and there it is, marked where it was shown
    shown = listed(run, folder / "with", later)["advice"][0]
    assert (shown["id"], shown["text"], shown["turn"]) == (
        written["entry"]["id"],
        written["entry"]["text"],
        0,
    )
    out = run(folder / "with", later)[1]
    above, _, below = out.partition(f"  | {written['entry']['text']}")
    assert "Levers: " in above and f"entry {shown['id'][:8]} v1" in above and "  > pull" in below
    # the bank alone tells the same
    assert listed(run, folder / "with" / "bank", id)["written"] == view["written"]


def test_a_run_without_a_bank_keeps_its_transcripts(run: Run, folder: Path) -> None:
    assert not (folder / "without" / "bank").exists()
    every = listed(run, folder / "without")
    turns = listed(run, folder / "without", every[0]["id"])["transcript"]["trajectory"]["turns"]
    assert "Levers: " in turns[0]["observation"] and turns[0]["feedback"]
    assert all(a["feedback"] == b["observation"] for a, b in zip(turns, turns[1:], strict=False))


def test_what_cannot_be_found_is_one_line(run: Run, folder: Path, tmp_path: Path) -> None:
    for arguments, reason in (
        ((tmp_path,), "folder of a bank"),
        ((folder / "with", "zz"), "got 'zz'"),
        ((folder / "with", ""), "got ''"),
    ):
        code, _, error = run(*arguments)
        assert code == 2 and reason in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["evaluated", "evaluation"])
def test_episodes_of_evaluations_are_read_with_the_advice_of_their_banks(
    name: str, run: Run, folder: Path
) -> None:
    known = listed(run, folder / name, "--limit", 0, "--arm", "all")
    trained = [one for one in known if one["arm"] is None]
    assert bool(trained) == (name == "evaluated")
    assert listed(run, folder / name, "--limit", 0) == (trained or known)
    assert ("and 8 of evaluations: --arm off, on or all" in run(folder / name)[1]) == bool(trained)
    for arm in ("off", "on"):
        played = listed(run, folder / name, "--arm", arm)
        assert sorted(one["visit"] for one in played) == [1, 1, 2, 2]
        assert known[-8:] == [*listed(run, folder / name, "--arm", "off"), *known[-4:]]
    last = known[-1]
    view = listed(run, folder / name, last["id"])
    assert last["uses"] and [one["text"] for one in view["advice"]]
    assert all(one["text"] for one in view["advice"])
    code, out, _ = run(folder / name, last["id"][:9])
    assert code == 0 and "evaluation: on, visit 2" in out and view["advice"][0]["text"] in out
    assert "Levers: " in out and "copy of the bank" in out


def test_episodes_of_a_suite_are_read_from_its_log(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    options = ["--suite", "vault", "--agent", "oracle", "--episodes", "2", "--results"]
    assert run_app(main.app, ["bench", "run", *options, str(results)]) == 0
    capsys.readouterr()
    log = results.with_suffix(".jsonl")
    known = listed(run, log)
    assert known and {one["outcome"] for one in known} == {"success"}
    assert {one["arm"] for one in known} == {"off"}
    code, out, _ = run(log, known[0]["id"][:9])
    assert code == 0 and "Levers: " in out and "  > pull " in out
    assert "evaluation: off, visit 1" in out and "reward 1" in out
    code, _, error = run(tmp_path / "results.json")
    assert code == 2 and error.count("\n") == 1 and "got another file" in error


def test_the_log_of_a_suite_shows_entries_where_they_were_read(tmp_path: Path) -> None:
    told = {"task_id": "lake-3", "prompt_tokens": 0, "response_tokens": 0, "seconds": 0.1}
    played = PlayedEpisode(
        task="lake", arm="on", world=3, visit=1, success=True, reward=1.0, turns=2, shown=2, **told,
        transcript=(
            PlayedTurn(observation="ice", action="right", reply="I go.\nright", reward=0.0),
            PlayedTurn(observation="a hole", reply="<ask>where?</ask>", action="<ask>where?</ask>"),
            PlayedTurn(observation="go down", action="down", reply="down", reward=1.0),
        ),
        end="the goal",
        retrieved=(
            Retrieved(turn=0, id="e1", text="Go right."), Retrieved(turn=2, id="e2", text="Down.")
        ),
    )  # fmt: skip
    with PlayLog(tmp_path / "log.jsonl", {"seed": 0}) as log:
        log.append(played.model_copy(update={"success": False, "error": "lost", "again": True}))
        log.append(played)
    read = SuiteLog(tmp_path / "log.jsonl")
    [summary] = read.summaries()
    assert (summary.part, summary.outcome, summary.task) == (
        "on, visit 2",
        "success",
        "lake lake-3",
    )
    found = read.transcript(summary.id)
    assert found is not None and read.transcript("other") is None
    assert [(one.action, one.feedback) for one in found.trajectory.turns] == [
        ("right", "a hole"),
        ("down", "the goal"),
    ]
    assert found.replies == {0: "I go.\nright"} and found.questions[0].turn == 1
    uses = found.trajectory.uses
    assert [(one.turn, one.how, found.texts[one.id]) for one in uses] == [
        (0, "episode_start", "Go right."),
        (1, "search_and_ask", "Down."),
    ]


def test_text_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    evil = "red \x1b]0;owned\x07 \x9b31m \u202e!"
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.record(Trajectory(task=evil, turns=(Turn(observation=evil, action=evil),)))
        [one] = bank.episodes()
    for arguments in ((tmp_path / "bank",), (tmp_path / "bank", one.id)):
        code, out, _ = run(*arguments)
        assert code == 0 and "owned" in out
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out)


def test_the_log_gives_back_what_was_played(tmp_path: Path) -> None:
    """Replies, questions and the block of a method too; a half written line is left for later."""
    use = Use(experience_id="e1", experience_version=2, score=0.5, turn=1, how="search_and_ask")
    turns = (
        Turn(observation="a door", action="open", feedback="shut", invalid=True),
        Turn(observation="shut", action="knock", reward=1.0, feedback="come in"),
        Turn(observation="another", action="enter"),
    )
    told = Trajectory(
        task="enter", turns=turns, success=True, uses=(use,), condition=Condition.GUIDED, reward=1.0
    )
    told = told.model_copy(update={"uses": (use.model_copy(update={"episode": told.id}),)})
    texts = ("I open.\n<action>open</action>", "<ask>how?</ask>", "knock", "enter")
    episode = Episode(
        told,
        tuple(Generation(text=text) for text in texts),
        asked=(False, True, False, False),
        job=Job(Task(1, "g"), Condition.GUIDED, 0, advice="Think.", attempt=2),
    )
    line = json.dumps({"event": "episodes", "step": 7, "rows": [episode_row(episode)]}) + "\n"
    assert line.count("shut") == 1
    path = tmp_path / "episodes.jsonl"
    path.write_text(line[:50])
    log = EpisodeLog(path)
    assert log.summaries() == []
    path.write_text(line)
    [summary] = log.summaries()
    assert (summary.step, summary.attempt, summary.outcome) == (7, 2, "success")
    played = log.transcript(told.id)
    assert played is not None and played.trajectory == told
    assert played.replies == {0: texts[0]} and played.advice == "Think."
    assert [(one.turn, one.text) for one in played.questions] == [(1, texts[1])]
    path.write_text("")  # a resumed run begins again
    assert log.summaries() == [] and log.transcript(told.id) is None


def test_a_log_that_a_resumed_run_rewound_and_outgrew_is_read_anew(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "episodes.jsonl")
    log = EpisodeLog(metrics.path)

    def play(step: int) -> str:
        played = Trajectory(task=f"step {step}", success=True)
        rows = [episode_row(Episode(played, ()))]
        metrics.emit({"event": "episodes", "step": step, "rows": rows})
        return played.id

    first, dropped = play(1), [play(step) for step in (2, 3)]
    assert [one.id for one in log.summaries()] == [first, *dropped]
    metrics.rewind(1)
    again = [play(step) for step in (2, 3, 4)]
    metrics.close()
    assert [one.id for one in log.summaries()] == [first, *again]
    assert [log.transcript(id) is None for id in (first, *dropped, *again)] == [0, 1, 1, 0, 0, 0]
