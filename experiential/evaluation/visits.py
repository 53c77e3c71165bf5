"""Evaluation by visit: weights frozen, every held-out world met several times with different seeds.

The first visit can only guess; later visits can use what the extractor distilled from earlier ones.
Each arm (`arms`) plays the same worlds with the same seeds and sampling seeds. The banks written to
are scratch copies: the training bank does not change by one byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from experiential.agents.actor import ActorAgent
from experiential.agents.principles import principle_text
from experiential.agents.prompts import entry_text
from experiential.bank.bank import ExperienceBank
from experiential.bank.options import bank_settings
from experiential.config import Arm, Experiment
from experiential.evaluation.arms import ArmBank, opened_arm
from experiential.evaluation.intervals import Interval, paired_difference, wilson
from experiential.llm.metered import Meter, Spent
from experiential.rollout.rollout import (
    Episode,
    Job,
    MakeEnv,
    Reviewer,
    Rollout,
    Task,
    failures,
    make_env,
    refuse_broken,
)
from experiential.rollout.tasks import episode_seed, world_count
from experiential.types import Condition, Record


class Cost(Record):
    """What an arm took: seconds on the wall clock from the copy of the bank to the last distillation, and what each policy generated."""

    seconds: float = 0.0
    actor: Spent = Field(default_factory=Spent)
    extractor: Spent = Field(default_factory=Spent)


class Visits(Record):
    """Outcomes of one arm: ``outcomes[w][v]`` is whether visit v to world w succeeded.

    An episode that failed for a technical reason counts as no success; ``failures`` says how many
    did, by reason.
    """

    arm: str
    step: int
    outcomes: tuple[tuple[bool, ...], ...]
    errors: int = 0
    entries: int = 0
    failures: dict[str, int] = Field(default_factory=dict[str, int])
    cost: Cost = Field(default_factory=Cost)

    def rates(self) -> list[Interval]:
        """Success by visit number, with Wilson intervals."""
        table = np.array(self.outcomes)
        return [wilson(int(column.sum()), column.size) for column in table.T]

    def later(self) -> np.ndarray:
        """Success rate of each world over the visits after the first, or over the only one, shape (worlds,)."""
        return later(self.outcomes)

    def event(self) -> dict[str, Any]:
        """The record that goes to the metrics file."""
        table = np.array(self.outcomes)
        visits = [
            {"visit": i + 1, "successes": int(c.sum()), "episodes": int(c.size)}
            for i, c in enumerate(table.T)
        ]
        outcomes = [[int(x) for x in row] for row in self.outcomes]
        event: dict[str, Any] = {
            "event": "eval",
            "step": self.step,
            "arm": self.arm,
            "visits": visits,
            "outcomes": outcomes,
            "errors": self.errors,
            "entries": self.entries,
            "cost": self.cost.model_dump(),
        }
        return event | ({"failures": self.failures} if self.failures else {})


@dataclass(frozen=True)
class Meters:
    """Count what the two policies generate in an evaluation."""

    actor: Meter = field(default_factory=Meter)
    extractor: Meter = field(default_factory=Meter)

    def spent(self) -> dict[str, Spent]:
        """What each generated so far."""
        return {"actor": self.actor.spent(), "extractor": self.extractor.spent()}


class VisitEvaluator:
    """Plays the held-out worlds visit by visit.

    Args:
        experiment: what is evaluated.
        make_actor: builds an actor agent for evaluation.
        extractor: distils between the visits; None leaves the bank as it is.
        make_env: builds the environments; in this process by default.
        meters: count what the backends of ``make_actor`` and ``extractor`` generate (see
            ``Metered``); none: costs are seconds alone.
        critic: reviews what is retrieved, as in training.

    Its arms raise ``ExperientialError`` when the environment fails every episode of a visit.
    """

    def __init__(
        self,
        experiment: Experiment,
        make_actor: Callable[[], ActorAgent],
        extractor: Any | None,
        *,
        make_env: MakeEnv = make_env,
        meters: Meters | None = None,
        critic: Reviewer | None = None,
    ) -> None:
        self._experiment, self._make_actor, self._extractor = experiment, make_actor, extractor
        self._make_env, self._meters, self._critic = make_env, meters or Meters(), critic
        kwargs = experiment.env.kwargs | experiment.env.eval
        listed = world_count(experiment.env.id, kwargs)
        self._listed = listed is not None
        self._worlds = (
            experiment.eval.worlds if listed is None else min(experiment.eval.worlds, listed)
        )

    async def play(
        self, arm: Arm, step: int, bank: ExperienceBank | None = None, scratch: Path | None = None
    ) -> Visits:
        """One arm.

        Args:
            arm: which one.
            step: training step, for the record.
            bank: the bank as trained, which is only read; None for ``off``.
            scratch: a folder for the arm's copy of it, without a bank in it; None for ``off``.
        """
        begin, before = time.perf_counter(), self._meters.spent()
        options = _options(self._experiment, self._worlds)
        tokenizer = self._make_actor().llm.tokenizer
        render = principle_text if self._experiment.actor.search_experience else entry_text
        with opened_arm(
            arm,
            bank,
            scratch or Path(),
            self._extractor,
            options,
            tokenizer=tokenizer,
            render=render,
        ) as opened:
            columns = await self._columns(opened)
        cost = Cost(
            seconds=time.perf_counter() - begin,
            **{name: now - before[name] for name, now in self._meters.spent().items()},
        )
        outcomes = tuple(
            tuple(column[w].trajectory.success for column in columns) for w in range(self._worlds)
        )
        reasons = failures(list(chain.from_iterable(columns)))
        errors = sum(reasons.values())
        return Visits(
            arm=arm,
            step=step,
            outcomes=outcomes,
            errors=errors,
            entries=opened.entries,
            failures=reasons,
            cost=cost,
        )

    async def _columns(self, opened: ArmBank) -> list[list[Episode]]:
        """The episodes of each visit, by world."""
        settings = self._experiment
        rollout = Rollout(
            settings.env,
            settings.env.eval,
            opened.shown,
            self._make_actor,
            slots=min(64, self._worlds),
            search_and_ask=settings.actor.search_and_ask,
            search_experience=settings.actor.search_experience,
            make_env=self._make_env,
            critic=self._critic,
        )
        columns: list[list[Episode]] = []
        try:
            for visit in range(settings.eval.visits):
                opened.hold()
                columns.append(
                    await rollout.play(
                        [self._job(world, visit, opened.condition) for world in range(self._worlds)]
                    )
                )
                refuse_broken(columns[-1])
                await opened.settle()
        finally:
            rollout.close()
        return columns

    def _job(self, world: int, visit: int, condition: Condition) -> Job:
        seed = episode_seed(self._experiment.eval.seed, world, visit)
        options = {"world": world} if self._listed else {}
        return Job(
            Task(seed=seed, group=f"eval.{world}.{visit}", options=options),
            condition,
            sampling_seed=seed,
        )


def later(outcomes: Any) -> np.ndarray:
    """Success rate of each world over the visits after the first, or over the only one, shape (worlds,).

    Args:
        outcomes: whether each visit succeeded, shape (worlds, visits).
    """
    table = np.array(outcomes, dtype=np.float64)
    return (table[:, 1:] if table.shape[1] > 1 else table).mean(axis=1)


def compare(first: Visits, second: Visits) -> Interval:
    """Paired difference of success on later visits, the first arm minus the second, bootstrapped over worlds."""
    return paired_difference(first.later(), second.later())


def _options(experiment: Experiment, worlds: int) -> dict[str, Any]:
    """Options of the managers: no merging, and room for all episodes of a visit, whose distillation is held back."""
    settings = experiment.bank.model_dump(exclude={"path", "namespace", "embedder", "store"})
    return settings | {
        "merge_every": 0,
        "seed": experiment.eval.seed,
        "queue_size": max(bank_settings(settings).queue_size, worlds + 1),
    }
