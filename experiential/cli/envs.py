"""Run `experiential envs`: list, show and check environments."""

from __future__ import annotations

import difflib
import inspect
import sys
from typing import Annotated, Any

import typer
from typer import Argument

from experiential.cli.errors import new_app
from experiential.cli.options import AsJson
from experiential.cli.rows import show_json, show_rows
from experiential.errors import ConfigError
from experiential.llm.base import read_options

Name = Annotated[
    str,
    Argument(
        help="An id (ours also without experiential/ and version), the name of an entry point of"
        " experiential.envs, module:Id-v0, or module:attribute."
    ),
]
Arguments = Annotated[
    list[str] | None, Argument(help="Arguments of the environment, as key=value in YAML.")
]

app = new_app("List the environments, what they need, and what they look like.")


@app.callback(invoke_without_command=True)
def envs(context: typer.Context, as_json: AsJson = False) -> None:
    """List the environments, what they need, and what they look like; without a command: list."""
    if context.invoked_subcommand is None:
        list_(as_json)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the environments, their readiness, and the command that enables each."""
    from experiential.envs import ENVS
    from experiential.envs.readiness import rows

    found = rows()
    if as_json:
        show_json([row | {"entry_point": ENVS.get(str(row["id"]), "")} for row in found])
        return
    width = max(len(str(row["id"])) for row in found)
    for row in found:
        state = "ready  " if row["ready"] else "missing"
        sys.stdout.write(f"{row['id']:{width}}  {state}  {row['about']}\n")
        for label, to_do in (("run", row["to_do"]), ("for real data", row["for_real_data"])):
            if to_do:
                sys.stdout.write(f"{'':{width}}  {label}: {to_do}\n")


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show an environment's description, arguments, presets and first observation."""
    from experiential.envs.make import creator_of, make, resolve_env
    from experiential.envs.readiness import readiness

    env_id = full_id(name)
    entry, creator = readiness(env_id), creator_of(resolve_env(env_id))
    missing = entry.missing()
    presets: dict[str, dict[str, Any]] = dict(getattr(creator, "presets", {}))
    parameters = inspect.signature(creator).parameters.values()
    arguments = [
        {"argument": one.name, "type": str(one.annotation), "default": repr(one.default)}
        for one in parameters
    ]
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    observation = f"({entry.costly}, so it is not started here)" if entry.costly else ""
    if needed:
        observation = f"(it needs {', '.join(needed)}, so it is not started here)"
    elif not missing and not entry.costly:
        env = make(env_id)
        observation = str(env.reset(seed=0)[0])
        env.close()
    if as_json:
        found: dict[str, Any] = {"id": env_id, "about": entry.about, "to_do": " && ".join(missing)}
        found |= {"for_real_data": entry.optional(), "arguments": arguments, "presets": presets}
        show_json(found | {"observation": observation})
        return
    sys.stdout.write(f"{env_id}: {entry.about}\n\n")
    show_rows(arguments, as_json)
    for preset, values in presets.items():
        pairs = ", ".join(f"{key}={value!r}" for key, value in values.items())
        sys.stdout.write(f" preset={preset!r}: {pairs}\n")
    to_do = f"Run first: {' && '.join(missing)}" if missing else observation
    sys.stdout.write(f"\n{to_do}\n")


@app.command()
def check(name: Name, arguments: Arguments = None, seed: int = 0, as_json: AsJson = False) -> None:
    """Check that wrappers, training and suites can use an environment; exit code 1 if not."""
    from experiential.envs import check_text_env
    from experiential.envs.make import make

    given, env_id = read_options(arguments or ()), full_id(name)
    try:
        env = make(env_id, **given)
    except TypeError as error:
        raise ConfigError(f"Expected arguments of {env_id!r}, got {given}: {error}") from error
    try:
        faults = check_text_env(env, seed=seed)
    finally:
        env.close()
    if as_json:
        show_json(faults)
    else:
        sys.stdout.write("\n".join(faults) + "\n" if faults else f"{env_id}: nothing to mend\n")
    if faults:
        raise typer.Exit(1)


def full_id(name: str) -> str:
    """Return the full id of an environment of this package, or another name unchanged."""
    from experiential.envs import ENVS
    from experiential.envs.make import resolve_env

    short = {known.partition("/")[2].rpartition("-v")[0].lower(): known for known in ENVS}
    wanted = name.lower().removeprefix("experiential/").partition("-v")[0]
    if wanted in short:
        return short[wanted]
    try:
        resolve_env(name)
    except ConfigError:
        if near := difflib.get_close_matches(wanted, short, 1):
            raise ConfigError(
                f"Expected one of {', '.join(sorted(ENVS))}, got {name!r}; did you mean {near[0]}?"
            ) from None
        raise
    return name
