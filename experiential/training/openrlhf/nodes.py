"""Look at every node with GPUs before anything starts there, and name what would fail later."""

from __future__ import annotations

import difflib
import glob
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiential.config import ClusterSettings
from experiential.errors import ConfigError
from experiential.training.openrlhf.build_locks import LONGEST_S, clear_build_locks
from experiential.training.openrlhf.machine import GpuUse, gpu_uses
from experiential.training.openrlhf.placement import check_dense

_log = logging.getLogger(__name__)
LOOK_S = 50.0
"""Time in which every node must have answered."""
APPEARS_S = 10.0
"""Time in which a file of the trainer must appear on a node."""
SHM_LEAST_GB = 1.0
"""What NCCL and vLLM need of /dev/shm on a node with GPUs; Docker gives a container 0.07."""
HELD_GB = 2.0
"""Memory of a GPU that may be in use before a run starts, for a display or a driver."""
_SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

Files = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Facts:
    """Describe one node as a process that Ray starts there sees it.

    Attributes:
        node: its name, for messages.
        nonce: content of the file that the trainer wrote, or the reason why it was not read.
        models: name and size of the files of each model folder; empty where there is none.
        shm_gb: size of /dev/shm; None where there is none.
        gpus: memory of each GPU, as nvidia-smi tells it.
        ray_gpus: GPUs that Ray has not given away there.
        torch_cuda: version of CUDA that torch was built with; empty without CUDA.
        nvcc: version of the CUDA compiler that DeepSpeed would find; empty where there is none.
        tools: of the C++ compiler and ninja, those found.
        built: DeepSpeed's operators that were compiled at its installation.
        interfaces: names of the network interfaces.
        sockets: variables that choose an interface.
        removed: locks of DeepSpeed's builds that were removed, because their owner is dead.
        locks: old ones whose owner may be on another node.
    """

    node: str
    nonce: str
    models: Mapping[str, Files]
    shm_gb: float | None
    gpus: tuple[GpuUse, ...]
    ray_gpus: float
    torch_cuda: str
    nvcc: str
    tools: frozenset[str]
    built: frozenset[str]
    interfaces: tuple[str, ...]
    sockets: Mapping[str, str]
    removed: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()


def check_nodes(
    cluster: ClusterSettings, output: Path | None, models: Sequence[str | Path]
) -> None:
    """Refuse a cluster of which a node lacks what a run needs; it must have been joined.

    A nonce is written into ``output`` and read back by every node with GPUs.

    Args:
        cluster: sizes of both policies.
        output: folder of the run; None leaves it unchecked.
        models: of both policies; hub names are left to the loader.

    Raises:
        ConfigError: names the node, what it lacks and the remedy.
    """
    ray: Any = import_module("ray")
    strategies: Any = import_module("ray.util.scheduling_strategies")
    state: Any = import_module("ray._private.state")
    folders = tuple(str(model) for model in models if isinstance(model, Path))
    own = {folder: list_files(folder) for folder in folders}
    free = state.available_resources_per_node()
    nonce, file = secrets.token_hex(16), None
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        file = output.absolute() / f".seen-by-all-nodes-{nonce[:8]}"
        file.write_text(nonce)
    try:
        look = ray.remote(num_cpus=0, max_retries=0)(look_around)
        nodes = {
            node["NodeID"]: f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get("GPU")
        }
        asked = {
            look.options(
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(
                    node_id=id_, soft=False
                )
            ).remote(
                name,
                None if file is None else str(file),
                folders,
                free.get(id_, {}).get("GPU", 0.0),
            ): id_
            for id_, name in nodes.items()
        }
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_S)
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for reference, id_ in asked.items():
            node = nodes[id_]
            if id_ not in alive:  # the run takes others, or waits until it is back
                _log.warning("%s died while it was looked at", node)
                continue
            if reference not in done:
                raise ConfigError(
                    f"Expected an answer of {node} within {LOOK_S:g} s, got none; look at it with"
                    " ray status, or take it out of the cluster"
                )
            try:
                facts: Facts = ray.get(reference)
            except ray.exceptions.RayError as error:
                cause = " ".join(str(error).strip().splitlines()[-1:])
                raise ConfigError(
                    f"Expected {node} to run this package in the same environment, got: {cause};"
                    " install it there at the same path, or share it"
                ) from error
            for lock in facts.removed:
                _log.warning("removed %s on %s: the process that built there is dead", lock, node)
            where = None if output is None else output.absolute()
            for fault in faults(facts, cluster, where, nonce, own):
                raise ConfigError(fault)
    finally:
        if file is not None:
            file.unlink(missing_ok=True)


