"""Play two attempts per task: a step of algorithm 2 of Experiential RL, tasks in parallel."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from experiential.agents.asking import derived_seed
from experiential.agents.reflection_memory import ReflectionMemory, passes
from experiential.agents.reflector import Reflection
from experiential.errors import BackendError, BankError
from experiential.rollout.rollout import Episode, Job, Rollout, shortened
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

        An unreadable reflection gets 0, or r2 if that is less.

        Its second attempt was played without it, and so says nothing for it.
        """
        reward = self.trajectory.reward
        return reward if self.reflection.text is not None else min(0.0, reward)


class AsyncReflector(Protocol):
    """Generate guidance between the attempts, as `Reflector` and `Retry` do."""

    async def areflect(
        self, trajectory: Trajectory, memory: Sequence[str] = (), *, seed: int | None = None
    ) -> Reflection:
        """Return guidance for another attempt."""
        ...


class Attempts:
    """Play first attempts, reflect on those below the threshold, and play second attempts.

    A second attempt is played on the instance of the first.

    All first attempts are played at once, then all reflections are drawn at once, then all second
    attempts are played. So every reflection of a step sees the memory as it was when the step
    began; those that pass are kept in the order of their jobs, and the last one is what a private
    memory holds after the step. A reflection that cannot be read, or whose backend fails, is
    counted by its reason, and its second attempt is played without one. Attempts that failed for a
    technical reason are not reflected on. An environment that does not come back to the same
    instance for the same seed and options fails the second attempt, with that reason.

    Args:
        rollout: plays jobs.
        reflector: a `Reflector`, or a `Retry` for the ablation without reflection.
        memory: where reflections that pass are kept; None keeps none.
        threshold: tau: a first attempt whose return is lower is reflected on, a reflection whose
            second attempt reaches it is kept.

    Attributes:
        memory_errors: how often the memory failed, by reason.
    """

    def __init__(
        self,
        rollout: Rollout,
        reflector: AsyncReflector,
        memory: ReflectionMemory | None,
        *,
        threshold: float,
    ) -> None:
        self._rollout, self._reflector, self._memory, self._threshold = (
            rollout,
            reflector,
            memory,
            threshold,
        )
        self.memory_errors: Counter[str] = Counter()

    async def play(self, jobs: Sequence[Job]) -> list[Episode]:
        """Play first attempts in the order of their jobs, then second ones as `SecondAttempt`."""
        firsts = await self._rollout.play(jobs)
        failed = [(job, e) for job, e in zip(jobs, firsts, strict=True) if self._gate(e)]
        reflections = await asyncio.gather(*(self._reflect(job, e.trajectory) for job, e in failed))
        again = [
            _again(job, reflection)
            for (job, _), reflection in zip(failed, reflections, strict=True)
        ]
        played = await self._rollout.play(again)
        seconds = [
            _second(e, first, made)
            for e, (_, first), made in zip(played, failed, reflections, strict=True)
        ]
        for second in seconds:
            if self._passed(second):
                await self._keep(str(second.reflection.text), second.trajectory)
        return [*firsts, *seconds]

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Summarise the attempts returned by ``play`` for the step's record."""
        firsts, seconds = split_attempts(episodes)
        ended = [e for e in firsts if e.trajectory.error is None]
        pairs = [e for e in seconds if e.trajectory.error is None]
        unread = Counter(
            shortened(e.reflection.reason) for e in seconds if e.reflection.reason is not None
        )
        means = {
            "gated": _mean([float(self._gate(e)) for e in ended]),
            "r1": _mean([e.first.trajectory.reward for e in pairs]),
            "r2": _mean([e.trajectory.reward for e in pairs]),
            "success_first": _mean([float(e.trajectory.success) for e in ended]),
            "success_second": _mean([float(e.trajectory.success) for e in pairs]),
        }
        read = sum(e.reflection.text is not None for e in seconds)
        counts = {
            "reflections": read,
            "unread": dict(unread),
            "memory_writes": sum(map(self._passed, seconds)),
        }
        return (
            means
            | counts
            | ({"memory_errors": dict(self.memory_errors)} if self.memory_errors else {})
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs beside the bank: the private memory."""
        return {} if self._memory is None else self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``.

        Raises:
            CheckpointError: it is of another kind of memory.
        """
        if self._memory is not None:
            self._memory.load_state_dict(state)

    def _gate(self, episode: Episode) -> bool:
        """Return whether to reflect on an attempt: it ended and r1 < tau (algorithm 2, line 11)."""
        return episode.trajectory.error is None and episode.trajectory.reward < self._threshold

    async def _reflect(self, job: Job, first: Trajectory) -> Reflection:
        memory: Sequence[str] = ()
        try:
            memory = (
                await asyncio.to_thread(self._memory.recall, first)
                if self._memory is not None
                else ()
            )
        except BankError as error:
            self.memory_errors[shortened(str(error))] += 1
        try:
            return await self._reflector.areflect(
                first, memory, seed=derived_seed(job.sampling_seed, "reflection")
            )
        except BackendError as error:
            return Reflection(reason=f"backend: {error}")

    def _passed(self, second: SecondAttempt) -> bool:
        """Return whether to keep a reflection: r2 >= tau (line 18 of algorithm 2).

        See `ReflectionMemory`.
        """
        trajectory, text = second.trajectory, second.reflection.text
        return (
            self._memory is not None
            and text is not None
            and trajectory.error is None
            and passes(trajectory.reward, self._threshold)
        )

    async def _keep(self, text: str, second: Trajectory) -> None:
        if self._memory is None:
            return
        try:
            await asyncio.to_thread(self._memory.keep, text, second)
        except (BankError, ValueError) as error:
            self.memory_errors[shortened(str(error))] += 1


def split_attempts(episodes: Sequence[Episode]) -> tuple[list[Episode], list[SecondAttempt]]:
    """Separate first and second attempts."""
    return [e for e in episodes if not isinstance(e, SecondAttempt)], [
        e for e in episodes if isinstance(e, SecondAttempt)
    ]


def _again(job: Job, reflection: Reflection) -> Job:
    """Return the second attempt at a job: same task, same condition, other draws."""
    return replace(
        job,
        sampling_seed=derived_seed(job.sampling_seed, "second"),
        advice=reflection.block,
        attempt=2,
    )


def _second(episode: Episode, first: Episode, reflection: Reflection) -> SecondAttempt:
    known = {field.name: getattr(episode, field.name) for field in fields(Episode)}
    before, now = first.trajectory.instance, episode.trajectory
    if now.error is None and now.instance != before:
        known["trajectory"] = now.model_copy(
            update={"error": f"env: came back as {now.instance}, not as {before}"}
        )
    return SecondAttempt(**known, first=first, reflection=reflection)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
