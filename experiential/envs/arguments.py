"""Check arguments of environments and rows of their data; errors say what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from experiential.errors import ConfigError, first_problem

if TYPE_CHECKING:  # `import experiential` comes by here, and pydantic doubles its time
    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")


def one_of(name: str, value: Any, known: Iterable[Any]) -> None:
    """Raise ConfigError unless ``value`` is one of ``known``."""
    listed = list(known)
    if value not in listed:
        choices = ", ".join(map(str, listed))
        raise ConfigError(f"Expected {name} to be one of {choices}, got {value!r}")


def positive(**numbers: float | None) -> None:
    """Raise ConfigError unless each of ``numbers`` that is given (not None) is above zero."""
    for name, number in numbers.items():
        if number is not None and number <= 0:
            raise ConfigError(f"Expected {name} to be positive, got {number}")


def inside(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless ``value`` is in [low, high]."""
    if not low <= value <= high:
        raise ConfigError(f"Expected {name} between {low} and {high}, got {value}")


def ordered(name: str, given: Iterable[float], low: float, high: float) -> None:
    """Raise ConfigError unless ``given`` is an ordered pair inside [low, high]."""
    pair = tuple(given)
    if len(pair) != 2 or not low <= pair[0] <= pair[1] <= high:
        raise ConfigError(
            f"Expected {name} to be an ordered pair within [{low}, {high}], got {pair}"
        )


def distinct(symbols: str, count: int) -> None:
    """Raise ConfigError unless ``symbols`` are ``count`` different visible characters."""
    if len(symbols) != count or len(set(symbols)) != count or any(map(str.isspace, symbols)):
        raise ConfigError(
            f"Expected symbols to be {count} different visible characters, got {symbols!r}"
        )


def with_preset(
    preset: str | None,
    presets: Mapping[str, Mapping[str, Any]],
    usual: Mapping[str, Any],
    **given: Any,
) -> dict[str, Any]:
    """Return each argument: the given value, else the preset's, else the usual.

    >>> usual = {"turns": 15, "binary": False}
    >>> with_preset("paper", {"paper": {"turns": 40}}, usual, turns=None, binary=True)
    {'turns': 40, 'binary': True}
    """
    if preset is not None:
        one_of("preset", preset, presets)
    chosen = {**usual, **(presets[preset] if preset is not None else {})}
    return chosen | {name: value for name, value in given.items() if value is not None}


def checked(model: type[M], row: Any, expected: str, which: str) -> M:
    """Return a row of a data file as an instance of its model; ConfigError names its first fault.

    ``expected`` says what the file should hold, with its name, and ``which`` the row's place in it.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(row)
    except ValidationError as error:
        problem = f"{which} where {first_problem(error)}"
        raise ConfigError(f"Expected {expected}, got {problem}") from error
