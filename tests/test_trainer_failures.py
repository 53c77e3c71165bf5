"""Whatever fails in the middle of a step, a run ends in order and can be resumed.

No thread is left inside torch (Python would abort, exit code 134), the exit code is 1, or 130 after
an interrupt, stderr has one sentence, and ``--resume`` goes on from the last checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.llm_tiny import tiny_random_model

KINDS = ("disk", "interrupt", "bank", "environment", "memory", "gpu-memory", "callback")
MOST_CALLS = {"environment": 8, "gpu-memory": 1, "callback": 3}
"""Calls that this kind of failure can interrupt, at least, until the run ends: eight episodes may
end with a lucky first pull each."""
CALLS = 1400


def run_cases(cases: list[dict[str, Any]], folder: Path) -> list[int]:
    """Return the exit code of each case; see `tests.inject_failure`."""
    plan = folder / "cases.json"
    plan.write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-m", "tests.inject_failure", str(plan)],
        capture_output=True,
        text=True,
        timeout=1700,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Train one step; return its folder and the settings."""
    folder = tmp_path_factory.mktemp("base")
    for part in tiny_random_model():
        part.save_pretrained(folder / "model")
    settings = (
        f"--recipe=complementary --plain model.name={folder / 'model'} model.prompts=brief"
        " bank.embedder=hashing bank.retrieval.floor=0 actor.groups=2 actor.group_size=2"
        " actor.max_tokens=8 actor.kl=0.01 extractor.batch_size=2 extractor.max_tokens=8"
        " run.checkpoint_every=1 run.drain=true eval.before=false eval.after=false"
    ).split()
    run = folder / "run"
    case = {"kind": None, "moment": 0, "log": str(folder / "log")}
    case["argv"] = [*settings, "--output", str(run), "run.steps=1"]
    assert run_cases([case], folder) == [0], (folder / "log.err").read_text()
    return run, settings


def check_failures(base: tuple[Path, list[str]], folder: Path, kinds: list[str]) -> None:
    """Let a run fail for each of these reasons, then resume it."""
    made, settings = base
    rng = random.Random(13)
    failing: list[dict[str, Any]] = []
    resumed: list[dict[str, Any]] = []
    for index, kind in enumerate(kinds):
        run = folder / f"run{index}"
        shutil.copytree(made, run)
        argv = [*settings, "--output", str(run), "--resume", "run.steps=3"]
        moment = rng.randrange(MOST_CALLS.get(kind, CALLS))
        failing.append(
            {"kind": kind, "moment": moment, "argv": argv, "log": str(folder / f"fail{index}")}
        )
        resumed.append(
            {"kind": None, "moment": 0, "argv": argv, "log": str(folder / f"resume{index}")}
        )
    codes = run_cases(failing, folder)
    for code, case in zip(codes, failing, strict=True):
        said = Path(f"{case['log']}.err").read_text()
        assert code == (130 if case["kind"] == "interrupt" else 1), (case, code, said)
        assert said.startswith("error: ") and said.count("\n") == 1, (case, said)
    codes = run_cases(resumed, folder)
    assert set(codes) == {0}, [
        Path(f"{case['log']}.err").read_text()
        for case, code in zip(resumed, codes, strict=True)
        if code
    ]


def test_a_run_that_fails_in_a_step_ends_with_one_sentence_and_resumes(
    base: tuple[Path, list[str]], tmp_path: Path
) -> None:
    check_failures(base, tmp_path, ["disk", "interrupt"])  # all kinds: below


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_failures_at_random_moments(base: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Fail ``FAILURES`` times, 35 by default: a hundred take 5 minutes of two idle cores."""
    failures = int(os.environ.get("FAILURES", "35"))
    check_failures(base, tmp_path, [KINDS[i % len(KINDS)] for i in range(failures)])
