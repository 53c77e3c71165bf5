"""Write what a run has trained into a folder for other machines, with `experiential export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import ValidationError
from rich.console import Console
from typer import Argument, Option

from experiential.cli.evaluate import CARD
from experiential.cli.preflight import CONFIG_FILE
from experiential.cli.rows import show_line
from experiential.errors import CheckpointError, ConfigError, first_problem
from experiential.export import METRICS, Precision
from experiential.recipe import load_experiment

if TYPE_CHECKING:
    from experiential.evaluation.card import Card


def export(
    run: Annotated[Path, Argument(metavar="RUN", help="Output folder of a run.")],
    to: Annotated[Path, Option("--to", metavar="DIR", help="New or empty folder to write.")],
    merge: Annotated[
        bool,
        Option(
            "--merge",
            help="Add LoRA adapters to the weights of their base, for vLLM and plain transformers.",
        ),
    ] = False,
    dtype: Annotated[Precision, Option(help="Precision of merged weights.")] = "float32",
    card: Annotated[
        Path | None,
        Option(
            help="card.json of an evaluation of this run, for the model card; that in"
            " RUN/evaluation by default."
        ),
    ] = None,
) -> int:
    """Write a run's models and bank into a folder that other machines can use.

    The folder gets the models, the bank, the settings and a model card with the run's figures.
    `xp.load_agent` and `experiential play` open it. If the run has not ended, its newest
    checkpoint is written.
    """
    if not (run / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"Expected the output folder of a run, got {run}, which has no {CONFIG_FILE}"
        )
    experiment = load_experiment(run / CONFIG_FILE)
    evaluated = _read_card(run, card)
    from experiential.cli.model_card import write_cards
    from experiential.export import export_trained, open_trained, portable_settings
    from experiential.training.metrics import read_events

    with open_trained(run, experiment) as trained:
        export_trained(trained, experiment, to, merge=merge, dtype=dtype)
        events = read_events(run / METRICS) if (run / METRICS).is_file() else []
        write_cards(to, portable_settings(experiment), trained.step, events, evaluated)
    console = Console()
    for path in sorted(to.iterdir()):
        show_line(console, f"{path.stem:>15}  {path}")
    return 0


def _read_card(run: Path, file: Path | None) -> Card | None:
    """Read the card of an evaluation that this run was part of."""
    found = file or run / "evaluation" / CARD
    if file is None and not found.is_file():
        return None
    from experiential.evaluation.card import Card

    try:
        card = Card.model_validate_json(found.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Expected the card of an evaluation, got {found}: {error}") from error
    except ValidationError as error:
        reason = first_problem(error)
        raise ConfigError(f"Expected the card of an evaluation, got {found}: {reason}") from error
    name = run.resolve().name
    played = {one.run for recipe in card.recipes for one in recipe.runs}
    if name not in played:
        raise ConfigError(
            f"Expected a card of an evaluation of {name}, got {found} of"
            f" {', '.join(sorted(played))}"
        )
    return card
