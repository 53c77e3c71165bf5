"""Compare the methods: environments x recipes x training seeds, each under every arm.

    python -m benchmarks.study run [--recipes ...] [--environments ...] [--seeds 5] [--jobs 2]
        [--minutes M]
    python -m benchmarks.study table
    python -m benchmarks.study compare ENVIRONMENT RECIPE ARM RECIPE ARM [--seeds 1 2 3]

`run` may be stopped and started again: a finished cell is a small file below ``--results``, and is
not run again. Cells are taken seed by seed, so that a study that is stopped has complete seeds. A
cell trains in a scratch folder, which is deleted when the cell is written. While a run trains, a
part of the held-out worlds makes its learning curve; the trained pair then plays all of them under
each arm.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from benchmarks.study.cells import RESULTS, read_cells
from benchmarks.study.runs import finish_cell, order, run
from benchmarks.study.setups import ENVIRONMENTS
from benchmarks.study.tables import compare, table
from experiential.cli.errors import exit_code


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study", description=__doc__.splitlines()[0] if __doc__ else None
    )
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = commands.add_parser("run", help="run what is not finished")
    chosen.add_argument(
        "--recipes", nargs="+", help="as each environment compares them, if not given"
    )
    chosen.add_argument("--environments", nargs="+", default=list(ENVIRONMENTS))
    chosen.add_argument("--seeds", type=int, default=5)
    chosen.add_argument("--jobs", type=int, default=2)
    chosen.add_argument("--minutes", type=float, help="start no further cell after so many minutes")
    chosen.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings changed for all cells, to try the study small",
    )
    folder = "folder in which the files of each training stay"
    chosen.add_argument("--keep", type=Path, help=folder)
    one = commands.add_parser("cell", help="run one cell here")
    one.add_argument("environment", choices=list(ENVIRONMENTS))
    one.add_argument("recipe")
    one.add_argument("seed", type=int)
    one.add_argument("overrides", nargs="*", metavar="key=value")
    one.add_argument("--keep", type=Path, help=folder)
    shown = commands.add_parser("table", help="write the tables and the picture")
    two = commands.add_parser("compare", help="print success of two recipes, and the difference")
    two.add_argument("environment", choices=list(ENVIRONMENTS))
    for side in ("first", "second"):
        two.add_argument(f"{side}_recipe", metavar="RECIPE")
        two.add_argument(f"{side}_arm", metavar="ARM")
    two.add_argument("--seeds", type=int, nargs="+", help="training seeds; all, if not given")
    for command in (chosen, one, shown, two):
        command.add_argument("--results", type=Path, default=RESULTS)
    return parser


def main() -> int:
    """Run the command line and return the exit code."""
    return exit_code(
        partial(execute, arguments().parse_args()), "interrupted; the same command goes on"
    )


def execute(options: argparse.Namespace) -> int:
    """Execute the command line; return 1 where a cell failed.

    Raises:
        ConfigError: an environment, a recipe or a setting does not exist, or a cell is damaged.
    """
    if options.command == "run":
        cells = order(options.environments, options.recipes, options.seeds)
        failed = run(
            options.results, cells, options.jobs, options.minutes, options.set, options.keep
        )
        return int(failed > 0)
    if options.command == "cell":
        finish_cell(
            options.results,
            options.environment,
            options.recipe,
            options.seed,
            options.overrides,
            options.keep,
        )
    elif options.command == "compare":
        first = options.first_recipe, options.first_arm
        second = options.second_recipe, options.second_arm
        cells = read_cells(options.results)
        print(compare(cells, options.environment, (first, second), options.seeds))
    else:
        table(options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
