"""Show the pages of the shop as text, and list their buttons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from experiential.bank.text import escape
from experiential.envs.webshop.catalogue import Product

WINDOW = 10  # products on one page of results
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
DETAILS = ("Description", "Features", "Reviews")  # pages beside a product's own
FIXED = frozenset((BACK, PREVIOUS, NEXT, BUY, *DETAILS))
"""Buttons of the shop itself; a product's option of the same name does not hide them."""
_LONG = 4000  # characters of a description, or of all features, that are shown

Kind = Literal["search", "results", "item", "detail"]


@dataclass
class Visit:
    """Hold the open page of a visitor."""

    kind: Kind = "search"
    found: Sequence[str] = ()  # ids of the last search, best first
    page: int = 1  # of results
    asin: str = ""  # the product that is open
    detail: str = ""  # which of the pages beside it
    chosen: dict[str, str] = field(default_factory=dict[str, str])  # options of it

    @property
    def listed(self) -> Sequence[str]:
        """Return the ids on this page of results."""
        return self.found[(self.page - 1) * WINDOW : self.page * WINDOW]


def buttons(visit: Visit, product: Product | None) -> list[str]:
    """Return the texts that can be clicked, in the page's order, each once."""
    if visit.kind == "search":
        return []
    if visit.kind == "results":
        more = visit.page * WINDOW < len(visit.found)
        turning = [NEXT] * more + [PREVIOUS] * (visit.page > 1)
        return [BACK, *turning, *visit.listed]
    if visit.kind == "detail" or product is None:
        return [BACK, PREVIOUS]
    values = [value for _, options in product.options for value in options]
    return list(dict.fromkeys([BACK, PREVIOUS, *values, *DETAILS, BUY]))


def page_text(visit: Visit, products: Mapping[str, Product]) -> str:
    """Return the page as text, buttons in brackets; product texts cannot forge tags."""
    if visit.kind == "search":
        return "[Search]"
    if visit.kind == "results":
        above = [f"[{button}]" for button in buttons(visit, None) if button not in visit.listed]
        lines = [" ".join(above), f"Page {visit.page} (Total results: {len(visit.found)})"]
        for asin in visit.listed:
            lines += [f"[{asin}]", one_line(products[asin].title), products[asin].price_tag]
        return "\n".join(lines)
    product, lines = products[visit.asin], [f"[{BACK}] [{PREVIOUS}]"]
    if visit.kind == "detail":
        body = {
            "Description": escape(product.description),
            "Features": "\n".join(f"* {one_line(bullet)}" for bullet in product.bullets),
            "Reviews": "",
        }[visit.detail]
        cut = body if len(body) <= _LONG else f"{body[:_LONG]}\u2026"
        lines += [f"{visit.detail}:", cut.strip() or "There is nothing here."]
        return "\n".join(lines)
    for name, values in product.options:
        chosen = visit.chosen.get(name)
        shown = [f"[{one_line(v)}]{' (chosen)' if v == chosen else ''}" for v in values]
        lines.append(f"{one_line(name)}: {''.join(shown)}")
    lines += [one_line(product.title), f"Price: {product.price_tag}"]
    lines += [f"Rating: {one_line(product.rating)}", " ".join(f"[{one}]" for one in DETAILS)]
    return "\n".join([*lines, f"[{BUY}]"])


@lru_cache(maxsize=32_768)
def one_line(text: str) -> str:
    """Return a product's text on one line, without tags of this package."""
    return " ".join(escape(text).split())
