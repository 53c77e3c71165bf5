"""Parse TextWorld's grammar files once: games differ only in the rule that states the goal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_TASK = re.compile(r'("task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*)"((?:[^"\\]|\\.)*)"')


class GrammarCache:
    """Parse ``.twl2`` texts as TextWorld does, but the common part only once.

    Args:
        parse: ``textworld.envs.pddl.logic._parse_and_convert``: text to actions by name and a
            grammar.
        rules: ``ContextSensitiveGrammar.parse``: a JSON object of rules to a grammar.
    """

    def __init__(self, parse: Callable[..., Any], rules: Callable[[str], Any]) -> None:
        self.parse, self.rules = parse, rules
        self._known: dict[str, tuple[Any, Any]] = {}

    def __call__(self, text: str, **options: Any) -> tuple[Any, Any]:
        """Return the actions and the grammar of ``text``."""
        found = _TASK.findall(text)
        if len(found) != 1:
            return self.parse(text, **options)
        common = _TASK.sub(r'\1""', text)
        if common not in self._known:
            self._known = dict(
                [*self._known.items(), (common, self.parse(_TASK.sub(r'\1"?"', text), **options))][
                    -4:
                ]
            )
        actions, shared = self._known[common]
        grammar = self.rules("{}")
        grammar.update(shared)
        grammar._rules["task"] = self.rules(
            json.dumps({"task": [{"rhs": json.loads(f'"{found[0][1]}"')}]})
        )._rules["task"]
        return actions, grammar
