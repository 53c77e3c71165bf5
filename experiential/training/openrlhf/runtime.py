"""Run both policies on a Ray cluster: vLLM engines generate, DeepSpeed ranks train."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial, wraps
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

from experiential.bank.folder import FolderBank
from experiential.bank.protocol import ForkableBank
from experiential.config import ClusterSettings, Experiment, OptimSettings, PolicyClusterSettings
from experiential.errors import BackendError, CheckpointError, ConfigError, ContextError
from experiential.llm.base import Prompt, SamplingParams
from experiential.llm.models import load_tokenizer, resolve_model
from experiential.llm.request import ChoiceTrie, PromptEncoder, StopFinder
from experiential.llm.vllm import draw_response
from experiential.rollout import make_env
from experiential.sync import EventLoopThread
from experiential.training.losses import Sums, add_sums, means, takes_old
from experiential.training.openrlhf import parts, versions
from experiential.training.openrlhf.bank_actor import BankActor
from experiential.training.openrlhf.causes import shorten
from experiential.training.openrlhf.engines import Engine, Engines
from experiential.training.openrlhf.env_workers import EnvWorkers
from experiential.training.openrlhf.learner import RankStats, Step
from experiential.training.openrlhf.memory import STATE_BYTES
from experiential.training.openrlhf.nodes import APPEARS_S, check_nodes, check_weights
from experiential.training.openrlhf.placement import node_bundles, place
from experiential.training.openrlhf.rank_state import await_files, read_index, write_index
from experiential.training.openrlhf.reservation import PLACED_S, Reservation, reserve
from experiential.training.openrlhf.supervisor import (
    Incarnation,
    LostActorError,
    SilentActorError,
    answers,
    explain,
    is_joined,
    joined_ray,
)
from experiential.training.openrlhf.time_slicing import SharedGpus, Tenant
from experiential.training.packing import deal, draw_batches
from experiential.training.runtime import (
    LossSettings,
    Policies,
    PolicyRuntime,
    Sample,
    TrainStats,
    usable_samples,
)
from experiential.types import Generation

ANSWERS_S = 15.0
"""Time in which the head node of a cluster must answer."""
SLOWEST_DISK = 50e6
"""Bytes a second that a shared file system takes at least, for time-outs; a guess."""
_LOOK_S = 0.5
"""Time between two looks whether ranks have written."""
_FREED_S = 60.0
"""Time in which all ranks must leave a broadcast that one of them gave up."""
M = TypeVar("M", bound=Callable[..., Any])

_FIXED = (
    "engines that share GPUs are not started again alone (cluster.share_gpus); resume the run from"
    " its last checkpoint"
)


def _on_cluster_loop(method: M) -> M:
    """Run a coroutine method on the loop that talks to Ray, whatever loop the caller is on."""

    @wraps(method)
    async def call(self: OpenRLHFRuntime, *args: Any, **kwargs: Any) -> Any:
        work = asyncio.run_coroutine_threadsafe(method(self, *args, **kwargs), self.thread.loop)
        return await asyncio.wrap_future(work)

    return cast("M", call)


@asynccontextmanager
async def _explained() -> AsyncGenerator[None]:
    """Add cause, remedy and log to the error of a remote call."""
    try:
        yield
    except BackendError as error:
        await asyncio.to_thread(explain, error)
        raise


class OpenRLHFRuntime(PolicyRuntime):
    """Generate with the engines and train on the ranks of one policy.

    Engines go on generating while the ranks train; they are held between two tokens while the new
    weights are sent. So a response may begin under one version and end under the next: it is
    recorded with the version that it began under, and the log-probability of each token is that of
    the weights which drew it. Where policies share GPUs, engines do not go on: all requests of a
    policy end before the ranks or the other policy use the GPUs (`time_slicing`).

    ``choices`` and ``json_schema`` restrict responses as those of `VLLM` and `TransformersLLM`.

    Args:
        model: a folder in Hugging Face format, or a hub name.
        tokenizer: of the model.
        settings: sizes of this policy.
        cluster: time-outs and restarts.
        optim: AdamW settings.
        name: role of this policy.
        seed: of engines and ranks.
        reference: keep a frozen copy of the weights on the ranks, for the KL penalty.
        thread: event loop of all calls to Ray; methods may be awaited on any other.
        reservation: GPUs reserved on the cluster; None reserves those of this policy.
        first: index of its first bundle there (`node_bundles`).
        shared: turns on GPUs that both policies share; None where each engine and rank has its own.

    Raises:
        BackendError: the GPUs are not free, or a process did not start.
    """

    def __init__(
        self,
        model: Path | str,
        tokenizer: Any,
        settings: PolicyClusterSettings,
        cluster: ClusterSettings,
        optim: OptimSettings,
        *,
        name: str,
        seed: int,
        reference: bool,
        thread: EventLoopThread,
        reservation: Reservation | None = None,
        first: int = 0,
        shared: SharedGpus | None = None,
    ) -> None:
        self.name, self.settings, self._cluster = name, settings, cluster
        self.tokenizer, self.thread, self._shared = tokenizer, thread, shared
        self._state_s = cluster.call_timeout  # and the time for writing the weights, once ready
        self.version = self._served = 0  # optimiser steps; engines may be one `sync` behind
        self._tokens = 0
        self._training = asyncio.Lock()
        self._train_s, self._seen = 0.0, (time.perf_counter(), 0.0, 0.0)
        full = settings.micro_batch_size * settings.max_length  # what the dry run counts
        self._limit, self._branching = min(full, optim.tokens_per_micro_batch or full), False
        self._stops = StopFinder(tokenizer)
        self._tries = lru_cache(maxsize=1024)(partial(ChoiceTrie, tokenizer=tokenizer))
        self._encode = PromptEncoder(tokenizer, name)
        if reservation is None:
            reservation = reserve(node_bundles(settings), name)
        self._reservation, group = reservation, reservation.group
        self._ranks: list[Any] = []
        if shared is None:
            fixed, nodes = None, settings.nodes
            starts = [
                partial(
                    parts.start_engine, model, settings, group, first + nodes + i, seed=seed + i
                )
                for i in range(settings.engines)
            ]
        else:  # they sleep before the ranks start, because vLLM needs the memory while it starts
            fixed, seconds = _FIXED, cluster.start_timeout
            sleeping = parts.start_sleeping_engines(
                model, settings, group, seed=seed, name=name, seconds=seconds
            )
            starts = [partial(parts.watch_engine, handle) for handle in sleeping]
        reservation.users.add(name)
        named = ((f"{name} engine {i}", start) for i, start in enumerate(starts))
        engines = [Engine(*one, cluster, fixed=fixed) for one in named]
        self._engines = Engines(engines, self._reconnect, together=shared is not None)
        try:
            handles = self._engines.handles
            self._group = parts.start_ranks(
                settings,
                group,
                first,
                shared=shared is not None,
                name=name,
                seconds=cluster.start_timeout,
            )
            self._ranks = parts.handles(self._group)
            self._rank_names = [f"{name} rank {i}" for i in range(len(self._ranks))]
            strategy = parts.strategy(settings, optim, seed=seed, sleeps=shared is not None)
            start = (strategy, str(model), handles, reference)
            self._starting = [rank.start.remote(*start) for rank in self._ranks]
        except BaseException:
            self.close()
            raise
        # Hold shared GPUs for the engines, for the ranks, or for both while weights are sent.
        self._generating = self._computing = self._sending = nullcontext[None]
        if shared is not None:
            serving = Tenant(
                wake=partial(self._engines.wake, "weights", "kv_cache"),
                sleep=partial(self._engines.each, "sleep"),
            )
            learning = Tenant(
                wake=partial(self._all, "reload_states"), sleep=partial(self._all, "offload_states")
            )
            self._generating = partial(shared.slicer.slot, serving, exclusive=False)
            self._computing = partial(shared.slicer.slot, learning, exclusive=True)
            self._sending = partial(shared.sending, serving)

    @_on_cluster_loop
    async def ready(self) -> None:
        """Wait until engines and ranks have started and are connected.

        Raises:
            LostActorError: one died or took longer than ``cluster.start_timeout``.
        """
        async with _explained():
            await self._engines.start()
            found = await answers(self._starting, self._rank_names, self._cluster.start_timeout)
        size, self._branching = found[0]
        self._state_s = self._cluster.call_timeout + STATE_BYTES * size / SLOWEST_DISK
        self.busy()

    @property
    def tokens_processed(self) -> int:
        """Return the number of prompt and response tokens of all generations so far."""
        return self._tokens

    @property
    def restarts(self) -> int:
        """Return how often engines were started again."""
        return sum(engine.restarts for engine in self._engines.engines)

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response on the engine of its session; may be awaited on any event loop.

        Raises:
            ContextError: the prompt does not fit.
            BackendError: no engine could answer.
        """
        sampling = sampling or SamplingParams()
        ids = self._encode(prompt)
        listed = sampling.choices if sampling.pattern is None else None
        trie = self._tries(listed) if listed else None
        room = self.settings.max_length - len(ids)
        if room < (needed := 1 if trie is None else trie.longest):
            raise ContextError(
                f"Expected a prompt of fewer than {self.settings.max_length} tokens, got"
                f" {len(ids)} and at least {needed} to generate; raise"
                f" cluster.{self.name}.max_length"
            )
        return await self._respond(ids, sampling, room, trie)

    @_on_cluster_loop
    async def _respond(
        self, ids: tuple[int, ...], sampling: SamplingParams, room: int, trie: ChoiceTrie | None
    ) -> Generation:
        async with self._generating():
            made = await draw_response(
                partial(self._engines.generate, session=sampling.session),
                ids,
                sampling,
                room,
                trie=trie,
                stops=self._stops,
                policy=self.name,
                policy_version=self._served,
            )
        self._tokens += len(ids) + len(made.response_ids)
        return made

    @_on_cluster_loop
    async def train(self, samples: Sequence[Sample], loss: LossSettings) -> TrainStats:
        """Optimise on ``samples``; the engines serve the old weights until ``sync``.

        An optimiser step takes at most ``batch_size`` samples; where there are more, or
        ``mini_batches`` asks for it, an epoch has several, as in `LocalRuntime`. Ranks compute rows
        of at most ``max_length`` x ``micro_batch_size`` tokens (`deal`). Ratios are taken to
        log-probabilities of the ranks (`takes_old`): in the first step from its own forward pass,
        in later ones from one before it. Empty input changes nothing.
        """
        usable = usable_samples(samples)
        if not usable:
            return TrainStats(version=self.version)
        async with self._training, self._computing():
            begin = time.perf_counter()
            least = -(-len(usable) // self.settings.batch_size)
            count = min(len(usable), max(loss.mini_batches, least))
            epochs = draw_batches(len(usable), count, loss)
            later = sorted(chain(*(epochs[0] if loss.epochs > 1 else epochs[0][1:])))
            takes = [i for i in later if takes_old(usable[i], loss, self.version, exact=False)]
            scored = await self._score([usable[i] for i in takes])
            for i, values in zip(takes, scored, strict=True):
                usable[i] = replace(usable[i], old=values)
            weighted = [s.weighted(count) for s in usable]
            plan: list[tuple[int, list[list[list[int]]]]] = []
            for batch in chain(*epochs):
                part = [weighted[i] for i in batch]
                dealt = await asyncio.to_thread(self._deal, part)
                rows = [[[batch[i] for i in row] for row in rank] for rank in dealt]
                plan.append((sum(len(s.positions) for s in part), rows))
            arguments: list[tuple[Any, ...]] = []
            for rank in range(len(self._ranks)):
                own, steps = _renumber([rows[rank] for _, rows in plan])
                taken = [Step(rows, tokens) for rows, (tokens, _) in zip(steps, plan, strict=True)]
                arguments.append(([weighted[i] for i in own], taken, loss, self.version))
            found: list[RankStats] = await self._each("learn", arguments)
            seconds = time.perf_counter() - begin
            self._train_s += seconds
            updates = len(plan)
            self.version += updates
        sums = Sums()
        for rank in found:
            add_sums(sums, rank.metrics)
        return TrainStats(
            loss=sum(rank.loss for rank in found) / updates,
            grad_norm=found[0].grad_norm / updates,
            samples=len(usable),
            tokens=sum(len(s.positions) for s in usable),
            sequence_tokens=sum(len(s.tokens) for s in usable),
            forwarded_tokens=sum(rank.forwarded_tokens for rank in found),
            updates=updates,
            seconds=seconds,
            version=self.version,
            metrics=means(sums),
        )

    @_on_cluster_loop
    async def score(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return the log-probability in nats of each trained token under the trained weights."""
        usable = [s for s in samples if s.positions]
        async with self._training, self._computing():
            return await self._score(usable)

    async def _score(self, usable: list[Sample]) -> list[tuple[float, ...]]:
        if not usable:
            return []
        dealt = await asyncio.to_thread(self._deal, usable)
        parts = [_renumber([rows]) for rows in dealt]
        arguments = [([usable[i] for i in own], rows) for own, (rows,) in parts]
        found: list[list[tuple[float, ...]]] = await self._each("score", arguments)
        pairs = zip(chain(*(own for own, _ in parts)), chain(*found), strict=True)
        return [values for _, values in sorted(pairs)]

    def _deal(self, samples: list[Sample]) -> list[tuple[tuple[int, ...], ...]]:
        """Return the rows of each rank, as indices of ``samples``; some may be empty."""
        dealt = deal(samples, len(self._ranks), limit=self._limit, branching=self._branching)
        return list(zip(*dealt, strict=True))

    @_on_cluster_loop
    async def sync(self) -> int:
        """Send the trained weights to the engines; requests are held meanwhile, not lost."""
        async with self._training:
            await self._broadcast()
        return self._served

    @_on_cluster_loop
    async def save(self, folder: Path) -> None:
        """Write weights, optimiser state and version; ``load`` may be on other numbers of ranks.

        Raises:
            CheckpointError: this process does not see what the ranks wrote.
        """
        folder = folder.absolute()  # ranks have another working directory
        async with self._computing():
            parts = await self._all("save_state", str(folder), seconds=self._state_s)
        await asyncio.to_thread(await_files, folder, parts, APPEARS_S)
        write_index(folder, parts, {"name": self.name, "version": self.version})

    async def begin_save(self, folder: Path) -> Callable[[], Awaitable[None]]:
        """Copy the state of the ranks into their machines' memory, which write it meanwhile.

        Without ``cluster.background_checkpoints``, all is written before it returns.
        """
        if not self._cluster.background_checkpoints:
            return await super().begin_save(folder)
        return partial(self._written, folder.absolute(), await self._begin_state(folder))

    @_on_cluster_loop
    async def _begin_state(self, folder: Path) -> int:
        async with self._computing():
            await self._all("begin_state", str(folder.absolute()), seconds=self._state_s)
        return self.version

    @_on_cluster_loop
    async def _written(self, folder: Path, version: int) -> None:
        """Wait until all ranks have written their share; they answer between two other calls.

        Raises:
            LostActorError: a rank died meanwhile.
            FailedCallError: one could not write.
            CheckpointError: this process does not see what they wrote.
        """
        until = time.monotonic() + self._state_s
        while not all(parts := await self._all("written_state", seconds=self._state_s)):
            if time.monotonic() > until:
                raise CheckpointError(
                    f"Expected the {self.name}'s ranks to write their state to {folder} within"
                    f" {self._state_s:g} s, got none of it whole; raise cluster.call_timeout"
                )
            await asyncio.sleep(_LOOK_S)
        await asyncio.to_thread(await_files, folder, parts, APPEARS_S)
        write_index(folder, parts, {"name": self.name, "version": version})

    @_on_cluster_loop
    async def load(self, folder: Path) -> None:
        """Restore a state written by ``save``, and send it to the engines."""
        folder = folder.absolute()
        index = read_index(folder)
        async with self._computing():
            await self._all("load_state", str(folder), seconds=self._state_s)
        self.version = int(index["version"])
        await self.sync()

    @_on_cluster_loop
    async def export(self, folder: Path) -> None:
        """Write weights and tokenizer in Hugging Face format."""
        async with self._computing():
            await self._all("export", str(folder.absolute()), seconds=self._state_s)

    def busy(self) -> dict[str, float]:
        """Return the shares of the time since the last call in which engines and ranks worked."""
        now = (time.perf_counter(), self._engines.busy, self._train_s)
        elapsed, engines, ranks = (new - old for new, old in zip(now, self._seen, strict=True))
        self._seen = now
        return {"engines_busy": engines / elapsed, "ranks_busy": ranks / elapsed}

    def close(self) -> None:
        """Kill engines and ranks."""
        ray: Any = import_module("ray")
        self._engines.close()
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks.clear()
        self._reservation.leave(self.name)

    async def _all(self, method: str, *arguments: Any, seconds: float | None = None) -> list[Any]:
        """Call a method in all ranks; see `_each`."""
        return await self._each(method, [arguments] * len(self._ranks), seconds)

    async def _each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float | None = None
    ) -> list[Any]:
        """Call a method in all ranks, each with its own arguments.

        They must answer within ``seconds``, by default ``cluster.call_timeout``.
        """
        calls = zip(self._ranks, arguments, strict=True)
        references = [getattr(rank, method).remote(*own) for rank, own in calls]
        async with _explained():
            seconds = seconds or self._cluster.call_timeout
            return await answers(references, self._rank_names, seconds)

    async def _reconnect(self) -> None:
        """Give engines that were started again the weights of now, between two updates."""
        async with self._training:
            if any(engine.present and not engine.serving for engine in self._engines.engines):
                await self._broadcast()

    async def _broadcast(self) -> None:
        """Send the weights of the ranks; no engine draws a token meanwhile.

        Where an engine is lost, the others get them from the start. Shared GPUs have no room for
        the cache beside the weights of ranks and engines.
        """
        version, engines = self.version, self._engines
        if self._shared is not None:
            async with self._sending():
                await engines.wake("weights")
                try:
                    await self._all("broadcast_to_vllm")
                finally:
                    await engines.wake("kv_cache")
        else:
            try:
                held = await engines.pause()
                while True:
                    try:
                        await self._send(held)
                        break
                    except BackendError:  # of a rank; the cause may be an engine
                        before, held = held, await engines.pause()
                        if held == before:
                            raise
                        await self._freed()
            finally:
                await engines.resume()
        self._served = version

    async def _freed(self) -> None:
        """Wait until all ranks have left a broadcast that one of them could not finish.

        Raises:
            LostActorError: one is held by a collective operation without the others.
        """
        try:
            await self._all("__ray_ready__", seconds=min(_FREED_S, self._cluster.call_timeout))
        except SilentActorError as error:
            raise LostActorError(
                error.who, "waits for ranks that gave up a broadcast when an engine died"
            ) from error

    async def _send(self, actors: list[Incarnation]) -> None:
        """Send the weights to these actors, connected first if they are others than before."""
        if actors != self._engines.connected:
            self._engines.connected = []
            await self._all("reconnect", [actor.handle for actor in actors])
            self._engines.connected = actors
        await self._all("broadcast_to_vllm")
        self._engines.note_weights(actors)


def _renumber(steps: Sequence[Sequence[Sequence[int]]]) -> tuple[list[int], list[list[list[int]]]]:
    """Return which samples some rows hold, and the rows with their places in that list."""
    own = sorted({i for rows in steps for row in rows for i in row})
    place = {i: k for k, i in enumerate(own)}
    return own, [[[place[i] for i in row] for row in rows] for rows in steps]


class ClusterRuntime:
    """Train both policies on a Ray cluster, where environments and the bank may live too.

    Args:
        experiment: everything that defines the run.
        policies: actor and extractor, which stay open; None starts those of the experiment, and
            raises as `build_runtimes`.
        output: folder of the run, which all nodes with GPUs must see.
    """

    def __init__(
        self,
        experiment: Experiment,
        policies: Policies | None = None,
        output: Path | None = None,
    ) -> None:
        self._bank, self._cluster = experiment.bank, experiment.cluster
        self.make_env = make_env  # or one that builds an environment in a worker
        with ExitStack() as opened:  # closes in reverse, also when something below fails
            if policies is None:
                if not is_joined():  # then it is started here, and ended here
                    opened.callback(lambda: joined_ray().shutdown() if is_joined() else None)
                actor, extractor = policies = build_runtimes(experiment, output)
                opened.callback(actor.thread.close)
                opened.callback(extractor.close)
                opened.callback(actor.close)
            self.actor, self.extractor = policies
            if self._cluster.env_workers:
                self.make_env = opened.enter_context(EnvWorkers(self._cluster)).make
            self._opened = opened.pop_all()

    def open_bank(self, folder: Path) -> ForkableBank:
        """Open the run's bank in this process, or with ``cluster.remote_bank`` in a Ray actor."""
        bank = self._bank
        if self._cluster.remote_bank:
            return self._opened.enter_context(BankActor(folder, bank, self._cluster)).bank()
        return FolderBank(folder, **bank.model_dump(include={"namespace", "embedder", "store"}))

    def close(self) -> None:
        """End the bank's actor, the workers, the engines and the ranks that were started here."""
        self._opened.close()


def build_runtimes(
    experiment: Experiment, output: Path | None = None
) -> tuple[OpenRLHFRuntime, OpenRLHFRuntime]:
    """Join or start Ray, look at its nodes, start both policies, and wait until they are ready.

    Raises:
        ConfigError: the versions installed are not those wanted, or a node lacks something.
        ModelNotFoundError: a model cannot be resolved.
        BackendError: an engine or rank did not start.
    """
    versions.check_versions()
    cluster, placement = experiment.cluster, place(experiment)
    join(cluster, placement.gpus)
    second = experiment.extractor_model or experiment.model
    names = dict.fromkeys((experiment.model.name, second.name))
    resolved = {name: resolve_model(name) for name in names}
    check_nodes(cluster, output, list(resolved.values()))
    for one in resolved.values():
        check_weights(one)
    runtimes: list[OpenRLHFRuntime] = []
    with ExitStack() as failed:
        thread = EventLoopThread("cluster")
        failed.callback(thread.close)
        shared = SharedGpus() if cluster.share_gpus else None
        reservation = reserve(placement.bundles, "start", one_node=cluster.share_gpus)
        failed.callback(reservation.leave, "start")  # after the policies have left
        first = 0
        for name, model, sizes, role, seed in (
            ("actor", experiment.model, cluster.actor, experiment.actor, 0),
            ("extractor", second, cluster.extractor, experiment.extractor, 1000),
        ):
            runtime = OpenRLHFRuntime(
                resolved[model.name],
                load_tokenizer(model.name),
                sizes,
                cluster,
                role.optim,
                name=name,
                seed=experiment.seed + seed,
                reference=role.kl > 0,
                thread=thread,
                reservation=reservation,
                first=first,
                shared=shared,
            )
            first += 0 if shared else len(node_bundles(sizes))
            failed.callback(runtime.close)
            runtimes.append(runtime)
            if shared is not None:  # the next one needs the memory that this one starts in
                thread.run(runtime.ready())
        for runtime in runtimes if shared is None else ():
            thread.run(runtime.ready())
        failed.pop_all()
    reservation.leave("start")
    return runtimes[0], runtimes[1]


def join(cluster: ClusterSettings, gpus: int) -> None:
    """Join the Ray cluster of the settings, or start Ray here; a Ray of this process is kept.

    Raises:
        ConfigError: the cluster has fewer than ``gpus`` GPUs or fewer CPUs than are needed, for
            which Ray would wait without end; at once, or after `PLACED_S` where other jobs hold
            them or a node was lost.
    """
    ray: Any = import_module("ray")
    needed = {"GPU": gpus, "CPU": gpus + cluster.env_workers + cluster.remote_bank}
    if not ray.is_initialized():
        if cluster.address is not None:
            _check_address(cluster.address)
            try:
                ray.init(address=cluster.address, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"Expected a Ray cluster at cluster.address={cluster.address}, got:"
                    f" {shorten(error)}; look at it with ray status"
                ) from error
        elif joined := os.environ.get("RAY_ADDRESS"):
            raise ConfigError(
                "Expected no RAY_ADDRESS where a run starts Ray itself (cluster.address=null), got"
                f" {joined}; set cluster.address=auto to join that cluster, or unset RAY_ADDRESS"
            )
        else:
            # "local" leaves another Ray of this machine alone. A CPU is only a place in a queue:
            # offer as many as are needed, on any machine.
            ray.init(
                address="local",
                num_cpus=max(needed["CPU"], os.cpu_count() or 1),
                num_gpus=cluster.gpus,
                include_dashboard=False,
                log_to_driver=False,
            )
    found = _free(ray, needed)
    for kind, count in needed.items():
        if found.get(kind, 0) < count:
            raise ConfigError(
                f"Expected a Ray cluster with {count} free {kind}s, got {found.get(kind, 0):g};"
                " lower cluster.actor and cluster.extractor, add nodes, or end what else runs"
                " there"
            )
    nodes = [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
    largest = max(nodes, default=0.0)
    for role, policy in (("actor", cluster.actor), ("extractor", cluster.extractor)):
        for key, count, who in (
            ("gpus_per_node", policy.gpus_per_node, "ranks of a node"),
            ("tensor_parallel", policy.tensor_parallel, "an engine"),
        ):
            if largest < count:
                raise ConfigError(
                    f"Expected one node with the {count} GPUs of {who} (cluster.{role}.{key}), the"
                    f" largest has {largest:g}; lower it"
                )
    if cluster.share_gpus and largest < gpus:
        raise ConfigError(
            f"Expected one node with the {gpus} GPUs that are shared (cluster.share_gpus), the"
            f" largest has {largest:g}; lower cluster.*.gpus_per_node, or give each policy its own"
            " GPUs (cluster.share_gpus=false)"
        )


def _free(ray: Any, needed: Mapping[str, float]) -> dict[str, float]:
    """Return what the cluster has free, once that is enough or nothing promises more.

    A run that was killed gives its GPUs back some seconds later, and a node that was lost may be
    started again: for both it waits `PLACED_S`.
    """
    until = time.monotonic() + PLACED_S
    while True:
        free: dict[str, float] = ray.available_resources()
        total: dict[str, float] = ray.cluster_resources()
        lost = any(not node["Alive"] for node in ray.nodes())
        enough = all(free.get(kind, 0) >= count for kind, count in needed.items())
        held = all(total.get(kind, 0) >= count for kind, count in needed.items())
        if enough or not (held or lost) or time.monotonic() > until:
            return free
        time.sleep(0.5)


def _check_address(address: str) -> None:
    """Refuse an address at which no gRPC server answers: `ray.init` would wait without end."""
    if not re.fullmatch(r"[^/]+:\d+", address) or os.environ.get("RAY_USE_TLS", "0") != "0":
        return  # auto, and others that Ray looks up
    grpc: Any = import_module("grpc")
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWERS_S)
        except grpc.FutureTimeoutError:
            port = address.rpartition(":")[2]
            raise ConfigError(
                f"Expected Ray's head node at cluster.address={address}, got no answer of Ray"
                f" within {ANSWERS_S:g} s; run ray start --head --port={port} there and open the"
                " port in the firewall; if another program has it (experiential doctor --cluster),"
                " take another port"
            ) from None
