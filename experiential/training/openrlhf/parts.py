"""Touch OpenRLHF here and nowhere else: engines, rank groups, policy actor and their arguments.

OpenRLHF 0.11.2 is written as a program: its parser exists only while that program runs, its
trainers are bound to a data set of prompts, and its classes are already Ray actors. docs/cluster.md
lists the parts used with file and line.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from experiential.config import OptimSettings, PolicyClusterSettings
from experiential.errors import BackendError
from experiential.llm.vllm import GRAMMAR
from experiential.training.openrlhf.causes import shorten
from experiential.training.openrlhf.learner import Learner, RankStats, Step
from experiential.training.openrlhf.rank_state import BackgroundWriter, load_state, save_state
from experiential.training.openrlhf.supervisor import Incarnation, LostActorError, explain
from experiential.training.runtime import LossSettings, Sample

_FAR = 1_000_000_000
"""Steps of a learning-rate schedule that never ends: the rate is constant."""
_CALLS = 100_000
"""Calls that an engine may have open: more than episodes will ever ask it. With Ray's 1,000, those
to a held engine leave no place for the call that ends the hold.
"""
_LOOK_S = 1.0
"""Time between two looks whether vLLM's engine process lives, while it does not answer."""
_WATCHED = (
    "init_process_group", "update_weight", "reset_prefix_cache", "pause_generation",
    "resume_generation", "sleep", "update_weight_cuda_ipc", "wake_up",
)  # fmt: skip
_WATCHDOG = """
import os, signal, sys
processes = [os.pidfd_open(int(pid)) for pid in sys.argv[1:]]
if os.fork():
    os._exit(0)  # no child of the actor, whose children Ray ends with it
sys.stdin.read()
for process in processes:
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
_SHARE = 0.2
"""Part of a GPU and of a CPU that OpenRLHF reserves for an engine in a shared group: a number for
Ray's accounts, not a limit.
"""


def strategy(
    settings: PolicyClusterSettings, optim: OptimSettings, *, seed: int, sleeps: bool
) -> Any:
    """Return OpenRLHF's DeepSpeed strategy, which is sent to the ranks of one policy.

    It holds the nested namespace of arguments that OpenRLHF's parts read.

    Args:
        settings: sizes of this policy.
        optim: AdamW with a constant rate.
        seed: of torch on every rank.
        sleeps: engines and ranks share GPUs by time-slicing.
    """
    space, ranks = SimpleNamespace, settings.nodes * settings.gpus_per_node
    adam = space(lr=optim.lr, betas=list(optim.betas), eps=1e-8, weight_decay=optim.weight_decay)
    # Most of these are read somewhere in OpenRLHF although nothing here uses the feature.
    actor = space(
        num_nodes=settings.nodes, num_gpus_per_node=settings.gpus_per_node, eps_clip=0.2,
        eps_clip_low_high=[0.2, 0.2], dual_clip=None, loss_agg_mode="token-mean",
        policy_loss_type="ppo", aux_loss_coef=0.0, entropy_coef=None, optim="adam", adam=adam,
        muon=space(lr=0.0, momentum=0.0), lr_scheduler="constant", lr_warmup_ratio=0.0,
        min_lr_ratio=1.0, max_norm=optim.max_grad_norm,
        gradient_checkpointing_enable=settings.gradient_checkpointing,
        gradient_checkpointing_reentrant=False, freeze_visual_encoder=False,
    )  # fmt: skip
    ds = space(
        zero_stage=settings.zero_stage, param_dtype="bf16",
        attn_implementation=settings.attention, experts_implementation=None, load_in_4bit=False,
        lora=space(rank=0, alpha=16, dropout=0.0, target_modules=None), packing_samples=False,
        use_liger_kernel=False, enable_sleep=sleeps, tensor_parallel_size=1, ring_attn_size=1,
        ring_attn_head_stride=1, adam_offload=settings.offload_optimizer, zpg=1,
        use_universal_ckpt=False, grad_accum_dtype=None, overlap_comm=False, deepcompile=False,
    )  # fmt: skip
    advantage = space(
        is_correction_level="off", is_correction_mode="mask", is_correction_gating="ratio",
        is_correction_threshold=[0.5, 5.0],
    )  # fmt: skip
    arguments = space(
        local_rank=-1, max_norm=optim.max_grad_norm, actor=actor, ds=ds,
        algo=space(advantage=advantage, kl=space(use_loss=False, init_coef=0.0)),
        ckpt=space(path="", output_dir="", load_enable=False, save_hf=False, disable_ds=True),
        data=space(disable_fast_tokenizer=False),
        rollout=space(temperature=1.0, batch_size=ranks, n_samples_per_prompt=1),
        train=space(
            seed=seed, full_determinism_enable=False, max_epochs=1, enable_ema=False,
            # one row a rank and step for DeepSpeed: the learner says where its steps end
            batch_size=ranks, micro_batch_size=1,
            ema_beta=0.0, dynamic_batch_enable=False, max_tokens_per_gpu=None,
            colocate_all=sleeps, async_enable=not sleeps,
        ),
        vllm=space(
            num_engines=settings.engines, tensor_parallel_size=settings.tensor_parallel,
            sync_backend="nccl", sync_with_ray=False, enable_prefix_caching=True,
        ),
    )  # fmt: skip
    return import_module("openrlhf.utils").get_strategy(arguments)


def start_engine(
    model: Path | str, settings: PolicyClusterSettings, group: Any, bundle: int, *, seed: int
) -> Incarnation:
    """Start one vLLM engine on all GPUs of one bundle; return at once, while it starts."""
    return watch_engine(_create_engine(model, settings, seed, group, bundle, shared=False))


def watch_engine(handle: Any) -> Incarnation:
    """Watch over an engine that starts."""
    end = partial(import_module("ray").kill, handle)
    return Incarnation(handle, handle.get_num_unfinished_requests.remote(), end)


def start_sleeping_engines(
    model: Path | str,
    settings: PolicyClusterSettings,
    group: Any,
    *,
    seed: int,
    name: str,
    seconds: float,
) -> list[Any]:
    """Start all vLLM engines of one policy in a shared group; return once they sleep.

    Engines take the bundles of ``group`` in order, and seeds from ``seed`` on.

    Raises:
        BackendError: one did not start, or took longer than ``seconds``.
    """
    ray: Any = import_module("ray")
    engines = [
        _create_engine(model, settings, seed + i, group, i * settings.tensor_parallel, shared=True)
        for i in range(settings.engines)
    ]
    try:
        ray.get([engine.sleep.remote() for engine in engines], timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise BackendError(
            f"Expected the engines of the {name} to start within {seconds:g} s"
            " (cluster.start_timeout)"
        ) from None
    except ray.exceptions.RayError as error:
        failed = BackendError(
            f"Expected the engines of the {name} to start and fall asleep, got: {shorten(error)}"
        )
        failed.__cause__ = error
        explain(failed)
        raise failed from error
    return engines


def engine_options(
    model: Path | str, settings: PolicyClusterSettings, *, seed: int, sleeps: bool
) -> dict[str, Any]:
    """Return the arguments of one vLLM engine."""
    executor = "uni"
    if settings.tensor_parallel > 1:  # with "ray", each worker needs a bundle of its own
        executor = "ray" if sleeps else "mp"
    return settings.vllm | {
        "model": str(model),
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "seed": seed,
        "max_model_len": settings.max_length,
        "gpu_memory_utilization": settings.gpu_memory,
        "enable_prefix_caching": True,
        "enable_sleep_mode": sleeps,
        "tensor_parallel_size": settings.tensor_parallel,
        "distributed_executor_backend": executor,
        "worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "structured_outputs_config": GRAMMAR,
    }


def _create_engine(
    model: Path | str,
    settings: PolicyClusterSettings,
    seed: int,
    group: Any,
    first: int,
    *,
    shared: bool,
) -> Any:
    """Create OpenRLHF's actor of one engine in a placement group.

    It is created here and not by OpenRLHF, which waits for the GPUs without a time-out, keeps the
    group to itself and passes few arguments on to vLLM.

    Args:
        model: a folder in Hugging Face format, or a hub name.
        settings: sizes of its policy.
        seed: of its draws.
        group: reserved for the run.
        first: index of its bundle, or of its first one where ``shared``.
        shared: the GPUs are shared by time-slicing, and each bundle is one GPU.
    """
    width = settings.tensor_parallel
    reserved, bundles = width, None
    if shared:  # vLLM's workers reserve the GPUs of a wider engine
        reserved = _SHARE if width == 1 else 0
        bundles = list(range(first, first + width)) if width > 1 else None
    scheduling: Any = import_module("ray.util.scheduling_strategies")
    strategy = scheduling.PlacementGroupSchedulingStrategy(
        placement_group=group,
        placement_group_capture_child_tasks=True,
        placement_group_bundle_index=first,
    )
    options: dict[str, Any] = {"num_cpus": reserved, "num_gpus": reserved}
    options |= {"scheduling_strategy": strategy, "max_concurrency": _CALLS}
    return (
        _engine_actor()
        .options(**options)
        .remote(
            **engine_options(model, settings, seed=seed, sleeps=shared),
            num_gpus=_SHARE if shared else 1,
            bundle_indices=bundles,
        )
    )


def _engine_actor() -> Any:
    """Return OpenRLHF's engine actor, extended for the death of one of its two processes.

    When vLLM's engine process has died, calls fail; vLLM itself leaves those without an answer that
    were under way, except for ``generate``. When the actor dies, it takes the engine process and
    its workers along, which would otherwise hold the GPU memory that the next engine needs.
    """
    module = import_module("openrlhf.trainer.ray.vllm_engine")
    base: Any = module.RolloutRayActor.__ray_metadata__.modified_class

    async def start(self: Any, *arguments: Any, **named: Any) -> None:
        await base.__init__(self, *arguments, **named)
        psutil: Any = import_module("psutil")  # vLLM has it
        engines = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
        workers = [worker for engine in engines for worker in engine.children(recursive=True)]
        self.watchdog = subprocess.Popen(  # kept: the end of its stdin is the actor's end
            [sys.executable, "-c", _WATCHDOG, *(str(one.pid) for one in (*engines, *workers))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self.watchdog.wait()  # until it watches

    def watched(name: str) -> Any:
        async def method(self: Any, *arguments: Any, **named: Any) -> Any:
            call = asyncio.ensure_future(getattr(base, name)(self, *arguments, **named))
            while not (await asyncio.wait([call], timeout=_LOOK_S))[0]:
                if self.llm.errored:
                    call.cancel()
                    raise self.llm.dead_error
            return call.result()

        return method

    methods = {"__init__": start} | {name: watched(name) for name in _WATCHED}
    return import_module("ray").remote(type("RolloutEngine", (base,), methods))


def start_ranks(
    settings: PolicyClusterSettings,
    group: Any,
    first: int,
    *,
    shared: bool,
    name: str,
    seconds: float,
) -> Any:
    """Start the DeepSpeed ranks of one policy, one on each GPU, as a ``RayActorGroup``.

    Args:
        settings: sizes of the policy.
        group: reserved for the run.
        first: index of its first bundle; each holds the ranks of one node.
        shared: the GPUs are shared by time-slicing, and each bundle is one GPU.
        name: of the policy, for errors.
        seconds: time in which rank 0 must tell its address.

    Raises:
        LostActorError: it did not.
    """
    base: Any = import_module("openrlhf.trainer.ray.launcher").RayActorGroup
    sizes = settings.nodes, settings.gpus_per_node
    if shared:
        return base(*sizes, _rank_actor(), pg=group, num_gpus_per_actor=_SHARE)
    ray: Any = import_module("ray")
    scheduling: Any = import_module("ray.util.scheduling_strategies")

    class Ranks(base):
        """Start the ranks of a node in one bundle; OpenRLHF's may be divided among nodes."""

        def _initiate_actors(self, pg: Any, num_gpus_per_actor: float) -> None:
            size = settings.nodes * settings.gpus_per_node

            def start(rank: int, *address: Any) -> Any:
                strategy = scheduling.PlacementGroupSchedulingStrategy(
                    placement_group=pg,
                    placement_group_bundle_index=first + rank // settings.gpus_per_node,
                )
                return self.ray_actor_type.options(
                    num_cpus=1, num_gpus=num_gpus_per_actor, scheduling_strategy=strategy
                ).remote(size, rank, *address)

            self._actor_handlers = [start(0, None, None)]
            if size > 1:
                asked = self._actor_handlers[0].get_master_addr_port.remote()
                try:
                    address = ray.get(asked, timeout=seconds)
                except ray.exceptions.RayError as error:
                    failed = LostActorError(f"{name} rank 0", f"did not start: {shorten(error)}")
                    failed.__cause__ = error
                    explain(failed)
                    raise failed from error
                self._actor_handlers += [start(rank, *address) for rank in range(1, size)]

    return Ranks(*sizes, _rank_actor(), pg=group)


