"""Play the baselines that a reviewer asks for first, on Vault and the worlds of the study.

    python -m benchmarks.baselines prompts            every prompt, untrained, on the dev split
    python -m benchmarks.baselines run [--seeds 3]    all baselines, once, on the eval split
    python -m benchmarks.baselines table              all figures

`prompts` tries each sentence of `PROMPTS` as system message of the untrained tiny actor, with four
memories, on split ``dev``, and keeps all figures. `run` then plays on the worlds, visits and seeds
of the study: chance, the untrained actor with the shipped prompt and with the prompt that was best
on dev for each memory, and actors trained by GRPO without a memory that are then given one. Actors
trained with transcripts or a fixed sentence are recipes of the study. Trained runs are kept in
``--runs`` and not trained again; a finished row is not played again. Both write `RESULTS`, which
`python -m benchmarks.study table` reads; `table` subtracts each row from the study's
``complementary``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.aims import Study
from benchmarks.study.cells import StudyCell, read_cells
from benchmarks.study.setups import ALL
from benchmarks.study.tables import markdown_table
from experiential.bank.bank import ExperienceBank
from experiential.bank.index.embed import resolve_embedder
from experiential.config import Arm
from experiential.errors import ConfigError
from experiential.evaluation.cell import cell_store, settings_digest
from experiential.evaluation.intervals import RATE, Interval, clustered_mean, unpaired_difference
from experiential.evaluation.page import show_percent, show_points
from experiential.evaluation.visits import VisitEvaluator, later
from experiential.llm.transformers import TransformersLLM
from experiential.recipe import load_experiment
from experiential.training.roles import Roles
from experiential.training.run_evaluation import evaluate_run, open_run
from experiential.training.trainer import Trainer

RESULTS = Path("benchmarks/results/baselines.json")
PROMPTS = (
    "Play. Answer with one action.",  # the shipped one
    "Do what the note says.",  # in the pre-training corpus of the tiny model, fully skilled
    "Act.",
    "Answer with one action.",
    "Choose one action.",
    "Choose the best action.",
    "Think, then act.",
    "Open the vault.",
    "Pull the right lever.",
    "Follow the note.",
    "Follow the notes above.",
    "Use the note.",
    "Use the advice.",
    "Trust the advice and act on it.",
    "Do what the advice says.",
    "Do what the experience says.",
    "The note is right. Do it.",
    "Read the experience first, then act.",
    "Look at what happened before. Act.",
    "Repeat what worked before.",
    "Repeat what worked, avoid what failed.",
)
"""Candidate system messages, written before any was tried."""
MEMORIES: tuple[Arm, ...] = ("off", "history-1", "template", "on")
"""Tried with each prompt: none, the last transcript, a sentence, the untrained model's lessons."""
DEV = ("env.eval={split: dev, worlds: 24}", "eval.worlds=24", "eval.visits=3")
EVAL = ("env.eval={split: eval, worlds: 40}", "eval.worlds=40", "eval.visits=4")
UNTRAINED = ("run.steps=0", "eval.before=false", "eval.after=false")
TRAINED = ("run.steps=48", "eval.before=false", "eval.after=false")
RULE = "extractor.agent=benchmarks.vault_baselines:template"
EPISODES_PER_STEP = 64


@dataclass(frozen=True)
class Row:
    """Name a baseline: an actor, trained or not, under some arms.

    Attributes:
        name: of the actor.
        recipe: that it is trained with.
        arms: played.
        steps: of training; 0 leaves it untrained.
        prompt: its system message is the one that was best on dev in the same arm.
        rule: a regular expression for Vault's notes writes the entries of ``on``; its prompt is the
            one that was best with the fixed sentence.
    """

    name: str
    recipe: str
    arms: tuple[Arm, ...]
    steps: int = 0
    prompt: bool = False
    rule: bool = False


