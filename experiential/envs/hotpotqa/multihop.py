"""Invent a small world from a seed, and two-hop questions about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from experiential.envs.hotpotqa.passages import Passage
from experiential.envs.hotpotqa.questions import Question, QuestionSet
from experiential.errors import ConfigError

Part = Literal["train", "eval"]

MOST = 2000
"""Questions that one world can have."""

# fmt: off
_ONSETS = (
    "B", "Br", "C", "D", "Dr", "F", "G", "H", "K", "L", "M", "N", "P", "R", "S", "St", "T", "Tr",
    "V", "W",
)
_MIDDLES = (
    "ab", "al", "ar", "el", "em", "en", "er", "il", "im", "in", "ol", "on", "or", "ul", "un", "ur",
)
_ENDINGS = ("a", "ac", "an", "ek", "en", "es", "ia", "in", "is", "o", "on", "or", "um", "us")
_GOODS = (
    "bells", "boats", "carpets", "clocks", "glass", "lamps", "paper", "pianos", "soap", "tiles",
)
_TRADES = (
    "baker", "botanist", "engineer", "judge", "painter", "pilot", "poet", "printer", "surgeon",
    "teacher",
)
_HILLS = ("Chalk", "Copper", "Green", "High", "Long", "Stone", "White", "Windy")
# fmt: on
_SALT = 0x2B0B


@dataclass(frozen=True)
class _Person:
    name: str
    town: str
    year: int
    trade: str


@dataclass(frozen=True)
class _Town:
    name: str
    river: str
    founder: str


@dataclass(frozen=True)
class _Company:
    name: str
    founder: str
    town: str
    goods: str


class _World:
    """Hold rivers, towns on them, people born there, and the companies they founded."""

    def __init__(self, part: Part, generation: int, people: int) -> None:
        rng = np.random.default_rng([_SALT, generation, part == "eval"])
        self._rng = rng
        names = _names(part, generation)
        self.rivers = [next(names) for _ in range(max(4, -(-people // 8)))]
        towns = [next(names) for _ in range(max(6, -(-people // 4)))]
        born = [f"{next(names)} {next(names)}" for _ in range(people)]
        years = rng.permutation(np.arange(1500, 1500 + 2 * people))[:people]
        self.people = [
            _Person(n, self._one(towns), int(y), self._one(_TRADES))
            for n, y in zip(born, years, strict=True)
        ]
        self.towns = [
            _Town(
                name,
                self._one(self.rivers),
                self._one([p.name for p in self.people if p.town != name]),
            )
            for name in towns
        ]
        makers = [f"{next(names)} Works" for _ in range(max(6, -(-people // 4)))]
        self.companies = [
            _Company(name, self._one(born), self._one(towns), self._one(_GOODS)) for name in makers
        ]

    def _one(self, things: Sequence[str]) -> str:
        return things[int(self._rng.integers(len(things)))]

    def passages(self) -> list[Passage]:
        """Return the paragraphs about this world."""
        return [
            *(
                Passage(r, f"{r} is a river. It rises in the {self._one(_HILLS)} Hills.")
                for r in self.rivers
            ),
            *(
                Passage(
                    t.name,
                    f"{t.name} is a town on the river {t.river}. It was founded by {t.founder}.",
                )
                for t in self.towns
            ),
            *(
                Passage(p.name, f"{p.name}, born in {p.town} in {p.year}, was a {p.trade}.")
                for p in self.people
            ),
            *(
                Passage(
                    c.name,
                    f"{c.name} makes {c.goods}. It was founded by {c.founder} and has its seat in"
                    f" {c.town}.",
                )
                for c in self.companies
            ),
        ]

    def questions(self) -> Iterator[tuple[str, str, tuple[str, str]]]:
        """Yield text, answer, and the titles of the two paragraphs that lead to it."""
        town = {t.name: t for t in self.towns}
        person = {p.name: p for p in self.people}
        for p in self.people:
            yield (
                f"Which river flows through the town where {p.name} was born?",
                town[p.town].river,
                (p.name, p.town),
            )
            yield (
                f"Who founded the town where {p.name} was born?",
                town[p.town].founder,
                (p.name, p.town),
            )
        for c in self.companies:
            yield (
                f"Which river flows through the town where {c.name} has its seat?",
                town[c.town].river,
                (c.name, c.town),
            )
            yield (
                f"In which town was the founder of {c.name} born?",
                person[c.founder].town,
                (c.name, c.founder),
            )
        order = self._rng.permutation(len(self.people))
        for i, j in zip(order[::2], order[1::2], strict=False):
            a, b = self.people[int(i)], self.people[int(j)]
            first = a if a.year < b.year else b
            yield f"Who was born earlier, {a.name} or {b.name}?", first.name, (a.name, b.name)


def _names(part: Part, generation: int) -> Iterator[str]:
    """Yield invented words in a drawn order; each part has its own half of them."""
    words = [f"{a}{b}{c}" for a in _ONSETS for b in _MIDDLES for c in _ENDINGS]
    order = np.random.default_rng([_SALT, generation]).permutation(len(words))
    for i in order[part == "eval" :: 2]:
        yield words[int(i)]


@lru_cache(maxsize=8)
def invented_questions(part: Part, count: int, generation: int = 0) -> QuestionSet:
    """Return two-hop questions about an invented world; parts share no name or paragraph.

    Args:
        part: ``train`` or ``eval``.
        count: questions, at most ``MOST``.
        generation: seed of the world; another one is another world.

    Raises:
        ConfigError: more questions are asked for than there are names for.
    """
    if not 1 <= count <= MOST:
        raise ConfigError(
            f"Expected questions between 1 and {MOST} of the invented world, got {count}"
        )
    world = _World(part, generation, people=max(8, -(-count // 3)))
    asked = list(world.questions())
    order = np.random.default_rng([_SALT, generation, part == "eval", 1]).permutation(len(asked))[
        :count
    ]
    chosen = [asked[int(i)] for i in order]
    questions = [
        Question(f"{generation}-{n}", text, (answer,), hops)
        for n, (text, answer, hops) in enumerate(chosen)
    ]
    return QuestionSet(tuple(questions), tuple(world.passages()))
