"""`experiential bank` over a real bank: what it shows, and that it changes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import experiential as xp
from experiential.cli import main
from experiential.cli.errors import run_app

Run = Callable[..., tuple[int, str, str]]
TEXTS = ["The red key opens the north door.", "Wait for the guard to leave.", "Copper coins sink in the well."]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        for text in TEXTS:
            bank.add(text, task="castle")
    return tmp_path / "bank"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run_app(main.app, ["bank", *(str(argument) for argument in arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def journal_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "journal.sqlite").read_bytes()).hexdigest()


def test_ls_lists_every_entry(folder: Path, run: Run) -> None:
    code, out, _ = run("ls", folder, "--json")
    assert code == 0
    assert {row["text"] for row in json.loads(out)} == set(TEXTS)


def test_ls_limit(folder: Path, run: Run) -> None:
    assert len(json.loads(run("ls", folder, "--json", "--limit", 1)[1])) == 1


def test_search_finds_the_entry_and_counts_nothing(folder: Path, run: Run) -> None:
    before = journal_digest(folder)
    code, out, _ = run("search", folder, "red key north door", "--k", 1, "--json")
    assert code == 0
    assert json.loads(out)[0]["text"] == TEXTS[0]
    assert journal_digest(folder) == before


def test_show_gives_one_entry_whole(folder: Path, run: Run) -> None:
    entry = json.loads(run("ls", folder, "--json")[1])[0]
    shown = json.loads(run("show", folder, entry["id"])[1])
    assert shown["text"] == entry["text"] and shown["task"] == "castle"


def test_show_of_an_unknown_id_is_a_user_error(folder: Path, run: Run) -> None:
    code, _, error = run("show", folder, "nothing")
    assert code == 2 and "nothing" in error and error.count("\n") == 1


def test_stats_counts(folder: Path, run: Run) -> None:
    numbers = json.loads(run("stats", folder, "--json")[1])
    assert numbers["entries"] == 3 and numbers["uses"] == 0


def test_export_reads_back_into_another_bank(folder: Path, run: Run, tmp_path: Path) -> None:
    code, _, _ = run("export", folder, tmp_path / "bank.jsonl")
    assert code == 0
    with xp.ExperienceBank(tmp_path / "other", embedder="hashing") as other:
        other.import_(tmp_path / "bank.jsonl")
        assert {entry.text for entry in other} == set(TEXTS)


def test_export_to_an_unwritable_file_is_a_user_error(folder: Path, run: Run) -> None:
    code, _, error = run("export", folder, folder / "journal.sqlite" / "x")
    assert code == 2 and error.count("\n") == 1


def test_a_bank_that_another_process_writes_can_be_read(folder: Path, run: Run) -> None:
    with xp.ExperienceBank(folder, embedder="hashing") as writer:
        writer.add("Fourth lesson.")
        assert run("ls", folder)[0] == 0
