"""Estimate episodes, tokens and memory of a run from its configuration alone."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from experiential.config import Experiment
from experiential.llm.metered import in_dollars

if TYPE_CHECKING:
    from experiential.evaluation.stream import StreamPlan
    from experiential.evaluation.suite_play import Plan, PlannedCell
    from experiential.training.openrlhf.placement import Placement

Bound = npt.NDArray[np.int64]
"""The most requests, tokens read and tokens written, shape (3,)."""
KNOWN_PARAMETERS = {"tiny": 4e6, "smollm2": 135e6}
"""Parameters of the models that need no folder, rounded."""

LETTERS = 3
"""Characters of a token, to estimate: few, since grids and names take more tokens than prose."""
SYSTEM = 500
"""Tokens of a system message with advice, to estimate."""


def training_episodes(experiment: Experiment) -> int:
    """Count the episodes of a training, including those that fill the bank before it.

    Second attempts come on top, at most as many again.
    """
    prepare = experiment.methods.prepare
    return (
        (experiment.run.steps + (prepare.steps if prepare else 0))
        * experiment.actor.groups
        * experiment.actor.group_size
    )


def evaluation_episodes(experiment: Experiment) -> int:
    """Count the episodes of all evaluations.

    Each held-out world is visited several times in each arm; without a bank there is only ``off``.
    """
    settings = experiment.eval
    arms = sum(arm == "off" or experiment.extractor.enabled for arm in settings.arms)
    between = experiment.run.steps // settings.every if settings.every else 0
    return (settings.before + between + settings.after) * settings.worlds * settings.visits * arms


def memory_gb(experiment: Experiment) -> float | None:
    """Estimate the memory of the policies in gigabytes; None where that needs a download.

    It holds weights, gradients, AdamW's moments, master weights and KL references; activations are
    not included. dtype: auto counts as float32. A server takes none here.
    """
    frozen = experiment.runtime == "frozen"
    if frozen and experiment.model.server is not None:
        return 0.0
    count = KNOWN_PARAMETERS.get(experiment.model.name)
    if count is None:
        files = list(Path(experiment.model.name).expanduser().glob("*.safetensors"))
        count = sum(file.stat().st_size for file in files) / 2
        if not files:
            return None
    width = 2 if experiment.model.dtype == "bfloat16" else 4
    if frozen:
        return count * width / 1e9
    if experiment.model.lora:
        return count * width * 1.05 / 1e9
    extractor = experiment.extractor
    second = extractor.enabled and not extractor.shared
    references = (experiment.actor.kl > 0) + (extractor.enabled and extractor.kl > 0)
    learning = 16 if width == 4 else 18  # gradients, moments and masters are float32 in any case
    return count * ((1 + second) * learning + references * width) / 1e9


def describe_cost(experiment: Experiment, placement: Placement | None = None) -> Iterator[str]:
    """Yield the lines of `--dry-run`; ``placement`` is None for a run in this process."""
    train, evaluate = training_episodes(experiment), evaluation_episodes(experiment)
    again = train if experiment.methods.reflection else 0
    turns = (train + again + evaluate) * experiment.env.max_turns
    yield (
        f"episodes: {train:,} in training{f', at most {again:,} second attempts' if again else ''},"
        f" {evaluate:,} in evaluation"
    )
    yield f"turns: at most {turns:,} ({experiment.env.max_turns} an episode)"
    yield f"tokens sampled by the actor: at most {turns * experiment.actor.max_tokens:,}"
    if experiment.extractor.enabled:
        most, actor = experiment.extractor.per_group, experiment.actor
        spared = max(0, actor.group_size - most) * actor.groups * experiment.run.steps
        distilled = train - (spared if most else 0)
        written = distilled * experiment.extractor.drafts * experiment.extractor.max_tokens
        yield f"tokens sampled by the extractor in training: at most {written:,}"
    if reflection := experiment.methods.reflection:
        yield f"tokens sampled in reflections: at most {again * reflection.max_tokens:,}"
    if placement is not None:
        from experiential.training.openrlhf.placement import describe_placement

        yield from describe_placement(experiment, placement)
    else:
        memory = memory_gb(experiment)
        known = "unknown until the model is loaded" if memory is None else f"about {memory:.2g} GB"
        yield f"memory of weights and optimisers: {known}"


def describe_suite(
    cells: Sequence[PlannedCell],
    plan: Plan,
    options: dict[str, Any],
    log_file: Path,
    settings: dict[str, Any],
    remedy: str,
) -> Iterator[str]:
    """Yield the lines of `bench run --dry-run`: what is to be played, and what that may cost.

    The bounds suppose that every episode uses up its turns and every response its tokens. How long
    observations are is seen in one episode of random play for each task; where the log has
    episodes, what these took is shown too.

    Raises:
        ConfigError: the log is damaged or of other settings; `remedy` says what to do about it.
    """
    from experiential.evaluation.play_log import PlayedEpisode, read_log

    goes_on = os.path.exists(log_file) and not options["overwrite"]
    lines = list(read_log(log_file, settings, remedy)) if goes_on else []
    logged = {one.key: one for one in lines if isinstance(one, PlayedEpisode) and not one.stopped}
    finished = {key for key, one in logged.items() if not one.again}
    most, episodes, sizes = np.zeros(3, dtype=np.int64), 0, dict[str, int]()
    for cell in cells:
        missing = sum(cell.key(job) not in finished for job in cell.jobs)
        done = f", {len(cell.jobs) - missing:,} are finished" if missing < len(cell.jobs) else ""
        turns = f"at most {cell.task.turns} turns"
        yield f"{cell.task.name} ({cell.arm}): {missing:,} episodes of {turns}{done}"
        if not missing or (options["agent"] != "llm" and cell.arm != "on"):
            continue
        name = cell.task.name
        sizes[name] = size = sizes.get(name) or observation_tokens(cell, plan)
        if options["agent"] == "llm":
            episodes += missing
            most += missing * episode_bound(cell.task.turns, size, options)
        if cell.arm == "on":
            most += missing * distilling_bound(cell.task.turns, size, options)
    yield from describe_bound(most, options["price"])
    if measured := [one.spent for one in logged.values() if one.spent.tokens and not one.again]:
        mean = sum(one.tokens for one in measured) / len(measured)
        dollars = [one.cost for one in measured if one.cost is not None]
        cost = f", {in_dollars(episodes * sum(dollars) / len(dollars))}" if dollars else ""
        tokens = f"about {episodes * mean:,.0f} tokens{cost}"
        yield f"by the {len(measured):,} episodes in the log: {tokens}"


def describe_streams(plan: StreamPlan, options: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of `bench stream --dry-run`, with the bounds of `describe_suite`.

    What a log holds already is not subtracted. Advice that holds past episodes counts at its
    greatest length.
    """
    from experiential.agents.functions import EXAMPLE_LIMIT
    from experiential.evaluation.memories import FROZEN
    from experiential.evaluation.suite_play import Plan, PlannedCell

    streams = {key: plan.steps(key) for key in plan.streams()}
    total, turns = sum(map(len, streams.values())), max(task.turns for task in plan.tasks)
    line = f"{len(streams)} streams, {total:,} episodes of at most {turns} steps"
    yield f"{line}: at most {total * turns:,} replies of the agent"
    if options["agent"] != "llm":
        yield "no model is asked"
        return
    most, sizes, suite_plan = np.zeros(3, dtype=np.int64), dict[str, int](), Plan(seed=plan.seed)
    for key, steps in streams.items():
        examples = key.arm in ("trajectory", "bm25")
        advice = options["k"] * EXAMPLE_LIMIT // LETTERS if examples else 0
        for task, job, learns in steps:
            cell = PlannedCell(task, "off", (job,))
            size = sizes.get(task.name) or observation_tokens(cell, suite_plan)
            sizes[task.name] = size
            most += episode_bound(task.turns, size, options, advice)
            if learns and (key.arm == FROZEN or key.arm.startswith("bank")):
                most += distilling_bound(task.turns, size, options)
    yield from describe_bound(most, options["price"])


