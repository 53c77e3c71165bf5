"""The recipes compared: training seeds x recipes x environments, paired evaluation seeds, one table and one plot.

    python -m benchmarks.study run   --output runs/study [--seeds 5] [--jobs 2]     # resumable; skips what is done
    python -m benchmarks.study table --output runs/study --results benchmarks/results/study

Every run is one `experiential-train` command, printed before it starts.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

RECIPES = ("grpo", "static-online", "exp-only", "complementary")
ENVIRONMENTS: dict[str, list[str]] = {
    "vault": ["run.steps=72", "eval.every=12"],
    "frozen-lake": [
        "env.id=experiential/FrozenLake-v0", "env.max_turns=8", "env.kwargs={sizes: [2, 4]}",
        "env.train={split: train, layouts: 10000}",
        "env.eval={split: eval, layouts: 40}", "actor.history=0", "actor.keep_first=false", "run.steps=40", "eval.every=10",
        "eval.visits=3", "bank.retrieval.floor=0.0",
    ],
}  # fmt: skip
TARGETS = (0.5, 0.8)


def commands(output: Path, seeds: int) -> Iterator[tuple[Path, list[str]]]:
    """Folder and command of every run."""
    for environment, overrides in ENVIRONMENTS.items():
        for seed in range(seeds):
            for recipe in RECIPES:
                folder = output / environment / recipe / f"seed-{seed}"
                yield folder, [
                    sys.executable, "-m", "experiential.cli.train", "--recipe", recipe, "--plain", "--overwrite", "--seed", str(seed),
                    "--output", str(folder), "eval.seed=10000", "run.checkpoint_every=0", "run.minutes=null", *overrides,
                ]  # fmt: skip


def run(output: Path, seeds: int, jobs: int) -> None:
    """Run what is not done yet, ``jobs`` at a time, each on its share of the cores."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environ = os.environ | {"OMP_NUM_THREADS": str(threads)}

    def one(work: tuple[Path, list[str]]) -> None:
        folder, command = work
        if (folder / "done").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        sys.stdout.write(shlex.join(command) + "\n")
        sys.stdout.flush()
        with (folder / "log.txt").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environ, check=False).returncode
        if code == 0:
            (folder / "done").touch()
        else:
            sys.stdout.write(f"exit code {code}: see {folder / 'log.txt'}\n")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, commands(output, seeds)))


def events(folder: Path) -> list[dict[str, Any]]:
    """The metrics of one run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def curve(records: list[dict[str, Any]], arm: str) -> list[tuple[int, float]]:
    """(training episodes, success on visits after the first) of every evaluation of one arm."""
    episodes = {0: 0}
    for record in records:
        if record["event"] == "step":
            episodes[record["step"]] = episodes.get(record["step"] - 1, 0) + record["episodes"]
    points = [r for r in records if r["event"] == "eval" and r["arm"] == arm]
    return [(episodes.get(p["step"], 0), float(np.array(p["outcomes"])[:, 1:].mean())) for p in points]


def episodes_to_target(points: list[tuple[int, float]], target: float) -> int | None:
    """Training episodes at the first evaluation that reached the target."""
    return next((n for n, success in points if success >= target), None)


def summarise(output: Path) -> list[dict[str, Any]]:
    """One row per environment, recipe and arm: mean over training seeds with a 95 % bootstrap interval."""
    rows: list[dict[str, Any]] = []
    for environment in ENVIRONMENTS:
        for recipe in RECIPES:
            done = sorted(p.parent for p in (output / environment / recipe).glob("seed-*/done"))
            runs = [events(folder) for folder in done]
            for arm in ("bank", "free"):
                curves = [c for c in (curve(r, arm) for r in runs) if c]
                if curves:
                    rows.append({"environment": environment, "recipe": recipe, "arm": arm} | _statistics(curves))
    return rows


def _statistics(curves: list[list[tuple[int, float]]]) -> dict[str, Any]:
    finals = np.array([c[-1][1] for c in curves])
    picks = np.random.default_rng(0).integers(len(finals), size=(10_000, len(finals)))
    low, high = np.quantile(finals[picks].mean(axis=1), (0.025, 0.975))
    row: dict[str, Any] = {
        "seeds": len(curves), "before": float(np.mean([c[0][1] for c in curves])), "after": float(finals.mean()), "low": float(low),
        "high": float(high),
    }  # fmt: skip
    for target in TARGETS:
        hit = [n for n in (episodes_to_target(c, target) for c in curves) if n is not None]
        row |= {f"reached_{100 * target:.0f}": len(hit), f"episodes_to_{100 * target:.0f}": float(np.median(hit)) if hit else None}
    return row


def plot(output: Path, target: Path) -> None:
    """Held-out success on later visits against training episodes, a panel per environment."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(ENVIRONMENTS), figsize=(6 * len(ENVIRONMENTS), 4), squeeze=False)
    for axis, environment in zip(axes[0], ENVIRONMENTS, strict=True):
        for index, recipe in enumerate(RECIPES):
            runs = [events(p.parent) for p in sorted((output / environment / recipe).glob("seed-*/done"))]
            for arm, style in (("bank", "-"), ("free", ":")):
                curves = [c for c in (curve(r, arm) for r in runs) if c]
                if not curves:
                    continue
                length = min(map(len, curves))
                values = np.array([[s for _, s in c[:length]] for c in curves])
                x = [n for n, _ in curves[0][:length]]
                name = f"{recipe}, {'with' if arm == 'bank' else 'without'} the bank"
                axis.plot(x, values.mean(axis=0), style, color=f"C{index}", label=name)
                axis.fill_between(x, values.min(axis=0), values.max(axis=0), color=f"C{index}", alpha=0.12)
        axis.set(title=environment, xlabel="training episodes", ylabel="held-out success, visits 2+", ylim=(0, 1))
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def table(output: Path, results: Path) -> None:
    """Write the table as CSV and Markdown, and the plot."""
    rows = summarise(output)
    results.mkdir(parents=True, exist_ok=True)
    with (results / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    targets = [f"{100 * target:.0f}" for target in TARGETS]
    names = ["environment", "recipe", "bank at test", "before", "after (95 % over seeds)"]
    names += [f"episodes to {target} % (seeds that got there)" for target in targets]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for r in rows:
        cells = [r["environment"], r["recipe"], "with" if r["arm"] == "bank" else "without", f"{r['before']:.3f}"]
        cells.append(f"{r['after']:.3f} [{r['low']:.3f}, {r['high']:.3f}]")
        for target in targets:
            reach = "–" if r[f"episodes_to_{target}"] is None else f"{r[f'episodes_to_{target}']:.0f}"
            cells.append(f"{reach} ({r[f'reached_{target}']} of {r['seeds']})")
        lines.append(f"| {' | '.join(cells)} |")
    (results / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    plot(output, results / "curves.png")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--output", type=Path, default=Path("runs/study"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/study"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.command == "run":
        run(options.output, options.seeds, options.jobs)
    else:
        table(options.output, options.results)


if __name__ == "__main__":
    main()
