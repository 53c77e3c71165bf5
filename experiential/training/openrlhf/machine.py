"""Find the GPUs of this machine with ``nvidia-smi``, and with torch where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """Describe one GPU; ``number`` is its index for CUDA, ``gb`` its memory in 1e9 bytes."""

    number: str
    uuid: str
    name: str
    gb: float


class GpuUse(NamedTuple):
    """Hold how much of a GPU's memory is in use, in units of 1e9 bytes."""

    number: str
    used_gb: float
    gb: float


def find_gpus() -> tuple[Gpu, ...] | None:
    """Return the GPUs that a process started now would see, or None without ``nvidia-smi``.

    ``CUDA_VISIBLE_DEVICES`` is obeyed, since Ray does.
    """
    printed = _ask_nvidia_smi("index,uuid,name,memory.total")
    if printed is None:
        return None
    return tuple(only_visible(read_gpus(printed), os.environ.get("CUDA_VISIBLE_DEVICES")))


def gpu_uses() -> tuple[GpuUse, ...]:
    """Return the use of every GPU of this machine, visible or not; none without ``nvidia-smi``."""
    printed = _ask_nvidia_smi("index,memory.used,memory.total") or ""
    rows = [_cells(line) for line in printed.splitlines()]
    return tuple(
        GpuUse(row[0], int(row[1]) * 2**20 / 1e9, int(row[2]) * 2**20 / 1e9)
        for row in rows
        if len(row) == 3 and row[1].isdigit() and row[2].isdigit()
    )


def _ask_nvidia_smi(columns: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(
            [program, *query], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def torch_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees, which loads torch; none where it is missing."""
    if find_spec("torch") is None:
        return ()
    import torch

    cuda: Any = torch.cuda
    gpus = [cuda.get_device_properties(i) for i in range(cuda.device_count())]
    return tuple(
        Gpu(str(i), str(getattr(gpu, "uuid", "")), gpu.name, gpu.total_memory / 1e9)
        for i, gpu in enumerate(gpus)
    )


def read_gpus(printed: str) -> list[Gpu]:
    """Read the CSV of ``nvidia-smi`` without header and units; skip lines of another form."""
    rows = [_cells(line) for line in printed.splitlines()]
    return [
        Gpu(row[0], row[1], row[2], int(row[3]) * 2**20 / 1e9)
        for row in rows
        if len(row) == 4 and row[3].isdigit()
    ]


def only_visible(gpus: list[Gpu], visible: str | None) -> Iterator[Gpu]:
    """Yield the GPUs that ``CUDA_VISIBLE_DEVICES`` names by index or beginning of a UUID.

    As in CUDA, the first name that fits none ends the list.
    """
    if visible is None:
        yield from gpus
        return
    for name in (part.strip() for part in visible.split(",")):
        fits = [g for g in gpus if name == (g.number if name.isdigit() else g.uuid[: len(name)])]
        if not name or not fits:
            return
        yield fits[0]
