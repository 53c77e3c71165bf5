"""Keep what TextWorld makes of a game's texts: translations on disk, grammars in memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FORMAT = 1
"""Version of the stored form of a translation; raise it when that changes."""
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
