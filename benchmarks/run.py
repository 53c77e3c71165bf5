"""Evaluate an agent on a suite, without a bank and with one: the same worlds and seeds in both.

    python -m benchmarks run --suite room --agent llm --backend local --model tiny [--bank FOLDER
    [--learn]] [--episodes N] [--seed S] python -m benchmarks run --suite six-task --agent oracle
    python -m benchmarks run --suite sokoban --agent mymodule:act python -m benchmarks suites

A task that an arm has finished stands in the results file and is not played again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from benchmarks.data import find_data
from benchmarks.players import Player, RandomPlayer, load_function, oracle_player
from benchmarks.suite_play import Cell, Experience, Plan, play_cell
from benchmarks.suite_report import report, rich_table
from benchmarks.suites import SUITES, Suite, SuiteTask, find_suite
from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.cli.errors import exit_code
from experiential.config import ModelSettings
from experiential.envs.readiness import READINESS
from experiential.errors import ConfigError
from experiential.evaluation.cell import package_version
from experiential.llm.base import LLM, open_llm, read_options
from experiential.llm.metered import Meter, Metered
from experiential.training.roles import prompt_set_name
from experiential.types import Record

FOLDER = Path("runs/benchmarks")
"""Where results go unless told otherwise."""
_WIDE = 170
"""Columns of a table that is not shown in a terminal."""


class Results(Record):
    """What a results file holds.

    Attributes:
        settings: all that decides what is played.
        cells: a task under an arm each.
        report: what they came to.
    """

    settings: dict[str, Any]
    cells: tuple[Cell, ...] = ()
    report: dict[str, Any] = {}


# What is asked for


def llm_of(options: argparse.Namespace) -> LLM:
    """Return the backend of the command line.

    Raises:
        ConfigError: an option that the backend needs is missing, or a file cannot be read.
    """
    given = {name: getattr(options, name) for name in ("model", "base_url")}
    made: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.backend == "local":
        made = {"model": options.model or "tiny", "dtype": options.dtype, "device": options.device}
    elif options.backend == "scripted":
        made = {"replies": read_replies(options.replies)}
    elif options.backend == "openai":
        if not options.model:
            raise ConfigError(
                "Expected --model NAME with --backend openai: the model's name at the server, got"
                " none"
            )
        made["supports_choices"] = options.constrain
    return open_llm(options.backend, **made | read_options(options.backend_option))


def read_replies(file: Path | None) -> list[str]:
    """Replies of a scripted backend: the lines of a file that are not empty.

    Raises:
        ConfigError: there is no such file, or nothing in it.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Expected a text file of replies, got {file}: {error}") from error
    replies = [line for line in lines if line.strip()]
    if not replies:
        raise ConfigError(
            "Expected --replies FILE with a reply a line for --backend scripted, got"
            f" {file or 'none'}"
        )
    return replies


def is_tiny(options: argparse.Namespace) -> bool:
    """Whether the backend is the bundled tiny model, which has prompts of its own and only chooses."""
    return options.backend == "local" and (options.model or "tiny") == "tiny"


def agents(options: argparse.Namespace, llm: LLM | None) -> Callable[[], ActorAgent | Player]:
    """What builds the agent of one slot.

    Args:
        options: the command line.
        llm: the backend; only for ``llm``.

    Raises:
        ConfigError: there is no such agent.
    """
    if options.agent == "random":
        return RandomPlayer
    if options.agent == "oracle":
        return oracle_player
    if options.agent != "llm":
        function = load_function(options.agent)
        return lambda: Player(function)
    assert llm is not None
    settings: dict[str, Any] = {
        "prompts": _prompts(options),
        "instruction": options.instruction,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        "constrain": options.constrain or is_tiny(options),
        "history": options.history,
    }
    return lambda: ActorAgent(llm, **settings)


def _prompts(options: argparse.Namespace) -> str:
    return prompt_set_name(ModelSettings(name="tiny" if is_tiny(options) else "other"))


def experience_of(options: argparse.Namespace, llm: LLM | None) -> Experience | None:
    """The bank of the command line, with an extractor where it may grow; None without a bank."""
    if options.bank is None:
        return None
    meter = Meter()
    extractor = (
        ExtractorAgent(Metered(llm, meter), prompts=_prompts(options), seed=options.seed)
        if options.learn and llm
        else None
    )
    return Experience(options.bank, options.namespace, options.embedder, extractor, meter)


