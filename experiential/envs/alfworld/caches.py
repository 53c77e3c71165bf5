"""Keep what TextWorld makes of a game's texts: translations on disk, grammars in memory.

TextWorld parses the same few texts of a grammar at every step, and copies all that a text may name
for each symbol of it: nine tenths of its time. ``speed_up_grammar`` ends both.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FORMAT = 1
"""Version of the stored form of a translation; raise it when that changes."""
TEXTGEN = "f947c1a0add69fe3b309c71e9904a4990af934ed479296fb10972effa8c43f5e"
"""SHA-256 of the module of TextWorld that ``speed_up_grammar`` knows, which is that of 1.7.0."""
_TEXTS = 4096
"""Parsed texts of grammars that are kept; ALFWorld's has some hundred."""
_TASK = re.compile(r'("task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*)"((?:[^"\\]|\\.)*)"')


@dataclass
class TranslationCache:
    """Call ``pddl2sas`` once per domain, problem and mode, and store its result.

    The last two results stay in memory, since TextWorld asks for the same two again at each reset.
    Files are written whole or not at all, so that processes may share the folder; one that is
    damaged is made again, and a folder that cannot be written costs only time.

    Args:
        translate: ``fast_downward.pddl2sas``.
        version: version of the translator; part of the key.
        atom: makes an atom of the initial state from predicate and arguments:
            ``fast_downward.translate.pddl.conditions.Atom``.
        folder: where files are kept; None keeps none.
    """

    translate: Callable[..., Any]
    version: str
    atom: Callable[[str, list[str]], Any]
    folder: Path | None
    _recent: dict[str, tuple[Any, str]] = field(default_factory=dict[str, tuple[Any, str]])

    def __call__(
        self, domain: str, problem: str, verbose: bool = False, optimize: bool = False
    ) -> tuple[Any, str]:
        """Return the planning task (actions, types, objects, initial state) and its SAS text."""
        parts = (str(FORMAT), self.version, str(optimize), domain, problem)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        if key in self._recent:
            return self._recent[key]
        path = self.folder / key[:2] / f"{key}.json.z" if self.folder else None
        found: tuple[Any, str] | None = None
        with suppress(OSError, ValueError, KeyError, TypeError, zlib.error):
            found = self._rebuilt(json.loads(zlib.decompress(path.read_bytes()))) if path else None
        if found is None:
            task, sas = self.translate(domain, problem, verbose=verbose, optimize=optimize)
            # the parts of a task that TextWorld reads; it ignores numeric assignments (costs)
            known = {
                "actions": [
                    [action.name, [[one.name, one.type_name] for one in action.parameters]]
                    for action in task.actions
                ],
                "types": [[kind.name, list(kind.supertype_names)] for kind in task.types],
                "objects": [[one.name, one.type_name] for one in task.objects],
                "init": [
                    [one.predicate, list(one.args)]
                    for one in task.init
                    if hasattr(one, "predicate")
                ],
            }
            record = {"task": known, "sas": sas}
            with suppress(OSError):
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                        file.write(zlib.compress(json.dumps(record).encode(), 6))
                    os.replace(file.name, path)
            found = self._rebuilt(record)
        self._recent = dict([*self._recent.items(), (key, found)][-2:])
        return found

    def _rebuilt(self, record: dict[str, Any]) -> tuple[Any, str]:
        known, some = record["task"], SimpleNamespace
        task = some(
            actions=[
                some(name=name, parameters=[some(name=n, type_name=t) for n, t in parameters])
                for name, parameters in known["actions"]
            ],
            types=[some(name=name, supertype_names=above) for name, above in known["types"]],
            objects=[some(name=name, type_name=kind) for name, kind in known["objects"]],
            init=[self.atom(predicate, args) for predicate, args in known["init"]],
        )
        return task, str(record["sas"])


@dataclass
class GrammarCache:
    """Parse ``.twl2`` texts as TextWorld does, but only once what games share: all but the goal.

    ``parse`` is ``textworld.envs.pddl.logic._parse_and_convert``, from a text to actions by name
    and a grammar; ``rules`` is ``ContextSensitiveGrammar.parse``, from JSON to a grammar.
    """

    parse: Callable[..., Any]
    rules: Callable[[str], Any]
    _known: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])

    def __call__(self, text: str, **options: Any) -> tuple[Any, Any]:
        """Return the actions and the grammar of ``text``."""
        found = _TASK.findall(text)
        if len(found) != 1:
            return self.parse(text, **options)
        common = _TASK.sub(r'\1""', text)
        if common not in self._known:
            parsed = self.parse(_TASK.sub(r'\1"?"', text), **options)
            self._known = dict([*self._known.items(), (common, parsed)][-4:])
        actions, shared = self._known[common]
        grammar = self.rules("{}")
        grammar.update(shared)
        goal = {"task": [{"rhs": json.loads(f'"{found[0][1]}"')}]}
        grammar._rules["task"] = self.rules(json.dumps(goal))._rules["task"]
        return actions, grammar


def speed_up_grammar(textgen: Any) -> bool:
    """Let TextWorld derive texts without parsing again and without deep copies.

    Texts stay the same. A symbol of a parsed text gets a context when it is derived, so each caller
    gets symbols of its own; everything else in a context is only read, apart from the dictionaries
    of variables and of the mapping, which are copied. Another version of the module may do it in
    other ways, so it is left as it is.

    Args:
        textgen: the module ``textworld.envs.pddl.textgen``; its functions are replaced.

    Returns:
        Whether this version of the module is known.
    """
    if hasattr(textgen.Symbol, "__deepcopy__"):
        return True
    if hashlib.sha256(Path(textgen.__file__).read_bytes()).hexdigest() != TEXTGEN:
        return False
    parse = lru_cache(_TEXTS)(textgen._parse_and_convert)

    def copy_symbol(symbol: Any, _: dict[int, Any]) -> Any:
        own = copy(symbol)
        for name in ("symbol", "expression"):  # of a list and of a conditional: symbols themselves
            if isinstance(inner := getattr(own, name, None), textgen.Symbol):
                setattr(own, name, copy_symbol(inner, _))
        return own

    def copy_context(context: dict[str, Any]) -> dict[str, Any]:
        parts = {name: dict(context[name]) for name in ("variables", "mapping")}
        return context | parts

    def parse_and_copy(text: str, **options: Any) -> Any:
        return deepcopy(parse(text, **options))

    textgen.Symbol.__deepcopy__ = copy_symbol
    textgen.copy_context = copy_context
    textgen._parse_and_convert = parse_and_copy
    query = lru_cache(_TEXTS)(textgen.Rule.parse_conjunctive_query)
    textgen.Rule = SimpleNamespace(parse_conjunctive_query=query)
    return True
