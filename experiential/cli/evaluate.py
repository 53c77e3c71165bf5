"""Compare runs under each arm with `experiential eval`; write a card, a table and a page."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from rich.console import Console
from typer import Argument, Option

from experiential.cli.errors import complain
from experiential.cli.options import AsJson, BaseUrl, KeyEnv, model_overrides, named_model
from experiential.cli.preflight import CONFIG_FILE, check_experiment
from experiential.cli.rows import show_line, show_table
from experiential.config import Arm
from experiential.errors import BudgetError, CheckpointError, ConfigError, MissingExtraError
from experiential.recipe import load_experiment

if TYPE_CHECKING:
    from experiential.evaluation.card import Card
    from experiential.evaluation.cell import Cell
    from experiential.training.run_evaluation import EvaluatedRun

ALL = "off,on,frozen,shuffled,placebo"
UNTRAINED = (
    "runtime=frozen actor.train=false extractor.train=false extractor_model=null"
    " methods.cold_start=null methods.self_distill=null methods.entropy_bonus=null"
).split()
"""Overrides that put another model in the place of a run's weights."""
CARD, PICTURE, PAGE, CELLS = "card.json", "report.png", "report.html", "cells"
"""Names of the files and the folder that an evaluation writes into its output folder."""
_SILENT = "its arm 'on' writes nothing between visits; extractor.distill=true lets it"


def evaluate(
    targets: Annotated[
        list[str],
        Argument(
            metavar="RUN... [key=value]...", help="Output folders of runs, and settings to change."
        ),
    ],
    arms: Annotated[
        str,
        Option(
            help="Arms to play, separated by commas; also the baselines random, history-1 to -3,"
            " template, best-of-2, -4 or -8."
        ),
    ] = ALL,
    output: Annotated[
        Path, Option(help="Folder of the card, the page and the finished cells.")
    ] = Path("runs/evaluation"),
    resume: Annotated[
        bool,
        Option(help="Reuse the finished cells in --output; --no-resume plays all again."),
    ] = True,
    model: Annotated[
        str | None,
        Option(
            help="Model that acts and distils in place of the run's weights: tiny, smollm2, a"
            " folder, a hub name, or with --base-url its name at the server."
        ),
    ] = None,
    base_url: BaseUrl = None,
    api_key_env: KeyEnv = None,
    as_json: AsJson = False,
    plain: Annotated[bool, Option("--plain", help="Lines instead of a table.")] = False,
) -> int:
    """Compare arms: play the newest checkpoint of each run on held-out worlds under each.

    Runs of one recipe that differ only in the seed are combined. The runs and their banks do not
    change. With --model or --base-url, another model plays with the run's bank.
    """
    folders, overrides = split_targets(targets)
    if (model, base_url, api_key_env) != (None, None, None):
        named = named_model(model, base_url, api_key_env)
        overrides = [*UNTRAINED, *model_overrides("model", named), *overrides]
    wanted = parse_arms(arms)
    runs = [_opened(folder, overrides) for folder in folders]
    _check_output(output)
    from experiential.evaluation.card import make_card

    console = Console(stderr=as_json)
    for run in runs:
        extractor = run.experiment.extractor
        if "on" in wanted and extractor.enabled and not extractor.distill:
            show_line(console, f"note: {run.name} has extractor.distill=false: {_SILENT}")
    cells, spent = _play(runs, wanted, output / CELLS, resume, console)
    card = make_card(cells, arms=wanted, overrides=overrides)
    text = card.model_dump_json(indent=1) + "\n"
    (output / CARD).write_text(text, encoding="utf-8")
    drawn = _draw(card, runs, output)
    if as_json:
        sys.stdout.write(text)
    else:
        _show(console, card, output, *drawn, plain=plain)
    if spent is None:
        return 0
    over = f"{spent}; what was played before is in {output / CARD}, and the same command goes on"
    return complain(over, 1)


