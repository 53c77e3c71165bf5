"""List suites and evaluate an agent on one with `experiential bench`.

The agent plays without a bank and with one, under the arms of an evaluation.

    experiential bench suites
    experiential bench run --suite six-task --agent oracle
    experiential bench run --suite sokoban --agent mymodule:act
    experiential bench run --suite room --model smollm2 --bank FOLDER --learn

Each episode is in a log when it ends, and the same command plays only what is missing there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from experiential.cli.errors import complain, new_app
from experiential.cli.options import (
    Agent,
    AsJson,
    Backend,
    BackendOption,
    BaseUrl,
    Concurrency,
    Constrain,
    Device,
    Dtype,
    Embedder,
    ExtraBody,
    History,
    Instruction,
    KeyEnv,
    Made,
    MaxTokens,
    Namespace,
    Price,
    Replies,
    Retries,
    SplitName,
    SuiteName,
    TaskNames,
    Temperature,
    Timeout,
    Visits,
    named_model,
)
from experiential.cli.progress import Progress
from experiential.cli.rows import show_json, show_line, show_table
from experiential.config import Arm, BankArm, ModelSettings
from experiential.errors import BackendError, BudgetError, ConfigError
from experiential.llm.base import LLM
from experiential.llm.metered import Spent
from experiential.plugins import did_you_mean, import_from_here, known_names

if TYPE_CHECKING:
    from experiential.evaluation.play_log import PlayLog
    from experiential.evaluation.suite_play import (
        MakeActor,
        Plan,
        PlannedCell,
        SuiteBank,
        SuiteResults,
    )
    from experiential.evaluation.suites import Suite, TaskFacts

FOLDER = Path("runs/benchmarks")
"""Where results go by default."""
GOES_ON = "The same command goes on with what is left.\n"
"""Said after an interruption."""
STOPPED = "the same command without --overwrite goes on with what is left"
"""Said after an error of the model or its budget."""
WIDE = 400
"""Columns of a table that is not shown in a terminal."""
_OF_AGENT = (
    "backend backend_option dtype temperature max_tokens constrain history instruction replies"
    " extra_body"
).split()
_OF_ACTOR = "temperature max_tokens history instruction constrain".split()
_OF_MODEL = (
    "backend backend_option model base_url api_key_env timeout retries concurrency price max_cost"
    " extra_body replies dtype device"
).split()
"""Options of an agent with a model, and of any model; refused where there is none."""
_OF_RUN = "agent visits seed search_and_ask bank namespace embedder".split()
"""Options that decide what is played; the former only where a language model is asked."""
_OF_SERVER = {
    "timeout": "timeout",
    "retries": "max_retries",
    "concurrency": "max_concurrency",
    "price": "price",
    "extra_body": "extra_body",
    "max_cost": "max_cost",
}
"""Option here to the option of the backend ``openai``."""
READING: set[Arm] = {"frozen", "shuffled", "placebo"}
"""Arms that read a bank and do not change it."""
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
    """List the suites, also those of installed packages: tasks, source, missing requirements."""
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
        lines = (f"{row['suite']:20} {', '.join(row['tasks'])}", row["source"], state)
        sys.stdout.write(f"\n{'':21}".join(lines) + "\n")


@app.command()
def run(
    context: typer.Context,
    suite: SuiteName,
    tasks: TaskNames = None,
    agent: Agent = "llm",
    episodes: Annotated[
        int | None,
        Option(
            min=1, help="Episodes per task and arm.  [default: all of an official set, else 100]"
        ),
    ] = None,
    visits: Visits = 1,
    seed: Annotated[int, Option(min=0, help="Seed of worlds, episodes and sampling.")] = 0,
    split: SplitName = None,
    made: Made = False,
    slots: Annotated[int, Option(min=0, help="Episodes at once; 0: 8 for llm, 1 for others.")] = 0,
    results: Annotated[
        Path | None,
        Option(
            help="A JSON file; the log of episodes is beside it, with the ending .jsonl."
            f"  [default: {FOLDER}/SUITE-AGENT-MODEL-SEED.json]"
        ),
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Begin anew and discard the log.")
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show the episodes to play and their possible cost.")
    ] = False,
    bank: Annotated[
        str | None,
        Option(
            help="Folder or address of a bank: each task is played without it and with it. It is"
            " read, not written."
        ),
    ] = None,
    arms: Annotated[
        str | None,
        Option(
            help="Arms, separated by commas: off, on, frozen, shuffled, placebo.  [default: off;"
            " with --bank off,frozen; with --learn off,on]"
        ),
    ] = None,
    learn: Annotated[
        bool, Option("--learn", help="Let the bank grow; create it if there is none.")
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
            help="tiny (default), smollm2, a folder or a hub name; with --base-url the name at the"
            " server, by default its only model."
        ),
    ] = None,
    base_url: BaseUrl = None,
    api_key_env: KeyEnv = None,
    timeout: Timeout = None,
    retries: Retries = None,
    concurrency: Concurrency = None,
    price: Price = None,
    max_cost: Annotated[
        float | None,
        Option(
            min=0,
            help="Limit in dollars, earlier runs of this command included. Requests in flight at"
            " the limit are still paid for.",
        ),
    ] = None,
    extra_body: ExtraBody = None,
    replies: Replies = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 256,
    history: History = None,
    instruction: Instruction = "",
    constrain: Constrain = False,
) -> int:
    """Evaluate an agent on a suite; exit code 1 if every episode of a task failed.

    Without --bank each task is played once, with --bank under several arms: on the same worlds and
    seeds, without the bank and with it. The same command continues where it stopped.
    """
    from experiential.cli.estimate import describe_suite
    from experiential.evaluation.play_log import PlayLog
    from experiential.evaluation.players import SEATS
    from experiential.evaluation.results import write_whole
    from experiential.evaluation.suite_play import Plan, plan_cells, results_of

    options = dict(context.params)
    refuse_unused(context, actor=agent == "llm", model=agent == "llm" or learn)
    chosen = chosen_suite(options)
    wanted = arms_of(options)
    facts = chosen.ready()
    named = model_of(options) if agent == "llm" or learn else None
    function = None if agent in ("llm", *SEATS) else find_function(agent)
    file = results or FOLDER / f"{file_name(chosen, agent, named, seed)}.json"
    slots = slots or (8 if agent == "llm" else 1)
    plan = Plan(episodes, visits, seed, split, slots, search_and_ask, SEATS.get(agent))
    settings = settings_of(chosen, facts, options, _OF_RUN, named)
    second = None if bank is None else open_bank(options, wanted, file)
    if second is not None and set(wanted) & READING:
        with second.open() as opened:
            settings["commit"] = opened.head  # a bank that has grown since is another setting
    cells = plan_cells(chosen, plan, wanted)
    log_file = log_path(file, overwrite=overwrite)
    remedy = "use --overwrite or another --results"
    if dry_run:
        for line in describe_suite(cells, plan, options, log_file, settings, remedy):
            sys.stdout.write(line + "\n")
        return 0

    stopped, code = None, 0
    with PlayLog(log_file, settings, overwrite=overwrite, remedy=remedy) as log:
        try:
            play(cells, plan, options, named, function, second, log)
        except KeyboardInterrupt:
            code = 130
        except BackendError as error:
            stopped = f"{error}; {STOPPED}"
        done = results_of(log, cells, settings)
    if done.cells:
        write_whole(file, done.model_dump_json(indent=1) + "\n")
        title = title_of(chosen, facts, agent, seed)
        show_results(title, source_of(chosen, facts), done, file)
    if stopped is not None:
        return complain(stopped, 1)
    if code:
        sys.stderr.write(GOES_ON)  # `exit_code` says that it was interrupted
        return code
    return int(any(task["failed"] == task["episodes"] for task in done.report["tasks"]))


def refuse_unused(context: typer.Context, *, actor: bool, model: bool) -> None:
    """Refuse options of a model on the command line where no model plays (actor) or is asked."""
    for name in (*([] if actor else _OF_ACTOR), *([] if model else _OF_MODEL)):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option, agent = name.replace("_", "-"), context.params["agent"]
            raise ConfigError(
                f"Expected no --{option} with --agent {agent}, which asks no model; leave it out,"
                " or choose --agent llm"
            )


def chosen_suite(options: dict[str, Any]) -> Suite:
    """Return the suite that the options name, with the tasks, data and split that they ask for."""
    from experiential.evaluation.suites import find_data, find_suite

    find_data()
    chosen = find_suite(options["suite"], options["tasks"].split(",") if options["tasks"] else None)
    chosen = chosen.with_made_data() if options["made"] else chosen
    return chosen.with_split(options["split"]) if options["split"] else chosen


def arms_of(options: dict[str, Any]) -> list[Arm]:
    """Return the arms that the options ask for; refuse options that do not fit together."""
    learn, bank = options["learn"], options["bank"]
    for option in ("learn", "search_and_ask", "arms"):
        if options[option] and bank is None and options[option] != "off":
            name = "--" + option.replace("_", "-")
            raise ConfigError(f"Expected --bank FOLDER with {name}, got none")
    if options["episodes"] is not None and options["visits"] > options["episodes"]:
        raise ConfigError(
            f"Expected at most as many --visits as --episodes ({options['episodes']}), got"
            f" {options['visits']}"
        )
    default = "off" if bank is None else "off,on" if learn else "off,frozen"
    arms = dict.fromkeys(arm.strip() for arm in (options["arms"] or default).split(","))
    for arm in arms:
        if arm not in get_args(BankArm):
            raise ConfigError(
                f"Expected --arms among {', '.join(get_args(BankArm))}, got"
                f" {arm!r}{did_you_mean(arm, get_args(BankArm))}"
            )
    if learn != ("on" in arms):
        raise ConfigError(
            "Expected --learn and the arm on together, since that arm lets the bank grow, got"
            f" {'only --learn' if learn else 'only the arm'}"
        )
    return cast("list[Arm]", list(arms))


def file_name(suite: Suite, agent: str, named: ModelSettings | None, seed: int) -> str:
    """Return the name of the results: each suite, agent, model and seed has its own."""
    parts = [suite.name, agent, *([named.name] if named is not None else []), str(seed)]
    return "-".join(re.sub(r"[^\w.-]+", "_", part)[-80:].strip("_.") for part in parts)


def log_path(file: Path, *, overwrite: bool) -> Path:
    """Return the log that belongs to a file of results, which has the ending .jsonl."""
    if not file.name or os.path.isdir(file):
        raise ConfigError(f"Expected --results to be a JSON file, got the folder {file}")
    log = file.with_suffix(".jsonl")
    if log == file:
        raise ConfigError(f"Expected --results to be a JSON file, got {file}, where its log goes")
    if os.path.isfile(file) and not os.path.exists(log) and not overwrite:
        raise ConfigError(
            f"Expected the log {log} beside the results {file}, got results without one; use"
            " --overwrite or another --results"
        )
    return log


def open_bank(options: dict[str, Any], arms: Sequence[Arm], file: Path) -> SuiteBank:
    """Return the bank of the arms.

    Where some read a bank that another one lets grow, those read a copy of its state before. It
    lies beside the results, so that a run that goes on reads the same.
    """
    from experiential.evaluation.suite_play import SuiteBank

    bank = SuiteBank(options["bank"], options["namespace"], options["embedder"])
    if "on" not in arms or not set(arms) & READING:
        return bank
    copy = file.with_suffix(".snapshot")
    fresh = options["overwrite"] or not file.with_suffix(".jsonl").exists()
    if fresh and not options["dry_run"]:
        shutil.rmtree(copy, ignore_errors=True)
        with bank.open() as opened:
            opened.fork(copy).close()
    if copy.exists():
        bank.snapshot = copy
    return bank


def find_function(agent: str) -> Any:
    """Return the user's function of observation and info that the option names."""
    module, _, attribute = agent.partition(":")
    found = import_from_here(module, f"--agent {agent}") if attribute else None
    function: Any = getattr(found, attribute, None)
    if not callable(function):
        raise ConfigError(
            "Expected an agent as llm, random, oracle or module:function, callable with observation"
            f" and info, got {agent!r}"
        )
    return function


