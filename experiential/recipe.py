"""Resolve recipes and `key=value` overrides into one checked `Experiment`.

A recipe is a named YAML preset that may extend another one.

    load_experiment("complementary", ["run.steps=5", "model.name=smollm2"])

The order, later wins: defaults of `config.py`, the chain of `extends`, the recipe itself, overrides
from left to right.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from experiential.config import REMOVED, SAME_AS, Experiment, MethodSettings, Options, Settings
from experiential.errors import ConfigError
from experiential.plugins import did_you_mean, known_names

RECIPES = Path(__file__).parent / "recipes"

Tree = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """Load safe YAML; read `1e-4` as a number and refuse a key given twice."""


class _Dumper(yaml.SafeDumper):
    """Dump safe YAML; quote text that `_Loader` would read as a number."""


_NUMBER = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
for _part in cast("list[Any]", [_Loader, _Dumper]):  # the method is untyped in types-PyYAML
    _part.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> Tree:
    keys = [key.value for key, _ in node.value]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        raise ConfigError(
            f"Expected each key once, got {repeated!r} twice in one block; remove one of them"
        )
    return {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_without_duplicates)


def recipe_names() -> list[str]:
    """Return the names of the bundled recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("_"))


def describe_recipe(name: str) -> str:
    """Return the opening comment of a bundled recipe, its description in one line."""
    return _find(name).read_text("utf-8").splitlines()[0].removeprefix("# ")


