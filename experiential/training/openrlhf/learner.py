"""Learn on one DeepSpeed rank: OpenRLHF's loop with this project's loss and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from experiential.llm.models import AFTER_HEAD
from experiential.llm.request import Schemas
from experiential.training.losses import (
    Sums,
    add_sums,
    batch_loss,
    begin_ratios,
    means,
    measure_tokens,
)
from experiential.training.openrlhf.memory import LOGITS
from experiential.training.runtime import LossSettings, Sample

BLANK = Sample(tokens=(0, 0), positions=(), logprobs=(), advantages=())
"""Fills up a batch: two tokens, nothing to learn from them."""


@dataclass
class RankStats:
    """Sum up one rank's share of one call of ``learn``; ranks add up to the whole batch.

    ``grad_norm`` is of the last of the ``updates``, before clipping, and the same on all ranks.
    """

    loss: float = 0.0
    metrics: Sums = field(default_factory=Sums)
    grad_norm: float = 0.0
    updates: int = 0


class Learner:
    """Train one rank's samples with OpenRLHF's policy actor.

    It replaces the loss function and the forward pass of OpenRLHF's trainer (temperature and
    constraints are those of each sample, and logits are made for trained positions only, a bounded
    number at a time), and notes before each training step which samples the step is about.

    Args:
        trainer: OpenRLHF's ``ActorPPOTrainer`` of this rank.
        fit: trains on the trainer's replay buffer and clears it; returns the status of the last
            epoch.
        append: puts an ``Experience`` into the replay buffer.
        make_experience: builds one from its fields.
        accumulated: micro-batches per optimiser step and rank.
        reference: the frozen reference model, where a KL penalty is wanted.

    Attributes:
        samples: taken for the next ``learn`` or ``score``.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        fit: Callable[[], dict[str, Any]],
        append: Callable[[Any], None],
        make_experience: Callable[..., Any],
        accumulated: int,
        reference: Any | None = None,
    ) -> None:
        self._trainer, self._fit, self._append = trainer, fit, append
        self._make_experience, self._reference = make_experience, reference
        self._settings, self._accumulated, self._stats = LossSettings(), accumulated, RankStats()
        self.samples: list[Sample] = []
        self._references: list[torch.Tensor] = []
        self._version = self._passes = 0  # of the weights at the start; micro-batches since
        self._members: list[Sample] = []  # of the training step, and their reference
        self._reference_logp: torch.Tensor | None = None
        self._model: Any = trainer.actor.model
        self._schemas = cache(
            # not the size of its embeddings, of which a rank of ZeRO 3 holds a part
            lambda: Schemas(trainer.tokenizer, self._model.module.config.vocab_size)
        )
        self._step: Callable[..., dict[str, Any]] = trainer.training_step
        trainer.actor_loss_fn = self._loss
        trainer.actor.forward = self._forward
        trainer.training_step = self._training_step

    def learn(self, settings: LossSettings, updates: int, version: int) -> RankStats:
        """Train on ``samples``, as many on every rank, and clear them.

        ``updates`` are the optimiser steps of one epoch over the samples of all ranks, ``version``
        that of the weights that they begin with.
        """
        self._settings, self._stats = settings, RankStats(updates=updates * settings.epochs)
        self._version, self._passes = version, 0
        self._trainer.max_epochs = settings.epochs
        self._references = []
        if settings.kl > 0:
            if self._reference is None:
                raise ValueError(
                    "Expected a reference model for a KL penalty, got none; start the runtime with"
                    " reference=True"
                )
            self._references = self._logprobs_of(self._reference.model)
        for i, sample in enumerate(self.samples):
            places = torch.tensor(sample.positions, dtype=torch.long) - 1
            width = len(sample.tokens) - 1
            mask, old, advantages = (torch.zeros(1, width) for _ in range(3))
            mask[0, places] = 1
            old[0, places] = torch.tensor(sample.logprobs, dtype=torch.float)
            advantages[0, places] = torch.tensor(sample.advantages, dtype=torch.float)
            sequences = torch.tensor([sample.tokens])
            experience = self._make_experience(
                sequences=sequences,
                attention_mask=torch.ones_like(sequences),
                action_mask=mask.long(),
                action_log_probs=old,
                advantages=advantages,
                info={"sample": [i]},  # comes back in `_training_step`, in shuffled batches
            )
            self._append(experience)
        cast("Any", torch).manual_seed(settings.seed)  # the order within an epoch
        status = self._fit()
        self._stats.grad_norm = float(status.get("actor_grad_norm", 0.0))
        self.samples.clear()
        return self._stats

    def score(self) -> list[tuple[float, ...]]:
        """Return the log-probabilities of ``samples`` in nats, and clear them."""
        found = self._logprobs_of(self._model)
        self.samples.clear()
        return [tuple(map(float, part)) for part in found]

    def _training_step(self, experience: Any, *rest: Any) -> dict[str, Any]:
        chosen = [int(i) for i in experience.info["sample"]]
        self._members, self._reference_logp = [self.samples[i] for i in chosen], None
        if self._references:
            logp = torch.cat([self._references[i] for i in chosen])
            self._reference_logp = logp.to(experience.sequences.device)
        status = self._step(experience, *rest)
        # OpenRLHF divides its averages by it, and a batch of empty sequences has none.
        status["num_action_tokens"] = max(1.0, status["num_action_tokens"])
        return status

    def _forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor,
        attention_mask: torch.Tensor,
        **_: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return log-probabilities, shape (b, t - 1), in place of OpenRLHF's ``Actor.forward``."""
        logp = self._logprobs(self._model, sequences, attention_mask, self._members)
        full = torch.zeros(action_mask.shape, device=logp.device, dtype=logp.dtype)
        return full.masked_scatter(action_mask.bool(), logp), {}

    def _loss(
        self,
        log_probs: torch.Tensor,
        *_: torch.Tensor,
        action_mask: torch.Tensor,
        dp_size: int = 1,
        batch_num_tokens: torch.Tensor | float = 0.0,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Return loss, share of clipped tokens and KL from the behaviour policy, as ``PolicyLoss``.

        OpenRLHF and DeepSpeed average what ranks and accumulated micro-batches return; this loss is
        a sum over the batch, so it is multiplied by the number of both. ``log_probs``, shape
        (b, t - 1), carries the gradient; ``action_mask``, same shape, is 1 where a token was
        sampled; ``batch_num_tokens`` are the trained tokens of the whole batch over the accumulated
        micro-batches, and ``dp_size`` ranks divide the batch. The samples hold all else.
        """
        logp = log_probs[action_mask.bool()]
        total = float(batch_num_tokens) * self._accumulated
        reference, members = self._reference_logp, self._members
        if self._passes < self._accumulated:  # of the first optimiser step
            settings, version = self._settings, self._version
            members, mismatch = begin_ratios(logp, members, settings, version, exact=False)
            add_sums(self._stats.metrics, mismatch)
        self._passes += 1
        value, sums = batch_loss(logp, members, self._settings, total, reference)
        self._stats.loss += float(value.detach())
        add_sums(self._stats.metrics, sums)
        clipped, kl = (torch.tensor(means(sums).get(name, 0.0)) for name in ("clip_fraction", "kl"))
        scaled = value * (self._accumulated * dp_size) + 0.0 * log_probs.sum()
        return scaled, clipped, kl, None, None

    def _logprobs(
        self,
        model: Any,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        members: Sequence[Sample],
    ) -> torch.Tensor:
        """Return the log-probabilities of the trained tokens of ``members``, shape (n,).

        ``sequences`` holds token ids, one row a member, shape (b, t).
        """
        inputs = {
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0),
        }
        places = [(i, p - 1) for i, sample in enumerate(members) for p in sample.positions]
        rows, columns = torch.tensor(places, dtype=torch.long).reshape(-1, 2).to(sequences.device).T

        def measure(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> Any:
            return measure_tokens(
                states[rows, columns], head, members, self._schemas, at_once=LOGITS
            )

        inner = model.module  # of DeepSpeed's engine
        if any(getattr(inner.config, name, None) not in (None, 1, 1.0) for name in AFTER_HEAD):
            return measure(model(sequences, **inputs).logits, torch.nn.Identity())
        # Within its head's forward pass, because a rank of ZeRO 3 has its weights only there.
        head = inner.get_output_embeddings()
        usual = head.forward
        head.forward = partial(measure, head=usual)
        try:
            return model(sequences, **inputs).logits
        finally:
            head.forward = usual

    @torch.no_grad()
    def _logprobs_of(self, model: Any) -> list[torch.Tensor]:
        """Return log-probabilities sample by sample, in micro-batches of the size of training."""
        size = self._trainer.micro_train_batch_size  # ZeRO 3: all ranks make as many passes
        device = next(self._model.parameters()).device
        found: list[torch.Tensor] = []
        for start in range(0, len(self.samples), size):
            members = self.samples[start : start + size]
            rows = [torch.tensor(s.tokens) for s in members]
            sequences = pad_sequence(rows, batch_first=True).to(device)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            flat: Any = self._logprobs(model, sequences, mask.to(device), members).cpu()
            found += flat.split([len(s.positions) for s in members])
        return found
