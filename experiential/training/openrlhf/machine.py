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


def find_gpus() -> tuple[Gpu, ...] | None:
    """Return the GPUs that a process started now would see, or None without ``nvidia-smi``.

    ``CUDA_VISIBLE_DEVICES`` is obeyed, since Ray does.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = ["--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [program, *query], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(only_visible(read_gpus(done.stdout), visible))


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
    rows = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines()]
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
