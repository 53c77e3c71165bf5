"""Train a policy with torch and transformers inside this process, on a CPU or one GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch

from experiential.bank.folder import FolderBank
from experiential.config import Experiment, ModelSettings, OptimSettings
from experiential.errors import CheckpointError, ConfigError
from experiential.llm.base import Prompt, SamplingParams
from experiential.llm.executor import DeviceExecutor
from experiential.llm.models import AFTER_HEAD, merged_weights, torch_seed
from experiential.llm.states import MEMORY_SHARE, free_memory, total_memory
from experiential.llm.transformers import TransformersLLM
from experiential.llm.vllm import VLLM
from experiential.rollout import make_env
from experiential.training.attention import PackedModel, States
from experiential.training.losses import (
    Measure,
    Sums,
    add_sums,
    batch_loss,
    begin_ratios,
    means,
    measure_tokens,
    takes_old,
    token_entropies,
    token_logprobs,
)
from experiential.training.memory import give_back, saved_bytes
from experiential.training.packing import (
    Row,
    by_sample,
    common_beginning,
    deal,
    draw_batches,
    pack,
)
from experiential.training.runtime import (
    LossSettings,
    Policies,
    PolicyRuntime,
    Sample,
    TrainStats,
    usable_samples,
)
from experiential.types import Generation

_STATE = "state.pt"
_GPU_SHARE = 0.4
"""Share of a GPU's memory that all vLLM engines of a process take together."""
MICRO_BATCH = (512, 16384)
"""The fewest and the most tokens that go forward together: fewer leave a device idle, and more win
nothing. A longer sequence goes alone."""
_SHARING = 256
"""Tokens that forwarding a common beginning apart must save."""
_SHARES = {"cpu": 1 / 16, "cuda": 1 / 2}
"""Parts of the free memory for activations. A host's is shared with other processes, and the C
library's allocator takes about twice what the tensors need."""
BACKGROUND_PATIENCE = 5.0
"""Seconds that background work on the device waits for rollouts and updates at most."""


