"""Read the products of WebShop's files."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, Field, field_validator

from experiential.envs.rows import checked
from experiential.errors import ConfigError

PRODUCTS, INSTRUCTIONS = "items_shuffle_1000.json", "items_ins_v2_1000.json"
"""Names of the two files, as WebShop publishes them; ``.xz`` may follow."""

_ROUND = str.maketrans("[]", "()")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PRICE = re.compile(r"\$\s*([\d,]*\.?\d+)")


@dataclass(frozen=True)
class Product:
    """Hold one product of the shop.

    Attributes:
        asin: its id.
        title: its name.
        category: department, such as ``beauty``.
        query: the shelf that it was found on, in lower case.
        path: its categories, from the widest to the narrowest.
        description: free text.
        bullets: features, one a text.
        prices: one price, or the bounds of a range; in dollars.
        options: names and values of what a buyer chooses, in lower case.
        attributes: properties beside its text; never shown.
        rating: mean rating in words.
        wish: words of the instruction that asks for it, without options and price; None when nobody
            asks for it.
        wished: the attributes which that instruction asks for.
    """

    asin: str
    title: str
    category: str
    query: str
    path: tuple[str, ...]
    description: str
    bullets: tuple[str, ...]
    prices: tuple[float, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    attributes: tuple[str, ...]
    rating: str
    wish: str | None
    wished: tuple[str, ...]

    @cached_property
    def price_tag(self) -> str:
        """Return the price, or its range, as the shop shows it."""
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def indexed(self) -> str:
        """Return the searched text: title, description, first feature and options."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options)
        return " ".join(
            [self.title, self.description, self.bullets[0] if self.bullets else "", options]
        ).lower()


def _clickable(value: str) -> str:
    """Return an option's value as WebShop spells it, without brackets and lone surrogates."""
    return _SURROGATE.sub("\ufffd", value.strip().replace("/", " | ").lower().translate(_ROUND))


class _Choice(BaseModel):
    value: str


class _Row(BaseModel):
    """Check a product of the file; fields that the shop does not read are ignored."""

    asin: str = Field(pattern=r"^\w{1,32}$")
    name: str
    category: str
    query: str
    product_category: str
    full_description: str
    small_description: list[str] | str
    pricing: str
    customization_options: dict[str, list[_Choice] | None] | str | None = None
    average_rating: float | str | None = None

    @field_validator("pricing")
    @classmethod
    def _priced(cls, text: str) -> str:
        if not _PRICE.search(text):
            raise ValueError(f"Expected a price such as $9.99, got {text!r}")
        return text

    def prices(self) -> tuple[float, ...]:
        return tuple(float(price.replace(",", "")) for price in _PRICE.findall(self.pricing)[:2])

    def options(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        known = self.customization_options if isinstance(self.customization_options, dict) else {}
        return tuple(
            (name.lower(), tuple(text for choice in choices if (text := _clickable(choice.value))))
            for name, choices in known.items()
            if choices is not None
        )


class _Asked(BaseModel):
    """Check an entry of the second file."""

    attributes: list[str]
    instruction: str | None = None
    instruction_attributes: list[str] | None = None

    @field_validator("instruction")
    @classmethod
    def _visible(cls, text: str | None) -> str | None:
        if text is not None and not text.strip():
            raise ValueError("Input should hold something visible")
        return text


def read_products(folder: str | Path) -> list[Product]:
    """Read the products of a folder with WebShop's two files of 1,000 products.

    Raises:
        ConfigError: a file is missing or cannot be read, a product or an instruction lacks a field
            or has a wrong one, or something is asked of a product that is not there; file and field
            are named.
    """
    rows, asked = (
        _read(_file(Path(folder).expanduser(), name)) for name in (PRODUCTS, INSTRUCTIONS)
    )
    return make_products(
        rows,
        asked,
        str(_file(Path(folder).expanduser(), PRODUCTS)),
        str(_file(Path(folder).expanduser(), INSTRUCTIONS)),
    )


def make_products(rows: Any, asked: Any, source: str, asking: str) -> list[Product]:
    """Make products of rows; ``source`` and ``asking`` name the two files in errors.

    Raises:
        ConfigError: as `read_products`.
    """
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"Expected a JSON list of products in {source}, got none in it")
    if not isinstance(asked, Mapping):
        raise ConfigError(
            f"Expected a JSON object from asin to instruction in {asking}, got"
            f" {type(asked).__name__}"
        )
    listed = [
        checked(_Row, row, f"{_fields(_Row)} in {source}", f"product {i}")
        for i, row in enumerate(cast("list[Any]", rows), 1)
    ]
    wishes = {
        name: checked(_Asked, row, f"{_fields(_Asked)} in {asking}", f"entry {name!r}")
        for name, row in cast("Mapping[str, Any]", asked).items()
    }
    unique: dict[str, _Row] = {}
    for one in listed:
        unique.setdefault(one.asin, one)
    for name, wish in wishes.items():
        if name not in unique and wish.instruction:
            raise ConfigError(
                f"Expected products for all instructions of {asking} in {source}, got none with"
                f" asin {name!r}"
            )
        if wish.instruction and not wish.instruction_attributes:
            raise ConfigError(
                f"Expected instruction_attributes beside the instruction of {name!r} in {asking},"
                " got none"
            )
    return [_product(row, wishes.get(row.asin)) for row in unique.values()]


def _product(row: _Row, wish: _Asked | None) -> Product:
    bullets = (
        row.small_description
        if isinstance(row.small_description, list)
        else [row.small_description]
    )
    return Product(
        asin=row.asin,
        title=row.name,
        category=row.category,
        query=row.query.lower().strip(),
        path=tuple(level.strip() for level in row.product_category.split("\u203a")),
        description=row.full_description,
        bullets=tuple(bullets),
        prices=row.prices(),
        options=row.options(),
        attributes=tuple(wish.attributes) if wish else (),
        rating=str(row.average_rating or "N.A."),
        wish=wish.instruction if wish else None,
        wished=tuple(wish.instruction_attributes or ()) if wish else (),
    )


def _file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.xz"):
        if path.is_file():
            return path
    raise ConfigError(
        f"Expected {name} (or {name}.xz) in {folder}, got no such file; WebShop's repository tells"
        " where to download its small data set"
    )


def _read(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return json.loads(lzma.decompress(raw) if path.suffix == ".xz" else raw)
    except (OSError, EOFError, lzma.LZMAError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"Expected JSON in {path}, got a file that cannot be read: {error}"
        ) from error


def _fields(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)
