"""Generate with vLLM in this process: for models that are only asked, and beside the trainer."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from experiential.errors import BackendError, ContextError, require
from experiential.llm.base import LLM, SamplingParams, cut_after_stop
from experiential.llm.executor import DeviceExecutor
from experiential.llm.models import load_tokenizer, resolve_device, resolve_model
from experiential.llm.request import ChoiceTrie, PromptEncoder, Request, StopFinder, restriction
from experiential.sync import resolve_futures
from experiential.types import FinishReason, Generation, Prompt

Ask = Callable[[Sequence[int], Any], Awaitable[Any]]
"""Takes prompt ids and vLLM's sampling parameters; gives vLLM's ``CompletionOutput``."""
GRAMMAR = {"backend": "guidance", "disable_any_whitespace": True}
"""vLLM's structured outputs as `Schemas` compiles them, by which the trainer finds again what a
schema allowed.
"""
_CPU_CACHE = 2**30
"""Bytes of key-value states on a CPU, where vLLM would reserve most of the machine's memory."""


async def draw_response(
    ask: Ask,
    ids: tuple[int, ...],
    sampling: SamplingParams,
    room: int,
    *,
    trie: ChoiceTrie | None = None,
    stops: StopFinder,
    **record: Any,
) -> Generation:
    """Draw one response from a vLLM engine, recorded with the log-probabilities of its draws.

    One of some choices takes one request for each branch of their trie; tokens without an
    alternative cost none, and the engine's prefix cache holds what came before.

    Args:
        ask: the engine; its ``logprobs_mode`` is ``processed_logprobs``, and its structured
            outputs are those of `GRAMMAR`.
        ids: the prompt.
        sampling: how to draw.
        room: tokens that the context has left.
        trie: of ``sampling.choices``.
        stops: of the engine's tokenizer.
        record: further fields of the generation.
    """
    record |= {"prompt_ids": ids, "temperature": sampling.temperature or 1.0}
    if trie is not None:
        request = Request(ids, sampling, trie.longest, frozenset(), stops, lambda: 0.0, trie.root)
        while request.finish is None:
            assert request.node is not None
            seed = None if sampling.seed is None else sampling.seed + len(request.response)
            params = sampling_params(sampling, 1, seed, allowed_token_ids=[*request.node.allowed])
            output = await ask((*ids, *request.response), params)
            [token], [drawn] = output.token_ids, output.logprobs
            request.accept(token, drawn[token].logprob)
        return Generation(
            text=request.text(),
            response_ids=tuple(request.response),
            logprobs=tuple(request.logprobs),
            allowed=tuple(request.allowed),
            finish_reason=request.finish,
            **record,
        )
    options = dict[str, Any]()
    if (written := restriction(sampling)) is not None:
        structured: Any = import_module("vllm.sampling_params").StructuredOutputsParams
        pattern = sampling.open_choices()
        form = {"json": written} if pattern is None else {"regex": pattern}
        options = {"structured_outputs": structured(**form)}
    limit = min(sampling.max_tokens, room)
    output = await ask(ids, sampling_params(sampling, limit, sampling.seed, **options))
    response = tuple(output.token_ids)
    drawn = zip(response, output.logprobs, strict=True)
    logprobs = tuple(found[token].logprob for token, found in drawn)
    # vLLM draws forced tokens, too: with probability 1
    pairs = zip(response, logprobs, strict=True)
    forced = tuple((token,) if value == 0.0 else () for token, value in pairs)
    cut = output.finish_reason == "length"
    return Generation(
        text=cut_after_stop(stops.decode([*response]), sampling.stop),
        response_ids=response,
        logprobs=logprobs,
        allowed=None if written is None else forced,
        json_schema=written,
        finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        **record,
    )


def sampling_params(sampling: SamplingParams, limit: int, seed: int | None, **options: Any) -> Any:
    """Return vLLM's parameters of a request of at most ``limit`` tokens, or raise BackendError."""
    try:
        return import_module("vllm").SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=limit,
            seed=None if seed is None else seed % 2**63,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            logprobs=1,
            **options,
        )
    except Exception as error:  # noqa: BLE001  (vLLM's own kinds, which have no common base)
        raise BackendError(f"Expected sampling that vLLM takes, got: {error}") from error


@dataclass(eq=False)
class _Asked:
    """Hold one request of the engine, whose future is resolved once ``output`` is there."""

    ids: Sequence[int]
    params: Any
    priority: int
    future: asyncio.Future[None] = field(default_factory=asyncio.Future[None])
    output: Any = None


