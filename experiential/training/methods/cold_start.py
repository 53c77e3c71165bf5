"""Train on demonstrations before reinforcement learning: the cold start of EvolveR."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from experiential.agents.dialogue import Dialogue
from experiential.config import ColdStartSettings
from experiential.errors import ConfigError, first_problem
from experiential.training.methods.method import Method, Run
from experiential.training.runtime import LossSettings, PolicyRuntime, Sample, TrainStats
from experiential.types import Generation, Message


class ChatMessage(BaseModel):
    """Represent one message of a demonstration."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant", "tool"]
    content: str = Field(min_length=1)


class Demonstration(BaseModel):
    """Represent a chat to imitate.

    An optional system message, then others and the assistant in turn, the assistant last.
    """

    model_config = ConfigDict(extra="ignore")

    messages: tuple[ChatMessage, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _takes_turns(self) -> Demonstration:
        roles = [message.role for message in self.messages]
        said = roles[1:] if roles[0] == "system" else roles
        if "system" in said:
            raise ValueError("a system message can only be the first")
        if len(said) % 2 or any((r == "assistant") != bool(i % 2) for i, r in enumerate(said)):
            raise ValueError(
                "user (or tool) and assistant must take turns and the assistant must be last, got"
                f" {', '.join(roles)}"
            )
        return self


def read_demonstrations(file: str | Path) -> list[Demonstration]:
    """Read the demonstrations of a JSON Lines file; blank lines do not count.

    Raises:
        ConfigError: the file cannot be read or holds none, or a line is no demonstration; the
            message names the line.
    """
    path = Path(file).expanduser()
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "Expected demonstrations in methods.cold_start.demonstrations, got"
            f" {str(file)!r}: {error}"
        ) from error
    found: list[Demonstration] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(Demonstration.model_validate(json.loads(line)))
        except ValueError as error:  # pydantic's ValidationError is one
            cause = first_problem(error) if isinstance(error, ValidationError) else str(error)
            raise ConfigError(
                f'Expected {{"messages": [{{"role": ..., "content": ...}}, ...]}} in line {number}'
                f" of {path}, got: {cause}"
            ) from None
    if not found:
        raise ConfigError(
            f"Expected at least one demonstration in {path}, got none; make some with python -m"
            " benchmarks.demonstrations"
        )
    return found


def demonstration_samples(demonstration: Demonstration, tokenizer: Any) -> list[Sample]:
    """Make imitation samples of the assistant's tokens, each reply with its end token.

    All other tokens are context. The chat is rendered as an actor's own dialogue is, so that
    prompts are token by token those that it will meet.
    """
    dialogue = Dialogue(tokenizer)
    for message in demonstration.messages:
        if message.role == "assistant":
            spoken = tokenizer(message.content, add_special_tokens=False)["input_ids"]
            ids = (*spoken, tokenizer.eos_token_id)
            zeros = (0.0,) * len(ids)
            dialogue.append(Generation(text=message.content, response_ids=ids, logprobs=zeros))
        else:
            dialogue.add(Message(role=message.role, content=message.content))
    samples: list[Sample] = []
    for sequence in dialogue.sequences():
        positions = tuple(i for i, learnt in enumerate(sequence.mask) if learnt)
        zeros = (0.0,) * len(positions)
        samples.append(Sample(tuple(sequence.tokens), positions, zeros, zeros))
    return samples


@dataclass(eq=False)
class ColdStart(Method):
    """Train the actor on demonstrations before the first step."""

    run: Run
    settings: ColdStartSettings

    async def begin(self) -> None:
        """Train on every demonstration; see `cold_start`."""
        run = self.run
        await cold_start(run.actor, self.settings, run.experiment.seed, run.emit)


async def cold_start(
    policy: PolicyRuntime,
    settings: ColdStartSettings,
    seed: int,
    emit: Callable[[dict[str, Any]], None] = lambda event: None,
) -> TrainStats:
    """Train a policy on demonstrations; make the result the reference of the KL penalty.

    Each chat counts equally, each of its tokens equally within it. An epoch takes every chat once,
    in an order drawn from ``seed``. Full weights or LoRA adapters are trained, whichever the policy
    has, with its optimiser. ``emit`` receives the metrics event ``cold_start``.

    Returns:
        of the last optimiser step, with ``updates``, ``samples`` and ``tokens`` of all.

    Raises:
        ConfigError: the file holds no demonstrations, or the policy has no tokenizer.
    """
    if policy.tokenizer is None:
        raise ConfigError(
            "Expected a policy that shows its tokenizer for a cold start, got one that does not"
        )
    samples = [
        sample
        for one in read_demonstrations(settings.demonstrations)
        for sample in demonstration_samples(one, policy.tokenizer)
    ]
    rng = np.random.default_rng(seed)
    done: list[TrainStats] = []
    for _ in range(settings.epochs):
        order = [samples[int(i)] for i in rng.permutation(len(samples))]
        for start in range(0, len(order), settings.batch_size):
            part = order[start : start + settings.batch_size]
            batch = [sample.weighted(1 / len(part)) for sample in part]
            done.append(await policy.train(batch, LossSettings(kind="sft", seed=seed)))
    whole = replace(
        done[-1],
        updates=sum(stats.updates for stats in done),
        samples=sum(stats.samples for stats in done),
        tokens=sum(stats.tokens for stats in done),
        seconds=sum(stats.seconds for stats in done),
    )
    await policy.sync()
    await policy.anchor()
    emit(
        {
            "event": "cold_start",
            "step": 0,
            "demonstrations": len(samples),
            "updates": whole.updates,
            "tokens": whole.tokens,
            "first_loss": done[0].loss,
            "loss": whole.loss,
            "seconds": whole.seconds,
        }
    )
    return whole