class LocalRuntime(PolicyRuntime):
    """Hold weights, optimiser and generation in one process.

    Generation and training run on one `DeviceExecutor`, so a training step is atomic for generation
    and there is nothing to synchronise.

    Weights of lower precision than float32 are trained in a float32 master copy: a step of
    reinforcement learning is smaller than the spacing of bfloat16, and would be rounded away.
    Ratios of samples of the current weights are then taken to log-probabilities of the training
    forward, since that of generation rounds otherwise (docs/decisions/025).

    Args:
        llm: generates from the weights that are trained.
        optim: AdamW settings.
        name: role of this policy, stored in its generations.
        reference: keep the reference of the KL penalty: the frozen base under LoRA, else a copy.
        priority: of training on the executor; 1 lets rollouts and the other policy go first.
        owns_executor: close the executor with this policy.
        steady: divide batches as if half of the device's memory were free, always.
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
        steady: bool = False,
    ) -> None:
        self._steady = steady
        self.llm, self.optim, self.name, self.tokenizer = llm, optim, name, llm.tokenizer
        self._priority, self._owns_executor = priority, owns_executor
        self._model: Any = llm.model
        # the causal language model inside a peft wrapper, or the model itself
        wrapped = hasattr(llm.model, "get_base_model")
        self._base: Any = self._model.get_base_model() if wrapped else llm.model
        self._packed = PackedModel(self._base)
        trained = "" if llm.adapter is None else f".{llm.adapter}."
        self._parameters: list[torch.nn.Parameter] = [
            p.requires_grad_(True) for n, p in self._model.named_parameters() if trained in n
        ]
        self._masters = [p if p.dtype == torch.float32 else _master(p) for p in self._parameters]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
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

    def together(self) -> AbstractContextManager[None]:
        """Start the requests made in the block as one batch, when it ends."""
        return self.llm.together()

    async def train(self, samples: Sequence[Sample], loss: LossSettings) -> TrainStats:
        """Optimise on ``samples``; empty input changes nothing."""
        usable = usable_samples(samples)
        if not usable:
            return TrainStats(version=self.version)
        work = partial(self._train, usable, loss)
        try:
            return await self.llm.executor.run(work, priority=self._priority)
        except torch.OutOfMemoryError as error:
            hint = f"set or lower optim.tokens_per_micro_batch of the {self.name}"
            raise MemoryError(f"{error}; {hint}") from error

    async def score(
        self, samples: Sequence[Sample], measure: Measure = token_logprobs
    ) -> list[tuple[float, ...]]:
        """Return the log-probability (or other measure) of each trained token, per sample."""
        usable = usable_samples(samples)

        def compute() -> list[tuple[float, ...]]:
            self._activate(training=False)
            return self._measure(usable, measure)

        measured = iter(await self.llm.executor.run(compute, priority=self._priority))
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
                "weights": [p.detach().cpu() for p in self._masters],
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
            _copy(state["weights"], self._masters)
            _copy(self._masters, self._parameters)
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
            if (adapter := self.llm.adapter) is None:
                self._model.save_pretrained(folder)
            else:  # peft writes it into a folder of its own name
                self._model.save_pretrained(
                    folder, selected_adapters=[adapter], save_embedding_layers=False
                )
                for file in (folder / adapter).iterdir():
                    file.replace(folder / file.name)
                (folder / adapter).rmdir()
                (folder / "README.md").unlink(missing_ok=True)  # peft's template, all of it blank
            self.tokenizer.save_pretrained(folder)

        await self.llm.executor.run(write, priority=0)

    def close(self) -> None:
        """Refuse further requests; wait for the executor's last job and end it, if it is owned."""
        self.llm.close()
        if self._owns_executor:
            # A daemon thread that is inside torch when Python ends aborts the process (exit 134).
            self.llm.executor.close()

    def _train(self, samples: list[Sample], loss: LossSettings) -> TrainStats:
        drops = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in self._model.modules())
        with torch_seed(self.name, self.version, loss.seed) if drops else nullcontext():
            return self._updated(samples, loss)

    def _updated(self, samples: list[Sample], loss: LossSettings) -> TrainStats:
        begin = time.perf_counter()
        self.llm.forget()  # states of weights that are about to change
        stats = TrainStats(
            samples=len(samples),
            tokens=sum(len(s.positions) for s in samples),
            sequence_tokens=sum(len(s.tokens) for s in samples),
        )
        sums, parts = Sums(), min(loss.mini_batches, len(samples))
        cut = False  # into micro-batches, because memory is short
        for epoch, batches in enumerate(draw_batches(len(samples), parts, loss)):
            if epoch == 0:  # the first step takes its log-probabilities from its own forward
                self._rescore(samples, batches if loss.epochs > 1 else batches[1:], loss)
            self._activate(training=True)
            for members in batches:  # one optimiser step, accumulated over micro-batches
                first = stats.updates == 0
                part = [samples[i].weighted(parts) for i in members]
                total = sum(len(s.positions) for s in part)
                self._optimizer.zero_grad(set_to_none=True)
                for weight in self._parameters:  # a backward pass that failed leaves gradients
                    weight.grad = None
                rows = self._rows(part)
                cut = cut or len(rows) > 1
                references = self._referred(rows, part) if loss.kl > 0 else [None] * len(rows)
                beginning = self._packed.beginning(rows)  # goes forward and backward once
                for row, reference in zip(rows, references, strict=True):
                    value, metrics = self._loss(
                        row, part, loss, total, reference, beginning.states, first=first
                    )
                    with self._packed.attention():  # checkpoints go forward again
                        cast("Any", value).backward()  # torch leaves its arguments untyped
                    self._collect_gradients()
                    stats.loss += float(value.detach())
                    stats.forwarded_tokens += len(row.tokens) - row.known
                    add_sums(sums, metrics)
                if beginning.states:
                    with self._packed.attention():
                        beginning.backward()
                    self._collect_gradients()
                    stats.forwarded_tokens += rows[0].known
                norm = torch.nn.utils.clip_grad_norm_(self._masters, self.optim.max_grad_norm)
                if torch.isfinite(norm):
                    cast("Any", self._optimizer).step()
                    _copy(self._masters, self._parameters)
                else:
                    stats.metrics["skipped"] = stats.metrics.get("skipped", 0.0) + 1.0
                stats.grad_norm += float(norm)
                stats.updates += 1
                self.llm.weights_changed(self.version + 1)
        self._activate(training=False)
        if cut:
            give_back()  # to the states of the other policy, for one
        stats.loss /= max(1, stats.updates)
        stats.grad_norm /= max(1, stats.updates)
        stats.metrics |= means(sums)
        stats.version, stats.seconds = self.version, time.perf_counter() - begin
        return stats

    def _rescore(
        self, samples: list[Sample], batches: Sequence[Sequence[int]], loss: LossSettings
    ) -> None:
        """Take ratios of these samples to log-probabilities of now, where `takes_old` says so."""
        self._activate(training=False)
        for members in batches:
            part = [samples[i] for i in members]
            takes = [takes_old(s, loss, self.version, exact=self._exact) for s in part]
            if any(takes):
                for i, take, values in zip(members, takes, self._measure(part), strict=True):
                    samples[i] = replace(samples[i], old=values) if take else samples[i]

    @property
    def _exact(self) -> bool:
        """Return whether generation and training agree on a log-probability, to about 1e-4."""
        return self._base.dtype == torch.float32

    def _measure(
        self, samples: list[Sample], measure: Measure = token_logprobs
    ) -> list[tuple[float, ...]]:
        """Measure every trained token of each sample, without gradients."""
        found: dict[int, tuple[float, ...]] = {}
        rows = self._rows(samples)
        with torch.no_grad():
            known = self._packed.beginning(rows).states
            for row in rows:
                found |= by_sample(row, samples, self._logprobs(row, samples, known, measure))
        return [found[member] for member in range(len(samples))]

    def _collect_gradients(self) -> None:
        """Add the gradients of low-precision weights to their masters', in float32."""
        for weight, master in zip(self._parameters, self._masters, strict=True):
            if weight is not master and weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    def _rows(self, samples: list[Sample]) -> list[Row]:
        """Cut a batch into rows; where all begin alike, and long enough, that is known to each."""
        limit = self.optim.tokens_per_micro_batch or self._fitting
        branching, known = self._packed.branching, 0
        dealt = deal(samples, 1, limit=limit, branching=branching)
        if branching and len(dealt) > 1:
            known = common_beginning(samples)
            if known * (len(dealt) - 1) < _SHARING:
                known = 0
            else:
                room = max(limit - known, min(limit, MICRO_BATCH[0]))
                dealt = deal(samples, 1, limit=known + room)
        return [replace(pack(samples, chosen), known=known) for (chosen,) in dealt]

    @cached_property
    def _fitting(self) -> int:
        """Measure, once, how many tokens go forward together in a share of the free memory."""
        base = self._base
        size = base.get_input_embeddings().num_embeddings
        config = base.config.get_text_config()
        length = min(128, getattr(config, "max_position_embeddings", None) or 128)
        probe = Row(tuple(i % size for i in range(length)), (0,), (tuple(range(length)),))
        inputs, training = self._packed.inputs(probe, branching=False), base.training
        base.eval()  # without checkpoints, which hide what they keep
        try:
            kept = saved_bytes(lambda: base.base_model(**inputs), self._model) / length
        finally:
            base.train(training)
        if any(getattr(m, "gradient_checkpointing", False) for m in base.modules()):
            # only the inputs of every layer, and all of one layer
            layers = config.num_hidden_layers
            kept = kept / layers + layers * config.hidden_size * base.dtype.itemsize
        # gradients and AdamW's two moments come after the first update
        coming = 3 * sum(p.numel() * p.element_size() for p in self._masters)
        device = next(self._model.parameters()).device
        free = total_memory(device) // 2 if self._steady else free_memory(device)
        share = _SHARES.get(device.type, _SHARES["cpu"]) * max(0, free - coming)
        return int(min(MICRO_BATCH[1], max(MICRO_BATCH[0], share / max(1.0, kept))))

    def _referred(self, rows: list[Row], samples: list[Sample]) -> list[torch.Tensor]:
        """Measure the trained tokens of each row under the reference of the KL penalty."""

        def measured() -> list[torch.Tensor]:
            known = self._packed.beginning(rows).states
            return [self._logprobs(row, samples, known) for row in rows]

        with torch.no_grad():
            if self.llm.adapter is not None:
                with self._model.disable_adapter():
                    return measured()
            if self._reference is None:
                raise ConfigError(
                    "Expected LocalRuntime(reference=True) when the KL weight is positive, got"
                    " reference=False"
                )
            current = [p.detach().clone() for p in self._parameters]
            _copy(self._reference, self._parameters)
            try:
                return measured()
            finally:
                _copy(current, self._parameters)

    def _loss(
        self,
        row: Row,
        samples: list[Sample],
        loss: LossSettings,
        total: int,
        reference: torch.Tensor | None,
        known: States,
        *,
        first: bool,
    ) -> tuple[torch.Tensor, Sums]:
        members = [samples[i] for i in row.samples]
        states, head = self._states(row, samples, known)
        logp = self._measured(states, head, members, token_logprobs)
        divergence = self._divergence(states, head, members)
        mismatch = Sums()
        if first:
            members, mismatch = begin_ratios(logp, members, loss, self.version, exact=self._exact)
        value, sums = batch_loss(logp, members, loss, total, reference, divergence)
        return value, sums | mismatch

    def _divergence(
        self, states: torch.Tensor, head: Any, members: list[Sample]
    ) -> torch.Tensor | None:
        """Measure the divergence to the teacher of the samples that have its prompt, shape (m,).

        The teacher is this policy with its weights of now. Of its forward only the states of the
        trained tokens are kept, and logits are made for a bounded number of tokens at a time.
        """
        taught = [s.taught for s in members if s.taught is not None]
        if not taught:
            return None
        found: dict[int, torch.Tensor] = {}
        training = self._base.training
        self._model.eval()
        with torch.no_grad():
            rows = self._rows(taught)
            known = self._packed.beginning(rows).states
            for row in rows:
                lengths = [len(taught[i].positions) for i in row.samples]
                parts = torch.split(self._states(row, taught, known)[0], lengths)
                found |= dict(zip(row.samples, parts, strict=True))
        self._model.train(training)
        own = torch.tensor(
            [s.taught is not None for s in members for _ in s.positions], device=states.device
        )
        return measure_tokens(
            states[own],
            head,
            [s for s in members if s.taught is not None],
            lambda: self.llm.schemas,
            frozen=_is_frozen(head),
            teacher=torch.cat([found[i] for i in range(len(taught))]),
        )

    def _logprobs(
        self, row: Row, samples: list[Sample], known: States, measure: Measure = token_logprobs
    ) -> torch.Tensor:
        """Measure every trained token of the row's samples in their order, shape (n,)."""
        states, head = self._states(row, samples, known)
        return self._measured(states, head, [samples[m] for m in row.samples], measure)

    def _states(self, row: Row, samples: list[Sample], known: States) -> tuple[torch.Tensor, Any]:
        """Return what the row's trained tokens are drawn from, shape (n, width), and the head."""
        base, packed = self._base, self._packed
        inputs = packed.inputs(row, known=known)
        with packed.attention():
            if any(getattr(base.config, name, None) not in (None, 1, 1.0) for name in AFTER_HEAD):
                states, head = self._model(**inputs).logits[0], torch.nn.Identity()
            else:  # the head sees only the positions that are asked for
                states = packed.run(**inputs).last_hidden_state[0]
                head = base.get_output_embeddings()
        return states[packed.places(row, [samples[m] for m in row.samples])], head

    def _measured(
        self, states: torch.Tensor, head: Any, members: list[Sample], measure: Measure
    ) -> torch.Tensor:
        """Measure every trained token of these samples in their order, shape (n,)."""
        return measure_tokens(
            states, head, members, lambda: self.llm.schemas, measure, frozen=_is_frozen(head)
        )

    def _activate(self, *, training: bool) -> None:
        if self.llm.adapter is not None:
            self._model.set_adapter(self.llm.adapter)
        self._model.train(training)


