"""Convert a log of played episodes to a log of inspect_ai, which `inspect view` opens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from experiential.errors import ConfigError, require
from experiential.evaluation.cell import package_version
from experiential.evaluation.play_log import BankChange, PlayedEpisode, read_log, read_settings
from experiential.llm.metered import Spent

MEASURES = ("success", "reward")
"""Scores of a sample: ``C`` or ``I``, and the sum of rewards."""


def inspect_log(path: Path) -> Any:
    """Return a play log as an ``inspect_ai.log.EvalLog``.

    Each episode is a sample, and each visit to a world an epoch of it. Observations are messages of
    the user, replies those of the assistant. An episode that was played again after a technical
    failure is one sample, with the failures in ``error_retries``; where the last attempt failed
    too, it has no score. Metrics are means by task and arm.

    Args:
        path: a log that `PlayLog` has written; another process may be writing it.

    Raises:
        MissingExtraError: inspect_ai is not installed.
        ConfigError: the file is no log, is damaged, or has no episode.
    """
    require("inspect", "inspect_ai")
    log = import_module("inspect_ai.log")
    settings = read_settings(path)
    model = str(settings.get("model") or settings.get("agent") or "unknown")
    attempts, changes = dict[tuple[Any, ...], list[PlayedEpisode]](), list[BankChange]()
    spent = Spent()
    for line in read_log(path):
        if isinstance(line, BankChange):
            changes.append(line)
            continue
        spent += line.spent
        if not line.stopped:
            attempts.setdefault(line.key, []).append(line)
    if not attempts:
        raise ConfigError(f"Expected at least one finished episode in {path}, got none")

    known_by = sha256(json.dumps(settings).encode()).hexdigest()[:22]  # the viewer groups by it
    played = [known[-1] for known in attempts.values()]
    times = [one.time for known in attempts.values() for one in known]
    extractor = sum((one.extractor for one in changes), Spent())
    return log.EvalLog(
        status="success",
        eval=log.EvalSpec(
            created=min(times),
            task=settings.get("suite", path.stem),
            task_id=known_by,
            task_args=settings,
            dataset=log.EvalDataset(
                name=settings.get("suite"), samples=len({sample_id(one) for one in played})
            ),
            model=model,
            config=log.EvalConfig(epochs=1 + max(one.visit for one in played)),
            packages={"experiential-rl": settings.get("version") or package_version()},
            metadata={"bank": [one.model_dump(mode="json") for one in changes]},
        ),
        results=log.EvalResults(
            total_samples=len(played),
            completed_samples=sum(one.error is None for one in played),
            scores=_metrics(played),
        ),
        stats=log.EvalStats(
            started_at=min(times),
            completed_at=max(times),
            model_usage=_usage(model, spent),
            role_usage=_usage("extractor", extractor),
        ),
        samples=[_sample(known, model, known_by) for known in attempts.values()],
    )


def write_inspect_log(path: Path, to: Path) -> int:
    """Write `inspect_log` of a play log to a file, and return its number of samples.

    Args:
        path: the play log.
        to: the file, replaced where it exists: compressed with the ending .eval, else plain JSON.

    Raises:
        MissingExtraError, ConfigError: as in `inspect_log`.
    """
    log = inspect_log(path)
    to.parent.mkdir(parents=True, exist_ok=True)
    import_module("inspect_ai.log").write_eval_log(log, str(to))
    return len(log.samples)


def sample_id(episode: PlayedEpisode) -> str:
    """Return the id that the visits of one world, under one task and arm, have in common.

    >>> sample_id(PlayedEpisode(task="lake", arm="on", world=3, visit=0, place={"order": 1},
    ...     task_id="lake-3", success=True, reward=1, turns=5, prompt_tokens=0, response_tokens=0,
    ...     seconds=0.1, shown=0))
    'lake, on, world 3, order 1'
    """
    place = [f"{name} {value}" for name, value in sorted(episode.place.items())]
    return ", ".join([episode.task, episode.arm, f"world {episode.world}", *place])


def _sample(attempts: Sequence[PlayedEpisode], model: str, log_id: str) -> Any:
    """Return the sample of an episode, all attempts at it given; the last counts."""
    log, models = import_module("inspect_ai.log"), import_module("inspect_ai.model")
    event, score = import_module("inspect_ai.event"), import_module("inspect_ai.scorer").Score
    played, untraced = attempts[-1], {"traceback": "", "traceback_ansi": ""}
    ended = datetime.fromisoformat(played.time)
    began = ended - timedelta(seconds=played.seconds)
    known = {"timestamp": began, "working_start": 0.0}  # when a turn was played is not logged
    messages, events, output = list[Any](), list[Any](), models.ModelOutput(model=model)
    for number, turn in enumerate(played.transcript):
        shown = [one.model_dump() for one in played.retrieved if one.turn == number]
        seen = models.ChatMessageUser(
            content=turn.observation, metadata={"retrieved": shown} if shown else None
        )
        said = models.ChatMessageAssistant(
            content=turn.reply or turn.action,
            source="generate",
            model=model,
            metadata={"action": turn.action, "reward": turn.reward},
        )
        output = models.ModelOutput(
            model=model, choices=[models.ChatCompletionChoice(message=said, stop_reason="stop")]
        )
        messages += [seen, said]
        # the viewer opens on events; the log does not hold what else the model was sent
        config = models.GenerateConfig()
        call = dict(input=[seen], tools=[], tool_choice="none", config=config, output=output)
        events.append(event.ModelEvent(model=model, **call, **known))
    messages.append(models.ChatMessageUser(content=played.end))
    over = {"timestamp": ended, "working_start": played.seconds}
    events.append(event.InfoEvent(source="end of the episode", data=played.end, **over))
    answer = played.transcript[-1].action if played.transcript else None
    scores = {"success": "C" if played.success else "I", "reward": played.reward}
    kept = "task arm world visit place seed task_id turns shown note retrieved"
    name, epoch = sample_id(played), 1 + played.visit
    return log.EvalSample(
        id=name,
        epoch=epoch,
        uuid=sha256(f"{log_id} {name} {epoch}".encode()).hexdigest()[:22],
        input=messages[0].content,
        target="",
        messages=messages,
        events=events,
        output=output,
        scores=None
        if played.again
        else {
            measure: score(value=value, answer=answer, explanation=played.end)
            for measure, value in scores.items()
        },
        metadata=played.model_dump(mode="json", include=set(kept.split())),
        model_usage=_usage(model, sum((one.spent for one in attempts), Spent())),
        started_at=began.isoformat(),
        completed_at=played.time,
        total_time=played.seconds,
        working_time=played.seconds,
        turn_count=len(played.transcript),
        error=None if played.error is None else log.EvalError(message=played.error, **untraced),
        error_retries=[
            log.EvalRetryError(message=one.error or "", **untraced) for one in attempts[:-1]
        ],
    )


def _usage(name: str, spent: Spent) -> dict[str, Any]:
    """Return the usage of a model, or of a role, by its name; empty where it was not asked."""
    if not spent.requests:
        return {}
    usage = import_module("inspect_ai.model").ModelUsage(
        input_tokens=spent.prompt_tokens,
        output_tokens=spent.generated_tokens,
        total_tokens=spent.tokens,
        total_cost=spent.cost,
    )
    return {name: usage}


def _metrics(played: Sequence[PlayedEpisode]) -> list[Any]:
    """Return the mean of each score by task and arm."""
    log = import_module("inspect_ai.log")
    cells: dict[str, list[PlayedEpisode]] = {}
    for one in played:
        if not one.again:
            cells.setdefault(f"{one.task}, {one.arm}", []).append(one)
    scored = sum(map(len, cells.values()))
    return [
        log.EvalScore(
            name=measure,
            scorer=measure,
            scored_samples=scored,
            unscored_samples=len(played) - scored,
            metrics={
                cell: log.EvalMetric(
                    name=cell, value=sum(getattr(one, measure) for one in rows) / len(rows)
                )
                for cell, rows in cells.items()
            },
        )
        for measure in MEASURES
    ]
