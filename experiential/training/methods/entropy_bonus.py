"""Reward entries that lower the actor's entropy over its task (appendix B.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from experiential.agents.actor import ActorAgent
from experiential.agents.prompts import experience_block
from experiential.bank.protocol import Bank
from experiential.config import BonusKind, EntropyBonusSettings
from experiential.training.methods.method import Method
from experiential.training.runtime import PolicyRuntime, Sample
from experiential.types import Condition, Trajectory

Pair = tuple[str, str | None]
"""A first observation and the entry shown with it."""


@dataclass(eq=False)
class EntropyBonus(Method):
    """Measure how much entries lower the actor's entropy over the task; compute bonuses.

    H(q) is the mean over the tokens of the first observation of the entropy of what the actor
    expects in their place, in nats; H(q, m) is the same with the entry in the system message. Both
    are taken with the weights of now, for entries that were shown at the start of an episode; each
    pair of observation and entry is computed once.

    Attributes:
        runtime: the actor's policy.
        actor: an agent with the actor's settings; its conversation is replaced.
        bank: gives the texts of entries.
        settings: how an entropy reduction becomes a bonus.
    """

    runtime: PolicyRuntime
    actor: ActorAgent
    bank: Bank
    settings: EntropyBonusSettings

    async def bonuses(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the bonus of each use, by its id; uses in the middle of an episode have none."""
        shown = [
            (t.turns[0].observation, use)
            for t in trajectories
            if t.turns and t.error is None and t.condition is Condition.GUIDED
            for use in t.uses
            if use.how == "episode_start"
        ]
        versions = {(use.experience_id, use.experience_version) for _, use in shown}
        entries = {key: self.bank.version(*key) for key in versions}
        pairs: dict[str, Pair] = {
            use.id: (observation, entry.text)
            for observation, use in shown
            if (entry := entries[use.experience_id, use.experience_version]) is not None
        }
        without: list[Pair] = [(observation, None) for observation, _ in pairs.values()]
        samples: dict[Pair, Sample] = {}
        # positions are the tokens of the observation
        for observation, text in dict.fromkeys([*pairs.values(), *without]):
            advice = None if text is None else experience_block([text])
            tokens, kinds = self.actor.opening(observation, advice)
            positions = tuple(i for i, kind in enumerate(kinds) if kind == "user" and i)
            zeros = (0.0,) * len(positions)
            samples[observation, text] = Sample(tuple(tokens), positions, zeros, zeros)
        rows = await self.runtime.entropies(list(samples.values()))
        entropy = {
            pair: sum(row) / max(1, len(row)) for pair, row in zip(samples, rows, strict=True)
        }
        options = self.settings.model_dump()
        bonuses = {
            use: entropy_bonus(entropy[observation, None], entropy[observation, text], **options)
            for use, (observation, text) in pairs.items()
        }
        self.metrics = {"entropy_bonus": sum(bonuses.values()) / max(1, len(bonuses))}
        return bonuses


def entropy_bonus(
    before: float,
    after: float,
    kind: BonusKind,
    *,
    weight: float,
    low: float = -1.0,
    high: float = 1.0,
    temperature: float = 1.0,
) -> float:
    """Compute the bonus of an entry that lowers the actor's entropy, D = H(q) - H(q, m).

    See appendix B.2 of Complementary RL. With w the ``weight`` and tau the ``temperature``:

    * ``relative``: w clip(D / H(q), low, high);
    * ``tanh``: w tanh(D);
    * ``sigmoid``: w (2 sigmoid(D / tau) - 1);
    * ``asymmetric``: w clip(D, low, high), with a ``low`` nearer to 0 than ``high`` where harm
      shall cost less than help earns;
    * ``log``: w sgn(D) log(1 + abs(D)).

    ``before`` is H(q), the entropy over the task without the entry, and ``after`` H(q, m), with it,
    in nats.

    Raises:
        ValueError: an entropy is negative or not finite, or the kind is unknown.
    """
    if not (math.isfinite(before) and math.isfinite(after) and before >= 0 and after >= 0):
        raise ValueError(f"Expected finite entropies of at least 0, got {before} and {after}")
    gain = before - after
    match kind:
        case "relative":
            return weight * min(high, max(low, gain / before)) if before > 0 else 0.0
        case "tanh":
            return weight * math.tanh(gain)
        case "sigmoid":
            # 2 sigmoid(x) - 1 = tanh(x / 2), and does not overflow
            return weight * math.tanh(gain / (2 * temperature))
        case "asymmetric":
            return weight * min(high, max(low, gain))
        case "log":
            return weight * math.copysign(math.log1p(abs(gain)), gain)
        case _:
            raise ValueError(f"Expected a kind of {', '.join(get_args(BonusKind))}, got {kind!r}")
