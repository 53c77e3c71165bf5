"""The pages of the environments: one form, every argument, transcripts that can be played again,
and what the commands print.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.registration import load_env_creator
from typer.testing import CliRunner

from experiential.cli.main import app
from experiential.envs import ENVS
from experiential.envs.readiness import READINESS
from experiential.errors import ConfigError
from tests.transcripts import DATA, Transcript, rewritten, transcripts

FOLDER = Path(__file__).parent.parent / "docs" / "envs"
INDEX = (FOLDER / "index.md").read_text("utf-8")
PAGES = {
    path.stem: path.read_text("utf-8")
    for path in sorted(FOLDER.glob("*.md"))
    if path.name != "index.md"
}
FORM = (
    "Source", "Observation", "Actions", "Reward and end", "Splits, worlds and seeds",
    "Presets and arguments", "Oracle", "Limits", "Licence", "Transcript",
)  # fmt: skip


def env_id(page: str) -> str:
    """The id that a page begins with."""
    found = re.search(r"\A# .+\n\n`(experiential/\w+-v0)` ", page)
    assert found, "expected a title and a sentence that begins with the id"
    return found[1]


def test_every_environment_has_a_page_and_a_row_of_the_index() -> None:
    assert sorted(env_id(page) for page in PAGES.values()) == sorted(ENVS)
    rows = dict(re.findall(r"^\| \[`(experiential/\w+-v0)`\]\((\w+)\.md\) \|", INDEX, re.MULTILINE))
    assert rows == {env_id(page): name for name, page in PAGES.items()}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_form_of_all(name: str) -> None:
    headings = [
        heading
        for heading in re.findall(r"^## (.+)$", PAGES[name], re.MULTILINE)
        if heading in FORM
    ]
    assert headings == list(FORM)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_every_argument(name: str) -> None:
    given = inspect.signature(load_env_creator(ENVS[env_id(PAGES[name])])).parameters
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGES[name], re.MULTILINE)) | set(
        re.findall(r"^\| `(\w+)=` \|", PAGES[name], re.MULTILINE)
    )
    assert [argument for argument in given if argument not in rows] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_a_whole_episode_that_succeeds(name: str) -> None:
    page = PAGES[name]
    played = transcripts(page)
    assert played and {one.env_id for one in played} == {env_id(page)}
    assert any(
        re.search(r"^= reward 1\.0, terminated, success\Z", one.text, re.MULTILINE)
        for one in played
    )
    assert len(re.findall("^env = gym.make", page, re.MULTILINE)) == len(played) + page.split(
        "## Source"
    )[0].count("\nenv = gym.make")


def every_transcript() -> list[Any]:
    """All transcripts; that of a software task is slow, since it fetches and builds the task."""
    return [
        pytest.param(
            one,
            id=f"{name}-{number}",
            marks=[pytest.mark.slow, pytest.mark.timeout(900)] if name == "swe" else [],
        )
        for name, page in PAGES.items()
        for number, one in enumerate(transcripts(page))
    ]


@pytest.mark.parametrize("transcript", every_transcript())
def test_a_transcript_is_what_the_environment_gives(
    transcript: Transcript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = READINESS[transcript.env_id].missing()
    if needed:
        pytest.skip(f"needs {' && '.join(needed)}")
    for variable in DATA:
        monkeypatch.delenv(variable, raising=False)
    for variable in ("XDG_CACHE_HOME", "EXPERIENTIAL_CACHE", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    try:
        again = transcript.played()
    except ConfigError as error:
        if "package index" in str(error):
            pytest.skip(f"the package index cannot be reached: {error}")
        raise
    if transcript.env_id == "experiential/SWE-v0" and "There is no network." not in again:
        pytest.skip(
            "the page's episode is played behind namespaces, which this platform does not give"
        )
    assert again == transcript.text


def test_a_changed_observation_is_found_and_put_right() -> None:
    page = PAGES["vault"]
    wrong = page.replace("The jade lever turns.", "The jade lever sings.")
    assert wrong != page and transcripts(wrong)[1].played() != transcripts(wrong)[1].text
    assert rewritten(wrong) == page


def test_lines_of_one_action_stand_together() -> None:
    first = 'env = gym.make("experiential/Vault-v0", levers=3); env.reset(seed=1)'
    assert Transcript(f"{first}\nseen\n> pull\n>   red\nshown\n> pull blue").actions == [
        "pull\n  red",
        "pull blue",
    ]


def console(command: str) -> list[str]:
    """What the index says that a command prints, without blanks at the ends of lines."""
    block = next(
        block
        for block in re.findall(r"```console\n(.*?)\n```", INDEX, re.DOTALL)
        if block.startswith(f"$ {command}\n")
    )
    return block.splitlines()[1:]


@pytest.mark.parametrize("command", ["experiential envs list", "experiential envs show vault"])
def test_the_index_shows_what_the_command_prints(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (*DATA, "BFCL_DATA"):
        monkeypatch.delenv(variable, raising=False)
    for package in ("alfworld", "textworld", "bfcl_eval", "minigrid", "minihack", "nle"):
        monkeypatch.setitem(sys.modules, package, None)  # as in an installation without them
    for package in ("thefuzz", "snowballstemmer"):
        pytest.importorskip(package, reason="needs the extra webshop")
    printed = CliRunner().invoke(app, command.split()[1:]).stdout
    assert [line.rstrip() for line in printed.splitlines()] == console(command)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", INDEX, re.DOTALL))
def test_the_code_of_the_index_runs(block: str) -> None:
    exec(compile(block, "index.md", "exec"), {})