def settings_of(
    options: argparse.Namespace, suite: Suite, experience: Experience | None
) -> dict[str, Any]:
    """All that decides what is played: results of other settings are never mixed with these."""
    of_agent = (
        "backend",
        "model",
        "base_url",
        "dtype",
        "temperature",
        "max_tokens",
        "constrain",
        "history",
        "instruction",
        "replies",
    )
    names = (
        "agent",
        "episodes",
        "visits",
        "seed",
        "split",
        "search_and_ask",
        "bank",
        "namespace",
        "embedder",
        "learn",
    )
    found: dict[str, Any] = {
        name: getattr(options, name) for name in (*names, *(of_agent if needs_llm(options) else ()))
    }
    found = {
        name: str(value) if isinstance(value, Path) else value for name, value in found.items()
    }
    if needs_llm(options) and options.backend_option:
        found["backend_option"] = options.backend_option
    data = {
        task.name: "real" if READINESS[task.id].has_data() else "made"
        for task in suite.tasks
        if READINESS[task.id].variable
    }
    commit = None
    if experience is not None and experience.extractor is None:
        with experience.open() as bank:
            commit = bank.head
    tasks = [
        {"name": task.name, "id": task.id, "kwargs": task.kwargs, "turns": task.turns}
        for task in suite.tasks
    ]
    return {
        "suite": suite.name,
        "tasks": tasks,
        "data": data,
        **found,
        "commit": commit,
        "version": package_version(),
    }


def needs_llm(options: argparse.Namespace) -> bool:
    """Whether anything asks a language model: the agent, or an extractor."""
    return options.agent == "llm" or (options.bank is not None and options.learn)


# Playing


def read_results(file: Path, settings: dict[str, Any], overwrite: bool) -> Results:
    """Finished cells of the same settings; none where there is no file, or where it is to be overwritten.

    Raises:
        ConfigError: the file holds something else, or was made with other settings.
    """
    settings = json.loads(json.dumps(settings))
    if overwrite or not file.exists():
        return Results(settings=settings)
    try:
        found = Results.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"Expected results of benchmarks run in {file}, got {str(error).splitlines()[0]}; use"
            " --overwrite"
        ) from error
    other = [name for name in settings if found.settings.get(name) != settings[name]]
    if other:
        shown = (
            ", ".join(
                f"{name} {found.settings.get(name)!r} and not {settings[name]!r}"
                for name in other
                if name != "tasks"
            )
            or "tasks"
        )
        raise ConfigError(
            f"Expected results of the same settings in {file}, got {shown[:400]}; use --overwrite"
            " or another --results"
        )
    return found


def write_results(file: Path, results: Results) -> None:
    """Write a results file, whole at every moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(json.dumps(results.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    os.replace(draft, file)


async def play_suite(
    suite: Suite,
    plan: Plan,
    make_actor: Callable[[], Any],
    experience: Experience | None,
    done: Results,
    finished: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Play the cells of a suite that are not done; each task without the bank first, then with it.

    Args:
        suite: what is played.
        plan: how.
        make_actor: builds an agent for a slot.
        experience: the bank; None plays without one alone.
        done: what was played before.
        finished: called with all results after each cell.
    """
    for task, bank in _cells(suite, experience):
        arm = "off" if bank is None else bank.arm
        if any((cell.task, cell.arm) == (task.name, arm) for cell in done.cells):
            continue
        cells = (*done.cells, await play_cell(task, plan, make_actor, bank))
        done = done.model_copy(update={"cells": cells, "report": report(cells)})
        finished(done)
    return done


def _cells(
    suite: Suite, experience: Experience | None
) -> Sequence[tuple[SuiteTask, Experience | None]]:
    return [
        (task, bank)
        for task in suite.tasks
        for bank in ((None,) if experience is None else (None, experience))
    ]


def run(options: argparse.Namespace) -> int:
    """Play a suite as the command line says; gives the exit code: 1 where all episodes of a task failed for a technical reason.

    Raises:
        ConfigError: an option is wrong, or an environment is not ready.
    """
    suite = find_suite(options.suite, options.tasks)
    suite.check_ready()
    check(options)
    file = (
        options.results
        or FOLDER / f"{suite.name}-{options.agent.replace(':', '.')}-{options.seed}.json"
    )
    with ExitStack() as stack:
        llm = stack.enter_context(closing(llm_of(options))) if needs_llm(options) else None
        experience = experience_of(options, llm)
        done = read_results(file, settings_of(options, suite, experience), options.overwrite)
        plan = Plan(
            options.episodes,
            options.visits,
            options.seed,
            options.split,
            options.slots,
            options.search_and_ask,
            options.agent == "oracle",
        )
        done = asyncio.run(
            play_suite(
                suite,
                plan,
                agents(options, llm),
                experience,
                done,
                lambda results: write_results(file, results),
            )
        )
    show(suite, options, done, file)
    return int(any(task["failed"] == task["episodes"] for task in done.report["tasks"]))


def check(options: argparse.Namespace) -> None:
    """Refuse options that do not go together, and fill in what others decide.

    Raises:
        ConfigError: they do not.
    """
    if options.learn and options.bank is None:
        raise ConfigError("Expected --bank FOLDER with --learn, got none")
    if options.visits > options.episodes:
        raise ConfigError(
            f"Expected at most as many --visits as --episodes ({options.episodes}), got"
            f" {options.visits}"
        )
    if options.search_and_ask and options.bank is None:
        raise ConfigError("Expected --bank FOLDER with --search-and-ask, got none")
    options.slots = options.slots or (8 if options.agent == "llm" else 1)


