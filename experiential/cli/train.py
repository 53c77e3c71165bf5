"""Train from a recipe to a report with one command, `experiential-train`."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from experiential.cli.completion import complete_part, complete_recipe, complete_setting
from experiential.cli.errors import Interrupted, complain, new_app, run_process
from experiential.cli.estimate import describe_cost
from experiential.cli.examples import add_examples
from experiential.cli.options import KeyEnv, Version, model_overrides, named_model
from experiential.cli.preflight import CONFIG_FILE, check_experiment, prepare_output
from experiential.errors import BudgetError, CheckpointError, ConfigError
from experiential.recipe import dump_experiment, load_experiment, misplaced_numbers

DEFAULT_RECIPE = "complementary"

app = new_app("Train an actor and an experience extractor together.", completion=True)


@app.command()
def train(
    overrides: Annotated[
        list[str] | None,
        Argument(
            metavar="[key=value]...",
            help="Settings to change, e.g. run.steps=5.",
            autocompletion=complete_setting,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        Option(
            help="Recipe, with profiles as in NAME+small, or a YAML file.  [default:"
            " complementary]",
            autocompletion=complete_recipe,
        ),
    ] = None,
    resume: Annotated[
        bool,
        Option(
            "--resume",
            help="Continue from the last checkpoint in --output, or begin again without one.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Print the resolved settings and the expected cost, then stop."),
    ] = False,
    output: Annotated[
        Path | None, Option(help="Folder of the run.  [default: runs/RECIPE-TIME]")
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace a run that is already in --output.")
    ] = False,
    seed: Annotated[int | None, Option(help="Same as seed=N.")] = None,
    runtime: Annotated[
        str | None,
        Option(
            metavar="local|openrlhf|frozen",
            help="Same as runtime=NAME; openrlhf is bfloat16.",
            autocompletion=complete_part("runtimes"),
        ),
    ] = None,
    actor_url: Annotated[
        str | None,
        Option(metavar="URL", help="With --recipe frozen: OpenAI-compatible server that acts."),
    ] = None,
    actor_model: Annotated[
        str | None, Option(metavar="NAME", help="Its model; the only one it serves by default.")
    ] = None,
    extractor_url: Annotated[
        str | None, Option(metavar="URL", help="Server that distils; the actor's by default.")
    ] = None,
    extractor_model: Annotated[
        str | None, Option(metavar="NAME", help="Its model; the actor's by default.")
    ] = None,
    api_key_env: KeyEnv = None,
    plain: Annotated[bool, Option("--plain", help="Lines instead of a live view.")] = False,
    version: Version = False,
) -> int:
    """Train an actor and an experience extractor together, then evaluate on held-out worlds.

    `experiential recipes` lists the recipes, one for each method, baseline and ablation.
    Exit code: 0 done, 2 user error (one line on stderr), 1 failure.
    """
    chosen = {"seed": seed, "runtime": runtime}
    settings: list[str] = []  # those written out come after these, and win
    for section, url, name in (
        ("model", actor_url, actor_model),
        ("extractor_model", extractor_url, extractor_model),
    ):
        if url is not None:
            settings += model_overrides(section, named_model(name, url, api_key_env))
        elif name is not None:
            settings.append(f"{section}.name={json.dumps(name)}")
    settings += [*(overrides or []), *(f"{k}={v}" for k, v in chosen.items() if v is not None)]
    source: str | Path = recipe or DEFAULT_RECIPE
    if resume and output is not None and recipe is None:  # a resumed run keeps its settings
        source = output / CONFIG_FILE
        if not source.is_file():
            raise CheckpointError(
                f"Expected a run to resume in {output}, found none; leave out --resume to start one"
            )
    experiment = load_experiment(source, settings)
    if resume and output is None:
        raise ConfigError(
            "Expected --output with --resume, got none; name the folder of the run to go on with"
        )
    placement = check_experiment(experiment, dry_run=dry_run)
    if dry_run:
        sys.stdout.write(dump_experiment(experiment))
        sys.stdout.writelines(f"# {line}\n" for line in describe_cost(experiment, placement))
        return 0
    folder = output or Path("runs") / f"{experiment.recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    found = prepare_output(folder, resume=resume, overwrite=overwrite)
    from experiential.cli.interrupt import Interrupts
    from experiential.cli.report import show_report
    from experiential.cli.trackers import open_trackers
    from experiential.cli.view import make_view
    from experiential.evaluation.results import write_whole
    from experiential.training.trainer import Trainer

    write_whole(folder / CONFIG_FILE, dump_experiment(experiment))  # a kill leaves one to resume
    console = Console()
    with ExitStack() as stack:
        trackers = open_trackers(experiment.run.trackers, folder)
        for tracker in trackers:
            stack.enter_context(closing(tracker))
        view = stack.enter_context(closing(make_view(console, plain=plain)))

        def observe(event: dict[str, Any]) -> None:
            for receiver in (view, *trackers):
                receiver.handle(event)

        if resume and not found:
            view.say(
                "--resume found no checkpoint: the run begins again at step 0, with its settings"
                " and a new bank"
            )
        summary, spent, interrupted = None, None, False
        try:
            noted = [] if found else list(misplaced_numbers(source, settings))
            trainer = Trainer(experiment, folder, found, observe, warnings=noted)
            with Interrupts(view.say) as interrupts:
                summary = interrupts.run(trainer.arun())
        except BudgetError as error:
            spent = f"{error}; {how_to_go_on(folder)}"
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        raise Interrupted(f"interrupted; {how_to_go_on(folder)}")
    show_report(console, folder, summary)
    return 0 if spent is None else complain(spent, 1)


def how_to_go_on(folder: Path) -> str:
    """Return what a stopped run has saved, and the command that goes on with it."""
    from experiential.training.checkpoint import CheckpointStore

    steps = [
        int(path.name.partition("-")[2]) for path in CheckpointStore(folder / "checkpoints").all()
    ]
    saved = (
        f"saved is the checkpoint of step {steps[-1]}" if steps else "no checkpoint was saved yet"
    )
    does = "go on with" if steps else "begin again with"
    command = shlex.join(["experiential-train", "--resume", "--output", str(folder)])
    return f"{saved}; {does}: {command}"


add_examples(app, "experiential-train")


def main() -> None:
    """Run `experiential-train`, as its entry point."""
    run_process(app)


if __name__ == "__main__":
    main()
