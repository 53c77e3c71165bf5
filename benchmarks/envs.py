"""Measure the environments: speed, resets, memory, observations, oracle and random play.

    python -m benchmarks.envs [--envs NAME ...] [--episodes N] [--oracle N | --oracle-all]
        [--parts PART ...] [--results FILE]

Each row runs in a process of its own, one after the other. What was measured of a row stands in the
results at once; the same command goes on where it was stopped, and `--again` measures anew. A
Markdown table is written beside the JSON file. A row whose packages or data are missing says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import env_cost
from benchmarks.env_play import play_oracle, spread, summary, worlds_of
from benchmarks.env_rows import ROWS, Row, chosen
from benchmarks.env_table import markdown
from experiential.cli.errors import exit_code
from experiential.errors import ExperientialError
from experiential.evaluation.results import ResultStore, write_whole
from experiential.evaluation.suites import find_data
from experiential.sync import attempted
from experiential.types import Record

PARTS = ("play", "memory", "raw", "oracle")
"""In the order in which a row's process measures them: the memory before anything large is
imported.
"""
RESULTS = Path("benchmarks/results/envs.json")
_PACKAGES = (
    "experiential-rl",
    "gymnasium",
    "numpy",
    "minihack",
    "minigrid",
    "bfcl-eval",
    "nle",
    "alfworld",
    "textworld",
    "fast-downward-textworld",
    "thefuzz",
    "snowballstemmer",
)

# One row, in its own process


def measure(row: Row, part: str, count: int | None, tokenizer: str) -> dict[str, Any]:
    """Measure one part of a row.

    Args:
        row: which row.
        part: one of ``PARTS``.
        count: episodes; None plays every world.
        tokenizer: name of the tokenizer that counts.
    """
    if part == "play":
        found = env_cost.played(row, count or row.episodes)
        return found | {"tokens": _tokens(found.pop("observations"), tokenizer)}
    if part == "memory":
        return env_cost.memory(row, count or row.memory)
    if part == "raw":
        return env_cost.beside_raw(row, count or row.episodes)
    env = row.make()
    found = summary(play_oracle(env, spread(worlds_of(env), count)), reasons=True)
    env.close()
    return found


def _tokens(texts: list[str], tokenizer: str) -> dict[str, Any]:
    """Count the tokens of observations; without the tokenizer, say why."""
    count = attempted(lambda: env_cost.token_counter(tokenizer))
    if isinstance(count, Exception):
        return {"tokenizer": "", "reason": f"{type(count).__name__}: {count}"}
    return {"tokenizer": tokenizer, **env_cost.tokens(texts, count)}


def fill_row(row: Row, parts: Mapping[str, int | None], tokenizer: str, draft: Path) -> None:
    """Measure parts of a row here; each is in the draft as soon as it is measured.

    Args:
        row: which row.
        parts: what to measure, and of how many episodes.
        tokenizer: name of the tokenizer that counts.
        draft: a file for ``parts`` and, where something failed, the ``reason``.
    """
    row.hide_data()
    found: dict[str, Any] = {"parts": {}}
    for part, count in parts.items():
        outcome = attempted(lambda part=part, count=count: measure(row, part, count, tokenizer))
        if isinstance(outcome, Exception):
            said = (
                str(outcome)
                if isinstance(outcome, ExperientialError)
                else f"{type(outcome).__name__}: {outcome}"
            )
            found["reason"] = f"{part}: {said}"
            break
        found["parts"][part] = outcome | {"asked": count}
        draft.write_text(json.dumps(found), encoding="utf-8")
    draft.write_text(json.dumps(found), encoding="utf-8")


# All rows


def asked_parts(row: Row, options: argparse.Namespace) -> dict[str, int | None]:
    """Return the wanted parts of a row, and their episodes."""
    counts: dict[str, int | None] = {
        "play": options.episodes or row.episodes,
        "memory": (
            row.memory
            if options.memory_episodes is None
            else min(row.memory, options.memory_episodes)
        ),
        "raw": options.episodes or row.episodes,
        "oracle": (
            row.all if options.oracle_all else options.oracle or options.episodes or row.oracle
        ),
    }
    return {
        part: counts[part]
        for part in PARTS
        if part in options.parts
        and (part != "memory" or counts[part])
        and (part != "raw" or row.level)
    }


class EnvResults(Record):
    """Hold what was measured so far.

    Attributes:
        rows: by name, the parts that were measured and the reason why others were not.
        machine: measured on.
    """

    rows: dict[str, dict[str, Any]]
    machine: dict[str, Any] = {}


def store_of(file: Path) -> ResultStore[EnvResults]:
    """Return the store that holds a results file."""
    return ResultStore(
        file.parent,
        EnvResults,
        about="results of benchmarks.envs",
        remedy="remove it or choose another",
    )


def left_of(known: Mapping[str, Any], wanted: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the parts that were not measured yet with so many episodes."""
    done = known.get("parts", {})
    return {
        part: count
        for part, count in wanted.items()
        if part not in done or done[part]["asked"] != count
    }


