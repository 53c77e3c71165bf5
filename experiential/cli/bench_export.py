"""Write a log of played episodes in another format with `experiential bench export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from experiential.errors import ConfigError

ENDINGS = (".eval", ".json")
"""Of a log of inspect_ai: compressed, and plain."""


def export(
    log: Annotated[
        Path, Argument(help="A log of `experiential bench run` or `bench stream` (.jsonl).")
    ],
    to: Annotated[Path, Option(help="inspect_ai log to write, ending in .eval or .json.")],
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Convert a log of episodes for inspect_ai, whose `inspect view` opens it."""
    from experiential.evaluation.inspect_log import write_inspect_log

    if to.suffix not in ENDINGS:
        raise ConfigError(f"Expected --to with the ending {' or '.join(ENDINGS)}, got {to}")
    if to.exists() and not overwrite:
        raise ConfigError(
            f"Expected --to to be a new file, got {to}; use --overwrite to replace it"
        )
    count = write_inspect_log(log, to)
    # of JSON files the viewer lists only those with inspect_ai's own names
    view = f"; inspect view --log-dir {to.parent}" if to.suffix == ".eval" else ""
    sys.stdout.write(f"{count} episodes: {to}{view}\n")
