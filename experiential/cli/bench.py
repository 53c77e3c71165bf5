"""List suites and evaluate an agent on one with `experiential bench`.

The agent plays without a bank and with one.

    experiential bench suites
    experiential bench run --suite six-task --agent oracle
    experiential bench run --suite sokoban --agent mymodule:act
    experiential bench run --suite room --model smollm2 --bank FOLDER --learn

A task that an arm has finished stands in the results file and is not played again.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from experiential.cli.errors import complain, new_app
from experiential.cli.options import AsJson, Backend, BackendOption, Embedder, Namespace
from experiential.cli.rows import show_json, show_line
from experiential.errors import ConfigError
from experiential.llm.base import LLM, open_llm, read_options
from experiential.plugins import import_from_here, known_names

if TYPE_CHECKING:
    from experiential.evaluation.suite_play import MakeActor, SuiteBank
    from experiential.evaluation.suites import Suite

FOLDER = Path("runs/benchmarks")
"""Where results go by default."""
_WIDE = 170
"""Columns of a table that is not shown in a terminal."""
_OF_AGENT = (
    "backend backend_option model base_url dtype temperature max_tokens constrain history"
    " instruction replies"
).split()
_OF_RUN = "agent episodes visits seed split search_and_ask bank namespace embedder learn".split()
"""Options that decide what is played; the former only where a language model is asked."""
_SHAPES = {
    "success": ("success, %", 100.0, ".1f"),
    "reward": ("reward", 1.0, ".3f"),
    "turns": ("turns", 1.0, ".1f"),
    "tokens": ("tokens", 1.0, ",.0f"),
    "seconds": ("seconds", 1.0, ".2f"),
}
"""Column, scale and format of each measure."""

app = new_app("Evaluate agents on suites of environments.")


@app.command()
def suites(as_json: AsJson = False) -> None:
    """List the suites: tasks, source, and what is missing. Those of installed packages count."""
    from experiential.evaluation.suites import SUITES, find_data, find_suite

    find_data()
    rows: list[dict[str, Any]] = []
    for name in known_names("suites", SUITES):
        suite = find_suite(name)
        to_do = [step for steps in suite.missing().values() for step in steps]
        tasks = [task.name for task in suite.tasks]
        rows.append({"suite": name, "tasks": tasks, "source": suite.source, "to_do": to_do})
    if as_json:
        show_json(rows)
        return
    for row in rows:
        state = f"run: {' && '.join(row['to_do'])}" if row["to_do"] else "ready"
        lines = (f"{row['suite']:11} {', '.join(row['tasks'])}", row["source"], state)
        sys.stdout.write(f"\n{'':12}".join(lines) + "\n")


@app.command()
def run(
    context: typer.Context,
    suite: Annotated[
        str, Option(help="A name of `experiential bench suites`, or module:attribute.")
    ],
    tasks: Annotated[
        str | None, Option(help="Only these tasks of the suite, with commas between them.")
    ] = None,
    agent: Annotated[
        str, Option(help="llm, random, oracle, or module:function of observation and info.")
    ] = "llm",
    episodes: Annotated[int, Option(min=1, help="Episodes of each task and arm.")] = 100,
    visits: Annotated[int, Option(min=1, help="How many of the episodes meet the same world.")] = 1,
    seed: Annotated[int, Option(help="Seed of worlds, episodes and sampling.")] = 0,
    split: Annotated[str, Option(help="Split of the environments.")] = "eval",
    slots: Annotated[int, Option(min=0, help="Episodes at once; 0: 8 for llm, 1 for others.")] = 0,
    results: Annotated[
        Path | None, Option(help=f"A JSON file.  [default: {FOLDER}/SUITE-AGENT-SEED.json]")
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Play again what the results file holds.")
    ] = False,
    bank: Annotated[
        str | None,
        Option(
            help="Folder or address of a bank: each task is played without it and with it. It is"
            " read, not written."
        ),
    ] = None,
    learn: Annotated[
        bool, Option("--learn", help="Let the bank grow; make it where there is none.")
    ] = False,
    namespace: Namespace = "default",
    embedder: Embedder = None,
    search_and_ask: Annotated[
        int, Option(min=0, help="Questions to the bank that an episode may ask.")
    ] = 0,
    backend: Backend = "local",
    backend_option: BackendOption = None,
    model: Annotated[
        str | None,
        Option(
            help="With local tiny (default), smollm2, a folder or a hub name; with openai the name"
            " at the server."
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        Option(
            help="OpenAI-compatible server; else OPENAI_BASE_URL. The key is taken from"
            " OPENAI_API_KEY."
        ),
    ] = None,
    replies: Annotated[
        Path | None,
        Option(help="Replies of the scripted backend, one a line, over and over."),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], Option(help="Of a local model.")] = "float32",
    device: Annotated[str, Option(help="Of a local model.")] = "auto",
    temperature: Annotated[float, Option(help="Of sampling; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, Option(min=1, help="Of a response.")] = 256,
    history: Annotated[
        int | None, Option(min=0, help="Past turns that are shown.  [default: all]")
    ] = None,
    instruction: Annotated[str, Option(help="Said to the agent about the environment.")] = "",
    constrain: Annotated[
        bool,
        Option(
            "--constrain", help="Choose among the admissible actions; always with the tiny model."
        ),
    ] = False,
) -> int:
    """Evaluate an agent on a suite; exit code 1 where every episode of a task failed.

    Without --bank each task is played once, with --bank twice: on the same worlds and seeds,
    without the bank and with it.
    """
    from experiential.evaluation.players import SEATS
    from experiential.evaluation.results import ResultStore
    from experiential.evaluation.suite_play import Plan, SuiteResults, play_suite
    from experiential.evaluation.suites import find_data, find_suite

    find_data()
    chosen = find_suite(suite, tasks.split(",") if tasks else None)
    if missing := chosen.missing():
        steps = [f"{name}: run {' && '.join(steps)}" for name, steps in missing.items()]
        raise ConfigError(
            f"Expected all environments of suite {chosen.name} to be ready, got some that are not:"
            f" {'; '.join(steps)}"
        )
    for option, wanted in (("--learn", learn), ("--search-and-ask", search_and_ask)):
        if wanted and bank is None:
            raise ConfigError(f"Expected --bank FOLDER with {option}, got none")
    if visits > episodes:
        raise ConfigError(
            f"Expected at most as many --visits as --episodes ({episodes}), got {visits}"
        )
    file = results or FOLDER / f"{chosen.name}-{agent.replace(':', '.')}-{seed}.json"
    about, remedy = "results of experiential bench run", "use --overwrite or another --results"
    store = ResultStore(file.parent, SuiteResults, about=about, remedy=remedy, overwrite=overwrite)
    name = file.name.removesuffix(".json")
    with ExitStack() as stack:
        asks = agent == "llm" or learn
        llm = stack.enter_context(closing(open_backend(context.params))) if asks else None
        make_actor, second = open_agents(context.params, llm)
        settings = settings_of(chosen, context.params, asks=asks)
        if second is not None and second.extractor is None:
            with second.open() as opened:
                settings["commit"] = opened.head  # a bank that has grown since is another setting
        done = store.find(name, settings) or SuiteResults(settings=settings)
        slots = slots or (8 if agent == "llm" else 1)
        plan = Plan(episodes, visits, seed, split, slots, search_and_ask, SEATS.get(agent))
        keep = partial(store.keep, name)
        try:
            done = asyncio.run(play_suite(chosen, plan, make_actor, second, done, keep))
        except KeyboardInterrupt:
            return complain("interrupted; the same command goes on", 130)

    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    console.print(report_table(f"{chosen.name}: {agent}, seed {seed}", done.report))
    console.print(f"as in {chosen.source}", markup=False, highlight=False)
    for task in done.report["tasks"]:
        for reason, count in task["failures"].items():
            line = f"{task['task']} ({task['arm']}): {count} failed: {reason}"
            console.print(line, markup=False, highlight=False)
    show_line(console, f"results: {store.path(name)}")
    return int(any(task["failed"] == task["episodes"] for task in done.report["tasks"]))


def open_agents(options: dict[str, Any], llm: LLM | None) -> tuple[MakeActor, SuiteBank | None]:
    """Return what builds the agent, and its bank; agent and extractor ask ``llm``, if wanted."""
    from experiential.agents.actor import ActorAgent
    from experiential.agents.extractor import ExtractorAgent
    from experiential.config import ModelSettings
    from experiential.evaluation.players import AGENT, SEATS, Player
    from experiential.evaluation.suite_play import SuiteBank
    from experiential.llm.metered import Meter, Metered
    from experiential.training.roles import prompt_set_name

    # The tiny model knows prompts of its own, and writes no actions: it only chooses.
    tiny = options["backend"] == "local" and (options["model"] or "tiny") == "tiny"
    prompts = prompt_set_name(ModelSettings(name="tiny" if tiny else "other"))
    bank = None
    if options["bank"] is not None:
        meter, extractor = Meter(), None
        if options["learn"] and llm is not None:
            extractor = ExtractorAgent(Metered(llm, meter), prompts=prompts, seed=options["seed"])
        folder, namespace, embedder = (options[one] for one in ("bank", "namespace", "embedder"))
        bank = SuiteBank(folder, namespace, embedder, extractor, meter)
    name: str = options["agent"]
    if name in SEATS:
        return lambda: Player(lambda observation, info: info[AGENT](observation, info)), bank
    if llm is not None and name == "llm":
        kept = ("instruction", "temperature", "max_tokens", "history")
        settings: dict[str, Any] = {one: options[one] for one in kept} | {"prompts": prompts}
        settings["constrain"] = options["constrain"] or tiny
        return lambda: ActorAgent(llm, **settings), bank
    module, _, attribute = name.partition(":")
    found = import_from_here(module, f"--agent {name}") if attribute else None
    function: Any = getattr(found, attribute, None)
    if not callable(function):
        raise ConfigError(
            "Expected an agent as llm, random, oracle or module:function, callable with observation"
            f" and info, got {name!r}"
        )
    return lambda: Player(function), bank


def open_backend(options: dict[str, Any]) -> LLM:
    """Open the language model; any backend gets model and address where given, and its options."""
    backend, model = options["backend"], options["model"]
    made = {name: options[name] for name in ("model", "base_url") if options[name] is not None}
    if backend == "local":
        made = {"model": model or "tiny", "dtype": options["dtype"], "device": options["device"]}
    elif backend == "scripted":
        file: Path | None = options["replies"]
        try:
            lines = file.read_text(encoding="utf-8").splitlines() if file else []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Expected a text file of replies, got {file}: {error}") from error
        made = {"replies": [line for line in lines if line.strip()]}
        if not made["replies"]:
            raise ConfigError(
                "Expected --replies FILE with a reply a line for --backend scripted, got"
                f" {file or 'none'}"
            )
    elif backend == "openai":
        if not model:
            raise ConfigError(
                "Expected --model NAME with --backend openai: the model's name at the server, got"
                " none"
            )
        made["supports_choices"] = options["constrain"]
    return open_llm(backend, **made | read_options(options["backend_option"] or ()))


def settings_of(suite: Suite, options: dict[str, Any], *, asks: bool) -> dict[str, Any]:
    """Return all that decides what is played; results of other settings are never mixed with it.

    ``asks`` says that a language model is asked, by the agent or an extractor.
    """
    from experiential.envs.readiness import readiness
    from experiential.evaluation.cell import package_version

    given = {name: options[name] for name in (*_OF_RUN, *(_OF_AGENT if asks else ()))}
    entries = {task.name: readiness(task.id) for task in suite.tasks}
    return {
        "suite": suite.name,
        "tasks": [
            {"name": task.name, "id": task.id, "kwargs": task.kwargs, "turns": task.turns}
            for task in suite.tasks
        ],
        "data": {
            name: "real" if entry.has_data() else "made"
            for name, entry in entries.items()
            if entry.variable
        },
        **{name: str(value) if isinstance(value, Path) else value for name, value in given.items()},
        "commit": None,
        "version": package_version(),
    }


def report_table(title: str, found: dict[str, Any]) -> Table:
    """Lay the report of a suite out as a table; differences in success are in points."""
    caption = "95 % intervals; tokens 0: the agent has no model, or its backend shows no token ids"
    table = Table(title=title, caption=caption)
    table.add_column("task")
    table.add_column("arm")
    for name in (*(column for column, _, _ in _SHAPES.values()), "episodes", "failed"):
        table.add_column(name, justify="right")

    for row in (*found["tasks"], *found["overall"], *found["differences"]):
        arm = row.get("arm") or " − ".join(row["arms"])
        sign = "" if "arm" in row else "+"
        measured: list[str] = []
        for name, (_, scale, shape) in _SHAPES.items():
            ends = (format(scale * row[name][end], sign + shape) for end in ("mean", "low", "high"))
            measured.append("{} [{}, {}]".format(*ends))
        counts = (str(row.get(name, "")) for name in ("episodes", "failed"))
        last = row is found["tasks"][-1]
        table.add_row(row["task"], arm, *measured, *counts, end_section=last)
    return table
