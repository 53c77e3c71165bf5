"""How close a given answer is to the right ones: exact match, token F1, and Experiential RL's thresholded reward."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = ("yes", "no", "noanswer")

THRESHOLD = 0.3
"""Token F1 below which `thresholded` gives nothing (section 4 and appendix B.3 of Experiential RL).
"""


def normalise(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no English articles, single blanks.

    >>> normalise("The  Beatles!")
    'beatles'
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(given: str, golds: Sequence[str]) -> float:
    """1.0 when the normal form of ``given`` is that of one of ``golds``, else 0.0 (EvolveR's outcome reward).

    >>> exact_match("the Arno.", ["Arno"]), exact_match("Arno river", ["Arno"])
    (1.0, 0.0)
    """
    return float(normalise(given) in {normalise(gold) for gold in golds})


def token_f1(given: str, golds: Sequence[str]) -> float:
    """The best F1 of the words of ``given`` against those of a gold answer, in [0, 1], as HotpotQA's own script counts it.

    Words are counted with their number. Against a gold answer of yes or no, or given yes or no,
    only the same word scores.

    >>> round(token_f1("the river Arno", ["Arno"]), 3), token_f1("yes it is", ["yes"])
    (0.667, 0.0)
    """
    return max((_f1(normalise(given), normalise(gold)) for gold in golds), default=0.0)


def thresholded(given: str, golds: Sequence[str]) -> float:
    """Experiential RL's reward on HotpotQA: 1 for an exact match, token F1 from 0.3 on, else 0.

    >>> thresholded("Arno", ["the Arno"]), round(thresholded("river Arno", ["Arno"]), 3), thresholded("a b c d e f g Arno", ["Arno"])
    (1.0, 0.667, 0.0)
    """
    f1 = token_f1(given, golds)
    return 1.0 if exact_match(given, golds) else f1 if f1 >= THRESHOLD else 0.0


def _f1(given: str, gold: str) -> float:
    if (given in _CLOSED or gold in _CLOSED) and given != gold:
        return 0.0
    mine, theirs = given.split(), gold.split()
    common = (Counter(mine) & Counter(theirs)).total()
    return 2 * common / (len(mine) + len(theirs)) if common else 0.0


SCORES = {"em": exact_match, "f1": token_f1, "erl": thresholded}
"""Reward by name."""
