"""Generate with torch and transformers in this process, on the CPU or one GPU."""

from __future__ import annotations

import contextlib
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

from experiential.config import ModelSettings
from experiential.errors import BackendError, ContextError, require
from experiential.llm.base import LLM, SamplingParams
from experiential.llm.executor import DeviceExecutor
from experiential.llm.request import (
    ChoiceTrie,
    PromptEncoder,
    Request,
    Schemas,
    StopFinder,
    restriction,
)
from experiential.types import Generation, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersLLM(LLM):
    """Generate with a causal language model loaded here, batching all concurrent requests.

    Log-probabilities are exactly those of the distribution drawn from (temperature, top-k, top-p
    and choices included, renormalised); for greedy decoding they are those at temperature 1. Tokens
    forced by ``choices`` or ``json_schema`` have log-probability 0 and cost no forward of their
    own. Identical prompts are forwarded once, and shared or earlier beginnings too. ``max_tokens``
    is cut to the context, and does not apply to ``choices``.

    The one caveat: a request that is decoding while the weights change goes on with its old
    key-value states; its version is the one it started with.

    Args:
        model: a name that ``resolve_model`` knows, or a loaded model (then ``tokenizer`` is
            needed).
        tokenizer: its tokenizer; pads on the left from now on.
        dtype: used when ``model`` is a name.
        device: used when ``model`` is a name; auto, cpu, cuda, cuda:1 ...
        max_batch: sequences decoded together, per priority.
        prefix_cache_gb: memory for key-value states kept for reuse; None takes a tenth of what is
            free, 0 keeps none.
        executor: thread that runs the model, shared by policies on one device; by default its own.
        adapter: peft adapter to activate before each forward, so that policies can share one base.
        name: name of the policy, recorded in each ``Generation``.
        version: optimiser steps the weights have seen.
        batch_wait: seconds without a new request after which the waiting ones are started.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | Any,
        tokenizer: Any = None,
        *,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        device: str = "auto",
        max_batch: int = 64,
        prefix_cache_gb: float | None = None,
        executor: DeviceExecutor | None = None,
        adapter: str | None = None,
        name: str | None = None,
        version: int = 0,
        batch_wait: float = 0.002,
    ) -> None:
        require("local", "torch", "transformers")
        import torch

        from experiential.llm.engine import Engine
        from experiential.llm.forward import ForwardPass, LLMStats
        from experiential.llm.states import PrefixCache

        if max_batch <= 0 or batch_wait < 0:
            raise ValueError(
                f"Expected max_batch > 0 and batch_wait >= 0, got {max_batch} and {batch_wait}"
            )
        if isinstance(model, str):
            from experiential.llm.models import load_model

            settings = ModelSettings(name=model, dtype=dtype, device=device)
            self.model, found = load_model(settings, merge=False)
            self.tokenizer = found if tokenizer is None else tokenizer
        elif tokenizer is None:
            raise ValueError("Expected a tokenizer with a loaded model, got None; pass tokenizer=")
        else:
            self.model, self.tokenizer = model, tokenizer
        self.tokenizer.padding_side = "left"
        self.name = name or (model if isinstance(model, str) else type(model).__name__)
        self.version = version
        self.adapter = adapter
        self.stats = LLMStats()
        self.executor = executor or DeviceExecutor(self.name)
        self._owns_executor = executor is None
        self._epoch = 0
        self._closed = False
        listed: Any = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        listed = [*listed] if isinstance(listed, list) else [listed]
        ends = {self.tokenizer.eos_token_id, *listed} - {None}
        if not ends:
            raise BackendError(
                "Expected a tokenizer or model with an end-of-turn token, got none; set"
                " tokenizer.eos_token"
            )
        self._eos = frozenset[int](ends)
        self._stops = StopFinder(self.tokenizer)
        self._tries = lru_cache(maxsize=1024)(partial(ChoiceTrie, tokenizer=self.tokenizer))
        self._random = torch.Generator()
        self._random.seed()
        forward = ForwardPass(self.model, adapter=adapter, stats=self.stats)
        self._context, self._vocabulary = forward.context, forward.vocabulary
        self.encode = PromptEncoder(self.tokenizer, self.name, self._vocabulary)
        self._engine = Engine(
            forward,
            self.executor,
            max_batch=max_batch,
            batch_wait=batch_wait,
            cache=PrefixCache(forward.layers, prefix_cache_gb),
            version=lambda: (self.version, self._epoch),
        )

    @cached_property
    def schemas(self) -> Schemas:
        """Return the compiler of JSON schemas; the first call takes about a second."""
        return Schemas(self.tokenizer, self._vocabulary)

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response; concurrent calls, from any event loops, are decoded together."""
        import torch

        if self._closed:
            raise BackendError(f"Expected an open backend, got {self.name!r} after close()")
        sampling = sampling or SamplingParams()
        ids = self.encode(prompt)
        trie = schema = written = None
        if sampling.choices is not None and sampling.pattern is None:
            trie = self._tries(sampling.choices)
        elif (written := restriction(sampling)) is not None:
            schema = self.schemas.start(written)
        if not ids:
            raise BackendError("Expected a prompt of at least one token, got an empty one")
        limit, needed = sampling.max_tokens, 1 if trie is None else trie.longest
        if self._context is not None:
            if len(ids) + needed > self._context:
                raise ContextError(
                    f"Expected prompt and response to fit the context of {self._context} tokens,"
                    f" got a prompt of {len(ids)} tokens and at least {needed} to generate; shorten"
                    " the prompt"
                )
            limit = min(limit, self._context - len(ids))
        source = self._random  # a seed has a source of its own, so that no other request draws
        if sampling.seed is not None:
            source = torch.Generator().manual_seed(sampling.seed % 2**63)
        request = Request(
            ids,
            sampling,
            limit,
            self._eos,
            self._stops,
            lambda: torch.rand((), dtype=torch.float64, generator=source).item(),
            None if trie is None else trie.root,
            schema,
        )
        if request.finish is None:
            self._engine.submit(request)
            await request.future
        else:  # every token was forced, so the model has nothing to do
            request.version = self.version
        assert request.finish is not None
        self.stats.requests += 1
        self.stats.prompt_tokens += len(ids)
        self.stats.generated_tokens += len(request.response)
        return Generation(
            text=request.text(),
            prompt_ids=ids,
            response_ids=tuple(request.response),
            logprobs=tuple(request.logprobs),
            allowed=tuple(request.allowed) if schema is not None or any(request.allowed) else None,
            json_schema=written,
            policy=self.name,
            policy_version=request.version,
            finish_reason=request.finish,
            temperature=sampling.temperature or 1.0,
        )

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Start the requests made in the block as one batch, when it ends."""
        return self._engine.together()

    def weights_changed(self, version: int) -> None:
        """Set the version of new weights; key-value states of the old ones are not used again."""
        self.version = version
        self._epoch += 1

    def forget(self) -> None:
        """Drop the key-value states of past prompts; call this on the executor's thread."""
        self._engine.cache.clear()

    def close(self) -> None:
        """Refuse further requests and end an executor of its own; safe to call twice."""
        self._closed = True
        if self._owns_executor:
            self.executor.close()
            self._engine.cache.clear()
        else:
            with contextlib.suppress(BackendError):  # a shared executor that is closed already
                self.executor.submit(self._engine.cache.clear)