def play(
    cells: Sequence[PlannedCell],
    plan: Plan,
    options: dict[str, Any],
    named: ModelSettings | None,
    function: Any,
    bank: SuiteBank | None,
    log: PlayLog,
) -> None:
    """Play what the log lacks; a model is opened only for that.

    Raises:
        BudgetError: ``--max-cost`` or the budget of a backend is spent.
        BackendError: the server is down.
    """
    from experiential.agents.extractor import ExtractorAgent
    from experiential.evaluation.suite_play import play_cell
    from experiential.llm.metered import Metered

    missing = sum(len(cell.missing(log)) for cell in cells)
    if not missing:
        return
    total = sum(len(cell.jobs) for cell in cells)
    limit: float | None = options["max_cost"]
    with ExitStack() as stack:
        llm, prompts = opened_model(stack, named, limit, log.cost)
        make_actor = actor_maker(options, llm, prompts, function)
        if options["learn"] and bank is not None and llm is not None:
            metered = Metered(llm, bank.meter)
            bank.extractor = ExtractorAgent(metered, prompts=prompts, seed=plan.seed)
        progress = stack.enter_context(Progress(total, total - missing))

        async def play_all() -> None:
            for cell in cells:
                await play_cell(cell, plan, make_actor, bank, log, progress.note)

        try:
            asyncio.run(play_all())
        except BudgetError:
            within(named, limit, log.cost)
            raise


