"""Write the report of a comparison as one HTML page that needs no other file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from experiential.evaluation.card import Card, PerSuccess, RunFacts
from experiential.evaluation.intervals import Interval

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}
th,td{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}img{max-width:100%}
code{font-size:90%}.note{color:#8a4b00}
"""
_READING = (
    "Later visits are those after the first. An arm's interval resamples training seeds and worlds;"
    " that of a visit is Wilson's, with all episodes as if they were independent. Differences are"
    " paired by training seed, world, visit and sampling seed, and resample training seeds, then"
    " worlds. Costs are over all visits. A policy's seconds are those in which it had a request"
    " open."
)


def show_percent(interval: Interval) -> str:
    """Format a rate in per cent with its interval: `42 % [35, 50]`."""
    return f"{interval.mean * 100:.0f} % [{interval.low * 100:.0f}, {interval.high * 100:.0f}]"


def show_points(interval: Interval) -> str:
    """Format a difference in points with its interval: `+42 [+35, +50]`."""
    return f"{interval.mean * 100:+.0f} [{interval.low * 100:+.0f}, {interval.high * 100:+.0f}]"


COSTS = {
    "episodes": "{:.1f}",
    "seconds": "{:.2f}",
    "actor_tokens": "{:,.0f}",
    "extractor_tokens": "{:,.0f}",
    "actor_seconds": "{:.2f}",
    "extractor_seconds": "{:.2f}",
    "actor_cost": "${:.4f}",
    "extractor_cost": "${:.4f}",
}
"""The costs of a success, and how each figure is shown."""


def show_costs(cost: PerSuccess | None) -> list[str]:
    """Format the costs of a success; dashes without one, blank or unknown where none is known."""
    if cost is None:
        return ["–"] * len(COSTS)
    shown: list[str] = []
    for name, shape in COSTS.items():
        value = getattr(cost, name)
        missing = "unknown" if name.endswith("tokens") else ""
        shown.append(missing if value is None else shape.format(value))
    return shown


def write_page(card: Card, path: Path, picture: Path | None) -> Path:
    """Write the report of a card; a PNG is embedded, or the page says how to get one."""
    lines = [f"<title>Comparison</title><style>{_STYLE}</style><h1>Comparison</h1>"]
    versions = ", ".join(f"{name} {version}" for name, version in card.versions.items())
    changed = f" Settings changed for the evaluation: {' '.join(card.overrides)}."
    lines.append(f"<p>{escape(versions)}.{escape(changed if card.overrides else '')}</p>")
    lines += [f"<p class=note>{escape(note)}</p>" for note in card.notes]
    if picture is None:
        hint = "pip install 'experiential-rl[bench]'"
        lines.append(f"<p class=note>No picture: matplotlib is not installed ({hint}).</p>")
    else:
        png = b64encode(picture.read_bytes()).decode()
        lines.append(f'<img alt="learning curves and intervals" src="data:image/png;base64,{png}">')
    lines.append(f"<p>{escape(_READING)}</p>")
    compared = ("points", "training seeds", "worlds")
    for recipe in card.recipes:
        lines.append(f"<h2>{escape(recipe.name)}</h2>")
        lines.append(f"<p>{escape(recipe.environment)}, {recipe.worlds} held-out worlds.</p>")
        rates = [
            (arm.arm, *(show_percent(one.interval) for one in arm.visits), show_percent(arm.later))
            for arm in recipe.arms
        ]
        visits = [f"visit {one.visit}" for one in recipe.arms[0].visits]
        lines.append(_table(("arm", *visits, "later visits"), rates))
        if recipe.differences:
            rows = [
                (f"{one.first} – {one.second}", show_points(one.interval), one.seeds, one.worlds)
                for one in recipe.differences
            ]
            lines.append(_table(("arms", *compared), rows))
        rows = [
            (arm.arm, arm.successes, arm.episodes, arm.errors, *show_costs(arm.per_success))
            for arm in recipe.arms
        ]
        costs = (f"{name} per success" for name in COSTS)
        lines.append(_table(("arm", "successes", "episodes", "failed", *costs), rows))
        facts = [tuple(run.model_dump().values()) for run in recipe.runs]
        lines.append(_table(tuple(RunFacts.model_fields), facts))
    if card.comparisons:
        rows = [
            (one.sides("–"), show_points(one.interval), one.seeds or "unpaired", one.worlds)
            for one in card.comparisons
        ]
        lines.append("<h2>Between recipes</h2>")
        lines.append(_table(("recipes", *compared), rows))
    page = f"<!doctype html><html lang=en><meta charset=utf-8>{''.join(lines)}</html>\n"
    path.write_text(page, encoding="utf-8")
    return path


def _table(names: Sequence[str], rows: Sequence[Sequence[str | int | float]]) -> str:
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
