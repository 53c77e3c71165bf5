"""Compute WebShop's reward: how well the purchase fits the instruction."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from experiential.envs.webshop.catalogue import Product
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
_WORD = re.compile(r"[^\W\d_]{2,}")
_NOT_NOUNS = frozenset(
    """
    about above after again all also am an and any are around as at be because been before best
    better big both but by can cheap clean comfortable comfy compatible cool cozy cute down
    durable each easy elegant every extra fashionable few fits flexible for free fresh from full
    fully funny further get good great had has have healthy heavy high his how if in into is it
    its just large larger less lightweight long low made make many mini more most natural new
    nice non not of off on only open or other our out over perfect portable premium quick
    rechargeable removable same sexy short simple slim small so soft some stylish such super
    than that the their them then these they thick thin this those through to too ultra under
    universal up use used very vintage was washable waterproof we were what when which while who
    will wireless with without you your
    """.split()
)


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


@lru_cache(maxsize=8192)
def nouns(title: str) -> frozenset[str]:
    """Return the words of a title without function words, common adjectives and numbers.

    >>> sorted(nouns("Soft 2-Pack Socks for Women"))
    ['pack', 'socks', 'women']
    """
    return frozenset(word for word in _WORD.findall(title.lower()) if word not in _NOT_NOUNS)


def type_factor(bought: Product, wanted: Product) -> float:
    """Return how far the kind of product is right: 1, 0.5, 0.1 or 0.

    It is 1 if the shelf, two categories, or over a fifth of the title's nouns agree. With less than
    a tenth of the nouns it is 0.1, with none 0, whatever else agrees (r_type of the WebShop paper).
    """
    wished = nouns(wanted.title)
    share = len(nouns(bought.title) & wished) / len(wished) if wished else 0.2
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
    """
    kind = type_factor(bought, wanted)
    texts = (bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower())
    attributes = sum(
        any(agree(known, wish) for known in bought.attributes)
        or any(wish in text for text in texts)
        for wish in goal.attributes
    )
    mine = [plain_colour(value) for value in chosen]  # colours compare by their word
    options = sum(any(agree(one, plain_colour(wish)) for one in mine) for _, wish in goal.options)
    within = price <= goal.bound
    value = kind * (attributes + options + within) / (len(goal.attributes) + len(goal.options) + 1)
    return Score(value, kind, attributes, options, within)
