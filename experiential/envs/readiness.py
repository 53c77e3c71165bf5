"""Say what each environment is and what it needs: the rows of `experiential envs list`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal

import gymnasium as gym

from experiential.envs.alfworld.games import default_folder
from experiential.envs.bfcl.source import default_folder as bfcl_folder
from experiential.envs.make import NO_BUILTINS, resolve_env
from experiential.errors import ConfigError
from experiential.plugins import known_names, resolve


@dataclass(frozen=True)
class Entry:
    """Describe one environment and what it needs.

    Args:
        about: a few words.
        modules: packages beyond the core that it imports.
        extra: the extra of `experiential-rl` that installs them.
        variable: environment variable that names data.
        data_step: the step that gets the data; a command if there is one.
        data_needed: False where data only replace what is made from a seed.
        folder: finds the data where the environment does; by default the variable names it.
        costly: why `experiential envs show` does not start it; empty if it does.
        fallback: what it plays without data: ``generated``, where it is a generator; ``made``,
            invented in the place of real data; ``bundled``; ``foreign``: not known.
    """

    about: str
    modules: tuple[str, ...] = ()
    extra: str = ""
    variable: str = ""
    data_step: str = ""
    data_needed: bool = False
    folder: Callable[[], str | None] | None = None
    costly: str = ""
    fallback: Literal["generated", "made", "bundled", "foreign"] = "generated"

    def missing(self) -> list[str]:
        """Return the commands and steps that are still needed; empty when it is ready."""
        steps: list[str] = []
        if any(find_spec(name) is None for name in self.modules):
            steps.append(f"pip install 'experiential-rl[{self.extra}]'")
        if self.data_needed and not self.has_data():
            steps.append(self.data_step)
        return steps

    def has_data(self) -> bool:
        """Return whether there is a file or folder where the environment looks for data."""
        path = self.folder() if self.folder else os.environ.get(self.variable)
        return bool(path) and Path(path).exists()

    def optional(self) -> str:
        """Return the step to real data that the environment can do without; empty if it is done."""
        return "" if self.data_needed or self.has_data() else self.data_step


READINESS: dict[str, Entry] = {
    "experiential/ALFWorld-v0": Entry(
        "household tasks in words; generated games without data",
        modules=("alfworld", "textworld"),
        extra="alfworld",
        variable="ALFWORLD_DATA",
        data_step="export ALFWORLD_DATA=FOLDER && alfworld-download",
        folder=default_folder,
        fallback="made",
    ),
    "experiential/BFCL-v0": Entry(
        "a user's requests over several turns, served by calls of simulated APIs",
        variable="BFCL_DATA",
        data_step="pip install --no-deps bfcl-eval mpmath",
        data_needed=True,
        folder=bfcl_folder,
    ),
    "experiential/BabyAI-v0": Entry(
        "missions in a grid of rooms, any level of BabyAI, in BabyAI-Text's sentences",
        modules=("minigrid", "pygame"),
        extra="babyai",
    ),
    "experiential/FrozenLake-v0": Entry(
        "grid with holes and abstract symbols (Experiential RL), or Gymnasium's 4x4 and 8x8"
    ),
    "experiential/HotpotQA-v0": Entry(
        "multi-hop questions over a pool of paragraphs; an invented world without data",
        variable="HOTPOTQA_DATA",
        data_step="export HOTPOTQA_DATA=FILE (HotpotQA, 2WikiMultihopQA or MuSiQue)",
        fallback="made",
    ),
    "experiential/MiniHack-v0": Entry(
        "any level of MiniHack in words",
        modules=("minihack", "nle", "pkg_resources"),
        extra="minihack",
    ),
    "experiential/SWE-v0": Entry(
        "repair of real Python projects with three tools",
        variable="SWE_TASKS",
        data_step="export SWE_TASKS=FILE (JSON Lines with SWE-bench's fields)",
        costly="its first reset builds a virtual environment for the task",
        fallback="bundled",
    ),
    "experiential/Sokoban-v0": Entry("boxes on a text grid, one or several"),
    "experiential/Vault-v0": Entry("a lever that only experience can know"),
    "experiential/WebShop-v0": Entry(
        "shopping by search, options and price; an invented catalogue without data",
        modules=("thefuzz", "snowballstemmer"),
        extra="webshop",
        variable="WEBSHOP_DATA",
        data_step="export WEBSHOP_DATA=FOLDER (WebShop's product and instruction files)",
        fallback="made",
    ),
}
"""Environment id to row; one for each id of ``ENVS``."""


def readiness(env_id: str) -> Entry:
    """Return the row of an environment by a name for ``resolve_env``; foreign ones need nothing."""
    if env_id in READINESS:
        return READINESS[env_id]
    spec = resolve_env(env_id)
    if spec.id in READINESS:
        return READINESS[spec.id]
    about = ""
    if not isinstance(spec.entry_point, str):  # a string would have to be imported first
        about = (inspect.getdoc(spec.entry_point) or "").partition("\n")[0].removesuffix(".")
    return Entry(about or "an environment from outside this package", fallback="foreign")


def rows() -> list[dict[str, str | bool]]:
    """Return one row for each environment of this package and of installed packages."""
    found = [  # id, about, what is to do, the step to real data
        (name, entry.about, " && ".join(entry.missing()), entry.optional())
        for name, entry in sorted(READINESS.items())
    ]
    for name in known_names("envs"):
        try:
            part, ids = resolve("envs", name, NO_BUILTINS), [name]
            if isinstance(part, ModuleType):
                ids = sorted(i for i in gym.registry if i.partition("/")[0] == name)
            found += [(i, readiness(i).about, "", "") for i in ids]
        except ConfigError as error:  # one broken package must not hide the others
            found.append((name, "", str(error), ""))
    return [
        {"id": name, "ready": not to_do, "about": about, "to_do": to_do, "for_real_data": real}
        for name, about, to_do, real in found
    ]