def opened_model(
    stack: ExitStack, named: ModelSettings | None, limit: float | None, spent: float
) -> tuple[LLM | None, str]:
    """Open a model until the stack is closed; return it and the name of its prompts.

    Raises:
        BudgetError: the limit is reached.
        ConfigError: the model does not answer.
    """
    from experiential.cli.preflight import check_model
    from experiential.llm.models import open_model
    from experiential.training.roles import prompt_set_name

    if named is None:
        return None, "full"
    named = within(named, limit, spent)
    check_model(named)
    return stack.enter_context(closing(open_model(named))), prompt_set_name(named)


def within(named: ModelSettings | None, limit: float | None, spent: float) -> ModelSettings:
    """Return a model that may cost what the limit leaves.

    Raises:
        BudgetError: the limit is reached.
    """
    if limit is None or named is None or named.server is None:
        return cast("ModelSettings", named)
    if spent >= limit * (1 - 1e-9):  # sums of prices are rounded
        raise BudgetError(
            f"Expected this command to stay within --max-cost {limit:g} dollars, got {spent:.4g};"
            " raise it to go on"
        )
    left = {**named.server.options, "max_cost": limit - spent}
    return named.model_copy(update={"server": named.server.model_copy(update={"options": left})})


def actor_maker(options: dict[str, Any], llm: LLM | None, prompts: str, function: Any) -> MakeActor:
    """Return what builds the agent of a slot: the user's function, a seated agent, or a model."""
    from experiential.agents.actor import ActorAgent
    from experiential.evaluation.players import Player, seated

    if function is not None:
        return lambda: Player(function)
    if options["agent"] != "llm" or llm is None:
        return seated
    kept = ("instruction", "temperature", "max_tokens", "history")
    settings: dict[str, Any] = {one: options[one] for one in kept} | {"prompts": prompts}
    # the tiny model writes no actions: it only chooses
    settings["constrain"] = options["constrain"] or prompts == "brief"
    return lambda: ActorAgent(llm, **settings)


