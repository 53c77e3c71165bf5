"""Make text of a given length without content: shown by the placebo arm in place of experience."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from experiential.agents.prompts import experience_block

WORDS = ("and", "as", "in", "is", "it", "of", "so", "that", "the", "to")
"""Words that carry no content by themselves."""

_LONGEST = 4096
"""Words of the longest filler that is tried."""

Count = Callable[[str], int]


def token_count(tokenizer: Any | None) -> Count:
    """Return a function that counts the tokens of an entry inside the block that an actor reads.

    Without a tokenizer it counts words.
    """
    if tokenizer is None:
        return lambda text: len(text.split())
    return lambda text: len(tokenizer.encode(experience_block([text]), add_special_tokens=False))


def filler(wanted: int, count: Count, seed: str = "") -> str:
    """Return text without content that counts ``wanted``, or as near to it as can be had.

    Args:
        wanted: the length to reach.
        count: length of an entry with a text in it; grows with every word of the text.
        seed: of the draw among `WORDS`.

    >>> len(filler(4, lambda text: len(text.split()), seed="a").split())
    4
    """
    # Words of one token each make every length reachable; a tokenizer may have none.
    words = [word for word in WORDS if count(f"{word} {word}") == count(word) + 1] or list(WORDS)
    rng = random.Random(seed)
    drawn = [rng.choice(words) for _ in range(_LONGEST)]
    low, high = 1, 8
    while high < _LONGEST and count(" ".join(drawn[:high])) < wanted:
        low, high = high + 1, 2 * high
    while low < high:  # bisect for the shortest filler of at least the wanted length
        middle = (low + high) // 2
        if count(" ".join(drawn[:middle])) < wanted:
            low = middle + 1
        else:
            high = middle
    # A word may cost two tokens at a border. A full stop or a single word can make up for it.
    plain = [" ".join(drawn[:n]) for n in range(max(1, low - 2), low + 1)]
    candidates = [*plain, *(f"{text}." for text in plain), *WORDS, "."]
    return min(candidates, key=lambda text: abs(count(text) - wanted))
