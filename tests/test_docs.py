"""What the documentation says exists."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest

from experiential.bank.options import ManagerOptions
from experiential.recipe import recipe_names, settings_reference

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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        compile(block, page.name, "exec")


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [
        page.name
        for page in (ROOT / "docs").rglob("*.md")
        if str(page.relative_to(ROOT / "docs")) not in listed
    ] == []


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
    parents = {key.rsplit(".", 1)[0] for key in known if "." in key}
    for name in re.findall(r"`([^`]+)`", cells[2]):
        assert name in known | parents, f"{name} is neither a recipe nor a setting"
    tests = re.findall(r"`([^`]+)`", cells[3])
    assert tests and all((ROOT / test).is_file() for test in tests)


def test_every_recipe_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [name for name in recipe_names() if f"`{name}`" not in readme] == []
