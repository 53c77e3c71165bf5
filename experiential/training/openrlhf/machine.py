"""The GPUs of this machine, asked of ``nvidia-smi``, and of torch where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

_ASK = "--query-gpu=index,uuid,name,memory.total"


class Gpu(NamedTuple):
    """One GPU."""

    number: str
    """As nvidia-smi and CUDA_VISIBLE_DEVICES count."""
    uuid: str
    name: str
    gb: float
    """Memory, in units of 1e9 bytes."""


def find_gpus(environ: Mapping[str, str] | None = None) -> tuple[Gpu, ...] | None:
    """The GPUs that a process started now would see, or None when that cannot be known (there is no ``nvidia-smi``).

    ``CUDA_VISIBLE_DEVICES`` is obeyed, since Ray obeys it.

    Args:
        environ: environment variables; those of this process when None.
    """
    said = _nvidia_smi()
    if said is None:
        return None
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    return tuple(only_visible(read_gpus(said), visible))


def torch_gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch sees; loads torch, and is empty where it is not installed or was built for CPUs."""
    if find_spec("torch") is None:
        return ()
    import torch

    cuda: Any = torch.cuda
    found = enumerate(cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return tuple(
        Gpu(str(i), str(getattr(gpu, "uuid", "")), gpu.name, gpu.total_memory / 1e9)
        for i, gpu in found
    )


def read_gpus(said: str) -> list[Gpu]:
    """The GPUs in what ``nvidia-smi`` prints as CSV without header and units; lines of another form are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
    return [
        Gpu(row[0], row[1], row[2], int(row[3]) * 2**20 / 1e9)
        for row in rows
        if len(row) == 4 and row[3].isdigit()
    ]


def only_visible(gpus: list[Gpu], visible: str | None) -> Iterator[Gpu]:
    """Those of ``gpus`` that ``CUDA_VISIBLE_DEVICES`` names, by index or by the beginning of a UUID; what fits none ends the list."""
    if visible is None:
        yield from gpus
        return
    for name in (part.strip() for part in visible.split(",")):
        named = next(
            (
                gpu
                for gpu in gpus
                if name
                and (name == gpu.number or (not name.isdigit() and gpu.uuid.startswith(name)))
            ),
            None,
        )
        if named is None:
            return
        yield named


def _nvidia_smi() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, _ASK, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
