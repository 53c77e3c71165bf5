"""Find the nouns of a product's title, as spaCy's small English model tags them.

The original's reward compares titles by these nouns. For the 1,000 products of the small data set
their places are shipped, so that a purchase earns the same on every machine and spaCy need not be
installed. The table (``nouns.txt``, made by ``tools/webshop_nouns.py``) names titles by digest and
holds nothing of their text.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from typing import Any

MODEL = "en_core_web_sm"
"""Begins the name of the models that are used, in whatever package they are installed."""
_WORD = re.compile(r"[^\W\d_]{2,}")
_NOT_NOUNS = frozenset(
    """
    about above after again all also am an and any are around as at be because been before best
    better big both but by can cheap clean comfortable comfy compatible cool cozy cute down
    durable each easy elegant every extra fashionable few fits flexible for free fresh from full
    fully funny further get good great had has have healthy heavy high his how if in into is it
    its just large larger less lightweight long low made make many mini more most natural new
    nice non not of off on only open or other our out over perfect portable premium quick
    rechargeable removable same sexy short simple slim small so soft some stylish such super
    than that the their them then these they thick thin this those through to too ultra under
    universal up use used very vintage was washable waterproof we were what when which while who
    will wireless with without you your
    """.split()
)


@lru_cache(maxsize=8192)
def nouns(title: str) -> tuple[str, ...]:
    """Return the nouns of a title in lower case, in their order, each as often as it stands there.

    A title of the small data set is looked up in the shipped table. Another one is tagged by spaCy
    where a model ``en_core_web_sm`` is installed. Without it, all words of two letters or more
    count but function words and common adjectives.
    """
    spans = _table().get(title_key(title))
    if spans is None:
        tagger = _tagger()
        spans = _likely(title) if tagger is None else tagged_nouns(tagger, title)
    return tuple(title[start:end].lower() for start, end in spans)


def title_key(title: str) -> str:
    """Return the digest that stands for a title in the table."""
    return hashlib.sha256(title.encode(errors="surrogatepass")).hexdigest()[:12]


def tagged_nouns(tagger: Any, title: str) -> list[tuple[int, int]]:
    """Return where a title's nouns and proper nouns begin and end, by a loaded spaCy model."""
    tokens: list[Any] = [token for token in tagger(title) if token.pos_ in ("NOUN", "PROPN")]
    return [(token.idx, token.idx + len(token.text)) for token in tokens]


def load_tagger() -> Any:
    """Return spaCy's small English model.

    Raises:
        ImportError: spaCy is not installed.
        OSError: its model is not installed.
    """
    spacy: Any = import_module("spacy")
    installed = [name for name in spacy.util.get_installed_models() if name.startswith(MODEL)]
    # the tags depend on none of the parts left out
    return spacy.load(min(installed, default=MODEL), exclude=["parser", "ner", "lemmatizer"])


@lru_cache(maxsize=1)
def _tagger() -> Any | None:
    try:
        return load_tagger()
    except (ImportError, OSError):
        return None


@lru_cache(maxsize=1)
def _table() -> dict[str, list[tuple[int, int]]]:
    """Read the shipped table.

    A line is a title's digest, and for each noun its distance from the end of the one before and
    its length, in characters.
    """
    text = files("experiential.envs.webshop").joinpath("nouns.txt").read_text(encoding="ascii")
    table: dict[str, list[tuple[int, int]]] = {}
    for line in text.splitlines():
        key, *numbers = line.split()
        end, spans = 0, list[tuple[int, int]]()
        for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
            start = end + int(gap)
            end = start + int(length)
            spans.append((start, end))
        table[key] = spans
    return table


def _likely(title: str) -> list[tuple[int, int]]:
    words = (match for match in _WORD.finditer(title) if match[0].lower() not in _NOT_NOUNS)
    return [match.span() for match in words]
