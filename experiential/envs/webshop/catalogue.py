"""Read the products of WebShop's files."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, Field, field_validator

from experiential.envs.arguments import checked
from experiential.errors import ConfigError

PRODUCTS, INSTRUCTIONS = "items_shuffle_1000.json", "items_ins_v2_1000.json"
"""Names of the two files, as WebShop publishes them; ``.xz`` may follow."""
HUMAN = "items_human_ins.json"
"""Name of the file with the instructions that people wrote; ``.xz`` may follow."""
WHOLE = {PRODUCTS: "items_shuffle.json", INSTRUCTIONS: "items_ins_v2.json"}
"""Files of the whole catalogue, which are read where those of 1,000 products are not there."""
_SOURCES = {
    PRODUCTS: "1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib",
    INSTRUCTIONS: "1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu",
    WHOLE[PRODUCTS]: "1A2whVgOO0euk5O13n2iYDM0bQRkkRduB",
    WHOLE[INSTRUCTIONS]: "1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi",
    HUMAN: "14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O",
}
"""Ids of the files on Google Drive, from which WebShop's own ``setup.sh`` downloads them."""
NO_PRICE = 100.0  # what the original takes for a product without a price, in dollars
_LONGEST_ASIN = 10  # the original leaves out products with a longer one

_ROUND = str.maketrans("[]", "()")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PRICE = re.compile(r"\$\s*([\d,]*\.?\d+)")


