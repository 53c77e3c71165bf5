"""Filter retrieved experience by the actor itself: the Actor-Critic of appendix B.1."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from experiential.agents.critic import CriticAgent
from experiential.agents.prompts import experience_block
from experiential.llm.base import LLM
from experiential.rollout import Episode
from experiential.training.methods.method import Method, Run
from experiential.types import Trajectory


@dataclass
class SuccessRates:
    """Track the success of an actor, by task: r_theta(q) of appendix B.1.

    A task that was not played yet has the rate of all tasks together; with none played at all the
    rate is 0.
    """

    played: Counter[str] = field(default_factory=Counter[str])
    won: Counter[str] = field(default_factory=Counter[str])

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Count finished episodes; those that failed for a technical reason do not count."""
        for trajectory in trajectories:
            if trajectory.error is None:
                name = trajectory.task_id or trajectory.task
                self.played[name] += 1
                self.won[name] += bool(trajectory.success)

    def rate(self, task: str) -> float:
        """Return the success rate for a task, in [0, 1]."""
        if self.played[task]:
            return self.won[task] / self.played[task]
        return self.won.total() / max(1, self.played.total())


class Critic(Method):
    """Let the actor judge retrieved experience before each episode."""

    def __init__(self, run: Run) -> None:
        self._roles = run.roles
        self.rates = SuccessRates()
        self._training = ActorCritic(run.roles.critic(), self.rates)

    def reviewer(self, llm: LLM | None = None) -> ActorCritic:
        """Return training's judge, or one that asks ``llm`` and counts its verdicts apart."""
        if llm is None:
            return self._training
        return ActorCritic(self._roles.critic(llm), self.rates)

    async def after_step(self, episodes: Sequence[Episode], step: int) -> None:
        """Count the successes of first attempts."""
        self.rates.add(e.trajectory for e in episodes if e.attempt == 1)

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return the number of times each verdict occurred so far."""
        return {"verdicts": dict(self._training.verdicts)}

    def state_dict(self) -> dict[str, Any]:
        """Return the success rates."""
        return {"played": dict(self.rates.played), "won": dict(self.rates.won)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the success rates."""
        self.rates.played, self.rates.won = Counter(state["played"]), Counter(state["won"])


@dataclass
class ActorCritic:
    """Review retrieved experience before the first move of an episode.

    Rejected entries are not shown, refined ones are shown as the actor rewrote them. Each use
    carries the verdict, from which ``critic_reward`` makes eq. 8; an answer that names no verdict
    leaves the entry as it is, adds nothing to its reward and is counted as ``unreadable``.

    Attributes:
        verdicts: number of each verdict.
    """

    agent: CriticAgent
    rates: SuccessRates
    verdicts: Counter[str] = field(default_factory=Counter[str])

    async def review(self, env: gym.Env[str, str], info: dict[str, Any]) -> dict[str, Any]:
        """Return the info of a reset with only the advice that the actor accepts.

        Raises:
            BackendError: the backend failed.
        """
        hits = info.get("experience")
        if not hits or "experience_prompt" not in info:
            return info
        task = str(info.get("task", ""))
        rate = self.rates.rate(str(info.get("task_id") or task))
        critiques = await asyncio.gather(
            *(self.agent.ajudge(task, hit["text"], rate) for hit in hits)
        )
        self.verdicts.update(critique.verdict or "unreadable" for critique in critiques)
        running = env.get_wrapper_attr("episode")
        running.uses[:] = [  # at the start of an episode they are in the order of the hits
            use.model_copy(update={"verdict": critique.verdict})
            for use, critique in zip(running.uses, critiques, strict=True)
        ]
        block = experience_block([c.text for c in critiques if c.text is not None])
        rest = {name: value for name, value in info.items() if name != "experience_prompt"}
        return rest | {"experience_prompt": block} if block else rest
