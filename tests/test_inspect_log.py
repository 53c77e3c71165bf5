"""`experiential bench export`: a log of played episodes, read back by inspect_ai itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiential.cli.errors import run_app
from experiential.cli.main import app
from experiential.errors import ConfigError
from experiential.evaluation.play_log import (
    BankChange,
    PlayedEpisode,
    PlayedTurn,
    PlayLog,
    Retrieved,
    read_settings,
)
from experiential.llm.metered import Spent

SETTINGS = {"suite": "lakes", "model": "small", "agent": "llm", "version": "0.2"}


def episode(world: int, **more: Any) -> PlayedEpisode:
    """A won episode of one turn that was shown an entry."""
    turn = PlayedTurn(
        observation="Höhle", reply="I go.\n<action>Up</action>", action="Up", reward=1
    )
    known: dict[str, Any] = {
        "task": "lake", "arm": "on", "world": world, "visit": 0, "task_id": f"lake-{world}",
        "success": True, "reward": 1.0, "turns": 1, "prompt_tokens": 12, "response_tokens": 3,
        "seconds": 0.5, "shown": 1, "transcript": (turn,), "end": "You won.",
        "retrieved": (Retrieved(turn=0, id="e1", text="Go up.", score=0.5),),
        "spent": Spent(requests=1, prompt_tokens=12, generated_tokens=3, cost=0.25),
    }  # fmt: skip
    return PlayedEpisode(**{**known, **more})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two worlds, one of them visited twice, a failure that was mended and one that was not."""
    path = tmp_path / "log.jsonl"
    failed: dict[str, Any] = {"success": False, "reward": 0.0, "error": "no answer", "again": True}
    with PlayLog(path, SETTINGS) as opened:
        opened.append(episode(1, **failed))
        opened.append(episode(1))
        opened.append(episode(1, visit=1, success=False, reward=0.25))
        opened.append(episode(2, **{**failed, "transcript": (), "end": ""}))
        opened.append(episode(3, stopped=True))
        opened.append(episode(2, arm="off", place={"order": 1}))
        opened.append(
            BankChange(task="lake", arm="on", entries=(0, 2), extractor=Spent(requests=1))
        )
    return path


@pytest.mark.parametrize("ending", [".eval", ".json"])
def test_inspect_reads_samples_messages_scores_and_usage(
    log: Path, tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read = pytest.importorskip("inspect_ai.log", reason="needs the extra inspect").read_eval_log
    to = tmp_path / "new" / f"log{ending}"
    assert run_app(app, ["bench", "export", str(log), "--to", str(to)]) == 0
    assert ("inspect view" in capsys.readouterr().out) == (ending == ".eval")
    found = read(str(to))
    assert (found.eval.task, found.eval.model, found.eval.config.epochs) == ("lakes", "small", 2)
    assert found.eval.task_args == SETTINGS and found.eval.task_id
    samples = {(one.id, one.epoch): one for one in found.samples}
    first = samples["lake, on, world 1", 1]
    assert set(samples) == {
        ("lake, on, world 1", 1),
        ("lake, on, world 1", 2),
        ("lake, on, world 2", 1),
        ("lake, off, world 2, order 1", 1),
    }
    assert [(one.role, one.content) for one in first.messages] == [
        ("user", "Höhle"),
        ("assistant", "I go.\n<action>Up</action>"),
        ("user", "You won."),
    ]
    reply, end = first.events
    assert [one.content for one in reply.input] == ["Höhle"] and end.data == "You won."
    assert (reply.output.completion, reply.output.message.id) == (
        "I go.\n<action>Up</action>",
        first.messages[1].id,
    )
    assert first.output.completion == reply.output.completion
    assert len({one.uuid for one in found.samples}) == len(samples)
    assert first.scores["success"].answer == "Up"
    assert first.scores["success"].explanation == "You won."
    assert first.messages[0].metadata["retrieved"][0]["text"] == "Go up."
    assert first.messages[1].metadata == {"action": "Up", "reward": 1.0}
    assert {name: score.value for name, score in first.scores.items()} == {
        "success": "C",
        "reward": 1.0,
    }
    assert first.error is None and [one.message for one in first.error_retries] == ["no answer"]
    assert first.model_usage["small"].total_tokens == 30  # both attempts
    assert first.metadata["task_id"] == "lake-1" and first.metadata["arm"] == "on"
    unfinished = samples["lake, on, world 2", 1]
    assert unfinished.error.message == "no answer" and unfinished.scores is None
    assert samples["lake, on, world 1", 2].scores["success"].value == "I"
    success, reward = found.results.scores
    assert {name: one.value for name, one in success.metrics.items()} == {
        "lake, on": 0.5,
        "lake, off": 1.0,
    }
    assert reward.metrics["lake, on"].value == 0.625
    assert (success.scored_samples, success.unscored_samples) == (3, 1)
    assert found.stats.model_usage["small"].total_cost == 1.5  # six attempts at 0.25
    assert found.eval.metadata["bank"][0]["entries"] == [0, 2]


def test_a_file_is_replaced_only_when_asked(log: Path, tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="needs the extra inspect")
    to = tmp_path / "log.json"
    to.write_text("results")
    assert run_app(app, ["bench", "export", str(log), "--to", str(to)]) == 2
    assert to.read_text() == "results"
    assert run_app(app, ["bench", "export", str(log), "--to", str(to), "--overwrite"]) == 0
    assert json.loads(to.read_text())["version"] == 2


def test_what_cannot_be_exported_is_one_line(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_app(app, ["bench", "export", str(log), "--to", str(tmp_path / "log.txt")]) == 2
    assert ".eval or .json" in capsys.readouterr().err
    monkeypatch.setattr("experiential.errors.find_spec", lambda name: None)
    assert run_app(app, ["bench", "export", str(log), "--to", str(tmp_path / "a.eval")]) == 2
    assert "pip install 'experiential-rl[inspect]'" in capsys.readouterr().err


def test_the_settings_of_a_log_are_read_and_another_file_is_refused(
    log: Path, tmp_path: Path
) -> None:
    assert read_settings(log) == SETTINGS
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    for other in ("other.jsonl", "none.jsonl"):
        with pytest.raises(ConfigError, match=other):
            read_settings(tmp_path / other)
