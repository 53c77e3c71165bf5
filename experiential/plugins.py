"""Resolve a name to a part of the library: the one door for code from outside.

Wherever a part can be chosen, in settings or on the command line, a name is one of three things:

1. a built-in name, such as ``grpo``;
2. the name of an entry point of group ``experiential.<kind>`` that an installed package declares;
3. ``module:attribute``, which is imported; the current folder counts as a place to import from.

>>> resolve("estimators", "double", {"double": lambda x: 2 * x})(21)
42
>>> resolve("estimators", "math:sqrt", {})(9.0)
3.0
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Literal, TypeVar, cast, get_args

from experiential.errors import ConfigError

T = TypeVar("T")

Kind = Literal[
    "embedders",
    "envs",
    "estimators",
    "extractors",
    "llms",
    "losses",
    "memories",
    "methods",
    "runtimes",
    "stores",
    "strategies",
    "suites",
    "trackers",
]
"""A part that can be chosen by name; `docs/extending.md` has a section for each."""
KINDS: tuple[Kind, ...] = get_args(Kind)


def resolve(kind: Kind, name: str, builtins: Mapping[str, T | str]) -> T:
    """Return the part that ``name`` stands for, or raise ConfigError.

    Args:
        kind: which parts are meant; decides the group of entry points.
        name: a built-in name, the name of an entry point, or ``module:attribute``; a dotted
            attribute is followed.
        builtins: built-in parts by name. A string is a ``module:attribute`` of this package, which
            keeps heavy modules unimported until they are chosen.
    """
    found: T | str | None = builtins.get(name)
    if found is not None and not isinstance(found, str):
        return found
    reference = name if found is None else found
    module_name, colon, path = reference.partition(":")
    if colon:
        part: Any = import_from_here(module_name, f"{kind} {reference!r}")
        for word in path.split("."):
            if not hasattr(part, word):
                public = [known for known in dir(part) if not known.startswith("_")]
                raise ConfigError(
                    f"Expected an attribute {path!r} in {module_name!r} for {kind}, got"
                    f" none{did_you_mean(word, public)}"
                )
            part = getattr(part, word)
        return part
    for point in entry_points(group=f"experiential.{kind}", name=name):
        try:
            return cast("T", point.load())
        except Exception as error:  # a foreign package may raise anything while it is imported
            raise ConfigError(
                f"Expected the entry point {name!r} of {kind} to load, got"
                f" {type(error).__name__}: {error}; repair or uninstall"
                f" {point.dist.name if point.dist else 'its package'}"
            ) from error
    known = known_names(kind, builtins)
    raise ConfigError(
        f"Expected one of {kind} ({', '.join(known)}) or module:attribute, got"
        f" {name!r}{did_you_mean(name, known)}"
    )


def known_names(kind: Kind, builtins: Iterable[str] = ()) -> list[str]:
    """Return the names of a kind, built-in ones first, then those of installed packages."""
    installed = {point.name for point in entry_points(group=f"experiential.{kind}")}
    return [*builtins, *sorted(installed - set(builtins))]


def import_from_here(module_name: str, wanted_for: str) -> ModuleType:
    """Import a module, from the current folder too as ``python -m`` does, or raise ConfigError."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a foreign module may raise anything while it is imported
        raise ConfigError(
            f"Expected to import {module_name!r} for {wanted_for}, got"
            f" {type(error).__name__}: {error}; install its package, or run where the module lies"
        ) from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
