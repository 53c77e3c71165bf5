"""Worlds that change while training runs: does the bank follow faster than the weights?

    python -m benchmarks.adaptation [--output runs/adaptation] [--seeds 3] [--results benchmarks/results/adaptation]

Each run trains `complementary` on few worlds for long enough that the weights can learn them by heart, then half of the
worlds get another live lever. For the changed worlds, success of guided and of free episodes is reported by the number
of visits since the change.
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

WORLDS, CHANGED, CHANGE_STEP, STEPS = 8, 4, 40, 60


def train(folder: Path, seed: int) -> None:
    """One training run with a change of worlds."""
    command = [
        sys.executable, "-m", "experiential.cli.train", "--recipe", "complementary", "--plain", "--overwrite", "--seed", str(seed),
        "--output", str(folder), f"run.steps={STEPS}", "run.minutes=null", "eval.before=false", "eval.after=false",
        f"env.train={{split: train, worlds: {WORLDS}}}",
        f"env.changes=[{{step: {CHANGE_STEP}, worlds: {WORLDS}, changed: {CHANGED}, era: 1}}]",
    ]  # fmt: skip
    sys.stdout.write(shlex.join(command) + "\n")
    sys.stdout.flush()
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)


def by_visit(folder: Path) -> dict[str, list[float]]:
    """Mean success on the changed worlds by visits since the change (0 is the step before it), per condition."""
    steps: list[dict[str, list[float]]] = []
    changed: set[str] = set()
    records = [json.loads(line) for line in (folder / "episodes.jsonl").read_text(encoding="utf-8").splitlines()]
    for record in records:
        if record["step"] > CHANGE_STEP:
            changed |= {row["task_id"] for row in record["rows"] if "-1#" in row["instance"]}
    for record in records:
        if record["step"] >= CHANGE_STEP:
            cells: dict[str, list[float]] = defaultdict(list)
            for row in record["rows"]:
                if row["task_id"] in changed and row["error"] is None:
                    cells[row["condition"]].append(float(row["success"]))
            steps.append(cells)
    return {condition: [float(np.mean(s[condition])) for s in steps if s[condition]] for condition in ("guided", "free")}


def report(runs: list[dict[str, list[float]]], results: Path) -> None:
    """Write the curves as JSON and as a plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    length = min(len(curve) for run in runs for curve in run.values())
    table = {c: np.array([run[c][:length] for run in runs]) for c in ("guided", "free")}
    results.mkdir(parents=True, exist_ok=True)
    summary = {c: {"mean": values.mean(axis=0).round(3).tolist(), "seeds": len(values)} for c, values in table.items()}
    (results / "curves.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    figure, axis = pyplot.subplots(figsize=(6, 4))
    for condition, values in table.items():
        axis.plot(range(length), values.mean(axis=0), marker="o", ms=3, label=f"{condition} episodes")
        axis.fill_between(range(length), values.min(axis=0), values.max(axis=0), alpha=0.15)
    axis.set(xlabel="visits to a world since its lever changed", ylabel="success on the changed worlds", ylim=(0, 1))
    axis.legend()
    figure.tight_layout()
    figure.savefig(results / "curves.png", dpi=130)
    sys.stdout.write(json.dumps(summary) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/adaptation"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/adaptation"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    folders = [options.output / f"seed-{seed}" for seed in range(options.seeds)]
    for seed, folder in enumerate(folders):
        train(folder, seed)
    report([by_visit(folder) for folder in folders], options.results)


if __name__ == "__main__":
    main()
