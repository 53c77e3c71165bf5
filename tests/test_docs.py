"""What the documentation says exists."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from importlib import import_module
from itertools import chain
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from typer.main import get_command

import experiential as xp
from experiential.bank.options import ManagerOptions, RetrievalOptions
from experiential.cli import main, train
from experiential.cli.examples import EXAMPLES
from experiential.recipe import load_experiment, recipe_names, settings_reference

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
NAMES = sorted(
    set(
        re.findall(
            r"`(experiential[\w.]*:\w+)`", (ROOT / "docs" / "paper_index.md").read_text("utf-8")
        )
    )
)


@pytest.mark.parametrize("name", NAMES)
def test_every_function_of_the_paper_index_exists(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert hasattr(import_module(module), attribute)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_anchors_of_links_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text("utf-8"))
    assert [
        (target, anchor)
        for target, anchor in links
        if anchor not in anchors(page.parent / target if target else page)
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_of_results_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"benchmarks/results/[\w./-]*\w", page.read_text("utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_tests_and_benchmarks_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    tests = set(re.findall(r"\btests/[\w/]*\w\.py\b(?!::)", text))
    modules = {
        name.replace(".", "/") for name in re.findall(r"python -m (benchmarks[\w.]*\w)", text)
    }
    assert [name for name in tests if not (ROOT / name).is_file()] == []
    assert [
        name for name in modules if not ((ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file())
    ] == []


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of these languages; an empty string is none."""
    found, inside = list[str](), None
    for line in page.read_text("utf-8").splitlines():
        fence = re.match(r"\s*```(\S*)", line)
        if fence and inside is None:
            inside, lines = fence[1], list[str]()
        elif fence:
            if inside in languages:
                found.append("\n".join(lines))
            inside = None
        elif inside is not None:
            lines.append(line)
    assert inside is None, "an open fence"
    return found


OURS = re.compile(r"experiential(\.|$)")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_blocks_compile_and_name_what_exists(page: Path) -> None:
    """Also those that tests/test_doc_blocks.py cannot run."""
    for block in map(dedent, blocks(page, "python")):
        for node in ast.walk(ast.parse(block, page.name)):
            if isinstance(node, ast.ImportFrom) and OURS.match(node.module or ""):
                module = import_module(node.module or "")
                names = [alias.name for alias in node.names]
                assert [name for name in names if not hasattr(module, name)] == []
            elif isinstance(node, ast.Import):
                ours = [a.name for a in node.names if OURS.match(a.name)]
                assert all(map(import_module, ours))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "xp" or hasattr(xp, node.attr), node.attr


def commands(page: Path) -> list[list[str]]:
    """The words of each line of a page's blocks that calls a command of this package."""
    shell = "\n".join(blocks(page, "bash", "console")).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in shell.splitlines()]
    ours = [line for line in lines if re.match(r"experiential(-train)?(\s|$)", line)]
    plain = [re.sub(r"<[^<>]+>", "X", line).partition(" > ")[0] for line in ours]
    words = (shlex.split(line, comments=True) for line in plain)
    return [[word for word in line if word != "..."] for line in words]


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]
COMMANDS += [(Path("--help"), shlex.split(line)) for lines in EXAMPLES.values() for line in lines]


def test_pages_show_commands() -> None:
    shown = {" ".join(words[:2]) for _, words in COMMANDS}
    assert {"experiential-train --recipe", "experiential eval", "experiential bank"} <= shown


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page.name}: {' '.join(w)}"[:60] for page, w in COMMANDS]
)
def test_every_command_that_a_page_shows_can_be_read(page: Path, words: list[str]) -> None:
    """Its options exist, and the recipe and settings of a training resolve."""
    program, *arguments = words
    app = train.app if program == "experiential-train" else main.app
    command: Any = get_command(app)
    context = command.make_context(program, list(arguments))
    while hasattr(command, "commands") and context._protected_args:
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    given = context.params
    if program == "experiential-train" and not given["resume"]:
        recipe = given["recipe"] or train.DEFAULT_RECIPE
        if "/" in recipe or not recipe.endswith(".yaml"):  # else a file of the page's reader
            load_experiment(ROOT / recipe if "/" in recipe else recipe, given["overrides"] or [])


def test_every_example_stands_in_the_help_of_its_command() -> None:
    def helps(command: Any) -> list[str]:
        below = getattr(command, "commands", {}).values()
        return [command.epilog or "", *(text for one in below for text in helps(one))]

    shown = "\n".join(text for app in (main.app, train.app) for text in helps(get_command(app)))
    assert [line for lines in EXAMPLES.values() for line in lines if line not in shown] == []


RECIPE_BLOCKS = [(page, block) for page in PAGES for block in blocks(page, "yaml")]


@pytest.mark.parametrize(
    ("page", "block"), RECIPE_BLOCKS, ids=[page.name for page, _ in RECIPE_BLOCKS]
)
def test_every_recipe_that_a_page_shows_resolves(page: Path, block: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(block, "utf-8")
    load_experiment(tmp_path / "mine.yaml", [])


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [
        page.name
        for page in (ROOT / "docs").rglob("*.md")
        if str(page.relative_to(ROOT / "docs")) not in listed
    ] == []


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    assert set(re.findall(r"(?m)^::: experiential\.(\w+)$", pages)) == set(xp.__all__)


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert (
        set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text("utf-8")))
        <= targets
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", page.read_text("utf-8"))) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_extra_that_a_page_names_exists(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = {
        extra
        for extras in re.findall(r"experiential-rl\[([a-z,]+)\]", page.read_text("utf-8"))
        for extra in extras.split(",")
    }
    assert named <= set(project["optional-dependencies"])


def index_rows() -> list[tuple[str, list[str]]]:
    """The rows of the paper index that name something of ours: what they index, and their cells."""
    lines = (ROOT / "docs" / "paper_index.md").read_text("utf-8").splitlines()
    tables = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    return [(cells[0], cells) for cells in tables if "`" in "".join(cells)]


@pytest.mark.parametrize(("indexed", "cells"), index_rows(), ids=[row for row, _ in index_rows()])
def test_every_row_of_the_paper_index_names_what_exists(indexed: str, cells: list[str]) -> None:
    assert len(cells) == 4, "in the paper, function, recipe or setting, test"
    settings = chain(settings_reference(), settings_reference(options=True))
    known = {*recipe_names(), *(setting.key for setting in settings)}
    known |= {f"bank.options.{name}" for name in ManagerOptions.model_fields}
    known |= {f"bank.options.retrieval.{name}" for name in RetrievalOptions.model_fields}
    parents = {key.rsplit(".", 1)[0] for key in known if "." in key}
    for name in re.findall(r"`([^`]+)`", cells[2]):
        assert name in known | parents, f"{name} is neither a recipe nor a setting"
    tests = re.findall(r"`([^`]+)`", cells[3])
    assert tests and all((ROOT / test).is_file() for test in tests)


def test_every_recipe_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [name for name in recipe_names() if f"`{name}`" not in readme] == []
