"""Define the contracts of computation: a `PolicyRuntime` per policy, a `Runtime` per run."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
from pydantic import Field

from experiential.bank.protocol import ForkableBank
from experiential.config import Correction, EnvSettings, Experiment, Ratio
from experiential.errors import ConfigError
from experiential.llm.base import LLM
from experiential.plugins import resolve
from experiential.types import Generation, Record

LOSSES = {
    name: f"experiential.training.losses:{name}"
    for name in ("ppo", "cispo", "sft", "reverse_kl", "full_reverse_kl", "full_forward_kl")
}
"""Built-in policy losses, which import torch and so are imported when chosen."""
WITHOUT_RATIO = ("sft", "reverse_kl", "full_reverse_kl", "full_forward_kl")
"""Losses that do not read a sample's behaviour log-probabilities."""
METHODS = {
    "policy_gradient": "experiential.training.methods.policy_gradient:PolicyGradient",
    "evolver": "experiential.training.methods.evolver:EvolveR",
}
"""Built-in main methods, imported when chosen."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Represent one token sequence to learn from.

    Attributes:
        tokens: prompt, responses and observations, as they were fed to the policy, shape (n,).
        positions: indices of the sampled tokens in ``tokens``; token ``p`` was drawn given
            ``tokens[:p]``.
        logprobs: log-probability of each sampled token, as its sampler recorded it, in nats.
        advantages: advantage of each sampled token.
        allowed: token ids each draw was restricted to; empty means the whole vocabulary, or what
            ``json_schema`` allows.
        json_schema: what the response was restricted to, from ``response`` to the end.
        response: index in ``tokens``; only needed with a schema.
        teacher: log-probability of each sampled token under a teacher, for ``reverse_kl`` alone.
        taught: the same tokens after the teacher's prompt, for ``full_reverse_kl`` and
            ``full_forward_kl`` alone.
        weight: weight of this sequence in the loss; the weights of a batch sum to one for
            sequence-mean losses.
        temperature: temperature the log-probabilities were taken at.
        policy_version: optimiser steps the behaviour policy had seen.
        kind: the loss of this sequence where it is another than that of its batch.
        old: log-probability of each sampled token, computed by the trainer under the weights that
            an update begins with; empty where ratios are taken to ``logprobs``. Set by runtimes.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    allowed: tuple[tuple[int, ...], ...] = ()
    json_schema: str | None = None
    response: int = 0
    teacher: tuple[float, ...] = ()
    weight: float = 1.0
    temperature: float = 1.0
    policy_version: int = 0
    kind: str | None = None
    taught: Sample | None = None
    old: tuple[float, ...] = ()

    def weighted(self, factor: float) -> Sample:
        """Return the same sample with its weight multiplied."""
        return replace(self, weight=self.weight * factor)


def usable_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Select samples with trained tokens.

    Raises:
        ValueError: lengths of one differ, or a position is out of range.
    """
    usable = [s for s in samples if s.positions]
    for sample in usable:
        n = len(sample.positions)
        optional = [found for found in (sample.allowed, sample.old, sample.teacher) if found]
        if any(len(found) != n for found in (sample.logprobs, sample.advantages, *optional)):
            raise ValueError(
                f"Expected {n} log-probabilities, advantages, constraints and teacher's, one per"
                " position, got other lengths"
            )
        if sample.taught is not None and len(sample.taught.positions) != n:
            raise ValueError(
                f"Expected {n} positions after the teacher's prompt, got"
                f" {len(sample.taught.positions)}"
            )
        low, high, last = min(sample.positions), max(sample.positions), len(sample.tokens) - 1
        if low < 1 or high > last:
            raise ValueError(f"Expected positions between 1 and {last}, got {low} to {high}")
    return usable


class LossSettings(Record):
    """Select the loss to minimise and its constants."""

    kind: str = Field(default="ppo", description="a name for `LOSSES` or the plug-in door")
    low: float = Field(default=0.2, gt=0.0, description="clips the ratio to [1 - low, 1 + high]")
    high: float = Field(default=0.2, gt=0.0)
    ratio: Ratio = "token"
    correction: Correction = Field(default="none", description="see `losses.importance_weights`")
    correction_cap: float = Field(default=2.0, gt=0.0)
    kl: float = Field(default=0.0, ge=0.0)
    epochs: int = Field(default=1, gt=0)
    mini_batches: int = Field(default=1, gt=0)
    seed: int = 0