def run(rows: list[Row], options: argparse.Namespace) -> int:
    """Measure the parts that are left; return how many rows failed that were ready."""
    stored = store_of(options.results).find(options.results.stem)
    found: dict[str, dict[str, Any]] = {} if stored is None else dict(stored.rows)
    failed = 0
    for row in rows:
        known: dict[str, Any] = {} if options.again else found.get(row.name, {})
        wanted = asked_parts(row, options)
        left = left_of(known, wanted)
        if not left:
            say(f"{row.name}: measured already")
            continue
        got = run_row(row, left, options)
        failed += "reason" in got and not got.get("missing", False)
        found[row.name] = merged(known, got)
        keep(found, options.results)
        say(f"{row.name}: {got.get('reason') or 'measured ' + ', '.join(got['parts'])}")
    say(keep(found, options.results))
    return failed


def merged(known: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the parts known before and those measured now.

    The reason of an earlier failure counts no longer.
    """
    parts = {**known.get("parts", {}), **got.get("parts", {})}
    rest = {key: value for key, value in got.items() if key != "parts"}
    return {**rest, "parts": {part: parts[part] for part in PARTS if part in parts}}


def run_row(
    row: Row, parts: Mapping[str, int | None], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure a row in a process of its own; return its parts, and the reason for missing ones."""
    if missing := row.missing():
        return {"missing": True, "reason": f"not ready; run: {' && '.join(missing)}"}
    with TemporaryDirectory(prefix="experiential-envs-") as folder:
        draft = Path(folder) / "row.json"
        asked = ["--row", row.name, json.dumps(parts), str(draft), "--tokenizer", options.tokenizer]
        try:
            command = [sys.executable, "-m", "benchmarks.envs", *asked]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=60 * options.minutes
            )
            said = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
            ended = f"exit code {done.returncode}: {said}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            ended = f"not finished in {options.minutes:g} minutes"
        got: dict[str, Any] = (
            json.loads(draft.read_text(encoding="utf-8")) if draft.exists() else {"parts": {}}
        )
    return got | ({"reason": ended} if ended else {})


def machine() -> dict[str, Any]:
    """Return cores, platform and versions, without names and dates."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": found,
    }


def keep(found: dict[str, dict[str, Any]], file: Path) -> str:
    """Write the rows in their order, and beside them the table, which is returned."""
    rows = {name: found[name] for name in ROWS if name in found}
    results = EnvResults(rows=rows, machine=machine())
    store_of(file).keep(file.stem, results)
    text = markdown(results.model_dump())
    write_whole(file.with_suffix(".md"), text)
    return text


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def positive(text: str) -> int:
    """Parse a positive number of the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"Expected a positive number, got {text}")
    return number


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.envs", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--envs", nargs="+", metavar="NAME", help=f"rows, or first words of rows: {', '.join(ROWS)}"
    )
    parser.add_argument(
        "--episodes",
        type=positive,
        help="of the random agent and the oracle; by default what each row sets",
    )
    parser.add_argument("--oracle", type=positive, metavar="N", help="episodes of the oracle")
    parser.add_argument(
        "--oracle-all",
        action="store_true",
        help="the oracle on every world, or as many as the row sets",
    )
    parser.add_argument(
        "--memory-episodes",
        type=positive,
        metavar="N",
        help="at most so many episodes between two looks at the memory",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="what to measure; the rest of a row stays",
    )
    parser.add_argument(
        "--tokenizer",
        default="smollm2",
        help="what counts tokens: smollm2, tiny, a model folder or a hub name",
    )
    parser.add_argument(
        "--minutes", type=float, default=120.0, help="after which a row's process is ended"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure also what was measured before"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="a .json file; the table goes beside it"
    )
    parser.add_argument(
        "--row", nargs=3, metavar=("NAME", "PARTS", "DRAFT"), help=argparse.SUPPRESS
    )  # a row's own process
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    1: a row failed that was ready; 2: an argument is wrong.
    """
    options = arguments().parse_args(argv)
    find_data()
    if options.row:
        name, parts, draft = options.row
        return exit_code(
            lambda: fill_row(ROWS[name], json.loads(parts), options.tokenizer, Path(draft))
        )
    return exit_code(
        lambda: int(run(chosen(options.envs), options) > 0), "interrupted; the same command goes on"
    )


if __name__ == "__main__":
    sys.exit(main())