class VLLM(LLM):
    """Generate with a vLLM engine in this process, batching all concurrent requests.

    Log-probabilities are vLLM's own, of the distribution drawn from. ``choices`` are drawn as
    `TransformersLLM` draws them, and ``json_schema`` has the same compact form. A seed makes a
    response repeatable as far as vLLM's kernels do not depend on the batch.

    The one caveat: vLLM seeds torch and, on a CPU, fixes the number of its threads for the process.

    Args:
        model: a name that ``resolve_model`` knows.
        dtype: of the weights and the computation; auto leaves it to vLLM.
        device: auto, cpu or cuda; vLLM is built for one of them.
        gpu_memory: share of the GPU's memory for weights, activations and key-value states.
        sleeps: `sleep` frees that memory; one engine of a process can.
        executor: thread that runs the engine, shared with what trains on the device; by default
            its own.
        name: name of the policy, recorded in each ``Generation``.
        options: further arguments of vLLM's ``EngineArgs``.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        gpu_memory: float = 0.9,
        sleeps: bool = False,
        executor: DeviceExecutor | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        require("vllm", "vllm")
        if not 0 < gpu_memory <= 1:
            raise ValueError(f"Expected gpu_memory between 0 and 1, got {gpu_memory}")
        self.name, self.version, self.tokens = name or model, 0, 0
        self.tokenizer = load_tokenizer(model)
        self.executor = executor or DeviceExecutor(self.name)
        self._owns_executor, self._closed, self._asleep = executor is None, False, False
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._waiting: list[_Asked] = []
        self._running: dict[str, _Asked] = {}
        self._scheduled = False
        self._stops = StopFinder(self.tokenizer)
        self._tries = lru_cache(maxsize=1024)(partial(ChoiceTrie, tokenizer=self.tokenizer))
        where = str(resolve_model(model))
        start = partial(_start, where, dtype, resolve_device(device), gpu_memory, sleeps, options)
        try:
            self._engine, self._sleeps = self.executor.submit(start).result()
        except BaseException:
            if self._owns_executor:
                self.executor.close()
            raise
        config = self._engine.model_config
        self._context: int = config.max_model_len
        self.encode = PromptEncoder(self.tokenizer, self.name, config.get_vocab_size())

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response; concurrent calls, from any event loops, are decoded together."""
        if self._closed:
            raise BackendError(f"Expected an open backend, got {self.name!r} after close()")
        sampling = sampling or SamplingParams()
        ids = self.encode(prompt)
        listed = sampling.choices if sampling.pattern is None else None
        trie = None if listed is None else self._tries(listed)
        needed = 1 if trie is None else trie.longest
        if not ids or len(ids) + needed > self._context:
            raise (ContextError if ids else BackendError)(
                f"Expected a prompt of at least one token that fits the context of {self._context}"
                f" tokens with its response, got one of {len(ids)} tokens and at least {needed} to"
                " generate; shorten the prompt"
            )
        made = await draw_response(
            partial(self._ask, sampling.priority),
            ids,
            sampling,
            self._context - len(ids),
            trie=trie,
            stops=self._stops,
            policy=self.name,
            policy_version=self.version,
        )
        self.tokens += len(ids) + len(made.response_ids)
        return made

    def sleep(self) -> None:
        """Free the engine's memory until the next request; call it on the executor's thread.

        Weights go to the machine's memory, key-value states are dropped, and the requests that are
        running compute theirs again.
        """
        if self._sleeps and not self._asleep:
            self._asleep = True
            self._engine.sleep(1, mode="keep")

    def load_weights(self, weights: Iterator[tuple[str, Any]], version: int) -> None:
        """Replace all weights, named as in a checkpoint; call it on the executor's thread."""
        self._wake()
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._engine.apply_model(_pack_head)
        # the states of the old weights are of no use, also not to the requests that are running
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self.version = version

    def close(self) -> None:
        """Refuse further requests and end the engine; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with suppress(BackendError):  # a shared executor that is closed already
            self.executor.submit(self._engine.engine_core.shutdown).result()
        if self._owns_executor:
            self.executor.close()

    def _wake(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False

    async def _ask(self, priority: int, ids: Sequence[int], params: Any) -> Any:
        asked = _Asked(ids, params, priority)
        with self._lock:
            self._waiting.append(asked)
            start, self._scheduled = not self._scheduled, True
        if start:
            self._plan()
        await asked.future
        if asked.output.finish_reason not in ("stop", "length"):
            raise BackendError(f"Expected a response of vLLM, got {asked.output.finish_reason}")
        return asked.output

    def _plan(self, last: Future[None] | None = None) -> None:
        """Submit the engine's next step; one that failed fails the requests that it touched."""
        failure: BackendError | None = None
        if last is not None and last.cancelled():
            failure = BackendError("Expected an open executor, got one closed during requests")
        elif last is not None and (error := last.exception()) is not None:
            failure = BackendError(f"Expected a step of vLLM, got {type(error).__name__}: {error}")
        with self._lock:
            failed = [*self._running.values()] if failure else []
            if failure:
                self._running = {}
            left = [*self._running.values(), *self._waiting]
            self._scheduled = bool(left)
        resolve_futures((asked.future for asked in failed), failure)
        if not left:
            return
        try:
            step = self.executor.submit(self._step, priority=min(one.priority for one in left))
        except BackendError as closed:
            with self._lock:
                self._running, self._waiting, self._scheduled = {}, [], False
            return resolve_futures((asked.future for asked in left), closed)
        step.add_done_callback(self._plan)

    def _step(self) -> None:
        """Hand over the requests that have arrived, and compute one forward of the batch."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        self._wake()
        for asked in taken:
            name = str(next(self._ids))
            self._running[name] = asked
            prompt = {"prompt_token_ids": [*asked.ids]}
            try:
                self._engine.add_request(name, prompt, asked.params, priority=asked.priority)
            except Exception as error:  # noqa: BLE001  (the request's fault, so its caller's)
                del self._running[name]
                refused = BackendError(f"Expected a request that vLLM takes, got: {error}")
                resolve_futures([asked.future], refused)
        left = [name for name, asked in self._running.items() if asked.future.cancelled()]
        if left:
            self._engine.abort_request(left)
            for name in left:
                del self._running[name]
        done: list[_Asked] = []
        try:
            outputs = self._engine.step()
        except Exception:
            self._engine.abort_request([*self._running])  # or it would try them again and again
            raise
        for found in outputs:
            if found.finished and found.request_id in self._running:
                done.append(self._running.pop(found.request_id))
                done[-1].output = found.outputs[0]
        resolve_futures(asked.future for asked in done)


def _start(
    model: str,
    dtype: str,
    device: str,
    gpu_memory: float,
    sleeps: bool,
    options: Mapping[str, Any],
) -> tuple[Any, bool]:
    """Return an engine in this process, and whether it can sleep."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_NO_USAGE_STATS", "1")):
        os.environ.setdefault(name, value)
    if device == "cpu":  # leave the process's threads where they are
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    arguments: Any = import_module("vllm.engine.arg_utils").EngineArgs
    engine: Any = import_module("vllm.v1.engine.llm_engine").LLMEngine
    platform: Any = import_module("vllm.platforms").current_platform
    if platform.device_type != device.partition(":")[0]:
        raise BackendError(
            f"Expected vLLM for {device}, got one for {platform.device_type}; install the other"
            f" build, or set device={platform.device_type}"
        )
    sleeps = sleeps and platform.is_sleep_mode_available()
    chosen: dict[str, Any] = {
        "dtype": dtype,
        "seed": random.SystemRandom().randrange(2**31),
        "gpu_memory_utilization": gpu_memory,
        "enable_sleep_mode": sleeps,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        # a step is whole when it returns, so that sleep and new weights come between two
        "async_scheduling": False,
        "structured_outputs_config": GRAMMAR,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if device == "cpu":
        # Compiled code would keep the weights that it was made with, and vLLM rewinds the generator
        # of a seeded request whose prompt it read in parts, which generators of a CPU refuse.
        chosen |= {"enforce_eager": True, "enable_chunked_prefill": False}
        chosen["kv_cache_memory_bytes"] = _CPU_CACHE
    with _random_states_kept():
        made = engine.from_engine_args(arguments(model=model, **chosen | dict(options)))
    return made, sleeps


def _pack_head(model: Any) -> None:
    """Pack the head again: vLLM forgets a tied one, which a CPU computes with a copy of its own."""
    head = getattr(model, "lm_head", None)
    if head is not None and import_module("vllm.platforms").current_platform.is_cpu():
        head.quant_method.process_weights_after_loading(head)


@contextmanager
def _random_states_kept() -> Generator[None]:
    """Give Python, NumPy and torch their random states back, which vLLM seeds for the process."""
    import numpy as np
    import torch

    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
