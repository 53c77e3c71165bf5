"""Open a shop: products, prices, the search engine over them, and its goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from experiential.envs.webshop.catalogue import (
    INSTRUCTIONS,
    PRODUCTS,
    Product,
    make_products,
    read_products,
)
from experiential.envs.webshop.goals import Goal, draw_prices, make_goals
from experiential.envs.webshop.invented import Part, invented_rows
from experiential.envs.webshop.lucene import LuceneBM25
from experiential.errors import ConfigError

Split = Literal["train", "eval", "test", "all"]

FOUND = 50  # most products that a search returns
PARTS: dict[Split, slice] = {
    "test": slice(0, 500),
    "eval": slice(500, 1500),
    "train": slice(1500, None),
    "all": slice(None),
}
"""Goals of a split by their index, as WebShop's own baselines take them."""


@dataclass(frozen=True)
class Shop:
    """Hold products, prices, search and goals."""

    name: str  # how task ids begin
    products: dict[str, Product]  # by id
    prices: dict[str, float]  # by id, in dollars; one draw where a range is shown
    goals: tuple[Goal, ...]  # in the order that splits are cut from
    engine: LuceneBM25  # over the products, in their order

    def search(self, words: str) -> list[str]:
        """Return the ids of at most 50 products, best first."""
        ids = list(self.products)
        return [ids[i] for i in self.engine.best(words.lower(), FOUND)]


def open_shop(split: Split, folder: str | None, generation: int) -> tuple[Shop, Sequence[Goal]]:
    """Open a shop, once per process and version of its files, with the goals of a split.

    Args:
        split: of a folder by index, of an invented shop ``train`` or ``eval``.
        folder: where WebShop's two files are; None for an invented shop.
        generation: seed of drawn prices and bounds, and of the invented shop.

    Raises:
        ConfigError: the files cannot be used, or there is no goal in that split.
        MissingExtraError: a package of the extra is missing.
    """
    if folder is None:
        if split not in ("train", "eval"):
            raise ConfigError(
                f"Expected split train or eval of the invented shop, got {split!r}; give data= for"
                " WebShop's own files"
            )
        shop = _opened(split, None, generation, ())
        return shop, shop.goals
    path = Path(folder).expanduser()
    files = [path / f"{name}{end}" for name in (PRODUCTS, INSTRUCTIONS) for end in ("", ".xz")]
    stamp = tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)
    shop = _opened(None, path, generation, stamp)
    goals = shop.goals[PARTS[split]]
    if not goals:
        have = f"{len(shop.goals)} goals in all; use split='all' for small files"
        raise ConfigError(f"Expected goals of split {split} in {folder}, got {have}")
    return shop, goals


@lru_cache(maxsize=4)
def _opened(
    part: Part | None, folder: Path | None, generation: int, stamp: tuple[int, ...]
) -> Shop:
    """Return the shop of a folder, or an invented one of a part."""
    if folder is not None:
        name, products = f"webshop-{generation}", read_products(folder)
    else:
        rows, asked = invented_rows(part or "train", generation)
        name = f"webshop-invented-{part}-{generation}"
        products = make_products(rows, asked, "invented", "invented")
    prices = draw_prices(products, generation)
    engine = LuceneBM25([product.indexed for product in products])
    known = {product.asin: product for product in products}
    return Shop(name, known, prices, tuple(make_goals(products, prices, generation)), engine)
