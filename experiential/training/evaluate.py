"""Evaluation by visit: weights frozen, every held-out world met several times with different seeds.

The first visit can only guess; later visits can use what the extractor distilled from earlier ones. The bank that is
written to is a scratch copy: the training bank does not change by one byte.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from experiential.agents.actor import ActorAgent
from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.config import Experiment
from experiential.training.intervals import Interval, paired_difference, wilson
from experiential.training.rollout import Episode, Job, MakeEnv, NoBank, Rollout, Task, failures, make_env, refuse_broken
from experiential.training.tasks import episode_seed, world_count
from experiential.types import Condition, Record


class Visits(Record):
    """Outcomes of one arm: ``outcomes[w][v]`` is whether visit v to world w succeeded.

    An episode that failed for a technical reason counts as no success; ``failures`` says how many did, by reason.
    """

    arm: str
    step: int
    outcomes: tuple[tuple[bool, ...], ...]
    errors: int = 0
    entries: int = 0
    failures: dict[str, int] = Field(default_factory=dict[str, int])

    def rates(self) -> list[Interval]:
        """Success by visit number, with Wilson intervals."""
        table = np.array(self.outcomes)
        return [wilson(int(column.sum()), column.size) for column in table.T]

    def later(self) -> np.ndarray:
        """Success rate of each world over the visits after the first, shape (worlds,)."""
        return np.array(self.outcomes, dtype=np.float64)[:, 1:].mean(axis=1)

    def event(self) -> dict[str, Any]:
        """The record that goes to the metrics file."""
        table = np.array(self.outcomes)
        visits = [{"visit": i + 1, "successes": int(c.sum()), "episodes": int(c.size)} for i, c in enumerate(table.T)]
        outcomes = [[int(x) for x in row] for row in self.outcomes]
        event: dict[str, Any] = {
            "event": "eval",
            "step": self.step,
            "arm": self.arm,
            "visits": visits,
            "outcomes": outcomes,
            "errors": self.errors,
            "entries": self.entries,
        }
        return event | ({"failures": self.failures} if self.failures else {})


class VisitEvaluator:
    """Plays the held-out worlds visit by visit.

    Args:
        experiment: what is evaluated.
        actor: an ``LLM`` that acts.
        make_actor: builds an actor agent for evaluation.
        extractor: distils between the visits; None leaves the bank as it is.
        make_env: builds the environments; in this process by default.

    Its arms raise ``ExperientialError`` when the environment fails every episode of a visit.
    """

    def __init__(
        self, experiment: Experiment, make_actor: Callable[[], ActorAgent], extractor: Any | None, *, make_env: MakeEnv = make_env
    ) -> None:
        self._experiment, self._make_actor, self._extractor = experiment, make_actor, extractor
        self._make_env = make_env
        kwargs = experiment.env.kwargs | experiment.env.eval
        listed = world_count(experiment.env.id, kwargs)
        self._listed = listed is not None
        self._worlds = experiment.eval.worlds if listed is None else min(experiment.eval.worlds, listed)

    async def with_bank(self, bank: ExperienceBank, scratch: Path, step: int) -> Visits:
        """The arm that may see the bank, on a scratch copy in the folder ``scratch``."""
        with bank.fork(scratch) as copy:
            manager = ExperienceManager(copy, self._extractor, **_options(self._experiment))
            try:
                return await self._arm("bank", manager, Condition.GUIDED, step, len(copy))
            finally:
                manager.close()

    async def without_bank(self, step: int) -> Visits:
        """The arm that never sees a bank; same worlds, seeds and sampling seeds."""
        return await self._arm("free", NoBank(), Condition.FREE, step, 0)

    async def _arm(self, arm: str, manager: Any, condition: Condition, step: int, entries: int) -> Visits:
        settings = self._experiment
        slots = min(64, self._worlds)
        rollout = Rollout(settings.env, settings.env.eval, manager, self._make_actor, slots=slots, make_env=self._make_env)
        columns: list[list[Episode]] = []
        try:
            for visit in range(settings.eval.visits):
                columns.append(await rollout.play([self._job(world, visit, condition) for world in range(self._worlds)]))
                refuse_broken(columns[-1])
                if isinstance(manager, ExperienceManager):
                    await manager.adrain()
        finally:
            rollout.close()
        outcomes = tuple(tuple(column[w].trajectory.success for column in columns) for w in range(self._worlds))
        reasons = failures(list(chain.from_iterable(columns)))
        return Visits(arm=arm, step=step, outcomes=outcomes, errors=sum(reasons.values()), entries=entries, failures=reasons)

    def _job(self, world: int, visit: int, condition: Condition) -> Job:
        seed = episode_seed(self._experiment.eval.seed, world, visit)
        options = {"world": world} if self._listed else {}
        return Job(Task(seed=seed, group=f"eval.{world}.{visit}", options=options), condition, sampling_seed=seed)


def compare(bank: Visits, free: Visits) -> Interval:
    """Paired difference of success on later visits, with the bank minus without, bootstrapped over worlds."""
    return paired_difference(bank.later(), free.later())


def _options(experiment: Experiment) -> dict[str, Any]:
    return experiment.bank.model_dump(exclude={"path", "namespace", "embedder"}) | {"merge_every": 0, "seed": experiment.eval.seed}
