"""Reward entries that lower the actor's entropy over its task (appendix B.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiential.agents.actor import ActorAgent
from experiential.agents.prompts import experience_block
from experiential.bank.protocol import Bank
from experiential.config import EntropyBonusSettings
from experiential.rollout.rollout import Episode
from experiential.training.methods.method import Method, Run
from experiential.training.rewards import Key, entropy_bonus
from experiential.training.runtime import PolicyRuntime, Sample
from experiential.types import Condition, Trajectory, Use

Pair = tuple[str, str | None]
"""A first observation and the entry shown with it."""


class EntropyBonus(Method):
    """Measure how much entries lower the actor's entropy over the task; compute bonuses.

    H(q) is the mean over the tokens of the first observation of the entropy of what the actor
    expects in their place, in nats; H(q, m) is the same with the entry in the system message. Both
    are taken with the weights of now, for entries that were shown at the start of an episode; each
    pair of observation and entry is computed once.

    Args:
        runtime: the actor's policy.
        actor: an agent with the actor's settings; its conversation is replaced.
        bank: gives the texts of entries.
        settings: how an entropy reduction becomes a bonus.
        shape: ``low``, ``high`` and ``temperature`` of `rewards.entropy_bonus`.
    """

    def __init__(
        self,
        runtime: PolicyRuntime,
        actor: ActorAgent,
        bank: Bank,
        settings: EntropyBonusSettings,
        **shape: float,
    ) -> None:
        self._runtime, self._actor, self._bank = runtime, actor, bank
        self._options: dict[str, Any] = settings.model_dump() | shape
        self.mean = 0.0

    @classmethod
    def of(cls, run: Run) -> EntropyBonus | None:
        """Build it with ``extractor.entropy_bonus``, in a run that has a bank."""
        settings = run.experiment.extractor.entropy_bonus
        if settings is None or run.bank is None:
            return None
        return cls(run.actor, run.roles.actor(), run.bank, settings)

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return the mean bonus of the last step."""
        return {"entropy_bonus": self.mean}

    async def bonuses(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the bonus of each use, by its id; uses in the middle of an episode have none."""
        shown = [
            (t.turns[0].observation, use)
            for t in trajectories
            if t.turns and t.error is None
            for use in _opening_uses(t)
        ]
        texts = self._texts([use for _, use in shown])
        pairs: set[Pair] = {
            (observation, text)
            for observation, use in shown
            if (text := texts.get(_key(use))) is not None
        }
        found = await self._entropies(
            [*pairs, *dict.fromkeys((observation, None) for observation, _ in pairs)]
        )
        made = {
            pair: entropy_bonus(found[pair[0], None], found[pair], **self._options)
            for pair in pairs
        }
        known: list[tuple[Use, Pair]] = [
            (use, (observation, texts.get(_key(use)))) for observation, use in shown
        ]
        given = {use.id: made[pair] for use, pair in known if pair in made}
        self.mean = sum(given.values()) / max(1, len(given))
        return given

    def _texts(self, uses: Sequence[Use]) -> dict[Key, str]:
        found = {key: self._bank.version(*key) for key in {_key(use) for use in uses}}
        return {key: entry.text for key, entry in found.items() if entry is not None}

    async def _entropies(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        samples = [self._sample(*pair) for pair in pairs]
        rows = await self._runtime.entropies(samples)
        return {pair: sum(row) / max(1, len(row)) for pair, row in zip(pairs, rows, strict=True)}

    def _sample(self, observation: str, text: str | None) -> Sample:
        """Make a sample of the prompt, with the tokens of the observation as its positions."""
        tokens, kinds = self._actor.opening(
            observation, None if text is None else experience_block([text])
        )
        positions = tuple(i for i, kind in enumerate(kinds) if kind == "user" and i)
        nothing = (0.0,) * len(positions)
        return Sample(
            tokens=tuple(tokens), positions=positions, logprobs=nothing, advantages=nothing
        )


def _opening_uses(trajectory: Trajectory) -> list[Use]:
    return (
        [use for use in trajectory.uses if use.how == "episode_start"]
        if trajectory.condition is Condition.GUIDED
        else []
    )


def _key(use: Use) -> Key:
    return use.experience_id, use.experience_version
