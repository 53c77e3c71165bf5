"""`experiential envs`: what can be played now, and what one command would make it so."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from experiential.cli.errors import new_app
from experiential.cli.rows import AsJson, show_json, show_rows
from experiential.errors import ConfigError

Name = Annotated[str, typer.Argument(help="An id, whole or without experiential/ and version.")]

app = new_app("List the environments, what they need, and what they look like.")


@app.callback(invoke_without_command=True)
def envs(context: typer.Context, as_json: AsJson = False) -> None:
    """List the environments, what they need, and what they look like; without a command the same as `list`."""
    if context.invoked_subcommand is None:
        list_(as_json)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the environments: what each is, whether it is ready, and the command or step that would make it so."""
    from experiential.envs import ENVS
    from experiential.envs.readiness import rows

    found = rows()
    if as_json:
        show_json([row | {"entry_point": ENVS.get(str(row["id"]), "")} for row in found])
        return
    width = max(len(str(row["id"])) for row in found)
    for row in found:
        lines = [f"{row['id']:{width}}  {'ready  ' if row['ready'] else 'missing'}  {row['about']}"]
        lines += [f"{'':{width}}  run: {row['to_do']}"] if row["to_do"] else []
        lines += (
            [f"{'':{width}}  for real data: {row['for_real_data']}"] if row["for_real_data"] else []
        )
        sys.stdout.write("\n".join(lines) + "\n")


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show what an environment is, its arguments, and its first observation under seed 0."""
    env_id = full_id(name)
    found = described(env_id)
    if as_json:
        show_json(found)
        return
    sys.stdout.write(f"{env_id}: {found['about']}\n\n")
    show_rows(found["arguments"], as_json)
    sys.stdout.write(
        f"\n{'Run first: ' + found['to_do'] if found['to_do'] else found['observation']}\n"
    )


def full_id(name: str) -> str:
    """The id that ``name`` means: whole, without the part before the slash, or also without version, whatever the case.

    Raises:
        ConfigError: there is none.
    """
    from experiential.envs import ENVS

    short = {known.partition("/")[2].rpartition("-v")[0].lower(): known for known in ENVS}
    wanted = name.lower().removeprefix("experiential/").partition("-v")[0]
    if wanted in short:
        return short[wanted]
    near = difflib.get_close_matches(wanted, short, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"Expected one of {', '.join(sorted(ENVS))}, got {name!r}{hint}")


def described(env_id: str) -> dict[str, Any]:
    """What an environment is, its arguments with defaults, and its first observation, or what to do before it can give one."""
    from experiential.envs.make import make
    from experiential.envs.readiness import READINESS

    entry = READINESS[env_id]
    missing = entry.missing()
    about = {
        "id": env_id,
        "about": entry.about,
        "to_do": " && ".join(missing),
        "for_real_data": entry.optional(),
    }
    observation = f"({entry.costly}, so it is not started here)" if entry.costly else ""
    if not missing and not entry.costly:
        env = make(env_id)
        observation = str(env.reset(seed=0)[0])
        env.close()
    return about | {"arguments": arguments(env_id), "observation": observation}


def arguments(env_id: str) -> list[Mapping[str, str]]:
    """Arguments of an environment's constructor: name, type as written, default."""
    from gymnasium.envs.registration import load_env_creator

    from experiential.envs import ENVS

    given = inspect.signature(load_env_creator(ENVS[env_id])).parameters.values()
    return [
        {"argument": one.name, "type": str(one.annotation), "default": repr(one.default)}
        for one in given
    ]
