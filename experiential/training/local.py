"""Train a policy with torch and transformers inside this process, on a CPU or one GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from inspect import signature
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import torch

from experiential.bank.folder import FolderBank
from experiential.config import EnvSettings, Experiment, ModelSettings, OptimSettings
from experiential.errors import CheckpointError, ConfigError
from experiential.llm.base import Prompt, SamplingParams
from experiential.llm.executor import DeviceExecutor
from experiential.llm.transformers import TransformersLLM
from experiential.rollout.rollout import make_env
from experiential.training.logprobs import Measure, blocked_tokens, token_entropies, token_logprobs
from experiential.training.losses import Sums, add_sums, batch_loss, means
from experiential.training.packing import Row, micro_batches, pack
from experiential.training.runtime import (
    LossSettings,
    Policies,
    PolicyRuntime,
    Sample,
    TrainStats,
    check_sample,
)
from experiential.types import Generation

_STATE = "state.pt"
BACKGROUND_PATIENCE = 5.0
"""Seconds that background work on the device waits for rollouts and updates before it gets a turn
all the same.
"""


class LocalRuntime(PolicyRuntime):
    """Hold weights, optimiser and generation in one process.

    Generation and training run on one `DeviceExecutor`, so a training step is atomic for generation
    and there is nothing to synchronise. With LoRA, several runtimes share one frozen base, each
    with its own adapter.

    Args:
        llm: generates from the weights that are trained.
        optim: AdamW settings.
        name: role of this policy, stored in its generations.
        reference: keep the reference of the KL penalty (the frozen base under LoRA, else a frozen
            copy of the weights).
        priority: of training on the executor; 1 lets rollouts and the other policy's updates go
            first.
        owns_executor: close the executor with this policy.
    """

    def __init__(
        self,
        llm: TransformersLLM,
        optim: OptimSettings,
        *,
        name: str = "actor",
        reference: bool = False,
        priority: int = 0,
        owns_executor: bool = False,
    ) -> None:
        self.llm, self.optim, self.name = llm, optim, name
        self._priority, self._owns_executor = priority, owns_executor
        self._model: Any = llm.model
        self._parameters = _trainable(self._model, llm.adapter)
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )
        self._branching: bool | None = None
        self._reference: list[torch.Tensor] | None = None
        if reference and llm.adapter is None:
            self._reference = [p.detach().clone() for p in self._parameters]
        self._anchored = False

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the model."""
        return self.llm.tokenizer

    @property
    def version(self) -> int:  # type: ignore[override]  # a live value here, a class default in the base
        """Return the number of optimiser steps that the weights have seen."""
        return self.llm.version

    @property
    def tokens_processed(self) -> int:
        """Count the prompt and response tokens of all generations so far."""
        return self.llm.stats.prompt_tokens + self.llm.stats.generated_tokens

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response from the current weights."""
        return await self.llm.generate(prompt, sampling)

    async def train(self, samples: Sequence[Sample], loss: LossSettings) -> TrainStats:
        """Optimise on ``samples``; empty input changes nothing."""
        usable = [s for s in samples if s.positions]
        for sample in usable:
            check_sample(sample)
        if not usable:
            return TrainStats(version=self.version)
        try:
            return await self.llm.executor.run(
                lambda: self._train(usable, loss), priority=self._priority
            )
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{error}; lower optim.tokens_per_micro_batch of the {self.name}"
            ) from error

    async def score(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return the log-probability of each trained token, per sample, in nats."""
        return await self.llm.executor.run(
            lambda: self._measured(samples, token_logprobs), priority=self._priority
        )

    async def entropies(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return the entropy of the distribution of each trained token, per sample, in nats."""
        return await self.llm.executor.run(
            lambda: self._measured(samples, token_entropies), priority=self._priority
        )

    def foreground(self) -> AbstractContextManager[None]:
        """Keep the executor for rollouts inside the block."""
        return self.llm.executor.foreground()

    async def sync(self) -> int:
        """Return the version: generation already uses the trained weights."""
        return self.version

    async def save(self, folder: Path) -> None:
        """Write trainable weights, optimiser state and version."""
        await self.llm.executor.run(lambda: self._save(Path(folder)), priority=0)

    async def load(self, folder: Path) -> None:
        """Restore the state written by ``save``."""
        await self.llm.executor.run(lambda: self._load(Path(folder)), priority=0)

    async def anchor(self) -> None:
        """Make the current weights the reference of the KL penalty, if a copy is kept for it.

        A checkpoint then holds them, too.
        """
        await self.llm.executor.run(self._anchor, priority=0)

    def _anchor(self) -> None:
        if self._reference is not None:
            _copy(self._parameters, self._reference)
            self._anchored = True

    async def export(self, folder: Path) -> None:
        """Write weights (the adapter under LoRA) and tokenizer in Hugging Face format."""
        await self.llm.executor.run(lambda: self._export(Path(folder)), priority=0)

    def close(self) -> None:
        """Refuse further requests; wait for the executor's last job and end it, if it is owned."""
        self.llm.close()
        if self._owns_executor:
            # A daemon thread that is inside torch when Python ends aborts the process (exit 134).
            self.llm.executor.close()

    def _train(self, samples: list[Sample], loss: LossSettings) -> TrainStats:
        begin = time.perf_counter()
        stats = TrainStats(
            samples=len(samples),
            tokens=sum(len(s.positions) for s in samples),
            sequence_tokens=sum(len(s.tokens) for s in samples),
        )
        self._activate(training=True)
        generator, sums = torch.Generator().manual_seed(loss.seed), Sums()
        for epoch in range(loss.epochs):
            order = list(range(len(samples)))
            if epoch or loss.mini_batches > 1:
                order = [int(i) for i in torch.randperm(len(samples), generator=generator)]
            parts = _split(order, loss.mini_batches)
            for part in parts:
                self._step([samples[i].weighted(len(parts)) for i in part], loss, stats, sums)
        self._activate(training=False)
        stats.loss /= max(1, stats.updates)
        stats.grad_norm /= max(1, stats.updates)
        stats.metrics |= means(sums)
        stats.version = self.version
        stats.seconds = time.perf_counter() - begin
        return stats

    def _step(
        self, samples: list[Sample], loss: LossSettings, stats: TrainStats, sums: Sums
    ) -> None:
        """Make one optimiser step, its gradient accumulated over micro-batches."""
        self._optimizer.zero_grad(set_to_none=True)
        total = sum(len(s.positions) for s in samples)
        for rows in micro_batches(
            pack(samples, parity=self._parity()), self.optim.tokens_per_micro_batch
        ):
            value, metrics = self._loss(rows, samples, loss, total)
            cast("Any", value).backward()  # torch leaves its arguments untyped
            stats.loss += float(value.detach())
            stats.forwarded_tokens += sum(len(r.tokens) for r in rows)
            add_sums(sums, metrics)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.optim.max_grad_norm)
        if torch.isfinite(norm):
            cast("Any", self._optimizer).step()
        else:
            stats.metrics["skipped"] = stats.metrics.get("skipped", 0.0) + 1.0
        stats.grad_norm += float(norm)
        stats.updates += 1
        self.llm.weights_changed(self.version + 1)

    def _parity(self) -> int:
        """Estimate the row length at which attention costs as much as all other operations.

        It is 0 if rows must not branch.

        Counted in operations that is 6 d for a transformer of width d; measured on CPUs, where
        attention is the slower kind, 4 d.
        """
        if self._branching is None:
            self._branching = _branches(self._model)
        return 4 * _base(self._model).config.hidden_size if self._branching else 0

    def _loss(
        self, rows: list[Row], samples: list[Sample], loss: LossSettings, total: int
    ) -> tuple[torch.Tensor, Sums]:
        members = [samples[i] for row in rows for i in row.samples]
        reference = (
            self._reference_logprobs(rows, samples) if loss.kl > 0 else None
        )  # first: it swaps weights in place
        logp = self._logprobs(rows, samples)
        return batch_loss(logp, members, loss, total, reference)

    def _measured(self, samples: Sequence[Sample], measure: Measure) -> list[tuple[float, ...]]:
        """Apply ``measure`` to every trained token, per sample."""
        found: list[tuple[float, ...]] = [()] * len(samples)
        usable = [i for i, s in enumerate(samples) if s.positions]
        chosen = [samples[i] for i in usable]
        for sample in chosen:
            check_sample(sample)
        self._activate(training=False)
        with torch.no_grad():
            for rows in micro_batches(
                pack(chosen, parity=self._parity()), self.optim.tokens_per_micro_batch
            ):
                members = [m for row in rows for m in row.samples]
                values: list[float] = cast("Any", self._logprobs(rows, chosen, measure)).tolist()
                for member in members:
                    count = len(chosen[member].positions)
                    found[usable[member]], values = tuple(values[:count]), values[count:]
        return found

    def _logprobs(
        self, rows: list[Row], samples: list[Sample], measure: Measure = token_logprobs
    ) -> torch.Tensor:
        """Compute the log-probability (or another measure) of every trained token, shape (n,).

        Samples follow the order of ``rows``.
        """
        device = next(self._model.parameters()).device
        places = [
            (i, m, path)
            for i, row in enumerate(rows)
            for m, path in zip(row.samples, row.paths, strict=True)
        ]
        wanted = [(i, path[p - 1]) for i, m, path in places for p in samples[m].positions]
        unique: dict[tuple[int, int], int] = {}
        where = [unique.setdefault(key, len(unique)) for key in wanted]
        picks = torch.tensor(list(unique), device=device)
        logits = _logits(self._model, _inputs(rows, device, _base(self._model).dtype), picks)
        members = [samples[m] for row in rows for m in row.samples]
        blocked = blocked_tokens(members, logits.shape[1], lambda: self.llm.schemas)
        return measure(
            logits[torch.tensor(where, device=device)],
            members,
            blocked if blocked is None else blocked.to(device),
        )

    def _reference_logprobs(self, rows: list[Row], samples: list[Sample]) -> torch.Tensor:
        with torch.no_grad():
            if self.llm.adapter is not None:
                with self._model.disable_adapter():
                    return self._logprobs(rows, samples)
            if self._reference is None:
                raise ConfigError(
                    "Expected LocalRuntime(reference=True) when the KL weight is positive, got"
                    " reference=False"
                )
            current = [p.detach().clone() for p in self._parameters]
            _copy(self._reference, self._parameters)
            values = self._logprobs(rows, samples)
            _copy(current, self._parameters)
            return values

    def _activate(self, *, training: bool) -> None:
        if self.llm.adapter is not None:
            self._model.set_adapter(self.llm.adapter)
        self._model.train(training)

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = [p.detach().cpu() for p in self._parameters]
        anchored = (
            {"reference": [p.cpu() for p in self._reference]}
            if self._anchored and self._reference is not None
            else {}
        )
        state = {
            "weights": weights,
            "optimizer": self._optimizer.state_dict(),
            "version": self.version,
        }
        torch.save(state | anchored, folder / _STATE)
        (folder / "policy.json").write_text(
            json.dumps({"name": self.name, "version": self.version, "adapter": self.llm.adapter})
        )

    def _load(self, folder: Path) -> None:
        if not (folder / _STATE).is_file():
            raise CheckpointError(
                f"Expected a policy state in {folder}, found no {_STATE}; choose another checkpoint"
            )
        state = torch.load(folder / _STATE, weights_only=True)
        if [w.shape for w in state["weights"]] != [p.shape for p in self._parameters]:
            raise CheckpointError(
                f"Expected weights of this model in {folder}, got other shapes; resume with the"
                " model that was trained"
            )
        _copy(state["weights"], self._parameters)
        if "reference" in state and self._reference is not None:
            _copy(state["reference"], self._reference)
            self._anchored = True
        self._optimizer.load_state_dict(state["optimizer"])
        self.llm.weights_changed(int(state["version"]))

    def _export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        extra = {"selected_adapters": [self.llm.adapter]} if self.llm.adapter is not None else {}
        self._model.save_pretrained(folder, **extra)
        self.tokenizer.save_pretrained(folder)


