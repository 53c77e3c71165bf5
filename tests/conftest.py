"""Shared set-up: one torch thread per process, no network, no progress bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Machines are shared: a slow example is no failure. EXPLORE=1 draws new examples in every run,
# otherwise they are the same ones.
settings.register_profile("shared", deadline=None, derandomize="EXPLORE" not in os.environ)
settings.load_profile("shared")

for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(autouse=True)
def _same_weights() -> None:  # pyright: ignore[reportUnusedFunction]
    """Let what torch draws without a seed of its own, such as LoRA's start, be the same always."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_variables() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """What a test, or what it calls, leaves in the environment variables is gone after it."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