HISTORIES: tuple[Arm, ...] = ("history-1", "history-2", "history-3")
ROWS = (
    Row("random", "grpo", ("random",)),
    Row(
        "untrained",
        "static-online",
        ("off", *HISTORIES, "template", "on", "best-of-2", "best-of-4", "best-of-8"),
    ),
    Row("untrained, best prompt", "static-online", ("history-1", "template", "on"), prompt=True),
    Row("untrained, best prompt, rule", "static-online", ("on",), prompt=True, rule=True),
    Row("grpo", "grpo", ("off", *HISTORIES, "template", "best-of-4"), steps=48),
    Row("grpo, best prompt", "grpo", ("history-1", "template"), steps=48, prompt=True),
)


def play(
    recipe: str, arms: Sequence[Arm], run: Path, overrides: Sequence[str], evaluation: Sequence[str]
) -> dict[Arm, list[list[int]]]:
    """Return the outcomes of each arm, shape (worlds, visits); train first where no run is kept.

    Args:
        recipe: of the run.
        arms: to play.
        run: folder of the run.
        overrides: settings of the run.
        evaluation: settings of the evaluation alone.

    Raises:
        ConfigError: the folder keeps a run of other settings.
    """
    training = load_experiment(recipe, overrides)
    mark, digest = run / "settings.txt", settings_digest(training)
    if not (run / "checkpoints").exists():
        Trainer(training, run).run()
        mark.write_text(digest, encoding="utf-8")
    elif not mark.exists() or mark.read_text("utf-8") != digest:
        raise ConfigError(
            f"Expected a run of these settings in {run}, found one of others; remove it, or give"
            " this one another name"
        )
    experiment = load_experiment(recipe, [*overrides, *evaluation])
    with TemporaryDirectory() as scratch:
        cells = evaluate_run(open_run(run, experiment), arms, cell_store(Path(scratch)))
    return {cell.arm: cell.table().tolist() for cell in cells}


def rate(tables: Sequence[Any]) -> Interval:
    """Return success on later visits with its interval; a table of outcomes per seed."""
    return clustered_mean(np.array([later(table) for table in tables]), bounds=RATE)


def system(prompt: str) -> str:
    """Return the setting that makes a prompt the system message."""
    return f"actor.options.system={json.dumps(prompt)}"


async def try_prompts(report: dict[str, Any]) -> None:
    """Play every prompt that has no figures yet on the dev split, and keep all figures."""
    tried: list[dict[str, Any]] = report.setdefault("prompts", [])
    known = {one["prompt"] for one in tried}
    embedder = resolve_embedder(None)
    with closing(TransformersLLM("tiny")) as llm:
        for prompt in PROMPTS:
            if prompt in known:
                continue
            experiment = load_experiment("static-online", [*ALL, *DEV, system(prompt)])
            roles = Roles(experiment, (llm, llm))  # type: ignore[arg-type]  (nothing is trained)
            evaluator = VisitEvaluator(
                experiment, partial(roles.actor, experiment.eval.temperature), roles.extractor()
            )
            row: dict[str, Any] = {"prompt": prompt}
            with TemporaryDirectory() as folder:
                scratch = Path(folder)
                with ExperienceBank(scratch / "bank", embedder=embedder) as bank:
                    for arm in MEMORIES:
                        visits = await evaluator.play(arm, 0, bank, scratch / arm)
                        found = rate([visits.outcomes])
                        row[arm] = [round(x, 3) for x in (found.mean, found.low, found.high)]
            tried.append(row)
            keep(report)
            print(json.dumps(row), flush=True)


def best_prompt(report: dict[str, Any], arm: Arm) -> str:
    """Return the prompt with most success on dev in an arm; of equal ones the first tried."""
    return max(report["prompts"], key=lambda row: row[arm][0])["prompt"]


