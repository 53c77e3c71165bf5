"""Learn on one DeepSpeed rank, with the rows, losses and log-probabilities of the local runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from experiential.llm.models import AFTER_HEAD
from experiential.llm.request import Schemas
from experiential.training.attention import PackedModel
from experiential.training.losses import Sums, add_sums, batch_loss, begin_ratios, measure_tokens
from experiential.training.openrlhf.memory import LOGITS
from experiential.training.packing import Row, by_sample, pack
from experiential.training.runtime import LossSettings, Sample

BLANK = Sample(tokens=(0, 0), positions=(), logprobs=(), advantages=())
"""Takes the place of a row where other ranks have one more."""


@dataclass(frozen=True)
class Step:
    """Describe one optimiser step of a rank.

    Attributes:
        rows: indices of the samples that go forward together; as many rows on every rank, so some
            may be empty.
        tokens: trained tokens of all ranks.
    """

    rows: Sequence[Sequence[int]]
    tokens: int


@dataclass
class RankStats:
    """Sum up one rank's share of one call of ``learn``; ranks add up to the whole batch.

    ``grad_norm`` is the sum over the steps, before clipping, and the same on all ranks.
    """

    loss: float = 0.0
    metrics: Sums = field(default_factory=Sums)
    grad_norm: float = 0.0
    forwarded_tokens: int = 0


class Learner:
    """Train one rank's samples in a DeepSpeed engine.

    All ranks must make the same calls with as many rows, because they compute every row together:
    ZeRO 3 gathers the weights of a layer from all ranks when one of them reaches it.

    Args:
        engine: DeepSpeed's, over a causal language model.
        tokenizer: of the model.
        ranks: number of all ranks.
        reference: an engine with the frozen reference, where a KL penalty is wanted.
    """

    def __init__(
        self, engine: Any, tokenizer: Any, *, ranks: int, reference: Any | None = None
    ) -> None:
        self._engine, self._ranks = engine, ranks
        self._policy = PackedModel(engine.module, engine)
        self._reference: PackedModel | None = None
        if reference is not None:
            self._reference = PackedModel(reference.module, reference)
            self._reference.branching = self.branching
        self._schemas = cache(
            # not the size of its embeddings, of which a rank of ZeRO 3 holds a part
            lambda: Schemas(tokenizer, engine.module.config.vocab_size)
        )

    @property
    def branching(self) -> bool:
        """Return whether the rows of this model may branch; see `PackedModel`."""
        return self._policy.branching

    def learn(
        self, samples: Sequence[Sample], steps: Sequence[Step], settings: LossSettings, version: int
    ) -> RankStats:
        """Take optimiser steps; ``version`` is that of the weights that they begin with.

        The loss is a sum over rows and ranks, while DeepSpeed averages the gradients of ranks, so
        it is multiplied by their number.
        """
        if settings.kl > 0 and self._reference is None:
            raise ValueError(
                "Expected a reference model for a KL penalty, got none; start the runtime with"
                " reference=True"
            )
        engine, stats = self._engine, RankStats()
        engine.train()
        for number, step in enumerate(steps):
            for i, chosen in enumerate(step.rows, 1):
                row, members = _lay_out(samples, chosen)
                engine.set_gradient_accumulation_boundary(i == len(step.rows))
                reference = None
                if self._reference is not None and settings.kl > 0:
                    with torch.no_grad():
                        reference = self._logprobs(self._reference, row, members)
                logp = self._logprobs(self._policy, row, members)
                if number == 0:
                    members, mismatch = begin_ratios(logp, members, settings, version, exact=False)
                    add_sums(stats.metrics, mismatch)
                value, sums = batch_loss(logp, members, settings, step.tokens, reference)
                with self._policy.attention():  # checkpoints go forward again
                    engine.backward(value * self._ranks, scale_wrt_gas=False)
                stats.loss += float(value.detach())
                stats.forwarded_tokens += len(row.tokens) if chosen else 0
                add_sums(stats.metrics, sums)
            engine.step()
            stats.grad_norm += float(engine.get_global_grad_norm() or 0.0)
        return stats

    @torch.no_grad()
    def score(
        self, samples: Sequence[Sample], rows: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        """Return the log-probability in nats of each trained token of each sample."""
        self._engine.eval()
        found: dict[int, tuple[float, ...]] = {}
        for chosen in rows:
            row, members = _lay_out(samples, chosen)
            logp = self._logprobs(self._policy, row, members)
            if chosen:
                found |= by_sample(row, samples, logp)
        return [found[i] for i in range(len(samples))]

    def _logprobs(self, model: PackedModel, row: Row, members: Sequence[Sample]) -> torch.Tensor:
        """Return the log-probabilities of the trained tokens of ``members``, shape (n,)."""
        inputs, places = model.inputs(row), model.places(row, members)

        def measure(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> Any:
            return measure_tokens(states[0, places], head, members, self._schemas, at_once=LOGITS)

        config = model.model.config
        with model.attention():
            if any(getattr(config, name, None) not in (None, 1, 1.0) for name in AFTER_HEAD):
                return measure(model.run(**inputs).logits, torch.nn.Identity())
            # Within its head's forward pass, because a rank of ZeRO 3 has its weights only there.
            head = model.model.get_output_embeddings()
            usual = head.forward
            head.forward = partial(measure, head=usual)
            try:
                return model.run(**inputs).logits
            finally:
                head.forward = usual


def _lay_out(samples: Sequence[Sample], chosen: Sequence[int]) -> tuple[Row, list[Sample]]:
    """Return a row of the chosen samples, else one of `BLANK`, and its samples in their order."""
    row = pack(samples, chosen) if chosen else pack([BLANK])
    return row, [samples[i] for i in row.samples] if chosen else [BLANK]
