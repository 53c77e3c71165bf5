"""The report of a comparison as one HTML page that needs no other file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from experiential.evaluation.card import Card, PerSuccess, RecipeReport
from experiential.evaluation.intervals import Interval

Cell = str | int | float

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}th,td{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}img{max-width:100%}code{font-size:90%}.note{color:#8a4b00}
"""
_READING = (
    "Later visits are those after the first. An arm's interval resamples training seeds and worlds;"
    " that of a visit is Wilson's, with all episodes as if they were independent. Differences are"
    " paired by training seed, world, visit and sampling seed, and resample training seeds, then"
    " worlds. Costs are over all visits. A policy's seconds are those in which it had a request"
    " open."
)


def show_percent(interval: Interval) -> str:
    """A rate in per cent with its interval: `42 % [35, 50]`."""
    return f"{interval.mean * 100:.0f} % [{interval.low * 100:.0f}, {interval.high * 100:.0f}]"


def show_points(interval: Interval) -> str:
    """A difference in points with its interval: `+42 [+35, +50]`."""
    return f"{interval.mean * 100:+.0f} [{interval.low * 100:+.0f}, {interval.high * 100:+.0f}]"


def write_page(card: Card, path: Path, picture: Path | None) -> Path:
    """Write the report of a card.

    Args:
        card: what was found.
        path: where to write it.
        picture: a PNG that is put into the page; without it the page says how to get one.
    """
    path.write_text(
        "<!doctype html><html lang=en><meta"
        f" charset=utf-8>{''.join(_page(card, picture))}</html>\n",
        encoding="utf-8",
    )
    return path


def _page(card: Card, picture: Path | None) -> Iterable[str]:
    yield f"<title>Comparison</title><style>{_STYLE}</style><h1>Comparison</h1>"
    told = ", ".join(f"{name} {version}" for name, version in card.versions.items())
    changed = (
        f" Settings changed for the evaluation: {' '.join(card.overrides)}."
        if card.overrides
        else ""
    )
    yield f"<p>{escape(told)}.{escape(changed)}</p>"
    yield from (f"<p class=note>{escape(note)}</p>" for note in card.notes)
    yield _image(picture)
    yield f"<p>{escape(_READING)}</p>"
    for recipe in card.recipes:
        yield from _recipe(recipe)
    if card.comparisons:
        rows = [
            (
                f"{c.first} ({c.first_arm}) – {c.second} ({c.second_arm})",
                show_points(c.interval),
                c.seeds or "unpaired",
                c.worlds,
            )
            for c in card.comparisons
        ]
        yield (
            "<h2>Between"
            f" recipes</h2>{_table(('recipes', 'points', 'training seeds', 'worlds'), rows)}"
        )


def _image(picture: Path | None) -> str:
    if picture is None:
        return (
            "<p class=note>No picture: matplotlib is not installed (pip install"
            " 'experiential-rl[bench]').</p>"
        )
    return (
        '<img alt="learning curves and intervals"'
        f' src="data:image/png;base64,{b64encode(picture.read_bytes()).decode()}">'
    )


def _recipe(recipe: RecipeReport) -> Iterable[str]:
    yield (
        f"<h2>{escape(recipe.name)}</h2><p>{escape(recipe.environment)}, {recipe.worlds} held-out"
        " worlds.</p>"
    )
    visits = [str(visit.visit) for visit in recipe.arms[0].visits]
    rates = [
        (arm.arm, *(show_percent(visit.interval) for visit in arm.visits), show_percent(arm.later))
        for arm in recipe.arms
    ]
    yield _table(("arm", *(f"visit {visit}" for visit in visits), "later visits"), rates)
    if recipe.differences:
        rows = [
            (f"{one.first} – {one.second}", show_points(one.interval), one.seeds, one.worlds)
            for one in recipe.differences
        ]
        yield _table(("arms", "points", "training seeds", "worlds"), rows)
    names = ("arm", "successes", "episodes", "failed", *(f"{name} per success" for name in COSTS))
    rows = [
        (arm.arm, arm.successes, arm.episodes, arm.errors, *show_costs(arm.per_success))
        for arm in recipe.arms
    ]
    yield _table(names, rows)
    facts = [
        (run.run, run.seed, run.step, run.checkpoint, run.settings, run.version)
        for run in recipe.runs
    ]
    yield _table(("run", "seed", "step", "checkpoint", "settings", "version"), facts)


COSTS = {
    "episodes": "{:.1f}", "seconds": "{:.2f}", "actor_tokens": "{:,.0f}", "extractor_tokens": "{:,.0f}", "actor_seconds": "{:.2f}",
    "extractor_seconds": "{:.2f}",
}  # fmt: skip
"""What a success cost, and how each figure is shown."""


def show_costs(cost: PerSuccess | None) -> list[str]:
    """What a success cost; dashes where there was none."""
    return [
        "–" if cost is None else shape.format(getattr(cost, name)) for name, shape in COSTS.items()
    ]


def _table(names: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
