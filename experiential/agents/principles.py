"""Read and show principles of EvolveR: a sentence and the triples that repeat it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from experiential.bank.text import canonical
from experiential.types import Experience, Trajectory

GUIDING = "guiding"
"""Kind of a principle that a success taught."""
CAUTIONARY = "cautionary"
"""Kind of a principle that a failure taught."""
MOST_TRIPLES = 8
"""Triples that one principle may have."""
LONGEST = 120
"""Characters that each part of a triple may have."""

Triple = tuple[str, str, str]
_PARTS = (("subject", "head", "s"), ("predicate", "relation", "verb", "p"), ("object", "tail", "o"))
_SEPARATOR = re.compile(r"\s*(?:\||;|,|->|→)\s*")


def principle_kind(trajectory: Trajectory) -> str:
    """Return the kind of principle that an episode teaches: guiding after a success."""
    return GUIDING if trajectory.success else CAUTIONARY


def read_triples(value: Any) -> tuple[tuple[Triple, ...], int]:
    """Return the triples in a scanned value, each once, and the number of invalid items.

    A triple is a list of three texts, an object with subject, predicate and object, or one text of
    three parts between commas, bars or semicolons. A part that is blank or longer than ``LONGEST``
    makes it wrong; those after the first ``MOST_TRIPLES`` are too many.

    >>> read_triples([["key", "opens", "door"], {"s": "door", "p": "is", "o": "red"}, ["key"]])
    ((('key', 'opens', 'door'), ('door', 'is', 'red')), 1)
    >>> read_triples("(lamp; hides; key)")
    ((('lamp', 'hides', 'key'),), 0)
    """
    if value is None:
        return (), 0
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    if len(items) == 3 and all(
        isinstance(item, str) and not _SEPARATOR.search(item) for item in items
    ):
        items = [items]  # one triple, not in a list of its own
    read = [_triple(item) for item in items]
    good = list(dict.fromkeys(triple for triple in read if triple is not None))
    return tuple(good[:MOST_TRIPLES]), read.count(None) + max(0, len(good) - MOST_TRIPLES)


def principle_text(entry: Experience) -> str:
    """Show an entry to an agent that asks for principles: kind, Laplace score, sentence, triples.

    >>> triples = {"triples": [["mat", "hides", "key"]]}
    >>> entry = Experience(text="Look under mats.", kind="guiding", metadata=triples)
    >>> print(principle_text(entry))
    Guiding principle, score 0.50: Look under mats.
    (mat, hides, key)
    """
    known = entry.kind in (GUIDING, CAUTIONARY)
    head = (
        f"{entry.kind.capitalize()}{' principle' if known else ''}, score"
        f" {entry.statistics.score:.2f}: {entry.text}"
    )
    triples, _ = read_triples(entry.metadata.get("triples"))
    return "\n".join([head, *(f"({', '.join(triple)})" for triple in triples)])


def _triple(item: Any) -> Triple | None:
    """Return the triple that an item spells, None without three parts of sensible length."""
    parts: Sequence[Any] = ()
    if isinstance(item, str):
        parts = _SEPARATOR.split(item.strip().strip("()[]"))
    elif isinstance(item, Mapping):
        given = cast("Mapping[Any, Any]", item).items()
        fields = {str(key).strip().lower(): value for key, value in given}
        parts = [next((fields[name] for name in names if name in fields), None) for names in _PARTS]
    elif isinstance(item, list | tuple):
        parts = cast("Sequence[Any]", item)
    if len(parts) != 3 or not all(isinstance(part, str) for part in parts):
        return None
    subject, predicate, object = (canonical(" ".join(str(part).split())) for part in parts)
    fits = all(0 < len(part) <= LONGEST for part in (subject, predicate, object))
    return (subject, predicate, object) if fits else None
