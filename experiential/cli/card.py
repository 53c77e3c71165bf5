"""Show a comparison in the terminal: one table, and remarks on it."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from experiential.evaluation.card import ArmReport, Card, RecipeReport
from experiential.evaluation.page import COSTS, show_costs, show_percent, show_points


def card_table(card: Card) -> Table:
    """Lay out success in per cent, difference to ``on`` in points, and cost, arm by arm."""
    title = "Held-out success in %, 95 % intervals; costs per success, actor + extractor"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("recipe, arm", overflow="fold", min_width=10)
    for name in ("visit 1", "visits 2+", "on minus it", "epis.", "sec.", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for recipe in card.recipes:
        table.add_section()
        table.add_row(Text(recipe.name, style="bold"))
        for arm in recipe.arms:
            _, name, _, first, later, difference, episodes, seconds, *tokens = _row(recipe, arm)
            table.add_row(
                f" {name}",
                first.partition(" ")[0],
                later.replace(" %", ""),
                difference.replace("[+", "[").replace(", +", ", "),
                episodes,
                seconds,
                "+".join(tokens[:2]),
            )
    return table


def dollars(card: Card) -> Iterator[str]:
    """Yield a line for each arm with a known price: what a success costs."""
    for recipe in card.recipes:
        for arm in recipe.arms:
            *_, actor, extractor = show_costs(arm.per_success)
            if arm.per_success is not None and (actor or extractor):
                costs = f"actor {actor or 'unknown'}, extractor {extractor or 'unknown'}"
                yield f"{recipe.name}, {arm.arm}: {costs} a success"


def card_lines(card: Card) -> Iterator[str]:
    """Yield the same as plain lines: one for each arm, then the remarks."""
    names = ("recipe", "arm", "seeds", "visit 1", "later visits", "on minus this", *COSTS)
    for recipe in card.recipes:
        for arm in recipe.arms:
            row = zip(names, _row(recipe, arm), strict=True)
            yield "; ".join(f"{name}: {value}" for name, value in row if value)
    yield from remarks(card)


def remarks(card: Card) -> Iterator[str]:
    """Yield comparisons and notes, a line each."""
    for recipe in card.recipes:
        for one in recipe.differences:
            if one.first != "on":
                sides = f"{recipe.name}: {one.first} minus {one.second}"
                yield f"{sides} {show_points(one.interval)} points"
    for one in card.comparisons:
        common = f"{one.seeds} training seeds" if one.seeds else "no training seed"
        points = f"{show_points(one.interval)} points"
        yield f"{one.sides('minus')}: {points}, {common} in common, {one.worlds} worlds"
    yield from (f"note: {note}" for note in card.notes)


def _row(recipe: RecipeReport, arm: ArmReport) -> list[str]:
    on_minus = {d.second: show_points(d.interval) for d in recipe.differences if d.first == "on"}
    rates = [show_percent(arm.visits[0].interval), show_percent(arm.later)]
    counts = [recipe.name, arm.arm, str(len(recipe.runs)), *rates, on_minus.get(arm.arm, "")]
    return [*counts, *show_costs(arm.per_success)]
