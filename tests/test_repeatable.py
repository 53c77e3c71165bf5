"""With run.drain, equal runs give equal results, bit for bit, whatever the machine's speed."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ID = re.compile(r"\b[0-9a-f]{32}\b")
CLOCKED = re.compile(r"time|seconds|.*_s|.*_ms|.*busy.*|mean_batch|.*memory_gb|path")
"""Measurements of the clock and of the process's memory, which no run repeats."""


def renamed(text: str, names: dict[str, str]) -> str:
    """Replace each random id by the number of its first appearance."""
    return ID.sub(lambda found: names.setdefault(found[0], f"id-{len(names)}"), text)


def measured(value: Any) -> Any:
    """Leave out what a clock measured."""
    if isinstance(value, dict):
        return {k: measured(one) for k, one in value.items() if not CLOCKED.fullmatch(k)}
    return [measured(one) for one in value] if isinstance(value, list) else value


def events(path: Path) -> list[Any]:
    names: dict[str, str] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return [measured(json.loads(renamed(line, names))) for line in lines]


TIMED = ("time", "value", "checksum", "chain")  # checksums cover times


def journal(path: Path) -> list[str]:
    """Return every row of a bank's journal in the order of writing, without times."""
    names: dict[str, str] = {}
    rows: list[str] = []
    with sqlite3.connect(path) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        for (table,) in tables.fetchall():
            cursor = connection.execute(f"SELECT * FROM {table} ORDER BY rowid")
            columns = [column[0] for column in cursor.description]
            for row in cursor:
                kept = [v for c, v in zip(columns, row, strict=True) if c not in TIMED]
                rows.append(renamed(f"{table} {kept}", names))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["extractor.drafts=1", "extractor.drafts=3", "model.lora={rank: 4, dropout: 0.1}"]
)
def test_two_runs_at_different_speeds_are_equal_bit_for_bit(tmp_path: Path, setting: str) -> None:
    """Two processes slow each other down, hash their sets differently, and differ in priority.

    What is compared does not depend on any of it, so that the test cannot fail by chance.
    """
    settings = (
        "model.threads=1 run.drain=true run.steps=4 run.minutes=null run.trackers=[]"
        " run.checkpoint_every=0 actor.groups=4 extractor.batch_size=8 bank.merge_every=2"
        " actor.search_and_ask=1 methods.self_distill={} eval.worlds=6 eval.visits=3"
    ).split() + [setting]
    processes = []
    for name, seed, priority in (("a", "1", 0), ("b", "77", 5)):
        command = [sys.executable, "-m", "experiential.cli.train", *settings]
        processes.append(
            subprocess.Popen(
                ["nice", "-n", str(priority), *command, "--output", str(tmp_path / name)],
                env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    one, other = tmp_path / "a", tmp_path / "b"
    for file in ("episodes.jsonl", "metrics.jsonl"):
        assert events(one / file) == events(other / file)
    assert journal(one / "bank/journal.sqlite") == journal(other / "bank/journal.sqlite")
    states = [sorted(run.glob("checkpoints/*/*/state.pt")) for run in (one, other)]
    assert len(states[0]) == 2
    for mine, its in zip(*states, strict=True):
        weights = [torch.load(path, weights_only=True)["weights"] for path in (mine, its)]
        assert all(torch.equal(x, y) for x, y in zip(*weights, strict=True))
    entries = [e for e in events(one / "metrics.jsonl") if e["event"] == "step"][-1]
    assert entries["entries"] > 0 and entries["extractor_updates"] > 0  # so all parts took part
