"""Bound what a call of a simulated API may compute, since the APIs run in this process."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

LINES = 200_000
"""Lines of Python that the calls of one reply may run together; the reference calls of a turn run
at most 13,000.
"""
DIGITS = 4_300
"""Digits that a number may have: Python writes no longer integers."""


class _Spent(BaseException):
    """End a call. No APIs' ``except Exception`` catches it."""


class Budget:
    """Bound the lines of Python that some calls run together.

    Lines are counted, and not time, so that a call ends alike on every machine. A trace function of
    a debugger is put aside meanwhile.

    >>> def endless():
    ...     while True:
    ...         pass
    >>> Budget(1000).run(endless)
    Traceback (most recent call last):
    TimeoutError: Expected an end within 1,000 lines of Python

    Args:
        lines: how many.
    """

    def __init__(self, lines: int = LINES) -> None:
        self.lines = self._left = lines

    def run(self, function: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """Return what a function returns; raise TimeoutError where no lines are left for it."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return function(*positional, **named)
        except _Spent:
            expected = f"Expected an end within {self.lines:,} lines of Python"
            raise TimeoutError(expected) from None
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._left -= event == "line"
        if self._left < 0:
            raise _Spent
        return self._trace


def check_digits(function: Callable[..., Any], *positional: Any, **named: Any) -> None:
    """Refuse arguments of MathAPI for which one line of Python would compute for ever.

    Raises:
        ValueError: the precision, or the power of an integer, would exceed `DIGITS` digits.
    """
    try:
        given = inspect.signature(function).bind(*positional, **named).arguments
    except TypeError:  # the call says it better
        return
    numbers = {key: value for key, value in given.items() if isinstance(value, int | float)}
    digits = [abs(numbers.get(name, 0)) for name in ("precision", "decimal_places")]
    base, exponent = numbers.get("base"), numbers.get("exponent")
    if isinstance(base, int) and isinstance(exponent, int):
        digits.append(base.bit_length() * abs(exponent) * 3 // 10)
    if max(digits) > DIGITS:
        raise ValueError(f"Exceeds the limit ({DIGITS} digits)")
