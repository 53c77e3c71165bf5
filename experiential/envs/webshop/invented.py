"""Invent products in the form of WebShop's files, from a seed."""

from __future__ import annotations

import random
from typing import Any, Literal, NamedTuple

import numpy as np

Part = Literal["train", "eval"]
SIZE = 240  # products of a part
_STARTS: dict[Part, tuple[str, ...]] = {
    "train": ("Bel", "Cor", "Dal", "Fen", "Gar", "Hol", "Jun", "Kel", "Lor", "Mar"),
    "eval": ("Nor", "Ost", "Pel", "Quil", "Ras", "Sol", "Tam", "Ulm", "Ven", "Zor"),
}
_ENDS = ("andi", "ero", "ique", "ona", "usto", "ivia", "ant", "emo", "inor", "yra", "opta", "elle")
_COLOURS = ("black", "blue", "brown", "green", "grey", "pink", "purple", "red", "white", "yellow")
_FEATURES = (
    "It comes in a plain box.",
    "It was tested for a year.",
    "Returns are accepted within 30 days.",
    "It is sold one by one.",
)


class _Kind(NamedTuple):
    category: str
    query: str
    path: str
    nouns: str
    attributes: str
    option: str
    values: str


# fmt: off
_KINDS = (
    _Kind(
        "beauty", "shampoo & conditioner",
        "Beauty & Personal Care \u203a Hair Care \u203a Shampoo & Conditioner",
        "Shampoo, Conditioner, Hair Wash",
        "paraben free, sulfate free, dry hair, tea tree, "
        "coconut oil, cruelty free, argan oil, damaged hair",
        "size", "8 ounce, 12 ounce, 16 ounce, 32 ounce",
    ),
    _Kind(
        "beauty", "toothbrushes",
        "Beauty & Personal Care \u203a Oral Care \u203a Toothbrushes & Accessories",
        "Toothbrush, Toothbrush Set, Brush Heads",
        "bpa free, sensitive teeth, easy clean, oral hygiene, "
        "bad breath, travel size, eco friendly, non slip",
        "size", "2 pack, 4 pack, 6 pack, 10 pack",
    ),
    _Kind(
        "fashion", "men's hoodies",
        "Clothing, Shoes & Jewelry \u203a Men \u203a Clothing \u203a Hoodies",
        "Hoodie, Pullover, Zip Jacket",
        "machine wash, long sleeve, hand wash, slim fit, "
        "cotton spandex, quick drying, drawstring closure, dry clean",
        "size", "small, medium, large, x-large",
    ),
    _Kind(
        "fashion", "women's sandals",
        "Clothing, Shoes & Jewelry \u203a Women \u203a Shoes \u203a Sandals",
        "Sandals, Slides, Clogs",
        "memory foam, open toe, rubber sole, ankle strap, "
        "arch support, vegan leather, slip resistant, low heel",
        "size", "6.5, 7.5, 8.5, 9.5",
    ),
    _Kind(
        "electronics", "headphones",
        "Electronics \u203a Headphones \u203a Over-Ear Headphones",
        "Headphones, Headset, Earphones",
        "noise cancelling, stereo sound, fast charging, high definition, "
        "hands free, bluetooth range, deep bass, carrying case",
        "style", "portable, cordless, foldable, studio",
    ),
    _Kind(
        "electronics", "tablet cases",
        "Electronics \u203a Computers \u203a Tablet Accessories \u203a Cases",
        "Tablet Case, Tablet Cover, Tablet Sleeve",
        "heavy duty, wireless charging, shock proof, easy install, "
        "tempered glass, dust proof, pencil holder, auto sleep",
        "size", "8 inch, 10 inch, 11 inch, 13 inch",
    ),
    _Kind(
        "garden", "console tables",
        "Home & Kitchen \u203a Furniture \u203a Living Room Furniture \u203a Tables",
        "Console Table, Sofa Table, Entry Table",
        "solid wood, easy assemble, storage space, steel frame, "
        "space saving, living room, metal legs, water resistant",
        "size", "30 inches, 40 inches, 50 inches, 60 inches",
    ),
    _Kind(
        "grocery", "herbal tea",
        "Grocery & Gourmet Food \u203a Beverages \u203a Tea \u203a Herbal",
        "Tea, Tea Bags, Loose Leaf Tea",
        "caffeine free, non gmo, gluten free, usda organic, "
        "sugar free, individually wrapped, kosher certified, low calorie",
        "flavor", "ginger, rooibos, chamomile, hibiscus",
    ),
)
# fmt: on


def invented_rows(part: Part, generation: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of both files; the parts share no brand and no id. A generation is a seed."""
    rng = random.Random(f"webshop:{part}:{generation}")
    letter = "T" if part == "train" else "E"
    numbers = rng.sample(range(36**5), SIZE)
    rows: list[dict[str, Any]] = []
    asked: dict[str, Any] = {}
    for i, number in enumerate(numbers):
        asin = f"B0{letter}{np.base_repr(number, 36):0>7}"
        kind = _KINDS[i % len(_KINDS)]
        attributes = rng.sample(kind.attributes.split(", "), 4)
        brand = f"{rng.choice(_STARTS[part])}{rng.choice(_ENDS)}"
        noun = rng.choice(kind.nouns.split(", "))
        pricing = f"${(low := rng.randint(600, 9000) / 100)}"
        if rng.random() >= 0.8:
            pricing += f" - ${round(low * rng.uniform(1.1, 1.5), 2)}"
        colours = rng.sample(_COLOURS, rng.randint(2, 3))
        sizes = kind.values.split(", ")
        values = sorted(rng.sample(sizes, 2), key=sizes.index)
        options = {"Color": colours, kind.option.title(): values}
        title = f"{brand} {noun}, {attributes[0].title()}, {attributes[1].title()}"
        row = {
            "asin": asin,
            "name": f"{title}, Model {rng.randint(100, 999)}",
            "category": kind.category,
            "query": kind.query,
            "product_category": kind.path,
            "full_description": (
                f"A {noun.lower()} by {brand}: {attributes[2]}. {rng.choice(_FEATURES)}"
            ),
            "small_description": [f"With {attributes[3]}.", rng.choice(_FEATURES)],
            "pricing": pricing,
            "average_rating": rng.randint(20, 50) / 10,
            "customization_options": {
                name: [{"value": value} for value in texts] for name, texts in options.items()
            },
            "images": [],
            "page": 1,
        }
        rows.append(row)
        wished = sorted(rng.sample(attributes, 2))
        asked[asin] = {
            "attributes": attributes,
            "instruction": f"Find me {', '.join(wished)} {kind.query}",
            "instruction_attributes": wished,
        }
    return rows, asked
