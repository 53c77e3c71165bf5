"""Say what a search asks for, which entries it may find, and what it has found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

from pydantic_core import to_jsonable_python

from experiential.bank.storage.tables import Live
from experiential.bank.text import canonical, disarm
from experiential.types import Experience, whole

T = TypeVar("T")
Value = str | int | float | bool | None
"""One value that a filter may ask for; None stands for an entry that has none."""


@dataclass(init=False, unsafe_hash=True)
class Where:
    """Filter the entries that a search may find. Immutable and hashable.

    A filter names fields: ``kind`` and ``task`` are the entry's own, any other name is a field of
    its metadata. An entry passes when it has, in every field named, the value asked for, or one of
    the values if several are. A metadata field that holds a list has each value in the list. None
    asks for entries without the field, or with an empty list there. Texts are equal when all their
    characters are, upper and lower case too; True is not 1, but 1 is 1.0.

    >>> where = Where({"kind": "lesson", "tags": ["alfworld", "webshop"]})
    >>> where.matches(Experience(text="Look twice.", metadata={"tags": ["alfworld", "kitchen"]}))
    True
    >>> where.matches(Experience(text="Look twice.", metadata={"tags": ["minihack"]}))
    False

    Args:
        fields: a value (text, number, bool or None) or a non-empty list of values for each field;
            anything else raises ValueError.

    Attributes:
        indexed: the part that index stores can check, which is true of whatever passes: texts by
            field, "" for no task.
    """

    fields: dict[str, tuple[Value, ...]] = field(compare=False)
    clauses: tuple[tuple[str, frozenset[tuple[str, object]]], ...] = field(repr=False)
    indexed: dict[str, list[str]] = field(compare=False, repr=False)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        # Users may pass anything.
        if not isinstance(fields, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"Expected where to be a mapping of fields to values, got {fields!r}; for example"
                " {'kind': 'lesson'}"
            )
        self.fields = {}
        for key, given in cast("Mapping[Any, Any]", fields).items():
            if not isinstance(key, str) or not key.strip():
                raise ValueError(
                    "Expected the fields of where to be kind, task or names of metadata fields, got"
                    f" {key!r}"
                )
            name, forms = disarm(canonical(key)), list[Value]()
            several = isinstance(given, list | tuple | set | frozenset)
            values = tuple(cast("Iterable[Any]", given)) if several else (given,)
            for value in values:
                is_finite = isinstance(value, int) or (
                    isinstance(value, float) and math.isfinite(value)
                )
                if not (value is None or isinstance(value, str) or is_finite):
                    raise ValueError(
                        f"Expected where[{name!r}] to be text, a finite number, a bool, None or a"
                        f" list of them, got {value!r}"
                    )
                forms.append(value)
                if isinstance(value, str) and (kept := disarm(canonical(value))) != value:
                    forms.append(kept)  # the form in which a bank keeps the text
            if not forms:
                raise ValueError(
                    f"Expected where[{name!r}] to have a value, got {given!r}, which no entry has;"
                    f" leave {name!r} out to find all"
                )
            self.fields[name] = tuple(forms)
        clauses = ((name, frozenset(map(_key, values))) for name, values in self.fields.items())
        self.clauses = tuple(sorted(clauses))
        self.indexed = {
            name: [str(value or "") for value in values]
            for name, values in self.fields.items()
            if name in ("kind", "task")
            and all(isinstance(v, str) or (v is None and name == "task") for v in values)
        }

    @staticmethod
    def of(fields: Mapping[str, Any] | Where | None) -> Where | None:
        """Return the filter that a user wrote; None if it is empty."""
        if fields is None or isinstance(fields, Where):
            return fields
        where = Where(fields)
        return where if where.fields else None

    def matches(self, item: Experience) -> bool:
        """Return whether an entry passes."""
        for name, wanted in self.clauses:
            held: object = item.kind if name == "kind" else item.task
            if name not in ("kind", "task"):
                held = item.metadata.get(name)
            several = isinstance(held, list | tuple | set | frozenset)
            values = (cast("Iterable[object]", held) or (None,)) if several else (held,)
            if not any(_key(value) in wanted for value in values):
                return False
        return True


Filter = Mapping[str, Any] | Where
"""A filter as a user writes it."""


class Scope(NamedTuple):
    """Limit a query to entries that pass ``where``, not made from the task ``exclude``."""

    exclude: str | None = None
    where: Where | None = None

    def admits(self, live: Live) -> bool:
        """Return whether the query may find this entry."""
        return (
            not live.experience.proposed
            and self.exclude not in live.origins
            and (self.where is None or self.where.matches(live.experience))
        )


class Scored(NamedTuple, Generic[T]):
    """Hold one item found and its cosine similarity to the query."""

    item: T
    score: float
    words: float = 0.0  # weighted share of the query's words in it, if words were asked for


Ranking = Sequence[Scored[Experience]]
"""The entries found for one query, best first."""


class Row(Ranking):
    """Hold the entries found for one query as a part of columns, which the rows of a batch share.

    An entry is parsed, and its ``Scored`` made, when it is looked at: of many candidates a search
    shows few.

    Args:
        ids: of the entries of all rows.
        live: these entries.
        scores: their cosines.
        begin, end: the places of this row.
    """

    __slots__ = ("_ids", "_live", "_places", "_scores")

    def __init__(
        self,
        ids: Sequence[str],
        live: Sequence[Live],
        scores: Sequence[float],
        begin: int,
        end: int,
    ) -> None:
        self._ids, self._live, self._scores = ids, live, scores
        self._places = range(begin, end)

    @property
    def ids(self) -> Sequence[str]:
        """Return the ids of the entries."""
        return self._ids[self._places.start : self._places.stop]

    @property
    def scores(self) -> Sequence[float]:
        """Return the cosines of the entries."""
        return self._scores[self._places.start : self._places.stop]

    def at(self, places: Iterable[int]) -> Row:
        """Return the entries at these places."""
        chosen = [self._places[place] for place in places]
        return Row(
            [self._ids[one] for one in chosen],
            [self._live[one] for one in chosen],
            [self._scores[one] for one in chosen],
            0,
            len(chosen),
        )

    def entries(self) -> list[Experience]:
        """Return the entries in full."""
        return [self._live[one].experience for one in self._places]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Scored[Experience]: ...

    @overload
    def __getitem__(self, place: slice) -> list[Scored[Experience]]: ...

    def __getitem__(self, place: int | slice) -> Scored[Experience] | list[Scored[Experience]]:
        at = self._places[place]
        if isinstance(at, int):
            return Scored(self._live[at].experience, self._scores[at])
        return [Scored(self._live[one].experience, self._scores[one]) for one in at]


def checked_queries(query: object, k: object, *, blank: bool = False) -> list[str]:
    """Return the queries as a list, or raise ValueError; blank ones are for ``blank`` alone."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"Expected k to be a positive whole number, got {k!r}")
    if not isinstance(query, (str, list, tuple)):
        raise ValueError(f"Expected a query to be text or a list of texts, got {query!r}")
    queries = [query] if isinstance(query, str) else list(cast("Sequence[Any]", query))
    for one in queries:
        if not isinstance(one, str) or not (blank or one.strip()):
            raise ValueError(f"Expected a query to be non-empty text, got {one!r}")
    return [whole(one) for one in queries]


def _key(value: object) -> tuple[str, object]:
    """Return a value with its sort, so that True is not 1; 1 is 1.0."""
    if value is None or isinstance(value, bool):
        return ("fixed", value)
    if isinstance(value, float) and not math.isfinite(value):
        return ("fixed", None)  # as the journal has it
    if isinstance(value, int | float):
        return ("number", value)
    if isinstance(value, str):
        return ("text", value)
    # As in the journal: an entry is the same before and after its bank is opened again.
    plain: object = to_jsonable_python(value)
    is_scalar = plain is None or isinstance(plain, str | int | float)
    return _key(plain) if is_scalar else ("other", repr(plain))
