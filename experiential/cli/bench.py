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
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from experiential.cli.errors import complain, new_app
from experiential.cli.options import (
    AsJson,
    Backend,
    BackendOption,
    BaseUrl,
    Embedder,
    KeyEnv,
    Namespace,
    named_model,
)
from experiential.cli.rows import show_json, show_line
from experiential.errors import BudgetError, ConfigError
from experiential.llm.base import LLM
from experiential.llm.metered import Meter, Spent
from experiential.plugins import import_from_here, known_names

if TYPE_CHECKING:
    from experiential.config import ModelSettings
    from experiential.evaluation.suite_play import MakeActor, SuiteBank
    from experiential.evaluation.suites import Suite, TaskFacts

FOLDER = Path("runs/benchmarks")
"""Where results go by default."""
_WIDE = 170
"""Columns of a table that is not shown in a terminal."""
_OF_AGENT = (
    "backend backend_option model base_url dtype temperature max_tokens constrain history"
    " instruction replies"
).split()
_OF_RUN = "agent episodes visits seed search_and_ask bank namespace embedder learn".split()
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
        lines = (f"{row['suite']:19} {', '.join(row['tasks'])}", row["source"], state)
        sys.stdout.write(f"\n{'':20}".join(lines) + "\n")


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
    episodes: Annotated[
        int | None,
        Option(min=1, help="Of each task and arm.  [default: all of an official set, else 100]"),
    ] = None,
    visits: Annotated[int, Option(min=1, help="How many of the episodes meet the same world.")] = 1,
    seed: Annotated[int, Option(help="Seed of worlds, episodes and sampling.")] = 0,
    split: Annotated[
        str | None, Option(help="Split of all tasks.  [default: each task's own]")
    ] = None,
    made: Annotated[
        bool, Option("--made", help="Play invented worlds where a task has real data.")
    ] = False,
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
    backend: Backend = None,
    backend_option: BackendOption = None,
    model: Annotated[
        str | None,
        Option(
            help="Here tiny (default), smollm2, a folder or a hub name; with --base-url the name at"
            " the server, whose only model is taken otherwise."
        ),
    ] = None,
    base_url: BaseUrl = None,
    api_key_env: KeyEnv = None,
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
    from experiential.cli.preflight import check_model
    from experiential.evaluation.players import SEATS
    from experiential.evaluation.results import ResultStore
    from experiential.evaluation.suite_play import Plan, SuiteResults, play_suite
    from experiential.evaluation.suites import find_data, find_suite
    from experiential.llm.models import open_model
    from experiential.training.roles import prompt_set_name

    find_data()
    chosen = find_suite(suite, tasks.split(",") if tasks else None)
    chosen = chosen.with_made_data() if made else chosen
    chosen = chosen.with_split(split) if split else chosen
    for option, wanted in (("--learn", learn), ("--search-and-ask", search_and_ask)):
        if wanted and bank is None:
            raise ConfigError(f"Expected --bank FOLDER with {option}, got none")
    if episodes is not None and visits > episodes:
        raise ConfigError(
            f"Expected at most as many --visits as --episodes ({episodes}), got {visits}"
        )
    facts = chosen.ready()
    file = results or FOLDER / f"{chosen.name}-{agent.replace(':', '.')}-{seed}.json"
    about, remedy = "results of experiential bench run", "use --overwrite or another --results"
    store = ResultStore(file.parent, SuiteResults, about=about, remedy=remedy, overwrite=overwrite)
    name = file.name.removesuffix(".json")
    with ExitStack() as stack:
        asks = agent == "llm" or learn
        llm, prompts = None, "full"
        if asks:
            named = model_of(context.params)
            check_model(named)
            llm, prompts = stack.enter_context(closing(open_model(named))), prompt_set_name(named)
        meter = Meter()
        make_actor, second = open_agents(context.params, llm, prompts, meter)
        settings = settings_of(chosen, facts, context.params, asks=asks)
        if second is not None and second.extractor is None:
            with second.open() as opened:
                settings["commit"] = opened.head  # a bank that has grown since is another setting
        done = store.find(name, settings) or SuiteResults(settings=settings)
        slots = slots or (8 if agent == "llm" else 1)
        seat = SEATS.get(agent)
        plan = Plan(episodes, visits, seed, split, slots, search_and_ask, seat, meter)
        latest, spent = [done], None

        def keep(found: SuiteResults) -> None:
            latest.append(found)
            store.keep(name, found)

        try:
            done = asyncio.run(play_suite(chosen, plan, make_actor, second, done, keep))
        except KeyboardInterrupt:
            return complain("interrupted; the same command goes on", 130)
        except BudgetError as error:
            spent = f"{error}; the same command without --overwrite goes on with what is left"
            done = latest[-1]
            if not done.cells:
                return complain(spent, 1)

    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    console.print(report_table(title_of(chosen, facts, agent, seed), done.report))
    source = "MADE DATA, not that of" if any(one.data == "made" for one in facts) else "as in"
    console.print(f"{source} {chosen.source}", markup=False, highlight=False)
    for task in done.report["tasks"]:
        for reason, count in task["failures"].items():
            line = f"{task['task']} ({task['arm']}): {count} failed: {reason}"
            console.print(line, markup=False, highlight=False)
    for task in done.report["tasks"]:
        shares = ((role, Spent(**task[role])) for role in ("actor", "extractor") if role in task)
        if words := [f"{role} {one.describe()}" for role, one in shares if one.requests]:
            show_line(console, f"{task['task']} ({task['arm']}) spent: {'; '.join(words)}")
    show_line(console, f"results: {store.path(name)}")
    if spent is not None:
        return complain(spent, 1)
    return int(any(task["failed"] == task["episodes"] for task in done.report["tasks"]))


