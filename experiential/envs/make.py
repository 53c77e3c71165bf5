"""Resolve the name of an environment, and make it: the one way from a setting to an environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, cast

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator

from experiential.errors import ConfigError
from experiential.plugins import did_you_mean, import_from_here, known_names, resolve

Creator = Callable[..., gym.Env[Any, Any]]
NO_BUILTINS: dict[str, Any] = {}
"""Gymnasium's registry holds the built-in environments, so the plug-in door needs none."""


def resolve_env(name: str) -> EnvSpec:
    """Return Gymnasium's specification of the environment that ``name`` stands for.

    A name is one of four things, tried in this order:

    1. an id that Gymnasium knows, such as ``experiential/Vault-v0``;
    2. an entry point of group ``experiential.envs``: an environment class or a function that makes
       one. The entry point ``acme`` may also be a module, whose import registers ids ``acme/...``;
    3. ``module:Id-v0``, Gymnasium's own form: the import of the module registers the id;
    4. ``module:attribute``, an environment class or a function that makes one.

    >>> resolve_env("experiential/Vault-v0").id
    'experiential/Vault-v0'
    >>> resolve_env("experiential.envs.vault:VaultEnv").entry_point.__name__
    'VaultEnv'
    """
    module, _, known = name.rpartition(":")
    attributes: list[str] = []
    if module and known not in gym.registry:
        imported = import_from_here(module, f"environment {name!r}")
        if known not in gym.registry and hasattr(imported, known.partition(".")[0]):
            return _spec(name, resolve("envs", name, NO_BUILTINS))
        attributes = dir(imported)
    elif not module and name not in gym.registry:
        points = {point.name for point in entry_points(group="experiential.envs")}
        for point in (name, name.partition("/")[0]):
            if point in points:
                found = resolve("envs", point, NO_BUILTINS)
                if point == name and not isinstance(found, ModuleType):
                    return _spec(name, found)
    try:
        return gym.spec(known)
    except gym.error.Error as error:
        near = [*gym.registry, *known_names("envs"), *attributes]
        raise ConfigError(
            "Expected the id of a registered Gymnasium environment, an entry point of"
            " experiential.envs, module:Id-v0 or module:attribute, got"
            f" {name!r}{did_you_mean(known, near)}"
        ) from error


def _spec(name: str, creator: Any) -> EnvSpec:
    if not callable(creator):
        raise ConfigError(
            f"Expected {name!r} to be an environment class or a function that makes one, got"
            f" {type(creator).__name__}"
        )
    try:
        return EnvSpec(id=name, entry_point=cast("Creator", creator))
    except gym.error.Error as error:  # Gymnasium takes letters, digits and -_.:/ only
        raise ConfigError(str(error)) from error


def creator_of(spec: EnvSpec) -> Creator:
    """Return the class or function that makes an environment; its module is imported.

    Raise ConfigError if Gymnasium makes it in another way, ImportError if a package is missing.
    """
    point = spec.entry_point
    if point is None:
        raise ConfigError(f"Expected {spec.id} to have an entry point, got none")
    return cast("Creator", load_env_creator(point) if isinstance(point, str) else point)


def make(env_id: str, /, **arguments: Any) -> gym.Env[Any, Any]:
    """Make an environment without Gymnasium's checker, which rejects text of free length.

    ``preset="name"`` stands for the arguments that the class lists in its attribute ``presets``;
    other arguments win over them. A class whose constructor has an argument ``preset`` gets the
    name itself.

    Args:
        env_id: a name for ``resolve_env``, whose errors it raises.
        **arguments: those of ``gymnasium.make`` and of the environment.
    """
    spec = resolve_env(env_id)
    if "preset" in arguments:
        creator = creator_of(spec)
        presets: Mapping[str, Mapping[str, Any]] = getattr(creator, "presets", {})
        parameters = inspect.signature(creator).parameters
        if presets and "preset" not in parameters:
            preset: str = arguments.pop("preset")
            if preset not in presets:
                raise ConfigError(
                    f"Expected preset of {env_id} to be one of {', '.join(presets)}, got"
                    f" {preset!r}{did_you_mean(preset, presets)}"
                )
            arguments = {**presets[preset], **arguments}
    return cast("Any", gym).make(spec, disable_env_checker=True, **arguments)