def model_of(options: dict[str, Any]) -> ModelSettings:
    """Return the settings of the language model that the options name."""
    backend, more = options["backend"], dict[str, Any]()
    if backend == "scripted":
        file: Path | None = options["replies"]
        try:
            lines = file.read_text(encoding="utf-8").splitlines() if file else []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Expected a text file of replies, got {file}: {error}") from error
        more["replies"] = [line for line in lines if line.strip()]
        if not more["replies"]:
            raise ConfigError(
                "Expected --replies FILE with a reply a line for --backend scripted, got"
                f" {file or 'none'}"
            )
    hosted = backend == "openai" or (backend is None and options["base_url"])
    given = {name: options[name] for name in _OF_SERVER if options.get(name) is not None}
    if given and not hosted:
        raise ConfigError(
            f"Expected a server (--base-url) with --{next(iter(given)).replace('_', '-')}, got"
            " none; another backend takes such options as --backend-option KEY=VALUE"
        )
    more |= {_OF_SERVER[name]: value for name, value in given.items()}
    if "extra_body" in given:
        more["extra_body"] = json_object(given["extra_body"])
    if options["constrain"] and hosted:
        more["supports_choices"] = True
    settings = named_model(
        options["model"],
        options["base_url"],
        options["api_key_env"],
        backend,
        options["backend_option"],
        **more,
    )
    return settings.model_copy(update={name: options[name] for name in ("dtype", "device")})


