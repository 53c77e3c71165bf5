"""Open a shop: products, prices, the search engine over them, and goals drawn from them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from experiential.envs.bm25 import BM25
from experiential.envs.webshop.catalogue import (
    HumanWish,
    Product,
    files_of,
    human_command,
    make_products,
    read_human_wishes,
    read_products,
)
from experiential.envs.webshop.invented import Part, invented_rows
from experiential.envs.webshop.lucene import LuceneBM25
from experiential.errors import ConfigError

Split = Literal["train", "eval", "test", "all"]
Source = Literal["synthetic", "human"]
"""Who asks: WebShop's generator, or people."""

FOUND = 50  # most products that a search returns
PARTS: dict[Split, slice] = {
    "test": slice(0, 500),
    "eval": slice(500, 1500),
    "train": slice(1500, None),
    "all": slice(None),
}
"""Goals of a split by their index, as WebShop's own baselines take them."""
NO_BOUND = 1_000_000.0  # price bound of a goal that names none
ORDER = 233  # seed of the order of goals, as WebShop's engine has it
_BOUNDS = [10.0 * i for i in range(1, 100)]


@dataclass(frozen=True)
class Goal:
    """Hold one task."""

    index: int  # its place in the shuffled list, which also decides its split
    asin: str  # the product that it was made from
    wish: str  # the instruction without the price
    text: str  # the instruction
    attributes: tuple[str, ...]  # what the product must be
    options: tuple[tuple[str, str] | str, ...]  # (name, value) to choose; a value if people ask
    bound: float  # highest price, in dollars
    weight: float = 0.0  # 1 if people ask; else mean over attributes of 1 / goals that ask for it


@dataclass(frozen=True)
class Shop:
    """Hold products, prices, search and goals."""

    name: str  # how task ids begin
    products: dict[str, Product]  # by id
    prices: dict[str, float]  # by id, in dollars; one draw where a range is shown
    goals: tuple[Goal, ...]  # in the order that splits are cut from
    engine: BM25  # over the products, in their order

    def search(self, words: str) -> list[str]:
        """Return the ids of at most 50 products, best first."""
        ids = list(self.products)
        return [ids[i] for i in self.engine.best(words.lower(), FOUND)]


def open_shop(
    split: Split, folder: str | None, generation: int, source: Source = "synthetic"
) -> tuple[Shop, Sequence[Goal]]:
    """Open a shop, once per process and version of its files, with the goals of a split.

    ``folder`` has WebShop's files, split by index; None stands for an invented shop.
    ``generation`` is the seed of drawn prices and bounds, and of the invented shop.
    """
    if folder is None:
        if source == "human":
            raise ConfigError(
                "Expected data= (or WEBSHOP_DATA) with WebShop's files for goals='human', got the"
                f" invented shop; get its products, then run: {human_command('FOLDER')}"
            )
        if split not in ("train", "eval"):
            raise ConfigError(
                f"Expected split train or eval of the invented shop, got {split!r}; give data= for"
                " WebShop's own files"
            )
        shop = _opened(split, None, generation, source, ())
        return shop, shop.goals
    path = Path(folder).expanduser()
    stamp = tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files_of(path))
    shop = _opened(None, path, generation, source, stamp)
    goals = shop.goals[PARTS[split]]
    if not goals:
        have = f"{len(shop.goals)} {source} goals in all; use split='all' for small files"
        raise ConfigError(f"Expected goals of split {split} in {folder}, got {have}")
    return shop, goals


@lru_cache(maxsize=4)
def _opened(
    part: Part | None,
    folder: Path | None,
    generation: int,
    source: Source,
    stamp: tuple[int, ...],
) -> Shop:
    """Return the shop of a folder, or an invented one of a part."""
    if folder is not None:
        kind = "-human" if source == "human" else ""
        name, products = f"webshop{kind}-{generation}", read_products(folder)
    else:
        name = f"webshop-invented-{part}-{generation}"
        invented = invented_rows(part or "train", generation)
        products = make_products(*invented, "invented", "invented")
    prices = draw_prices(products, generation)
    if folder is not None and source == "human":
        wishes = read_human_wishes(folder, products)
        goals = make_human_goals(products, wishes, prices, generation)
    else:
        goals = make_goals(products, prices, generation)
    engine = LuceneBM25([product.indexed for product in products])
    known = {product.asin: product for product in products}
    return Shop(name, known, prices, tuple(goals), engine)


def draw_prices(products: Sequence[Product], seed: int) -> dict[str, float]:
    """Return the price of each product by id, in dollars; draw it uniformly from a range."""
    rng = random.Random(f"prices:{seed}")
    return {p.asin: p.prices[0] if len(p.prices) == 1 else rng.uniform(*p.prices) for p in products}


def make_goals(products: Sequence[Product], prices: Mapping[str, float], seed: int) -> list[Goal]:
    """Return a goal for each wanted product and combination of its options, shuffled.

    The price bound is the larger of two draws from the next four multiples of ten dollars above the
    product's price. The order is that of Python's ``random.seed(233); random.shuffle(goals)``, as
    WebShop has it; ``seed`` draws the bounds only.
    """
    rng = random.Random(f"bounds:{seed}")
    goals: list[Goal] = []
    for product in products:
        if product.wish is None:
            continue
        bound, tail = _draw_bound(rng, prices[product.asin])
        options = sorted(product.options)
        for values in itertools.product(*(values for _, values in options)):
            chosen = tuple((name, value) for (name, _), value in zip(options, values, strict=True))
            listed = ", and ".join(f"{name}: {value}" for name, value in chosen)
            wish = f"{product.wish} with {listed}" if chosen else product.wish
            goal = Goal(0, product.asin, wish, wish + tail, product.wished, chosen, bound)
            goals.append(goal)
    counts = Counter(attribute for goal in goals for attribute in goal.attributes)
    random.Random(ORDER).shuffle(goals)
    weights = [sum(1 / counts[one] for one in goal.attributes) for goal in goals]
    return [
        replace(goal, index=i, weight=weight / len(goal.attributes))
        for i, (goal, weight) in enumerate(zip(goals, weights, strict=True))
    ]


def make_human_goals(
    products: Sequence[Product],
    wishes: Mapping[str, Sequence[HumanWish]],
    prices: Mapping[str, float],
    seed: int,
) -> list[Goal]:
    """Return a goal for each instruction of a person that asks for an attribute, shuffled.

    Instructions without attributes are left out, as WebShop does. Bounds and order are those of
    `make_goals`; a full stop at the ends of the instruction goes, and all weigh the same.
    """
    rng = random.Random(f"bounds:{seed}")
    goals: list[Goal] = []
    for product in products:
        for wish in wishes.get(product.asin, ()):
            if not wish.instruction_attributes:
                continue
            bound, tail = _draw_bound(rng, prices[product.asin])
            text = wish.instruction.strip(".")
            asked = tuple(wish.instruction_attributes), tuple(wish.instruction_options)
            goals.append(Goal(0, product.asin, text, text + tail, *asked, bound, 1.0))
    random.Random(ORDER).shuffle(goals)
    return [replace(goal, index=i) for i, goal in enumerate(goals)]


def _draw_bound(rng: random.Random, price: float) -> tuple[float, str]:
    """Return a price bound, and how the instruction says it."""
    above = [bound for bound in _BOUNDS if bound > price][:4]
    if len(above) < 2:
        return NO_BOUND, ""
    bound = max(rng.sample(above, 2))
    return bound, f", and price lower than {bound:.2f} dollars"
