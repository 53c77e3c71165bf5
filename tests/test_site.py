"""The built documentation in a browser: nothing is cut off, nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# An element that ends right of the window although no box around it can be scrolled.
CUT_OFF = """
() => [...document.querySelectorAll('.md-content *, .md-header *')].filter(element => {
    const box = element.getBoundingClientRect()
    if (box.width < 2 || box.height < 2 || box.right <= innerWidth + 1 || box.left >= innerWidth
        || getComputedStyle(element).visibility === 'hidden') return false
    for (let outer = element.parentElement; outer; outer = outer.parentElement)
        if (/auto|scroll/.test(getComputedStyle(outer).overflowX)) return false
    return !element.closest('.md-search, .md-clipboard')
}).map(element => element.outerHTML.slice(0, 120))
"""
TABLES_ARE_BOXED = """
() => [...document.querySelectorAll('.md-typeset table:not([class])')]
    .every(table => table.closest('.md-typeset__scrollwrap'))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a warning is an error."""
    pytest.importorskip("material", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra dev)")
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    chromium = next(filter(None, found), None)
    if chromium is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as engine:
        launched = engine.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_cut_off_or_loads_anything_from_another_host(
    site: Path, browser: Any, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.route("**/search_index.js", lambda route: route.abort())  # a second of work on each page
    elsewhere: list[str] = []
    page.on(
        "request",
        lambda request: (
            elsewhere.append(request.url)
            if not request.url.startswith(("file:", "data:", "blob:"))
            else None
        ),
    )
    faults: dict[str, Any] = {}
    pages = sorted(site.rglob("*.html"))
    for path in pages:
        page.goto(path.as_uri())
        page.wait_for_function(TABLES_ARE_BOXED)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        cut = page.evaluate(CUT_OFF)
        pictures = page.evaluate(
            "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        )
        if wide > 0 or cut or pictures:
            faults[str(path.relative_to(site))] = (wide, cut[:3], pictures)
    page.close()
    assert len(pages) > 50 and faults == {} and elsewhere == []


def test_the_search_finds_pages_without_a_server(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.click(".md-search__input")
    page.keyboard.type("quarantine")
    page.wait_for_selector(".md-search-result__item")
    assert "Evidence decides" in page.inner_text(".md-search-result__list")
    page.close()


def test_the_reference_renders_each_public_name_with_its_description(site: Path) -> None:
    import experiential as xp

    reference = "".join(path.read_text("utf-8") for path in (site / "api").glob("*.html"))
    assert [name for name in xp.__all__ if f'id="experiential.{name}"' not in reference] == []
    assert 'id="experiential.Bank.search"' in reference
    assert "Give the agent a second attempt at an instance" in reference