def json_object(text: str) -> dict[str, Any]:
    """Return the object that ``--extra-body`` holds."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"Expected --extra-body to be JSON, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"Expected --extra-body to be a JSON object, got {text!r}")
    return cast("dict[str, Any]", value)


def title_of(suite: Suite, facts: Sequence[TaskFacts], agent: str, seed: int) -> str:
    """Return the title of a report, with a line for each task on what was played."""
    return "\n".join([f"{suite.name}: {agent}, seed {seed}", *(one.line() for one in facts)])


def source_of(suite: Suite, facts: Sequence[TaskFacts]) -> str:
    """Return the source of a suite in words, and whether its data are that of it."""
    source = "MADE DATA, not that of" if any(one.data == "made" for one in facts) else "as in"
    return f"{source} {suite.source}"


def settings_of(
    suite: Suite,
    facts: Sequence[TaskFacts],
    options: dict[str, Any],
    names: Sequence[str],
    named: ModelSettings | None,
) -> dict[str, Any]:
    """Return all that decides the outcome of an episode; a log holds episodes of one such setting.

    ``names`` are the options that count whatever the agent is. ``named`` is the model that the
    agent or an extractor asks, if any. Where it is does not matter.
    """
    from experiential.evaluation.cell import package_version
    from experiential.llm.hosted import NEUTRAL

    given = {name: options.get(name) for name in (*names, *(_OF_AGENT if named else ()))}
    if named is not None:
        given["model"] = named.name
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


def show_results(title: str, source: str, done: SuiteResults, file: Path) -> None:
    """Print the report, why episodes failed, what was spent, and where the results are."""
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    show_table(console, report_table(title, done.report))
    show_line(console, source)
    for task in done.report["tasks"]:
        for reason, count in task["failures"].items():
            show_line(console, f"{task['task']} ({task['arm']}): {count} failed: {reason}")
        if task["again"]:
            again = f"{task['again']} of them are played again by the same command"
            show_line(console, f"{task['task']} ({task['arm']}): {again}")
    for task in done.report["tasks"]:
        shares = ((role, Spent(**task[role])) for role in ("actor", "extractor"))
        if words := [f"{role} {one.describe()}" for role, one in shares if one.requests]:
            show_line(console, f"{task['task']} ({task['arm']}) spent: {'; '.join(words)}")
    show_line(console, f"results: {file}; episodes with transcripts: {file.with_suffix('.jsonl')}")


def interval_text(interval: dict[str, float], scale: float, shape: str) -> str:
    """Return an interval in words, each number times ``scale`` and in a format."""
    ends = (format(scale * interval[end], shape) for end in ("mean", "low", "high"))
    return "{} [{}, {}]".format(*ends)


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
            measured.append(interval_text(row[name], scale, sign + shape))
        counts = (str(row.get(name, "")) for name in ("episodes", "failed"))
        last = row is found["tasks"][-1]
        played = " ".join(str(row[name]) for name in ("data", "split", "digest") if row.get(name))
        table.add_row(row["task"], arm, played, *measured, *counts, end_section=last)
    return table
