"""Shorten ids as git does: a listing shows the first digits, and commands accept them."""

from __future__ import annotations

from collections.abc import Iterable

from experiential.errors import ConfigError

DIGITS = 8
"""Digits of a shortened id, or more where several ids share them."""
NAMED = 5
"""Candidates that the message about an ambiguous id names."""


def short_ids(known: Iterable[str]) -> dict[str, str]:
    """Return the shortest unambiguous prefix of each id, of `DIGITS` digits or more.

    >>> short_ids(["0123456789ab", "0123456789cd", "fedcba987654"])
    {'0123456789ab': '0123456789a', '0123456789cd': '0123456789c', 'fedcba987654': 'fedcba98'}
    """
    ids = sorted(set(known))
    shared = [0, *(_shared(one, other) for one, other in zip(ids, ids[1:], strict=False)), 0]
    return {
        id: id[: max(DIGITS, before + 1, after + 1)]
        for id, before, after in zip(ids, shared, shared[1:], strict=False)
    }


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def whole_id(given: str, known: Iterable[str], wanted: str, see: str) -> str:
    """Return the id that a user named, in full or by its first digits.

    Args:
        given: what the user wrote.
        known: the ids there are.
        wanted: what it should be, for the message.
        see: the command or the place that lists them.

    Raises:
        ConfigError: no id begins so, or several do.
    """
    ids = set(known)
    if given in ids:
        return given
    found = sorted(id for id in ids if given and id.startswith(given))
    if not found:
        raise ConfigError(f"Expected {wanted}, got {given!r}; see: {see}")
    if len(found) > 1:
        short = short_ids(ids)
        named = ", ".join(short[id] for id in found[:NAMED])
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        raise ConfigError(
            f"Expected an id with one meaning, got {given!r}, with which {named}{more} begin;"
            " write more digits"
        )
    return found[0]