def run_rows(report: dict[str, Any], runs: Path, seeds: int, names: Sequence[str]) -> None:
    """Play every baseline that has no figures yet on the eval split."""
    rows: list[dict[str, Any]] = report.setdefault("rows", [])
    for row in ROWS:
        for seed in range(seeds if row.steps else 1) if row.name in names else ():
            done = {r["arm"] for r in rows if (r["name"], r["seed"]) == (row.name, seed)}
            left = [arm for arm in row.arms if arm not in done]
            prompts = {
                arm: best_prompt(report, "template" if row.rule else arm) if row.prompt else None
                for arm in left
            }
            trained = TRAINED if row.steps else UNTRAINED
            folder = row.recipe if row.steps else f"untrained-{row.recipe}"
            for prompt in dict.fromkeys(prompts.values()):
                played = play(
                    row.recipe,
                    [arm for arm in left if prompts[arm] == prompt],
                    runs / f"{folder}-{seed}",
                    (*ALL, *trained, f"seed={seed}"),
                    (*EVAL, *([system(prompt)] if prompt else []), *([RULE] if row.rule else [])),
                )
                rows += [
                    {
                        "name": row.name,
                        "arm": arm,
                        "seed": seed,
                        "training_episodes": EPISODES_PER_STEP * row.steps,
                        "prompt": prompt,
                        "outcomes": ["".join(map(str, world)) for world in outcomes],
                    }
                    for arm, outcomes in played.items()
                ]
                keep(report)
                for arm, outcomes in played.items():
                    print(row.name, arm, seed, f"{rate([outcomes]).mean:.3f}", flush=True)


def markdown(report: dict[str, Any], cells: Sequence[StudyCell] = ()) -> str:
    """Lay out success on later visits: of each baseline on eval, then of each prompt on dev.

    Args:
        report: outcomes and prompts.
        cells: of the study; each baseline is subtracted from their ``complementary`` on Vault.
    """
    pairs = Study(cells).arm("vault", "complementary", "on")
    trained = np.array([cell.later() for cell in pairs])
    rows = report["rows"]
    head = ["Actor", "arm", "training episodes", "seeds", "later visits"]
    head += ["`complementary` minus it"]
    body: list[list[str]] = []
    for name, arm in dict.fromkeys((row["name"], row["arm"]) for row in rows):
        mine = [row for row in rows if (row["name"], row["arm"]) == (name, arm)]
        tables = [[[int(digit) for digit in world] for world in row["outcomes"]] for row in mine]
        named = f"{name} ({mine[0]['prompt']!r})" if mine[0]["prompt"] else name
        found = [f"{mine[0]['training_episodes']:,}", str(len(mine)), show_percent(rate(tables))]
        rates = np.array([later(table) for table in tables])
        over = show_points(unpaired_difference(trained, rates)) if trained.size else "–"
        body.append([named, f"`{arm}`", *found, over])
    tried = [
        [row["prompt"], *(f"{100 * row[arm][0]:.0f} %" for arm in MEMORIES)]
        for row in report["prompts"]
    ]
    prompts = markdown_table(["System message, dev", *MEMORIES], tried)
    return f"{markdown_table(head, body)}\n\n{prompts}"


def keep(report: dict[str, Any]) -> None:
    """Write the report."""
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="print all figures")
    commands.add_parser("prompts", help="try every prompt on the dev split")
    played = commands.add_parser("run", help="play every baseline on the eval split")
    played.add_argument("--seeds", type=int, default=3, help="training seeds")
    names = [row.name for row in ROWS]
    played.add_argument("--names", nargs="+", choices=names, default=names)
    played.add_argument("--runs", type=Path, default=Path("runs/baselines"))
    options = parser.parse_args()
    report = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    if options.command == "table":
        print(markdown(report, read_cells()))
    elif options.command == "prompts":
        asyncio.run(try_prompts(report))
    else:
        options.runs.mkdir(parents=True, exist_ok=True)
        run_rows(report, options.runs, options.seeds, options.names)


if __name__ == "__main__":
    main()
