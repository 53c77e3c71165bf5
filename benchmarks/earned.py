"""Try the environments where memory must be earned on the split dev, one seed at a time.

    python -m benchmarks.earned play vault-blind complementary [--steps 24] [--seed 0]
        [--name NAME] [--arms off on] [--worlds 40] [--set SETTING ...]
    python -m benchmarks.earned table

`play` trains with the settings that `benchmarks.study` has for the environment, evaluates on worlds
of the split dev, and adds a row to `RESULTS`, whatever it shows; ``--steps 0`` plays the untrained
model. `table` prints every row: success by visit, and later visits with their interval.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines import play, rate
from benchmarks.study.setups import ALL, ENVIRONMENTS
from experiential.evaluation.intervals import clustered_mean
from experiential.evaluation.page import show_percent, show_points
from experiential.evaluation.visits import later

RESULTS = Path("benchmarks/results/earned_pilots.json")
RUNS = Path("runs/earned")
DEV = {
    "vault-blind": ("env.eval={{split: dev, worlds: {0}}}", "eval.worlds={0}", "eval.visits=6"),
    "alfworld-homes": (
        "env.eval={{split: dev, households: {0}}}", "eval.worlds={0}", "eval.visits=3",
        "eval.temperature=1.0",
    ),
    "lake-words": ("env.eval={{split: dev, dialects: {0}}}", "eval.worlds={0}", "eval.visits=4"),
}  # fmt: skip
"""Settings of the evaluation; the slot is how many worlds."""
IDEAL = {"vault-blind": [2 * visit / 14 for visit in range(1, 7)]}
"""Success by visit of an agent that never tries a lever twice and pulls the one it found."""


def settings(environment: str, steps: int, seed: int, more: Sequence[str]) -> list[str]:
    """Return the settings of a pilot's training."""
    return [
        *ALL, f"seed={seed}", *ENVIRONMENTS[environment].training, f"run.steps={steps}",
        "eval.before=false", "eval.after=false", "eval.every=0",
        DEV[environment][0].format(40), *more,
    ]  # fmt: skip


def pilot(
    environment: str,
    recipe: str,
    steps: int,
    seed: int,
    arms: Sequence[Any],
    name: str,
    more: Sequence[str],
    worlds: int = 40,
) -> dict[str, Any]:
    """Train and evaluate; return the row."""
    overrides = settings(environment, steps, seed, more)
    folder = RUNS / f"{environment}-{name}-{steps}-{seed}"
    begin = time.process_time()
    evaluation = [one.format(worlds) for one in DEV[environment]]
    outcomes = play(recipe, arms, folder, overrides, [*evaluation, *more])
    return {
        "environment": environment, "name": name, "recipe": recipe, "steps": steps, "seed": seed,
        "settings": list(more), "worlds": worlds, "cpu_s": round(time.process_time() - begin),
        "arms": {arm: ["".join(map(str, world)) for world in table]
                 for arm, table in outcomes.items()},
    }  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Return all rows so far."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """Lay out every row: success by visit, later visits, and the gain of ``on`` over ``off``."""
    lines: list[str] = []
    for environment in dict.fromkeys(row["environment"] for row in found):
        mine = [row for row in found if row["environment"] == environment]
        visits = len(next(iter(mine[0]["arms"].values()))[0])
        lines += [
            f"| {environment} | steps | arm | {' | '.join(map(str, range(1, visits + 1)))} | later"
            " visits | minus `off`, points |",
            "|---" * (visits + 5) + "|",
        ]
        if environment in IDEAL:
            ideal = " | ".join(f"{100 * one:.0f}" for one in IDEAL[environment])
            mean = 100 * float(np.mean(IDEAL[environment][1:]))
            lines.append(f"| ideal (exact) | – | – | {ideal} | {mean:.0f} % | |")
        for row in mine:
            tables = {
                arm: np.array([[int(digit) for digit in world] for world in worlds])
                for arm, worlds in row["arms"].items()
            }
            for arm, table in tables.items():
                by_visit = " | ".join(f"{100 * one:.0f}" for one in table.mean(0))
                gain = ""
                if arm != "off" and "off" in tables:
                    both = (np.array([later(one.tolist())]) for one in (table, tables["off"]))
                    gain = show_points(clustered_mean(next(both) - next(both)))
                lines.append(
                    f"| {row['name']} | {row['steps']} | `{arm}` | {by_visit} |"
                    f" {show_percent(rate([table.tolist()]))} | {gain} |"
                )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="print every row")
    tried = commands.add_parser("play", help="train and evaluate one configuration")
    tried.add_argument("environment", choices=DEV)
    tried.add_argument("recipe")
    tried.add_argument("--set", dest="more", nargs="*", metavar="SETTING", default=[])
    tried.add_argument("--steps", type=int, default=24)
    tried.add_argument("--seed", type=int, default=0)
    tried.add_argument("--name", help="of the row; else the recipe's")
    tried.add_argument("--worlds", type=int, default=40)
    tried.add_argument("--arms", nargs="+", default=["off", "on"])
    options = parser.parse_args()
    if options.command == "table":
        print(markdown(rows()))
        return
    row = pilot(
        options.environment, options.recipe, options.steps, options.seed, options.arms,
        options.name or options.recipe, options.more, options.worlds,
    )  # fmt: skip
    RESULTS.write_text(json.dumps([*rows(), row], indent=1) + "\n", encoding="utf-8")
    print(markdown([row]))


if __name__ == "__main__":
    main()
