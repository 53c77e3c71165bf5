"""Give grids dialects: named permutations of the symbols of the board and of the words for moves.

A dialect is a world: it lasts, while layouts come and go. Which symbol is what, and which word
moves where, can be found out by playing, and holds for every later layout in the same dialect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Literal

import numpy as np

from experiential.envs.names import FIRST, NAMED_SPLITS, NamedSplit, world_names

DIRECTIONS = ("Up", "Down", "Left", "Right")
_SALT = 0xD1A1


@dataclass(frozen=True)
class Dialect:
    """Hold the meanings of symbols and of words for moves.

    Attributes:
        name: what the task calls it.
        symbols: the symbol of each role, in the order of the grid's roles.
        directions: where each word of ``DIRECTIONS`` moves.
    """

    name: str
    symbols: str
    directions: tuple[str, ...] = DIRECTIONS

    def direction(self, word: str) -> str:
        """Return where a word moves."""
        return self.directions[DIRECTIONS.index(word)]

    def word(self, direction: str) -> str:
        """Return the word that moves into a direction."""
        return DIRECTIONS[self.directions.index(direction)]


@lru_cache(maxsize=64)
def dialects_of(
    split: NamedSplit,
    symbols: str,
    words_only: bool = False,
    law: Literal["first"] | None = None,
) -> tuple[Dialect, ...]:
    """Return the dialects of a split: no two splits share a name or a pair of permutations.

    All pairs of a permutation of the symbols and one of the moves are put in a fixed random order
    and dealt out to the splits in turn. With ``words_only`` the symbols keep their meanings, and
    all splits share the 24 permutations of the moves. Then ``law="first"`` lets these follow from
    the first word of the name, in the same way in every split.
    """
    boards: list[tuple[str, ...]] = list(permutations(symbols))
    moves: list[tuple[str, ...]] = list(permutations(DIRECTIONS))
    number = NAMED_SPLITS.index(split)
    if words_only:
        names = world_names(split)
        if law == "first":
            by_word = _dealt(len(moves), len(FIRST), np.random.default_rng(_SALT))
            meanings = [by_word[FIRST.index(name.split()[0])] for name in names]
        else:
            meanings = _dealt(len(moves), len(names), np.random.default_rng([_SALT, number]))
        return tuple(
            Dialect(name, symbols, moves[one]) for name, one in zip(names, meanings, strict=True)
        )
    order = np.random.default_rng(_SALT).permutation(len(boards) * len(moves))
    dealt: list[int] = order[number :: len(NAMED_SPLITS)].tolist()
    return tuple(
        Dialect(name, "".join(boards[pair // len(moves)]), moves[pair % len(moves)])
        for name, pair in zip(world_names(split), dealt, strict=False)
    )


def _dealt(kinds: int, count: int, rng: np.random.Generator) -> list[int]:
    """Deal numbers below ``kinds`` in a random order, each again when all were dealt."""
    rounds = [rng.permutation(kinds) for _ in range(-(-count // kinds))]
    return [int(one) for one in np.concatenate(rounds)[:count]]