def look_around(node: str, nonce_file: str | None, models: Sequence[str], ray_gpus: float) -> Facts:
    """Return what the process that calls this sees of its node; clear locks of dead builds.

    A file that is not there is waited for: network file systems show new ones late.
    """
    nonce, until = "", time.monotonic() + APPEARS_S
    while nonce_file is not None:
        try:
            nonce = Path(nonce_file).read_text()
            break
        except OSError as error:
            nonce = error.strerror or str(error)
            if time.monotonic() > until:
                break
            time.sleep(0.2)
    shm = None
    with suppress(OSError):
        status = os.statvfs("/dev/shm")
        shm = status.f_blocks * status.f_frsize / 1e9
    removed, locks = clear_build_locks()
    return Facts(
        node=node,
        nonce=nonce,
        models={folder: list_files(folder) for folder in models},
        shm_gb=shm,
        gpus=gpu_uses(),
        ray_gpus=ray_gpus,
        torch_cuda=_in_source("torch", "version.py", r"^cuda\b.*= '([\d.]+)'"),
        nvcc=_nvcc(),
        tools=frozenset(
            name
            for name, program in (("c++", os.environ.get("CXX", "c++")), ("ninja", "ninja"))
            if shutil.which(program)
        ),
        built=frozenset(
            _all_in_source("deepspeed", "git_version_info_installed.py", r"'(\w+)': True")
        ),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        sockets={name: os.environ[name] for name in _SOCKETS if os.environ.get(name)},
        removed=tuple(removed),
        locks=tuple(locks),
    )


def list_files(folder: str) -> Files:
    """Return name and size of the files of a folder, sorted; nothing where there is no folder."""
    found = [Path(name) for name in glob.glob(f"{glob.escape(folder)}/*")]
    return tuple(sorted((file.name, file.stat().st_size) for file in found if file.is_file()))


def faults(
    facts: Facts,
    cluster: ClusterSettings,
    output: Path | None,
    nonce: str,
    models: Mapping[str, Files],
) -> Iterator[str]:
    """Yield what one node lacks: expected, found and remedy."""
    if output is not None and facts.nonce != nonce:
        yield (
            f"Expected {facts.node} to see the files that the trainer writes to {output}, got:"
            f" {facts.nonce or 'an empty file'}; set --output to a folder of a file system that all"
            " nodes with GPUs share, at the same path"
        )
    for folder, files in models.items():
        there = facts.models.get(folder, ())
        if not there:
            yield (
                f"Expected the model folder {folder} on {facts.node}, found none; copy it there, or"
                " set model.name to a folder that all nodes with GPUs share"
            )
        elif there != files:
            name = sorted(set(there) ^ set(files))[0][0]
            yield (
                f"Expected the model folder {folder} of {facts.node} to be equal to the trainer's,"
                f" got another {name}; copy it there again, or share one folder"
            )
    if facts.gpus and facts.shm_gb is not None and facts.shm_gb < SHM_LEAST_GB:
        yield (
            f"Expected at least {SHM_LEAST_GB:g} GB of shared memory on {facts.node}, where NCCL"
            f" and vLLM exchange data, got {facts.shm_gb:.2f} GB; run mount -o remount,size=16G"
            " /dev/shm there, or start its container with --shm-size=16g"
        )
    yield from _compiler_faults(facts, cluster)
    for lock in facts.locks:
        yield (
            f"Expected no lock of an earlier build of DeepSpeed's operators on {facts.node}, found"
            f" {lock}, which is older than {LONGEST_S / 60:g} minutes and held by no process there;"
            " ranks would wait for it without end: unless another node compiles now, remove it with"
            f" rm {lock}"
        )
    free = [gpu for gpu in facts.gpus if gpu.used_gb <= HELD_GB]
    if len(free) < min(facts.ray_gpus, len(facts.gpus)):
        held = ", ".join(
            f"GPU {gpu.number} has {gpu.used_gb:.1f} of {gpu.gb:.1f} GB in use"
            for gpu in facts.gpus
            if gpu.used_gb > HELD_GB
        )
        yield (
            f"Expected {facts.ray_gpus:g} free GPUs on {facts.node}, got {len(free)}: {held}; end"
            " the job that holds them (nvidia-smi lists it), or start Ray with CUDA_VISIBLE_DEVICES"
            " and --num-gpus without them"
        )
    for variable, wanted in facts.sockets.items():
        if not any(fits_interface(wanted, name) for name in facts.interfaces):
            yield (
                f"Expected {variable} on {facts.node} to name one of its network interfaces,"
                f" {', '.join(facts.interfaces)}, got {wanted}; set it to the one that connects the"
                " nodes before ray start, or unset it"
            )


