"""Score an answer: exact match, token F1, and Experiential RL's thresholded reward."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = ("yes", "no", "noanswer")

THRESHOLD = 0.3
"""Least token F1 that `thresholded` rewards (section 4, appendix B.3 of Experiential RL)."""


def normalise(text: str) -> str:
    """Return SQuAD's normal form: lower case, no punctuation, no articles, single blanks.

    >>> normalise("The  Beatles!")
    'beatles'
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(given: str, golds: Sequence[str]) -> float:
    """Return 1.0 if an answer equals a gold answer in normal form, else 0.0 (EvolveR's reward).

    >>> exact_match("the Arno.", ["Arno"]), exact_match("Arno river", ["Arno"])
    (1.0, 0.0)
    """
    return float(normalise(given) in {normalise(gold) for gold in golds})


def token_f1(given: str, golds: Sequence[str]) -> float:
    """Return the best F1 of an answer's words against a gold answer, as HotpotQA's script does.

    Words are counted with their number. Against a gold answer of yes or no, or given yes or no,
    only the same word scores.

    >>> round(token_f1("the river Arno", ["Arno"]), 3), token_f1("yes it is", ["yes"])
    (0.667, 0.0)
    """
    best, mine = 0.0, normalise(given)
    for gold in golds:
        theirs = normalise(gold)
        if (mine in _CLOSED or theirs in _CLOSED) and mine != theirs:
            continue
        words, wanted = mine.split(), theirs.split()
        common = (Counter(words) & Counter(wanted)).total()
        best = max(best, 2 * common / (len(words) + len(wanted)) if common else 0.0)
    return best


def thresholded(given: str, golds: Sequence[str]) -> float:
    """Return Experiential RL's reward: 1 for an exact match, token F1 from 0.3 on, else 0.

    >>> thresholded("Arno", ["the Arno"]), thresholded("a b c d e f g Arno", ["Arno"])
    (1.0, 0.0)
    >>> round(thresholded("river Arno", ["Arno"]), 3)
    0.667
    """
    f1 = token_f1(given, golds)
    return 1.0 if exact_match(given, golds) else f1 if f1 >= THRESHOLD else 0.0


SCORES = {"em": exact_match, "f1": token_f1, "erl": thresholded}
"""Reward by name."""
