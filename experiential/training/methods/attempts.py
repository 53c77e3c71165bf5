"""Play two attempts per task: a step of algorithm 2 of Experiential RL, tasks in parallel."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from experiential.agents.prompts import derived_seed
from experiential.agents.reflector import Reflection, ReflectionMemory, Reflector, Retry, passes
from experiential.errors import BackendError, BankError
from experiential.llm.rounds import Rounds
from experiential.rollout import Episode, Job, Rollout, shortened
from experiential.training.advantages import outcome
from experiential.training.metrics import mean
from experiential.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondAttempt(Episode):
    """Represent a second try at an instance that ``first`` did not solve.

    Attributes:
        first: the attempt that was reflected on.
        reflection: the text shown to this attempt, and the response that it rewards.
    """

    first: Episode
    reflection: Reflection

    @property
    def reflection_reward(self) -> float:
        """Return the reward of the reflection: r2, line 16 of algorithm 2.

        An unreadable reflection gets 0, or r2 if that is less: its second attempt was played
        without it, and so says nothing for it.
        """
        reward = self.trajectory.reward
        return reward if self.reflection.text is not None else min(0.0, reward)


@dataclass
class Attempts:
    """Play first attempts, reflect on those below the threshold, and play second attempts.

    All first attempts are played at once, then all reflections are drawn at once, then all second
    attempts are played. So every reflection of a step sees the memory as it was when the step
    began; those that pass are kept in the order of their jobs, and the last one is what a private
    memory holds after the step. A reflection that cannot be read, or whose backend fails, is
    counted by its reason, and its second attempt is played without one. Attempts that failed for a
    technical reason are not reflected on. An environment that does not come back to the same
    instance for the same seed and options fails the second attempt, with that reason.

    Attributes:
        rollout: plays jobs.
        reflector: a `Reflector`, or a `Retry` for the ablation without reflection.
        memory: where reflections that pass are kept; None keeps none.
        threshold: tau: a first attempt whose return is lower is reflected on, a reflection whose
            second attempt reaches it is kept.
        memory_errors: how often the memory failed, by reason.
    """

    rollout: Rollout
    reflector: Reflector | Retry
    memory: ReflectionMemory | None
    threshold: float
    memory_errors: Counter[str] = field(default_factory=Counter[str])

    async def play(self, jobs: Sequence[Job]) -> list[Episode]:
        """Play first attempts in the order of their jobs, then second ones as `SecondAttempt`."""
        firsts = await self.rollout.play(jobs)
        failed = [  # line 11 of algorithm 2: r1 < tau
            (job, e)
            for job, e in zip(jobs, firsts, strict=True)
            if e.trajectory.error is None and e.trajectory.reward < self.threshold
        ]
        work = [self._reflect(job, e.trajectory) for job, e in failed]
        rounds = getattr(self.reflector, "llm", None)
        if isinstance(rounds, Rounds):
            reflections = await rounds.run(work, most=len(work))
        else:
            reflections = await asyncio.gather(*work)
        again = [  # same task, same condition, other draws
            replace(
                job,
                sampling_seed=derived_seed(job.sampling_seed, "second"),
                advice=reflection.block,
                attempt=2,
            )
            for (job, _), reflection in zip(failed, reflections, strict=True)
        ]
        seconds: list[SecondAttempt] = []
        played = await self.rollout.play(again)
        for episode, (_, first), made in zip(played, failed, reflections, strict=True):
            known = {f.name: getattr(episode, f.name) for f in fields(Episode)}
            before, now = first.trajectory.instance, episode.trajectory
            if now.error is None and now.instance != before:
                reason = f"env: came back as {now.instance}, not as {before}"
                known["trajectory"] = now.model_copy(update={"error": reason})
            seconds.append(SecondAttempt(**known, first=first, reflection=made))
        for second in filter(self._passed, seconds):
            assert self.memory is not None
            try:
                text = str(second.reflection.text)
                await asyncio.to_thread(self.memory.keep, text, second.trajectory)
            except (BankError, ValueError) as error:
                self.memory_errors[shortened(str(error))] += 1
        return [*firsts, *seconds]

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Summarise the attempts returned by ``play`` for the step's record."""
        firsts, seconds = split_attempts(episodes)
        ended = [e for e in firsts if e.trajectory.error is None]
        pairs = [e for e in seconds if e.trajectory.error is None]
        unread = Counter(
            shortened(e.reflection.reason) for e in seconds if e.reflection.reason is not None
        )
        event: dict[str, Any] = {
            "gated": mean([e.trajectory.reward < self.threshold for e in ended]),
            "r1": mean([e.first.trajectory.reward for e in pairs]),
            "r2": mean([e.trajectory.reward for e in pairs]),
            "success_first": mean([outcome(e.trajectory) for e in ended]),
            "success_second": mean([outcome(e.trajectory) for e in pairs]),
            "reflections": sum(e.reflection.text is not None for e in seconds),
            "unread": dict(unread),
            "memory_writes": sum(map(self._passed, seconds)),
        }
        if self.memory_errors:
            event["memory_errors"] = dict(self.memory_errors)
        return event

    async def _reflect(self, job: Job, first: Trajectory) -> Reflection:
        memory: Sequence[str] = ()
        try:
            if self.memory is not None:
                memory = await asyncio.to_thread(self.memory.recall, first)
        except BankError as error:
            self.memory_errors[shortened(str(error))] += 1
        seed = derived_seed(job.sampling_seed, "reflection")
        try:
            return await self.reflector.areflect(first, memory, seed=seed)
        except BackendError as error:
            return Reflection(reason=f"backend: {error}")

    def _passed(self, second: SecondAttempt) -> bool:
        """Return whether to keep a reflection: r2 >= tau (line 18 of algorithm 2)."""
        return (
            self.memory is not None
            and second.reflection.text is not None
            and second.trajectory.error is None
            and passes(second.trajectory.reward, self.threshold)
        )


def split_attempts(episodes: Sequence[Episode]) -> tuple[list[Episode], list[SecondAttempt]]:
    """Separate first and second attempts."""
    seconds = [e for e in episodes if isinstance(e, SecondAttempt)]
    return [e for e in episodes if not isinstance(e, SecondAttempt)], seconds
