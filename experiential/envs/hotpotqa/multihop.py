"""Invent a small world from a seed, and two-hop questions about it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from experiential.envs.hotpotqa.passages import Passage
from experiential.envs.hotpotqa.questions import Question, QuestionSet
from experiential.errors import ConfigError

Part = Literal["train", "eval"]

MOST = 2000
"""Questions that one world can have."""

_ONSETS = "B Br C D Dr F G H K L M N P R S St T Tr V W".split()
_MIDDLES = "ab al ar el em en er il im in ol on or ul un ur".split()
_ENDINGS = "a ac an ek en es ia in is o on or um us".split()
_GOODS = "bells boats carpets clocks glass lamps paper pianos soap tiles".split()
_TRADES = "baker botanist engineer judge painter pilot poet printer surgeon teacher".split()
_HILLS = "Chalk Copper Green High Long Stone White Windy".split()
_SALT = 0x2B0B
_Asked = tuple[str, str, tuple[str, str]]
"""A question, its answer, and the titles of the two paragraphs that lead to it."""


class _Person(NamedTuple):
    name: str
    town: str
    year: int
    trade: str


class _Town(NamedTuple):
    name: str
    river: str
    founder: str


class _Company(NamedTuple):
    name: str
    founder: str
    town: str
    goods: str


def _world(part: Part, generation: int, size: int) -> tuple[list[_Asked], list[Passage]]:
    """Draw rivers, towns on them, people born there, and the companies they founded."""
    words = [f"{a}{b}{c}" for a in _ONSETS for b in _MIDDLES for c in _ENDINGS]
    order = np.random.default_rng([_SALT, generation]).permutation(len(words))
    names = (words[int(i)] for i in order[part == "eval" :: 2])  # each part has a half of them
    rng = np.random.default_rng([_SALT, generation, part == "eval"])

    def one(things: Sequence[str]) -> str:
        return things[int(rng.integers(len(things)))]

    rivers = [next(names) for _ in range(max(4, -(-size // 8)))]
    places = [next(names) for _ in range(max(6, -(-size // 4)))]
    born = [f"{next(names)} {next(names)}" for _ in range(size)]
    years = rng.permutation(np.arange(1500, 1500 + 2 * size))[:size]
    people = [
        _Person(name, one(places), int(year), one(_TRADES))
        for name, year in zip(born, years, strict=True)
    ]
    towns = [
        _Town(name, one(rivers), one([p.name for p in people if p.town != name])) for name in places
    ]
    makers = [f"{next(names)} Works" for _ in range(max(6, -(-size // 4)))]
    companies = [_Company(name, one(born), one(places), one(_GOODS)) for name in makers]

    asked: list[_Asked] = []
    town_of, person_of = {t.name: t for t in towns}, {p.name: p for p in people}
    for p in people:
        home = town_of[p.town]
        river = f"Which river flows through the town where {p.name} was born?"
        founder = f"Who founded the town where {p.name} was born?"
        asked.append((river, home.river, (p.name, p.town)))
        asked.append((founder, home.founder, (p.name, p.town)))
    for c in companies:
        river = f"Which river flows through the town where {c.name} has its seat?"
        birth = f"In which town was the founder of {c.name} born?"
        asked.append((river, town_of[c.town].river, (c.name, c.town)))
        asked.append((birth, person_of[c.founder].town, (c.name, c.founder)))
    order = rng.permutation(size)
    for i, j in zip(order[::2], order[1::2], strict=False):
        a, b = people[int(i)], people[int(j)]
        earlier = a if a.year < b.year else b
        question = f"Who was born earlier, {a.name} or {b.name}?"
        asked.append((question, earlier.name, (a.name, b.name)))

    told = {r: f"{r} is a river. It rises in the {one(_HILLS)} Hills." for r in rivers}
    for t in towns:
        told[t.name] = f"{t.name} is a town on the river {t.river}. It was founded by {t.founder}."
    for p in people:
        told[p.name] = f"{p.name}, born in {p.town} in {p.year}, was a {p.trade}."
    for c in companies:
        told[c.name] = (
            f"{c.name} makes {c.goods}. It was founded by {c.founder} and has its seat in {c.town}."
        )
    return asked, [Passage(title, text) for title, text in told.items()]


@lru_cache(maxsize=8)
def invented_questions(part: Part, count: int, generation: int = 0) -> QuestionSet:
    """Return two-hop questions about an invented world; parts share no name or paragraph.

    There are at most ``MOST``, and ConfigError for more. ``generation`` is the seed of the world.
    """
    if not 1 <= count <= MOST:
        raise ConfigError(
            f"Expected questions between 1 and {MOST} of the invented world, got {count}"
        )
    asked, passages = _world(part, generation, max(8, -(-count // 3)))
    order = np.random.default_rng([_SALT, generation, part == "eval", 1]).permutation(len(asked))
    questions: list[Question] = []
    for n, i in enumerate(order[:count]):
        text, answer, hops = asked[int(i)]
        questions.append(Question(f"{generation}-{n}", text, (answer,), hops))
    return QuestionSet(tuple(questions), tuple(passages))
