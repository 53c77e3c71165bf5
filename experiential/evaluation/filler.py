"""Text of a given length that says nothing: what the placebo arm shows in place of experience."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from experiential.agents.prompts import experience_block

WORDS = ("and", "as", "in", "is", "it", "of", "so", "that", "the", "to")
"""Words that carry no content by themselves."""

_LONGEST = 4096
"""Words of the longest filler that is looked for."""

Count = Callable[[str], int]


def shown_length(tokenizer: Any | None) -> Count:
    """Counts the tokens of an entry as an actor is shown it, inside the block of experience; words without a tokenizer."""
    if tokenizer is None:
        return lambda text: len(text.split())
    return lambda text: len(tokenizer.encode(experience_block([text]), add_special_tokens=False))


def filler(wanted: int, count: Count, seed: str = "") -> str:
    """Text without content that counts ``wanted``, or as little more or less as can be had.

    Args:
        wanted: the length to reach.
        count: length of what is shown with a text in it, growing with every word of the text.
        seed: of the choice among words that say nothing.

    >>> len(filler(4, lambda text: len(text.split()), seed="a").split())
    4
    """
    words = _unit_words(count)
    rng = random.Random(seed)
    drawn = [rng.choice(words) for _ in range(_LONGEST)]
    low, high = 1, 8
    while high < _LONGEST and count(" ".join(drawn[:high])) < wanted:
        low, high = high + 1, 2 * high
    while low < high:  # the shortest filler that is not shorter than the text
        middle = (low + high) // 2
        if count(" ".join(drawn[:middle])) < wanted:
            low = middle + 1
        else:
            high = middle
    return min(_near(drawn, low), key=lambda candidate: abs(count(candidate) - wanted))


def _near(drawn: Sequence[str], length: int) -> list[str]:
    """The fillers of about that many words, and some that differ from them by a token."""
    plain = [" ".join(drawn[:n]) for n in range(max(1, length - 2), length + 1)]
    return [*plain, *(f"{one}." for one in plain), *WORDS, "."]


def _unit_words(count: Count) -> list[str]:
    """The words of which one more makes a text one longer; all of them where there is none such."""
    found = [word for word in WORDS if count(f"{word} {word}") == count(word) + 1]
    return found or list(WORDS)
