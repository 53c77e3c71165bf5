"""WebShop as a text environment: search, choose, buy; the reward says how well the purchase fits the instruction."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import gymnasium as gym

from experiential.bank.text import escape
from experiential.envs.text_space import UnicodeText
from experiential.envs.webshop.catalogue import Product
from experiential.envs.webshop.goals import Goal
from experiential.envs.webshop.pages import BACK, BUY, DETAILS, FIXED, NEXT, PREVIOUS, WINDOW, Visit, buttons, one_line, page_text
from experiential.envs.webshop.score import require_fuzzy, score
from experiential.envs.webshop.shop import PARTS, Shop, Split, open_shop
from experiential.errors import ConfigError

LONGEST = 100_000
"""Characters of an action that are read; a longer one is invalid."""
_OPENING = re.compile(r"(?<![\w<])(search|click)\[", re.IGNORECASE)
_INSIDE = re.compile(r"[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]")


class Call(NamedTuple):
    """What an action asks for."""

    kind: Literal["search", "click"]
    text: str


def read_call(action: str) -> Call | None:
    """The last ``search[words]`` or ``click[text]`` in an action, whatever its case; None when there is none.

    >>> read_call("I see. search[red shoes] or rather CLICK[ Next > ]")
    Call(kind='click', text='Next >')
    >>> read_call("click[") is None
    True
    """
    if len(action) > LONGEST or not _is_text(action):
        return None
    for match in reversed(list(_OPENING.finditer(action))):
        held = _INSIDE.match(action, match.end(), _line_end(action, match.end()))
        text = " ".join(held.group()[:-1].split()) if held else ""
        if text:
            return Call("search" if match[1].lower() == "search" else "click", text)
    return None


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _is_text(action: str) -> bool:
    try:
        action.encode()
    except UnicodeEncodeError:
        return False
    return True


def _words(text: str) -> str:
    """A text that can stand between the brackets of a search."""
    return " ".join(re.sub(r"[\[\]\ud800-\udfff]", " ", text).split())


class WebShopEnv(gym.Env[str, str]):
    """Buy what an instruction asks for.

    On the search page ``search[words]`` lists at most 50 products, ten a page; elsewhere ``click[text]`` follows what a page shows in
    brackets: a product, an option, ``Next >``, ``< Prev``, ``Back to Search``, ``Description``, ``Features``, ``Reviews``, or ``Buy Now``,
    which ends the episode. The last call in an action counts. Any other action uses up a turn, and the reply says what is legal. When
    the turns are spent the episode is truncated and rewards nothing.

    The reward for buying is the one of the WebShop paper, a fraction (see `score`). What the goal was made from, its attributes and its
    product, stands in no observation and no ``info`` but as the instruction words it.

    Args:
        split: of WebShop's files by index of the goal: ``test`` 0 to 499, ``eval`` 500 to 1499, ``train`` the others, or ``all``;
            of the invented shop ``train`` or ``eval``, which share no product.
        data: a folder with ``items_shuffle_1000.json`` and ``items_ins_v2_1000.json`` (``.xz`` may follow); by default the one that
            ``WEBSHOP_DATA`` names, and without that an invented shop.
        turns: actions allowed.
        threshold: reward from which the episode is a success.
        binary: reward 1 for a success and 0 otherwise, in place of the fraction.
        generation: seed of drawn prices and price bounds, and of the invented shop.
        render_mode: ``ansi`` or None.

    Raises:
        ConfigError: an argument is outside its range, or the files cannot be used.
        MissingExtraError: a package of the extra ``webshop`` is missing.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(
        self,
        split: Split = "train",
        *,
        data: str | None = None,
        turns: int = 15,
        threshold: float = 1.0,
        binary: bool = False,
        generation: int = 0,
        render_mode: str | None = None,
    ) -> None:
        if split not in PARTS:
            raise ConfigError(f"Expected split to be one of {', '.join(PARTS)}, got {split!r}")
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"Expected render_mode to be None or ansi, got {render_mode!r}")
        if turns < 1:
            raise ConfigError(f"Expected turns to be positive, got {turns}")
        if not 0 < threshold <= 1:
            raise ConfigError(f"Expected threshold above 0 and at most 1, got {threshold}")
        require_fuzzy()
        self._source = data or os.environ.get("WEBSHOP_DATA") or None
        self.split: Split = split
        self.turns, self.threshold, self.binary, self.generation = turns, threshold, binary, generation
        self._open()
        self.render_mode = render_mode
        self.observation_space = UnicodeText(max_length=1_000_000)
        self.action_space = UnicodeText(max_length=100_000)
        self._observation = ""
        self._over = True

    def _open(self) -> None:
        shop, goals = open_shop(self.split, self._source, self.generation)
        self._shop: Shop = shop
        self._goals = goals
        self._shares = list(accumulate(goal.weight for goal in goals))

    def __getstate__(self) -> dict[str, Any]:
        """All but the shop, which another process opens itself."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_shop", "_goals", "_shares")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def worlds(self) -> list[int]:
        """Indices that ``reset(options={"world": i})`` accepts: the goals of the split."""
        return list(range(len(self._goals)))

    @property
    def task(self) -> str:
        """The instruction."""
        return self._text

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask for what the option ``world`` names by its index, else for a goal drawn by weight; rare attributes weigh more.

        Raises:
            ConfigError: there is no such goal.
        """
        super().reset(seed=seed)
        drawn = bisect_right(self._shares, self.np_random.random() * self._shares[-1])
        index = int((options or {}).get("world", min(drawn, len(self._goals) - 1)))
        if not 0 <= index < len(self._goals):
            raise ConfigError(f"Expected world between 0 and {len(self._goals) - 1}, got {index}")
        self._goal: Goal = self._goals[index]
        self._text = escape(self._goal.text)
        self._visit = Visit()
        self._left, self._over, self._success = self.turns, False, False
        self._observation = self._page()
        return self._observation, self._info("")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Search or click.

        Raises:
            gymnasium.error.ResetNeeded: the episode is over or was never begun.
        """
        if self._over:
            raise gym.error.ResetNeeded("Expected reset() before this step: the episode is over or was never begun")
        call = self._legal_call(action)
        self._left -= 1
        if call == Call("click", BUY):
            return self._buy()
        if call is not None:
            self._follow(call)
        feedback = "" if call is not None else f"That cannot be done here. {self._rules()}"
        self._over = self._left == 0
        self._observation = self._page() if call is not None else f"That cannot be done here.\n{self._page()}"
        return self._observation, 0.0, False, self._over, self._info(feedback, invalid=call is None)

    def render(self) -> str | None:  # type: ignore[override]  # Gymnasium types frames; text is one
        """The last observation."""
        return self._observation if self.render_mode == "ansi" else None

    def oracle_action(self) -> str:
        """Search for the title of the product that the goal was made from, open it, choose its options, buy it."""
        visit, goal = self._visit, self._goal
        if visit.kind == "search":
            return f"search[{self._best_query()}]"
        if visit.kind == "results":
            return f"click[{self._towards()}]"
        if visit.kind == "detail" or visit.asin != goal.asin:
            return f"click[{PREVIOUS}]"
        missing = [value for _, value in goal.options if value not in visit.chosen.values()]
        return f"click[{missing[0] if missing else BUY}]"

    def _best_query(self) -> str:
        product = self._shop.products[self._goal.asin]
        queries = [_words(text)[:2000] for text in (product.title, product.indexed, self._goal.wish)]
        ranks = {query: found.index(product.asin) for query in queries if product.asin in (found := self._shop.search(query))}
        return min(ranks, key=lambda query: ranks[query]) if ranks else queries[0]

    def _towards(self) -> str:
        visit, asin = self._visit, self._goal.asin
        if asin in visit.listed:
            return asin
        if asin not in visit.found:
            return BACK
        return NEXT if visit.found.index(asin) >= visit.page * WINDOW else PREVIOUS

    def _legal_call(self, action: str) -> Call | None:
        """The call, with a click's text as the page spells it; None when it cannot be made here."""
        call = read_call(action)
        if call is None or (call.kind == "search") != (self._visit.kind == "search"):
            return None
        if call.kind == "search":
            return call
        known = {_plain(text): text for text in sorted(self._buttons(), key=lambda text: text in FIXED)}
        return Call("click", known[_plain(call.text)]) if _plain(call.text) in known else None

    def _follow(self, call: Call) -> None:
        visit, text = self._visit, call.text
        if call.kind == "search":
            self._visit = Visit("results", self._shop.search(text))
        elif text == BACK:
            self._visit = Visit()
        elif visit.kind == "results":
            self._turn_or_open(text)
        elif text == PREVIOUS:
            visit.kind = "results" if visit.kind == "item" else "item"
        elif text in DETAILS:
            visit.kind, visit.detail = "detail", text
        else:
            self._choose(text)

    def _choose(self, value: str) -> None:
        """Choose a value; where two options have it, first of one that is still open."""
        chosen = self._visit.chosen
        names = [name for name, values in self._product.options if value in values]
        chosen[next((name for name in names if name not in chosen), names[-1])] = value

    def _turn_or_open(self, text: str) -> None:
        visit = self._visit
        if text in (NEXT, PREVIOUS):
            visit.page += 1 if text == NEXT else -1
        else:
            self._visit = Visit("item", visit.found, visit.page, text)

    def _buy(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        wanted, asin = self._shop.products[self._goal.asin], self._visit.asin
        value = score(self._product, wanted, self._goal, self._visit.chosen.values(), self._shop.prices[asin]).value
        self._over, self._success = True, value >= self.threshold
        self._observation = f"Thank you for shopping with us!\nYour score (min 0.0, max 1.0): {value:.3f}"
        reward = float(self._success) if self.binary else value
        return self._observation, reward, True, False, self._info(self._observation.replace("\n", " "))

    @property
    def _product(self) -> Product:
        return self._shop.products[self._visit.asin]

    def _buttons(self) -> list[str]:
        return buttons(self._visit, self._shop.products.get(self._visit.asin))

    def _page(self) -> str:
        tail = "No turns are left." if self._over else f"Turns left: {self._left}. {self._rules()}"
        return f"WebShop\nInstruction: {self.task}\n{page_text(self._visit, self._shop.products)}\n{tail}"

    def _rules(self) -> str:
        form = "search[words]" if self._visit.kind == "search" else "click[text], where text is one that stands in brackets above"
        return f"Reply: {form}."

    def _admissible(self) -> list[str]:
        """Clicks of this page; on the search page a search for the words of the instruction."""
        clicks = [f"click[{one_line(text)}]" for text in self._buttons()]
        return clicks or [f"search[{_words(self.task.split(', and price lower than')[0])}]"]

    def _info(self, feedback: str, *, invalid: bool = False) -> dict[str, Any]:
        name = f"{self._shop.name}-{self._goal.index}"
        return {
            "task": self.task,
            "task_id": name,
            "instance": name,
            "admissible": self._admissible(),
            "success": self._success,
            "invalid": invalid,
            "feedback": feedback,
        }


def _plain(text: str) -> str:
    return one_line(text).casefold()