def show(suite: Suite, options: argparse.Namespace, done: Results, file: Path) -> None:
    """The table, the reasons of failures, and where the results are."""
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    console.print(rich_table(f"{suite.name}: {options.agent}, seed {options.seed}", done.report))
    console.print(f"as in {suite.source}", markup=False, highlight=False)
    for task in done.report["tasks"]:
        for reason, count in task["failures"].items():
            console.print(
                f"{task['task']} ({task['arm']}): {count} failed: {reason}",
                markup=False,
                highlight=False,
            )
    console.print(f"results: {file}", markup=False, highlight=False, soft_wrap=True)


# The command line


def number(least: int) -> Callable[[str], int]:
    """A reader of whole numbers that are not below ``least``."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a number from {least}, got {text}")
        return value

    read.__name__ = "whole number"
    return read


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("suites", help="list the suites, and what they need")
    chosen = commands.add_parser("run", help="evaluate an agent on a suite")
    chosen.add_argument("--suite", required=True, help=", ".join(SUITES))
    chosen.add_argument("--tasks", nargs="+", metavar="TASK", help="only these tasks of the suite")
    chosen.add_argument(
        "--agent",
        default="llm",
        help="random, oracle, llm, or module:function, called with observation and info",
    )
    chosen.add_argument(
        "--episodes", type=number(1), default=100, help="of each task and arm (%(default)s)"
    )
    chosen.add_argument(
        "--visits",
        type=number(1),
        default=1,
        help="how many of the episodes meet the same world (%(default)s)",
    )
    chosen.add_argument("--seed", type=int, default=0)
    chosen.add_argument("--split", default="eval", help="of the environments (%(default)s)")
    chosen.add_argument(
        "--slots", type=number(0), default=0, help="episodes at once; 0: 8 for llm, 1 for others"
    )
    chosen.add_argument(
        "--results", type=Path, help=f"a JSON file; by default {FOLDER}/SUITE-AGENT-SEED.json"
    )
    chosen.add_argument(
        "--overwrite", action="store_true", help="play again what the results file holds"
    )
    _bank_arguments(chosen.add_argument_group("bank"))
    _llm_arguments(
        chosen.add_argument_group("language model (--agent llm, and the extractor of --learn)")
    )
    return parser


def _bank_arguments(group: Any) -> None:
    group.add_argument(
        "--bank",
        help=(
            "a bank's folder or address: each task is played without it and with it; it is read,"
            " not written"
        ),
    )
    group.add_argument(
        "--learn",
        action="store_true",
        help="let the bank grow by what is distilled; made where there is none",
    )
    group.add_argument("--namespace", default="default")
    group.add_argument(
        "--embedder",
        help="of a bank that is made now: a sentence-transformers name or folder, or hashing",
    )
    group.add_argument(
        "--search-and-ask",
        type=number(0),
        default=0,
        metavar="N",
        help="questions to the bank that an episode may ask",
    )


def _llm_arguments(group: Any) -> None:
    group.add_argument(
        "--backend",
        default="local",
        help=(
            "local (torch and transformers here), openai, scripted, an entry point of"
            " experiential.llms, or module:attribute (%(default)s)"
        ),
    )
    group.add_argument(
        "--backend-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="passed to the backend; may be repeated",
    )
    group.add_argument(
        "--model",
        help="tiny (default), smollm2, a folder or a hub name; with openai the name at the server",
    )
    group.add_argument(
        "--base-url",
        help=(
            "of an OpenAI-compatible server; else OPENAI_BASE_URL; the key is taken from"
            " OPENAI_API_KEY"
        ),
    )
    group.add_argument(
        "--replies",
        type=Path,
        metavar="FILE",
        help="replies of the scripted backend, one a line, over and over",
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    group.add_argument("--device", default="auto")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    group.add_argument(
        "--max-tokens", type=number(1), default=256, help="of a response (%(default)s)"
    )
    group.add_argument(
        "--history", type=number(0), help="past turns that are shown; all by default"
    )
    group.add_argument(
        "--instruction", default="", help="what the agent is told about the environment"
    )
    group.add_argument(
        "--constrain",
        action="store_true",
        help="choose among the admissible actions; always with the tiny model",
    )


def list_suites() -> None:
    """Write the suites: tasks, source, and what is missing."""
    for suite in SUITES.values():
        missing = [
            step
            for name in dict.fromkeys(task.id for task in suite.tasks)
            for step in READINESS[name].missing()
        ]
        sys.stdout.write(
            f"{suite.name:11} {', '.join(task.name for task in suite.tasks)}\n{'':11}"
            f" {suite.source}\n"
        )
        sys.stdout.write(f"{'':11} {'run: ' + ' && '.join(missing) if missing else 'ready'}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    options = arguments().parse_args(argv)
    find_data()
    return exit_code(
        list_suites if options.command == "suites" else partial(run, options),
        "interrupted; the same command goes on",
    )
