"""Each command of docs/bank.md, carried out in the order of the page, gives what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import experiential as xp
from experiential.cli import main
from experiential.cli.errors import run_app
from experiential.types import Condition, Use

PAGE = Path(__file__).parent.parent / "docs" / "bank.md"
KEY, WALL, TWIN = "08bb2af07917497a8f31728744e1ebb2", "adee825d", "ca59b161"


def made(folder: Path) -> dict[str, str]:
    """The bank of the page; gives the ids that it has for those on the page, by their first eight
    characters.
    """
    with xp.ExperienceBank(folder, embedder="hashing") as bank:
        key = bank.add("The red door needs the brass key.", task="leave the house")
        twin = bank.add("The red door needs the brass key!", task="leave the house")
        wall = bank.add("Push the north wall.", task="leave the house")
        for n in range(6):
            for name, entry, success in (
                ("key", key, True),
                ("wall", wall, False),
                ("free", None, n % 3 == 0),
            ):
                bank.record(episode(f"{n}-{name}", n, entry, success))
        bank.update(wall.id, "Push the north wall twice.")
    return {key.id: KEY[:8], wall.id: WALL, twin.id: TWIN}


def episode(id: str, group: int, entry: xp.Experience | None, success: bool) -> xp.Trajectory:
    uses = () if entry is None else (Use(experience_id=entry.id, experience_version=1, score=0.8),)
    return xp.Trajectory(
        id=id,
        task="leave the house",
        task_id=f"house-{group}",
        group=f"g{group}",
        uses=uses,
        success=success,
        reward=float(success),
        condition=Condition.FREE if entry is None else Condition.GUIDED,
        turns=(xp.Turn(observation="a red door", action="unlock"),),
    )


def shown() -> list[tuple[str, str]]:
    """The commands of the page, each with the output below it."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    steps = [step.partition("\n") for block in blocks for step in block.split("$ ")[1:]]
    return [(command, output) for command, _, output in steps]


def likened(text: str, ids: dict[str, str]) -> list[str]:
    """The lines of an output without what differs from run to run: ids, times, sizes of files and
    the widths of columns.
    """
    text = text.replace(KEY, f"{KEY[:8]}…")
    for real, short in ids.items():
        text = text.replace(real, f"{short}…").replace(real[:8], short)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
    text = re.sub(r"bytes read +\d+", "bytes read N", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_every_command_of_the_page_gives_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    ids = made(tmp_path / "house")
    (key,) = (real for real, short in ids.items() if short == KEY[:8])
    steps = shown()
    assert {shlex.split(command)[2] for command, _ in steps} == {
        command.name for command in _commands()
    }
    for command, output in steps:
        assert (
            run_app(main.app, shlex.split(command.replace(KEY, key).replace(KEY[:8], key[:8]))[1:])
            == 0
        ), command
        real = capsys.readouterr().out
        if output.strip():
            assert likened(real, ids) == likened(output, ids), command


def _commands() -> list[Any]:
    from typer.main import get_command

    bank = get_command(main.app).commands["bank"]
    return list(bank.commands.values())