class InProcessRuntime:
    """Train both policies, write the bank and hold the environments in this process.

    Args:
        experiment: everything that defines the run.
        policies: actor and extractor, which stay open; None loads those of the experiment.

    Raises:
        ModelNotFoundError: a model cannot be resolved.
        MissingExtraError: torch, transformers or peft is missing.
    """

    def __init__(self, experiment: Experiment, policies: Policies | None = None) -> None:
        self._bank, self._owned = experiment.bank, policies is None
        if policies is None:
            actor, extractor = experiment.actor, experiment.extractor
            # Without an extractor nothing asks a second policy.
            one = extractor.shared or not extractor.enabled
            policies = build_runtimes(
                experiment.model,
                None if one else experiment.extractor_model,
                (actor.optim, extractor.optim),
                references=(actor.kl > 0, extractor.enabled and extractor.kl > 0),
                shared=one,
            )
        self.actor, self.extractor = policies

    def open_bank(self, folder: Path) -> FolderBank:
        """Open the run's bank in this process."""
        return FolderBank(
            folder,
            namespace=self._bank.namespace,
            embedder=self._bank.embedder,
            store=self._bank.store,
        )

    def make_env(self, settings: EnvSettings, kwargs: dict[str, Any]) -> gym.Env[str, str]:
        """Build one environment in this process."""
        return make_env(settings, kwargs)

    def close(self) -> None:
        """Close the policies that were loaded here, and the thread that computed for them."""
        if self._owned:
            self.actor.close()
            self.extractor.close()


