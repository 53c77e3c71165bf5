"""Events reach Weights & Biases and MLflow; without their packages it is one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from experiential.cli.trackers import Tracker, open_trackers
from experiential.errors import MissingExtraError

EVENTS: list[dict[str, Any]] = [
    {"event": "start", "step": 0, "steps": 2},
    {"event": "step", "step": 1, "time": 5.0, "success_guided": 0.25, "failures": {"env": 1}},
    {"event": "step", "step": 2, "time": 6.0, "success_guided": 0.75, "success_free": None},
    {
        "event": "eval",
        "step": 2,
        "arm": "on",
        "visits": [
            {"visit": 1, "successes": 1, "episodes": 4},
            {"visit": 2, "successes": 3, "episodes": 4},
        ],
    },
    {"event": "end", "step": 2},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("seed: 5\nrun: {steps: 2}\n")
    return tmp_path / "mine"


def play(tracker: Tracker, events: list[dict[str, Any]] = EVENTS) -> None:
    for event in events:
        tracker.handle(event)
    tracker.close()


def test_mlflow_has_the_numbers_in_a_local_store(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sqlalchemy", reason="no MLflow: pip install 'experiential-rl[mlflow]'")
    mlflow = pytest.importorskip(
        "mlflow", reason="no MLflow: pip install 'experiential-rl[mlflow]'"
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for events in (EVENTS, EVENTS[:2]):
        [tracker] = open_trackers(["mlflow"], folder)
        play(tracker, events)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("experiential")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    assert [run.info.status for run in runs] == ["FINISHED", "FAILED"]
    done = runs[0]
    assert done.info.run_name == "mine"
    history = client.get_metric_history(done.info.run_id, "train/success_guided")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.75)]
    assert done.data.metrics["eval/on/visit_2"] == 0.75
    assert "train/time" not in done.data.metrics
    assert done.data.params == {"seed": "5", "run.steps": "2"}


def test_wandb_keeps_an_offline_run_in_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="no wandb: pip install 'experiential-rl[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    [tracker] = open_trackers(["wandb"], folder)
    play(tracker)
    wandb.teardown()  # its own process writes the file
    [record] = folder.glob("wandb/offline-run-*/run-*.wandb")
    written = record.read_bytes()
    for found in (b"train/success_guided", b"eval/on/visit_2", b"0.75", b"mine"):
        assert found in written


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_command(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'experiential-rl\[{name}\]'"):
        open_trackers([name], folder)
