"""Resolve recipes and `key=value` overrides into one checked `Experiment`.

A recipe is composed of a method (`recipes/*.yaml`), a model profile (`recipes/models`), an
environment profile (`recipes/environments`) and files of the user.

    load_experiment("complementary+small+frozen-lake", ["run.steps=5"])
    load_experiment("mine.yaml")  # which may say `extends: [complementary, models/small]`

The order, later wins: defaults of `config.py`, the environment profile, the model profile, methods,
files, each of the last two after what it extends, overrides from left to right.
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


def profile_names(kind: str = "*") -> list[str]:
    """Return the names of the bundled profiles, all or those of ``models`` or ``environments``.

    >>> profile_names("models")
    ['models/7b', 'models/small', 'models/tiny']
    """
    paths = RECIPES.glob(f"{kind}/*.yaml")
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in paths)


def describe_recipe(name: str) -> str:
    """Return the opening comment of a bundled recipe or profile, its description in one line."""
    return (RECIPES / f"{name}.yaml").read_text("utf-8").splitlines()[0].removeprefix("# ")


def load_experiment(recipe: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Resolve a recipe and overrides into a checked experiment.

    A file is taken as it is. A bundled method that is named here, and not in a file, is completed:
    by the model profile ``tiny`` and the environment profile ``vault`` where none is named.

    Args:
        recipe: the path of a YAML file, or names of a bundled method and of profiles, joined by
            ``+``, as ``complementary+small``.
        overrides: `key=value` strings; keys are dotted, values are YAML (`run.steps=5`,
            `env.kwargs={split: train}`).

    Raises:
        ConfigError: unknown recipe or key (the nearest is named), unreadable YAML, a value of the
            wrong type, no environment, or no model.
    """
    tree = Tree()
    for layer in _compose(recipe):
        tree = _merge(tree, layer.tree)
    tree.setdefault("recipe", _name_of(recipe))
    check_keys(tree)
    for place, value in map(_parse_override, overrides):
        addition = Tree()
        _put(addition, place, value)
        check_keys(addition)
        _put(tree, place, value)
    _drop_nulls(tree, Experiment)
    if not (cast("Tree", tree.get("env") or {})).get("id"):
        raise ConfigError(
            f"Expected env.id, got none in {recipe}; set it to the id of an environment, or extend"
            f" one of {', '.join(profile_names('environments'))}"
        )
    if not (cast("Tree", tree.get("model") or {})).get("name"):
        raise ConfigError(
            f"Expected model.name, got none in {recipe}; set it to a model, or extend one of"
            f" {', '.join(profile_names('models'))}"
        )
    _complete(tree)
    try:
        return Experiment.model_validate(tree)
    except ValidationError as error:
        problems = [
            _describe(problem["loc"], problem["msg"], problem["input"])
            for problem in error.errors(include_url=False)
        ]
        raise ConfigError("; ".join(problems[:3])) from error


def misplaced_numbers(recipe: str | Path, overrides: Sequence[str] = ()) -> Iterator[str]:
    """Yield a warning for each profile whose numbers stay with another model or environment.

    Settings of a role that does not learn here are not named.
    """
    experiment, layers = load_experiment(recipe, overrides), _compose(recipe)
    for kind, key, chosen in (
        ("models", "model.name", experiment.model.name),
        ("environments", "env.id", experiment.env.id),
    ):
        profile = next((layer for layer in layers if layer.kind == kind), None)
        if profile is None:
            continue
        numbers = dict(_leaves(profile.tree, Experiment))
        if numbers.pop(key, chosen) == chosen:
            continue
        if kind == "models":  # the length of a run depends on it
            numbers |= {
                k: v
                for x in layers
                if x.kind == "_quickstart"
                for k, v in _leaves(x.tree, Experiment)
            }
        later = {
            name
            for layer in layers[layers.index(profile) + 1 :]
            if layer.kind != "_quickstart"
            for name, _ in _leaves(layer.tree, Experiment)
        }
        later |= {".".join(place) for place, _ in map(_parse_override, overrides)}
        idle = [
            f"{role}.{name}"
            for role in ("actor", "extractor")
            if not getattr(experiment, role).train
            for name in _LEARNING
        ]
        kept = [
            f"{name}={value}"
            for name, value in numbers.items()
            if not any(f"{name}.".startswith(f"{other}.") for other in (*later, *idle))
        ]
        if kept:
            yield (
                f"{key} is {chosen!r}, but these settings are of the profile {profile.name}:"
                f" {', '.join(kept)}; name another profile"
                f" ({', '.join(profile_names(kind))}), or write a recipe file, which takes a method"
                " alone (docs/quickstart.md)"
            )


_LEARNING = "epochs mini_batches batch_size updates_per_step max_staleness kl optim".split()
"""Settings of a role that do nothing where it does not learn."""


def dump_experiment(experiment: Experiment) -> str:
    """Return the experiment as YAML that `load_experiment` reads back to an equal one."""
    tree = experiment.model_dump(mode="json")
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