def handles(group: Any) -> list[Any]:
    """Return the Ray handles of a group's ranks, in order."""
    return list(group._actor_handlers)


class _RankMethods:
    """Extend OpenRLHF's policy actor, one DeepSpeed rank of a policy.

    Attributes declared without a value are OpenRLHF's.
    """

    trainer: Any
    strategy: Any
    actor: Any
    tokenizer: Any
    init_model_from_pretrained: Any
    _rank: int
    _world_size: int

    def start(
        self, strategy: Any, model: str, engines: list[Any], reference: bool
    ) -> tuple[int, bool]:
        """Load the model, join the other ranks, and connect rank 0 with the engines.

        Returns the number of the model's parameters, and whether its rows may branch.
        """
        self.init_model_from_pretrained(strategy, model, max_steps=_FAR, vllm_engines=engines)
        frozen = None
        if reference:
            attention = self.strategy.args.ds.attn_implementation
            config = self.strategy.get_ds_eval_config()
            made = import_module("openrlhf.models").Actor(
                model, attn_implementation=attention, ds_config=config
            )
            frozen = self.strategy.prepare(made)
            frozen.eval()
        engine, self.writer = self.actor.model, BackgroundWriter()
        self.learner = Learner(
            engine,
            self.tokenizer,
            ranks=self._world_size,
            reference=None if frozen is None else frozen.model,
        )
        # Under ZeRO 3 a parameter has its own size only while it is gathered.
        size = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        return size, self.learner.branching

    def learn(
        self, samples: Sequence[Sample], steps: Sequence[Step], settings: LossSettings, version: int
    ) -> RankStats:
        found = self.learner.learn(samples, steps, settings, version)
        import_module("torch").cuda.empty_cache()  # for the weights that are gathered to be sent
        return found

    def score(
        self, samples: Sequence[Sample], rows: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        return self.learner.score(samples, rows)

    def reconnect(self, engines: list[Any]) -> None:
        """Send weights to these engines from now on."""
        self.trainer.vllm_engines = engines
        self.strategy.args.vllm.num_engines = len(engines)
        if self.strategy.is_rank_0() and not self.trainer.use_cuda_ipc:
            self.trainer._init_vllm_sync_group(self.strategy.args.vllm.sync_backend)

    def save_state(self, folder: str) -> dict[str, Any]:
        rank, ranks = self._rank, self._world_size
        return save_state(self.actor.model, Path(folder), rank=rank, ranks=ranks)

    def begin_state(self, folder: str) -> None:
        """Copy the state and write it in the background, until `written_state` has the result."""
        rank, ranks = self._rank, self._world_size
        self.writer.begin(self.actor.model, Path(folder), rank=rank, ranks=ranks)

    def written_state(self) -> dict[str, Any] | None:
        return self.writer.part()

    def load_state(self, folder: str) -> dict[str, Any]:
        return load_state(self.actor.model, Path(folder))

    def export(self, folder: str) -> None:
        self.strategy.save_model(self.actor, self.tokenizer, folder)


def _rank_actor() -> Any:
    """Return OpenRLHF's policy actor with `_RankMethods`, as a Ray actor class."""
    module = import_module("openrlhf.trainer.ray.ppo_actor")
    base: Any = module.PolicyModelActor.__ray_metadata__.modified_class
    return import_module("ray").remote(num_gpus=1)(type("PolicyRank", (_RankMethods, base), {}))
