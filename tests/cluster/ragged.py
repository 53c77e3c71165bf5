"""One batch of ragged responses, as our flat tokens and as the padded matrices that OpenRLHF and
TRL take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiential.config import ActorSettings
from experiential.rollout import Episode
from experiential.training.advantages import cell_advantages
from experiential.training.losses import batch_loss
from experiential.training.runtime import LossSettings
from experiential.training.samples import actor_samples
from experiential.types import Condition, Generation, Trajectory

GROUP_SIZE = 4
REWARDS = (1.0, 0.0, 0.25, 0.5, 2.0, 0.75, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5)
"""Three groups of four; the last one is constant and teaches nothing."""
TURNS = ((3, 2), (5,), (1,), (4,), (2, 3), (6,), (2,), (1, 1), (2,), (3,), (1, 2), (4,))
"""Sampled tokens of each turn of each episode."""
INJECTED = 2
"""Tokens of the environment between two turns."""
EPISODES = len(REWARDS)
FLOAT32 = 5e-7
"""Relative error allowed where one side rounds to float32 (to within 6e-8 each time) and all else
is float64.
"""


@dataclass
class Ragged:
    """Matrices of shape (episodes, longest): ``mask`` is True where a token was sampled; the rest
    is injected or padding.
    """

    mask: Tensor
    logp: Tensor
    old: Tensor
    reference: Tensor

    @property
    def lengths(self) -> Tensor:
        """Sampled tokens of each episode."""
        return self.mask.sum(1)

    def fresh(self) -> Tensor:
        """The log-probabilities, to be differentiated by."""
        return self.logp.clone().requires_grad_()

    def segment(self) -> Tensor:
        """Episode of each sampled token."""
        return torch.arange(EPISODES).repeat_interleave(self.lengths)

    def episodes(self) -> list[Episode]:
        """The same as episodes of ours, whose later prompts hold what was injected."""
        made = []
        for i, turns in enumerate(TURNS):
            seen, position, generations = [1, 2], 0, []
            for length in turns:
                reply = [10 + n for n in range(length)]
                old = tuple(self.old[i, position : position + length].tolist())
                generations.append(
                    Generation(
                        text="x", prompt_ids=tuple(seen), response_ids=tuple(reply), logprobs=old
                    )
                )
                seen, position = [*seen, *reply, *[5] * INJECTED], position + length + INJECTED
            trajectory = Trajectory(
                task="t", group=str(i // GROUP_SIZE), condition=Condition.FREE, reward=REWARDS[i]
            )
            made.append(Episode(trajectory, tuple(generations)))
        return made


def ragged(spread: float = 0.4) -> Ragged:
    """The batch; ``spread`` is how far apart the log-probabilities of policy, behaviour and
    reference are, in nats.
    """
    rows = [[k for n in turns for k in [True] * n + [False] * INJECTED] for turns in TURNS]
    longest = max(map(len, rows))
    mask = torch.tensor([row + [False] * (longest - len(row)) for row in rows])
    generator = torch.Generator().manual_seed(0)
    old = -1.0 - torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    logp, reference = (
        old + spread * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    return Ragged(mask, logp, old, reference)


def our_advantages(estimator: Any = "grpo") -> Tensor:
    """Advantage of each episode, shape (episodes,), as float64."""
    groups = np.arange(EPISODES) // GROUP_SIZE
    return torch.tensor(
        cell_advantages(REWARDS, groups, np.zeros(EPISODES, bool), estimator=estimator),
        dtype=torch.float64,
    )


def our_loss(
    batch: Ragged, loss: LossSettings | None = None, *, reference: bool = False, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Loss and its gradient by every log-probability, by the way that training goes: episodes,
    samples, batch loss.
    """
    loss = loss or LossSettings()
    actor = ActorSettings.model_validate({"advantage": "pooled", "kl": loss.kl, **settings})
    samples = actor_samples(batch.episodes(), actor)
    taught = batch.mask & ((our_advantages(actor.estimator) != 0) | (loss.kl > 0))[:, None]
    assert [len(s.positions) for s in samples] == [n for n in taught.sum(1).tolist() if n], (
        "one sample for each episode that counts"
    )
    logp = batch.fresh()
    value, _ = batch_loss(
        logp[taught],
        samples,
        loss,
        float(taught.sum()),
        reference=batch.reference[taught] if reference else None,
    )
    return value.detach(), torch.autograd.grad(value, logp)[0]


def agree(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], rtol: float = 1e-12) -> None:
    """Value and gradient are the same; nothing but sampled tokens has a gradient."""
    assert theirs[1].abs().max() > 1e-3, "a comparison of zeros proves nothing"
    torch.testing.assert_close(ours[0], theirs[0], rtol=rtol, atol=rtol)
    torch.testing.assert_close(ours[1], theirs[1], rtol=rtol, atol=rtol)