@dataclass(slots=True)
class TrainStats:
    """Report the work of one call of ``train``.

    ``tokens`` counts the sampled tokens learnt from, ``sequence_tokens`` all tokens of all samples,
    and ``forwarded_tokens`` what was really computed after equal prefixes were shared.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    samples: int = 0
    tokens: int = 0
    sequence_tokens: int = 0
    forwarded_tokens: int = 0
    updates: int = 0
    seconds: float = 0.0
    version: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class PolicyRuntime(LLM):
    """Train and sample from a language model."""

    @abstractmethod
    async def train(self, samples: Sequence[Sample], loss: LossSettings) -> TrainStats:
        """Optimise on ``samples``; the weights and ``version`` change. See `usable_samples`."""

    @property
    def tokens_processed(self) -> int:
        """Count the prompt and response tokens of all generations so far."""
        return 0

    def busy(self) -> dict[str, float]:
        """Return the share of time since the last call in which each measured device worked."""
        return {}

    def foreground(self) -> AbstractContextManager[None]:
        """Pause background work on a shared device during a rollout."""
        return nullcontext()

    @abstractmethod
    async def score(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return the log-probability of each trained token under the current weights, in nats."""

    async def entropies(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return the entropy at each trained token in nats; raise ConfigError if not computed."""
        name = type(self).__name__
        raise ConfigError(f"Expected a runtime that gives entropies, got {name}; use runtime=local")

    @abstractmethod
    async def sync(self) -> int:
        """Make generation use the trained weights; return the version that it uses now."""

    @abstractmethod
    async def save(self, folder: Path) -> None:
        """Write weights, optimiser state and version to ``folder`` (created)."""

    async def begin_save(self, folder: Path) -> Callable[[], Awaitable[None]]:
        """Do as ``save``, and return what waits until all is written.

        The policy may be trained in between; what is written is the state at the call. Here all
        is written at once.
        """
        await self.save(folder)
        return partial(asyncio.sleep, 0)

    @abstractmethod
    async def load(self, folder: Path) -> None:
        """Restore the state written by ``save``; raise CheckpointError if there is none."""

    async def anchor(self) -> None:
        """Make the current weights the reference of the KL penalty, if the policy keeps a copy."""

    async def export(self, folder: Path) -> None:
        """Write the weights in Hugging Face format, for use elsewhere."""
        raise NotImplementedError


Policies = tuple[PolicyRuntime, PolicyRuntime]
"""Actor and extractor; the same object twice where they share their weights."""


class Runtime(Protocol):
    """Own a run's means of computation: two policies, the bank's writer, the environments.

    A runtime's name resolves to a callable, which takes the experiment and, optionally, existing
    policies; the caller closes those.
    """

    # Properties, so that a type checker accepts attributes of a subclass and read-only ones.

    @property
    def actor(self) -> PolicyRuntime:
        """Return the policy that plays."""
        ...

    @property
    def extractor(self) -> PolicyRuntime:
        """Return the policy that distils; the actor itself where they share their weights."""
        ...

    def open_bank(self, folder: Path) -> ForkableBank:
        """Open the run's bank for writing; the caller closes it before the runtime."""
        ...

    def make_env(self, settings: EnvSettings, kwargs: dict[str, Any]) -> gym.Env[str, str]:
        """Build one environment; ``kwargs`` override those of the settings."""
        ...

    def close(self) -> None:
        """End every thread, process and remote actor that this runtime started."""
        ...


RUNTIMES: dict[str, str | Callable[[Experiment, Policies | None, Path | None], Runtime]] = {
    "local": "experiential.training.local:InProcessRuntime",
    "frozen": "experiential.training.frozen:FrozenRuntime",
    "openrlhf": "experiential.training.openrlhf.runtime:ClusterRuntime",
}
"""Built-in runtimes, imported when chosen."""


def build_runtime(
    experiment: Experiment, policies: Policies | None = None, output: Path | None = None
) -> Runtime:
    """Build the runtime that the experiment names; raise ConfigError and its kin if it cannot.

    ``output`` is the folder of the run, for a runtime whose machines must share it.
    """
    return resolve("runtimes", experiment.runtime, RUNTIMES)(experiment, policies, output)


def sample_from_generation(
    generation: Generation, advantages: Sequence[float] | float, *, weight: float = 1.0
) -> Sample:
    """Make a sample of one response, without the tokens that a constraint forced.

    ``advantages`` has one per response token, or is one for all; NaN marks tokens to leave out.
    """
    n = len(generation.response_ids)
    one = isinstance(advantages, int | float)
    values = [float(advantages)] * n if one else [float(a) for a in advantages]
    if len(values) != n or len(generation.logprobs) != n:
        raise ValueError(
            f"Expected {n} advantages and log-probabilities, got {len(values)} and"
            f" {len(generation.logprobs)}"
        )
    allowed = generation.allowed or ((),) * n
    keep = [i for i in range(n) if len(allowed[i]) != 1 and values[i] == values[i]]
    start = len(generation.prompt_ids)
    return Sample(
        tokens=generation.prompt_ids + generation.response_ids,
        positions=tuple(start + i for i in keep),
        logprobs=tuple(generation.logprobs[i] for i in keep),
        advantages=tuple(values[i] for i in keep),
        allowed=tuple(allowed[i] for i in keep),
        json_schema=generation.json_schema,
        response=start,
        weight=weight,
        temperature=generation.temperature or 1.0,
        policy_version=generation.policy_version,
    )
