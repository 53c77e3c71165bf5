"""Draw goals from the products: instructions with options and a price bound."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiential.envs.webshop.catalogue import Product

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
    options: tuple[tuple[str, str], ...]  # names and values that must be chosen
    bound: float  # highest price, in dollars
    weight: float = 0.0  # mean over its attributes of 1 / (goals that ask for the attribute)


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
        above = [bound for bound in _BOUNDS if bound > prices[product.asin]][:4]
        bound = max(rng.sample(above, 2)) if len(above) >= 2 else NO_BOUND
        tail = f", and price lower than {bound:.2f} dollars" if bound < NO_BOUND else ""
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
