"""What the documentation says exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from experiential.recipe import recipe_names, settings_reference

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
NAMES = sorted(set(re.findall(r"`(experiential[\w.]*:\w+)`", (ROOT / "docs" / "paper_index.md").read_text("utf-8"))))


@pytest.mark.parametrize("name", NAMES)
def test_every_function_of_the_paper_index_exists(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert hasattr(import_module(module), attribute)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        compile(block, page.name, "exec")


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [page.name for page in (ROOT / "docs").rglob("*.md") if str(page.relative_to(ROOT / "docs")) not in listed] == []


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text("utf-8"))) <= targets


def index_rows() -> list[tuple[str, list[str]]]:
    """The rows of the paper index that name something of ours: what they index, and their cells."""
    lines = (ROOT / "docs" / "paper_index.md").read_text("utf-8").splitlines()
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [(cells[0], cells) for cells in tables if "`" in "".join(cells)]


@pytest.mark.parametrize(("indexed", "cells"), index_rows(), ids=[row for row, _ in index_rows()])
def test_every_row_of_the_paper_index_names_what_exists(indexed: str, cells: list[str]) -> None:
    assert len(cells) == 4, "in the paper, function, recipe or setting, test"
    known = {*recipe_names(), *(setting.key for setting in settings_reference())}
    parents = {key.rsplit(".", 1)[0] for key in known if "." in key}
    for name in re.findall(r"`([^`]+)`", cells[2]):
        assert name in known | parents, f"{name} is neither a recipe nor a setting"
    tests = re.findall(r"`([^`]+)`", cells[3])
    assert tests and all((ROOT / test).is_file() for test in tests)


def test_every_recipe_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [name for name in recipe_names() if f"`{name}`" not in readme] == []
