"""The options of a manager, checked."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from experiential.config import BankSettings
from experiential.errors import ConfigError


def bank_settings(options: dict[str, Any]) -> BankSettings:
    """The settings that these options of ``ExperienceManager`` stand for.

    Raises:
        ConfigError: one is unknown or out of its range.
    """
    try:
        return BankSettings(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        known = ", ".join(sorted(BankSettings.model_fields))
        raise ConfigError(
            f"Expected options of ExperienceManager among: {known}; got {name}={first['input']!r}"
            f" ({first['msg']})"
        ) from error
