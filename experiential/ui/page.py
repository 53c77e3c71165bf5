"""Fill the templates: for the page app, and for one static page that needs no other file."""

from __future__ import annotations

import time
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from experiential.errors import MissingExtraError
from experiential.evaluation.card import Card
from experiential.evaluation.page import show_percent, show_points
from experiential.ids import DIGITS
from experiential.ui.source import EntryRow, EpisodeView, Source
from experiential.ui.views import evaluation_chart, view_evaluations, view_run, word_changes

PACKAGE = "experiential.ui"
REPORT_FILE = "report.html"
STYLES = ("pico-2.1.1.classless.min.css", "style.css")
SCRIPT = "htmx-2.0.11.min.js"
STATIC_EPISODES = 100
"""Newest episodes that the static page holds."""


@cache
def environment() -> Any:
    """Return the templates; every value is escaped.

    Raises:
        MissingExtraError: Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise MissingExtraError("jinja2", "serve") from None
    made = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    named: dict[str, Any] = {"percent": show_percent, "points": show_points}
    made.filters.update(named | {"when": when, "short": short, "chance": chance})
    added: Any = made.globals
    added["word_changes"] = word_changes
    return made


def short(id: str) -> str:
    """Return the beginning of an id."""
    return id[:DIGITS]


def chance(value: float) -> str:
    """Return a probability in per cent, never as certain.

    >>> chance(0.5), chance(0.999), chance(0.0)
    ('50 %', '> 99 %', '< 1 %')
    """
    percent = round(100 * value)
    return "> 99 %" if percent > 99 else "< 1 %" if percent < 1 else f"{percent} %"


def when(at: float) -> str:
    """Return a time of this machine in words."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def render(name: str, **values: Any) -> str:
    """Return a page of the app."""
    linked = {"static": False, "styles": STYLES, "script": SCRIPT, "url": app_url}
    return environment().get_template(name).render(**linked, **values)


def app_url(kind: str, id: str) -> str:
    """Return where the app shows an entry or an episode."""
    return f"/{kind}/{id}"


def searched(rows: list[EntryRow], words: str) -> list[EntryRow]:
    """Return the entries that have all words in their text, task, kind or id."""
    wanted = words.casefold().split()
    return [
        row
        for row in rows
        if all(
            word in f"{row.entry.id} {row.entry.kind} {row.entry.task} {row.entry.text}".casefold()
            for word in wanted
        )
    ]


def run_values(source: Source) -> dict[str, Any]:
    """Return what the page of a run shows."""
    events = source.events()
    now = time.time()
    age = now - events[-1].get("time", now) if events else 0.0
    trained = [one for one in source.episodes() if one.arm is None]
    return {"run": view_run(events, trained), "age": age}


def evaluation_values(source: Source) -> dict[str, Any]:
    """Return what the page of evaluations shows."""
    events = source.events()
    cards: list[tuple[Path, Card]] = source.cards()
    return {"evals": view_evaluations(events), "curve": evaluation_chart(events), "cards": cards}


def write_report(source: Source, path: Path) -> Path:
    """Write run, evaluation, entries and newest episodes as one page that needs no other file.

    Raises:
        MissingExtraError: Jinja2 is not installed.
    """
    known = [one for one in source.episodes() if one.arm is None]
    episodes: list[EpisodeView] = [source.episode(one.id) for one in known[-STATIC_EPISODES:]]
    entries = [source.entry(row.entry.id) for row in source.entries()]
    ids = {view.row.entry.id for view in entries} | {view.summary.id for view in episodes}

    def anchor(kind: str, id: str) -> str:
        return f"#{id}" if id in ids else ""  # of an entry that is gone, or an older episode

    styles = [files(PACKAGE).joinpath("static", name).read_text("utf-8") for name in STYLES]
    page = (
        environment()
        .get_template("report.html")
        .render(
            static=True,
            styles=styles,
            script=None,
            url=anchor,
            title=source.name,
            source=source,
            entries=entries,
            episodes=list(reversed(episodes)),
            total=len(known),
            letters=source.letters(),
            **run_values(source),
            **evaluation_values(source),
        )
    )
    path.write_text(page, encoding="utf-8")
    return path
