"""Completion of names, asked of the commands as a shell asks them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiential.cli.completion import complete_recipe

ASK = """
import json, sys
import {module} as command

try:
    command.main()
except SystemExit:
    print(json.dumps(sorted({{"torch", "transformers", "chromadb"}} & {{*sys.modules}})))
"""
MODULES = {"experiential": "experiential.cli.main", "experiential-train": "experiential.cli.train"}


def completed(words: str, folder: Path) -> list[str]:
    """What bash offers for the last word; no model library may be loaded for it."""
    program, asked = words.split(" ", 1)
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    count = len(words.split(" ")) - 1
    env = {variable: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    asking = f"import sys; sys.argv[0] = {program!r}{ASK.format(module=MODULES[program])}"
    done = subprocess.run(
        [sys.executable, "-c", asking],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    *lines, loaded = done.stdout.splitlines()
    assert json.loads(loaded) == [], done.stderr
    return lines


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("experiential-train --recipe complementary+sm", "complementary+small"),
        ("experiential-train run.st", "run.steps="),
        ("experiential-train actor.estim", "actor.estimator=grpo"),
        ("experiential-train method=", "method=later"),
        ("experiential bench run --suite six", "six-task"),
        ("experiential bench stream --backend sc", "scripted"),
    ],
)
def test_a_shell_is_offered_names(words: str, offered: str, tmp_path: Path) -> None:
    info = tmp_path / "plugin-1.dist-info"  # a package that is installed in this folder
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[experiential.methods]\nlater = nowhere:Later\n")
    found = completed(words, tmp_path)
    last = words.rpartition(" ")[2]
    assert offered in found and all(one.startswith(last) for one in found)


def test_a_recipe_may_be_a_file_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("env: {id: x}\n")
    monkeypatch.chdir(tmp_path)
    assert complete_recipe("mi") == ["mine.yaml"]
    assert complete_recipe("dapo") == ["dapo"]
