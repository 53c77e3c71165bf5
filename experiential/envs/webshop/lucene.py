"""Search as Lucene does: its English analyser and its BM25."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module

from experiential.envs.bm25 import BM25
from experiential.errors import require

STOP_WORDS = frozenset(
    """
    a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with
    """.split()
)
"""English words that Lucene's analyser drops."""

_IDEOGRAPH = "\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_NO_LETTER = "\xb2\xb3\xb9\xbc-\xbe\u2070-\u209c\u2150-\u2189\u2460-\u249b\u2776-\u2793"
_LETTER = rf"[^\W\d_{_IDEOGRAPH}{_NO_LETTER}]"
_EXTEND = "[\u0300-\u036f\u200d\ufe00-\ufe0f]*"
_IN_WORD = r".:'\xb7\u2018\u2019\u2024\ufe55\uff1a"
_IN_NUMBER = r".,;'\u2018\u2019\ufe50\uff0c\uff1b"
_PICTURE = (
    "\xa9\xae\u203c\u2049\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u2388\u23cf"
    "\u23e9-\u23f3\u23f8-\u23fa\u24c2\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2605"
    "\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2714\u2716\u271d\u2721\u2728\u2733"
    "\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763-\u2767\u2795-\u2797\u27a1\u27b0"
    "\u27bf\u2934\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\u3297\u3299"
    "\U0001f000-\U0001faff"
)
_TOKEN = re.compile(
    rf"(?:(?:{_LETTER}|[\d_]){_EXTEND}"
    rf"(?:(?<=[^\W\d_])[{_IN_WORD}](?={_LETTER})|(?<=\d)[{_IN_NUMBER}](?=\d))?)+"
    rf"|[{_IDEOGRAPH}]"
    rf"|[{_PICTURE}](?:\ufe0f|[\U0001f3fb-\U0001f3ff])?(?:\u200d[{_PICTURE}]\ufe0f?)*"
)
_POSSESSIVE = ("'s", "\u2019s", "\uff07s")
_EXACT = 24
"""Lengths below this are kept as they are; longer ones keep four bits (``SmallFloat.intToByte4``).
"""


@lru_cache(maxsize=1)
def _porter() -> Callable[[str], str]:
    require("webshop", "snowballstemmer")
    return import_module("snowballstemmer").stemmer("porter").stemWord


@lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """Return the stem of a lower-case word, as Lucene's ``PorterStemFilter`` does.

    That is Porter's algorithm with its author's later rules: ``bli`` as ``ble``, ``logi`` as
    ``log``, words of one or two letters stay.

    >>> [stem(word) for word in ("technologies", "possibly", "us", "ponies")]
    ['technolog', 'possibl', 'us', 'poni']
    """
    if len(word) <= 2:
        return word
    short = _porter()(word)
    if short.endswith("bli"):
        return _porter()(short[:-1] + "e")
    return _porter()(short[:-1]) if short.endswith("logi") else short


def tokens(text: str) -> list[str]:
    """Return the terms of a text: Unicode words in lower case, without stop words, stemmed.

    >>> tokens("The kids' 2.5-inch toothbrush isn't Anna's \u2714")
    ['kid', '2.5', 'inch', 'toothbrush', "isn't", 'anna', '\u2714']
    """
    words = (match.lower() for match in _TOKEN.findall(text))
    bare = (word[:-2] if word.endswith(_POSSESSIVE) else word for word in words)
    return [stem(word) for word in bare if word and word not in STOP_WORDS]


def stored_length(length: int) -> int:
    """Return a text's number of terms as Lucene's index stores it, in one byte.

    >>> [stored_length(n) for n in (5, 39, 41, 107, 1000)]
    [5, 39, 40, 104, 984]
    """
    if length < _EXACT:
        return length
    above = length - _EXACT
    drop = max(above.bit_length() - 4, 0)
    return _EXACT + (above >> drop << drop)


LuceneBM25 = partial(BM25, terms=tokens, stored=stored_length)
"""Rank texts as WebShop's engine does; MissingExtraError without the package of the stemmer."""
