"""Train the extractor in the background: credit entries for their uses and update by CISPO."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiential.bank.protocol import Bank
from experiential.config import ExtractorSettings
from experiential.training.buffer import ExtractorBuffer, Span
from experiential.training.rewards import Key, critic_reward, outcome, relative_rewards, use_reward
from experiential.training.runtime import (
    LossSettings,
    PolicyRuntime,
    Sample,
    TrainStats,
    sample_from_generation,
)
from experiential.types import Condition, Distillation, Experience, Generation, Trajectory, Use


class ExtractorTrack:
    """Train the extractor on whether its entries helped, on a schedule of its own.

    Every use of an entry version gives the generation that wrote it, and those of its merged
    ancestors, a reward of -1 or +1; malformed answers are samples with the lowest reward. When the
    buffer holds a batch, CISPO updates run as a task beside the rollouts.

    Attributes:
        uncredited: uses without a reward, for want of a free member to compare with.
        weight: mean weight of eq. 7 over the last batch.
    """

    def __init__(self, runtime: PolicyRuntime, bank: Bank, settings: ExtractorSettings) -> None:
        self._runtime, self._bank, self._settings = runtime, bank, settings
        options = settings.options
        self.buffer = ExtractorBuffer(
            options.buffer_size,
            batch_size=settings.batch_size,
            max_staleness=settings.max_staleness,
            cooldown=options.cooldown,
            decay=options.decay,
            malformed_share=options.malformed_share,
        )
        self.updates = self.malformed = self.uncredited = 0
        self.last = TrainStats()
        self.mean_reward, self.staleness, self.weight = 0.0, 0.0, 1.0
        self._running: asyncio.Task[None] | None = None
        self._refused: deque[Generation] = deque()  # of the manager's thread, for credit()

    def on_distillation(
        self, trajectory: Trajectory, distillation: Distillation, written: Sequence[Experience]
    ) -> None:
        """Keep a malformed answer as a sample with the lowest reward; the manager calls this."""
        if distillation.generation is not None and not distillation.parsed.operations:
            self._refused.append(distillation.generation)

    async def credit(
        self, trajectories: Sequence[Trajectory], bonuses: Mapping[str, float] | None = None
    ) -> int:
        """Credit the uses of these trajectories with rewards; return the number of counted uses.

        The reward is the outcome of the episode (section 3.3), or with ``reward: relative`` its
        gain over the group's free members. A verdict of the actor adds its score (eq. 8), and
        ``bonuses`` adds the bonus of a use, by its id.
        """
        while self._refused:
            generation = self._refused.popleft()
            self.malformed += 1
            if self._settings.train:
                self.buffer.add_malformed(generation, self._settings.options.malformed_reward)
        if not self._settings.train:
            return 0
        played = [t for t in trajectories if t.error is None]
        if self._settings.reward == "relative":
            guided = [t.condition is Condition.GUIDED for t in played]
            groups = [t.group for t in played]
            bases = relative_rewards([outcome(t) for t in played], groups, guided).tolist()
        else:
            bases = [float(use_reward(t.success)) for t in played]
        uses: list[tuple[Use, float]] = []
        for trajectory, base in zip(played, bases, strict=True):
            counted = counted_uses(trajectory)
            if math.isnan(base):
                self.uncredited += len(counted)
                continue
            for use in counted:
                bonus = (bonuses or {}).get(use.id, 0.0)
                uses.append((use, critic_reward(use.verdict, base) + bonus))
        # A bank behind a server takes a while, so a thread reads it. The buffer changes on the
        # event loop only, in the order of the trajectories: an update never meets half of it.
        written = await asyncio.to_thread(lambda: [list(self._written_by(use)) for use, _ in uses])
        for (_, reward), found in zip(uses, written, strict=True):
            for key, generation, span in found:
                self.buffer.add_use(key, reward, generation, span)
        return len(uses)

    async def step(self, step: int) -> None:
        """Start updating if a batch is ready and no update runs; never waits for one."""
        if self._running is not None and self._running.done():
            await self._running
            self._running = None
        idle = self._settings.train and self._running is None
        if idle and self.buffer.ready(step, self._runtime.version):
            self._running = asyncio.create_task(self._update(step))

    async def finish(self) -> None:
        """Wait for the update under way, if any."""
        if self._running is not None:
            await self._running
            self._running = None

    async def close(self) -> None:
        """Cancel the update under way, if any."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def event(self) -> dict[str, Any]:
        """Return this track's part of a step's metrics."""
        return {
            "extractor_updates": self.updates,
            "extractor_loss": self.last.loss,
            "extractor_reward": self.mean_reward,
            "extractor_weight": self.weight,
            "staleness": self.staleness,
            "malformed": self.malformed,
            "uncredited": self.uncredited,
            "buffer": len(self.buffer),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        buffer = self.buffer.state_dict()
        return {"buffer": buffer, "updates": self.updates, "malformed": self.malformed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a ``state_dict``."""
        self.buffer.load_state_dict(state["buffer"])
        self.updates, self.malformed = state["updates"], state["malformed"]

    def _written_by(self, use: Use) -> Iterator[tuple[Key, Generation, Span | None]]:
        """Yield the generations of the version, of its merged ancestors and of the refinement."""
        for key in self._bank.lineage(use.experience_id, use.experience_version):
            entry = self._bank.version(*key)
            name = entry.provenance.generation if entry is not None else None
            if entry is not None and name is not None and (found := self._bank.generation(name)):
                yield key, found, entry.provenance.span
        if use.refinement is not None and (found := self._bank.generation(use.refinement)):
            yield (use.refinement, 0), found, None

    async def _update(self, step: int) -> None:
        for _ in range(self._settings.updates_per_step):
            version = self._runtime.version
            batch = self.buffer.take(step, version)
            if not batch:
                continue
            samples: list[Sample] = []
            for item in batch:
                if item.generation.response_ids:
                    mask = span_mask(item.generation, item.span, self._runtime.tokenizer)
                    value = item.advantage * item.weight
                    values = [value if kept else math.nan for kept in mask]
                    samples.append(sample_from_generation(item.generation, values))
            low, high = self._settings.options.eps_low, self._settings.options.eps_high
            loss = LossSettings(kind="cispo", low=low, high=high, kl=self._settings.kl, seed=step)
            self.last = await self._runtime.train(samples, loss)
            await self._runtime.sync()
            self.updates += self.last.updates
            self.mean_reward = sum(item.reward for item in batch) / len(batch)
            self.weight = sum(item.weight for item in batch) / len(batch)
            ages = [version - item.generation.policy_version for item in batch]
            self.staleness = sum(ages) / len(batch)


def counted_uses(trajectory: Trajectory) -> list[Use]:
    """Return the uses that earn credit: T_m of section 3.3 of Complementary RL.

    An entry that reached one episode several times counts once, by its first use; episodes that
    were free or failed for a technical reason have none.
    """
    if trajectory.error is not None or trajectory.condition is Condition.FREE:
        return []
    first: dict[tuple[str, int, str | None], Use] = {}
    for use in trajectory.uses:
        first.setdefault((use.experience_id, use.experience_version, use.refinement), use)
    return list(first.values())


def span_mask(generation: Generation, span: tuple[int, int] | None, tokenizer: Any) -> list[bool]:
    """Mark the response tokens of the operation at ``span``; all if it is the only one.

    A token counts for an operation when its characters overlap the span, in ``generation.text``.
    Brackets and tags, which all operations share, are left out.
    """
    n = len(generation.response_ids)
    if span is None or generation.text.count('"op"') <= 1:
        return [True] * n
    ids = generation.response_ids
    texts = (tokenizer.decode(ids[: i + 1], skip_special_tokens=True) for i in range(n))
    ends = [len(text) for text in texts]
    starts = [0, *ends[:-1]]
    return [start < span[1] and end > span[0] for start, end in zip(starts, ends, strict=True)]
