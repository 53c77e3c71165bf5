"""Measure how much an entry's task must count beside its text for a task query to find it.

    python -m benchmarks.task_weight

Lessons that name a world at random stand under 104 Vault tasks; for each of 40 held-out tasks the
output says how often the nearest entry is the task's own, and where the cosines of own and other
entries lie, by the weight of the task.
"""

from __future__ import annotations

import random
import sys

import numpy as np

import experiential  # noqa: F401  (registers the environments)
from experiential.bank.index.embed import normalise, resolve_embedder
from experiential.envs.vault import LEVERS, VaultEnv


def main() -> None:
    """Print one line per weight."""
    rng, embed = random.Random(0), resolve_embedder(None)
    names = [*VaultEnv(split="dev", worlds=40).names, *VaultEnv(split="train", worlds=64).names]
    tasks = np.asarray(embed([f"Open the vault of {name}." for name in names]))
    texts = np.asarray(embed([f"{rng.choice(names)}: pull {rng.choice(LEVERS)}." for _ in names]))
    for weight in (0, 1, 2, 3):
        cosines = tasks[:40] @ normalise(weight * tasks + texts).T
        own = cosines[np.arange(40), np.arange(40)]
        other = np.where(np.eye(40, len(names), dtype=bool), -1.0, cosines).max(axis=1)
        found = (
            f"own first {np.mean(own > other):.0%}, own {own.min():.2f} to {own.max():.2f}, nearest"
            f" other {other.max():.2f} at most"
        )
        sys.stdout.write(f"weight {weight}: {found}\n")


if __name__ == "__main__":
    main()
