"""Check rows of data files by their models."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from experiential.errors import ConfigError, first_problem

M = TypeVar("M", bound=BaseModel)


def checked(model: type[M], row: Any, expected: str, which: str) -> M:
    """Return ``row`` as an instance of its model; ConfigError names the row and its first fault.

    Args:
        model: what a row must hold.
        row: as it was read.
        expected: what the file should hold, with its name, for the error.
        which: the row's place in the file, for the error.
    """
    try:
        return model.model_validate(row)
    except ValidationError as error:
        problem = f"{which} where {first_problem(error)}"
        raise ConfigError(f"Expected {expected}, got {problem}") from error
