"""Estimate episodes, tokens and memory of a run from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from experiential.config import Experiment

if TYPE_CHECKING:
    from experiential.training.openrlhf.placement import Placement

KNOWN_PARAMETERS = {"tiny": 4e6, "smollm2": 135e6}
"""Parameters of the models that need no folder, rounded."""


def training_episodes(experiment: Experiment) -> int:
    """Count the episodes of a training, including those that fill the bank before it.

    Second attempts come on top, at most as many again.
    """
    prepare = experiment.methods.prepare
    return (
        (experiment.run.steps + (prepare.steps if prepare else 0))
        * experiment.actor.groups
        * experiment.actor.group_size
    )


def evaluation_episodes(experiment: Experiment) -> int:
    """Count the episodes of all evaluations.

    Each held-out world is visited several times in each arm; without a bank there is only ``off``.
    """
    settings = experiment.eval
    arms = sum(arm == "off" or experiment.extractor.enabled for arm in settings.arms)
    between = experiment.run.steps // settings.every if settings.every else 0
    return (settings.before + between + settings.after) * settings.worlds * settings.visits * arms


def memory_gb(experiment: Experiment) -> float | None:
    """Estimate the memory of the policies in gigabytes; None where that needs a download.

    It holds weights, gradients, AdamW's moments, master weights and KL references; activations are
    not included. dtype: auto counts as float32. A server takes none here.
    """
    frozen = experiment.runtime == "frozen"
    if frozen and experiment.model.server is not None:
        return 0.0
    count = KNOWN_PARAMETERS.get(experiment.model.name)
    if count is None:
        files = list(Path(experiment.model.name).expanduser().glob("*.safetensors"))
        count = sum(file.stat().st_size for file in files) / 2
        if not files:
            return None
    width = 2 if experiment.model.dtype == "bfloat16" else 4
    if frozen:
        return count * width / 1e9
    if experiment.model.lora:
        return count * width * 1.05 / 1e9
    extractor = experiment.extractor
    second = extractor.enabled and not extractor.shared
    references = (experiment.actor.kl > 0) + (extractor.enabled and extractor.kl > 0)
    learning = 16 if width == 4 else 18  # gradients, moments and masters are float32 in any case
    return count * ((1 + second) * learning + references * width) / 1e9


def describe_cost(experiment: Experiment, placement: Placement | None = None) -> Iterator[str]:
    """Yield the lines of `--dry-run`; ``placement`` is None for a run in this process."""
    train, evaluate = training_episodes(experiment), evaluation_episodes(experiment)
    again = train if experiment.methods.reflection else 0
    turns = (train + again + evaluate) * experiment.env.max_turns
    yield (
        f"episodes: {train:,} in training{f', at most {again:,} second attempts' if again else ''},"
        f" {evaluate:,} in evaluation"
    )
    yield f"turns: at most {turns:,} ({experiment.env.max_turns} an episode)"
    yield f"tokens sampled by the actor: at most {turns * experiment.actor.max_tokens:,}"
    if experiment.extractor.enabled:
        distilled = train * experiment.extractor.max_tokens
        yield f"tokens sampled by the extractor: at most {distilled:,}"
    if reflection := experiment.methods.reflection:
        yield f"tokens sampled in reflections: at most {again * reflection.max_tokens:,}"
    if placement is not None:
        from experiential.training.openrlhf.placement import describe_placement

        yield from describe_placement(experiment, placement)
    else:
        memory = memory_gb(experiment)
        known = "unknown until the model is loaded" if memory is None else f"about {memory:.2g} GB"
        yield f"memory of weights and optimisers: {known}"
