"""A distribution of its own adds a part of each kind, and the command line uses them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from experiential.plugins import KINDS, known_names

SOURCE = Path(__file__).parent / "plugin_package"
ROOT = SOURCE.parent.parent
TRAINED = {"estimators", "losses", "runtimes", "trackers", "strategies", "embedders", "stores"}
TRAINED |= {"extractors", "envs", "methods"}
SUITE = {"suites", "llms"}
STREAM = {"suites", "memories"}


@pytest.mark.slow
def test_parts_of_an_installed_package_train_evaluate_and_run_a_suite(tmp_path: Path) -> None:
    site, calls, run = tmp_path / "site", tmp_path / "calls", tmp_path / "run"
    if find_spec("setuptools") and find_spec("pip"):
        install(site, tmp_path / "source")
    else:  # the parts are tested all the same; only the build is not
        lay_out(site)
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
            "method=example-brevity",
            "extractor.agent=example-notes", "bank.embedder=example-letters",
            "bank.store=example-dict", "bank.retrieval.strategy=example-newest",
            "bank.retrieval.floor=0.0", "runtime=example-local",
            "run.trackers=[tensorboard, example-lines]", "run.steps=2", "run.drain=true",
            "actor.groups=2", "actor.group_size=4", "eval.worlds=2", "eval.visits=1",
        ],
        there,
    )  # fmt: skip
    events = [json.loads(line) for line in (run / "lines.jsonl").read_text("utf-8").splitlines()]
    first, second = [event["response_tokens"] for event in events if event["event"] == "step"]
    assert 0 < first < second
    (manifest,) = (run / "checkpoints").glob("*/manifest.json")
    assert json.loads(manifest.read_text("utf-8"))["methods"] == {"Brevity": {"tokens": second}}
    assert set(calls.read_text("utf-8").split()) == TRAINED
    calls.unlink()
    bench = [sys.executable, "-m", "experiential.cli.main", "bench", "run"]
    command(
        [*bench, "--suite", "example-guesses", "--backend", "example-parrot", "--episodes", "2"]
        + ["--backend-option", "word=3", "--results", str(tmp_path / "results.json")],
        there,
    )
    assert set(calls.read_text("utf-8").split()) >= SUITE
    calls.unlink()
    stream = [*bench[:-1], "stream", "--suite", "example-guesses", "--agent", "random"]
    command(
        [*stream, "--arms", "example-diary", "--episodes", "2", "--embedder", "hashing"]
        + ["--results", str(tmp_path / "stream.jsonl")],
        there,
    )
    assert set(calls.read_text("utf-8").split()) >= STREAM


def test_the_package_has_a_part_of_each_kind() -> None:
    written = (SOURCE / "pyproject.toml").read_text("utf-8")
    assert [kind for kind in KINDS if f'"experiential.{kind}"' not in written] == []


def test_a_package_laid_out_without_a_build_declares_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for kind in KINDS:
        assert any(name.startswith("example-") for name in known_names(kind)), kind


def install(site: Path, copy: Path) -> None:
    """Build and install the package with pip, without a network."""
    shutil.copytree(SOURCE, copy)  # building leaves files beside the package
    pip = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command([sys.executable, "-m", *pip, "--target", str(site), str(copy)], {})


def lay_out(site: Path) -> None:
    """Copy the package and write its metadata, as an installer does."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text("utf-8"))["project"]
    package, version = project["name"].replace("-", "_"), project["version"]
    shutil.copytree(SOURCE / package, site / package)
    info = site / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n", "utf-8"
    )
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")


def command(arguments: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        arguments, env=os.environ | environment, capture_output=True, text=True, check=False,
        timeout=500, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
