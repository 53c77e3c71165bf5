"""Train a policy with torch and transformers inside this process, on a CPU or one GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from inspect import signature
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, cast

import torch

from experiential.bank.folder import FolderBank
from experiential.config import Experiment, ModelSettings, OptimSettings
from experiential.errors import CheckpointError, ConfigError
from experiential.llm.base import Prompt, SamplingParams
from experiential.llm.executor import DeviceExecutor
from experiential.llm.transformers import TransformersLLM
from experiential.rollout import make_env
from experiential.training.losses import (
    Measure,
    Sums,
    add_sums,
    batch_loss,
    blocked_tokens,
    means,
    token_entropies,
    token_logprobs,
)
from experiential.training.runtime import (
    LossSettings,
    Policies,
    PolicyRuntime,
    Sample,
    TrainStats,
    usable_samples,
)
from experiential.training.samples import Row, micro_batches, pack
from experiential.types import Generation

_STATE = "state.pt"
BACKGROUND_PATIENCE = 5.0
"""Seconds that background work on the device waits for rollouts and updates at most."""


class LocalRuntime(PolicyRuntime):
    """Hold weights, optimiser and generation in one process.

    Generation and training run on one `DeviceExecutor`, so a training step is atomic for generation
    and there is nothing to synchronise.

    Args:
        llm: generates from the weights that are trained.
        optim: AdamW settings.
        name: role of this policy, stored in its generations.
        reference: keep the reference of the KL penalty: the frozen base under LoRA, else a copy.
        priority: of training on the executor; 1 lets rollouts and the other policy go first.
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
        self.llm, self.optim, self.name, self.tokenizer = llm, optim, name, llm.tokenizer
        self._priority, self._owns_executor = priority, owns_executor
        self._model: Any = llm.model
        # the causal language model inside a peft wrapper, or the model itself
        wrapped = hasattr(llm.model, "get_base_model")
        self._base: Any = self._model.get_base_model() if wrapped else llm.model
        trained = "" if llm.adapter is None else f".{llm.adapter}."
        self._parameters: list[torch.nn.Parameter] = [
            p.requires_grad_(True) for n, p in self._model.named_parameters() if trained in n
        ]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )
        self._reference: list[torch.Tensor] | None = None
        if reference and llm.adapter is None:
            self._reference = [p.detach().clone() for p in self._parameters]
        self._anchored = False

    @property
    def version(self) -> int:  # type: ignore[override]  # a class default in the base
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
        usable = usable_samples(samples)
        if not usable:
            return TrainStats(version=self.version)
        work = partial(self._train, usable, loss)
        try:
            return await self.llm.executor.run(work, priority=self._priority)
        except torch.OutOfMemoryError as error:
            hint = f"lower optim.tokens_per_micro_batch of the {self.name}"
            raise MemoryError(f"{error}; {hint}") from error

    async def score(
        self, samples: Sequence[Sample], measure: Measure = token_logprobs
    ) -> list[tuple[float, ...]]:
        """Return the log-probability (or other measure) of each trained token, per sample."""
        usable = usable_samples(samples)
        found: dict[int, tuple[float, ...]] = {}

        def compute() -> None:
            self._activate(training=False)
            for rows in self._micro_batches(usable):
                with torch.no_grad():
                    tensor: Any = self._logprobs(rows, usable, measure)
                values = iter(tensor.tolist())
                for member in (m for row in rows for m in row.samples):
                    found[member] = tuple(islice(values, len(usable[member].positions)))

        await self.llm.executor.run(compute, priority=self._priority)
        measured = (found[member] for member in range(len(usable)))
        return [next(measured) if sample.positions else () for sample in samples]

    async def entropies(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return the entropy of the distribution of each trained token, per sample, in nats."""
        return await self.score(samples, token_entropies)

    def foreground(self) -> AbstractContextManager[None]:
        """Keep the executor for rollouts inside the block."""
        return self.llm.executor.foreground()

    async def sync(self) -> int:
        """Return the version: generation uses the trained weights already."""
        return self.version

    async def save(self, folder: Path) -> None:
        """Write trainable weights, optimiser state and version."""
        folder = Path(folder)

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            state = {
                "weights": [p.detach().cpu() for p in self._parameters],
                "optimizer": self._optimizer.state_dict(),
                "version": self.version,
            }
            if self._anchored and self._reference is not None:
                state["reference"] = [p.cpu() for p in self._reference]
            torch.save(state, folder / _STATE)
            role = {"name": self.name, "version": self.version, "adapter": self.llm.adapter}
            (folder / "policy.json").write_text(json.dumps(role))

        await self.llm.executor.run(write, priority=0)

    async def load(self, folder: Path) -> None:
        """Restore the state written by ``save``."""
        folder = Path(folder)

        def read() -> None:
            if not (folder / _STATE).is_file():
                raise CheckpointError(
                    f"Expected a policy state in {folder}, found no {_STATE}; choose another"
                    " checkpoint"
                )
            state = torch.load(folder / _STATE, weights_only=True)
            if [w.shape for w in state["weights"]] != [p.shape for p in self._parameters]:
                raise CheckpointError(
                    f"Expected weights of this model in {folder}, got other shapes; resume with"
                    " the model that was trained"
                )
            _copy(state["weights"], self._parameters)
            if "reference" in state and self._reference is not None:
                _copy(state["reference"], self._reference)
                self._anchored = True
            self._optimizer.load_state_dict(state["optimizer"])
            self.llm.weights_changed(int(state["version"]))

        await self.llm.executor.run(read, priority=0)

    async def anchor(self) -> None:
        """Make the current weights the reference of the KL penalty, if a copy is kept for it."""
        reference = self._reference
        if reference is not None:
            await self.llm.executor.run(lambda: _copy(self._parameters, reference), priority=0)
            self._anchored = True

    async def export(self, folder: Path) -> None:
        """Write weights (the adapter under LoRA) and tokenizer in Hugging Face format."""
        folder = Path(folder)

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            adapter = {} if self.llm.adapter is None else {"selected_adapters": [self.llm.adapter]}
            self._model.save_pretrained(folder, **adapter)
            self.tokenizer.save_pretrained(folder)

        await self.llm.executor.run(write, priority=0)

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
            parts = min(loss.mini_batches, len(order))
            edges = [round(i * len(order) / parts) for i in range(parts + 1)]
            for a, b in pairwise(edges):  # one optimiser step, accumulated over micro-batches
                part = [samples[i].weighted(parts) for i in order[a:b]]
                total = sum(len(s.positions) for s in part)
                self._optimizer.zero_grad(set_to_none=True)
                for rows in self._micro_batches(part):
                    value, metrics = self._loss(rows, part, loss, total)
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
        self._activate(training=False)
        stats.loss /= max(1, stats.updates)
        stats.grad_norm /= max(1, stats.updates)
        stats.metrics |= means(sums)
        stats.version, stats.seconds = self.version, time.perf_counter() - begin
        return stats

    def _micro_batches(self, samples: list[Sample]) -> Iterator[list[Row]]:
        # Attention costs as much as all other operations at rows of this length: 6 d tokens for a
        # transformer of width d by count; 4 d as measured on CPUs, where attention is slower.
        parity = 4 * self._base.config.hidden_size if self._branching else 0
        return micro_batches(pack(samples, parity=parity), self.optim.tokens_per_micro_batch)

    @cached_property
    def _branching(self) -> bool:
        """Test whether the model computes branched rows and plain ones alike.

        Some attention kernels take no mask of their own, and some models make positions themselves.
        """
        base, device = self._base, next(self._base.parameters()).device
        if (
            base.config._attn_implementation not in ("sdpa", "eager")
            or "position_ids" not in signature(base.base_model.forward).parameters
        ):
            return False
        paths = ((0, 1, 2, 3, 4), (0, 1, 2, 5, 6))
        size = base.get_input_embeddings().num_embeddings
        tokens = tuple(token % size for token in (11, 23, 31, 41, 53, 61, 73))
        alone = [Row(tuple(tokens[i] for i in p), (0,), (tuple(range(5)),)) for p in paths]
        training = base.training
        base.eval()
        try:
            with torch.no_grad():
                branched, plain = (
                    base.base_model(**_inputs(rows, device, base.dtype)).last_hidden_state.float()
                    for rows in ([Row(tokens, (0, 1), paths)], alone)
                )
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False  # the model refuses such a mask
        finally:
            base.train(training)
        gap = (branched[0, [*paths[0], *paths[1]]] - plain.flatten(0, 1)).abs().max()
        return bool(gap <= 10 * torch.finfo(base.dtype).eps ** 0.75 * plain.abs().max())

    def _loss(
        self, rows: list[Row], samples: list[Sample], loss: LossSettings, total: int
    ) -> tuple[torch.Tensor, Sums]:
        reference = None
        if loss.kl > 0:  # before the loss: a kept reference is swapped in and out in place
            with torch.no_grad():
                if self.llm.adapter is not None:
                    with self._model.disable_adapter():
                        reference = self._logprobs(rows, samples)
                elif self._reference is not None:
                    current = [p.detach().clone() for p in self._parameters]
                    _copy(self._reference, self._parameters)
                    reference = self._logprobs(rows, samples)
                    _copy(current, self._parameters)
                else:
                    raise ConfigError(
                        "Expected LocalRuntime(reference=True) when the KL weight is positive, got"
                        " reference=False"
                    )
        members = [samples[i] for row in rows for i in row.samples]
        return batch_loss(self._logprobs(rows, samples), members, loss, total, reference)

    def _logprobs(
        self, rows: list[Row], samples: list[Sample], measure: Measure = token_logprobs
    ) -> torch.Tensor:
        """Measure every trained token of the samples in the order of ``rows``, shape (n,)."""
        base, device = self._base, next(self._model.parameters()).device
        unique: dict[tuple[int, int], int] = {}
        where = [
            unique.setdefault((i, path[p - 1]), len(unique))
            for i, row in enumerate(rows)
            for m, path in zip(row.samples, row.paths, strict=True)
            for p in samples[m].positions
        ]
        row_of, place = torch.tensor(list(unique), device=device).T
        inputs = _inputs(rows, device, base.dtype)
        late = ("final_logit_softcapping", "logit_scale", "logits_scaling")
        if any(getattr(base.config, name, None) not in (None, 1, 1.0) for name in late):
            logits = self._model(**inputs).logits[row_of, place].float()
        else:  # the head sees only the positions that are asked for
            hidden = base.base_model(**inputs).last_hidden_state[row_of, place]
            logits = base.get_output_embeddings()(hidden).float()
        members = [samples[m] for row in rows for m in row.samples]
        blocked = blocked_tokens(members, logits.shape[1], lambda: self.llm.schemas)
        chosen = logits[torch.tensor(where, device=device)]
        return measure(chosen, members, None if blocked is None else blocked.to(device))

    def _activate(self, *, training: bool) -> None:
        if self.llm.adapter is not None:
            self._model.set_adapter(self.llm.adapter)
        self._model.train(training)


class InProcessRuntime:
    """Train both policies, write the bank and hold the environments in this process.

    Policies that are passed stay open; None loads those of the experiment.
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
            folder, **self._bank.model_dump(include={"namespace", "embedder", "store"})
        )

    make_env = staticmethod(make_env)

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

    ``extractor`` None takes the actor's model, and ``shared`` one policy for both, with the actor's
    optimiser; ``references`` says whether each needs the reference of a KL penalty.
    """
    from experiential.llm.models import load_model

    second = extractor or actor
    if actor.threads:
        torch.set_num_threads(actor.threads)
    executor = DeviceExecutor(patience=BACKGROUND_PATIENCE)
    paired = actor.lora is not None and second == actor and not shared
    first = load_model(actor, adapters=("actor", "extractor") if paired else ("actor",))
    other = first if paired or shared else load_model(second, adapters=("extractor",))

    roles = [("actor", actor, first, any(references) if shared else references[0])]
    if not shared:
        roles.append(("extractor", second, other, references[1]))
    made: list[LocalRuntime] = []
    for priority, (role, settings, loaded, reference) in enumerate(roles):
        llm = TransformersLLM(
            *loaded,
            max_batch=max_batch,
            prefix_cache_tokens=settings.prefix_cache_tokens,
            executor=executor,
            adapter=role if settings.lora else None,
            name=role,
        )
        made.append(
            LocalRuntime(
                llm,
                optims[priority],
                name=role,
                reference=reference,
                priority=priority,
                owns_executor=role == "actor",
            )
        )
    return made[0], made[-1]


def _inputs(
    rows: Sequence[Row], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Pad rows on the right; attention is plain and causal unless a row branches."""
    width = max(len(r.tokens) for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.tensor(row.tokens)
    if not any(row.branched for row in rows):
        mask = torch.arange(width) < torch.tensor([len(r.tokens) for r in rows])[:, None]
        return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    # Padding sees itself: a softmax over nothing is not a number.
    visible = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)
    for i, row in enumerate(rows):
        n = len(row.tokens)
        places, seen = row.layout()
        positions[i, :n], visible[i, :n, :n] = torch.tensor(places), torch.tensor(seen)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return {
        "input_ids": ids.to(device),
        "attention_mask": mask[:, None].to(device),
        "position_ids": positions.to(device),
    }


def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for a, b in zip(source, target, strict=True):
            b.copy_(a)
