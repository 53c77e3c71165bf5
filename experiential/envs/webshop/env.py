"""Play WebShop as text: search, choose, buy; the reward rates the purchase."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

from experiential.bank.text import escape
from experiential.envs.arguments import one_of, positive, with_preset
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.envs.webshop.catalogue import Product
from experiential.envs.webshop.score import agree, plain_colour, score, wished_text
from experiential.envs.webshop.shop import PARTS, Goal, Source, Split, open_shop
from experiential.errors import ConfigError, require

WINDOW = 10  # products on one page of results
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
DETAILS = ("Description", "Features", "Reviews")  # pages beside a product's own
FIXED = frozenset((BACK, PREVIOUS, NEXT, BUY, *DETAILS))
"""Buttons of the shop itself; a product's option of the same name does not hide them."""
_LONG = 4000  # characters of a description, or of all features, that are shown

Kind = Literal["search", "results", "item", "detail"]
_CLICK = "Reply: click[text], where text is one that stands in brackets above."
_RULES: dict[Kind, str] = {
    "search": "Reply: search[words].", "results": _CLICK, "item": _CLICK, "detail": _CLICK,
}  # fmt: skip
LONGEST = 100_000  # characters of an action that are read; a longer one is invalid
PRESETS: dict[str, dict[str, Any]] = {"complementary": {"binary": True}}
"""Settings of papers: Complementary RL, C.1."""
_OPENING = re.compile(r"(?<![\w<])(search|click)\[", re.IGNORECASE)
_SURROGATE = re.compile("[\ud800-\udfff]")
QUERY = r"search\[[!-Z\\^-~][ -Z\\^-~]{0,119}\]"
"""The search of a model that can only choose: at most 120 printable ASCII characters."""
_UNSEARCHABLE = re.compile(r"[\[\]\ud800-\udfff\s]+")  # what a search's brackets cannot hold
_INSIDE = re.compile(r"[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]")


class Call(NamedTuple):
    """Hold the call of an action."""

    kind: Literal["search", "click"]
    text: str


def read_call(action: str) -> Call | None:
    """Return the last ``search[words]`` or ``click[text]`` in an action, or None.

    >>> read_call("I see. search[red shoes] or rather CLICK[ Next > ]")
    Call(kind='click', text='Next >')
    >>> read_call("click[") is None
    True
    """
    if len(action) > LONGEST or _SURROGATE.search(action):
        return None
    for match in reversed(list(_OPENING.finditer(action))):
        line_end = action.find("\n", match.end())
        held = _INSIDE.match(action, match.end(), line_end if line_end >= 0 else len(action))
        text = " ".join(held.group()[:-1].split()) if held else ""
        if text:
            return Call("search" if match[1].lower() == "search" else "click", text)
    return None


