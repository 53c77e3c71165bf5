"""Train SmolLM2-135M to read a bank of raw records on Vault; compare it with its frozen start.

    python -m benchmarks.smollm2_reader bank runs/records
    experiential-train --recipe benchmarks/smollm2_reader.yaml bank.path=runs/records
    python -m benchmarks.smollm2_reader table

``bank`` writes one entry for each of the 160 training vaults: the last answer of an episode played
at random, which names the live lever among two others. No model writes it. ``table`` prints the
committed outcomes: success on later visits of evaluation vaults, with 95 % intervals, and trained
minus frozen start paired by vault. There the entries are written between visits, by the untrained
model itself or by the function ``template``.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from experiential.bank.folder import FolderBank
from experiential.envs import random_agent
from experiential.envs.make import make
from experiential.evaluation.intervals import GAIN, RATE, clustered_mean, paired_difference
from experiential.evaluation.page import show_percent, show_points
from experiential.evaluation.visits import later

RESULTS = Path("benchmarks/results/smollm2_reader.json")
WORLDS = 160


def write_bank(folder: Path) -> None:
    """Write the last answer of one random episode in each training vault."""
    env = make("experiential/Vault-v0", split="train", worlds=WORLDS)
    with FolderBank(folder) as bank, closing(env):
        for world in range(WORLDS):
            act = random_agent(env, world)
            observation, info = env.reset(seed=world, options={"world": world})
            done = False
            while not done:
                observation, _, terminated, truncated, info = env.step(act(observation, info))
                done = terminated or truncated
            bank.add(info["feedback"], task=info["task"])


def print_table() -> None:
    """Print the committed outcomes of ``RESULTS``."""
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    print("| Entries | start | trained | trained - start, points |\n|---|---|---|---|")
    for name, arms in found["outcomes"].items():
        seeds = list(arms["trained"].values()) if isinstance(arms["trained"], dict) else None
        trained = np.array(seeds or [arms["trained"]])  # seeds, vaults, visits
        start = np.array(arms["start"])[:, : trained.shape[2]]
        rates = later(start)[None], np.array([later(one) for one in trained])
        shown = [show_percent(clustered_mean(one, bounds=RATE)) for one in rates]
        gain = (
            clustered_mean(rates[1] - rates[0], bounds=GAIN)
            if seeds
            else paired_difference(rates[1][0], rates[0][0])
        )
        each = f" ({', '.join(f'{100 * one.mean():.0f}' for one in rates[1])})" if seeds else ""
        print(f"| {name} | {shown[0]} | {shown[1]}{each} | {show_points(gain)} |")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bank").add_argument("folder", type=Path)
    commands.add_parser("table")
    options = parser.parse_args()
    if options.command == "bank":
        write_bank(options.folder)
    else:
        print_table()


if __name__ == "__main__":
    main()
