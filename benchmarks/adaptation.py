"""Worlds that change while training runs: does the bank follow faster than the weights?

    python -m benchmarks.adaptation [--worlds 160] [--output runs/adaptation] [--seeds 3] [--results
    benchmarks/results/adaptation]

Each run trains `complementary` for 40 steps; then eight of the worlds get another live lever, and
only they are met, in every step. Success of guided and of free episodes is reported by the number
of visits since the change. With many worlds before the change the actor has learnt to rely on
advice; with ``--worlds 8`` it has learnt those eight by heart.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

CHANGED, CHANGE_STEP, STEPS = 8, 40, 60


def train(folder: Path, seed: int, worlds: int) -> None:
    """Train one run in which the worlds change."""
    command = [
        sys.executable, "-m", "experiential.cli.train", "--recipe", "complementary", "--plain",
        "--overwrite", "--seed", str(seed), "--output", str(folder), f"run.steps={STEPS}",
        "run.minutes=null", "eval.before=false", "eval.after=false",
        f"env.train={{split: train, worlds: {worlds}}}", "run.checkpoint_every=0",
        f"env.changes=[{{step: {CHANGE_STEP}, worlds: {CHANGED}, changed: {CHANGED}, era: 1}}]",
    ]  # fmt: skip
    sys.stdout.write(shlex.join(command) + "\n")
    sys.stdout.flush()
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)


def by_visit(folder: Path) -> dict[str, list[float]]:
    """Return mean success on the changed worlds, by condition and visits since the change.

    The first visit comes first.
    """
    steps: list[dict[str, list[float]]] = []
    records = [
        json.loads(line)
        for line in (folder / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for record in records:
        cells: dict[str, list[float]] = defaultdict(list)
        for row in record["rows"]:
            if "-1#" in row["instance"] and row["error"] is None:
                cells[row["condition"]].append(float(row["success"]))
        if cells:
            steps.append(cells)
    return {
        condition: [float(np.mean(s[condition])) for s in steps] for condition in ("guided", "free")
    }


def report(runs: list[dict[str, list[float]]], results: Path) -> None:
    """Write the curves as JSON and as a plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    length = min(len(curve) for run in runs for curve in run.values())
    table = {c: np.array([run[c][:length] for run in runs]) for c in ("guided", "free")}
    results.mkdir(parents=True, exist_ok=True)
    summary = {
        c: {"mean": values.mean(axis=0).round(3).tolist(), "seeds": len(values)}
        for c, values in table.items()
    }
    (results / "curves.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    figure, axis = pyplot.subplots(figsize=(6, 4))
    for condition, values in table.items():
        axis.plot(
            range(1, length + 1),
            values.mean(axis=0),
            marker="o",
            ms=3,
            label=f"{condition} episodes",
        )
        axis.fill_between(range(1, length + 1), values.min(axis=0), values.max(axis=0), alpha=0.15)
    axis.set(
        xlabel="visits to a world since its lever changed",
        ylabel="success on the changed worlds",
        ylim=(0, 1),
    )
    axis.legend()
    figure.tight_layout()
    figure.savefig(results / "curves.png", dpi=130)
    sys.stdout.write(json.dumps(summary) + "\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/adaptation"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/adaptation"))
    parser.add_argument("--worlds", type=int, default=160)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    folders = [options.output / f"seed-{seed}" for seed in range(options.seeds)]
    for seed, folder in enumerate(folders):
        train(folder, seed, options.worlds)
    report([by_visit(folder) for folder in folders], options.results)


if __name__ == "__main__":
    main()