def build_runtimes(
    actor: ModelSettings,
    extractor: ModelSettings | None,
    optims: tuple[OptimSettings, OptimSettings],
    *,
    references: tuple[bool, bool] = (False, False),
    shared: bool = False,
    max_batch: int = 64,
) -> tuple[LocalRuntime, LocalRuntime]:
    """Load actor and extractor onto one executor, which ends when the actor is closed.

    The extractor's training waits for rollouts and for the actor's updates. Under LoRA both are
    adapters over one base, else two sets of weights.

    Args:
        actor: model of the actor.
        extractor: model of the extractor; None takes the actor's.
        optims: AdamW settings of both.
        references: whether each needs the reference of a KL penalty.
        shared: both are one policy, with the actor's optimiser.
        max_batch: sequences decoded together.

    Raises:
        ModelNotFoundError: a model cannot be resolved.
        MissingExtraError: torch, transformers or peft is missing.
    """
    from experiential.llm.models import load_model

    second = extractor or actor
    if actor.threads:
        torch.set_num_threads(actor.threads)
    executor = DeviceExecutor(patience=BACKGROUND_PATIENCE)
    paired = actor.lora is not None and second == actor and not shared
    model, tokenizer = load_model(actor, adapters=("actor", "extractor") if paired else ("actor",))
    other, other_tokenizer = (
        (model, tokenizer) if paired or shared else load_model(second, adapters=("extractor",))
    )
    pairs = (
        (actor, "actor", model, tokenizer, optims[0], references[0] or (shared and references[1])),
        (second, "extractor", other, other_tokenizer, optims[1], references[1]),
    )
    runtimes = [
        LocalRuntime(
            TransformersLLM(
                weights, words, max_batch=max_batch,
                prefix_cache_tokens=settings.prefix_cache_tokens, executor=executor,
                adapter=role if settings.lora else None, name=role,
            ),
            optim, name=role, reference=reference, priority=priority, owns_executor=priority == 0,
        )
        for priority, (settings, role, weights, words, optim, reference) in enumerate(
            pairs[:1] if shared else pairs
        )
    ]  # fmt: skip
    return runtimes[0], runtimes[-1]


