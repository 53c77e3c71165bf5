"""Compute WebShop's reward: how well the purchase fits the instruction."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from experiential.envs.webshop.catalogue import Product
from experiential.envs.webshop.nouns import nouns
from experiential.envs.webshop.shop import Goal

SIMILAR = 85  # two texts agree when their token set ratio (0 to 100) is above this
COLOURS = tuple(
    """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
    burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee
    cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia
    gold granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender
    lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red
    rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower
    tan taupe teal tiger turquoise violet walnut wheat white wine yellow
    """.split()
)
"""Colour words; an option that contains one counts as that colour, the first in this order."""


class Score(NamedTuple):
    """Hold a reward in [0, 1] and its parts."""

    value: float
    kind: float  # factor for the type of product: 0, 0.1, 0.5 or 1
    attributes: int  # how many agree
    options: int  # how many agree
    price: bool  # whether it is within the bound


def agree(one: str, other: str) -> bool:
    """Return whether two texts have a token set ratio above 85.

    >>> agree("long lasting", "Lasting, long"), agree("long lasting", "long sleeves")
    (True, False)
    """
    return import_module("thefuzz.fuzz").token_set_ratio(one, other) > SIMILAR


def type_factor(bought: Product, wanted: Product) -> float:
    """Return how far the kind of product is right: 1, 0.5, 0.1 or 0.

    It is 1 if the shelf, two categories, or over a fifth of the title's nouns agree. With less than
    a tenth of the nouns it is 0.1, with none 0, whatever else agrees (r_type of the WebShop paper).
    A noun that the wanted title repeats counts once where it agrees, but each time in the whole.
    """
    wished = nouns(wanted.title)
    share = len({*nouns(bought.title)} & {*wished}) / len(wished) if wished else 0.2
    if share < 0.1:
        return 0.1 if share else 0.0
    near = bought.query == wanted.query or len({*bought.path} & {*wanted.path}) >= 2 or share > 0.2
    return 1.0 if near else 0.5


@lru_cache(maxsize=8192)
def plain_colour(value: str) -> str:
    """Return the first colour word that an option's value contains, else the value.

    >>> plain_colour("01-dark grey heather"), plain_colour("xx-large")
    ('dark', 'xx-large')
    """
    return next((colour for colour in COLOURS if colour in value), value)


@lru_cache(maxsize=8192)
def wished_text(option: tuple[str, str] | str) -> str:
    """Return the text that a chosen value is compared with, as the original has it.

    A goal of a person asks for a value, which is reduced to its colour word as the chosen one is. A
    synthetic goal asks for a pair, which the original hands to the same code: a pair contains a
    colour word only where its name or value *is* that word, and else is compared as Python writes
    it. So "xx-large" is not enough for "x-large", and a value that merely contains a colour word,
    such as "r.brown137", is missed by the right choice too, which is reduced to "brown".

    >>> wished_text("navy stripes"), wished_text(("color", "navy"))
    ('navy', 'navy')
    >>> wished_text(("color", "navy stripes"))
    "('color', 'navy stripes')"
    """
    if isinstance(option, str):
        return plain_colour(option)
    return next((colour for colour in COLOURS if colour in option), str(option))


def score(
    bought: Product, wanted: Product, goal: Goal, chosen: Iterable[str], price: float
) -> Score:
    """Return the reward for buying a product.

    It is the type factor times (attributes + options + [price within bound]) / (their numbers + 1).

    Args:
        bought: what was bought.
        wanted: the product that the goal was made from.
        goal: what was asked.
        chosen: values of the options chosen.
        price: what it costs, in dollars.
    Source:
        Section 3 of Yao et al., WebShop (2022), and the published code where the two differ.
    """
    kind = type_factor(bought, wanted)
    texts = (bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower())
    attributes = sum(
        any(agree(known, wish) for known in bought.attributes)
        or any(wish in text for text in texts)
        for wish in goal.attributes
    )
    mine = [plain_colour(value) for value in chosen]
    options = sum(any(agree(one, wished_text(wish)) for one in mine) for wish in goal.options)
    within = price <= goal.bound
    value = (attributes + options + within) / (len(goal.attributes) + len(goal.options) + 1) * kind
    return Score(value, kind, attributes, options, within)
