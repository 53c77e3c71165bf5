"""Complete names on the command line: recipes, settings, suites, and parts of every kind.

Each function takes the word so far and returns what it can become. Only names are read: a part is
not imported for its name, and no model library is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from experiential.plugins import Kind, known_names
from experiential.recipe import profile_names, recipe_names, settings_reference


def beginning(incomplete: str, known: Iterable[str]) -> list[str]:
    """Return the names that begin so."""
    return [name for name in known if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Complete a method, then profiles after each ``+``; or YAML files of this folder.

    >>> complete_recipe("complementary+sm")
    ['complementary+small']
    """
    before, plus, last = incomplete.rpartition("+")
    if plus:
        short = [name.partition("/")[2] for name in profile_names()]
        return [f"{before}+{name}" for name in beginning(last, short)]
    files = sorted(str(path) for end in ("yaml", "yml") for path in Path().glob(f"*.{end}"))
    return beginning(incomplete, [*recipe_names(), *files])


def complete_setting(incomplete: str) -> list[str]:
    """Complete the key of a setting, and then its value where that is one of a few.

    >>> complete_setting("run.ste")
    ['run.steps=', 'run.steps=40']
    >>> complete_setting("runtime=o")
    ['runtime=openrlhf']
    """
    key, equals, _ = incomplete.partition("=")
    known = {one.key: one for one in (*settings_reference(), *settings_reference(options=True))}
    found = [key] * (key in known) if equals else beginning(key, known)
    keys = [] if equals else [f"{name}=" for name in found]
    if len(found) != 1:
        return keys
    setting = known[found[0]]
    one_of = " or " in setting.type and not setting.type.startswith("tuple")
    values = setting.type.split(" or ") if one_of else _names(setting.key)
    values = ["true", "false"] if setting.type == "bool" else values
    if not equals and not values and not isinstance(setting.default, (dict, tuple, list)):
        # the shell puts a blank after a single candidate
        values = ["null" if setting.default is None else str(setting.default)]
    return [*keys, *beginning(incomplete, (f"{setting.key}={value}" for value in values))]


def complete_suite(incomplete: str) -> list[str]:
    """Complete the name of a suite."""
    from experiential.evaluation.suites import SUITES

    return beginning(incomplete, known_names("suites", SUITES))


def complete_part(kind: Kind, *more: str) -> Callable[[str], list[str]]:
    """Return what completes the name of a part of this kind, built in or of a plug-in."""

    def complete(incomplete: str) -> list[str]:
        return beginning(incomplete, known_names(kind, [*more, *_builtins(kind)]))

    return complete


def _names(key: str) -> list[str]:
    """Return the names that a setting takes."""
    kinds: dict[str, Kind] = {
        "actor.estimator": "estimators",
        "actor.loss": "losses",
        "extractor.agent": "extractors",
        "bank.retrieval.strategy": "strategies",
        "bank.store": "stores",
        "method": "methods",
        "runtime": "runtimes",
    }
    if key == "env.id":
        from experiential.envs import ENVS

        return known_names("envs", ENVS)
    kind = kinds.get(key)
    return [] if kind is None else known_names(kind, _builtins(kind))


def _builtins(kind: Kind) -> Iterable[str]:
    """Return the built-in names of a kind."""
    from experiential.agents.extractor import EXTRACTORS
    from experiential.bank.index.site import STORES
    from experiential.bank.search.strategies import STRATEGIES
    from experiential.llm.base import BACKENDS
    from experiential.training.advantages import ESTIMATORS
    from experiential.training.runtime import LOSSES, METHODS, RUNTIMES

    found: dict[Kind, Iterable[str]] = {
        "estimators": ESTIMATORS,
        "extractors": EXTRACTORS,
        "llms": BACKENDS,
        "losses": LOSSES,
        "methods": METHODS,
        "runtimes": RUNTIMES,
        "stores": STORES,
        "strategies": STRATEGIES,
    }
    return found.get(kind, ())
