"""Compare memories on a stream of tasks with `experiential bench stream`.

    experiential bench stream --suite alfworld --model smollm2 --constrain
    experiential bench stream --suite crossep-emb --transfer --orders 1 --agent oracle
    experiential bench stream --suite alfworld --arms none,bank,mymodule:MyMemory

Every episode stands in the log when it has ended; the same command goes on after an interruption.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from experiential.cli.bench import (
    FOLDER,
    GOES_ON,
    STOPPED,
    WIDE,
    actor_maker,
    chosen_suite,
    file_name,
    find_function,
    interval_text,
    model_of,
    opened_model,
    refuse_unused,
    settings_of,
    source_of,
    title_of,
)
from experiential.cli.errors import complain
from experiential.cli.options import (
    Agent,
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
    Price,
    Replies,
    Retries,
    SplitName,
    SuiteName,
    TaskNames,
    Temperature,
    Timeout,
    Visits,
)
from experiential.cli.progress import Progress
from experiential.cli.rows import show_line, show_table
from experiential.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from experiential.bank.extractor import Extractor
    from experiential.config import ModelSettings
    from experiential.evaluation.memories import MakeMemory
    from experiential.evaluation.play_log import PlayLog
    from experiential.evaluation.stream import StreamPlan
    from experiential.evaluation.suites import Suite
    from experiential.llm.metered import Meter

ARMS = "none,trajectory,bm25,template,bank,bank-frozen,bank-shuffled"
_OF_STREAM = "agent episodes visits seed freeze_after k embedder".split()
"""Options that decide what is played, besides those of a model. More arms, orders and transfers
only add to a log.
"""
_COLUMNS = {
    "success": ("success, %", 100.0, ".1f"),
    "turns": ("steps", 1.0, ".1f"),
    "tokens": ("tokens", 1.0, ",.0f"),
    "forward_transfer": ("forward transfer, points", 100.0, "+.1f"),
}


def stream(
    context: typer.Context,
    suite: SuiteName,
    tasks: TaskNames = None,
    arms: Annotated[
        str,
        Option(
            help="Memories to compare: of none, trajectory, bm25, template, bank, bank-frozen,"
            " bank-shuffled and bank-placebo, entry points of experiential.memories, or"
            f" module:attribute.  [default: {ARMS}]",
            show_default=False,
        ),
    ] = ARMS,
    agent: Agent = "llm",
    episodes: Annotated[
        int | None,
        Option(min=1, help="Episodes of each task.  [default: every world, once per visit]"),
    ] = None,
    visits: Visits = 1,
    orders: Annotated[int, Option(min=1, help="Number of orders of the episodes.")] = 3,
    transfer: Annotated[
        bool,
        Option(
            "--transfer",
            help="Afterwards read the memory of each task in the others, without learning.",
        ),
    ] = False,
    freeze_after: Annotated[
        int | None,
        Option(min=0, help="Episodes that bank-frozen learns from.  [default: half]"),
    ] = None,
    k: Annotated[int, Option("--recalled", min=1, help="Entries or episodes recalled.")] = 3,
    seed: Annotated[int, Option(min=0, help="Seed of worlds, orders, episodes and sampling.")] = 0,
    split: SplitName = None,
    made: Made = False,
    slots: Annotated[int, Option(min=0, help="Streams at once; 0: 8 for llm, 1 for others.")] = 0,
    results: Annotated[
        Path | None,
        Option(help=f"A JSON Lines file.  [default: {FOLDER}/stream-SUITE-AGENT-MODEL-SEED.jsonl]"),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Play everything again.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show the episodes to play and their possible cost.")
    ] = False,
    embedder: Embedder = None,
    backend: Backend = None,
    backend_option: BackendOption = None,
    model: Annotated[
        str | None, Option(help="Model that plays and distils, as for `experiential bench run`.")
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
            help="Limit in dollars for the agent, earlier runs of this log included. Requests in"
            " flight at the limit are still paid for.",
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
    """Compare memories on streams: tasks in a seeded order, while each memory grows.

    Every arm meets the same episodes in the same orders. The model that plays also distils for the
    arms with a bank; without --agent llm a fixed template does, so that `bank` is `template`.
    """
    from experiential.cli.estimate import describe_streams
    from experiential.evaluation.memories import find_memory
    from experiential.evaluation.play_log import PlayLog
    from experiential.evaluation.players import SEATS
    from experiential.evaluation.results import write_whole
    from experiential.evaluation.stream import finished
    from experiential.evaluation.stream_report import report

    options = dict(context.params)
    refuse_unused(context, actor=agent == "llm", model=agent == "llm")
    chosen = chosen_suite(options)
    facts = chosen.ready()
    plan = plan_of(chosen, options)
    memories = {name: find_memory(name) for name in plan.arms}
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    if dry_run:
        for line in describe_streams(plan, options):
            show_line(console, line)
        return 0
    known = model_of(options) if agent == "llm" else None
    function = None if agent in ("llm", *SEATS) else find_function(agent)
    settings = settings_of(chosen, facts, options, _OF_STREAM, known)
    file = results or FOLDER / f"stream-{file_name(chosen, agent, known, seed)}.jsonl"
    if not file.name or os.path.isdir(file) or file.suffix == ".json":
        raise ConfigError(
            f"Expected --results to be a JSON Lines file, beside which the report goes with the"
            f" ending .json, got {file}"
        )
    remedy = "use --overwrite or another --results"
    with PlayLog(file, settings, overwrite=overwrite, remedy=remedy) as log:
        try:
            play(plan, options, known, function, memories, log)
        except KeyboardInterrupt:
            sys.stderr.write(GOES_ON)  # `exit_code` says that it was interrupted
            return 130
        except BackendError as error:
            return complain(f"{error}; {STOPPED}", 1)
        found = report(finished(plan, log.episodes.values()))
    text = json.dumps({"settings": settings, **found}, indent=1)
    write_whole(file.with_suffix(".json"), text + "\n")
    show_table(console, report_table(title_of(chosen, facts, agent, seed), found))
    show_line(console, source_of(chosen, facts))
    show_line(console, f"episodes: {file}; report: {file.with_suffix('.json')}")
    return 0


def plan_of(suite: Suite, options: dict[str, Any]) -> StreamPlan:
    """Return the streams that the options ask for; refuse options that do not fit together."""
    from experiential.evaluation.players import SEATS
    from experiential.evaluation.stream import StreamPlan

    if options["transfer"] and len(suite.tasks) < 2:
        raise ConfigError(
            f"Expected a suite of several tasks for --transfer, got {suite.name} with one; choose"
            " another --suite, or leave out --tasks"
        )
    agent, arms = options["agent"], list(dict.fromkeys(options["arms"].split(",")))
    if agent != "llm" and "bank" in arms and "template" in arms:
        arms.remove("template")  # the same without a model that distils
    same = ("episodes", "visits", "orders", "seed", "transfer", "freeze_after")
    return StreamPlan(
        tasks=suite.tasks,
        arms=tuple(arms),
        slots=options["slots"] or (8 if agent == "llm" else 1),
        seat=SEATS.get(agent),
        **{name: options[name] for name in same},
    )


def play(
    plan: StreamPlan,
    options: dict[str, Any],
    known: ModelSettings | None,
    function: Any,
    memories: dict[str, MakeMemory],
    log: PlayLog,
) -> None:
    """Play what the log lacks.

    Raises:
        BackendError: the agent or its model failed.
        BudgetError: ``--max-cost`` is reached.
        ConfigError: the model does not answer, or an environment cannot be made.
    """
    from experiential.agents.extractor import ExtractorAgent
    from experiential.agents.functions import template_extractor
    from experiential.bank.index.embed import CachedEmbedder, resolve_embedder
    from experiential.evaluation.stream import Tools, play_streams, stream_of
    from experiential.llm.metered import Metered

    with ExitStack() as stack:
        llm, prompts = opened_model(stack, known, options["max_cost"], log.cost)

        def extractor(meter: Meter) -> Extractor:
            if llm is None:
                return template_extractor()
            return ExtractorAgent(Metered(llm, meter), prompts=prompts, seed=plan.seed)

        tools = Tools(
            make_actor=actor_maker(options, llm, prompts, function),
            make_extractor=extractor,
            memories=memories,
            embedder=CachedEmbedder(resolve_embedder(options["embedder"])),
            k=options["k"],
        )
        sizes = {key: len(plan.steps(key)) for key in plan.streams()}
        before = sum(stream_of(one) in sizes for one in log.episodes.values())
        progress = stack.enter_context(Progress(sum(sizes.values()), before))
        asyncio.run(play_streams(plan, tools, log, progress.note))


def report_table(title: str, found: dict[str, Any]) -> Table:
    """Lay the report out as a table, a row for each arm in each task and each transfer."""
    table = Table(
        title=title,
        caption="95 % intervals; forward transfer: success minus that of `none` on the same"
        " episodes; orders: lowest and highest success",
    )
    for name in ("task", "arm"):
        table.add_column(name)
    for name in (*(column for column, _, _ in _COLUMNS.values()), "orders, %", "episodes"):
        table.add_column(name, justify="right")
    last = found["rows"][-1]
    for row in (*found["rows"], *found["overall"]):
        task = row["source"] if row["task"] in ("", row["source"]) else _pair(row)
        cells: list[str] = []
        for name, (_, scale, shape) in _COLUMNS.items():
            cells.append(interval_text(row[name], scale, shape) if row[name] else "")
        orders = row.get("by_order", [])
        spread = f"{100 * min(orders):.0f} to {100 * max(orders):.0f}" if len(orders) > 1 else ""
        played = str(row.get("episodes", ""))
        table.add_row(task, row["arm"], *cells, spread, played, end_section=row is last)
    return table


def _pair(row: dict[str, Any]) -> str:
    return f"{row['source']} → {row['task']}"
