"""A backend on torch and transformers in this process, for CPU or one GPU."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

from experiential.config import ModelSettings
from experiential.errors import BackendError, MissingExtraError
from experiential.llm.base import LLM, Prompt, SamplingParams, is_token_prompt
from experiential.llm.executor import DeviceExecutor
from experiential.llm.grammar import Schemas, canonical
from experiential.llm.prefix_cache import PrefixCache
from experiential.llm.request import Request, StopFinder, response_limit
from experiential.llm.trie import choice_trie
from experiential.types import Generation, Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersLLM(LLM):
    """Generates with a causal language model loaded here, with continuous batching over all concurrent requests.

    Log-probabilities are exactly those of the distribution drawn from (temperature, top-k, top-p
    and choices included, renormalised); for greedy decoding they are those at temperature 1. Tokens
    forced by ``choices`` or ``json_schema`` have log-probability 0 and cost no forward of their
    own. Identical prompts are forwarded once, and beginnings that several share, or that were seen
    before, too. ``max_tokens`` is cut to what the context holds, and does not apply to ``choices``.

    The one caveat: a request that is decoding while the weights change goes on with the states it
    has; its log-probabilities stay those it was sampled with, and its version is the one it started
    with.

    Args:
        model: a name that ``resolve_model`` knows, or a loaded model (then ``tokenizer`` is
            needed).
        tokenizer: its tokenizer; pads on the left from now on.
        dtype: used when ``model`` is a name.
        device: used when ``model`` is a name; auto, cpu, cuda, cuda:1 ...
        max_batch: sequences decoded together, per priority.
        prefix_cache_tokens: tokens of key-value states kept for reuse; 0 turns the cache off.
        executor: where the model runs; give the same executor to all policies on one device. One of its own
            by default.
        adapter: peft adapter to activate before each forward, so that two policies can share one
            base.
        name: name of the policy, recorded in each ``Generation``.
        version: optimiser steps the weights have seen.
        batch_wait: seconds without a new request after which the ones that have come are started.

    Raises:
        MissingExtraError: torch or transformers is not installed.
        ModelNotFoundError: the name or folder cannot be resolved.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | Any,
        tokenizer: Any = None,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str = "auto",
        max_batch: int = 64,
        prefix_cache_tokens: int = 65536,
        executor: DeviceExecutor | None = None,
        adapter: str | None = None,
        name: str | None = None,
        version: int = 0,
        batch_wait: float = 0.002,
    ) -> None:
        for package in ("torch", "transformers"):
            if find_spec(package) is None:
                raise MissingExtraError(package, "local")
        from experiential.llm.engine import Engine
        from experiential.llm.forward import ForwardPass, LLMStats

        if max_batch <= 0 or batch_wait < 0:
            raise ValueError(
                f"Expected max_batch > 0 and batch_wait >= 0, got {max_batch} and {batch_wait}"
            )
        self.model, self._tokenizer = _loaded(model, tokenizer, dtype, device)
        self._tokenizer.padding_side = "left"
        self.name = name or (model if isinstance(model, str) else type(model).__name__)
        self.version = version
        self.adapter = adapter
        self.stats = LLMStats()
        self.executor = executor or DeviceExecutor(self.name)
        self._owns_executor = executor is None
        self._epoch = 0
        self._closed = False
        self._eos, pad = _special_tokens(self.model, self._tokenizer)
        self._stops = StopFinder(self._tokenizer)
        self._render = lru_cache(maxsize=512)(self._render_now)
        self._draws = _Draws()
        self._cache = PrefixCache(prefix_cache_tokens)
        forward = ForwardPass(self.model, pad=pad, adapter=adapter, stats=self.stats)
        self._context, self._vocabulary = forward.context, forward.vocabulary
        self._engine = Engine(
            forward,
            self.executor,
            max_batch=max_batch,
            batch_wait=batch_wait,
            cache=self._cache,
            version=lambda: (self.version, self._epoch),
        )

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self._tokenizer

    @cached_property
    def schemas(self) -> Schemas:
        """What restricts responses to a JSON schema; made when it is first asked for, which takes about a second."""
        return Schemas(self._tokenizer, self._vocabulary)

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response; concurrent calls, from any event loops, are decoded together.

        Raises:
            BackendError: the prompt does not fit the context, the model failed, or the backend is
                closed.
        """
        if self._closed:
            raise BackendError(f"Expected an open backend, got {self.name!r} after close()")
        sampling = sampling or SamplingParams()
        ids = self.encode(prompt)
        trie = None if sampling.choices is None else choice_trie(sampling.choices, self._tokenizer)
        limit = response_limit(len(ids), sampling, trie, self._context)
        schema = (
            None
            if sampling.json_schema is None or trie
            else self.schemas.start(canonical(sampling.json_schema))
        )
        request = Request(
            ids,
            sampling,
            limit,
            self._eos,
            self._stops,
            self._draws.uniform(sampling.seed),
            trie,
            schema,
        )
        if request.finish is None:
            request.future = asyncio.get_running_loop().create_future()
            self._engine.submit(request)
            await request.future
        else:
            request.version = self.version
        self._count(request)
        return self._generation(request)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt: messages through the chat template, token ids as they are."""
        if is_token_prompt(prompt):
            ids = tuple(cast("Sequence[int]", prompt))
            if min(ids) < 0 or max(ids) >= self._vocabulary:
                raise BackendError(
                    f"Expected token ids from 0 to {self._vocabulary - 1}, got {min(ids)} to"
                    f" {max(ids)}"
                )
            return ids
        return self._render(
            tuple(
                (message["role"], message["content"])
                for message in cast("Sequence[Message]", prompt)
            )
        )

    def weights_changed(self, version: int) -> None:
        """Tell that the weights are now those of ``version``: key-value states of the old ones are not used again."""
        self.version = version
        self._epoch += 1

    def close(self) -> None:
        """Refuse further requests, and end the executor if it is this backend's own; safe to call twice."""
        self._closed = True
        if self._owns_executor:
            self.executor.close()
            self._cache.clear()
        else:
            with contextlib.suppress(BackendError):  # a shared executor that is closed already
                self.executor.submit(self._cache.clear)

    def _render_now(self, messages: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
        if not messages:
            return ()
        if not self._tokenizer.chat_template:
            raise BackendError(
                "Expected a tokenizer with a chat template to render messages, got one without for"
                f" {self.name!r}; send token ids"
            )
        chat = [{"role": role, "content": content} for role, content in messages]
        return tuple(
            self._tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def _count(self, request: Request) -> None:
        self.stats.requests += 1
        self.stats.prompt_tokens += len(request.prompt)
        self.stats.generated_tokens += len(request.response)

    def _generation(self, request: Request) -> Generation:
        assert request.finish is not None
        return Generation(
            text=request.text(),
            prompt_ids=request.prompt,
            response_ids=tuple(request.response),
            logprobs=tuple(request.logprobs),
            allowed=(
                None if request.trie is None and request.schema is None else tuple(request.allowed)
            ),
            json_schema=(
                None
                if request.schema is None or not request.sampling.json_schema
                else canonical(request.sampling.json_schema)
            ),
            policy=self.name,
            policy_version=request.version,
            finish_reason=request.finish,
            temperature=request.temperature,
        )


class _Draws:
    """Random numbers per request: a generator of its own when it has a seed, one shared by the others."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._shared = torch.Generator()
        self._shared.seed()

    def uniform(self, seed: int | None) -> Callable[[], float]:
        """A source of numbers in [0, 1) with 53 random bits."""
        generator = (
            self._shared if seed is None else self._torch.Generator().manual_seed(seed % 2**63)
        )

        return lambda: self._torch.rand((), dtype=self._torch.float64, generator=generator).item()


def _loaded(
    model: Any, tokenizer: Any, dtype: Literal["float32", "bfloat16"], device: str
) -> tuple[Any, Any]:
    if not isinstance(model, str):
        if tokenizer is None:
            raise ValueError("Expected a tokenizer with a loaded model, got None; pass tokenizer=")
        return model, tokenizer
    from experiential.llm.models import load_model

    loaded, found = load_model(ModelSettings(name=model, dtype=dtype, device=device))
    return loaded, found if tokenizer is None else tokenizer


def _special_tokens(model: Any, tokenizer: Any) -> tuple[frozenset[int], int]:
    """Tokens that end a response, and the one to pad with (eos when there is none)."""
    listed: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends: set[int | None] = {
        tokenizer.eos_token_id,
        *(cast("list[int]", listed) if isinstance(listed, list) else [listed]),
    }
    eos = frozenset(token for token in ends if token is not None)
    if not eos:
        raise BackendError(
            "Expected a tokenizer or model with an end-of-turn token, got none; set"
            " tokenizer.eos_token"
        )
    pad: int | None = tokenizer.pad_token_id
    return eos, min(eos) if pad is None else pad