def episode_bound(turns: int, size: int, options: dict[str, Any], advice: int = 0) -> Bound:
    """Return the most that an episode takes: requests, tokens read and tokens written, shape (3,).

    Args:
        turns: at most.
        size: tokens of an observation.
        options: of the command line, with ``max_tokens`` and ``history``.
        advice: tokens in the system message beside the usual ones.
    """
    history, written = options["history"], options["max_tokens"]
    shown = sum(turn if history is None else min(turn, history) for turn in range(turns))
    read = turns * (SYSTEM + advice + size) + shown * (size + written)
    return np.array([turns, read, turns * written])


def distilling_bound(turns: int, size: int, options: dict[str, Any]) -> Bound:
    """Return the most that distilling an episode takes, as `episode_bound`: it is read once."""
    return np.array([1, SYSTEM + turns * (size + options["max_tokens"]), 512])


def describe_bound(most: Bound, price: tuple[float, float] | None) -> Iterator[str]:
    """Yield lines on requests, tokens read and tokens written, shape (3,), and their cost."""
    calls, read, written = most.tolist()
    if not calls:
        yield "no model is asked"
        return
    yield f"requests to the model: at most {calls:,}"
    yield f"tokens: at most about {read:,} read and {written:,} written"
    if price is None:
        yield "cost: unknown; pass --price IN OUT"
    else:
        most = (read * price[0] + written * price[1]) / 1e6
        yield f"cost: at most about {in_dollars(float(most))}"


def observation_tokens(cell: PlannedCell, plan: Plan) -> int:
    """Estimate the tokens of an observation from one episode of random play."""
    from experiential.evaluation.play_log import PlayedEpisode, PlayLog, read_log
    from experiential.evaluation.players import SEATS, seated
    from experiential.evaluation.suite_play import play_cell

    one = replace(cell, arm="off", jobs=cell.jobs[:1])
    plan = replace(plan, slots=1, search_and_ask=0, seat=SEATS["random"])
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "log.jsonl"
        with PlayLog(path, {}) as log:
            asyncio.run(play_cell(one, plan, seated, None, log))
        (played,) = (line for line in read_log(path) if isinstance(line, PlayedEpisode))
    texts = [turn.observation for turn in played.transcript] or [played.end]
    return sum(map(len, texts)) // (LETTERS * len(texts)) + 1