@dataclass(frozen=True)
class _Layer:
    """Hold the settings of one file, without those that it extends."""

    name: str
    kind: str  # environments, models, _quickstart, methods or files
    tree: Tree


_ORDER = ("environments", "models", "_quickstart", "methods", "files")
"""Kinds of layers, the weakest first: a method's own settings win over those of a profile."""


def _compose(recipe: str | Path) -> list[_Layer]:
    """Return what a recipe is composed of, the weakest first.

    Of several profiles of a kind the one named last is taken.
    """
    paths = _find(str(recipe))
    layers = [layer for path in paths for layer in _read(path, ())]
    if all(path.is_relative_to(RECIPES) for path in paths):
        if not any(layer.kind == "methods" for layer in layers):
            raise ConfigError(
                f"Expected a method among {', '.join(recipe_names())}, got the profile"
                f" {str(recipe)!r} alone; join both, as complementary+{recipe}"
            )
        kinds = {layer.kind for layer in layers}
        if "models" not in kinds:
            layers += _read(RECIPES / "models" / "tiny.yaml", ())
        if "environments" not in kinds:
            layers += _read(RECIPES / "environments" / "vault.yaml", ())
        if not kinds & {"models", "environments"}:
            layers += _read(RECIPES / "_quickstart.yaml", ())
    chosen = {layer.kind: layer for layer in layers if layer.kind in ("models", "environments")}
    kept = [layer for layer in layers if chosen.get(layer.kind, layer) is layer]
    return sorted(kept, key=lambda layer: _ORDER.index(layer.kind))


def _name_of(recipe: str | Path) -> str:
    """Return the name of a run's recipe: that of the file, or of the method."""
    paths = _find(str(recipe))
    return next(path for path in reversed(paths) if _kind_of(path) in ("methods", "files")).stem


def _kind_of(path: Path) -> str:
    if not path.is_relative_to(RECIPES):
        return "files"
    if path.parent != RECIPES:
        return path.parent.name
    return "_quickstart" if path.stem == "_quickstart" else "methods"


def _find(recipe: str, beside: Path | None = None) -> list[Path]:
    """Return the files that a name, several joined by `+`, or a path stands for."""
    if beside is not None and (beside / recipe).is_file():
        return [beside / recipe]
    methods, profiles = recipe_names(), profile_names()
    if recipe in methods or recipe in profiles:
        return [RECIPES / f"{recipe}.yaml"]
    short = [name for name in profiles if name.partition("/")[2] == recipe]
    if len(short) == 1:
        return [RECIPES / f"{short[0]}.yaml"]
    if (path := Path(recipe).expanduser()).is_file():
        return [path]
    if "+" in recipe:
        return [path for part in recipe.split("+") for path in _find(part.strip(), beside)]
    raise ConfigError(
        f"Expected a recipe ({', '.join(methods)}), a profile ({', '.join(profiles)}) or the path"
        f" of a YAML file, got {recipe!r}{did_you_mean(recipe, [*methods, *profiles])}"
    )


def _read(path: Path, seen: tuple[Path, ...]) -> list[_Layer]:
    """Read a file of settings and those that it extends, itself last."""
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
    bases: Any = tree.pop("extends", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in cast("list[Any]", bases)):
        raise ConfigError(
            f"Expected `extends` to be a name or a list of names in {path}, got {bases!r}"
        )
    kind = _kind_of(path)
    name = path.stem if kind == "files" else path.relative_to(RECIPES).with_suffix("").as_posix()
    above = [
        layer
        for base in cast("list[str]", bases)
        for parent in _find(base, path.parent)
        for layer in _read(parent, (*seen, path.resolve()))
    ]
    return [*above, _Layer(name, kind, tree)]


def _parse_override(override: str) -> tuple[list[str], Any]:
    """Return the place and the value of a `key=value`."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"Expected an override of the form key=value, got {override!r}")
    try:
        return key.strip().split("."), yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"Expected a YAML value in the override {override!r}, got: {problem}"
        ) from error


def _leaves(
    tree: Mapping[str, Any], model: type[Settings], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting of a tree."""
    for name, value in tree.items():
        field = model.model_fields.get(name)
        inner = None if field is None else _settings_class(field)
        if inner is not None and isinstance(value, dict):
            yield from _leaves(cast("Tree", value), inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _drop_nulls(tree: Tree, model: type[Settings]) -> None:
    """Remove each null that stands for a section or mapping which has a default."""
    for name, value in list(tree.items()):
        field = model.model_fields.get(name)
        inner = None if field is None else _settings_class(field)
        if field is None:
            continue
        if value is None and field.default is not None and (inner or _is_mapping(field)):
            del tree[name]
        elif isinstance(value, dict) and inner is not None:
            _drop_nulls(cast("Tree", value), inner)


def _is_mapping(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def _merge(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Merge nested mappings key by key; replace everything else, by an empty mapping too."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = (
            _merge(cast("Tree", old), cast("Tree", value))
            if isinstance(old, dict) and isinstance(value, dict) and value
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
    shown = re.sub(r"Optional\[Annotated\[(\w+), .*?\]\]", r"\1 | None", shown)
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
