"""What each environment is, and what it needs before it can be made: rows of `experiential envs list`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from experiential.envs.alfworld.games import default_folder


@dataclass(frozen=True)
class Entry:
    """One environment's row.

    Args:
        about: what it is, in a few words.
        modules: packages beyond the core that it imports.
        extra: the extra of `experiential-rl` that installs them.
        variable: environment variable that names data.
        data_step: what to do to get that data; a command where there is one.
        data_needed: whether it cannot be made without the data; otherwise the data only replaces
            what is made from a seed.
        folder: where the environment itself looks for data, if that is more than the variable.
        costly: why `experiential envs show` does not start it; empty where a first observation is
            cheap.
    """

    about: str
    modules: tuple[str, ...] = ()
    extra: str = ""
    variable: str = ""
    data_step: str = ""
    data_needed: bool = False
    folder: Callable[[], str | None] | None = None
    costly: str = ""

    def missing(self) -> list[str]:
        """Commands and steps without which the environment cannot be made; empty when it is ready."""
        install = (
            [f"pip install 'experiential-rl[{self.extra}]'"]
            if any(find_spec(name) is None for name in self.modules)
            else []
        )
        return install + ([self.data_step] if self.data_needed and not self.has_data() else [])

    def has_data(self) -> bool:
        """Whether there is a file or folder of data where the environment looks for it: where the variable says, if nothing else."""
        path = (
            self.folder()
            if self.folder
            else os.environ.get(self.variable, "")
            if self.variable
            else ""
        )
        return bool(path) and Path(path).exists()

    def optional(self) -> str:
        """The step to real data, where the environment is ready without; empty when there is none or it is there."""
        return (
            self.data_step
            if self.data_step and not self.data_needed and not self.has_data()
            else ""
        )


READINESS: dict[str, Entry] = {
    "experiential/ALFWorld-v0": Entry(
        "household tasks in words; generated games without data",
        modules=("alfworld", "textworld"),
        extra="alfworld",
        variable="ALFWORLD_DATA",
        data_step="export ALFWORLD_DATA=FOLDER && alfworld-download",
        folder=default_folder,
    ),
    "experiential/FrozenLake-v0": Entry(
        "grid with holes and abstract symbols (Experiential RL), or Gymnasium's 4x4 and 8x8"
    ),
    "experiential/HotpotQA-v0": Entry(
        "multi-hop questions over a pool of paragraphs; an invented world without data",
        variable="HOTPOTQA_DATA",
        data_step="export HOTPOTQA_DATA=FILE (HotpotQA, 2WikiMultihopQA or MuSiQue)",
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
    ),
    "experiential/Sokoban-v0": Entry("boxes on a text grid, one or several"),
    "experiential/Vault-v0": Entry("a lever that only experience can know"),
    "experiential/WebShop-v0": Entry(
        "shopping by search, options and price; an invented catalogue without data",
        modules=("thefuzz", "snowballstemmer"),
        extra="webshop",
        variable="WEBSHOP_DATA",
        data_step="export WEBSHOP_DATA=FOLDER (WebShop's product and instruction files)",
    ),
}
"""Environment id to row; one for each id of ``ENVS``."""


def rows() -> list[dict[str, str | bool]]:
    """All environments: id, whether it is ready, what it is, what would make it ready, and what would give it real data."""
    return [
        {
            "id": name,
            "ready": not entry.missing(),
            "about": entry.about,
            "to_do": " && ".join(entry.missing()),
            "for_real_data": entry.optional(),
        }
        for name, entry in sorted(READINESS.items())
    ]