def _compiler_faults(facts: Facts, cluster: ClusterSettings) -> Iterator[str]:
    """Yield what DeepSpeed lacks to compile its optimisers, which it does at their first use."""
    sizes = (cluster.actor, cluster.extractor)
    needed = {"cpu_adam" if policy.offload_optimizer else "fused_adam" for policy in sizes}
    if not (missing := needed - facts.built):
        return
    will = f"DeepSpeed compiles {' and '.join(sorted(missing))} there"
    for tool, package in (("c++", "g++"), ("ninja", "ninja-build")):
        if tool not in facts.tools:
            yield (
                f"Expected {tool} on the PATH of {facts.node}, because {will}, found none; activate"
                f" the environment before ray start, or install {package}"
            )
    if not (facts.torch_cuda and facts.gpus):
        return
    # DeepSpeed 0.19.6: fused_adam needs nvcc of any version; cpu_adam goes without, but refuses one
    # of another version than torch's.
    if not facts.nvcc and "fused_adam" in missing:
        yield (
            f"Expected nvcc on {facts.node}, because {will}, found none; install the toolkit of"
            f" CUDA {facts.torch_cuda} and set CUDA_HOME before ray start, or install deepspeed"
            " with DS_BUILD_FUSED_ADAM=1"
        )
    other = facts.nvcc.split(".")[0] != facts.torch_cuda.split(".")[0]
    if facts.nvcc and other and "cpu_adam" in missing:
        yield (
            f"Expected nvcc of CUDA {facts.torch_cuda} on {facts.node}, which its torch was built"
            f" with, because {will}, got {facts.nvcc}; set CUDA_HOME to the toolkit of that version"
            " before ray start"
        )


def fits_interface(wanted: str, name: str) -> bool:
    """Return whether NCCL would use an interface.

    ``wanted`` is a list of prefixes; ``=`` before it asks for whole names and ``^`` excludes.

    >>> [fits_interface(wanted, "eth0") for wanted in ("eth", "=eth", "^docker,lo", "ib0,eth0")]
    [True, False, True, True]
    """
    excluded, exact = wanted.startswith("^"), "=" in wanted[:2]
    names = [one.strip() for one in wanted.lstrip("^=").split(",")]
    return excluded != any(name == one if exact else name.startswith(one) for one in names)


def _nvcc() -> str:
    """Return the version of the compiler where torch looks for CUDA; empty without one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        found = shutil.which("nvcc")
        home = str(Path(found).parent.parent) if found else "/usr/local/cuda"
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            [f"{home}/bin/nvcc", "-V"], capture_output=True, text=True, check=True, timeout=20
        ).stdout
        return next(iter(re.findall(r"release ([\d.]+)", said)), "")
    return ""


def _in_source(package: str, file: str, pattern: str) -> str:
    return next(iter(_all_in_source(package, file, pattern)), "")


def _all_in_source(package: str, file: str, pattern: str) -> list[str]:
    """Search a file of a package that would take seconds to import."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return []
    try:
        text = (Path(spec.origin).parent / file).read_text("utf-8")
    except OSError:
        return []
    return re.findall(pattern, text, re.MULTILINE)


def check_weights(model: str | Path) -> None:
    """Refuse a model folder in which a weight of its architecture is missing or misnamed.

    transformers would draw the missing ones at random, and vLLM fails minutes after its start.
    Names alone are compared; no weight is read. Of a hub name, only the config is looked at: a
    mixture of experts is refused.

    Raises:
        ConfigError: names the first weight that is missing, and one that has no place.
    """
    transformers: Any = import_module("transformers")
    if not isinstance(model, Path):
        try:
            config: Any = transformers.AutoConfig.from_pretrained(model, trust_remote_code=True)
        except Exception as error:  # noqa: BLE001  (of the hub, or the model's own code)
            _log.warning("the config of %s was not checked: %s", model, error)
            return
        check_dense(model, config.to_dict())
        return
    auto = transformers.AutoModelForCausalLM
    try:
        loaded: Any = auto.from_pretrained(
            model, device_map="meta", output_loading_info=True, trust_remote_code=True
        )
    except Exception as error:  # noqa: BLE001  (of the model's own code, too: the ranks will tell)
        _log.warning("the weights of %s were not checked: %s", model, error)
        return
    info: dict[str, set[str]] = loaded[1]
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        others = sorted(info["unexpected_keys"])
        near = [*difflib.get_close_matches(missing[0], others, n=1), *others][:1]
        got = f"; the folder holds {near[0]}, which has no place there" if near else ""
        raise ConfigError(
            f"Expected weights named {missing[0]} in {model}, found none{more}{got}; rename them,"
            " or save the model again with transformers' save_pretrained"
        )
