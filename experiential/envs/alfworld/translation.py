"""Cache the output of Fast Downward's translator on disk, by content."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FORMAT = 1
"""Version of the stored form; raise it when that changes."""


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

    def __init__(
        self,
        translate: Callable[..., Any],
        version: str,
        atom: Callable[[str, list[str]], Any],
        folder: Path | None,
    ) -> None:
        self.translate, self._version, self._atom, self._folder = translate, version, atom, folder
        self._recent: dict[str, tuple[Any, str]] = {}

    def __call__(
        self, domain: str, problem: str, verbose: bool = False, optimize: bool = False
    ) -> tuple[Any, str]:
        """Return the planning task (actions, types, objects, initial state) and its SAS text."""
        key = hashlib.sha256(
            "\0".join((str(FORMAT), self._version, str(optimize), domain, problem)).encode()
        ).hexdigest()
        known = self._recent.get(key) or self._loaded(key)
        if known is None:
            task, sas = self.translate(domain, problem, verbose=verbose, optimize=optimize)
            record = {"task": _record(task), "sas": sas}
            self._store(key, record)
            known = self._rebuilt(record)
        self._recent = (
            dict([*self._recent.items(), (key, known)][-2:])
            if key not in self._recent
            else self._recent
        )
        return known

    def _path(self, key: str) -> Path | None:
        return self._folder / key[:2] / f"{key}.json.z" if self._folder else None

    def _loaded(self, key: str) -> tuple[Any, str] | None:
        path = self._path(key)
        try:
            return self._rebuilt(json.loads(zlib.decompress(path.read_bytes()))) if path else None
        except (OSError, ValueError, KeyError, TypeError, zlib.error):
            return None

    def _store(self, key: str, record: dict[str, Any]) -> None:
        path = self._path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(zlib.compress(json.dumps(record).encode(), 6))
            os.replace(file.name, path)
        except OSError:
            return

    def _rebuilt(self, record: dict[str, Any]) -> tuple[Any, str]:
        known = record["task"]
        task = SimpleNamespace(
            actions=[
                SimpleNamespace(
                    name=name,
                    parameters=[SimpleNamespace(name=n, type_name=t) for n, t in parameters],
                )
                for name, parameters in known["actions"]
            ],
            types=[
                SimpleNamespace(name=name, supertype_names=above) for name, above in known["types"]
            ],
            objects=[SimpleNamespace(name=name, type_name=kind) for name, kind in known["objects"]],
            init=[self._atom(predicate, args) for predicate, args in known["init"]],
        )
        return task, str(record["sas"])


def _record(task: Any) -> dict[str, Any]:
    """Return the parts of a task that TextWorld reads; it ignores numeric assignments (costs)."""
    return {
        "actions": [
            [action.name, [[one.name, one.type_name] for one in action.parameters]]
            for action in task.actions
        ],
        "types": [[kind.name, list(kind.supertype_names)] for kind in task.types],
        "objects": [[one.name, one.type_name] for one in task.objects],
        "init": [
            [atom.predicate, list(atom.args)] for atom in task.init if hasattr(atom, "predicate")
        ],
    }