def load_experiment(recipe: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Resolve a recipe and overrides into a checked experiment.

    Args:
        recipe: name of a bundled recipe, or the path of a YAML file.
        overrides: `key=value` strings; keys are dotted, values are YAML (`run.steps=5`,
            `env.kwargs={split: train}`).

    Raises:
        ConfigError: unknown recipe or key (the nearest is named), unreadable YAML, or a value of
            the wrong type.
    """
    path = _find(recipe)
    tree = _read_chain(path, ())
    tree.setdefault("recipe", path.stem)
    check_keys(tree)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"Expected an override of the form key=value, got {override!r}")
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            problem = " ".join(str(error).split())
            raise ConfigError(
                f"Expected a YAML value in the override {override!r}, got: {problem}"
            ) from error
        place, addition = key.strip().split("."), Tree()
        _put(addition, place, value)
        check_keys(addition)
        _put(tree, place, value)
    _complete(tree)
    try:
        return Experiment.model_validate(tree)
    except ValidationError as error:
        problems = [
            _describe(problem["loc"], problem["msg"], problem["input"])
            for problem in error.errors(include_url=False)
        ]
        raise ConfigError("; ".join(problems[:3])) from error


def dump_experiment(experiment: Experiment) -> str:
    """Return the experiment as YAML that `load_experiment` reads back to an equal one."""
    tree = experiment.model_dump(mode="json")
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _find(recipe: str | Path) -> Path:
    name, names = str(recipe), recipe_names()
    if name in (*names, "_defaults"):
        return RECIPES / f"{name}.yaml"
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    raise ConfigError(
        f"Expected a recipe ({', '.join(names)}) or the path of a YAML file, got"
        f" {name!r}{did_you_mean(name, names)}"
    )


def _read_chain(path: Path, seen: tuple[Path, ...]) -> Tree:
    """Read a file of settings over those that it extends."""
    if path.resolve() in seen:
        raise ConfigError(
            f"Expected `extends` to end at some recipe, got a circle through {path.name}; remove"
            " one `extends`"
        )
    try:
        loaded = yaml.load(path.read_text("utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"Expected readable YAML in {path}, got: {problem}") from error
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"Expected a mapping of settings in {path}, got {type(loaded).__name__}")
    tree = cast("Tree", loaded or {})
    base = tree.pop("extends", None)
    if base is None:
        return tree
    beside = path.parent / str(base)
    parent = _find(beside if beside.is_file() else str(base))
    return _merge(_read_chain(parent, (*seen, path.resolve())), tree)


def _merge(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Merge nested mappings key by key; replace everything else."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = (
            _merge(cast("Tree", old), cast("Tree", value))
            if isinstance(old, dict) and isinstance(value, dict)
            else value
        )
    return merged


def _put(tree: Tree, path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        child = tree.get(part)
        tree[part] = dict(cast("Tree", child)) if isinstance(child, dict) else {}
        tree = cast("Tree", tree[part])
    tree[path[-1]] = value


@dataclass(frozen=True)
class Setting:
    """Describe one leaf of the tree of settings."""

    key: str
    type: str
    default: Any
    description: str


def settings_reference(
    settings: Settings | None = None, prefix: str = "", *, options: bool = False
) -> Iterator[Setting]:
    """Yield every setting in reading order, with its dotted key, type, default and description.

    A section that only says how it differs from another one is a single row, and so are the
    options of a part: those are what ``options`` yields in place of the settings. A part that is
    off by default is shown with the values that it has when it is on.
    """
    settings = settings or Experiment()
    for name, field in type(settings).model_fields.items():
        key, inner = f"{prefix}{name}", _settings_class(field)
        default = getattr(settings, name, None)  # absent: must be given, when the part is on
        about = " ".join((field.description or "").split())
        if key in SAME_AS:
            note = f"what differs from `{SAME_AS[key]}`, with the same keys"
            if not options:
                shown = "; ".join(filter(None, (note, about)))
                yield Setting(key, "mapping", default and {}, shown)
        elif inner is None:
            if isinstance(settings, Options) == options:
                yield Setting(key, _type_name(field), default, about)
        elif issubclass(inner, Options) and not options:
            yield Setting(key, "options", default and {}, about)
        else:
            inside = default or inner.model_construct()
            yield from settings_reference(inside, f"{key}.", options=options)


def _type_name(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    plain = isinstance(annotation, type) and not get_args(annotation)
    shown = annotation.__name__ if plain else str(annotation)
    shown = re.sub(r"\b(?:typing|experiential\.config)\.", "", shown)
    return re.sub(
        r"Literal\[(.*?)\]", lambda match: match[1].replace("'", "").replace(", ", " or "), shown
    )


def _settings_class(field: FieldInfo) -> type[Settings] | None:
    """Return the `Settings` class of a field, also of `X | None`; None for plain values."""
    optional = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if optional else (field.annotation,)
    settings = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings))
    return next(settings, None)


def check_keys(
    tree: Mapping[str, Any], model: type[Settings] = Experiment, prefix: str = ""
) -> None:
    """Refuse every key that no setting has.

    Raises:
        ConfigError: names the first unknown key and the nearest known one.
    """
    for name, value in tree.items():
        key, field = f"{prefix}{name}", model.model_fields.get(str(name))
        if field is None:
            if model is MethodSettings and (":" in name or name in known_names("methods")):
                continue  # a method from outside checks its own options
            if key in REMOVED:
                raise ConfigError(f"Expected a known setting, got {key!r}: {REMOVED[key]}")
            everywhere, siblings = list(_all_keys(Experiment)), list(model.model_fields)
            elsewhere = [known for known in everywhere if known.endswith(f".{name}")]
            elsewhere.sort(key=lambda known: -len(commonprefix([known, key])))
            near = difflib.get_close_matches(str(name), siblings, n=1, cutoff=0.6)
            if elsewhere or near:
                hint = f"; did you mean {elsewhere[0] if elsewhere else prefix + near[0]}?"
            else:
                hint = did_you_mean(key, everywhere) or f"; known here: {', '.join(siblings)}"
            raise ConfigError(f"Expected a known setting, got {key!r}{hint}")
        inner = _settings_class(field)
        if isinstance(value, dict) and inner is not None:
            check_keys(cast("Tree", value), inner, f"{key}.")
        elif isinstance(value, dict) and "dict" not in str(field.annotation):
            raise ConfigError(
                f"Expected {key} to be a value of type {_type_name(field)}, got a mapping {value}"
            )


def _all_keys(model: type[Settings], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if (inner := _settings_class(field)) is not None:
            yield from _all_keys(inner, f"{prefix}{name}.")


def _complete(tree: Tree) -> None:
    """Fill what a section of the extractor leaves out from the actor's section."""
    for key, other in SAME_AS.items():
        whole: Any = tree
        for part in other.split("."):
            whole = cast("Tree", whole).get(part) if isinstance(whole, dict) else None
        *parents, leaf = key.split(".")
        holder: Any = tree.get(parents[0], {}) if parents else tree
        # A value of the wrong type is left as given: the check that follows refuses it.
        if not isinstance(holder, dict | None) or not isinstance(whole, dict):
            continue
        own = cast("Tree", holder or {}).get(leaf)
        if isinstance(own, dict) or (own is None and key != "extractor_model"):
            merged = _merge(cast("Tree", whole), cast("Tree", own or {}))
            _put(tree, [*parents, leaf], merged)


def _describe(location: tuple[int | str, ...], message: str, value: Any) -> str:
    """Describe one pydantic problem in one sentence."""
    key = ".".join(map(str, location))
    if message.startswith("Value error, "):
        return message.removeprefix("Value error, ")
    if message == "Field required":
        return f"Expected a value for {key}, got none in {value!r}"
    if message.startswith("Extra inputs"):
        return f"Expected a known setting, got {key!r}"
    wanted = message.removeprefix("Input should be ").split(", unable")[0]
    wanted = wanted.split(" or instance of")[0].replace("dictionary", "mapping")
    return f"Expected {key} to be {wanted}, got {value!r}"