def _opened(folder: Path, overrides: Sequence[str]) -> EvaluatedRun:
    """Open the newest checkpoint of a run with some settings changed."""
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"Expected the output folder of a run, got {folder}, which has no {CONFIG_FILE}"
        )
    from experiential.training.run_evaluation import open_run

    experiment = load_experiment(folder / CONFIG_FILE, overrides)
    check_experiment(experiment)
    return open_run(folder, experiment)


def _check_output(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(output, os.W_OK) else "choose another"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ConfigError(
            f"Expected a folder that can be written for --output, got {output}: {reason}"
        )


def _play(
    runs: Sequence[EvaluatedRun], arms: Sequence[Arm], folder: Path, resume: bool, console: Console
) -> tuple[list[Cell], BudgetError | None]:
    """Play all cells that are not finished; when a budget is spent, return those there are."""
    from experiential.cli.view import describe_evaluation
    from experiential.evaluation.cell import cell_store
    from experiential.evaluation.episode_log import EPISODES_FILE
    from experiential.training.run_evaluation import evaluate_run, finished_cells

    store = cell_store(folder, overwrite=not resume)
    episodes = folder.parent / EPISODES_FILE
    if not resume:
        episodes.unlink(missing_ok=True)
    cells: list[Cell] = []
    for run in runs:

        def tell(event: dict[str, Any], name: str = run.name) -> None:
            if event["event"] == "eval":
                show_line(console, f"{name}: {describe_evaluation(event)}")

        try:
            cells += evaluate_run(run, arms, store, observer=tell, episodes=episodes)
        except BudgetError as error:
            cells += finished_cells(run, arms, cell_store(folder)).values()
            if not cells:
                raise
            return cells, error
    return cells, None


def _draw(card: Card, runs: Sequence[EvaluatedRun], output: Path) -> tuple[Path, Path | None, str]:
    """Write the page and the picture; return their files, and why there is no picture."""
    from experiential.evaluation.cell import settings_digest
    from experiential.evaluation.page import write_page
    from experiential.evaluation.picture import draw_card
    from experiential.training.metrics import read_events
    from experiential.training.run_evaluation import METRICS

    metrics = {settings_digest(run.experiment): run.folder / METRICS for run in runs}
    curves: dict[str, list[list[dict[str, Any]]]] = {}
    for recipe in card.recipes:  # a run without metrics has no curve
        mine = [metrics[one.settings] for one in recipe.runs]
        curves[recipe.name] = [read_events(file) for file in mine if file.is_file()]
    picture, missing = None, ""
    try:
        picture = draw_card(card, curves, output / PICTURE)
    except MissingExtraError as error:
        (output / PICTURE).unlink(missing_ok=True)
        missing = str(error)
    return write_page(card, output / PAGE, picture), picture, missing


def _show(
    console: Console,
    card: Card,
    output: Path,
    page: Path,
    picture: Path | None,
    missing: str,
    *,
    plain: bool,
) -> None:
    """Print the card and where its files are."""
    from experiential.cli.card import card_lines, card_table, dollars, remarks

    if not plain:
        show_table(console, card_table(card))
    for line in card_lines(card) if plain else (*dollars(card), *remarks(card)):
        show_line(console, line)
    if picture is None:
        show_line(console, f"no picture: {missing}")
    for file in filter(None, (output / CARD, page, picture)):
        show_line(console, f"{file.stem:>15}  {file}")


def split_targets(targets: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split targets into folders of runs, each once, and overrides.

    A target with `=` in it is an override unless it is a folder.
    """
    paths = (Path(target) for target in targets if "=" not in target or Path(target).is_dir())
    folders = list(dict.fromkeys(paths))
    overrides = [target for target in targets if Path(target) not in folders]
    if not folders:
        raise ConfigError(
            "Expected the output folder of at least one run, got only settings:"
            f" {' '.join(targets)}"
        )
    return folders, overrides


def parse_arms(text: str) -> list[Arm]:
    """Parse a list of arms with commas, each once."""
    known = get_args(Arm)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise ConfigError(f"Expected --arms among {', '.join(known)}, got {text!r}")
    return [arm for name in names for arm in known if arm == name]