def _trainable(model: Any, adapter: str | None) -> list[torch.nn.Parameter]:
    """Return the adapter's parameters under LoRA, else all parameters."""
    if adapter is None:
        model.requires_grad_(True)
        return list(model.parameters())
    chosen = [p for n, p in model.named_parameters() if f".{adapter}." in n]
    for parameter in chosen:
        parameter.requires_grad_(True)
    return chosen


def _base(model: Any) -> Any:
    """Return the causal language model inside a peft wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _inputs(
    rows: Sequence[Row], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Build the model's inputs for these rows, padded on the right.

    Attention is plain and causal if no row branches, else along paths only.
    """
    width = max(len(r.tokens) for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.tensor(row.tokens)
    if not any(row.branched for row in rows):
        mask = torch.arange(width) < torch.tensor([len(r.tokens) for r in rows])[:, None]
        return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    visible = torch.eye(width, dtype=torch.bool).repeat(
        len(rows), 1, 1
    )  # padding sees itself: a softmax over nothing is not a number
    for i, row in enumerate(rows):
        n = len(row.tokens)
        positions[i, :n] = torch.tensor(row.positions())
        visible[i, :n, :n] = torch.tensor(row.visible())
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return {
        "input_ids": ids.to(device),
        "attention_mask": mask[:, None].to(device),
        "position_ids": positions.to(device),
    }


@torch.no_grad()
def _branches(model: Any) -> bool:
    """Test whether the model computes branched rows and plain ones alike.

    Not all do: some attention kernels take no mask of their own, and some models make positions
    themselves.
    """
    base = _base(model)
    if (
        base.config._attn_implementation not in ("sdpa", "eager")
        or "position_ids" not in signature(base.base_model.forward).parameters
    ):
        return False
    paths = ((0, 1, 2, 3, 4), (0, 1, 2, 5, 6))
    tokens = tuple(
        t % base.get_input_embeddings().num_embeddings for t in (11, 23, 31, 41, 53, 61, 73)
    )
    row = Row(tokens, (0, 1), paths)
    alone = [
        Row(tuple(tokens[i] for i in path), (0,), (tuple(range(len(path))),)) for path in paths
    ]
    training, device = base.training, next(base.parameters()).device
    base.eval()
    try:
        together = (
            base.base_model(**_inputs([row], device, base.dtype))
            .last_hidden_state[0, [*paths[0], *paths[1]]]
            .float()
        )
        apart = (
            base.base_model(**_inputs(alone, device, base.dtype))
            .last_hidden_state.flatten(0, 1)
            .float()
        )
    except (RuntimeError, ValueError, TypeError, IndexError):  # a model that refuses such a mask
        return False
    finally:
        base.train(training)
    return bool(
        (together - apart).abs().max()
        <= 10 * torch.finfo(base.dtype).eps ** 0.75 * apart.abs().max()
    )


def _logits(model: Any, inputs: dict[str, torch.Tensor], picks: torch.Tensor) -> torch.Tensor:
    """Compute float32 logits at the (row, position) pairs ``picks``, shape (m, 2).

    The head never sees the other positions.
    """
    base = _base(model)
    config = base.config
    if any(
        getattr(config, name, None) not in (None, 1, 1.0)
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
    ):
        full = model(**inputs).logits
        return full[picks[:, 0], picks[:, 1]].float()
    hidden = base.base_model(**inputs).last_hidden_state
    return base.get_output_embeddings()(hidden[picks[:, 0], picks[:, 1]]).float()


def _split(order: list[int], parts: int) -> list[list[int]]:
    """Split ``order`` into at most ``parts`` pieces of nearly equal size, none empty."""
    parts = min(parts, len(order))
    edges = [round(i * len(order) / parts) for i in range(parts + 1)]
    return [order[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for a, b in zip(source, target, strict=True):
            b.copy_(a)
