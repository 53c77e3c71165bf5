"""Write a small package with an environment, a recipe and a test, to be changed into one's own."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from experiential.errors import ConfigError

PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "NAME"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["experiential-rl[local]"]

[project.entry-points."experiential.envs"]
PACKAGE = "PACKAGE"  # its import registers PACKAGE/Rooms-v0
"""

ENV = '''"""Rooms with one open door, whose colour only those know who were there before."""

from __future__ import annotations

from typing import Any

from experiential.envs.text_env import TextEnv

ROOMS = ("attic", "cellar", "garden", "kitchen", "library", "parlour")
COLOURS = ("red", "green", "blue", "white")
Info = dict[str, Any]


class RoomsEnv(TextEnv):
    """Leave a room in two tries; after the last one the way out is told.

    Each room is a world that comes again. `info` says what is asked (`task`), which actions there
    are (`admissible`; leave it out where they cannot be listed) and how it went (`success`).
    """

    def __init__(self) -> None:
        super().__init__(worlds=len(ROOMS))

    @property
    def task(self) -> str:
        return f"Leave the {self.room}."

    def _begin(self, world: int) -> tuple[str, Info]:
        self.room, self.door, self.tries = ROOMS[world], COLOURS[world % len(COLOURS)], 0
        return f"You are in the {self.room}. Which door?", self._told()

    def _turn(self, action: str) -> tuple[str, float, bool, bool, Info]:
        colour = action.strip().lower()
        self.tries += 1
        won = colour == self.door
        over = won or self.tries == 2
        text = "You are out." if won else "That door is locked."
        if over and not won:
            text += f" The way out of the {self.room} is the {self.door} door."
        return text, float(won), over, False, self._told(won, colour not in COLOURS)

    def _told(self, won: bool = False, invalid: bool = False) -> Info:
        # What was learned in this very game is hidden from it, so the seed is part of its name.
        instance = f"{self.room}#{self._reset_seed}"
        feedback = f"Say one of {', '.join(COLOURS)}." if invalid else ""
        return self._report(
            self.room, feedback, success=won, invalid=invalid, admissible=COLOURS, instance=instance
        )
'''

INIT = '''"""Register the environment; `env.id: PACKAGE:PACKAGE/Rooms-v0` imports this."""

import gymnasium as gym

gym.register("PACKAGE/Rooms-v0", entry_point="PACKAGE.env:RoomsEnv")
'''

RECIPE = """# How my environment is trained. `experiential recipes` lists methods and profiles.
extends: [complementary, tiny]
env:
  id: PACKAGE:PACKAGE/Rooms-v0
  max_turns: 4
run: {steps: 10}
eval: {worlds: 8, visits: 2}
"""

TEST = '''"""The environment keeps to what training expects of it."""

from pathlib import Path

import experiential as xp
from PACKAGE.env import RoomsEnv

RECIPE = Path(__file__).parent.parent / "recipe.yaml"


def test_the_environment_keeps_the_contract() -> None:
    assert xp.check_text_env(RoomsEnv()) == []


def test_the_open_door_leads_out() -> None:
    env = RoomsEnv()
    env.reset(seed=0)
    assert env.step(env.door)[4]["success"]


def test_the_recipe_is_about_this_environment() -> None:
    assert xp.load_experiment(RECIPE).env.id.startswith("PACKAGE:")
'''

README = """# NAME

    pip install --editable .          # or run everything in this folder
    python -m pytest
    experiential-train --recipe recipe.yaml --output runs/first

`PACKAGE/env.py` is the environment, `recipe.yaml` says how it is trained. The model tiny only shows
that everything runs, since it was made for the bundled games: `extends: [complementary, small]`
takes SmolLM2, and `model.name` any other.
"""


def init(
    name: Annotated[str, Argument(help="Name of the package, and of the folder to make.")],
) -> None:
    """Write a package with a text environment, a recipe and a test, to change into your own."""
    folder = Path(name)
    package = re.sub(r"[-. ]+", "_", folder.name).lower()
    if not package.isidentifier() or keyword.iskeyword(package):
        raise ConfigError(
            f"Expected a name that can be a Python package, got {folder.name!r}; use letters,"
            " digits, - and _, as in my-env"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"Expected {folder} to be absent or empty, got files; choose another")
    files = {
        "pyproject.toml": PROJECT,
        "README.md": README,
        "recipe.yaml": RECIPE,
        f"{package}/__init__.py": INIT,
        f"{package}/env.py": ENV,
        f"tests/test_{package}.py": TEST,
    }
    for place, text in files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("PACKAGE", package).replace("NAME", folder.name), "utf-8")
        typer.echo(f"wrote {path}")
    typer.echo(f"next: cd {folder} && experiential-train --recipe recipe.yaml")