@dataclass(frozen=True)
class Product:
    """Hold one product of the shop."""

    asin: str
    title: str
    category: str  # department, such as ``beauty``
    query: str  # the shelf that it was found on, in lower case
    path: tuple[str, ...]  # its categories, from the widest to the narrowest
    description: str
    bullets: tuple[str, ...]  # features, one a text
    prices: tuple[float, ...]  # one price, or the bounds of a range; in dollars
    price_tag: str  # they as the shop shows them
    options: tuple[tuple[str, tuple[str, ...]], ...]  # names and values to choose, in lower case
    attributes: tuple[str, ...]  # properties beside its text; never shown
    rating: str
    wish: str | None  # words of the instruction without options and price; None if nobody asks
    wished: tuple[str, ...]  # the attributes which that instruction asks for

    @property
    def indexed(self) -> str:
        """Return the searched text: title, description, first feature and options."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options)
        return " ".join(
            [self.title, self.description, self.bullets[0] if self.bullets else "", options]
        ).lower()


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
    pricing: str | None = None
    customization_options: dict[str, list[_Choice] | None] | str | None = None
    average_rating: float | str | None = None

    @field_validator("pricing")
    @classmethod
    def _priced(cls, text: str | None) -> str | None:
        if text and not _PRICE.search(text):
            raise ValueError(f"Expected a price such as $9.99, got {text!r}")
        return text


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


class HumanWish(BaseModel):
    """Check an instruction that a person wrote for a product."""

    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str]


def files_of(folder: Path) -> list[Path]:
    """Return all files that a shop may be read from, whether they are there or not."""
    names = (PRODUCTS, INSTRUCTIONS, *WHOLE.values(), HUMAN)
    return [folder / f"{name}{end}" for name in names for end in ("", ".xz")]


def read_products(folder: str | Path) -> list[Product]:
    """Read the products of a folder with WebShop's two files, of 1,000 products or of all.

    Raises:
        ConfigError: a file is missing or cannot be read, a product or an instruction lacks a field
            or has a wrong one, or something is asked of a product that is not there; file and field
            are named.
    """
    path = Path(folder).expanduser()
    whole = not any((path / f"{PRODUCTS}{end}").is_file() for end in ("", ".xz"))
    whole = whole and any((path / f"{WHOLE[PRODUCTS]}{end}").is_file() for end in ("", ".xz"))
    names = WHOLE.values() if whole else WHOLE
    (rows, source), (asked, asking) = (_read(path, name) for name in names)
    return make_products(rows, asked, source, asking)


def read_human_wishes(
    folder: str | Path, products: Iterable[Product]
) -> dict[str, list[HumanWish]]:
    """Read what people asked for, by product; instructions for other products are left out.

    Raises:
        ConfigError: the file is missing or cannot be read, or an instruction lacks a field.
    """
    rows, source = _read(Path(folder).expanduser(), HUMAN)
    if not isinstance(rows, Mapping):
        raise ConfigError(
            f"Expected a JSON object from asin to instructions in {source}, got"
            f" {type(rows).__name__}"
        )
    expected = f"a list of {', '.join(HumanWish.model_fields)} in {source}"
    found: dict[str, list[HumanWish]] = {}
    for product in products:
        known: Any = cast("Mapping[str, Any]", rows).get(product.asin, [])
        if not isinstance(known, list):
            raise ConfigError(f"Expected {expected}, got {type(known).__name__} of {product.asin}")
        for i, row in enumerate(cast("list[Any]", known), 1):
            wish = checked(HumanWish, row, expected, f"entry {i} of {product.asin!r}")
            found.setdefault(product.asin, []).append(wish)
    return found


def human_command(folder: str) -> str:
    """Return the command that gets the instructions of people."""
    return _command(f"{folder}/{HUMAN}")


def _command(file: str) -> str:
    source = f"https://drive.google.com/uc?id={_SOURCES[Path(file).name]}"
    return f"pip install gdown && gdown '{source}' -O {file}"


def _read(folder: Path, name: str) -> tuple[Any, str]:
    """Return the content of a JSON file, which may be packed, and its path."""
    paths = [folder / f"{name}{end}" for end in ("", ".xz")]
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        raise ConfigError(
            f"Expected {name} (or {name}.xz) in {folder}, got no such file; run:"
            f" {_command(str(paths[0]))}"
        )
    try:
        raw = file.read_bytes()
        return json.loads(lzma.decompress(raw) if file.suffix == ".xz" else raw), str(file)
    except (OSError, EOFError, lzma.LZMAError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"Expected JSON in {file}, got a file that cannot be read: {error}"
        ) from error


def make_products(rows: Any, asked: Any, source: str, asking: str) -> list[Product]:
    """Make products of rows; ``source`` and ``asking`` name the two files in errors."""
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"Expected a JSON list of products in {source}, got none in it")
    if not isinstance(asked, Mapping):
        raise ConfigError(
            f"Expected a JSON object from asin to instruction in {asking}, got"
            f" {type(asked).__name__}"
        )
    wanted, unique = f"{', '.join(_Row.model_fields)} in {source}", dict[str, _Row]()
    for i, row in enumerate(cast("list[Any]", rows), 1):
        product = checked(_Row, row, wanted, f"product {i}")
        if product.asin != "nan" and len(product.asin) <= _LONGEST_ASIN:
            unique.setdefault(product.asin, product)
    wanted = f"{', '.join(_Asked.model_fields)} in {asking}"
    wishes = {
        name: checked(_Asked, row, wanted, f"entry {name!r}")
        for name, row in cast("Mapping[str, Any]", asked).items()
    }
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
    nothing = _Asked(attributes=[])
    return [_product(row, wishes.get(row.asin, nothing)) for row in unique.values()]


def _product(row: _Row, wish: _Asked) -> Product:
    options: list[tuple[str, tuple[str, ...]]] = []
    known = row.customization_options
    for name, choices in known.items() if isinstance(known, dict) else ():
        # values as WebShop spells them, without brackets and lone surrogates
        spelt = (one.value.strip().replace("/", " | ").lower() for one in choices or ())
        texts = tuple(_SURROGATE.sub("\ufffd", text.translate(_ROUND)) for text in spelt if text)
        if choices is not None:
            options.append((name.lower(), texts))
    bullets = row.small_description
    priced = _PRICE.findall(row.pricing or "")[:2]
    prices = tuple(float(one.replace(",", "")) for one in priced) or (NO_PRICE,)
    return Product(
        asin=row.asin,
        title=row.name,
        category=row.category,
        query=row.query.lower().strip(),
        path=tuple(level.strip() for level in row.product_category.split("\u203a")),
        description=row.full_description,
        bullets=tuple(bullets) if isinstance(bullets, list) else (bullets,),
        prices=prices,
        price_tag=" to ".join(f"${price}" for price in prices),
        options=tuple(options),
        attributes=tuple(wish.attributes),
        rating=str(row.average_rating or "N.A."),
        wish=wish.instruction,
        wished=tuple(wish.instruction_attributes or ()),
    )