class ColocatedRuntime(LocalRuntime):
    """Generate with a vLLM engine that sleeps while the weights are trained.

    The engine has weights of its own: those of the last ``sync``. Behaviour log-probabilities are
    vLLM's, but see `LocalRuntime` on weights of lower precision.

    Args:
        llm: holds the weights that are trained; it is never asked.
        optim: AdamW settings.
        generator: answers; it runs on the executor of ``llm``.
        options: see `LocalRuntime`.
    """

    def __init__(
        self, llm: TransformersLLM, optim: OptimSettings, *, generator: VLLM, **options: Any
    ) -> None:
        super().__init__(llm, optim, **options)
        self.generator = generator

    @property
    def tokens_processed(self) -> int:
        """Count the prompt and response tokens of all generations so far."""
        return self.generator.tokens

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response from the weights of the last ``sync``."""
        return await self.generator.generate(prompt, sampling)

    async def sync(self) -> int:
        """Give the engine the trained weights; return their version."""
        if self.generator.version != self.version:
            await self.llm.executor.run(self._send, priority=self._priority)
        return self.version

    async def load(self, folder: Path) -> None:
        """Restore the state written by ``save``, and give it to the engine."""
        await super().load(folder)
        await self.llm.executor.run(self._send, priority=0)

    def close(self) -> None:
        """End the engine, then what `LocalRuntime.close` ends."""
        self.generator.close()
        super().close()

    def _send(self) -> None:
        weights = merged_weights(self._base, self.llm.adapter)
        self.generator.load_weights(weights, self.version)

    def _train(self, samples: list[Sample], loss: LossSettings) -> TrainStats:
        self.generator.sleep()
        return super()._train(samples, loss)


class InProcessRuntime:
    """Train both policies, write the bank and hold the environments in this process.

    Policies that are passed stay open; None loads those of the experiment.
    """

    def __init__(
        self,
        experiment: Experiment,
        policies: Policies | None = None,
        output: Path | None = None,  # noqa: ARG002  (all is on this machine)
    ) -> None:
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
                steady=experiment.repeatable,
                seed=experiment.seed,
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
    steady: bool = False,
    seed: int = 0,
) -> tuple[LocalRuntime, LocalRuntime]:
    """Load actor and extractor onto one executor, which ends when the actor is closed.

    The extractor's training waits for rollouts and for the actor's updates. Under LoRA both are
    adapters over one base, else two sets of weights.

    ``extractor`` None takes the actor's model, and ``shared`` one policy for both, with the actor's
    optimiser; ``references`` says whether each needs the reference of a KL penalty. ``steady``
    takes memory by the size of the device and not by what is free, so that equal runs compute
    equal batches. ``seed`` draws the first weights of adapters.
    """
    from experiential.llm.models import load_model

    second = extractor or actor
    if actor.threads:
        torch.set_num_threads(actor.threads)
    executor = DeviceExecutor(patience=BACKGROUND_PATIENCE)
    paired = actor.lora is not None and second == actor and not shared
    names = ("actor", "extractor") if paired else ("actor",)
    first = load_model(actor, adapters=names, seed=seed)
    other = first if paired or shared else load_model(second, adapters=("extractor",), seed=seed)

    roles = [("actor", actor, first, any(references) if shared else references[0])]
    if not shared:
        roles.append(("extractor", second, other, references[1]))
    made: list[LocalRuntime] = []
    for priority, (role, settings, loaded, reference) in enumerate(roles):
        cache_gb = settings.prefix_cache_gb
        if cache_gb is None and steady:
            device = next(loaded[0].parameters()).device
            cache_gb = MEMORY_SHARE * total_memory(device) / 2e9
        llm = TransformersLLM(
            *loaded,
            max_batch=max_batch,
            prefix_cache_gb=cache_gb,
            executor=executor,
            adapter=role if settings.lora else None,
            name=role,
        )
        options: dict[str, Any] = {
            "name": role,
            "reference": reference,
            "priority": priority,
            "owns_executor": role == "actor",
            "steady": steady,
        }
        if settings.generator == "vllm":
            generator = VLLM(
                settings.name,
                dtype=str(next(llm.model.parameters()).dtype).removeprefix("torch."),
                device=settings.device,
                gpu_memory=_GPU_SHARE / len(roles),
                sleeps=len(roles) == 1,  # vLLM's allocator serves one engine of a process
                executor=executor,
                name=role,
            )
            made.append(ColocatedRuntime(llm, optims[priority], generator=generator, **options))
        else:
            made.append(LocalRuntime(llm, optims[priority], **options))
    return made[0], made[-1]


def _is_frozen(head: torch.nn.Module) -> bool:
    """Test whether no gradient of a head is wanted."""
    return not any(p.requires_grad for p in head.parameters())


def _master(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 copy at a random place of the interval that is rounded to ``weight``.

    Copies in the middle of their intervals would all have to move half a step before any weight
    changed; with these, the weights follow their masters on average from the first update on.
    """
    exact, generator = weight.detach().float(), torch.Generator(weight.device).manual_seed(0)
    place = torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5
    step = torch.finfo(weight.dtype).eps  # between neighbours, in units of their power of two
    master = exact + torch.ldexp(place * step, exact.frexp().exponent - 1)
    # The interval of a power of two is shorter below it.
    return torch.where(master.to(weight.dtype) == weight, master, exact)


def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for a, b in zip(source, target, strict=True):
            if a is not b:
                b.copy_(a)