def open_agents(
    options: dict[str, Any], llm: LLM | None, prompts: str, meter: Meter
) -> tuple[MakeActor, SuiteBank | None]:
    """Return what builds the agent, and its bank; agent and extractor ask ``llm``, if wanted.

    ``meter`` counts what the agent generates; the bank has one of its own.
    """
    from experiential.agents.actor import ActorAgent
    from experiential.agents.extractor import ExtractorAgent
    from experiential.evaluation.players import AGENT, SEATS, Player
    from experiential.evaluation.suite_play import SuiteBank
    from experiential.llm.metered import Metered

    bank = None
    if options["bank"] is not None:
        distilling, extractor = Meter(), None
        if options["learn"] and llm is not None:
            extractor = ExtractorAgent(
                Metered(llm, distilling), prompts=prompts, seed=options["seed"]
            )
        folder, namespace, embedder = (options[one] for one in ("bank", "namespace", "embedder"))
        bank = SuiteBank(folder, namespace, embedder, extractor, distilling)
    name: str = options["agent"]
    if name in SEATS:
        return lambda: Player(lambda observation, info: info[AGENT](observation, info)), bank
    if llm is not None and name == "llm":
        kept = ("instruction", "temperature", "max_tokens", "history")
        settings: dict[str, Any] = {one: options[one] for one in kept} | {"prompts": prompts}
        # the tiny model writes no actions: it only chooses
        settings["constrain"] = options["constrain"] or prompts == "brief"
        return lambda: ActorAgent(Metered(llm, meter), **settings), bank
    module, _, attribute = name.partition(":")
    found = import_from_here(module, f"--agent {name}") if attribute else None
    function: Any = getattr(found, attribute, None)
    if not callable(function):
        raise ConfigError(
            "Expected an agent as llm, random, oracle or module:function, callable with observation"
            f" and info, got {name!r}"
        )
    return lambda: Player(function), bank


def model_of(options: dict[str, Any]) -> ModelSettings:
    """Return the settings of the language model that the options name."""
    backend, more = options["backend"], dict[str, Any]()
    if backend == "scripted":
        file: Path | None = options["replies"]
        try:
            lines = file.read_text(encoding="utf-8").splitlines() if file else []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Expected a text file of replies, got {file}: {error}") from error
        more = {"replies": [line for line in lines if line.strip()]}
        if not more["replies"]:
            raise ConfigError(
                "Expected --replies FILE with a reply a line for --backend scripted, got"
                f" {file or 'none'}"
            )
    if options["constrain"] and (backend == "openai" or options["base_url"]):
        more = {"supports_choices": True}
    settings = named_model(
        options["model"],
        options["base_url"],
        options["api_key_env"],
        backend,
        options["backend_option"],
        **more,
    )
    return settings.model_copy(update={name: options[name] for name in ("dtype", "device")})


def title_of(suite: Suite, facts: Sequence[TaskFacts], agent: str, seed: int) -> str:
    """Return the title of a report, with a line for each task on what was played."""
    return "\n".join([f"{suite.name}: {agent}, seed {seed}", *(one.line() for one in facts)])


def settings_of(
    suite: Suite, facts: Sequence[TaskFacts], options: dict[str, Any], *, asks: bool
) -> dict[str, Any]:
    """Return all that decides what is played; results of other settings are never mixed with it.

    ``asks`` says that a language model is asked, by the agent or an extractor.
    """
    from experiential.evaluation.cell import package_version
    from experiential.llm.hosted import NEUTRAL

    given = {name: options[name] for name in (*_OF_RUN, *(_OF_AGENT if asks else ()))}
    if more := given.get("backend_option"):
        counted = [one for one in more if one.partition("=")[0] not in NEUTRAL]
        given["backend_option"] = counted or None
    return {
        "suite": suite.name,
        "tasks": [
            {**one.model_dump(), "kwargs": task.kwargs, "turns": task.turns}
            for task, one in zip(suite.tasks, facts, strict=True)
        ],
        **{name: str(value) if isinstance(value, Path) else value for name, value in given.items()},
        "commit": None,
        "version": package_version(),
    }


def report_table(title: str, found: dict[str, Any]) -> Table:
    """Lay the report of a suite out as a table; differences in success are in points."""
    caption = "95 % intervals; tokens 0: the agent has no model, or its backend reports none"
    table = Table(title=title, caption=caption)
    table.add_column("task")
    table.add_column("arm")
    table.add_column("data, split, digest")
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
        played = " ".join(str(row[name]) for name in ("data", "split", "digest") if row.get(name))
        table.add_row(row["task"], arm, played, *measured, *counts, end_section=last)
    return table
