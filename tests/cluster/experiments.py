"""Experiments small enough for Ray, two vLLM engines and DeepSpeed on two CPU cores."""

from __future__ import annotations

from experiential.config import Experiment
from experiential.recipe import load_experiment

_POLICY = (
    "attention=sdpa",
    "max_length=1024",
    "gpu_memory=0.2",
    "vllm.enforce_eager=true",
    "micro_batch_size=8",
    "batch_size=64",
)


def cluster_experiment(*overrides: str) -> Experiment:
    """The complementary recipe with two tiny policies on the cluster engine."""
    policies = [
        f"cluster.{role}.{setting}" for role in ("actor", "extractor") for setting in _POLICY
    ]
    timeouts = ["cluster.start_timeout=1200", "cluster.call_timeout=240"]
    return load_experiment(
        "complementary",
        ["model.dtype=bfloat16", "runtime=openrlhf", *policies, *timeouts, *overrides],
    )
