"""A distribution of its own adds a part of each kind, and the command line uses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiential.plugins import KINDS

SOURCE = Path(__file__).parent / "plugin_package"
ROOT = SOURCE.parent.parent
TRAINED = {"estimators", "losses", "runtimes", "trackers", "strategies", "embedders", "stores"}
TRAINED |= {"extractors", "envs"}
SUITE = {"suites", "llms"}


@pytest.mark.slow
def test_parts_of_an_installed_package_train_evaluate_and_run_a_suite(tmp_path: Path) -> None:
    site, calls, run = tmp_path / "site", tmp_path / "calls", tmp_path / "run"
    install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = tmp_path / "source"  # building leaves files beside what is built
    subprocess.run(["cp", "-r", str(SOURCE), str(source)], check=True)
    command([sys.executable, "-m", *install, "--target", str(site), str(source)], {})
    there = {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "EXAMPLE_CALLS": str(calls),
        "HF_HUB_OFFLINE": "1",
    }
    train = [sys.executable, "-m", "experiential.cli.train", "--output", str(run), "--plain"]
    command(
        [
            *train,
            "env.id=example-guess", "env.kwargs={preset: short}", "env.train={}", "env.eval={}",
            "actor.estimator=example-maxrl", "actor.loss=example-reinforce",
            "extractor.agent=example-notes", "bank.embedder=example-letters",
            "bank.store=example-dict", "bank.retrieval.strategy=example-newest",
            "bank.retrieval.floor=0.0", "runtime=example-local",
            "run.trackers=[tensorboard, example-lines]", "run.steps=2", "run.drain=true",
            "actor.groups=2", "actor.group_size=4", "eval.worlds=2", "eval.visits=1",
        ],
        there,
    )  # fmt: skip
    assert '"step"' in (run / "lines.jsonl").read_text("utf-8")
    assert set(calls.read_text("utf-8").split()) == TRAINED
    calls.unlink()
    bench = [sys.executable, "-m", "experiential.cli.main", "bench", "run"]
    command(
        [*bench, "--suite", "example-guesses", "--backend", "example-parrot", "--episodes", "2"]
        + ["--backend-option", "word=3", "--results", str(tmp_path / "results.json")],
        there,
    )
    assert set(calls.read_text("utf-8").split()) >= SUITE


def test_the_package_has_a_part_of_each_kind() -> None:
    written = (SOURCE / "pyproject.toml").read_text("utf-8")
    assert [kind for kind in KINDS if f'"experiential.{kind}"' not in written] == ["methods"]


def command(arguments: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        arguments, env=os.environ | environment, capture_output=True, text=True, check=False,
        timeout=500, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
