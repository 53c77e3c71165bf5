"""Principles as EvolveR keeps them: a sentence of one of two kinds, and the triples that say the same in parts."""

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
    """What an episode can teach: a guiding principle when it succeeded, else a cautionary one."""
    return GUIDING if trajectory.success else CAUTIONARY


def read_triples(value: Any) -> tuple[tuple[Triple, ...], int]:
    """The triples in a scanned value, each once, and how many items of it are none.

    A triple is a list of three texts, an object with subject, predicate and object, or one text of
    three parts between commas, bars or semicolons. A part that is blank or longer than ``LONGEST``
    makes it wrong; those after the first ``MOST_TRIPLES`` are too many.

    >>> read_triples([["key", "opens", "door"], {"subject": "door", "predicate": "is", "object": "red"}, "(lamp; hides; key)", ["key"]])
    ((('key', 'opens', 'door'), ('door', 'is', 'red'), ('lamp', 'hides', 'key')), 1)
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
    """An entry as an agent that asks for principles sees it: its kind, its Laplace score, its sentence, its triples.

    >>> entry = Experience(text="Look under mats.", kind="guiding", metadata={"triples": [["mat", "hides", "key"]]})
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
    parts = _parts(item)
    if len(parts) != 3 or not all(isinstance(part, str) for part in parts):
        return None
    subject, predicate, object = (canonical(" ".join(str(part).split())) for part in parts)
    fits = all(0 < len(part) <= LONGEST for part in (subject, predicate, object))
    return (subject, predicate, object) if fits else None


def _parts(item: Any) -> Sequence[Any]:
    if isinstance(item, str):
        return _SEPARATOR.split(item.strip().strip("()[]"))
    if isinstance(item, Mapping):
        fields = {
            str(key).strip().lower(): value
            for key, value in cast("Mapping[Any, Any]", item).items()
        }
        return [next((fields[name] for name in names if name in fields), None) for names in _PARTS]
    return cast("Sequence[Any]", item) if isinstance(item, list | tuple) else ()
