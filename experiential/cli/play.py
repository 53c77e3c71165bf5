"""Show episodes of what a run has trained, turn by turn, with `experiential play`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, Option

from experiential.cli.completion import complete_setting
from experiential.cli.options import AsJson
from experiential.cli.rows import printable, show_json, show_line
from experiential.errors import ConfigError

if TYPE_CHECKING:
    from experiential.evaluation.play_log import PlayedTurn, Retrieved
    from experiential.rollout import Task
    from experiential.trained import TrainedAgent
    from experiential.types import Trajectory

_MARGIN = "  "


def play(
    run: Annotated[Path, Argument(metavar="RUN", help="Output folder of a run, or of an export.")],
    overrides: Annotated[
        list[str] | None,
        Argument(
            metavar="[key=value]...",
            help="Settings to change, e.g. eval.temperature=0.",
            autocompletion=complete_setting,
        ),
    ] = None,
    episodes: Annotated[int, Option(min=1, help="Episodes to play.")] = 1,
    env: Annotated[
        str | None,
        Option(
            metavar="ID", help="Environment in place of the run's; its arguments are env.kwargs."
        ),
    ] = None,
    seed: Annotated[
        int | None, Option(help="Seed of the worlds' states and of sampling.  [default: eval.seed]")
    ] = None,
    world: Annotated[
        int | None, Option(min=0, help="Play this world only, if the environment lists worlds.")
    ] = None,
    free: Annotated[bool, Option("--free", help="Hide the bank from the actor.")] = False,
    as_json: AsJson = False,
) -> int:
    """Play episodes with a run's trained models, and print them turn by turn.

    The episodes are those of the run's evaluation in its arm `frozen`, or `off` with --free: each
    held-out world once, then again. The bank does not change.
    """
    settings = list(overrides or [])
    if env is not None:
        settings = [f"env.id={env}", "env.kwargs={}", "env.train={}", "env.eval={}", *settings]
    from experiential.trained import load_agent

    console = Console()
    played: list[dict[str, Any]] = []
    with load_agent(run, overrides=settings) as agent:
        for number, task in enumerate(_chosen(agent, seed, world, episodes), 1):
            shown = None if as_json else console
            if shown is not None:
                show_line(shown, f"episode {number}/{episodes}  seed {task.seed}{_world(task)}")
            turns: list[dict[str, Any]] = []

            def observe(
                turn: PlayedTurn,
                advice: Sequence[Retrieved],
                turns: list[dict[str, Any]] = turns,
                shown: Console | None = shown,
            ) -> None:
                kept = [one.model_dump(exclude={"turn"}) for one in advice]
                turns.append({**turn.model_dump(), "advice": kept})
                if shown is not None:
                    _show_turn(shown, len(turns), turn, advice)

            ended = agent.play(seed=task.seed, options=task.options, free=free, observe=observe)
            if shown is not None:
                show_line(shown, f"{_result(ended)}\n")
            kept = ended.model_dump(mode="json", include={"task", "instance", "success", "reward"})
            played.append({"seed": task.seed, **task.options, **kept, "turns": turns})
    won = sum(bool(one["success"]) for one in played)
    if as_json:
        show_json(played)
    elif episodes > 1:
        show_line(console, f"{won} of {episodes} episodes succeeded")
    return 0


def _chosen(agent: TrainedAgent, seed: int | None, world: int | None, episodes: int) -> list[Task]:
    """Return the starts of the episodes to play."""
    tasks = agent.held_out(seed)
    if world is None:
        return list(islice(tasks, episodes))
    worlds = list(islice(agent.held_out(seed), agent.experiment.eval.worlds))
    if {"world": world} not in [task.options for task in worlds]:
        listed = [task for task in worlds if task.options]
        known = f"below {len(listed)}" if listed else "left out, since none are listed here"
        raise ConfigError(f"Expected --world to be {known}, got {world}")
    return list(islice((task for task in tasks if task.options["world"] == world), episodes))


def _world(task: Task) -> str:
    return f", world {task.options['world']}" if "world" in task.options else ""


def _show_turn(
    console: Console, number: int, turn: PlayedTurn, advice: Sequence[Retrieved]
) -> None:
    for one in advice:
        _show_block(console, f"advice {one.id[:8]}", one.text)
    _show_block(console, f"observation {number}", turn.observation)
    reply = turn.reply if turn.reply.strip() != turn.action.strip() else ""
    if reply:
        _show_block(console, f"reply {number}", reply)
    _show_block(console, f"action {number}", turn.action)


def _show_block(console: Console, title: str, text: str) -> None:
    """Print a text of a model or an environment without the control sequences in it."""
    style = {"advice": "yellow", "action": "bold"}.get(title.partition(" ")[0], "")
    lines = printable(text).split("\n")
    body = "\n".join(f"{_MARGIN}{line}" for line in lines)
    marked = "> " if style == "yellow" else ""
    console.print(f"{marked}{title}:", style="dim", markup=False, highlight=False)
    console.print(body, style=style, markup=False, highlight=False, soft_wrap=True)


def _result(ended: Trajectory) -> str:
    said = {True: "success", False: "no success", None: "outcome unknown"}[ended.success]
    return f"{said}, reward {ended.reward:g}, {len(ended.turns)} turns"
