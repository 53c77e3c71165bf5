"""List the episodes of a run or a bank, and show one of them, with `experiential episodes`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from typer import Argument, Option

from experiential.cli.options import AsJson, Namespace
from experiential.cli.rows import show_json, show_line, show_rows

if TYPE_CHECKING:
    from experiential.bank.records import UsedIn
    from experiential.ui.source import Advice, EpisodeView

Outcome = Literal["success", "failure", "unknown", "error"]


def episodes(
    path: Annotated[
        Path,
        Argument(
            metavar="RUN|BANK|LOG",
            help="Folder of a run, of a bank or of `experiential eval`, or the log of `bench run`.",
        ),
    ],
    id: Annotated[
        str | None, Argument(help="Id of an episode, or its beginning: show this one.")
    ] = None,
    task: Annotated[str | None, Option(help="Only those whose task has these words.")] = None,
    outcome: Annotated[Outcome | None, Option(help="Only those with this outcome.")] = None,
    step: Annotated[int | None, Option(help="Only those of this training step.")] = None,
    arm: Annotated[
        str | None,
        Option(help="Those of evaluations under this arm, or all.  [default: those of training]"),
    ] = None,
    limit: Annotated[int, Option(min=0, help="Show only the newest N; 0 shows all.")] = 50,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """List the episodes of a run or a bank, or show one: its turns, advice and new entries.

    Episodes of evaluations are among those of a run. The run may still be in progress.
    """
    from experiential.errors import BankError, ConfigError
    from experiential.ids import short_ids
    from experiential.ui.source import Source, filtered

    with closing(Source(path, namespace)) as source:
        try:
            if id is not None:
                view = source.episode(id)
                if as_json:
                    show_json(view)
                else:
                    show_episode(Console(), view)
                return
            known = source.episodes()
        except BankError as error:
            raise ConfigError(str(error)) from error
    found = filtered(known, task, outcome, step, arm)
    found = found[-limit:] if limit else found
    if as_json:
        show_json([{**one.model_dump(mode="json"), "outcome": one.outcome} for one in found])
        return
    short, evaluated = short_ids(one.id for one in known), any(one.arm for one in found)
    rows = [
        {
            "id": short[one.id],
            "step": "" if one.step is None else one.step,
            **({"arm": one.part} if evaluated else {}),
            "outcome": one.outcome,
            "score": f"{one.reward if one.score is None else one.score:g}",
            "guided": "yes" if one.condition.value == "guided" else "no",
            "turns": one.turns,
            "task": one.task if one.error is None else f"{one.task} ({one.error})",
        }
        for one in found
    ]
    show_rows(rows, False)
    if arm is None and (arms := {one.arm: None for one in known if one.arm}) and not evaluated:
        count = sum(one.arm is not None for one in known)
        show_line(Console(), f"and {count} of evaluations: --arm {', '.join(arms)} or all")


def show_episode(console: Console, view: EpisodeView) -> None:
    """Print one episode: transcript, advice where it was shown, what was written, later uses."""
    summary, played = view.summary, view.transcript
    trajectory = played.trajectory

    def say(text: str = "", indent: str = "") -> None:
        for line in text.splitlines() or [""]:
            show_line(console, indent + line)

    say(f"episode {summary.id}")
    say(f"task     {summary.task}")
    step = "" if played.step is None else f", step {played.step}"
    attempt = "" if summary.attempt == 1 else f", attempt {summary.attempt}"
    part = f"; evaluation: {summary.part}" if summary.part else ""
    score = "" if trajectory.score is None else f", score {trajectory.score:g}"
    say(
        f"outcome  {summary.outcome}, reward {summary.reward:g}{score}; {summary.condition.value}"
        f"{step}{attempt}{part}"
    )
    if summary.error is not None:
        say(f"error    {summary.error}")
    if trajectory.judgement:
        say(f"judged   {trajectory.judgement}")
    if played.advice:
        say("\nshown in place of the bank's advice")
        say(played.advice, "  | ")
    shown = ""
    for number, turn in enumerate(trajectory.turns):
        say(f"\n-- turn {number + 1}")
        if turn.observation != shown or number == 0:
            say(turn.observation, "  ")
        for one in view.advice:
            if one.turn == number:
                say(describe_advice(one))
                say(one.text or "(its text is gone)", "  | ")
        for question in played.questions:
            if question.turn == number:
                say(question.text, "  ? ")
        if number in played.replies:
            say(played.replies[number], "  . ")
        say(turn.action, "  > ")
        if turn.reward or turn.invalid:
            say(f"  reward {turn.reward:g}{', invalid' if turn.invalid else ''}")
        if turn.feedback:
            say(turn.feedback, "  ")
        if turn.withheld:
            say(f"(not shown to the agent) {turn.withheld}", "  ")
        shown = turn.feedback
    for one in view.advice:  # asked for at the end, or in an episode without turns
        if one.turn >= len(trajectory.turns):
            say(describe_advice(one))
            say(one.text or "(its text is gone)", "  | ")
    say(f"\nwritten from it: {view.distilled if not view.written else len(view.written)}")
    for written in view.written:
        state = "" if written.is_live else " (not live any more)"
        say(f"  {written.operation} {written.entry.id[:8]} v{written.entry.version}{state}")
        say(written.entry.text, "  | ")
        say(f"  {describe_uses(written.used)}")


def describe_advice(one: Advice) -> str:
    """Return the line above an advice."""
    verb = "retrieved, and rejected by the actor" if one.rejected else "shown"
    state = ", not live any more" if one.is_live is False else ""
    return (
        f"  | {verb} ({one.how}): entry {one.id[:8]} v{one.version}, score {one.score:.3f}{state}"
    )


def describe_uses(used: Iterable[UsedIn], most: int = 8) -> str:
    """Return in which later episodes an entry was used, and how many of them succeeded."""
    episodes = {use.episode: use for use in used}
    if not episodes:
        return "used in no episode so far"
    won = sum(use.success is True for use in episodes.values())
    ids = ", ".join(id[:8] for id in list(episodes)[:most])
    more = f" and {len(episodes) - most} more" if len(episodes) > most else ""
    count = f"{len(episodes)} episode{'s' * (len(episodes) > 1)}"
    return f"used in {count}, successes: {won}; {ids}{more}"