class WebShopEnv(TextEnv):
    """Buy what an instruction asks for.

    On the search page ``search[words]`` lists at most 50 products, ten a page; elsewhere
    ``click[text]`` follows what a page shows in brackets: a product, an option, ``Next >``, ``<
    Prev``, ``Back to Search``, ``Description``, ``Features``, ``Reviews``, or ``Buy Now``, which
    ends the episode. The last call in an action counts. Any other action uses up a turn, and the
    reply names the legal actions. When the turns are spent the episode is truncated and rewards
    nothing.

    The reward for buying is the one of the WebShop paper, a fraction (see `score`). What the goal
    was made from, its attributes and its product, stands in no observation and no ``info`` but as
    the instruction words it.

    `docs/envs/webshop.md` lists the arguments.

    Raises:
        ConfigError: an argument is outside its range, or the files cannot be used.
        MissingExtraError: a package of the extra ``webshop`` is missing.
    """

    presets = PRESETS

    def __init__(
        self,
        split: Split = "train",
        *,
        data: str | None = None,
        goals: Source = "synthetic",
        turns: int | None = None,
        threshold: float = 1.0,
        binary: bool | None = None,
        generation: int = 0,
        preset: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        known = {"turns": 15, "binary": False}
        chosen = with_preset(preset, PRESETS, known, turns=turns, binary=binary)
        one_of("split", split, PARTS)
        one_of("goals", goals, get_args(Source))
        positive(turns=chosen["turns"])
        if not 0 < threshold <= 1:
            raise ConfigError(f"Expected threshold above 0 and at most 1, got {threshold}")
        require("webshop", "thefuzz")  # without it no purchase can be rated
        named = data or os.environ.get("WEBSHOP_DATA") or None
        self._source = None if named == "made" else named
        self.split: Split = split
        self.goals: Source = goals
        self.threshold, self.generation = threshold, generation
        self.turns, self.binary = int(chosen["turns"]), bool(chosen["binary"])
        self._open()
        super().__init__(len(self._goals), render_mode=render_mode)

    def _open(self) -> None:
        opened = open_shop(self.split, self._source, self.generation, self.goals)
        self._shop, self._goals = opened
        # rare attributes weigh more
        self._shares = list(accumulate(goal.weight for goal in self._goals))

    def __getstate__(self) -> dict[str, Any]:
        """Return all state but the shop, which another process opens itself."""
        own = ("_shop", "_goals", "_shares")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    @property
    def task(self) -> str:
        """Return the instruction."""
        return self._text

    def _contents(self) -> Iterable[str]:
        """Yield the goals, and the products of the shop with their prices."""
        for goal in self._goals:
            yield f"{goal.index} {goal.asin} {goal.text} {goal.attributes} {goal.options}"
        for asin, product in self._shop.products.items():
            yield f"{asin} {self._shop.prices[asin]} {product.indexed}"

    def _begin(self, world: int) -> tuple[str, Info]:
        self._goal: Goal = self._goals[world]
        self._text = escape(self._goal.text)
        self._visit = Visit()
        self._left = self.turns
        return self._page(), self._info("")

    def _turn(self, action: str) -> Step:
        """Search or click."""
        call = self._legal_call(action)
        self._left -= 1
        if call == Call("click", BUY):
            wanted, asin = self._shop.products[self._goal.asin], self._visit.asin
            chosen, price = self._visit.chosen.values(), self._shop.prices[asin]
            bought = self._shop.products[asin]
            value = score(bought, wanted, self._goal, chosen, price).value
            success = value >= self.threshold
            thanks, said = "Thank you for shopping with us!", "Your score (min 0.0, max 1.0)"
            info = self._info(f"{thanks} {said}: {value:.3f}", success=success)
            reward = float(success) if self.binary else value
            return f"{thanks}\n{said}: {value:.3f}", reward, True, False, info
        over = self._left == 0
        if call is None:
            complaint = "That cannot be done here."
            info = self._info(f"{complaint} {_RULES[self._visit.kind]}", invalid=True)
            return f"{complaint}\n{self._page()}", 0.0, False, over, info
        self._follow(call)
        return self._page(), 0.0, False, over, self._info("")

    def oracle_action(self) -> str:
        """Search for the wanted product, open it, choose its options, buy it."""
        visit, goal = self._visit, self._goal
        if visit.kind == "search":
            product = self._shop.products[goal.asin]
            texts = (product.title, product.indexed, goal.wish)
            queries = [_UNSEARCHABLE.sub(" ", text).strip()[:2000] for text in texts]
            found = {query: self._shop.search(query) for query in queries}
            ranks = {one: ids.index(goal.asin) for one, ids in found.items() if goal.asin in ids}
            best = min(ranks, key=lambda query: ranks[query]) if ranks else queries[0]
            return f"search[{best}]"
        if visit.kind == "results":
            if goal.asin in visit.listed:
                return f"click[{goal.asin}]"
            if goal.asin not in visit.found:
                return f"click[{BACK}]"
            later = visit.found.index(goal.asin) >= visit.page * WINDOW
            return f"click[{NEXT if later else PREVIOUS}]"
        if visit.kind == "detail" or visit.asin != goal.asin:
            return f"click[{PREVIOUS}]"
        return f"click[{next(self._missing_values(), BUY)}]"

    def _missing_values(self) -> Iterator[str]:
        """Yield the values that are still to choose.

        A person's words may be no value of the product: then the first that agrees is yielded.
        """
        chosen, goal = self._visit.chosen, self._goal
        asked = [wish for wish in goal.options if isinstance(wish, str)]
        for name, values in self._shop.products[goal.asin].options if asked else ():
            fitting = [value for value in values if value in asked] or [
                value
                for value in values
                if any(agree(plain_colour(value), wished_text(wish)) for wish in asked)
            ]
            if fitting and name not in chosen:
                yield fitting[0]
        for wish in goal.options:
            if not isinstance(wish, str) and wish[1] not in chosen.values():
                yield wish[1]

    def _legal_call(self, action: str) -> Call | None:
        """Return the call with the click as the page spells it, or None if it is not legal here."""
        call = read_call(action)
        if call is None or (call.kind == "search") != (self._visit.kind == "search"):
            return None
        if call.kind == "search":
            return call
        # a button of the shop itself comes last, so that no option of a product hides it
        texts = sorted(self._visit.buttons(self._shop.products), key=lambda text: text in FIXED)
        known = {one_line(text).casefold(): text for text in texts}
        spelt = known.get(one_line(call.text).casefold())
        return Call("click", spelt) if spelt is not None else None

    def _follow(self, call: Call) -> None:
        visit, text = self._visit, call.text
        if call.kind == "search":
            self._visit = Visit("results", self._shop.search(text))
        elif text == BACK:
            self._visit = Visit()
        elif visit.kind == "results":
            if text in (NEXT, PREVIOUS):
                visit.page += 1 if text == NEXT else -1
            else:
                self._visit = Visit("item", visit.found, visit.page, text)
        elif text == PREVIOUS:
            visit.kind = "results" if visit.kind == "item" else "item"
        elif text in DETAILS:
            visit.kind, visit.detail = "detail", text
        else:
            # Where two options have the value, it is chosen of one that is still open.
            options = self._shop.products[visit.asin].options
            names = [name for name, values in options if text in values]
            name = next((name for name in names if name not in visit.chosen), names[-1])
            visit.chosen[name] = text

    def _page(self) -> str:
        page = self._visit.page_text(self._shop.products)
        rules = f"Turns left: {self._left}. {_RULES[self._visit.kind]}"
        tail = rules if self._left else "No turns are left."
        return f"WebShop\nInstruction: {self.task}\n{page}\n{tail}"

    def _info(self, feedback: str, *, success: bool = False, invalid: bool = False) -> Info:
        # Clicks of this page; on the search page, where any words may be searched, those of the
        # instruction as an example.
        buttons = self._visit.buttons(self._shop.products)
        clicks = [f"click[{one_line(text)}]" for text in buttons]
        if not clicks:
            wish = _UNSEARCHABLE.sub(" ", self.task.split(", and price lower than")[0])
            clicks = [f"search[{wish.strip()}]"]
        instance = f"{self._shop.name}-{self._goal.index}"
        info = self._report(instance, feedback, success=success, invalid=invalid, admissible=clicks)
        return info | {"admissible_pattern": QUERY} if self._visit.kind == "search" else info


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

    def buttons(self, products: Mapping[str, Product]) -> list[str]:
        """Return the texts that can be clicked, in the page's order, each once."""
        if self.kind == "search":
            return []
        if self.kind == "results":
            more = self.page * WINDOW < len(self.found)
            return [BACK, *[NEXT] * more, *[PREVIOUS] * (self.page > 1), *self.listed]
        if self.kind == "detail":
            return [BACK, PREVIOUS]
        values = [value for _, options in products[self.asin].options for value in options]
        return list(dict.fromkeys([BACK, PREVIOUS, *values, *DETAILS, BUY]))

    def page_text(self, products: Mapping[str, Product]) -> str:
        """Return the page as text, buttons in brackets; product texts cannot forge tags."""
        if self.kind == "search":
            return "[Search]"
        if self.kind == "results":
            above = [f"[{one}]" for one in self.buttons(products) if one not in self.listed]
            lines = [" ".join(above), f"Page {self.page} (Total results: {len(self.found)})"]
            for asin in self.listed:
                lines += [f"[{asin}]", one_line(products[asin].title), products[asin].price_tag]
            return "\n".join(lines)
        product, lines = products[self.asin], [f"[{BACK}] [{PREVIOUS}]"]
        if self.kind == "detail":
            body = ""
            if self.detail == "Description":
                body = escape(product.description)
            elif self.detail == "Features":
                body = "\n".join(f"* {one_line(bullet)}" for bullet in product.bullets)
            cut = body if len(body) <= _LONG else f"{body[:_LONG]}\u2026"
            lines += [f"{self.detail}:", cut.strip() or "There is nothing here."]
            return "\n".join(lines)
        for name, values in product.options:
            chosen = self.chosen.get(name)
            shown = [f"[{one_line(v)}]{' (chosen)' if v == chosen else ''}" for v in values]
            lines.append(f"{one_line(name)}: {''.join(shown)}")
        lines += [one_line(product.title), f"Price: {product.price_tag}"]
        lines += [f"Rating: {one_line(product.rating)}", " ".join(f"[{one}]" for one in DETAILS)]
        return "\n".join([*lines, f"[{BUY}]"])


@lru_cache(maxsize=32_768)
def one_line(text: str) -> str:
    """Return a product's text on one line, without tags of this package."""
    return " ".join(escape(text).split())
