"""An environment with presets, and a suite of it."""

from __future__ import annotations

from typing import Any, ClassVar

from experiential.envs.text_env import Info, Step, TextEnv
from experiential.evaluation.suites import Suite, SuiteTask
from experiential_plugin_example import note


class GuessEnv(TextEnv):
    """Guess a digit: the number of the world modulo ten."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"short": {"turns": 1}, "long": {"turns": 3}}
    task = "Guess the digit."

    def __init__(self, turns: int = 2, split: str = "train", render_mode: str | None = None):
        note("envs")
        super().__init__(10, render_mode=render_mode)
        self._turns = turns

    def _begin(self, world: int) -> tuple[str, Info]:
        self._digit, self._left = world % 10, self._turns
        return "Which digit?", self._said("", success=False)

    def _turn(self, action: str) -> Step:
        self._left -= 1
        won = action.strip() == str(self._digit)
        text = "Right." if won else f"Wrong: it is {self._digit}."
        info = self._said(text, success=won, invalid=not action.strip().isdecimal())
        return text, float(won), won, not won and self._left == 0, info

    def _said(self, feedback: str, **about: bool) -> Info:
        digits = [str(digit) for digit in range(10)]
        return self._report(f"guess-{self._digit}", feedback, admissible=digits, **about)


def guesses() -> Suite:
    """Return a suite of one task."""
    note("suites")
    task = SuiteTask("guess", "example-guess", {"preset": "long"}, turns=3)
    return Suite("example-guesses", (task,), "tests/plugin_package")
