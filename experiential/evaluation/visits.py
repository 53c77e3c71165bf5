"""Evaluate by visits: weights frozen, every held-out world met several times on different seeds.

The first visit can only guess; later visits can use what the extractor distilled from earlier ones.
Each arm (see `arms`) plays the same worlds with the same seeds and sampling seeds. Banks that are
written to are scratch copies: the training bank does not change by one byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from experiential.agents.actor import ActorAgent
from experiential.agents.prompts import entry_text, principle_text
from experiential.bank.options import bank_settings
from experiential.bank.protocol import ForkableBank
from experiential.config import Arm, Experiment
from experiential.evaluation.arms import attempts, opened_arm
from experiential.evaluation.episode_log import arm_event
from experiential.evaluation.players import RandomPlayer
from experiential.llm.metered import Meter, Spent
from experiential.llm.rounds import Rounds
from experiential.rollout import (
    Episode,
    Job,
    MakeEnv,
    Reviewer,
    Rollout,
    Task,
    episode_seed,
    failures,
    make_env,
    refuse_broken,
    world_facts,
)
from experiential.types import Record


class Cost(Record):
    """Hold the cost of an arm: its wall clock, and the tokens and seconds of both policies."""

    seconds: float = 0.0
    """From the copy of the bank to the last distillation."""
    actor: Spent = Spent()
    extractor: Spent = Spent()


class Visits(Record):
    """Hold the outcomes of one arm at a training step."""

    arm: str
    step: int
    outcomes: tuple[tuple[bool, ...], ...]
    """``outcomes[w][v]``: whether visit v to world w succeeded; a technical failure did not. Of
    several attempts (``best-of-n``) one success is enough."""
    errors: int = 0
    """Episodes that failed for a technical reason."""
    entries: int = 0
    """Entries of the bank at the beginning."""
    chance: float | None = None
    """Success rate of blind play, where the environment states it (``TextEnv.chance``)."""
    failures: dict[str, int] = {}
    """How many episodes failed for which reason."""
    cost: Cost = Cost()

    def later(self) -> np.ndarray:
        """Return the success rate of each world on later visits, shape (worlds,)."""
        return later(self.outcomes)

    def event(self) -> dict[str, Any]:
        """Return the record for the metrics file."""
        visits = [
            {"visit": number, "successes": int(column.sum()), "episodes": int(column.size)}
            for number, column in enumerate(np.array(self.outcomes).T, 1)
        ]
        outcomes = [[int(success) for success in row] for row in self.outcomes]
        kept = self.model_dump(include={"step", "arm", "errors", "entries", "cost"})
        more = self.model_dump(include={"failures", "chance"})
        known = {name: value for name, value in more.items() if value}
        return {"event": "eval", **kept, "visits": visits, "outcomes": outcomes, **known}


@dataclass(frozen=True)
class Meters:
    """Count what the two policies generate in an evaluation."""

    actor: Meter = field(default_factory=Meter)
    extractor: Meter = field(default_factory=Meter)


def manager_options(experiment: Experiment) -> dict[str, Any]:
    """Return the options of a run's ``ExperienceManager``: the settings of its bank.

    A policy that the run trains answers behind rollouts, updates and all other distillations of a
    step. To ask it again after a while would only lengthen that queue, so it has an hour unless
    ``bank.options.distill_timeout`` says otherwise.
    """
    options = experiment.bank.model_dump(exclude={"path", "namespace", "embedder", "store"})
    if experiment.runtime != "frozen":  # where a server may have lost the request
        options["options"] = {"distill_timeout": 3600.0, **options["options"]}
    return options


def evaluation_options(experiment: Experiment) -> dict[str, Any]:
    """Return the options of the manager of an evaluation: it merges nothing, and has its seed."""
    return manager_options(experiment) | {"merge_every": 0, "seed": experiment.eval.seed}


def held_out_task(seed: int, world: int, visit: int, listed: bool) -> Task:
    """Return a visit to a world of an evaluation with this seed, both counted from 0.

    Args:
        seed: of the evaluation (``eval.seed``).
        world: which world.
        visit: which visit to it.
        listed: whether the environment lists its worlds; if not, seeds alone tell them apart.
    """
    options = {"world": world} if listed else {}
    group = f"eval.{world}.{visit}"
    return Task(seed=episode_seed(seed, world, visit), group=group, options=options)


class VisitEvaluator:
    """Play the held-out worlds visit by visit.

    Args:
        experiment: settings of the evaluation.
        make_actor: builds an actor agent for evaluation.
        extractor: distils between the visits; None leaves the bank as it is.
        make_env: builds the environments; in this process by default.
        meters: count what the backends of ``make_actor`` and ``extractor`` generate (see
            ``Metered``); without them costs are seconds alone.
        critic: reviews what is retrieved, as in training.
        rounds: what ``extractor`` asks, in a run that can be repeated.
        record: receives the episodes of each arm, as an event of `episode_log`.
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
        rounds: Rounds | None = None,
        record: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self._experiment, self._make_actor, self._extractor = experiment, make_actor, extractor
        self._rounds, self._record = rounds, record
        self._make_env, self._meters, self._critic = make_env, meters or Meters(), critic
        arguments = experiment.env.kwargs | experiment.env.eval
        listed, self._chance = world_facts(experiment.env.id, arguments)
        self._listed = listed is not None
        worlds = experiment.eval.worlds
        self._worlds = worlds if listed is None else min(worlds, listed)

    async def play(
        self, arm: Arm, step: int, bank: ForkableBank | None = None, scratch: Path | None = None
    ) -> Visits:
        """Play one arm; ``step`` is the training step, for the record.

        ``bank`` is the bank as trained, which is only read, and ``scratch`` a folder without a bank
        for the arm's copy of it, or its own; both are None for ``off``. A baseline needs no bank.

        Raises:
            ExperientialError: the environment failed every episode of a visit.
        """
        settings, meters, begin = self._experiment, self._meters, time.perf_counter()
        tries, make_actor = attempts(arm), self._make_actor
        if arm == "random":
            make_actor = cast("Callable[[], ActorAgent]", RandomPlayer)
        actor_before, extractor_before = meters.actor.spent(), meters.extractor.spent()
        rounds = self._rounds
        in_order = settings.repeatable and arm != "random"  # which asks no model
        if rounds is None and in_order:
            rounds = Rounds(self._make_actor().llm)  # an extractor of its own works one at a time
        options = manager_options(settings)
        options = evaluation_options(settings) | {
            # Distillation waits for the end of a visit, so all its episodes need room in the queue.
            "queue_size": max(bank_settings(options).queue_size, self._worlds + 1),
            "rounds": rounds,
        }
        with opened_arm(
            arm,
            bank,
            scratch or Path(),
            self._extractor,
            options,
            tokenizer=make_actor().llm.tokenizer,
            render=principle_text if settings.actor.search_experience else entry_text,
        ) as opened:
            rollout = Rollout(
                settings.env,
                settings.env.eval,
                opened.shown,
                make_actor,
                slots=min(64, self._worlds * tries),
                search_and_ask=settings.actor.search_and_ask,
                search_experience=settings.actor.search_experience,
                make_env=self._make_env,
                critic=self._critic,
                in_order=in_order,
            )
            visits: list[list[Episode]] = []
            with closing(rollout):
                for visit in range(settings.eval.visits):
                    jobs: list[Job] = []
                    for world in range(self._worlds):
                        task = held_out_task(settings.eval.seed, world, visit, self._listed)
                        seed = task.seed  # of the first attempt's sampling, too
                        draws = [seed, *(episode_seed(seed, one) for one in range(1, tries))]
                        jobs += [Job(task, opened.condition, sampling_seed=one) for one in draws]
                    async with opened.visit():
                        visits.append(await rollout.play(jobs))
                        refuse_broken(visits[-1])
            if self._record is not None:
                own = None if opened.manager is None else opened.manager.bank
                self._record(arm_event(arm, step, visits, own))
        cost = Cost(
            seconds=time.perf_counter() - begin,
            actor=meters.actor.spent() - actor_before,
            extractor=meters.extractor.spent() - extractor_before,
        )
        worlds = (slice(world * tries, (world + 1) * tries) for world in range(self._worlds))
        reasons = failures([episode for visit in visits for episode in visit])
        return Visits(
            arm=arm,
            step=step,
            outcomes=tuple(
                tuple(any(e.trajectory.success for e in visit[own]) for visit in visits)
                for own in worlds
            ),
            errors=sum(reasons.values()),
            entries=opened.entries,
            chance=self._chance,
            failures=reasons,
            cost=cost,
        )


def later(outcomes: Any) -> np.ndarray:
    """Return the success rate of each world on visits after the first, shape (worlds,).

    ``outcomes`` says whether each visit succeeded, shape (worlds, visits); a single visit counts.
    """
    table = np.array(outcomes, dtype=np.float64)
    return (table[:, 1:] if table.shape[1] > 1 else table).mean(axis=1)
