"""Look at what banks of Vault under a law say, and at what they show for vaults of other names.

    python -m benchmarks.law_banks RUN... [--results benchmarks/results/law_banks.json]

For each run: the share of entries that name the first and the second word of their own vault, and
its live lever; and the share of the dev vaults for which the entry shown has the vault's first
word, and names its live lever.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.envs.names import world_names
from experiential.envs.vault import law_lever

TASK = "Open the vault of "
RETRIEVAL = {"strategy": "evidence", "floor": 0.0, "tie": 0.001, "k": 1}
"""As in environment ``vault-law`` of `benchmarks.study`."""


def shares(pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Return how often a text has the first word, the second word and the lever of its vault."""
    found: list[list[bool]] = []
    for name, text in pairs:
        said = set(re.findall(r"\w+", text))
        first, second = name.split()
        found.append([word in said for word in (first, second, law_lever(first))])
    return np.mean(found, axis=0).round(3).tolist()


def look_at(run: Path) -> dict[str, float]:
    """Return the shares of one run's bank."""
    with FolderBank(run / "bank", read_only=True) as bank:
        own = [
            (entry.task.removeprefix(TASK).rstrip("."), entry.text)
            for entry in bank.entries()
            if entry.task
        ]
        with ExperienceManager(bank, free_share=0.0, retrieval=RETRIEVAL) as manager:
            shown = [
                (name, hit.experience.text)
                for name in world_names("dev")
                for hit in manager.search(f"{TASK}{name}.")
            ]
    names = ("first word", "second word", "live lever")
    return {
        "entries": len(own),
        **{f"own {name}": one for name, one in zip(names, shares(own), strict=True)},
        "shown": len(shown),
        **{f"shown {name}": one for name, one in zip(names, shares(shown), strict=True)},
    }


def main() -> None:
    """Look at every run, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    found = {run.name: look_at(run) for run in arguments.runs}
    for name, figures in found.items():
        print(name, json.dumps(figures))
    if arguments.results is not None:
        arguments.results.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
